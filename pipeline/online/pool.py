"""The pool of candidates that rounds ask about: drawn in blocks by all processes, kept as resume state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.questions import Question, make_question
from private_rlhf.online.candidates import Candidates, candidate_key, draw_candidates
from private_rlhf.online.open_pairs import OpenPairs
from private_rlhf.privacy.records import Text
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.stages.context import StageContext
from safetensors import safe_open
from safetensors.torch import save_file

BLOCK = 16  # prompts whose candidates are drawn and kept together
COMPONENTS = 128


@dataclass(frozen=True)
class Pool:
    """Candidates, their coordinates x (M, N, k) float64 in the basis of the fit, and r* (M, N) where it is known."""

    drawn: Candidates
    x: torch.Tensor
    truth: torch.Tensor | None

    @property
    def log_ratio(self) -> torch.Tensor:
        """log π_ref/π (M, N) float64 of the policy that gave them."""
        return self.drawn.log_ratio.double()

    def gain(self, policy: torch.Tensor, kl_coef: float) -> float:
        """J = E[r*] − kl_coef·KL of a policy (M, N) over the candidates, less π_ref's."""
        assert self.truth is not None
        reference = torch.softmax(self.log_ratio, dim=-1)
        reward = ((policy - reference) * self.truth).sum(dim=1).mean()
        kl = (torch.xlogy(policy, policy) - torch.xlogy(policy, reference)).sum(dim=1).mean()
        return float(reward) - kl_coef * float(kl)

    def best(self, kl_coef: float) -> float:
        """The gain of π* among the candidates."""
        assert self.truth is not None
        return self.gain(torch.softmax(self.truth / kl_coef + self.log_ratio, dim=-1), kl_coef)

    def questions(self, picked: torch.Tensor, name: str) -> list[Question]:
        """picked: (n, 3) prompt, one answer, another."""
        found = []
        for number, (prompt, *sides) in enumerate(picked.tolist()):
            text: Any = self.drawn.prompts[prompt]
            one, other = (_like(text, self.drawn.texts[prompt][side]) for side in sides)
            found.append(make_question(f"{name}-{number:05d}", text, one, other))
        return found

    def open_pairs(self, asked: Iterable[tuple[Any, ...]] = ()) -> OpenPairs:
        """All pairs of the candidates but those asked already, as (prompt, one response, another, …)."""
        pairs = OpenPairs.of(self.drawn.texts)
        prompts: list[Any] = list(self.drawn.prompts)
        forms = [[_like(p, text) for text in texts] for p, texts in zip(prompts, self.drawn.texts, strict=True)]
        pairs.close_texts(prompts, forms, asked)
        return pairs

    def signs(self, picked: torch.Tensor, questions: Sequence[Question]) -> torch.Tensor:
        """(n,) float64: +1 where the first picked answer is response_a."""
        texts = self.drawn.texts
        firsts = [_like(question.prompt, texts[prompt][one]) == question.response_a
                  for (prompt, one, _), question in zip(picked.tolist(), questions, strict=True)]  # fmt: skip
        return torch.tensor(firsts).double() * 2 - 1


def _like(prompt: Text, response: str) -> Text:
    """The response in the prompt's form: text, or a list of messages."""
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]


def draw_blocks(
    context: StageContext,
    policy: Any,
    reference: Any | None,
    backbone: RewardModel,
    renderer: Renderer,
    name: str,
    prompts: list[Prompt],
    count: int,
) -> None:
    """Candidates of this process's blocks of prompts, kept as resume state; those that are there stay."""
    key, size = candidate_key(context.recipe.seed, name), context.recipe.evaluate.batch_size
    for start in range(0, len(prompts), BLOCK):
        path = block_path(context, name, start)
        if start // BLOCK % context.world.size != context.world.rank or path.is_file():
            continue
        block = prompts[start : start + BLOCK]
        drawn = draw_candidates(
            policy,
            backbone,
            renderer,
            block,
            count,
            lambda i, k, start=start: key(start + i, k),  # type: ignore[misc]
            size,
            reference,
            show=context.world.main,
        )
        with atomic.new_file(path) as temporary:
            tensors = {"features": drawn.features, "log_ratio": drawn.log_ratio}
            save_file(tensors, temporary, {"texts": json.dumps(drawn.texts)})


def block_path(context: StageContext, name: str, start: int) -> Path:
    """Where a block of candidates is kept."""
    return context.checkpoints / f"{name}-{start // BLOCK:04d}.safetensors"


def load_pool(
    context: StageContext, name: str, prompts: list[Prompt], basis: FeatureBasis | None = None
) -> tuple[Pool, FeatureBasis]:
    """The candidates that all processes drew, in the leading directions in which they differ, or in a given basis."""
    drawn = load_blocks(context, name, prompts)
    if basis is None:
        even = drawn.features.shape[1] // 2 * 2
        sides = (drawn.features[:, place:even:2].flatten(0, 1) for place in (0, 1))
        components = context.recipe.reward.num_components or COMPONENTS
        components = min(components, drawn.features.shape[-1])
        blocks = context.recipe.reward.feature_blocks
        basis = pair_basis(*sides, num_components=components, whiten=False, blocks=blocks)
    return Pool(drawn, basis.coordinates(drawn.features), truth_of(drawn, context.recipe)), basis


def load_blocks(context: StageContext, name: str, prompts: list[Prompt]) -> Candidates:
    """What all processes drew."""
    texts: list[list[str]] = []
    features, log_ratio = [], []
    for start in range(0, len(prompts), BLOCK):
        path = block_path(context, name, start)
        with safe_open(path, "pt") as file:
            texts += json.loads(file.metadata()["texts"])
            features.append(file.get_tensor("features"))
            log_ratio.append(file.get_tensor("log_ratio"))
    return Candidates(prompts, texts, torch.cat(features), torch.cat(log_ratio))


def truth_of(drawn: Candidates, recipe: Recipe) -> torch.Tensor | None:
    """r* of the candidates, for what is measured beside; where answers come from it."""
    if recipe.online is None or not recipe.online.simulated:
        return None
    rows = [[true_reward(str(p), text) for text in texts] for p, texts in zip(drawn.prompts, drawn.texts, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)
