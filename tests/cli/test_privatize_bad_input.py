"""Damaged data for `privatize`, and odd input that it must take; other bad input is in `bad_inputs` and `fuzz`."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.cli import main

SECRET = "unspeakable"  # in every text of every row: no message may repeat it
ROWS = [{"prompt": f"{SECRET} p{i}", "chosen": f"{SECRET} c{i}", "rejected": f"{SECRET} r{i}"} for i in range(8)]
FUZZ = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a key and good data."""
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "--output", "owner.key"]) == 0
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def command(**changed: str) -> list[str]:
    """`privatize` on the good data, with options changed."""
    options = {"data": "good.jsonl", "output": "release", "epsilon": "1", "key": "owner.key"} | changed
    return ["privatize", *(f"--{name}={value}" for name, value in options.items())]


def test_two_keys_differ_and_any_name_will_do(folder: Path) -> None:
    names = ["ключ 密钥.key", "a\u202eb.key", "-k"]
    for name in names:
        assert main(["keygen", f"--output={name}"]) == 0
    assert len({(folder / name).read_text() for name in [*names, "owner.key"]}) == 4
    assert main(command(key=names[0])) == 0


def test_a_file_s_own_name_is_repeated_printably(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "good.jsonl").rename(folder / "a\x1b[2J\nb.jsonl")
    assert main(command(data="a\x1b[2J\nb.jsonl")) == 0
    assert json.loads((folder / "release" / "_manifest").read_text())["source"] == r"a\x1b[2J b.jsonl"


def files(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """The same rows as files of every kind."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), table)
    text = "prompt,chosen,rejected\n" + "".join(f"{row['prompt']},{row['chosen']},{row['rejected']}\n" for row in rows)
    return {"x.jsonl": lines, "x.jsonl.gz": gzip.compress(lines), "x.parquet": table.getvalue(), "x.csv": text.encode()}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet", "x.csv"])
@FUZZ
@given(st.data())
def test_a_damaged_file_is_refused_or_read(folder: Path, capsys: pytest.CaptureFixture[str], name: str,
                                           data: st.DataObject) -> None:
    """Cut short, or with a few bytes changed: exit code 0 or 2, one line, no row of it repeated, no half release."""
    content = bytearray(files(ROWS)[name])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    number = len(list(folder.iterdir()))
    capsys.readouterr()
    code = main(command(data=name, output=f"release{number}"))
    out, err = capsys.readouterr()
    assert code in (0, 2)
    assert SECRET not in out + err
    assert (folder / f"release{number}").exists() == (code == 0)
    assert sum(line.startswith("private-rlhf: ") for line in err.splitlines()) == (code == 2)


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda text: not text.isspace())


@FUZZ
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS).filter(lambda row: row[1] != row[2]), min_size=1, max_size=6))
def test_text_of_every_kind_is_released_byte_for_byte(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    """Line separators, direction marks, NUL, combining and astral characters: the pairs come out as they went in."""
    given_rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    number = len(list(folder.iterdir()))
    lines = "".join(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for row in given_rows)
    (folder / f"{number}.jsonl").write_bytes(lines.encode())
    assert main(command(data=f"{number}.jsonl", output=f"release{number}")) == 0
    released = [row for path in sorted((folder / f"release{number}").glob("*.parquet"))
                for row in pq.read_table(path).to_pylist()]
    pairs = {(row["prompt"], frozenset((row["chosen"], row["rejected"]))) for row in released}
    assert pairs == {(prompt, frozenset(pair)) for prompt, *pair in rows}
    assert len(released) == len(pairs)
