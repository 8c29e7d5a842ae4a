"""Weights split over two gloo processes (fully_shard): sampling unequal work neither hangs nor changes a token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipeline_runs import ROOT, clean_environment

from pipeline.core.config import parse
from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.world import World
from pipeline.lm.models import load_causal_lm
from pipeline.preflight import check_whole_weights, preflight

WORKER = ROOT / "tests" / "rl" / "sharded_worker.py"
TIMEOUT = 600  # seconds; against a hang, far above what it takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes left."""
    made = tmp_path_factory.mktemp("sharded")
    commands = [[sys.executable, str(WORKER), str(made), str(rank)] for rank in (0, 1)]
    processes = [
        subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_samples_what_it_would_alone(folder: Path, rank: int) -> None:
    """5 and 1 prompts in batches of 2; none and 5; 20 and 4 in one batch."""
    seen = json.loads((folder / f"seen-{rank}.json").read_text())
    assert [len(rows) for rows in seen["sharded"]] == ([5, 0, 20] if rank == 0 else [1, 5, 4])
    assert seen["sharded"] == seen["whole"]


def test_responses_ended_in_different_strides(folder: Path) -> None:
    """Else nothing of the above was tried."""
    lengths = [[len(row) for rows in json.loads((folder / f"seen-{rank}.json").read_text())["sharded"] for row in rows]
               for rank in (0, 1)]
    assert min(map(min, lengths)) < 8
    assert max(lengths[0]) > 8
    assert sorted(lengths[0]) != sorted(lengths[1])


def test_what_is_saved_is_the_whole_model(folder: Path) -> None:
    saved, expected = (load_causal_lm(folder / name, "float32").state_dict() for name in ("model", "expected"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "ZeRO-3"),
    ],
)
def test_ppo_refuses_split_weights_in_one_line(
    environment: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tree = {"name": "x", "evaluation_labels": "private", "model": {"source": "tiny"}, "privatize": {"epsilon": 1.0}}
    recipe = parse(Recipe, tree, "r")
    message = rf"^ppo cannot run with weights split over processes \({named}\): launch it with launch/ddp\.yaml"
    with pytest.raises(UserError, match=message) as caught:
        preflight(recipe, ["ppo"], World(0, 1))
    assert "\n" not in str(caught.value)
    preflight(recipe, ["sft"], World(0, 1))


def test_whole_weights_are_welcome() -> None:
    check_whole_weights({})
    check_whole_weights({"ACCELERATE_USE_FSDP": "false"})
    check_whole_weights({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"})
