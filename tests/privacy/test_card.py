"""The privacy card and the person-level composition."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binom

from pipeline.core.errors import UserError
from pipeline.privacy.card import person_epsilon, privacy_card, render_markdown
from pipeline.privacy.keys import PrivacyKey, insecure_seed_key
from pipeline.privacy.mechanism import PublicLabels, RandomizedResponse
from pipeline.privacy.privatize import guarantee

KEY = PrivacyKey(bytes(32))


def manifest(mechanism: RandomizedResponse | PublicLabels, key: PrivacyKey | None) -> dict[str, object]:
    return {"guarantee": guarantee(mechanism, key), "rows": 12, "dropped": {"identical": 1}, "source": "hh | helpful"}


def test_person_level_composition_by_hand() -> None:
    """One event at delta 0+ costs epsilon; the brief's m = 100 at epsilon 0.5 costs 33.3 at delta 1e-6, not 50."""
    assert person_epsilon(2.0, 1, 1e-12) == pytest.approx(2.0, abs=1e-9)
    assert person_epsilon(0.5, 100, 1e-6) == pytest.approx(33.3, abs=0.05)
    assert person_epsilon(0.1, 1, 0.5) == 0.0


@pytest.mark.parametrize(("epsilon", "events", "delta"), [(0.5, 20, 1e-5), (2.0, 7, 1e-3), (0.1, 300, 1e-6)])
def test_person_level_composition_against_scipy(epsilon: float, events: int, delta: float) -> None:
    total = person_epsilon(epsilon, events, delta)
    alpha = 1 / (1 + math.exp(-epsilon))
    spill = sum(
        max(0.0, binom.pmf(k, events, alpha) - math.exp(total) * binom.pmf(k, events, 1 - alpha))
        for k in range(events + 1)
    )
    assert spill == pytest.approx(delta, rel=1e-6)
    assert total < events * epsilon


@pytest.mark.parametrize(("events", "delta"), [(0, 1e-6), (3, 0.0), (3, 1.0)])
def test_person_level_composition_refuses_nonsense(events: int, delta: float) -> None:
    with pytest.raises(UserError, match="needs events >= 1 and 0 < delta < 1"):
        person_epsilon(1.0, events, delta)


def test_card_of_a_private_release_states_the_contract() -> None:
    card = privacy_card(manifest(RandomizedResponse(2.0), KEY), model="tiny")
    assert card["mark"] is None
    assert card["epsilon_total_per_event"] == 2.0
    text = render_markdown(card)
    for phrase in (
        "one labelling event",
        "randomized response (randomness: keyed)",
        "| Epsilon per event | 2 |",
        "0.880797",
        "unknown: the data have no labeller column",
        "Prompts and responses: they are released as they are",
        "max(alpha, p, 1-p)",
        "whoever holds the raw labels or the key",
        "| Model | tiny |",
        r"hh \| helpful",
    ):
        assert phrase in text
    assert "**NOT PRIVATE**" not in text


def test_card_with_a_labeller_column_adds_up() -> None:
    card = privacy_card(manifest(RandomizedResponse(0.5), KEY), max_events_per_person=100)
    assert card["person_level"]["epsilon"] == 50.0
    assert card["person_level"]["epsilon_at_delta"] == pytest.approx(33.3, abs=0.05)
    assert "epsilon 50, or 33.3 at delta 1e-06" in render_markdown(card)


@pytest.mark.parametrize(
    ("mechanism", "key", "reason"),
    [(PublicLabels(), None, "epsilon is infinite"), (RandomizedResponse(2.0), insecure_seed_key(1), "a seed")],
)
def test_card_of_anything_else_says_not_private(
    mechanism: RandomizedResponse | PublicLabels, key: PrivacyKey | None, reason: str
) -> None:
    card = privacy_card(manifest(mechanism, key), max_events_per_person=3)
    text = render_markdown(card)
    assert card["mark"] == "NOT PRIVATE"
    assert text.startswith("## Privacy card\n\n**NOT PRIVATE**: ")
    assert reason in text
    assert "Nothing: see the mark." in text
    assert "| Guarantee | none |" in text


def test_card_needs_a_guarantee() -> None:
    with pytest.raises(UserError, match="does not state its guarantee"):
        privacy_card({"rows": 3})
