"""The noise of labels. Every room asks `LabelNoise`; none computes α, 1 − α or 2α − 1 itself (an architecture test).

A label in {-1, +1} went through randomised response at ε (PPKL Eq. 7): it was kept with probability α, at most
e^ε/(1+e^ε), and turned round otherwise. ε = ∞ stands for public labels, released as they are: `math.inf` in the
program and null in every file. ε = 0 stands for a label that carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from private_rlhf.core.errors import UserError

if TYPE_CHECKING:  # it loads scipy
    from private_rlhf.core.stats import Estimate

LEVELS = 1 << 128
LABEL_RULE = "a label must be -1 or +1: map labels of 0 and 1 with 2*label - 1"
ROUNDING = 2.0**-50  # two floats that state one probability differ by less
HARDLY = 5.0  # ε from which odds may change by a factor of 148 or more
_UP = Context(prec=6, rounding=ROUND_CEILING)
WEAK_EPSILON = 10.0  # from here on at most one label in 22,027 is turned round


def keep_threshold(epsilon: float) -> int:
    """T = floor(tanh(epsilon/2) * 2^128), never above the real number; 0 <= T < 2^128. epsilon: finite, at least 0.

    tanh(epsilon/2) = (e^eps - 1)/(e^eps + 1) is irrational for every rational epsilon > 0, so the floor is well
    defined. 120 digits leave an error below 1e-39 after the cancellation in e^eps - 1 (at most 39 digits); 1e-30 is
    taken off for it.
    """
    if epsilon >= 100.0:  # 1 - tanh(eps/2) = 2/(e^eps + 1) < 2^-128 from eps = 90 on
        return LEVELS - 1
    if epsilon < 2.0**-127:  # tanh(eps/2) < eps/2
        return 0
    context = Context(prec=120)
    growth = context.exp(Decimal(epsilon))
    tanh = context.divide(context.subtract(growth, Decimal(1)), context.add(growth, Decimal(1)))
    scaled = context.subtract(context.multiply(tanh, Decimal(LEVELS)), Decimal("1e-30"))
    return max(0, int(scaled.to_integral_value(rounding=ROUND_FLOOR)))


def is_public(epsilon: float | None) -> bool:
    """True where an ε of the program stands for public labels; None is an ε that is not known."""
    return epsilon == math.inf


def epsilon_of(stated: float | None) -> float:
    """The ε that a file states, where null stands for infinity."""
    return math.inf if stated is None else float(stated)


def bound_of(epsilon: float) -> str:
    """A bound on the factor e^ε in words, rounded up."""
    if epsilon >= 14:
        return f"e^{math.ceil(epsilon)}"
    return f"{math.ceil(10 * math.exp(epsilon)) / 10:,}" if epsilon < HARDLY else f"{math.ceil(math.exp(epsilon)):,}"


def upper_text(epsilon: float) -> str:
    """An upper bound on ε to six digits, rounded up, without an exponent where it is at least 0.0001."""
    bound = _UP.create_decimal(f"{epsilon:.12g}").normalize()  # without what a sum of floats leaves at its end
    return f"{bound:f}" if bound.is_finite() and epsilon >= 1e-4 else f"{bound:g}".replace("Infinity", "inf")


def as_float(value: object) -> float:
    """The number as a float, also one of NumPy's; NaN for anything else and for an integer beyond any float."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def check_epsilon(epsilon: object, name: str = "epsilon") -> float:
    """The value as a float if it is a finite number above 0; UserError, which calls it `name`, otherwise."""
    value = as_float(epsilon)
    if not (0.0 < value < math.inf):
        raise UserError(
            f"{name} must be a finite number above 0, got {epsilon!r}; smaller is more private, for example {name}: 2"
        )
    return value


def check_label(label: int) -> int:
    """The label as an int if it is -1 or +1; UserError otherwise, which does not repeat what may be a secret.

    Coins are ints: a 1.0 that came back as it was would say that it was kept.
    """
    if isinstance(label, bool) or not isinstance(label, Real) or label not in (-1, 1):
        raise UserError(LABEL_RULE)
    return int(label)


