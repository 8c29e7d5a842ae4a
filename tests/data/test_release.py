"""The released bundle: layout, bytes, refusal of anything incomplete, and what the bytes do not tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf.core.atomic import json_text
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC
from private_rlhf.data.answer_bundle import write_answers
from private_rlhf.data.container import ROWS_PER_GROUP, write_shard
from private_rlhf.data.release import messages_type, read_release
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.mechanism import LevelledResponse, Mechanism, PublicLabels, RandomizedResponse
from private_rlhf.privacy.records import RawPair, Text
from support.plain_release import PrivateRecord, manifest_of, privatize_records, write_release

KEY = PrivacyKey(bytes(range(32)))


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def pairs(n: int, conversational: bool = False, flipped: frozenset[int] = frozenset()) -> list[RawPair]:
    def text(role: str, content: str) -> Text:
        return turn(role, content) if conversational else content

    made = []
    for i in range(n):
        good, bad = text("assistant", f" good\n{i}\t"), text("assistant", f"bad é {i}")
        if i in flipped:
            good, bad = bad, good
        made.append(RawPair(text("user", f"prompt {i} "), good, bad, i + 1))
    return made


def release(
    folder: Path, raw: list[RawPair], mechanism: Mechanism | None = None, rows_per_shard: int = 65_536
) -> list[PrivateRecord]:
    mechanism = mechanism or RandomizedResponse(1.0)
    key = None if isinstance(mechanism, PublicLabels) else KEY
    records, counts = privatize_records(raw, mechanism, key)
    write_release(records, folder, manifest_of(records, counts, mechanism, key, rows_per_shard=rows_per_shard))
    return records


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("conversational", [False, True])
def test_round_trip(tmp_path: Path, conversational: bool) -> None:
    records = release(tmp_path / "out", pairs(40, conversational))
    opened = read_release(tmp_path / "out")
    assert len(opened) == 40
    assert opened.manifest.noise.epsilon == 1.0
    assert opened.manifest.private
    assert opened.manifest.noise.keep_prob == RandomizedResponse(1.0).noise.keep_prob
    assert opened.manifest.noise.flip_prob == RandomizedResponse(1.0).noise.flip_prob
    assert opened.manifest.format == ("conversational" if conversational else "standard")
    for row, record in zip(opened.rows, records, strict=True):
        assert (row.record_id, row.prompt) == (record.record_id, record.prompt)
        wins_a = record.private_label == 1
        assert row.chosen == (record.response_a if wins_a else record.response_b)
        assert row.rejected == (record.response_b if wins_a else record.response_a)


@pytest.mark.parametrize(("rows", "shards"), [(1, 1), (6, 1), (7, 2), (12, 2), (13, 4)])
def test_shards_are_ranges_of_record_ids(
    tmp_path: Path, rows: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power of two of them, at most 6 rows in one on average; a range may be empty."""
    monkeypatch.setattr("private_rlhf.data.release.ROWS_PER_SHARD", 6)
    records = release(tmp_path / "out", pairs(rows), rows_per_shard=6)
    names = sorted(contents(tmp_path / "out"))
    assert names == ["_manifest", *(f"part-{i:05d}.parquet" for i in range(shards))]
    assert [row.record_id for row in read_release(tmp_path / "out")] == [record.record_id for record in records]
    for number, path in enumerate(sorted((tmp_path / "out").glob("*.parquet"))):
        table = pq.read_table(path)
        assert table.column_names == ["prompt", "chosen", "rejected", "record_id"]
        assert all(int(name[:2], 16) * shards // 256 == number for name in table["record_id"].to_pylist())


def test_shards_larger_than_a_row_group(tmp_path: Path) -> None:
    release(tmp_path / "out", pairs(ROWS_PER_GROUP + 5))
    (path,) = (tmp_path / "out").glob("*.parquet")
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(group).num_rows for group in range(2)] == [ROWS_PER_GROUP, 5]


def test_bytes_are_a_pure_function(tmp_path: Path) -> None:
    release(tmp_path / "one", pairs(30))
    release(tmp_path / "two", pairs(30)[::-1])
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_manifest_holds_these_keys_and_no_statistic_of_labels(tmp_path: Path) -> None:
    release(tmp_path / "out", pairs(5))
    facts = json.loads((tmp_path / "out" / "_manifest").read_text())
    assert set(facts) == {
        *("mark", "columns", "format", "rows", "source", "guarantee", "dropped"),
        *("rows_per_shard", "extra_columns", "canonicalisation", "schema_version"),
    }
    assert set(facts["guarantee"]) == {
        *("mechanism", "epsilon", "keep_prob", "flip_prob", "unit", "neighbouring", "statement"),
        *("several_releases", "key_mode", "mark", "mark_reason"),
    }
    assert set(facts["dropped"]) == {"identical", "empty", "duplicates"}


