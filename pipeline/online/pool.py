"""The pool of candidate answers that rounds ask about, its pairs that are still open, and those that were answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.core.world import World
from private_rlhf.data.release import Release
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.questions import Question, make_question
from private_rlhf.lm.drawing import Engine, TransformersEngine
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.generate import Sampling, sample_key
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.privacy.mechanism import LevelledResponse, Mechanism
from private_rlhf.privacy.records import Text
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
from private_rlhf.reward_models.model import RewardModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 16  # prompts whose candidates are drawn and kept together
COMPONENTS = 128


@dataclass(frozen=True)
class Candidates:
    """Of M prompts N answers each: `texts` M lists of N, `tokens` as drawn, `features` (M, N, d) float32 last-token
    features of the texts, and log_ratio (M, N) float32, log π_ref/π of the policy π that drew the tokens, nats; 0 where
    that is π_ref."""

    prompts: list[Prompt]
    texts: list[list[str]]
    tokens: list[list[list[int]]]
    features: torch.Tensor
    log_ratio: torch.Tensor


@dataclass(frozen=True)
class CandidateSampler:
    """A policy whose answers are candidates, and the backbone that gives their features.

    policy: causal LM in evaluation mode. batch_size: of sampling and of features. reference: π_ref; None where the
    policy is. progress: show bars. engine: draws; None for the policy itself. temperature, top_p: as in `Sampling`.
    """

    policy: Any
    backbone: RewardModel
    renderer: Renderer
    batch_size: int
    reference: Any | None = None
    progress: bool = False
    engine: Engine | None = None
    temperature: float = 1.0
    top_p: float = 1.0

    def draw(self, prompts: Sequence[Prompt], count: int, key: Callable[[int, int], int]) -> Candidates:
        """`count` answers of the policy to each prompt. key: noise key of answer k to prompt i; equal keys give equal
        answers, however prompts are spread over processes."""
        renderer, policy = self.renderer, self.policy
        ids = [renderer.prompt_ids(prompt) for prompt in prompts for _ in range(count)]
        engine = self.engine or TransformersEngine(None, renderer.tokenizer, self.batch_size)
        rows = engine.draw(
            policy,
            ids,
            [key(i, k) for i in range(len(prompts)) for k in range(count)],
            Sampling(renderer.max_response_tokens, self.temperature, self.top_p),
            at_reference=self.reference is None,
            progress="candidates" if self.progress else None,
        )
        flat = [renderer.text(row) for row in rows]
        whole = [prompt + renderer.response_ids(text) for prompt, text in zip(ids, flat, strict=True)]
        features = self.features(whole, "their features" if self.progress else None).unflatten(0, (-1, count))
        log_ratio = self._log_ratio(list(zip(ids, rows, strict=True))).unflatten(0, (-1, count))
        starts = range(0, len(rows), count)
        texts, tokens = [flat[i : i + count] for i in starts], [rows[i : i + count] for i in starts]
        return Candidates(list(prompts), texts, tokens, features, log_ratio)

    def features(self, rows: Sequence[list[int]], progress: str | None = None) -> torch.Tensor:
        """(n, d) float32 last-token features of whole texts as token ids. progress: label of a bar."""
        pad, device = self.renderer.tokenizer.pad_token_id, self.backbone.weight.device
        return extract_features(
            self.backbone, rows, pad_token_id=pad, batch_size=self.batch_size, device=device, progress=progress
        )

    def _log_ratio(self, pairs: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        """(n,) float32: log π_ref/π of responses to prompts, both as token ids."""
        if self.reference is None:
            return torch.zeros(len(pairs))
        how: dict[str, Any] = {"pad_token_id": self.renderer.tokenizer.pad_token_id, "batch_size": self.batch_size}
        how |= {"device": self.backbone.weight.device, "temperature": self.temperature}
        ours, theirs = (mean_logprobs(model, pairs, **how) for model in (self.policy, self.reference))
        return torch.tensor([len(response) for _, response in pairs]) * torch.from_numpy(theirs - ours).float()


def candidate_key(seed: int, purpose: str) -> Callable[[int, int], int]:
    """Noise keys of a pool: a function of the seed, the purpose, the prompt's number and the answer's."""
    return lambda prompt, answer: sample_key(seed, "online", purpose, prompt, answer)


@dataclass(frozen=True)
class OpenPairs:
    """Pairs of N answers to each of M prompts that may still be asked: of two different texts, neither blank.

    first: (M, N) int64, the number of the first answer to the prompt with the same text: one text is one answer.
    free: (M, N, N) bool, symmetric; True only between first answers. `close` changes it.
    """

    first: Tensor
    free: Tensor

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]]) -> OpenPairs:
        """All pairs of M lists of N texts."""
        first = torch.tensor([[answers.index(text) for text in answers] for answers in texts])
        filled = torch.tensor([[bool(text.strip()) for text in answers] for answers in texts])
        return cls.among(first, filled)

    @classmethod
    def among(cls, first: Tensor, filled: Tensor | None = None) -> OpenPairs:
        """All pairs of answers, by the numbers of `OpenPairs.first`; filled: (M, N) bool, False for a blank answer."""
        number = torch.arange(first.shape[1])
        usable = first == number if filled is None else (first == number) & filled
        return cls(first, usable[:, :, None] & usable[:, None, :] & ~torch.eye(len(number), dtype=torch.bool))

    def __len__(self) -> int:
        return int(self.free.sum()) // 2

    def close(self, picked: Tensor) -> None:
        """Remove pairs that are asked, (n, 3) int64: prompt, one answer, another."""
        prompt, one, other = picked.T
        one, other = self.first[prompt, one], self.first[prompt, other]
        self.free[prompt, one, other] = self.free[prompt, other, one] = False

    def close_texts(
        self, prompts: Sequence[object], texts: Sequence[Sequence[object]], asked: Iterable[tuple[object, ...]]
    ) -> None:
        """Remove pairs that were asked elsewhere, (prompt, one text, another, …). prompts, texts: the pool's, as in
        `asked`."""
        places = {repr(prompt): place for place, prompt in enumerate(prompts)}
        for prompt, one, other, *_ in asked:
            place = places.get(repr(prompt))
            if place is not None and one in texts[place] and other in texts[place]:
                self.close(torch.tensor([[place, texts[place].index(one), texts[place].index(other)]]))

    def merged(self, weights: Tensor) -> Tensor:
        """Weights (M, N) with those of equal texts added up at the first of them."""
        return torch.zeros_like(weights).scatter_add(1, self.first, weights)

    def listed(self) -> Tensor:
        """(n, 3) int64: every open pair, in order."""
        return self.free.triu(diagonal=1).nonzero()


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

    def questions(self, picked: torch.Tensor, name: str) -> list[Question]:
        """The questions about picked pairs, (n, 3) int64: prompt, one answer, another. name: begins their ids."""
        questions = []
        for number, (prompt, *sides) in enumerate(picked.tolist()):
            text: Any = self.drawn.prompts[prompt]
            one, other = (_like(text, self.drawn.texts[prompt][side]) for side in sides)
            questions.append(make_question(f"{name}-{number:05d}", text, one, other))
        return questions

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
    """Draw this process's blocks of candidates into files at `block_path`; files that exist stay. The last name of
    `keep` is also the purpose of the noise keys."""
    key = candidate_key(seed, keep.name)
    for start in range(0, len(prompts), BLOCK):
        path = block_path(keep, start)
        if start // BLOCK % world.size != world.rank or path.is_file():
            continue
        block = prompts[start : start + BLOCK]
        drawn = sampler.draw(block, count, lambda i, k, start=start: key(start + i, k))  # type: ignore[misc]
        with atomic.new_file(path) as temporary:
            tensors = {"features": drawn.features, "log_ratio": drawn.log_ratio}
            save_file(tensors, temporary, {"texts": json.dumps(drawn.texts), "tokens": json.dumps(drawn.tokens)})


def block_path(keep: Path, start: int) -> Path:
    """The file of the block that begins with prompt `start`: KEEP-NNNN.safetensors."""
    return keep.with_name(f"{keep.name}-{start // BLOCK:04d}.safetensors")


def load_blocks(prompts: list[Prompt], keep: Path, renderer: Renderer) -> Candidates:
    """The candidates that all processes drew; of a block of an earlier program the tokens are those of its texts."""
    texts: list[list[str]] = []
    tokens: list[list[list[int]]] = []
    features, log_ratio = [], []
    for start in range(0, len(prompts), BLOCK):
        with safe_open(block_path(keep, start), "pt") as file:
            stored = {name: json.loads(value) for name, value in file.metadata().items()}
            texts += stored["texts"]
            tokens += stored.get("tokens") or [[renderer.response_ids(each) for each in row] for row in stored["texts"]]
            features.append(file.get_tensor("features"))
            log_ratio.append(file.get_tensor("log_ratio"))
    return Candidates(prompts, texts, tokens, torch.cat(features), torch.cat(log_ratio))


def candidate_basis(drawn: Candidates, components: int | None, blocks: int) -> FeatureBasis:
    """The leading directions in which candidates differ; components: their number, None for at most 128."""
    even = drawn.features.shape[1] // 2 * 2
    sides = (drawn.features[:, place:even:2].flatten(0, 1) for place in (0, 1))
    components = min(components or COMPONENTS, drawn.features.shape[-1])
    return pair_basis(*sides, num_components=components, whiten=False, blocks=blocks)


def make_pool(drawn: Candidates, basis: FeatureBasis, known: bool) -> Pool:
    """Candidates in a basis. known: with r* of the embedded task, by which J is measured."""
    truth = None
    if known:
        pairs = zip(drawn.prompts, drawn.texts, strict=True)
        rows = [[true_reward(str(prompt), text) for text in texts] for prompt, texts in pairs]
        truth = torch.tensor(rows, dtype=torch.float64)
    return Pool(drawn, basis.coordinates(drawn.features), truth)


@dataclass(frozen=True)
class AnsweredPairs:
    """Answered pairs: rows (prompt, one, other, z), coordinates one and other (n, k), z (n,) +1 for `one`."""

    rows: list[tuple[Text, Text, Text, int]]
    one: torch.Tensor
    other: torch.Tensor
    z: torch.Tensor
    noise: LabelNoise | LevelledNoise


def noise_at(mechanism: Mechanism, epsilons: Sequence[float | None] = ()) -> LabelNoise | LevelledNoise:
    """The noise of a mechanism's labels; epsilons: of each of them, where it has several levels."""
    if isinstance(mechanism, LevelledResponse):
        return LevelledNoise.of([level.epsilon for level in mechanism.levels], epsilons)
    return mechanism.noise


def answered_pairs(bundle: Release, sampler: CandidateSampler, basis: FeatureBasis) -> AnsweredPairs:
    """Released pairs in the coordinates of a basis; `one` is the answer that z prefers."""
    pairs = bundle.rows
    texts = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    renderer = sampler.renderer
    features = sampler.features(
        [renderer.prompt_ids(prompt) + renderer.response_ids(text) for prompt, text in texts], "earlier answers"
    )
    one, other = basis.coordinates(features).reshape(len(pairs), 2, -1).unbind(dim=1)
    rows = [(pair.prompt, pair.chosen, pair.rejected, 1) for pair in pairs]
    return AnsweredPairs(rows, one, other, torch.ones(len(pairs), dtype=torch.float64), bundle.manifest.noise_of(pairs))
