"""metrics.json has the methods as evaluated, and sums and maxima over the stages beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir, write_metrics

STAGES = ("privatize", "sft", "ppo", "evaluate")


def stage(run: RunDir, name: str, seconds: float, peak: float, world_size: int = 1) -> None:
    run.complete(name, {"stage": name, "seconds": seconds, "peak_rss_mb": peak, "world_size": world_size})


def evaluated(root: Path, content: dict[str, Any]) -> RunDir:
    run = RunDir(root)
    stage(run, "privatize", 1.25, 300.0)
    stage(run, "ppo", 100.5, 900.5, 2)
    stage(run, "evaluate", 10.0, 700.0, 1)
    (run.stage("evaluate") / "evaluation.json").write_text(json.dumps(content))
    return run


def test_methods_pass_through_and_costs_are_summed(tmp_path: Path) -> None:
    methods = {"sft": {"kl": 0.0, "epsilon": None}, "private": {"kl": 0.8, "kl_ci": [0.7, 0.9], "epsilon": 2.0}}
    share = {"value": 0.8, "ci_low": 0.7, "ci_high": 0.9, "n": 240}
    run = evaluated(
        tmp_path, {"methods": methods, "ppo_over_gibbs": share, "longer_answer_baseline": None, "judge_notes": ["x"]}
    )
    write_metrics(run, STAGES)
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        **methods,
        "seconds": {"privatize": 1.25, "ppo": 100.5, "evaluate": 10.0},
        "wall_seconds": 111.75,
        "peak_rss_mb": 900.5,
        "world_size": 2,
        "ppo_over_gibbs": share,
    }


def test_stages_that_the_recipe_lacks_do_not_count(tmp_path: Path) -> None:
    run = evaluated(tmp_path, {"methods": {}})
    write_metrics(run, [name for name in STAGES if name != "ppo"])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["wall_seconds"], metrics["peak_rss_mb"], metrics["world_size"]) == (11.25, 700.0, 1)


def test_nothing_before_evaluate_has_completed(tmp_path: Path) -> None:
    run = evaluated(tmp_path, {"methods": {}})
    run.reopen("evaluate")
    write_metrics(run, STAGES)
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"methods"'])
def test_damaged_evaluation_is_named(tmp_path: Path, content: str) -> None:
    run = evaluated(tmp_path, {})
    (run.stage("evaluate") / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=r"evaluation\.json .*--from evaluate"):
        write_metrics(run, STAGES)
