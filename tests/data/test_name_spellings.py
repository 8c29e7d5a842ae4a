"""Spellings of one labeller's name are one person; a ledger that holds exact names keeps them; columns likewise."""

from __future__ import annotations

import csv
import gzip
import json
import random
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.ledger_file import LedgerFile
from private_rlhf.privacy.records import fold_name
from support import raw_releases
from support.raw_releases import Row, shown

pytestmark = pytest.mark.usefixtures("quick_disk")
run = partial(raw_releases.run, labeler_column="who")
SPELLINGS = {
    "capital": str.upper,
    "space": lambda who: f" {who}\t",
    "inner space": lambda who: who.replace(" ", " \u00a0 "),
    "zero width": lambda who: f"{who[:2]}\u200b{who[2:]}\ufeff",
    "full width": lambda who: "".join(chr(ord(c) + 0xFEE0) if "a" <= c <= "z" else c for c in who),
    "decomposed": lambda who: unicodedata.normalize("NFD", who),
}


def rows_of(spelling: Any = str, people: int = 3) -> list[Row]:
    return [
        {"prompt": f"p {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "who": spelling(f"jos\u00e9 p{i % people}")}
        for i in range(30)
    ]


@pytest.mark.parametrize("columns", [(), ("who",)], ids=["fast", "row by row"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_spelling_of_a_name_is_no_other_person(
    spelling: str, columns: tuple[str, ...], tmp_path: Path, key: Path
) -> None:
    """Four spellings used to be four draws of each label, while the ledger said ε = 1."""
    first = run(rows_of(), tmp_path / "v1", key, budget=Budget(1.0, "event"))
    again = run(rows_of(SPELLINGS[spelling]), tmp_path / "v2", key, budget=Budget(1.0, "event"), columns=columns)
    assert [row[:4] for row in again] == [row[:4] for row in first]
    facts = shown(key)
    assert (facts["epsilon_total"], facts["events"], facts["labelers"]["count"]) == (1.0, 30, 3)
    assert facts["names_folded"]


def test_a_cap_counts_all_spellings_of_a_person(tmp_path: Path, key: Path) -> None:
    rows = [*rows_of(people=1)[:15], *rows_of(str.upper, people=1)[15:]]
    assert len(run(rows, tmp_path / "v1", key, max_events=5)) == 5


def test_spellings_in_one_file_are_counted_in_one_line(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(rows_of(), tmp_path / "v1", key)
    assert capsys.readouterr().err == ""
    run([*rows_of(), *rows_of(str.upper)], tmp_path / "v2", key, chunk_bytes=500)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("v2.jsonl: 3 names of labellers are other spellings of names that are there: one person each")


def test_a_released_column_keeps_its_spelling(tmp_path: Path, key: Path) -> None:
    run(rows_of(str.upper), tmp_path / "v1", key, columns=("who",))
    table = pq.read_table(tmp_path / "v1" / "part-00000.parquet")
    assert set(table.column("who").to_pylist()) == {"JOS\u00c9 P0", "JOS\u00c9 P1", "JOS\u00c9 P2"}


def test_a_ledger_with_exact_names_keeps_them(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier program left it: the same rows give the same bytes, and another spelling is another person."""
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "folds_names", False)
        exact = run(rows_of(str.upper), tmp_path / "v1", key)
        file = LedgerFile(load_key(key))
        file.write(replace(file.read(), folded=False))
    assert json.loads(file.path.read_text())["ledger"]["folded"] is False
    assert run(rows_of(str.upper), tmp_path / "v2", key) == exact
    run(rows_of(), tmp_path / "v3", key)
    facts = shown(key)
    assert (facts["labelers"]["count"], facts["names_folded"]) == (6, False)
    with pytest.raises(UserError, match="--step must have a ledger that folds names, got one that keeps"):
        run(rows_of(), tmp_path / "v4", key, step="finish")


def test_programs_of_before_refuse_a_ledger_with_folded_names(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(rows_of(), tmp_path / "v1", key)
    monkeypatch.setattr("private_rlhf.privacy.ledger_file.READABLE", (1, 2, 3))
    with pytest.raises(UserError, match="has format 5"):
        shown(key)


def test_a_fold_is_its_own_fold() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        name = "".join(chr(draw.choice((draw.randrange(32, 0xD800), draw.randrange(32, 0x250)))) for _ in range(6))
        assert fold_name(fold_name(name)) == fold_name(name)
    assert fold_name("  Stra\u00dfe\u00ad \u2003 1 ") == "strasse 1"
    assert fold_name("\u200b ") == ""
    assert fold_name("p1") != fold_name("p2")


# --- columns ----------------------------------------------------------------------------------------------------------


def _write(path: Path, row: Row) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([row.keys(), row.values()])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({name: [value] for name, value in row.items()}), path)
    else:
        line = (json.dumps(row) + "\n").encode()
        path.write_bytes(gzip.compress(line) if path.suffix == ".gz" else line)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.csv", "d.parquet"])
@pytest.mark.parametrize(
    ("column", "other"), [("prompt", "Prompt"), ("chosen", "chosen "), ("jos\u00e9", "jose\u0301")]
)
def test_columns_that_are_spellings_of_one_name_are_refused(
    name: str, column: str, other: str, tmp_path: Path, key: Path
) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "jos\u00e9": "x", "Note": "1", "note": "2"}
    request = Request(str(tmp_path / name), tmp_path / "out", 1.0, key, options=Options(labeler_column="jos\u00e9"))
    _write(tmp_path / name, row | {other: "y"})
    with pytest.raises(UserError) as refused:
        privatize_source(request)
    assert str(refused.value).removesuffix(
        f": has the columns {column!r} and {other!r}, two spellings of one name; keep or rename one"
    ).endswith((name, f"{name}, line 1"))
    _write(tmp_path / name, row)  # two spellings of a name that nobody reads are dropped as before
    privatize_source(request)


@pytest.mark.parametrize("more", [{}, {"columns": ("id",)}], ids=["fast", "row by row"])
@pytest.mark.parametrize("colon", [":", " : "])
@pytest.mark.parametrize("other", ["Chosen", "chosen ", "cho\u200bsen", "\uff43hosen"])
def test_any_line_may_hold_the_second_spelling(
    other: str, colon: str, more: dict[str, Any], tmp_path: Path, key: Path
) -> None:
    """Lines after the first one were not looked at."""
    rows = [{"prompt": f"p {i}", "chosen": "a", "rejected": 'b"', "id": f'{i}, "x": '} for i in range(40)]
    path, options = tmp_path / "d.jsonl", Options(**more)
    lines = [json.dumps(row, separators=(",", colon)) for row in (*rows, rows[7] | {"x\\": "Chosen"})]
    for escaped in (True, False):
        path.write_text("\n".join(lines))
        privatize_source(Request(str(path), tmp_path / f"out{escaped}", 1.0, key, options=options, chunk_bytes=900))
        bad = json.dumps(rows[30] | {other: "c"}, separators=(",", colon), ensure_ascii=escaped)
        path.write_text("\n".join([*lines[:30], bad, *lines[31:]]))
        with pytest.raises(UserError, match=r"line 31: has the columns 'chosen' and .*, two spellings of one name"):
            privatize_source(Request(str(path), tmp_path / "bad", 1.0, key, options=options, chunk_bytes=900))
