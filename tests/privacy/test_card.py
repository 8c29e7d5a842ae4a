"""The privacy card."""

from __future__ import annotations

import re
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import upper_text
from private_rlhf.privacy.card import NAMED_COLUMNS, ledger_rows, privacy_card, render_markdown
from private_rlhf.privacy.guarantee import guarantee
from private_rlhf.privacy.keys import PrivacyKey, insecure_seed_key
from private_rlhf.privacy.mechanism import PublicLabels, RandomizedResponse
from private_rlhf.privacy.person import person_epsilon

KEY = PrivacyKey(bytes(32))


def manifest(mechanism: RandomizedResponse | PublicLabels, key: PrivacyKey | None) -> dict[str, object]:
    return {"guarantee": guarantee(mechanism, key), "rows": 12, "dropped": {"identical": 1}, "source": "hh | helpful"}


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


def test_names_of_others_end_no_cell_and_start_no_markup() -> None:
    """Sources, columns and runs are named by people; a card is shown by whoever it was sent to."""
    bad = "<img src=x onerror=alert(1)> ![x](http://spy/) | 9 |\n## Not **mine** \\| \x1b[2J"
    facts = manifest(RandomizedResponse(2.0), KEY) | {"source": bad, "extra_columns": [bad]}
    entry = {"source": bad, "events": 1, "epsilon": 2.0, "status": "released"}
    text = render_markdown(privacy_card(facts, ledger=ledger() | {"releases": [entry]}, run=bad))
    shown = r"&lt;img src=x onerror=alert(1)&gt; !\[x\](http://spy/) \| 9 \| ## Not \*\*mine\*\* \\\| \\x1b\[2J"
    assert text.count(shown) == 4
    assert "<" not in text
    assert not [line for line in text.splitlines() if line.startswith("## ") and line != "## Privacy card"]
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3 for line in text.splitlines() if line[:1] == "|")


def ledger(**labelers: Any) -> dict[str, Any]:
    """As `Ledger.card_facts` gives it, after two releases."""
    return {
        "epsilon_total": 2.0,
        "events": 14,
        "releases": [
            {"source": "hh", "events": 14, "epsilon": 2.0, "status": "released", "time": "2026-01-01T00:00:00+00:00"},
            {"source": "hh", "events": 12, "epsilon": 0.5, "status": "released", "time": "2026-01-02T00:00:00+00:00"},
        ],
        "sources": {"hh": {"releases": 2, "epsilon_total": 2.0}},
        "labelers": {"count": 0, "unattributed_events": 14, "busiest": [], "max_epsilon": None} | labelers,
        "budgets": {"event": 2.0, "person": None},
    }


def test_card_with_a_ledger_states_its_totals() -> None:
    card = privacy_card(manifest(RandomizedResponse(0.5), KEY), ledger=ledger())
    assert (card["epsilon_per_event"], card["epsilon_total_per_event"]) == (0.5, 2.0)
    assert [release["epsilon"] for release in card["releases"]] == [2.0, 0.5]
    assert card["budgets"] == {"event": 2.0, "person": None}
    text = render_markdown(card)
    assert "| Largest total of any event under this key | 2 |" in text
    assert "| Releases under this key | hh: 14 events at 2; hh: 12 events at 0.5 |" in text
    assert "| Budgets | 2 per event |" in text
    assert "Other users and other machines: what was released of the same labels there, under any key" in text
    assert "| Person level | unknown:" in text


def test_card_without_a_ledger_has_no_rows_about_one() -> None:
    card = privacy_card(manifest(RandomizedResponse(0.5), KEY))
    assert (card["releases"], card["budgets"]) == ([], {})
    assert "under this key" not in render_markdown(card)


