"""The catalogue of bad inputs (`bad_inputs/table.py`): exit code 2, one line, nothing changed, soon, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli.bad_inputs.sandbox import SOUND, Outcome, Row, Sandbox, judge
from cli.bad_inputs.table import GROUPS, outcomes


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    made = Sandbox(tmp_path_factory.mktemp("bad inputs") / "box")
    made.fill()
    return made


def defects(found: list[Outcome]) -> list[str]:
    return [f"{each.kind}: {each.row.name!r}: {each.said}" for each in found if each.kind not in SOUND]


@pytest.mark.parametrize("group", GROUPS)
def test_every_bad_input_is_one_line(
    group: str, sandbox: Sandbox, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert defects(outcomes(sandbox, group)) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_row_of_the_catalogue(group: str, sandbox: Sandbox, quick_disk: None) -> None:
    assert defects(outcomes(sandbox, group, slow=True)) == []


def test_the_catalogue_is_large_and_names_each_input_once() -> None:
    names = [row.name for rows in GROUPS.values() for row in rows()]
    assert len(names) > 450
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_what_the_catalogue_calls_a_defect(sandbox: Sandbox) -> None:
    """Each kind is seen where it is planted."""
    row, line = Row("x", ["x"]), "private-rlhf: no\n"
    assert judge(row, 2, "", line, "", [])[0] == "refused"
    assert judge(row, 2, "", line, "", ["owner.key"])[0] == "silent damage"
    assert judge(row, 0, "", "", "", [])[0] == "wrong answer"
    assert judge(row, 2, "", line + line, "", [])[0] == "wrong answer"
    assert judge(row, 2, "", "more\n" + line, "", [])[0] == "wrong answer"
    assert judge(row, 2, "", "private-rlhf: unspeakable\n", "", [])[0] == "wrong answer"
    assert judge(row, 1, "", "Traceback (most recent call last):\n" + line, "", [])[0] == "traceback"
    assert judge(row, None, "", "", "ValueError", [])[0] == "traceback"
    damage = Row("damage", ["keygen", "--output=x/y.key"], make=lambda: None)
    assert sandbox.run(damage).kind == "silent damage"
    waits = Row("hang", ["label-filter", "--epsilon=1", "--store=draws.db"], make=lambda: os.mkfifo("draws.db", 0o600))
    assert sandbox.run(waits).kind == "refused"
    assert Path(sandbox.work, "draws.db").exists() is False
