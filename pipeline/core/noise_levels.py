"""The noise of labels that each have an ε of their own, one of the levels that their release declares.

n labels; arrays are (n,) float64 in the order of the labels. Each label went through the randomised response of
`core.noise` at its level, and the likelihood, the debiased share and their errors are exact for any mix of levels.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import FEWEST, LabelNoise, Noise

if TYPE_CHECKING:  # it loads scipy
    from private_rlhf.core.stats import Estimate

Z_SQUARED = 3.8414588206941245  # of the normal quantile at 0.975, for 95 % intervals


@dataclass(frozen=True, eq=False)
class LevelledNoise:
    """levels: of which each label has one, by rising ε. level: (n,) the numbers of the labels' levels."""

    levels: tuple[LabelNoise, ...]
    level: np.ndarray

    @classmethod
    def of(cls, levels: Sequence[float], epsilons: Sequence[float | None]) -> LevelledNoise:
        """The noise of labels with these ε. ValueError for an ε that is not one of the levels."""
        number: dict[float | None, int] = {epsilon: place for place, epsilon in enumerate(levels)}
        if unknown := [epsilon for epsilon in epsilons if epsilon not in number]:
            raise ValueError(f"the ε of a label must be one of {', '.join(map(str, levels))}, got {unknown[0]}")
        return cls(tuple(map(LabelNoise.of, levels)), np.array([number[e] for e in epsilons], np.int64))

    def __len__(self) -> int:
        return len(self.level)

    def rows(self, rows: Any) -> LevelledNoise:
        """The noise of some of the labels: their numbers, or a mask (n,)."""
        return LevelledNoise(self.levels, self.level[np.asarray(rows)])

    @property
    def public(self) -> bool:
        """False: no level is infinite."""
        return False

    @property
    def epsilon(self) -> float:
        """The largest level, which bounds what any label tells."""
        return self.levels[-1].epsilon

    @cached_property
    def factor(self) -> np.ndarray:
        """2α − 1 of each label, as `LabelNoise.factor`; the other arrays likewise."""
        return self._by_label("factor")

    @cached_property
    def flip_prob(self) -> np.ndarray:
        """1 − α."""
        return self._by_label("flip_prob")

    @cached_property
    def log_keep(self) -> np.ndarray:
        """log α."""
        return self._by_label("log_keep")

    @cached_property
    def log_flip(self) -> np.ndarray:
        """log(1 − α)."""
        return self._by_label("log_flip")

    @property
    def mean_factor(self) -> float:
        """√(Σ (2α − 1)²/n): the factor of one ε for which n labels carry as much at margin 0."""
        return math.sqrt(float(np.square(self.factor).mean()))

    def share(self, agrees: np.ndarray, groups: np.ndarray | None = None) -> Estimate:
        """The share of true labels that a rule gets right, as `true_share`.

        Σ f(a − (1 − α))/Σ f², f = 2α − 1: the unbiased estimate of least variance at a share of ½, whatever the mix.
        The 95 % interval holds the shares p with |estimate − p| <= 1.96 sd(p), as Wilson's, and the estimate.
        """
        from private_rlhf.core.stats import Estimate

        agrees = np.asarray(agrees, np.float64)
        total = float(np.square(self.factor).sum())
        signals = self.factor * (agrees - self.flip_prob)
        share = float(signals.sum()) / total
        count = independent_labels(signals - self.factor**2 * share, groups)
        # sd(p)² = Σ f² P(1 − P)/(Σ f²)² at P = 1 − α + f p, which is a + b (p − p²), times the design effect
        effect = len(agrees) / count
        a = effect * float((self.factor**2 * self.flip_prob * (1.0 - self.flip_prob)).sum()) / total**2
        b = effect * float((self.factor**4).sum()) / total**2
        size = 1.0 + Z_SQUARED * b
        middle = (share + Z_SQUARED * b / 2.0) / size
        half = math.sqrt(max(0.0, middle**2 - (share**2 - Z_SQUARED * a) / size))
        return Estimate(share, min(share, middle - half), max(share, middle + half), count)

    def as_json(self) -> dict[str, Any]:
        """The keys of files: those of the largest level, and how many labels each level has."""
        counts = np.bincount(self.level, minlength=len(self.levels)).tolist()
        levels = [[noise.epsilon, count] for noise, count in zip(self.levels, counts, strict=True)]
        return self.levels[-1].as_json() | {"levels": levels}

    def _by_label(self, name: str) -> np.ndarray:
        return np.array([getattr(level, name) for level in self.levels])[self.level]