@dataclass(frozen=True)
class LabelNoise:
    """The effect of randomised response on each label, as a release states it or as the mechanism at ε realises it.

    epsilon: label-LDP parameter in [0, ∞]; ∞ for public labels. exact_keep: probability in [1/2, 1] that a label was
    kept. Made by `of` or `from_json`.
    """

    epsilon: float
    exact_keep: Fraction

    @classmethod
    def of(cls, noise: Noise, *, allow_zero: bool = True) -> LabelNoise:
        """A statement as it is, or what the mechanism realises at an ε: α = (2^128 + T)/2^129.

        ValueError unless 0 <= epsilon <= ∞ and, without `allow_zero`, for labels that carry nothing.
        """
        if isinstance(noise, LabelNoise):
            known = noise
        else:
            value = as_float(noise)
            if not value >= 0.0:
                raise ValueError(f"epsilon must be a number of at least 0 (math.inf for public labels), got {noise!r}")
            keep = Fraction(1) if is_public(value) else Fraction(LEVELS + keep_threshold(value), 2 * LEVELS)
            known = cls(value, keep)
        if not known.factor and not allow_zero:
            raise ValueError(f"epsilon must be above 0 (math.inf for public labels), got {known.epsilon!r}")
        return known

    @property
    def public(self) -> bool:
        """True where the labels were released as they are."""
        return is_public(self.epsilon)

    @cached_property
    def keep_prob(self) -> float:
        """α: the largest float <= `exact_keep`; in [0.5, 1], and 1 only for public labels."""
        nearest = float(self.exact_keep)
        return nearest if Fraction(nearest) <= self.exact_keep else math.nextafter(nearest, 0.0)

    @property
    def kept_of_100(self) -> str:
        """Of 100 labels, the number that stays as it is; above 99 in words."""
        kept = 100 * self.keep_prob
        return f"{kept:.0f}" if kept < 99.5 else "more than 99"

    @cached_property
    def flip_prob(self) -> float:
        """1 − α, rounded once: accurate where 1 - keep_prob in floats is not. In [0, 0.5]."""
        return float(1 - self.exact_keep)

    @cached_property
    def factor(self) -> float:
        """2α − 1 in [0, 1], rounded once: the factor by which randomised response shrinks every signal."""
        return float(2 * self.exact_keep - 1)

    @cached_property
    def log_keep(self) -> float:
        """log α in [-log 2, 0]."""
        return math.log1p(-self.flip_prob)

    @cached_property
    def log_flip(self) -> float:
        """log(1 − α); -∞ for public labels."""
        return math.log(self.flip_prob) if self.flip_prob else -math.inf

    def keep_text(self, digits: int = 3, percent: bool = False) -> str:
        """α for people, with the decimals that tell it from 1: 0.881, 0.99995, over 0.999999999; or as per cent.

        digits: the fewest decimals; two fewer for per cent.
        """
        if not self.flip_prob:
            return "100\u00a0%" if percent else "1"
        digits = min(max(digits, math.ceil(-math.log10(self.flip_prob))), 9)
        over, value = ("over ", 1.0 - 1e-9) if self.flip_prob < 1e-9 else ("", self.keep_prob)
        return f"{over}{100 * value:.{digits - 2}f}\u00a0%" if percent else f"{over}{value:.{digits}f}"

    @property
    def warning(self) -> str | None:
        """A caution about an ε that protects next to nothing; None below `WEAK_EPSILON` and for public labels."""
        if self.public or self.epsilon < WEAK_EPSILON:
            return None
        rarity = f"{1 / self.flip_prob:,.0f}" if self.flip_prob > 1e-9 else f"{1 / self.flip_prob:.0e}"
        return (
            f"at ε = {self.epsilon:g} nearly every label is released as it is: about one in {rarity} is turned round"
        )

    def debias_share(self, share: float) -> float:
        """(p − (1−α))/(2α − 1): the share among true labels that share p among released ones estimates, unclipped.

        ValueError for labels that carry nothing.
        """
        if not self.factor:
            raise ValueError("epsilon must be above 0: labels at 0 tell nothing of the true ones")
        return (share - self.flip_prob) / self.factor

    def debias(self, share: Estimate) -> Estimate:
        """The share on true labels with its interval, wider by 1/(2α − 1); clipping it to [0, 1] would bias it."""
        low, high = self.debias_share(share.ci_low), self.debias_share(share.ci_high)
        return replace(share, value=self.debias_share(share.value), ci_low=low, ci_high=high)

    def as_json(self) -> dict[str, Any]:
        """The keys of files: epsilon (null for ∞), keep_prob, flip_prob."""
        return {
            "epsilon": None if self.public else self.epsilon,
            "keep_prob": self.keep_prob,
            "flip_prob": self.flip_prob,
        }

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> LabelNoise:
        """The noise that a file states as epsilon (null for ∞), keep_prob and, if it likes, flip_prob.

        A keep_prob within rounding of the mechanism's at that epsilon is the mechanism's, whose exact value is known;
        any other is taken as it is.

        ValueError: epsilon is not a finite number above 0, keep_prob is not in [1/2, 1] or more than epsilon allows, or
        flip_prob is not 1 − keep_prob.
        """
        epsilon, keep = stated["epsilon"], stated["keep_prob"]
        try:
            ours = cls.of(epsilon_of(None if epsilon is None else check_epsilon(epsilon)))
        except UserError as error:
            raise ValueError(str(error)) from None
        flip = stated.get("flip_prob", 0.0)
        for name, value in (("keep_prob", keep), ("flip_prob", flip)):
            if not 0.0 <= as_float(value) <= 1.0:
                raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
        noise = ours
        if not abs(keep - ours.keep_prob) < ROUNDING:
            if ours.public or not 0.5 <= keep < ours.keep_prob:
                raise ValueError(f"keep_prob {keep!r} does not belong to epsilon {epsilon!r}")
            noise = cls(ours.epsilon, Fraction(keep))
        if "flip_prob" in stated and not abs(flip - noise.flip_prob) < ROUNDING:
            raise ValueError(f"keep_prob {keep!r} and flip_prob {flip!r} do not sum to 1")
        return noise


