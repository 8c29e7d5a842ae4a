"""Draws answers to held-out prompts from π_ref, the policy and the Gibbs yardstick, and measures each of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from private_rlhf.core import atomic
from private_rlhf.data.render import Prompt, Renderer, plain_prompt
from private_rlhf.lm.distributed import is_sharded, keep_gathered, largest
from private_rlhf.lm.drawing import Engine
from private_rlhf.lm.generate import Sampling, sample_key
from private_rlhf.lm.kernels.token_terms import token_kl
from private_rlhf.lm.logprobs import response_forward, token_batches
from private_rlhf.lm.numerics import precision
from private_rlhf.lm.rows import sharing_of
from private_rlhf.reward_models.scorer import RewardScorer

LEAST_CENTRING = 8
KL_TEXTS = 16
"""Texts per forward pass where π and π_ref are compared over the whole vocabulary."""
Truth = Callable[[str, str], float]


@dataclass(frozen=True)
class Answer:
    """One sampled answer: text, tokens, r* (None where unknown), r̄, r̂ and KL(π‖π_ref) along it in nats."""

    text: str
    tokens: int
    true_reward: float | None
    reward: float
    pessimistic_reward: float
    kl: float


@dataclass(frozen=True)
class PromptResult:
    """All answers to one prompt; `candidates` are N draws of π_ref for the Gibbs policy."""

    index: int
    prompt: Prompt
    reference: list[Answer]
    policy: list[Answer]
    candidates: list[Answer]


def once(
    path: Path, measure: Callable[[], list[PromptResult]], together: torch.device | None = None
) -> list[PromptResult]:
    """Results that an interrupted stage left in `path`; otherwise those of `measure`, saved there at once.

    together: the device where `measure` needs every process; then all of them measure if one has no results.
    """
    missing = not path.is_file()
    if not (missing if together is None else largest(int(missing), together)):
        rows, groups = json.loads(path.read_text(encoding="utf-8")), ("reference", "policy", "candidates")
        return [
            PromptResult(**row | {name: [Answer(**answer) for answer in row[name]] for name in groups}) for row in rows
        ]
    results = measure()
    atomic.write_json(path, [asdict(result) for result in results])
    return results


@dataclass
class Sampler:
    """Draws answers and scores them, in the numeric context of training. policy, reference: causal LMs in evaluation
    mode, with one `renderer`. truth: r*(prompt, response), or None. sampling: as PPO draws; KL is at its temperature.
    engine: draws from both. gather_once: split weights stay whole while answers are drawn. Where they are split over
    processes, every one calls `measure`, also without prompts."""

    accelerator: Accelerator
    policy: Any
    reference: Any
    renderer: Renderer
    scorer: RewardScorer
    truth: Truth | None
    sampling: Sampling
    seed: int
    engine: Engine
    gather_once: bool = True

    def __post_init__(self) -> None:
        self.together = is_sharded(self.policy)

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest: that weights were split, and who the servers are, where either is so."""
        servers = self.engine.summary()
        return ({"split_weights": True} if self.together else {}) | ({"engine": servers} if servers else {})

    def _bar(self, label: str) -> str | None:
        """The label where this process shows bars."""
        return label if self.accelerator.is_main_process else None

    def measure(
        self, prompts: Sequence[tuple[int, Prompt]], samples_per_prompt: int, candidates: int
    ) -> list[PromptResult]:
        """Results for (index, prompt) pairs; they depend on index and prompt, not on how prompts are sharded."""
        if not prompts and not self.together:  # more processes than prompts
            return []
        least = LEAST_CENTRING if self.scorer.use_bonus else 1  # Γ is centred with them
        candidate_rows = self._draw(self.reference, prompts, max(candidates, least), "candidate", "candidates of π_ref")
        features = self._centre(prompts, candidate_rows)
        reference = self._draw(self.reference, prompts, samples_per_prompt, "reference", "answers of π_ref")
        policy = self._draw(self.policy, prompts, samples_per_prompt, "policy", "answers of the policy")
        groups = [self._answers(prompts, reference), self._answers(prompts, policy, kl=True),
                  self._answers(prompts, candidate_rows, features)]  # fmt: skip
        return [
            PromptResult(index, prompt, theirs, ours, others[:candidates])
            for (index, prompt), theirs, ours, others in zip(prompts, *groups, strict=True)
        ]

    def _draw(
        self, model: Any, prompts: Sequence[tuple[int, Prompt]], count: int, purpose: str, label: str
    ) -> list[list[list[int]]]:
        """`count` answers per prompt as token ids."""
        ids = [self.renderer.prompt_ids(prompt) for _, prompt in prompts for _ in range(count)]
        keys = [sample_key(self.seed, "evaluate", purpose, index, k) for index, _ in prompts for k in range(count)]
        with keep_gathered(self.accelerator, model, self.gather_once):
            flat = self.engine.draw(model, ids, keys, self.sampling, model is self.reference, self._bar(label))
        return [flat[start : start + count] for start in range(0, len(flat), count)]

    def _centre(self, prompts: Sequence[tuple[int, Prompt]], samples: list[list[list[int]]]) -> torch.Tensor | None:
        """Centres Γ, where it is used, with the draws of π_ref; returns their features."""
        if not self.scorer.use_bonus:
            return None
        repeated = [prompt for (_, prompt), rows in zip(prompts, samples, strict=True) for _ in rows]
        texts = [self.renderer.text(row) for rows in samples for row in rows]
        features = self.scorer.features(repeated, texts, self._bar("scoring"))
        parts = features.split([len(rows) for rows in samples])
        for (_, prompt), drawn in zip(prompts, parts, strict=True):
            if not self.scorer.has_reference(prompt):
                self.scorer.add_reference(prompt, drawn)
        return features

    def _answers(self, prompts: Sequence[tuple[int, Prompt]], samples: list[list[list[int]]],
                 features: torch.Tensor | None = None, kl: bool = False) -> list[list[Answer]]:  # fmt: skip
        """Scores of every answer, from its features where they are known; KL along it where asked for, else 0."""
        repeated = [prompt for (_, prompt), group in zip(prompts, samples, strict=True) for _ in group]
        rows = [row for group in samples for row in group]
        texts = [self.renderer.text(row) for row in rows]
        scores = (self.scorer.score(repeated, texts, self._bar("scoring")) if features is None
                  else self.scorer.score_features(repeated, features))  # fmt: skip
        kls = self._kl(repeated, rows) if kl else [0.0] * len(rows)
        truths = [None if self.truth is None else self.truth(plain_prompt(prompt), text)
                  for prompt, text in zip(repeated, texts, strict=True)]  # fmt: skip
        columns = (texts, map(len, rows), truths, scores.reward.tolist(), scores.pessimistic.tolist(), kls)
        flat = (Answer(*row) for row in zip(*columns, strict=True))
        return [list(islice(flat, len(group))) for group in samples]

    @torch.no_grad()
    def _kl(self, prompts: Sequence[Prompt], rows: Sequence[list[int]]) -> list[float]:
        """Σ_t KL(π(·|context) ‖ π_ref(·|context)) along each answer, nats."""
        device, pad = next(self.policy.parameters()).device, self.renderer.tokenizer.pad_token_id
        texts = [(self.renderer.prompt_ids(prompt), row) for prompt, row in zip(prompts, rows, strict=True)]
        result = [0.0] * len(rows)
        sharing = sharing_of(self.policy, self.reference)
        for indices, batch in token_batches(texts, pad, KL_TEXTS, device, sharing, self.together):
            with precision(self.accelerator):
                logits, _ = response_forward(self.policy, batch)
                reference_logits, _ = response_forward(self.reference, batch)
            summed = batch.spread(token_kl(logits, reference_logits, self.sampling.temperature)).sum(dim=1)
            for index, value in zip(indices, summed[: len(indices)].tolist(), strict=True):
                result[index] = value
        return result
