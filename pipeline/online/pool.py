"""The pool of candidates that rounds ask about: drawn in blocks by all processes, kept as resume state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.world import World
from private_rlhf.data.render import Prompt
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.questions import Question, make_question
from private_rlhf.online.candidates import Candidates, CandidateSampler, candidate_key
from private_rlhf.online.open_pairs import OpenPairs
from private_rlhf.privacy.records import Text
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
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
    sampler: CandidateSampler, prompts: list[Prompt], count: int, keep: Path, seed: int, world: World
) -> None:
    """Draw the candidates of this process's blocks of prompts, and keep each block at `block_path`; files that exist
    stay. The last name of `keep` is also the purpose of the noise keys.
    """
    key = candidate_key(seed, keep.name)
    for start in range(0, len(prompts), BLOCK):
        path = block_path(keep, start)
        if start // BLOCK % world.size != world.rank or path.is_file():
            continue
        block = prompts[start : start + BLOCK]
        drawn = sampler.draw(block, count, lambda i, k, start=start: key(start + i, k))  # type: ignore[misc]
        with atomic.new_file(path) as temporary:
            tensors = {"features": drawn.features, "log_ratio": drawn.log_ratio}
            save_file(tensors, temporary, {"texts": json.dumps(drawn.texts)})


def block_path(keep: Path, start: int) -> Path:
    """The file of the block that begins with prompt `start`: KEEP-NNNN.safetensors."""
    return keep.with_name(f"{keep.name}-{start // BLOCK:04d}.safetensors")


def load_blocks(prompts: list[Prompt], keep: Path) -> Candidates:
    """The candidates that all processes drew."""
    texts: list[list[str]] = []
    features, log_ratio = [], []
    for start in range(0, len(prompts), BLOCK):
        with safe_open(block_path(keep, start), "pt") as file:
            texts += json.loads(file.metadata()["texts"])
            features.append(file.get_tensor("features"))
            log_ratio.append(file.get_tensor("log_ratio"))
    return Candidates(prompts, texts, torch.cat(features), torch.cat(log_ratio))


def candidate_basis(drawn: Candidates, components: int | None, blocks: int) -> FeatureBasis:
    """The leading directions in which candidates differ; components: their number, None for at most 128."""
    even = drawn.features.shape[1] // 2 * 2
    sides = (drawn.features[:, place:even:2].flatten(0, 1) for place in (0, 1))
    components = min(components or COMPONENTS, drawn.features.shape[-1])
    return pair_basis(*sides, num_components=components, whiten=False, blocks=blocks)


def make_pool(drawn: Candidates, basis: FeatureBasis, known: bool) -> Pool:
    """Candidates in a basis. known: with r* of the embedded task, for what is measured beside."""
    truth = None
    if known:
        pairs = zip(drawn.prompts, drawn.texts, strict=True)
        rows = [[true_reward(str(prompt), text) for text in texts] for prompt, texts in pairs]
        truth = torch.tensor(rows, dtype=torch.float64)
    return Pool(drawn, basis.coordinates(drawn.features), truth)
