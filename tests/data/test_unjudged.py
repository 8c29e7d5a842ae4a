"""Tasks of annotation tools that nobody has judged: left out, counted by that reason, and nothing of a label in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.core.atomic import json_text
from private_rlhf.core.errors import UserError
from private_rlhf.data import chunks, curate
from private_rlhf.data.container import settle
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.release import MANIFEST, SIGNATURE, read_release
from private_rlhf.data.source_summary import summary_of
from private_rlhf.data.verify import verify_release
from private_rlhf.privacy.card import card_rows, privacy_card
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.signatures import file_digest, sign
from support.plain_release import contents

TASKS, UNJUDGED = 60, 23
Write = Callable[[Path, int, bool], str]
pytestmark = pytest.mark.usefixtures("quick_disk")


def argilla(folder: Path, unjudged: int, turned: bool = False) -> str:
    """Of the unjudged records every third has an answer that is discarded, a rating, or none."""
    said = [
        {"better": [{"value": "a", "user_id": "p", "status": "discarded"}]},
        {"quality": [{"value": 4, "user_id": "p", "status": "submitted"}]},
        {},
    ]
    rows = []
    for i in range(TASKS):
        value = "ab"[(i % 2) ^ turned]
        judged: Any = {"better": [{"value": value, "user_id": who, "status": "submitted"} for who in "pq"[: 1 + i % 2]]}
        fields = {"prompt": f"Say number {i}.", "a": f"yes {i}", "b": f"no {i}"}
        rows.append({"fields": fields, "responses": judged if i >= unjudged else said[i % 3]})
    (folder / "argilla.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    return str(folder / "argilla.jsonl")


def label_studio(folder: Path, unjudged: int, turned: bool = False) -> str:
    """Of the unjudged tasks every second was skipped, the others have no annotation."""
    rows: list[dict[str, Any]] = []
    for i in range(TASKS):
        value = {"selected": ("left", "right")[(i % 2) ^ turned]}
        result = [{"from_name": "q", "to_name": "a,b", "type": "pairwise", "value": value}]
        given = [{"completed_by": p, "was_cancelled": i < unjudged, "result": result} for p in range(1 + i % 2)]
        data = {"prompt": f"Say number {i}.", "a": f"yes {i}", "b": f"no {i}"}
        rows.append({"data": data, "annotations": given if i >= unjudged or i % 2 else []})
    (folder / "label-studio.json").write_text(json.dumps(rows[::-1]))
    return str(folder / "label-studio.json")


TOOLS = pytest.mark.parametrize("write", [argilla, label_studio])
LINE = "23 rows left out (23 for a task without a judgement)"


@TOOLS
def test_unjudged_tasks_are_counted_wherever_rows_are(
    write: Write, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process, two, small pieces, and two tasks with steps: the same count in the same bytes."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 7)
    source, labels = write(tmp_path, UNJUDGED, False), 37 + 37 // 2 + 37 % 2  # from 23 on the odd ones have two
    one = Request(source, tmp_path / "one", 1.0, key, source="s", workers=1)
    assert privatize_source(one).endswith(f"; {LINE}")
    manifest = read_release(one.output).manifest
    assert manifest.rows == labels
    assert list(manifest.dropped.items()) == [("identical", 0), ("empty", 0), ("duplicates", 0), ("unjudged", 23)]
    assert card_rows(privacy_card(manifest.as_dict()))["Rows left out"] == LINE
    two, parts = (replace(one, output=tmp_path / name, workers=2, chunk_bytes=900) for name in ("two", "parts"))
    privatize_source(two)
    for step in ("map:2/2", "map:1/2", "reduce:1/2", "reduce:2/2"):
        curate.release_step(replace(parts, step=step, workers=1))
    assert curate.release_step(replace(parts, step="finish")).endswith(f"; {LINE}")
    assert contents(one.output) == contents(two.output) == contents(parts.output)
    capsys.readouterr()
    assert main(["inspect", source]) == 0
    printed = capsys.readouterr().out
    assert f": {TASKS + labels - 37} rows of 1 file(s)" in printed
    assert LINE in printed


@TOOLS
def test_the_head_counts_tasks_and_not_answers(write: Write, tmp_path: Path) -> None:
    """Judged ones come first: 37 tasks with 56 answers, then those without."""
    head, source = 40, write(tmp_path, UNJUDGED, False)
    found = summary_of(source, None, Options(), head)
    assert (found.rows, found.dropped["unjudged"], found.whole) == (56, 3, False)
    assert "59 first rows of 1 file(s)" in found.lines()[0]


@TOOLS
def test_the_count_does_not_depend_on_what_was_chosen(write: Write, tmp_path: Path) -> None:
    said = [summary_of(write(tmp_path, UNJUDGED, turned), None, Options()).lines() for turned in (False, True)]
    assert said[0] == said[1]


@TOOLS
def test_a_source_without_them_says_nothing_of_them(write: Write, tmp_path: Path, key: Path) -> None:
    """As `ties`: the manifest has the bytes that it had before these were counted."""
    request = Request(write(tmp_path, 0, False), tmp_path / "out", 1.0, key, source="s")
    assert privatize_source(request).endswith("; no rows left out")
    assert list(json.loads((request.output / MANIFEST).read_bytes())["dropped"]) == ["identical", "empty", "duplicates"]


def test_a_release_from_before_they_were_counted_opens_and_stays(tmp_path: Path, key: Path) -> None:
    """The same command gives its bytes again and says how many there are; another manifest is not taken for it."""
    request = Request(argilla(tmp_path, UNJUDGED), tmp_path / "out", 1.0, key, source="s")
    privatize_source(request)
    path, facts = request.output / MANIFEST, json.loads((request.output / MANIFEST).read_bytes())
    del facts["dropped"]["unjudged"]
    path.write_text(json_text(facts))
    signed = {each.name: file_digest(each) for each in sorted(request.output.iterdir()) if each.name != SIGNATURE}
    (request.output / SIGNATURE).write_text(json_text(sign(load_key(key), signed)))
    settle(request.output)
    before = contents(request.output)
    assert "unjudged" not in read_release(request.output).manifest.dropped
    verify_release(request.output)
    assert privatize_source(request).endswith(LINE)
    assert contents(request.output) == before
    facts["dropped"]["empty"] = 1
    path.write_text(json_text(facts))
    with pytest.raises(UserError, match="holds something else and is not overwritten"):
        privatize_source(request)
