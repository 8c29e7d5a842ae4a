"""The number of answers of one person that should count, where a budget covers everything that the person answers.

A Bradley–Terry answer at margin Δ is +1 with probability σ(Δ) = (1 + t)/2, t = tanh(Δ/2). After randomised response at
ε, with a = 2α−1 = tanh(ε/2), it is with probability P̃ = (1 + a t)/2. As σ′(Δ) = (1 − t²)/4, the released answer has
the Fisher information a²σ′(Δ)²/(P̃(1−P̃)) = a²(1 − t²)²/(4(1 − a²t²)) about Δ: at margin 0 it is tanh²(ε/2)/4. (Away
from 0 the denominator favours larger a, so a person with clear opinions gives a little more by fewer answers.)

k answers at ε = E/k carry k tanh²(E/(2k))/4 = (E/4) g(ε), g(ε) = tanh²(ε/2)/ε. (log g)′ = 2/sinh(ε) − 1/ε, and
sinh(ε)/ε rises, so g rises up to the root ε* = 2.177… of sinh(ε) = 2ε and falls beyond. In whole numbers the best k is
thus one of the two beside E/ε*, and 1 where E < ε*.
"""

from __future__ import annotations

import math
from fractions import Fraction

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, check_epsilon


def split_budget(total: float, questions: int | None = None) -> tuple[int, float]:
    """(k, ε): how many answers of a person count, k in 1..questions, and what each costs, for the most information.

    total: E, what one person may lose by all their answers together; finite, > 0. questions: the most that anyone
    answers, >= 1; None: no limit. ε is the largest float with k·ε <= E, never above by rounding. Of two k that carry
    the same the smaller one is taken: it asks less. Source: the module's docstring, at margin 0. UserError otherwise.
    """
    total = check_epsilon(total, "the budget of a person")
    if questions is not None and questions < 1:
        raise UserError(f"a person is asked {questions} questions; it must be 1 or more")
    below = max(1, math.floor(total / best_epsilon()))
    candidates = sorted({min(count, questions or count) for count in (below, below + 1)})
    answers = max(candidates, key=lambda count: information(total, count))
    return answers, epsilon_each(total, answers)


def epsilon_each(total: float, answers: int) -> float:
    """The largest float ε with answers·ε <= total, exactly."""
    epsilon = total / answers
    return epsilon if Fraction(epsilon) * answers <= Fraction(total) else math.nextafter(epsilon, 0.0)


def information(total: float, answers: int) -> float:
    """Σ tanh²(ε/2) over the answers, at ε = total/answers each: their Fisher information at margin 0 is a quarter."""
    return answers * LabelNoise.of(total / answers).factor ** 2


def best_epsilon() -> float:
    """ε* = 2.177…, at which an answer carries most for each unit of ε: the root of sinh(ε) = 2ε, by Newton."""
    epsilon = 2.2
    for _ in range(5):
        epsilon -= (math.sinh(epsilon) - 2.0 * epsilon) / (math.cosh(epsilon) - 2.0)
    return epsilon
