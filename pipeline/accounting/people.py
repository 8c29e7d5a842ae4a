"""Randomised response, several labels of one person; and how many of them should count within a budget."""

from __future__ import annotations

from typing import Any

from private_rlhf.accounting.epsilon_delta import Guarantee, count, guarantee, positive, probability
from private_rlhf.privacy.person import epsilon_each, information, person_epsilon, split_budget

LARGEST_EXACT = 20_000


def randomized_response(epsilon: float, labels_per_person: int, target_delta: float = 1e-6) -> Guarantee:
    """All labels of a person who gave at most m of them, each released by randomised response at ε.

    Theorem: m·ε with δ = 0 (tight: both vectors of m equal labels), and beside it the exact smallest ε at
    `target_delta` from the binomial privacy loss (`private_rlhf.privacy.person.person_epsilon`; None above
    `LARGEST_EXACT` labels, where the sum takes too long). Source: PPKL Eq. 7 with basic composition. Assumes distinct
    events with independent flips, and a key (or coins) that nobody else has. Units: ε nats a label. Fails: if one event
    is released under two keys, which adds up.
    """
    positive("epsilon", epsilon)
    count("labels_per_person", labels_per_person)
    probability("target_delta", target_delta)
    exact = _exact(epsilon, labels_per_person, target_delta)
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


def person(budget: float, questions: int, target_delta: float = 1e-6) -> Guarantee:
    """A person who may lose `budget` E by all their answers, at most n of them: how many should count, at which ε.

    Theorem: k answers at ε = E/k together cost E (basic composition, tight). k carries most Fisher information at
    margin 0, k tanh²(E/(2k))/4 (`privacy.person`). Details: `answers` k, `epsilon_each` ε, and `table`,
    one row for every k up to n, or for a choice of them where n is large: information relative to the best, and the
    exact smallest ε of the person at `target_delta` (as `randomized_response`). Assumes and fails as
    `randomized_response`; the other answers must stay unasked or unreleased for good.
    """
    positive("budget", budget)
    count("questions", questions)
    probability("target_delta", target_delta)
    answers, epsilon = split_budget(budget, questions)
    shown = {scale * 10**power for power in range(len(str(questions))) for scale in (1, 2, 3, 5)}
    shown |= {*range(1, min(questions, 20) + 1), answers - 1, answers, answers + 1, questions}
    table: list[dict[str, Any]] = [
        {
            "answers": number,
            "epsilon": epsilon_each(budget, number),
            "information": information(budget, number) / information(budget, answers),
            "epsilon_at_delta": _exact(epsilon_each(budget, number), number, target_delta),
        }
        for number in sorted(shown)
        if 1 <= number <= questions
    ]
    return guarantee(
        budget,
        0.0,
        f"{answers} of at most {questions} answers of one person, randomised at epsilon = {epsilon:g} each,",
        (
            "neighbours differ in every answer of one person; prompts, responses and which answers count are public",
            "the other answers of that person are not asked, or not released, now and later",
            "every answer has its own independent flip, and the key is secret and the only one used for them",
        ),
        answers=answers,
        epsilon_each=epsilon,
        target_delta=target_delta,
        table=table,
    )


def _exact(epsilon: float, labels: int, delta: float) -> float | None:
    return person_epsilon([(epsilon, labels)], delta) if labels <= LARGEST_EXACT else None
