"""The ledger: exact totals against a dict, budgets, re-runs, and what it refuses to read."""

from __future__ import annotations

import json
import shutil
import stat
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.commands.ledger_command import as_text
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.card import privacy_card, render_markdown
from private_rlhf.privacy.guarantee import guarantee
from private_rlhf.privacy.keys import Lock, PrivacyKey, insecure_seed_key, keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger, ReleasePlan
from private_rlhf.privacy.ledger_file import Book, LedgerFile
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.person import person_epsilon
from support.ledger_releases import Event, events_of, merge, plan, release

pytestmark = pytest.mark.usefixtures("quick_disk")
POOL = [*events_of("ann", 5), *events_of("bob", 3), *events_of("", 2)]


@pytest.fixture
def key(tmp_path: Path) -> PrivacyKey:
    return load_key(keygen(tmp_path / "label.key"))


class Model:
    """The naive ledger: a dict of events."""

    def __init__(self) -> None:
        self.events: dict[bytes, tuple[int, float, bytes]] = {}
        self.releases: set[tuple[float, tuple[Event, ...]]] = set()

    def after(self, events: list[Event], epsilon: float) -> dict[bytes, tuple[int, float, bytes]] | None:
        """The events after a release; None if a label conflicts."""
        merged = dict(self.events)
        for tag, label, labeler in events:
            if tag in merged and merged[tag][0] != label:
                return None
            merged[tag] = (label, max(epsilon, merged.get(tag, (0, 0.0))[1]), labeler)
        return merged

    def person_totals(self, events: dict[bytes, tuple[int, float, bytes]] | None = None) -> dict[bytes, float]:
        totals: dict[bytes, float] = defaultdict(float)
        for _, epsilon, labeler in (self.events if events is None else events).values():
            totals[labeler] += epsilon
        return totals


one_release = st.tuples(
    st.sampled_from([0.1, 0.5, 1.0, 2.0]),
    st.sets(st.integers(0, len(POOL) - 1), min_size=1),
    st.sampled_from([None, None, None, Budget(1.0, "event"), Budget(4.0, "person")]),
    st.booleans(),  # contradict one label
)


