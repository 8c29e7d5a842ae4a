"""Files of measured rows; what a kill cut short is left out."""

from __future__ import annotations

from pathlib import Path

from private_rlhf.core.atomic import appending, read_rows


def test_whole_rows_survive_every_cut(tmp_path: Path) -> None:
    """At every byte at which a kill may fall, also within a letter; the row after it starts a line of its own."""
    path, rows = tmp_path / "rows.jsonl", [{"n": 1}, {"text": "ε"}, {"n": 3}]
    with appending(path) as append:
        for row in rows:
            append(row)
    content = path.read_bytes()
    assert read_rows(path) == rows
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        before = read_rows(path)
        assert before == rows[: len(before)]
        with appending(path) as append:
            append({"n": 4})
        assert read_rows(path) == [*before, {"n": 4}]
    assert read_rows(tmp_path / "none") == []


def test_an_appender_that_adds_nothing_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n')
    with appending(path):
        pass
    assert path.read_text() == '{"n": 1}\n'
