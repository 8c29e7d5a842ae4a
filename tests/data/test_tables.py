"""The two functions on tables: the rows of a release, however the rows were divided on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf import canonicalize, release
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options

PEOPLE = Options(labeler_column="who", event_column="which")


def table_of(rows: int) -> pa.Table:
    """With copies under other names, contradicting copies, ties, blanks, and names that are spelt twice or empty."""
    texts = [("p", "a", "b"), ("p", "b", "a"), ("p", "a", "a"), (" ", "a", "b"), ("é", "\u2028", "x")]
    found = []
    for i in range(rows):
        prompt, chosen, rejected = texts[i % 5] if i % 3 else (f"p{i % 50}", "a", "b")
        who, which = ("", "Ann", "ann ", "bob")[i % 4], str(i % 2 or "")
        found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "who": who, "which": which})
    return pa.Table.from_pylist([row | {"position": place} for place, row in enumerate(found)])


@pytest.mark.parametrize("parts", [1, 7, 64])
def test_parts_give_the_rows_of_one_process(tmp_path: Path, key: Path, parts: int) -> None:
    table = table_of(600)
    pq.write_table(table, tmp_path / "train.parquet")
    privatize_source(Request(str(tmp_path / "train.parquet"), tmp_path / "out", 1.0, key, options=PEOPLE))
    expected = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    mapped = pa.concat_tables(canonicalize(table[part::parts], "who", "which") for part in reversed(range(parts)))
    groups: dict[int, list[int]] = {part: [] for part in range(parts)}
    for place, name in enumerate(mapped["record_id"].to_pylist()):
        groups[int(name, 16) * parts >> 256].append(place)
    found = [release(mapped.take(pa.array(places, pa.int64())), key, 1.0) for places in groups.values()]
    assert pa.concat_tables(found).combine_chunks().equals(expected.combine_chunks())
    assert len(expected) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": None}, "position must be a column of whole numbers, got another or none"),
        ({"position": "a"}, "position must be a column of whole numbers, got another or none"),
        ({"chosen": None}, "batch, row 1: one of 'chosen'/'rejected' is null"),
        ({"chosen": "<|im_end|>"}, "batch, row 1: holds"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(change: dict[str, Any], message: str) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "position": 0}
    with pytest.raises(UserError, match=message):
        canonicalize(pa.Table.from_pylist([row | change]))


def test_rows_of_something_else_are_refused(key: Path) -> None:
    with pytest.raises(UserError, match="sorted_batch must hold record_id, prompt, response_a"):
        release(table_of(5), key, 1.0)
    rows = canonicalize(table_of(5))
    with pytest.raises(UserError, match="epsilon"):
        release(rows, key, 0.0)
    wrong = rows.set_column(rows.schema.names.index("label"), "label", pa.array([0] * len(rows), pa.int8()))
    with pytest.raises(UserError, match="label"):
        release(wrong, key, 1.0)
    for labels in (pa.array([True] * len(rows)), pa.nulls(len(rows), pa.int8())):
        with pytest.raises(UserError, match="none of them null: give what canonicalize returned"):
            release(rows.set_column(rows.schema.names.index("label"), "label", labels), key, 1.0)
    for act in (canonicalize, lambda table: release(table, key, 1.0)):
        with pytest.raises(UserError, match=r"batch must be a pyarrow\.Table, got list"):
            act(rows.to_pylist())


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("record_id", "0f", "record_id and position must be those of canonicalize, got others"),
        ("record_id", "A" * 64, "record_id and position must be those of canonicalize, got others"),
        ("position", -1, "record_id and position must be those of canonicalize, got others"),
        ("label", 300, "sorted_batch must hold what canonicalize returned, got Integer value 300 not in range"),
    ],
)
def test_a_value_that_was_changed_on_the_way_is_refused(key: Path, column: str, value: Any, message: str) -> None:
    rows = canonicalize(table_of(5))
    changed = rows.set_column(rows.schema.names.index(column), column, pa.array([value] * len(rows)))
    with pytest.raises(UserError, match=message):
        release(changed, key, 1.0)


def test_copies_with_one_position_are_refused_in_any_order(key: Path) -> None:
    """As of two files that are numbered each by itself: a task that runs again could release the other label."""
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "position": 0}
    table = canonicalize(pa.Table.from_pylist([row, row | {"chosen": "b", "rejected": "a"}]))
    for places in ([0, 1], [1, 0]):
        with pytest.raises(UserError, match="position must differ between rows, got one twice for a pair"):
            release(table.take(places), key, 1.0)


def test_a_batch_and_a_part_without_rows(key: Path) -> None:
    """Engines that divide rows make empty parts."""
    table = table_of(20)
    assert canonicalize(table.slice(0, 0)).equals(canonicalize(table).slice(0, 0))
    (batch,) = canonicalize(table).to_batches()
    assert release(batch, key, 1.0).equals(release(canonicalize(table), key, 1.0))


@pytest.mark.parametrize("text", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_types_that_an_engine_has_changed(key: Path, text: pa.DataType) -> None:
    """pandas and Polars give large strings and 64 bits."""
    rows = canonicalize(table_of(20), "who", "which")
    types = {field.name: text if pa.types.is_string(field.type) else pa.int64() for field in rows.schema}
    changed = pa.table({name: rows[name].combine_chunks().cast(kind) for name, kind in types.items()})
    assert release(changed, key, 1.0).equals(release(rows, key, 1.0))