@settings(max_examples=25, deadline=None)
@given(releases=st.lists(one_release, min_size=1, max_size=6))
def test_totals_agree_with_a_dict(
    releases: list[tuple[float, set[int], Budget | None, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random releases with overlaps, conflicts, repeats and budgets: accepted exactly when the dict says so."""
    key = load_key(keygen(tmp_path_factory.mktemp("ledger") / "label.key"))
    model, limits = Model(), {"event": None, "person": None}
    for epsilon, picks, budget, contradict in releases:
        events = [POOL[index] for index in sorted(picks)]
        if contradict:
            events[0] = events[0]._replace(label=-events[0].label)
        repeated = (epsilon, tuple(events)) in model.releases
        after = model.after(events, epsilon)
        stated = limits | ({budget.per: budget.epsilon} if budget else {})
        accepted = repeated or (after is not None and within(model, after, stated))
        if accepted:
            assert release(Ledger.open(key), events, epsilon, budget) is repeated
        else:
            with pytest.raises(UserError, match=r"differ|budget"):
                release(Ledger.open(key), events, epsilon, budget)
        if accepted and not repeated:
            assert after is not None
            model.events, limits = after, stated
            model.releases.add((epsilon, tuple(events)))
        agrees(Ledger.open(key), model, limits)


def within(model: Model, after: dict[bytes, tuple[int, float, bytes]], limits: dict[str, float | None]) -> bool:
    people = model.person_totals(after)
    by_event = limits["event"] is None or max(epsilon for _, epsilon, _ in after.values()) <= limits["event"]
    by_person = limits["person"] is None or (bytes(16) not in people and max(people.values()) <= limits["person"])
    return by_event and by_person


def agrees(ledger: Ledger, model: Model, limits: dict[str, float | None]) -> None:
    shown, people = ledger.show(), model.person_totals()
    assert shown["epsilon_total"] == max((epsilon for _, epsilon, _ in model.events.values()), default=0.0)
    assert (shown["events"], shown["budgets"]) == (len(model.events), limits)
    assert len(shown["releases"]) == len(model.releases)
    assert {entry["status"] for entry in shown["releases"]} <= {"released"}
    unattributed = sum(labeler == bytes(16) for *_, labeler in model.events.values())
    assert shown["labelers"]["unattributed_events"] == unattributed
    people.pop(bytes(16), None)
    assert shown["labelers"]["count"] == len(people)
    assert (shown["labelers"]["max_epsilon"] or 0.0) == pytest.approx(max(people.values(), default=0.0), rel=1e-12)
    assert ledger.verify() == []


def test_the_busiest_person_is_composed_exactly(key: PrivacyKey) -> None:
    release(Ledger.open(key), events_of("ann", 30), 0.5)
    release(Ledger.open(key), events_of("ann", 10) + events_of("bob", 6), 1.0)
    labelers = Ledger.open(key).show()["labelers"]
    assert labelers["busiest"] == [{"epsilon": 0.5, "events": 20}, {"epsilon": 1.0, "events": 10}]
    assert (labelers["count"], labelers["max_epsilon"]) == (2, 20.0)
    assert labelers["max_epsilon_at_delta"] == person_epsilon([(0.5, 20), (1.0, 10)], 1e-6)
    assert labelers["max_epsilon_at_delta"] < 20.0


def test_another_than_the_busiest_person_may_lose_most_at_delta(key: PrivacyKey) -> None:
    """A hundred labels at a small ε lose more than one at a large one at δ = 0, and less at δ = 1e-6."""
    release(Ledger.open(key), events_of("ann", 100), 0.05)
    release(Ledger.open(key), events_of("bob", 1), 4.0)
    ledger = Ledger.open(key)
    labelers = ledger.show()["labelers"]
    assert (labelers["max_epsilon"], labelers["most_events"]) == (5.0, 100)
    assert labelers["max_epsilon_at_delta"] == person_epsilon([(4.0, 1)], 1e-6) > 3.99


def test_a_release_that_ends_meanwhile_hides_nothing(key: PrivacyKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes the file of totals that the book just read names."""
    release(Ledger.open(key), events_of("ann", 3), 0.5)
    ledger, read = Ledger.open(key), LedgerFile.read

    def before_another(file: LedgerFile) -> Book:
        monkeypatch.setattr(LedgerFile, "read", read)
        book = read(file)
        release(Ledger.open(key), events_of("bob", 5), 0.5)
        return book

    monkeypatch.setattr(LedgerFile, "read", before_another)
    assert ledger.show()["labelers"]["count"] == 2


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 3), (0.2, 3), (0.7, 19)])
def test_a_budget_may_be_met_exactly(key: PrivacyKey, epsilon: float, count: int) -> None:
    """0.1 + 0.1 + 0.1 is above 0.3 in floats."""
    budget = Budget(round(epsilon * count, 3), "person")
    release(Ledger.open(key), events_of("ann", count), epsilon, budget)
    with pytest.raises(UserError, match="over the budget"):
        release(Ledger.open(key), events_of("ann", count + 1), epsilon, budget)


def test_what_is_shown_and_exported(key: PrivacyKey, tmp_path: Path) -> None:
    events = events_of("ann", 3)
    release(Ledger.open(key), events, 0.5, Budget(2, "event"), source="ward", output=tmp_path / "one")
    release(Ledger.open(key), events, 0.1, source="ward")
    release(Ledger.open(key), events_of("bob", 1), 1.0, source="clinic")
    ledger = Ledger.open(key)
    shown = ledger.show()
    assert shown["sources"] == {
        "ward": {"releases": 2, "largest_epsilon": 0.5},
        "clinic": {"releases": 1, "largest_epsilon": 1.0},
    }
    assert shown["budgets"] == {"event": 2.0, "person": None}
    first = shown["releases"][0]
    assert (first["source"], first["events"], first["epsilon"], first["status"]) == ("ward", 3, 0.5, "released")
    assert first["output"] == str(tmp_path / "one")
    card = ledger.card_facts()
    assert str(tmp_path) not in json.dumps(card)
    assert "key" not in card
    for text in (json.dumps(shown), json.dumps(card)):
        assert not any(event.tag.hex() in text or event.labeler.hex() in text for event in events)


def test_a_repeat_costs_nothing_and_a_lower_epsilon_keeps_the_maximum(key: PrivacyKey) -> None:
    events = events_of("ann", 4)
    assert not release(Ledger.open(key), events, 1.0, Budget(1.0, "event"))
    assert release(Ledger.open(key), events, 1.0)
    assert not release(Ledger.open(key), events, 0.5)
    shown = Ledger.open(key).show()
    assert [entry["epsilon"] for entry in shown["releases"]] == [1.0, 0.5]
    assert (shown["epsilon_total"], shown["labelers"]["max_epsilon"]) == (1.0, 4.0)