OUTSIDE = "an end of 0 or 1 is clipped: the noise of the labels is subtracted, and by chance less or more was left"


def outside(*shares: Mapping[str, Any] | None) -> str:
    """`OUTSIDE` where a shown estimate {"value", "ci_low", "ci_high"}, or an end of its interval, lies outside [0, 1];
    otherwise empty."""
    seen = [share for share in shares if share and not withheld(share)]
    numbers = [share.get(name) for share in seen for name in ("value", "ci_low", "ci_high")]
    return OUTSIDE if any(number is not None and not 0 <= number <= 1 for number in numbers) else ""


def clipped(share: Mapping[str, Any]) -> dict[str, Any]:
    """The estimate as it is shown: its value and the ends of its interval within [0, 1]."""
    ends = {name: share.get(name) for name in ("value", "ci_low", "ci_high")}
    return {**share, **{name: min(1.0, max(0.0, end)) for name, end in ends.items() if end is not None}}


WIDEST, FEWEST = 0.25, 12
"""Half-width of a 95 % interval above which a share is withheld: around 1/2 it holds all from 1/4 to 3/4. Wilson's has
it from 12 units on; noise subtracted from labels asks for more."""


def units_needed(share: Mapping[str, Any]) -> int:
    """The number of labels or prompts below which a share is withheld. Widths shrink with the root of that number."""
    return max(FEWEST, math.ceil(share["n"] * ((share["ci_high"] - share["ci_low"]) / (2 * WIDEST)) ** 2))


def withheld(share: Mapping[str, Any]) -> str:
    """The text in place of a share that rests on too few labels or prompts; empty where there are enough."""
    needed = units_needed(share)
    return f"withheld: {share['n']} of at least {needed}" if share["n"] < needed else ""


def share_text(share: Mapping[str, Any]) -> str:
    """An estimate with its interval, clipped, and explained where it is: 1.000 [0.902, 1.000] (an end of …)."""
    if text := withheld(share):
        return text
    why, share = outside(share), clipped(share)
    return f"{share['value']:.3f} [{share['ci_low']:.3f}, {share['ci_high']:.3f}]" + (f" ({why})" if why else "")


PUBLIC = LabelNoise(math.inf, Fraction(1))
Noise = LabelNoise | float
"""How noisy labels are: a statement, or the ε of this program's own mechanism in [0, ∞]."""