def levels_text(stated: Mapping[str, Any]) -> str:
    """The ε that an entry or a guarantee states: "1", or "0.5 (40), 4 (60)" with the number of labels at each level."""
    levels = stated.get("levels")
    return ", ".join(f"{each:g} ({count})" for each, count in levels) if levels else f"{stated['epsilon']:g}"


AnyNoise = Noise | LevelledNoise  # of labels of one ε, or of an ε of each


def known_noise(noise: AnyNoise, *, allow_zero: bool = True) -> LabelNoise | LevelledNoise:
    """`LabelNoise.of`, or the noise of each label as it is."""
    return noise if isinstance(noise, LevelledNoise) else LabelNoise.of(noise, allow_zero=allow_zero)


def rows_of(noise: LabelNoise | LevelledNoise, rows: Any) -> LabelNoise | LevelledNoise:
    """The noise of some of the labels: their numbers, or a mask."""
    return noise.rows(rows) if isinstance(noise, LevelledNoise) else noise


def joined(one: LabelNoise | LevelledNoise, other: LabelNoise | LevelledNoise) -> LabelNoise | LevelledNoise:
    """The noise of labels and of others after them. UserError for labels of other levels."""
    if getattr(one, "levels", None) != getattr(other, "levels", None):
        raise UserError("labels must have one ε or the same levels, got both: keep to one release, or one store")
    if isinstance(one, LevelledNoise) and isinstance(other, LevelledNoise):
        return LevelledNoise(one.levels, np.concatenate([one.level, other.level]))
    return one


def group_numbers(keys: Iterable[Hashable]) -> np.ndarray:
    """(n,) int64: the same number for equal keys."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def independent_labels(errors: np.ndarray, groups: np.ndarray | None) -> int:
    """The number of independent labels whose mean varies as that of n labels in groups: n over the design effect.

    errors: (n,) of labels around their mean. groups: (n,) `group_numbers` of their prompts; None where all differ.
    Groups worth fewer than 12 of one size do not tell their variance: the labels of each count as one.
    """
    if groups is None or len(sizes := np.unique(groups, return_counts=True)[1]) == len(errors):
        return len(errors)
    sums, equal = np.bincount(groups, errors), len(errors) ** 2 / float(sizes @ sizes)
    if equal < FEWEST or np.allclose(errors, 0.0):
        return int(equal)
    effect = float(sums @ sums) / float(errors @ errors) * len(sizes) / (len(sizes) - 1)
    return int(len(errors) / max(1.0, effect))


def true_share(agrees: np.ndarray, noise: LabelNoise | LevelledNoise, groups: np.ndarray | None = None) -> Estimate:
    """The share of true labels that a rule gets right, from 1, ½ or 0 (n,) for each private label it agrees with.

    groups: as `independent_labels`, whose number the estimate states as n.
    """
    if isinstance(noise, LevelledNoise):
        return noise.share(agrees, groups)
    from private_rlhf.core.stats import wilson

    agrees = np.asarray(agrees, np.float64)
    wins, count = float(agrees.sum()), independent_labels(agrees - agrees.mean(), groups)
    return noise.debias(wilson(wins * count / len(agrees), count))


def mean_factor(noise: LabelNoise | LevelledNoise) -> float:
    """2α − 1; where each label has its own, the root of their mean square."""
    return noise.mean_factor if isinstance(noise, LevelledNoise) else noise.factor


def noise_from_json(stated: Mapping[str, Any]) -> LabelNoise | LevelledNoise:
    """The inverse of `as_json`, labels in the order of their levels. ValueError as `LabelNoise.from_json`."""
    largest = LabelNoise.from_json(stated)
    if "levels" not in stated:
        return largest
    levels, counts = zip(*stated["levels"], strict=True)
    return LevelledNoise(tuple(map(LabelNoise.of, levels)), np.repeat(np.arange(len(levels)), counts))