def test_a_budget_per_event_is_refused_before_anything_and_remembered(key: PrivacyKey) -> None:
    events = events_of("ann", 2)
    with pytest.raises(UserError, match="over the budget of 1 per event"):
        release(Ledger.open(key), events, 2.0, Budget(1.0, "event"))
    assert Ledger.open(key).show()["budgets"]["event"] is None, "a refused budget is not remembered"
    release(Ledger.open(key), events, 0.5, Budget(1.0, "event"))
    message = (
        "^s: refused, over the budget of 1 per event: the largest total of any one record under this key is 0.5 and"
        " this release would make it 2; lower --epsilon, or state a larger --budget"
    )
    with pytest.raises(UserError, match=message):
        Ledger.open(key).reserve(plan(events, 2.0))
    assert len(Ledger.open(key).show()["releases"]) == 1
    assert not release(Ledger.open(key), events, 2.0, Budget(3.0, "event"))
    assert Ledger.open(key).show()["budgets"]["event"] == 3.0


def test_a_budget_per_person_adds_up(key: PrivacyKey) -> None:
    release(Ledger.open(key), events_of("ann", 4), 0.5, Budget(2.5, "person"))
    release(Ledger.open(key), events_of("ann", 1, start=4), 0.5)
    with pytest.raises(UserError, match=r"budget of 2\.5 per person: .*labeller under this key is 2\.5 .* make it 3;"):
        release(Ledger.open(key), events_of("ann", 1, start=5), 0.5)
    release(Ledger.open(key), events_of("bob", 5), 0.5)
    shown = Ledger.open(key).show()
    assert (shown["events"], shown["labelers"]["max_epsilon"]) == (10, 2.5)


def test_a_budget_per_person_needs_labellers(key: PrivacyKey) -> None:
    with pytest.raises(UserError, match=r"needs the labeller of every event, and 3 events .* --labeler-column"):
        release(Ledger.open(key), events_of("", 3), 0.5, Budget(9.0, "person"))
    assert Ledger.open(key).show()["events"] == 0


def test_leaving_without_commit_frees_the_plan_but_not_what_was_written(key: PrivacyKey, tmp_path: Path) -> None:
    events, ledger = events_of("ann", 2), Ledger.open(key)
    with ledger.reserve(plan(events, 1.0)) as reservation:
        assert ledger.show()["releases"][0]["status"] == "reserved"
        assert ledger.card_facts()["releases"] == []
        merge(ledger, events, 1.0, reservation.generation)
    assert (ledger.show()["releases"], ledger.show()["events"]) == ([], 0)
    with pytest.raises(RuntimeError, match="has ended"):
        reservation.written()
    with ledger.reserve(plan(events, 1.0)) as reservation:
        merge(ledger, events, 1.0, reservation.generation)
        reservation.written()
    assert [entry["status"] for entry in ledger.show()["releases"]] == ["written"]
    assert ledger.show()["epsilon_total"] == 1.0
    with pytest.raises(UserError, match="1 labels differ"):
        release(ledger, [events[0]._replace(label=-events[0].label)], 0.5)
    assert not release(ledger, events, 1.0, output=tmp_path / "out")
    assert [entry["status"] for entry in ledger.show()["releases"]] == ["released"]
    assert sorted(path.suffix for path in ledger.store.folder.iterdir()) == [".events", ".labelers"]


def test_a_conflict_cannot_be_written_by_mistake(key: PrivacyKey) -> None:
    events = events_of("ann", 3)
    release(Ledger.open(key), events, 0.5)
    changed = [events[0]._replace(label=-events[0].label), *events[1:]]
    with Ledger.open(key).reserve(plan(changed, 2.0)) as reservation:
        merge(Ledger.open(key), changed, 2.0, reservation.generation)
        with pytest.raises(UserError, match=r"never change: a corrected label says so \(--corrects-column\)"):
            reservation.written()
    assert Ledger.open(key).show()["epsilon_total"] == 0.5


def test_everything_is_for_the_owner_alone(key: PrivacyKey) -> None:
    folder = key.state.folder
    release(Ledger.open(key), events_of("ann", 3), 0.5)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (folder / "ledger.json").chmod(0o640)
    (problem,) = Ledger.open(key).verify()
    assert problem == f"{folder}/ledger.json: can be reached by others; run `chmod go-rwx {folder}/ledger.json`"


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan"), True])
def test_nonsense_is_refused(epsilon: float) -> None:
    with pytest.raises(UserError, match="epsilon must be a finite number above 0"):
        ReleasePlan("s", epsilon, 1, "x")
    with pytest.raises(UserError, match="--budget must be a finite number above 0"):
        Budget(epsilon, "event")
    with pytest.raises(UserError, match="--budget-per week: must be event or person"):
        Budget(1.0, "week")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="-1 events"):
        ReleasePlan("s", 1.0, -1, "x")