def test_public_labels_are_marked(tmp_path: Path) -> None:
    release(tmp_path / "out", pairs(5), PublicLabels())
    opened = read_release(tmp_path / "out")
    assert opened.manifest.noise.public
    assert not opened.manifest.private
    assert json.loads((tmp_path / "out" / "_manifest").read_text())["mark"] == "NOT PRIVATE"
    assert all("good" in row.chosen for row in opened)


def edit(folder: Path, change: dict[str, Any], guarantee_change: dict[str, Any]) -> None:
    path = folder / "_manifest"
    facts = json.loads(path.read_text())
    for target, changes in ((facts, change), (facts["guarantee"], guarantee_change)):
        for name, value in changes.items():
            if value is ...:
                del target[name]
            else:
                target[name] = value
    path.write_text(json_text(facts))


@pytest.mark.parametrize(
    ("change", "guarantee_change", "message"),
    [
        ({"rows": 4}, {}, "holds 5 rows where its manifest says 4"),
        ({"rows": ...}, {}, r"lacks rows; write it again with `private-rlhf privatize`"),
        ({"schema_version": 99}, {}, "has schema version 99, not 2"),
        ({"format": "odd"}, {}, "`format` has no valid value"),
        ({}, {"epsilon": ...}, r"lacks guarantee\.epsilon"),
        ({}, {"epsilon": None}, "does not belong to epsilon None"),
        ({}, PUBLIC.as_json(), "epsilon is None, which does not go with key_mode 'keyed'"),
        ({}, {"epsilon": -1}, "epsilon must be a finite number above 0, got -1"),
        ({}, {"key_mode": "none"}, "does not go with key_mode 'none'"),
        ({}, {"key_mode": "insecure_seed"}, "the NOT PRIVATE mark does not go with key_mode 'insecure_seed'"),
        ({}, {"key_mode": "x"}, "key_mode is 'x', not one of"),
        ({"mark": "NOT PRIVATE"}, {}, "its two marks differ"),
        ({"extra_columns": 5}, {}, "`extra_columns` has no valid value"),
        ({"extra_columns": ["record_id"]}, {}, "`extra_columns` has no valid value"),
        ({"extra_columns": ["score"]}, {}, "its columns are not those of its manifest"),
        ({"format": "conversational"}, {}, "its columns are not those of its manifest"),
        ({"format": ["standard"]}, {}, "`format` has no valid value"),
        ({"rows": True}, {}, "`rows` has no valid value"),
        ({"rows": -1}, {}, "`rows` has no valid value"),
        ({"rows_per_shard": 0}, {}, "`rows_per_shard` has no valid value"),
        ({"rows_per_shard": 1}, {}, "its shards are not those of its manifest"),
        ({"dropped": []}, {}, "`dropped` has no valid value"),
        ({"dropped": {"empty": "<b>"}}, {}, "`dropped` has no valid value"),
        ({"source": None}, {}, "`source` has no valid value"),
        ({"canonicalisation": 99}, {}, "`canonicalisation` has no valid value"),
        ({}, {"mechanism": "nothing at all"}, "states a mechanism or a mark that this program does not"),
        ({}, {"keep_prob": 0.99}, "keep_prob 0.99 does not belong to epsilon 1.0"),
        ({}, {"flip_prob": 0.2}, "do not sum to 1"),
        ({}, {"flip_prob": "0.2"}, "flip_prob must be a number"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(
    tmp_path: Path, change: dict[str, Any], guarantee_change: dict[str, Any], message: str
) -> None:
    release(tmp_path / "out", pairs(5))
    edit(tmp_path / "out", change, guarantee_change)
    with pytest.raises(UserError, match=message):
        read_release(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "guarantee_change"),
    [
        ({}, {"statement": "100 % anonymous, certified"}),
        ({}, {"unit": "nobody"}),
        ({}, {"stamp": "<img>"}),
        ({"certified": "yes"}, {}),
        ({"dropped": {"duplicates": 0, "identical": 0, "empty": 0}}, {}),
        ({"columns": []}, {}),
    ],
    ids=str,
)
def test_words_and_fields_of_a_manifest_are_the_program_s(
    tmp_path: Path, change: dict[str, Any], guarantee_change: dict[str, Any]
) -> None:
    release(tmp_path / "out", pairs(5))
    read_release(tmp_path / "out")
    edit(tmp_path / "out", change, guarantee_change)
    with pytest.raises(UserError, match=r"_manifest: (has words, fields|`dropped` has)"):
        read_release(tmp_path / "out")


def test_the_levels_of_a_manifest_have_one_form(tmp_path: Path) -> None:
    """1 and 1.0 are one number: which of the two stands there would be free to tell something."""
    answers = [(f"p{i}", "a", "b", 1) for i in range(4)]
    write_answers(tmp_path / "out", answers, LevelledResponse.of((1.0, 2.0)), "own", "page", 2.0, [1.0, 2.0] * 2)
    assert read_release(tmp_path / "out").manifest.levels
    path = tmp_path / "out" / "_manifest"
    facts = json.loads(path.read_text())
    facts["levels"]["events"][0][0] = 1
    path.write_text(json_text(facts))
    with pytest.raises(UserError, match="`levels` has no valid value"):
        read_release(tmp_path / "out")


def _rewrite(folder: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = folder / "part-00000.parquet"
    table = change(pq.read_table(path))
    write_shard(path, table.schema, [table])


ODD_SHARDS: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "no ids": (lambda table: table.drop_columns("record_id"), "its columns are not those of its manifest"),
    "other columns": (lambda table: table.append_column("y", [["1"] * len(table)]), "its columns are not"),
    "numbers": (lambda table: table.set_column(3, "record_id", [list(range(len(table)))]), "its columns are not"),
    "a bad id": (lambda table: table.set_column(3, "record_id", [["zz"] * len(table)]), "a record_id that is none"),
    "upper case": (lambda table: table.set_column(3, "record_id", [["F" * 64] * len(table)]), "that is none"),
    "a null": (lambda table: table.set_column(1, "chosen", pa.array([None] * len(table), pa.string())), "holds a null"),
    "backwards": (lambda table: table.take(list(range(len(table)))[::-1]), "not in the order of their record ids"),
}


@pytest.mark.parametrize("kind", ODD_SHARDS)
def test_odd_shards_are_refused(tmp_path: Path, kind: str) -> None:
    change, message = ODD_SHARDS[kind]
    release(tmp_path / "out", pairs(5))
    _rewrite(tmp_path / "out", change)
    with pytest.raises(UserError, match=message):
        read_release(tmp_path / "out").check_rows()


def test_nulls_inside_messages_are_refused(tmp_path: Path) -> None:
    release(tmp_path / "out", pairs(5, conversational=True))
    read_release(tmp_path / "out").check_rows()
    odd = pa.array([[{"role": "user", "content": None}]] * 5, messages_type(()))
    _rewrite(tmp_path / "out", lambda table: table.set_column(0, "prompt", odd))
    with pytest.raises(UserError, match="holds a null"):
        list(read_release(tmp_path / "out"))


def test_incomplete_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_rlhf.data.release.ROWS_PER_SHARD", 6)
    with pytest.raises(UserError, match="no such release folder; write it again"):
        read_release(tmp_path / "none")
    (tmp_path / "file").write_text("{}")
    with pytest.raises(UserError, match="is a file, not a release folder"):
        read_release(tmp_path / "file")
    (tmp_path / "run" / "privatize" / "release").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "privatize"):
        with pytest.raises(UserError, match=r"not a release folder but has one; give .*/run/privatize/release$"):
            read_release(folder)
    release(tmp_path / "out", pairs(13), rows_per_shard=6)
    shard = tmp_path / "out" / "part-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(UserError, match="a shard is damaged"):
        read_release(tmp_path / "out")
    shard.unlink()
    with pytest.raises(UserError, match=r"holds \d+ rows where its manifest says 13"):
        read_release(tmp_path / "out")
    (tmp_path / "out" / "_manifest").write_text("{")
    with pytest.raises(UserError, match=r"_manifest: is not valid JSON"):
        read_release(tmp_path / "out")
    (tmp_path / "out" / "_manifest").unlink()
    with pytest.raises(UserError, match=r"has no _manifest, so it is no complete release"):
        read_release(tmp_path / "out")
