"""The pairs that may still be asked: of two different texts, neither blank, and each of them once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OpenPairs:
    """Pairs of N answers to each of M prompts that were not asked.

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

    def copy(self) -> OpenPairs:
        """The same pairs, closed apart from these."""
        return OpenPairs(self.first, self.free.clone())

    def close(self, picked: Tensor) -> None:
        """Takes out pairs that are asked, (n, 3) int64: prompt, one answer, another."""
        prompt, one, other = picked.T
        one, other = self.first[prompt, one], self.first[prompt, other]
        self.free[prompt, one, other] = self.free[prompt, other, one] = False

    def close_texts(
        self, prompts: Sequence[object], texts: Sequence[Sequence[object]], asked: Iterable[tuple[object, ...]]
    ) -> None:
        """Takes out pairs that were asked elsewhere, as (prompt, one text, another, …). prompts, texts: of the pool, in
        the form of `asked`."""
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