def test_a_key_without_a_file_has_no_ledger() -> None:
    with pytest.raises(UserError, match="keeps no state"):
        Ledger.open(insecure_seed_key(1))


# --- damage: every kind is told, by `open` and by `verify`, and nothing is overwritten --------------------------------


def edit(text: str) -> str:
    return text.replace('"epsilon": 2.0', '"epsilon": 1.0')


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "not text": (lambda text: "\udcff\udcfe", "the ledger is damaged"),
    "edited": (edit, r"was changed or damaged \(its MAC is wrong\)"),
    "truncated": (lambda text: text[: len(text) // 2], "damaged or cut short"),
    "emptied": (lambda text: "", "damaged or cut short"),
    "no object": (lambda text: "[1]", "damaged or cut short"),
    "another format": (lambda text: text.replace('"format": 5', '"format": 9'), "has format 9, not 2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_ledger_is_refused(key: PrivacyKey, kind: str) -> None:
    change, message = DAMAGE[kind]
    release(Ledger.open(key), events_of("ann", 3), 2.0)
    path = key.state.folder / "ledger.json"
    damaged = change(path.read_text()).encode(errors="surrogateescape")
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=f"ledger.json: .*{message}"):
        Ledger.open(key)
    with pytest.raises(UserError, match=message):
        Ledger(key).reserve(plan(events_of("bob", 1), 0.1))
    (problem,) = Ledger(key).verify()
    assert "ledger.json" in problem
    assert path.read_bytes() == damaged


def test_a_missing_or_older_ledger_is_refused(key: PrivacyKey) -> None:
    path = key.state.folder / "ledger.json"
    release(Ledger.open(key), events_of("ann", 3), 2.0)
    old = path.read_bytes()
    release(Ledger.open(key), events_of("ann", 3), 1.0)  # changes no data file: the revision alone tells
    path.write_bytes(old)
    with pytest.raises(UserError, match=r"is older \(revision 3\) than what was recorded here \(6\); restore"):
        Ledger.open(key)
    path.unlink()
    with pytest.raises(UserError, match="the ledger is missing; restore the key's state folder from a backup"):
        Ledger.open(key)
    assert len(Ledger(key).verify()) == 1


@pytest.mark.parametrize("suffix", ["events", "labelers"])
def test_damaged_data_are_found(key: PrivacyKey, suffix: str) -> None:
    release(Ledger.open(key), events_of("ann", 3), 2.0)
    (path,) = (key.state.folder / "events").glob(f"*.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (problem,) = Ledger.open(key).verify()
    assert problem == f"{path}: was changed or damaged: the ledger states another digest"
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{path.name}: holds .* bytes where the ledger states"):
        Ledger.open(key)
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name}: the ledger's data cannot be read"):
        Ledger.open(key)


def test_the_ledger_of_another_key_is_refused(key: PrivacyKey, tmp_path: Path) -> None:
    release(Ledger.open(key), events_of("ann", 3), 2.0)
    other = load_key(keygen(tmp_path / "other.key"))
    shutil.copytree(key.state.folder, other.state.folder, dirs_exist_ok=True)
    with pytest.raises(UserError, match="belongs to another key"):
        Ledger.open(other)


def count(ledger: Ledger, events: list[Event], epsilon: float, name: str, budget: Budget | None = None) -> bool:
    """A release of noisy counts of events that are in the store; whether it was released before."""
    with ledger.reserve(ReleasePlan("s", epsilon, len(events), name, "counts"), budget) as reservation:
        merge(ledger, events, 5e-324, reservation.generation)
        assert not reservation.generation.pieces("events")
        reservation.commit()
    return reservation.already


def test_noisy_counts_add_to_the_maximum_of_the_labels(key: PrivacyKey) -> None:
    ledger, events = Ledger.open(key), [*events_of("ann", 5), *events_of("bob", 3)]
    release(ledger, events, 1.0)
    release(ledger, events, 0.5)
    assert not count(ledger, events, 0.25, "first")
    assert not count(ledger, events[:2], 0.125, "second")
    assert count(ledger, events, 0.25, "first")  # the same question is free
    release(ledger, events, 2.0)
    facts = Ledger.open(key).show()
    assert facts["epsilon_total"] == 2.375
    assert facts["epsilon_of_counts"] == 0.375
    assert facts["sources"]["s"] == {"releases": 5, "largest_epsilon": 2.375}
    assert [entry.get("kind") for entry in facts["releases"]] == [None, None, "counts", "counts", None]
    labelers = facts["labelers"]
    assert labelers["max_epsilon"] == 5 * 2.375
    assert labelers["max_epsilon_at_delta"] == person_epsilon([(2.0, 5)], 1e-6) + 5 * 0.375
    assert ledger.verify() == []


def test_a_noisy_sum_of_an_earlier_version_adds_and_older_programs_refuse_its_ledger(
    key: PrivacyKey, monkeypatch: Any
) -> None:
    ledger, events = Ledger.open(key), events_of("ann", 5)
    release(ledger, events, 1.0)
    lock = Lock(key.state.folder / "ledger.lock", create=False)
    assert lock.acquire(0.0)
    book = ledger._file.read()
    book.entries.append({"source": "s", "events": 5, "epsilon": 0.5, "status": "released", "output": None,
                         "time": "2025-01-01T00:00:00+00:00", "released": "2025-01-01T00:00:00+00:00",
                         "identity": "sum", "kind": "sum", "delta": 1e-6})  # fmt: skip
    ledger._write(book, lock)
    lock.release()
    ledger = Ledger.open(key)
    assert ledger.verify() == []
    facts = ledger.show()
    assert (facts["epsilon_total"], facts["delta_total"], facts["epsilon_of_counts"]) == (1.5, 1e-6, 0.0)
    assert facts["labelers"]["max_epsilon"] == 5 * 1.5
    with pytest.raises(UserError, match=r"over the budget of 1\.5 per"):
        ledger.reserve(ReleasePlan("s", 0.5, 5, "another", "counts"), Budget(1.5, "event"))
    assert "s (noisy sum)" in as_text(facts)
    manifest = {"guarantee": guarantee(RandomizedResponse(1.0), key), "rows": 5}
    card = render_markdown(privacy_card(manifest, ledger=ledger.card_facts()))
    assert "s: 5 events at 0.5 at delta 1e-06 (one noisy sum, on top)" in card
    assert "| Largest total of any event under this key | 1.5 at delta 1e-06 |" in card
    monkeypatch.setattr("private_rlhf.privacy.ledger_file.READABLE", (1, 2))
    with pytest.raises(UserError, match="has format 5"):
        Ledger.open(key)


def test_the_person_with_most_events_bounds_what_counts_cost(key: PrivacyKey) -> None:
    """Ann has few events at a high epsilon, Bob many at a low one: the bound takes the worst of both."""
    ledger = Ledger.open(key)
    release(ledger, events_of("ann", 2), 5.0)
    bob = events_of("bob", 8)
    release(ledger, bob, 0.5)
    count(ledger, bob, 1.0, "c")
    truth = max(2 * 5.0 + 2 * 1.0, 8 * 0.5 + 8 * 1.0)
    assert ledger.show()["labelers"]["max_epsilon"] == 10.0 + 8.0 >= truth


def test_counts_are_refused_over_a_budget(key: PrivacyKey) -> None:
    ledger, events = Ledger.open(key), events_of("ann", 4)
    release(ledger, events, 1.0, Budget(1.5, "event"))
    with pytest.raises(UserError, match=r"over the budget of 1\.5 per event.* is 1 and .* make it 1\.75"):
        count(ledger, events, 0.75, "c")
    assert not count(ledger, events, 0.5, "c")
    with pytest.raises(UserError, match=r"is 1\.5 and this release would make it 1\.75"):
        release(ledger, events, 1.25)
    release(ledger, events, 0.25)  # below what the labels cost already
    assert Ledger.open(key).show()["epsilon_total"] == 1.5


def test_counts_are_refused_over_a_person_s_budget(key: PrivacyKey) -> None:
    ledger, events = Ledger.open(key), events_of("ann", 4)
    release(ledger, events, 1.0, Budget(5.0, "person"))
    assert not count(ledger, events, 0.25, "c")
    with pytest.raises(UserError, match=r"over the budget of 5 per person.* is 5 and .* make it 5\.5"):
        count(ledger, events, 0.125, "d")
    assert Ledger.open(key).show()["labelers"]["max_epsilon"] == 5.0
