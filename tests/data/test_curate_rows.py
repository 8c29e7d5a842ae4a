"""What becomes of rows in the engine: the swap as a property, drops and counts, order, one bit per event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import canonical_record, event_bytes
from support.other_machines import move_to

EPSILON = 0.5
Triple = tuple[str, str, str, bool]
small_words = st.sampled_from(["", " ", *"abcdefgh"])  # blank ones too, but most rows are kept
tables = st.lists(st.tuples(small_words, small_words, small_words, st.booleans()), max_size=12)
quick = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("quick_disk")


def key_file(folder: Path) -> Path:
    """The same key in every folder, each with a ledger of its own."""
    path = keygen(folder / "owner.key")
    path.write_text("private-rlhf key v1\n" + bytes(range(32)).hex() + "\n")
    return path


def run(
    folder: Path, table: list[Triple], swap: bool = False, epsilon: float = EPSILON
) -> tuple[list[ReleasedPair], dict[str, int]] | str:
    """(rows, drop counts), or what the refusal says. swap: of the rows whose last item is true."""
    rows = [
        {"prompt": prompt, "chosen": second if swap and flip else first, "rejected": first if swap and flip else second}
        for prompt, first, second, flip in table
    ]
    folder.mkdir()
    move_to(folder)
    data = folder / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        chunk_bytes = 120 if len(rows) < 1000 else 1 << 20
        privatize_source(Request(str(data), folder / "out", epsilon, key_file(folder), chunk_bytes=chunk_bytes))
    except UserError as error:
        return str(error).replace(str(folder), "")
    opened = read_release(folder / "out")
    return opened.rows, dict(opened.manifest.dropped)


@quick
@given(tables)
def test_swapping_any_rows_changes_their_private_labels_alone(
    tmp_path_factory: pytest.TempPathFactory, table: list[Triple]
) -> None:
    folder = tmp_path_factory.mktemp("swap")
    plain, swapped = run(folder / "one", table), run(folder / "two", table, swap=True)
    if isinstance(plain, str) or isinstance(swapped, str):
        assert plain == swapped
        return
    assert plain[1] == swapped[1]
    first_seen: dict[str, bool] = {}
    for prompt, first, second, flip in table:
        record = canonical_record(prompt, first, second)
        if record is not None:
            first_seen.setdefault(record.record_id, flip)
    for one, other in zip(plain[0], swapped[0], strict=True):
        assert (one.record_id, one.prompt, {one.chosen, one.rejected}) == (
            other.record_id,
            other.prompt,
            {other.chosen, other.rejected},
        )
        assert one == other or first_seen[one.record_id]


@quick
@given(tables)
def test_rows_are_accounted_for_and_ordered(tmp_path_factory: pytest.TempPathFactory, table: list[Triple]) -> None:
    result = run(tmp_path_factory.mktemp("order") / "x", table)
    if isinstance(result, str):
        return
    rows, dropped = result
    assert len(rows) + sum(dropped.values()) == len(table)
    assert dropped["identical"] == sum(first == second for _, first, second, _ in table)
    ids = [row.record_id for row in rows]
    assert ids == sorted(set(ids))


def test_labels_go_through_the_mechanism_of_their_event(tmp_path: Path) -> None:
    result = run(tmp_path / "x", [(f"p{i}", "yes", "no", False) for i in range(200)])
    assert not isinstance(result, str)
    mechanism, prf = RandomizedResponse(EPSILON), load_key(tmp_path / "x" / "owner.key").prf
    for row in result[0]:
        record = canonical_record(row.prompt, "yes", "no")
        assert record is not None
        z = mechanism.release(prf, event_bytes(record.record_id), record.label)
        assert row.chosen == (record.response_a if z == 1 else record.response_b)
    assert 0 < sum(row.chosen == "yes" for row in result[0]) < 200


def test_a_record_gets_the_same_bit_in_any_company(tmp_path: Path) -> None:
    table = [(f"p{i}", "yes", "no", False) for i in range(50)]
    whole, some = run(tmp_path / "one", table), run(tmp_path / "two", table[::-3])
    assert not isinstance(whole, str)
    assert not isinstance(some, str)
    by_id = {row.record_id: row for row in whole[0]}
    assert len(some[0]) == 17
    assert all(by_id[row.record_id] == row for row in some[0])


def test_conflicting_copies_keep_the_first(tmp_path: Path) -> None:
    """Whatever else there is: the released bits are those of a file that holds the first copies alone."""
    firsts = [(f"p{i}", "a", "b", False) if i % 2 else (f"p{i}", "b", "a", False) for i in range(40)]
    copies = [(prompt, second, first, flip) for prompt, first, second, flip in firsts]
    alone, crowded = run(tmp_path / "one", firsts), run(tmp_path / "two", [*firsts, *copies, *firsts])
    assert not isinstance(alone, str)
    assert not isinstance(crowded, str)
    assert crowded[0] == alone[0]
    assert crowded[1] == {"identical": 0, "empty": 0, "duplicates": 80}


@pytest.mark.parametrize("rows", [60, 9000])
def test_where_every_private_label_agrees_the_bytes_agree(tmp_path: Path, rows: int) -> None:
    """At epsilon 1e-300 every z is a coin: turning all true labels round must not change one byte. 9,000 rows are more
    than a row group; dropped rows and copies of rows are turned too."""
    table = [(f"p{i}", *(("yes", "no"), ("no", "yes"))[i % 3 == 0], True) for i in range(rows)]
    table += [("p1", "no", "yes", True), ("blank", " ", "no", True), ("equal", "no", "no", True)]
    results = [run(tmp_path / name, table, swap=name == "two", epsilon=1e-300) for name in ("one", "two")]
    assert not any(isinstance(result, str) for result in results)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "out").iterdir()} for name in ("one", "two")
    )
    assert one == two
    assert sorted(one) == ["_manifest", "_signature", "part-00000.parquet"]