def test_card_with_labellers_adds_up() -> None:
    known = {"count": 7, "unattributed_events": 3, "busiest": [{"epsilon": 0.5, "events": 100}], "max_epsilon": 50.0}
    known |= {"max_epsilon_at_delta": person_epsilon([(0.5, 100)], 1e-6), "most_events": 100}
    card = privacy_card(manifest(RandomizedResponse(0.5), KEY), ledger=ledger(**known))
    assert (card["person_level"]["epsilon"], card["person_level"]["max_events"]) == (50.0, 100)
    assert card["person_level"]["epsilon_at_delta"] == pytest.approx(33.3, abs=0.05)
    text = render_markdown(card)
    exact = upper_text(card["person_level"]["epsilon_at_delta"])
    assert f"at most 100 events of one person: epsilon 50, or {exact} at delta 1e-06" in text
    assert "unknown for 3 events that name no labeller" in text


@pytest.mark.parametrize(
    ("mechanism", "key", "reason"),
    [(PublicLabels(), None, "epsilon is infinite"), (RandomizedResponse(2.0), insecure_seed_key(1), "a seed")],
)
def test_card_of_anything_else_says_not_private(
    mechanism: RandomizedResponse | PublicLabels, key: PrivacyKey | None, reason: str
) -> None:
    card = privacy_card(manifest(mechanism, key), ledger=ledger())
    text = render_markdown(card)
    assert card["mark"] == "NOT PRIVATE"
    assert text.startswith("## Privacy card\n\n**NOT PRIVATE**: ")
    assert reason in text
    assert "Nothing is claimed: see the mark." in text
    assert "| Guarantee | none |" in text
    assert "| Person level | none: see the mark |" in text
    assert "under this key" not in text


@pytest.mark.parametrize("more", [{"declared_public": True}, {"overrides": ["a guard was overruled"]}])
def test_a_run_whose_labels_are_read_as_they_are_claims_nothing_of_its_key(more: dict[str, Any]) -> None:
    """The flips of such a run were keyed; its files may hold the labels all the same."""
    text = render_markdown(privacy_card(manifest(RandomizedResponse(2.0), KEY), **more))
    assert "| Who must be trusted | no claim: see the mark |" in text
    assert "| Several releases | no claim: see the mark |" in text
    assert "sees no true label" not in text
    assert "cost the largest" not in text


def test_events_held_out_and_a_weak_epsilon_are_said() -> None:
    text = render_markdown(privacy_card(manifest(RandomizedResponse(10.0), KEY), evaluation_events=6))
    assert "| Events | 12 to train, 6 to evaluate |" in text
    assert "0.999955; at ε = 10 nearly every label is released as it is" in text
    text = render_markdown(privacy_card(manifest(RandomizedResponse(2.0), KEY)))
    assert "| Events | 12 to train |" in text
    assert "nearly every label" not in text


def test_card_needs_a_guarantee() -> None:
    with pytest.raises(UserError, match="does not state its guarantee"):
        privacy_card({"rows": 3})


def test_columns_that_the_holder_named_are_a_warning() -> None:
    private = manifest(RandomizedResponse(1.0), KEY)
    plain = privacy_card(private)
    named = privacy_card(private | {"extra_columns": ["score", "who"]})
    assert [line for line in named["not_protected"] if line not in plain["not_protected"]] == [
        NAMED_COLUMNS.format("score, who")
    ]
    assert "If one of them tells a label" in render_markdown(named)


def test_noisy_counts_are_told_from_releases_of_labels() -> None:
    releases = [
        {"source": "ward", "events": 9, "epsilon": 1.0},
        {"source": "ward", "events": 3, "epsilon": 0.25, "kind": "counts"},
    ]
    busiest = [{"epsilon": 1.0, "events": 4}]
    at_delta = person_epsilon([(1.0, 4)], 1e-6) + 1.0
    labelers = {"busiest": busiest, "max_epsilon": 5.0, "max_epsilon_at_delta": at_delta, "unattributed_events": 0}
    facts = {"epsilon_total": 1.25, "releases": releases, "budgets": {}, "labelers": labelers}
    card = privacy_card(manifest(RandomizedResponse(1.0), KEY), ledger=facts)
    assert card["epsilon_total_per_event"] == 1.25
    assert card["person_level"]["epsilon_at_delta"] == at_delta
    assert ledger_rows(card)["Releases under this key"] == (
        "ward: 9 events at 1; ward: 3 events at 0.25 (noisy counts, on top)"
    )
