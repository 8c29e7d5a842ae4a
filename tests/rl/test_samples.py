"""Samples in the log: which rows, what they say, and that a kill neither doubles nor loses one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from private_rlhf.core.world import World
from private_rlhf.reward_models.external import ExtraReward
from private_rlhf.rl import tracking
from private_rlhf.stages.ppo import learn

SMALL = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 1, "learning_rate": 1e-3, "iterations": 5, "save_every": 100}


def context(folder: Path) -> Any:
    recipe = SimpleNamespace(data=SimpleNamespace(prompts="file"))
    return SimpleNamespace(folder=folder, checkpoints=folder / "checkpoints", recipe=recipe, world=World(0, 1))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / tracking.SAMPLES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_rows_say_what_the_rollout_holds(problem: Any) -> None:
    problem.extra_rewards = [ExtraReward("nice", 1.0, lambda prompts, texts: problem.score(prompts, texts).reward)]
    trainer = problem.trainer(**SMALL, sample_every=2, sample_count=4)
    rollout, _ = trainer.collect(4)
    rows = tracking.sample_rows(trainer, rollout, 4)
    assert len(rows) == 4
    for place, row in zip((0, 2, 4, 6), rows, strict=True):
        assert row["iteration"] == 4
        assert row["prompt"] == problem.renderer.text(rollout.prompts[place])
        assert row["response"] == problem.renderer.text(rollout.responses[place])
        assert row["reward"] == pytest.approx(problem.rewards[row["prompt"], row["response"]])
        assert (row["bonus"], row["kl"]) == (0.0, pytest.approx(float(rollout.kl[place])))
        assert row["tokens"] == len(rollout.responses[place])
        assert row["extra_rewards"] == {"nice": pytest.approx(row["reward"])}
    assert tracking.sample_rows(trainer, rollout, 3) == []


def test_off_by_default(problem: Any) -> None:
    trainer = problem.trainer(**SMALL)
    assert tracking.sample_rows(trainer, trainer.collect(0)[0], 0) == []


def test_a_small_iteration_gives_every_response_once(problem: Any) -> None:
    trainer = problem.trainer(**SMALL, sample_every=1, sample_count=20)
    assert len(tracking.sample_rows(trainer, trainer.collect(0)[0], 0)) == 8


def test_killed_and_resumed_leaves_the_rows_of_a_run_that_was_not(
    problem: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "sample_every": 2, "sample_count": 2}
    history: list[dict[str, Any]] = []
    learn(problem.trainer(**settings), history, context(tmp_path / "whole"))
    whole = rows_of(tmp_path / "whole")
    assert [row["iteration"] for row in whole] == [0, 0, 2, 2, 4, 4]
    lines = [line for line in capsys.readouterr().err.splitlines() if "ppo, iteration" in line]
    assert len(lines) == 3
    assert "→" in lines[0]

    # It was killed in iteration 4, while writing; its checkpoint is of iteration 1.
    killed = tmp_path / "killed"
    killed.mkdir()
    path = killed / tracking.SAMPLES
    path.write_text("".join(json.dumps(row) + "\n" for row in whole[:4]) + '{"iteration": 4, "prom')
    trainer = problem.trainer(**settings)
    again: list[dict[str, Any]] = []
    trainer.update(trainer.collect(0)[0], 0)
    again.append(history[0])
    tracking.forget_samples(path, len(again))
    learn(trainer, again, context(killed))
    assert rows_of(killed) == whole


def test_rows_of_an_iteration_that_is_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / tracking.SAMPLES
    tracking.forget_samples(path, 3)
    tracking.append_samples(path, [])
    assert not path.exists()
    rows = [{"iteration": i, "response": "a line\u2028separator, half a pair \ud800"} for i in range(5)]
    tracking.append_samples(path, rows)
    tracking.forget_samples(path, 3)
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == rows[:3]
    tracking.forget_samples(path, 0)
    assert not path.exists()


def test_the_shown_line_is_one_line_and_short() -> None:
    texts = {"prompt": "a\nb" * 100, "response": "\x1b[2J" + "c\n" * 300}
    row = {**texts, "reward": 1.0, "bonus": 0.25, "kl": 2.0, "tokens": 64}
    line = tracking.sample_line(row)
    assert line.isprintable()
    assert "→ '·[2Jc c" in line
    assert len(line) < 200
    assert line.endswith("(r̄ 1.00, Γ 0.25, KL 2.00, 64 tokens)")
