"""Randomised response, several labels of one person."""

from __future__ import annotations

from pipeline.accounting.guarantee import Guarantee, count, guarantee, positive, probability
from pipeline.privacy.person import person_epsilon

LARGEST_EXACT = 20_000


def randomized_response(epsilon: float, labels_per_person: int, target_delta: float = 1e-6) -> Guarantee:
    """All labels of a person who gave at most m of them, each released by randomised response at ε.

    Theorem: m·ε with δ = 0 (tight: both vectors of m equal labels), and beside it the exact smallest ε at
    `target_delta` from the binomial privacy loss (`pipeline.privacy.person.person_epsilon`; None above
    `LARGEST_EXACT` labels, where the sum takes too long). Source: PPKL Eq. 7 with basic composition. Assumes distinct
    events with independent flips, and a key (or coins) that nobody else has. Units: ε nats a label. Fails: if one event
    is released under two keys, which adds up.
    """
    positive("epsilon", epsilon)
    count("labels_per_person", labels_per_person)
    probability("target_delta", target_delta)
    exact = person_epsilon([(epsilon, labels_per_person)], target_delta) if labels_per_person <= LARGEST_EXACT else None
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
