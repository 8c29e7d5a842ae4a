"""Randomised response, several labels of one person; and how many of them should count within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from private_rlhf.accounting.epsilon_delta import Guarantee, OutsideAssumptions, count, guarantee, positive, probability
from private_rlhf.privacy.person import epsilon_each, information, person_epsilon, split_budget

LARGEST_EXACT = 20_000
_UNSEEN = "no epsilon was chosen with its answer in view"
_ASSUMED = (
    "neighbours differ in every answer of one person; prompts, responses and which answers count are public",
    "every answer has its own independent flip, and the key is secret and the only one used for them",
)


def randomized_response(epsilon: float, labels_per_person: int, target_delta: float = 1e-6) -> Guarantee:
    """All labels of a person who gave at most m of them, each released by randomised response at ε.

    Theorem: m·ε with δ = 0 (tight: both vectors of m equal labels), and beside it the exact smallest ε at
    `target_delta` from the binomial privacy loss (`private_rlhf.privacy.person.person_epsilon`; None above
    `LARGEST_EXACT` labels). Source: PPKL Eq. 7 with basic composition. Fails: if one event is released under two keys.
    """
    positive("epsilon", epsilon)
    count("labels_per_person", labels_per_person)
    probability("target_delta", target_delta)
    exact = _exact([(epsilon, labels_per_person)], target_delta)
    labels = "the released label" if labels_per_person == 1 else f"all {labels_per_person} released labels"
    return guarantee(
        labels_per_person * epsilon,
        0.0,
        f"{labels} of one person, each by randomised response at epsilon = {epsilon:g},",
        (
            "neighbours differ in every label of one person; prompts, responses and events are the same and public",
            f"no person gave more than {labels_per_person} labels",
            "every event has its own independent flip, and the key is secret and the only one used for these events",
        ),
        exact={"epsilon": exact, "delta": target_delta},
    )


def at_levels(answers: Sequence[tuple[float, int]], target_delta: float = 1e-6) -> Guarantee:
    """All answers of a person, so many at each ε for each (ε, number) in `answers`; no level depends on its answer.

    Theorem: the sum of the ε as they are written, with δ = 0 (tight), and beside it the smallest ε at `target_delta`
    as in `randomized_response`, but for rounding up. `by_level`: what the answers of each ε cost together.
    """
    for epsilon, number in answers:
        positive("answers", epsilon)
        count("answers", number)
    probability("target_delta", target_delta)
    totals = [number * Fraction(repr(float(epsilon))) for epsilon, number in answers]
    levels = [{"epsilon": epsilon, "answers": number, "total": float(total)}
              for (epsilon, number), total in zip(answers, totals, strict=True)]  # fmt: skip
    who = f"all {sum(number for _, number in answers)} answers of one person, each randomised at its own epsilon,"
    exact = {"epsilon": _exact(answers, target_delta), "delta": target_delta}
    return guarantee(float(sum(totals)), 0.0, who, (_UNSEEN, *_ASSUMED), by_level=levels, exact=exact)


def person(budget: float, questions: int, target_delta: float = 1e-6) -> Guarantee:
    """A person who may lose `budget` E by all their answers, at most n of them: how many should count, at which ε.

    Theorem: k answers at ε = E/k together cost E (basic composition, tight). k carries most Fisher information at
    margin 0, k tanh²(E/(2k))/4 (`privacy.person`). Details: `answers` k, `epsilon_each` ε, and `table`, a row for every
    k up to n, or some: information relative to the best, and the smallest ε at `target_delta`.
    """
    positive("budget", budget)
    count("questions", questions)
    probability("target_delta", target_delta)
    answers, epsilon = split_budget(budget, questions)
    if not (best := information(budget, answers)):
        raise OutsideAssumptions("budget", f"must carry information, got {budget!r}; pass a larger number")
    shown = {scale * 10**power for power in range(len(str(questions))) for scale in (1, 2, 3, 5)}
    shown |= {*range(1, min(questions, 20) + 1), answers - 1, answers, answers + 1, questions}
    table: list[dict[str, Any]] = [
        {
            "answers": number,
            "epsilon": epsilon_each(budget, number),
            "information": information(budget, number) / best,
            "epsilon_at_delta": _exact([(epsilon_each(budget, number), number)], target_delta),
        }
        for number in sorted(shown) if 1 <= number <= questions
    ]  # fmt: skip
    who = f"{answers} of at most {questions} answers of one person, randomised at epsilon = {epsilon:g} each,"
    others = "the other answers of that person are not asked, or not released, now and later"
    more = {"answers": answers, "epsilon_each": epsilon, "target_delta": target_delta, "table": table}
    return guarantee(budget, 0.0, who, (_ASSUMED[0], others, _ASSUMED[1]), **more)


def _exact(levels: Sequence[tuple[float, int]], delta: float) -> float | None:
    return person_epsilon(levels, delta) if sum(number for _, number in levels) <= LARGEST_EXACT else None
