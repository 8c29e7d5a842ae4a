"""The lines that end a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.core.noise import bound_of
from private_rlhf.report.run_card import privacy_status, run_card
from private_rlhf.report.run_facts import RunFacts, read_run
from private_rlhf.report.sections import closing_lines
from support.pipeline_runs import STAGES, TINY


def lines_of(facts: RunFacts) -> dict[str, str]:
    status = privacy_status(facts)
    lines = closing_lines(facts, status, run_card(facts, status), Path("runs/x/report"))
    return {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}


def test_a_private_run_ends_in_six_lines(make_run: Any) -> None:
    facts = read_run(make_run(), STAGES)
    lines = lines_of(facts)
    assert list(lines) == ["protected", "how", "cost", "policy", "report", "next"]
    assert "synthetic and treated as people's" in lines["protected"]
    epsilon = facts.release["guarantee"]["epsilon"]
    assert lines["cost"].startswith(f"ε = {epsilon:g} a label: the odds of its two values change by a factor of ")
    assert f"by a factor of {bound_of(epsilon)} at most" in lines["cost"]
    assert "the reference policy" in lines["policy"]
    assert "runs/x/report/report.html" in lines["report"]
    assert lines["next"].startswith("private-rlhf run --config own_data")
    own = replace(facts, recipe=facts.recipe | {"data": {"preferences": "mine.jsonl"}}, evaluation={})
    assert "synthetic" not in lines_of(own)["protected"]
    assert lines_of(own)["policy"] == "not evaluated"
    assert lines_of(own)["next"] == "private-rlhf sample --policy runs/x/ppo/model PROMPT"


def test_labels_with_levels_are_kept_by_their_level(make_run: Any) -> None:
    """The largest ε is a bound of all of them, and not what each was kept with."""
    facts = read_run(make_run(), STAGES)
    status = replace(privacy_status(facts), epsilon=4.0, levels=((0.5, 30), (4.0, 60)))
    lines = closing_lines(facts, status, run_card(facts, privacy_status(facts)), Path("runs/x/report"))
    assert "kept with probability 62.2 %, 98.2 % by its level and" in lines[1].replace("\u00a0", " ")
    assert "ε = 4 a label at most: the odds of its two values change by a factor of 54.6 at most" in lines[2]


def test_a_run_that_is_not_private_claims_nothing(make_run: Any) -> None:
    lines = lines_of(read_run(make_run(epsilon=math.inf, name="nonprivate"), STAGES))
    assert lines["protected"].startswith("nothing (NOT PRIVATE: ")
    assert lines["cost"] == "not counted, for no protection is claimed"


def test_a_stage_by_itself_says_nothing_of_the_policy_before(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    run.stage("report").mkdir(exist_ok=True)
    facts = read_run(run, STAGES)
    (run.stage("report") / "card.json").write_text(json.dumps(run_card(facts, privacy_status(facts))))
    monkeypatch.setattr("private_rlhf.runner.execute", lambda *given: None)
    for more, lines in ([], 6), (["--from", "ppo"], 6), (["--only", "privatize"], 0):
        assert main(["run", "--config", str(TINY), "--run-dir", str(run.root), *more]) == 0
        assert capsys.readouterr().out.count("\n") == lines
