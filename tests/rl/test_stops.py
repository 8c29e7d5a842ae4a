"""Runs that stop themselves: a number that is not finite, a policy that ran away. What they leave, what they keep."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_rlhf import cli
from private_rlhf.core.errors import RunStopped
from private_rlhf.core.world import World
from private_rlhf.rl import resume_state
from private_rlhf.rl.nonfinite import NonFiniteError, tensor_statistics
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.stages.ppo import improve_or_stop

NAN = float("nan")
SMALL = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 2, "learning_rate": 1e-3}


def context(folder: Path) -> Any:
    recipe = SimpleNamespace(data=SimpleNamespace(prompts="file"))
    return SimpleNamespace(folder=folder / "ppo", checkpoints=folder / "checkpoints", recipe=recipe, world=World(0, 1))


def weights(trainer: PpoTrainer) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in trainer.model.parameters() if tensor.requires_grad]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def strict_json(path: Path) -> Any:
    """Parses standard JSON alone: Python would take NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_statistics_tell_the_bad_values_from_the_others() -> None:
    found = tensor_statistics(torch.tensor([[1.0, NAN], [float("inf"), -3.0]]))
    assert found == {
        "shape": [2, 2],
        "nan": 1,
        "positive_infinite": 1,
        "negative_infinite": 0,
        "first": [0, 1],
        "finite_min": -3.0,
        "finite_max": 1.0,
        "finite_mean": -1.0,
    }
    assert tensor_statistics(torch.tensor([NAN]))["finite_mean"] is None


def test_a_reward_that_is_not_finite_is_dumped_with_its_rows_alone(problem: Any, tmp_path: Path) -> None:
    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(0)
    prompt, response = (problem.renderer.text(rows[2]) for rows in (rollout.prompts, rollout.responses))
    problem.rewards[prompt, response] = NAN
    same_text = [row for row, ids in enumerate(rollout.responses)
                 if (problem.renderer.text(rollout.prompts[row]), problem.renderer.text(ids)) == (prompt, response)]
    with pytest.raises(NonFiniteError, match="rollout field 'reward' is not finite") as caught:
        trainer.collect(0)
    path = caught.value.write(tmp_path)
    dump = strict_json(path)
    assert (path.name, dump["iteration"], dump["tensor"]) == ("nonfinite.json", 0, "reward")
    assert dump["statistics"]["nan"] == len(same_text)
    assert [row["row"] for row in dump["rows"]] == same_text
    assert (dump["rows"][0]["prompt"], dump["rows"][0]["response"]) == (prompt, response)
    assert dump["rows"][0]["reward"] == "nan"
    assert dump["rows"][0]["response_ids"] == rollout.responses[2]


def test_a_loss_that_is_not_finite_names_the_minibatch_and_the_row(problem: Any) -> None:
    trainer = problem.trainer(**SMALL, whiten_advantages=False)
    rollout, _ = trainer.collect(0)
    before = weights(trainer)
    rollout.logprobs[5, 0] = rollout.reference_logprobs[5, 0] = -1e4  # the ratio overflows
    rollout.scores[5] = -10.0  # with a negative advantage nothing clips it
    with pytest.raises(NonFiniteError, match="policy_loss is inf at iteration 3: lower the learning rate") as caught:
        trainer.update(rollout, 3)
    facts, rows = caught.value.facts, caught.value.rows
    assert (facts["iteration"], facts["epoch"], facts["tensor"]) == (3, 0, "policy_loss")
    assert facts["statistics"]["positive_infinite"] == 1
    assert len(rows) == 4
    assert {row["row"]: row["policy_loss"] for row in rows}[5] == float("inf")
    assert all(abs(row["policy_loss"]) < 100 for row in rows if row["row"] != 5)
    if facts["minibatch"] == 0:
        assert same(before, weights(trainer))


def test_a_gradient_that_is_not_finite_names_its_parameter(problem: Any) -> None:
    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(0)
    before = weights(trainer)
    trainer.model.value_head.weight.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([7]), NAN))
    with pytest.raises(NonFiniteError, match="gradient norm is nan at iteration 0") as caught:
        trainer.update(rollout, 0)
    facts = caught.value.facts
    assert (facts["epoch"], facts["minibatch"], facts["tensor"]) == (0, 0, "gradient of value_head.weight")
    assert (facts["statistics"]["nan"], facts["statistics"]["first"]) == (1, [0, 7])  # as it was before clipping
    assert all(torch.isfinite(torch.tensor(row["policy_loss"])) for row in caught.value.rows)
    assert same(before, weights(trainer))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_stage_stops_with_a_dump_and_keeps_the_last_good_checkpoint(problem: Any, tmp_path: Path) -> None:
    where = context(tmp_path)
    trainer = problem.trainer(**SMALL)
    resume_state.install_hooks(trainer.accelerator)
    _, entry, _ = improve_or_stop(trainer, 0, where)
    resume_state.save(trainer.accelerator, where.checkpoints, 1, {"history": [entry], "kl_coef": 0.1})
    kept = {path: path.read_bytes() for path in where.checkpoints.rglob("*") if path.is_file()}
    trainer.model.value_head.weight.register_hook(lambda gradient: gradient * NAN)
    with pytest.raises(RunStopped, match=r"gradient norm is nan.*nonfinite\.json\. The last good .*step-1$"):
        improve_or_stop(trainer, 1, where)
    assert {path: path.read_bytes() for path in where.checkpoints.rglob("*") if path.is_file()} == kept
    dump = strict_json(where.folder / "nonfinite.json")
    assert (dump["iteration"], dump["minibatch"], dump["value"]) == (1, 0, "nan")
    assert [path.name for path in where.folder.iterdir()] == ["nonfinite.json"]  # no half-written file beside it


def test_a_policy_that_ran_away_stops_before_it_learns_more(problem: Any, tmp_path: Path) -> None:
    where = context(tmp_path)
    trainer = problem.trainer(**{**SMALL, "learning_rate": 0.05, "max_grad_norm": 100.0}, max_kl=0.01)
    resume_state.install_hooks(trainer.accelerator)
    _, entry, _ = improve_or_stop(trainer, 0, where)
    assert entry["kl"] == 0
    before = weights(trainer)
    message = r"^KL per response is \d.* at iteration 1, over ppo\.max_kl = 0\.01: lower ppo\.learning_rate or .*\. "
    with pytest.raises(RunStopped, match=message + "No checkpoint had been written yet$"):
        improve_or_stop(trainer, 1, where)
    assert same(before, weights(trainer))
    resume_state.save(trainer.accelerator, where.checkpoints, 1, {"history": [entry], "kl_coef": 0.1})
    with pytest.raises(RunStopped, match=message + r"The last good checkpoint is .*step-1$"):
        improve_or_stop(trainer, 1, where)
    assert resume_state.load_latest(trainer.accelerator, where.checkpoints) == {"history": [entry], "kl_coef": 0.1}


def test_the_command_line_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise RunStopped("gradient norm is nan; see ppo/nonfinite.json")

    monkeypatch.setattr(cli, "command_line", stop)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "private-rlhf: gradient norm is nan; see ppo/nonfinite.json\n"
