"""Weights split over two gloo processes (fully_shard): sampling and PPO on unequal work neither hang nor differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.lm.models import load_causal_lm
from private_rlhf.lm.saving import merged_copy
from private_rlhf.rl import resume_state
from support.sharded_ppo_worker import ITERATIONS, NARROW, SETTINGS, learn, with_references
from support.two_processes import run_two

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left that sampled."""
    return run_two("sharded_worker", tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left that learnt by PPO."""
    return run_two("sharded_ppo_worker", tmp_path_factory.mktemp("learnt"))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_samples_what_it_would_alone(folder: Path, rank: int) -> None:
    """5 and 1 prompts in batches of 2; none and 5; 20 and 4 in one batch."""
    seen = json.loads((folder / f"seen-{rank}.json").read_text())
    assert [len(rows) for rows in seen["sharded"]] == ([5, 0, 20] if rank == 0 else [1, 5, 4])
    assert seen["sharded"] == seen["whole"]
    assert seen["compared"] == seen["whole"][:1]


def test_responses_ended_in_different_strides(folder: Path) -> None:
    """Else nothing of the above was tried."""
    lengths = [
        [len(row) for rows in json.loads((folder / f"seen-{rank}.json").read_text())["sharded"] for row in rows]
        for rank in (0, 1)
    ]
    assert min(map(min, lengths)) < 8
    assert max(lengths[0]) > 8
    assert sorted(lengths[0]) != sorted(lengths[1])


def test_what_is_saved_is_the_whole_model(folder: Path) -> None:
    saved, expected = (load_causal_lm(folder / name, "float32").state_dict() for name in ("model", "expected"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_ppo_on_split_weights_is_that_of_one_process(learnt: Path, problem: Any, kind: str) -> None:
    """Losses of every iteration, log-probabilities under π_ref and all weights, after unequal shares of work."""
    trainer = with_references(problem).trainer(kind == "lora", **SETTINGS)
    before = {name: tensor.clone() for name, tensor in trainer.bare.state_dict().items()}
    expected = learn(trainer, 0, ITERATIONS)
    for rank in (0, 1):
        said = json.loads((learnt / f"ppo-{rank}.json").read_text())[kind]
        assert said["split"] > 10
        for ours, theirs in zip(said["seen"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=TOLERANCE, rel=TOLERANCE)
    ends, _ = torch.load(learnt / f"{kind}.pt", weights_only=True)
    whole = trainer.bare.state_dict()
    assert ends.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(ends[name], tensor, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    moved = max(float((whole[name] - before[name]).abs().max()) for name in before)
    assert moved > 100 * TOLERANCE  # else nothing of the above was tried
    merged = merged_copy(trainer.policy, trainer.policy.state_dict(), torch.float32).state_dict()
    saved = load_causal_lm(learnt / f"{kind}-model", "float32").state_dict()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, merged[name], atol=TOLERANCE, rtol=TOLERANCE, msg=name)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_split_weights_are_resumed_bit_for_bit(learnt: Path, kind: str) -> None:
    for rank in (0, 1):
        said = json.loads((learnt / f"ppo-{rank}.json").read_text())[kind]
        assert said["resumed"] == said["seen"][1:]
    end, resumed = torch.load(learnt / f"{kind}.pt", weights_only=True)
    assert all(torch.equal(end[name], resumed[name]) for name in end)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_before_the_first_step_counts_no_step(learnt: Path, kind: str) -> None:
    """Neither when it is written nor when it is read; what is learnt after it is that of one process (above)."""
    for rank in (0, 1):
        assert json.loads((learnt / f"ppo-{rank}.json").read_text())[kind]["steps_before"] == [0, 0]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_every_process_stops_at_a_gradient_that_one_of_them_sees(learnt: Path, kind: str) -> None:
    """The value head has one row, which one process holds."""
    for rank in (0, 1):
        refused = json.loads((learnt / f"ppo-{rank}.json").read_text())[kind]["refused"]
        assert refused["message"].startswith("value gradient norm is nan at iteration 0")
        assert refused["tensor"] == "gradient of value_head.weight"
        assert refused["rows"] == SETTINGS["minibatch_size"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_rollout_gathers_split_weights_once(learnt: Path, kind: str) -> None:
    """Not once per decoded token; afterwards nothing is left whole, and the samples are the same."""
    for rank in (0, 1):
        said = json.loads((learnt / f"ppo-{rank}.json").read_text())[kind]
        once, each_time = said["once"], said["each_time"]
        assert once["responses"] == each_time["responses"]
        assert once["whole"] == 0
        # Two layers and the rest of the policy; of a frozen copy the same for its draws, then for reading them each
        # layer in each of three micro-batches.
        assert once["gathers"] == (3 if kind == "lora" else 3 + 3 + 3 * 2 + 1)
        assert each_time["gathers"] > 20
        assert said["reference_split"] == (kind == "full")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_split_reward_model_scores_as_a_whole_one(learnt: Path, rank: int) -> None:
    """Five texts and none, one and three, in passes of two: a process without a text takes part in the others' passes,
    and afterwards holds its half again; the score layer alone stays whole."""
    said = json.loads((learnt / f"ppo-{rank}.json").read_text())["scored"]
    assert [len(row) for row in said["split"]] == ([5, 1] if rank == 0 else [3])
    for split, alone in zip(said["split"], said["alone"], strict=True):
        assert split == pytest.approx(alone, abs=1e-5)
        assert len({round(score, 3) for score in alone}) == len(alone)
    assert 0.4 < said["share"] < 0.6
    assert said["whole"] == 1


def test_fewer_responses_in_a_minibatch_than_processes(learnt: Path, problem: Any) -> None:
    """One process learns from each response while the other waits; and completions of π_ref are drawn once."""
    trainer = with_references(problem).trainer(**NARROW)
    expected = learn(trainer, 0, ITERATIONS)
    said = [json.loads((learnt / f"ppo-{rank}.json").read_text())["narrow"] for rank in (0, 1)]
    for own in said:
        for ours, theirs in zip(own["seen"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=TOLERANCE, rel=TOLERANCE)
        assert own["references"].keys() == problem.references.keys()
        for prompt, kept in problem.references.items():
            assert own["references"][prompt] == pytest.approx(kept.flatten().tolist(), abs=TOLERANCE)
    assert said[0]["references"] == said[1]["references"]
    assert sorted(said[0]["drawn"] + said[1]["drawn"]) == sorted(problem.references)


def test_one_process_goes_on_from_the_checkpoint_of_two(learnt: Path, problem: Any) -> None:
    trainer = with_references(problem).trainer(**NARROW)
    resume_state.install_hooks(trainer.accelerator)
    problem.references.update(resume_state.latest_references(learnt / "narrow"))
    assert problem.references
    resume_state.load_latest(trainer.accelerator, learnt / "narrow")
    expected = json.loads((learnt / "ppo-0.json").read_text())["narrow"]["seen"][1:]
    for ours, theirs in zip(learn(trainer, 1, ITERATIONS), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE, rel=TOLERANCE)
