"""What both algorithms share: when the value function is drawn anew, from which episodes, and the draw itself.

PRL names the paper "Towards Differentially Private Reinforcement Learning with General Function Approximation".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from private_rlhf.validation.outcome_rewards import DELTA, Array, appendix_step
from private_rlhf.validation.outcome_rewards import PAPER as PAPER
from private_rlhf.validation.outcome_rewards import draw as draw

from private_rlhf_lab.accounting.private_rl import private_rl


@dataclass(frozen=True)
class Schedule:
    """sizes: episodes per batch; f is drawn before each batch, so there are len(sizes) updates, the first on no data.

    window: an update scores the last `window` batches only; None is every batch, as in the paper.
    """

    name: str
    sizes: tuple[int, ...]
    window: int | None = None

    @property
    def episodes(self) -> int:
        """K, all episodes."""
        return sum(self.sizes)

    @property
    def reads(self) -> int:
        """The largest number of updates that score one episode: what composes for the user of that episode.

        f₁, …, f_M factorise into one draw an update, given the earlier draws and the data it scores; under neighbours
        in one episode only the factors that score it differ, and which ones is fixed in advance.
        """
        later = len(self.sizes) - 1
        return later if self.window is None else min(self.window, later)


class Memory:
    """The summed losses that the next update scores: of all batches, or of the last `window` of them."""

    def __init__(self, window: int | None, shape: tuple[int, ...]) -> None:
        self.window, self.total = window, np.zeros(shape, dtype=np.int32)
        self._kept: list[Array] = []

    def add(self, batch: Array) -> None:
        """One more batch, of the given shape; what falls out of the window no longer counts."""
        self.total = self.total + batch
        if self.window is not None:
            self._kept.append(batch)
            if len(self._kept) > self.window:
                self.total = self.total - self._kept.pop(0)


def fixed(episodes: int, batch: int) -> Schedule:
    """The paper's equal batches; the last may be shorter."""
    full, rest = divmod(episodes, batch)
    return Schedule(f"B={batch}", (batch,) * full + (rest,) * (rest > 0))


def geometric(episodes: int, first: int, growth: float, window: int | None = None) -> Schedule:
    """Batches first·growth^i, rounded: few updates, early ones soon. Ours, not the paper's."""
    sizes: list[int] = []
    while sum(sizes) < episodes:
        sizes.append(min(round(first * growth ** len(sizes)), episodes - sum(sizes)))
    reach = "" if window is None else f", last {window} read"
    return Schedule(f"geometric {first} x {growth:g}{reach}", tuple(sizes), window)


def section_step(epsilon: float, updates: int) -> float:
    """ε₀ = ε/(2√(2M log(1/δ))) of PRL section 3.3: half of Appendix E's."""
    return appendix_step(epsilon, updates) / 2.0


def private_exponent(schedule: Schedule, epsilon: float, sensitivity: float, route: str = "best") -> float:
    """x of P(f) ∝ exp(x·S(f)) for (ε, 1e-5)-joint DP of the whole sequence of draws; 1/score.

    route: zcdp, advanced_composition, basic or bounded_range of `accounting.private_rl`, or "best" of them; or
    "appendix", PRL's ε₀/(2Δ) with `appendix_step`.
    """
    if route == "appendix":
        return appendix_step(epsilon, schedule.reads) / (2.0 * sensitivity)
    exact = route in ("best", "bounded_range")
    details = private_rl(schedule.reads, epsilon, DELTA, sensitivity, exact).details
    return float(details["exponent"] if route == "best" else details[route]["exponent"])
