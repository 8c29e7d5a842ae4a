"""A problem small enough to enumerate: a random Llama with 8 tokens, responses of at most 2, known rewards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import PolicyWithValue, response_forward, token_batch
from private_rlhf.lm.models import add_lora
from private_rlhf.recipe import LoraSettings, PpoConfig
from private_rlhf.reward_models.external import ExtraReward
from private_rlhf.reward_models.scorer import Scores
from private_rlhf.rl.ppo_trainer import PpoTrainer
from transformers import LlamaForCausalLM

PAD, EOS, VOCABULARY, CAP = 0, 1, 8, 2


@dataclass(frozen=True)
class StubRenderer:
    """Prompts and responses are written as token ids: "3 4"."""

    max_response_tokens: int = CAP
    max_prompt_tokens: int = 4
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS))

    def prompt_ids(self, prompt: str) -> list[int]:
        return [int(word) for word in prompt.split()]

    def learnt_ids(self, response: str) -> list[int]:
        return self.prompt_ids(response)

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclass
class Problem:
    """π_ref, prompts and a reward for every response to each of them."""

    model: LlamaForCausalLM
    prompts: list[str]
    rewards: dict[tuple[str, str], float]
    renderer: StubRenderer = field(default_factory=StubRenderer)
    references: dict[str, torch.Tensor] | None = None
    """None: the scorer needs no reference completions; else those it was given, by prompt."""
    extra_rewards: list[ExtraReward] = field(default_factory=list)
    together: bool = False

    @property
    def responses(self) -> list[list[int]]:
        """All 57: end-of-turn at once, or one other token and then any."""
        return [[EOS], *([a, b] for a, b in itertools.product(range(VOCABULARY), repeat=2) if a != EOS)]

    # --- the scorer that PPO sees ---

    def has_reference(self, prompt: str) -> bool:
        return self.references is None or prompt in self.references

    def features(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """(B, 1): the reward itself."""
        return torch.tensor([[self.rewards[pair]] for pair in zip(prompts, responses, strict=True)])

    def add_reference(self, prompt: str, features: torch.Tensor) -> None:
        assert self.references is not None
        self.references[prompt] = features

    def score_features(self, prompts: Sequence[str], features: torch.Tensor) -> Scores:
        assert self.references is not None
        baseline = torch.stack([self.references[prompt].mean() for prompt in prompts])
        return Scores(features[:, 0], torch.zeros(len(features)), baseline)

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        reward = torch.tensor([self.rewards[prompt, text] for prompt, text in zip(prompts, responses, strict=True)])
        return Scores(reward, torch.zeros(len(reward)), torch.zeros(len(reward)))

    # --- exact answers ---

    def reward_vector(self, prompt: str) -> torch.Tensor:
        return torch.tensor([self.rewards[prompt, self.renderer.text(r)] for r in self.responses]).double()

    @torch.no_grad()
    def log_probabilities(self, model: Any, prompt: str) -> torch.Tensor:
        """(57,) float64, log π(response | prompt)."""
        rows = self.responses
        batch = token_batch([self.renderer.prompt_ids(prompt)] * len(rows), rows, PAD, torch.device("cpu"))
        logits, _ = response_forward(model, batch)
        return batch.spread(token_logprobs(logits, batch.tokens)).double().sum(dim=1)

    def gain(self, policy: Any, kl_coef: float) -> float:
        """(J(π) − J(π_ref)) / (J(Gibbs) − J(π_ref)), exactly, summed over the prompts."""
        reached = possible = 0.0
        for prompt in self.prompts:
            reference, reward = self.log_probabilities(self.model, prompt), self.reward_vector(prompt)
            current = self.log_probabilities(policy, prompt)
            base = (reference.exp() * reward).sum()
            reached += float((current.exp() * (reward - kl_coef * (current - reference))).sum() - base)
            possible += float(kl_coef * (reference + reward / kl_coef).logsumexp(0) - base)
        return reached / possible

    # --- a trainer ---

    def trainer(
        self,
        lora: bool | LoraSettings = True,
        seed: int = 0,
        rank: int = 8,
        accelerator: Callable[[], Accelerator] = lambda: Accelerator(cpu=True),
        **settings: Any,
    ) -> PpoTrainer:
        """A fresh one from π_ref; the problem's own model stays as it is."""
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        adapter = lora if isinstance(lora, LoraSettings) else LoraSettings(rank=rank) if lora else None
        config = PpoConfig(**{"lora": adapter, "entropy_coef": 0.0, **settings})
        base = copy.deepcopy(self.model)
        policy = add_lora(base, config.lora, seed) if config.lora else base.requires_grad_(True)
        reference = None if config.lora else copy.deepcopy(self.model)
        model = PolicyWithValue(policy, self.model.config.hidden_size).eval()
        scorer: Any = self
        renderer: Any = self.renderer
        parts = (model, reference, scorer, renderer, self.prompts, config, seed, self.extra_rewards)
        return PpoTrainer(accelerator(), *parts)


def make_problem() -> Problem:
    """Two prompts of different lengths; π_ref is random and far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(VOCABULARY, EOS, PAD)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    made = Problem(model, ["3 4", "5 6 7 2"], {})
    for prompt in made.prompts:
        values = torch.randn(len(made.responses), generator=generator)
        for response, value in zip(made.responses, values.tolist(), strict=True):
            made.rewards[prompt, made.renderer.text(response)] = value
    return made
