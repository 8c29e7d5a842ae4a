"""What a finished run prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

from private_rlhf.core.rundir import RunDir
from private_rlhf.report.sections import show_results
from rich.console import Console


def printed(run: RunDir) -> str:
    console = Console(file=io.StringIO(), width=100)
    show_results(run, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_tables_and_answers_but_not_the_card(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert printed(run) == ""
    run.stage("report").mkdir()
    run.stage("evaluate").mkdir()
    table = "| | sft | PPO |\n|---|---|---|\n| distinct-2 | 0.7 | 0.6 |\n"
    page = f"# demo\n\nIt wins.\n\n{table}\n## Privacy card\n\nsecretive\n"
    (run.stage("report") / "report.md").write_text(page)
    samples = [{"prompt": f"Q{i}", "sft": {"text": "plain\ntext"}, "private": {"text": "better"}} for i in range(9)]
    (run.stage("evaluate") / "samples.json").write_text(json.dumps(samples))
    (tmp_path / "metrics.json").write_text(json.dumps({"private": {"epsilon": 2.0}}))
    text = printed(run)
    assert "PPO, ε = 2: better" in text
    assert "distinct-2" in text
    assert "secretive" not in text
    assert "π_ref (SFT): plain text" in text
    assert "Q2" in text
    assert "Q3" not in text
    assert "report.html" in text


def test_no_control_character_of_a_page_or_an_answer_is_printed(tmp_path: Path) -> None:
    run, escapes = RunDir(tmp_path), "\x1b[2Jgone\x07\u202e"
    for stage in ("report", "evaluate"):
        run.stage(stage).mkdir()
    (run.stage("report") / "report.md").write_text(f"# demo {escapes}\n\n| a {escapes} |\n|---|\n| 1 |\n")
    samples = [{"prompt": f"Q {escapes}", "sft": {"text": f"A {escapes}"}}]
    (run.stage("evaluate") / "samples.json").write_text(json.dumps(samples))
    text = printed(run)
    assert r"\x1b[2Jgone" in text
    assert all(each.isprintable() or each == "\n" for each in text)
