"""From raw pairs to private records: drops, counts, order, marks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import UserError
from pipeline.privacy.keys import PrivacyKey, insecure_seed_key
from pipeline.privacy.mechanism import PublicLabels, RandomizedResponse, make_mechanism
from pipeline.privacy.privatize import DropCounts, guarantee, privatize_records
from pipeline.privacy.records import PrivateRecord, RawPair, canonical_record, event_bytes

KEY = PrivacyKey(bytes(range(32)))
SMALL = RandomizedResponse(0.5)
small_words = st.sampled_from(["", " ", "a", "b", "c"])
rows = st.lists(st.tuples(small_words, small_words, small_words, st.booleans()), max_size=12)


def pairs_of(table: list[tuple[str, str, str, bool]], swap: bool) -> list[RawPair]:
    return [
        RawPair(prompt, second, first, row) if swap and flip else RawPair(prompt, first, second, row)
        for row, (prompt, first, second, flip) in enumerate(table, 1)
    ]


def run(pairs: list[RawPair]) -> tuple[list[PrivateRecord], DropCounts] | str:
    try:
        return privatize_records(pairs, SMALL, KEY)
    except UserError as error:
        return str(error)


@given(rows)
def test_swapping_any_rows_changes_their_private_labels_alone(table: list[tuple[str, str, str, bool]]) -> None:
    plain, swapped = run(pairs_of(table, False)), run(pairs_of(table, True))
    if isinstance(plain, str) or isinstance(swapped, str):
        assert plain == swapped
        return
    assert plain[1] == swapped[1]
    assert [record[:4] for record in plain[0]] == [record[:4] for record in swapped[0]]
    first_seen: dict[str, bool] = {}
    for prompt, first, second, flip in table:
        record = canonical_record(prompt, first, second)
        if record is not None:
            first_seen.setdefault(record.record_id, flip)
    for one, other in zip(plain[0], swapped[0], strict=True):
        assert one.private_label == other.private_label or first_seen[one.record_id]


@given(rows)
def test_rows_are_accounted_for_and_ordered(table: list[tuple[str, str, str, bool]]) -> None:
    result = run(pairs_of(table, False))
    if isinstance(result, str):
        return
    records, counts = result
    assert len(records) + counts.identical + counts.empty + counts.duplicates == len(table)
    assert counts.identical == sum(first == second for _, first, second, _ in table)
    ids = [record.record_id for record in records]
    assert ids == sorted(set(ids))


def test_conflicting_copies_keep_the_first() -> None:
    copies = [RawPair("p", "a", "b", 1), RawPair("p", "b", "a", 2), RawPair("p", "a", "b", 3)]
    records, counts = privatize_records(copies, PublicLabels(), None)
    assert counts == DropCounts(identical=0, empty=0, duplicates=2)
    (record,) = records
    assert (record.response_a if record.private_label == 1 else record.response_b) == "a"


def test_labels_go_through_the_mechanism_of_their_event() -> None:
    pairs = [RawPair(f"p{i}", "yes", "no", i) for i in range(200)]
    records, _ = privatize_records(pairs, SMALL, KEY)
    for record in records:
        true = 1 if record.response_a == "yes" else -1
        assert record.private_label == SMALL.release(KEY.prf, event_bytes(record.record_id), true)
    kept = sum((record.private_label == 1) == (record.response_a == "yes") for record in records)
    assert 0 < kept < 200
    assert "label" not in PrivateRecord._fields


def test_a_record_gets_the_same_bit_in_any_company() -> None:
    pairs = [RawPair(f"p{i}", "yes", "no", i) for i in range(50)]
    whole = {record.record_id: record for record in privatize_records(pairs, SMALL, KEY)[0]}
    some = privatize_records(pairs[::-3], SMALL, KEY)[0]
    assert all(whole[record.record_id] == record for record in some)


def test_nothing_left_says_why() -> None:
    pairs = [RawPair("p", "a", "a", 1), RawPair("p", "", "a", 2), RawPair("", "b", "a", 3)]
    with pytest.raises(
        UserError, match=r"^d\.jsonl: no rows are left; 1 had identical responses and 2 an empty prompt"
    ):
        privatize_records(pairs, SMALL, KEY, "d.jsonl")


def test_lone_surrogates_name_the_row_alone() -> None:
    messages = set()
    for chosen, rejected in (("\ud800", "ok"), ("ok", "\ud800")):
        with pytest.raises(UserError) as caught:
            privatize_records([RawPair("p", chosen, rejected, 4)], SMALL, KEY, "d.jsonl")
        messages.add(str(caught.value))
    assert messages == {"d.jsonl, row 4: holds a lone surrogate, which is not valid Unicode; repair or remove the row"}


def test_a_private_mechanism_needs_a_key() -> None:
    with pytest.raises(UserError, match="needs a key; make one with `private-rlhf keygen"):
        privatize_records([RawPair("p", "a", "b", 1)], SMALL, None)


def test_marks() -> None:
    assert guarantee(SMALL, KEY)["mark"] is None
    assert guarantee(SMALL, KEY)["key_mode"] == "keyed"
    seeded = guarantee(SMALL, insecure_seed_key(1))
    assert (seeded["mark"], seeded["key_mode"]) == ("NOT PRIVATE", "insecure_seed")
    public = guarantee(make_mechanism(math.inf, public=True), None)
    assert (public["mark"], public["key_mode"], public["epsilon"]) == ("NOT PRIVATE", "none", None)
