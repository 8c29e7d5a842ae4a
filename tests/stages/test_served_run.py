"""A run whose rollouts and evaluation come from a server is the run without it; one that lies is stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from support.fake_vllm import FakeVllm
from support.pipeline_runs import Workspace, history, numbers, read_json
from support.two_processes import FSDP

TOLERANCE = 1e-4


@pytest.fixture
def fake(finished_run: Path) -> Iterator[FakeVllm]:
    """A server of the run's sft/model."""
    home = finished_run / "sft" / "model"
    with FakeVllm(load_causal_lm(home, "float32"), load_tokenizer(home).pad_token_id).running() as made:
        made.max_model_len = 96 + 12
        yield made


def served(fake: FakeVllm) -> tuple[str, ...]:
    return "rollout.engine=vllm", f"rollout.urls=[{fake.url}]", "rollout.patience=20"


def evaluation(run: Path) -> dict[str, float]:
    return numbers(read_json(run / "evaluate" / "evaluation.json"))


def shown(run: Path) -> list[str]:
    rows = read_json(run / "evaluate" / "samples.json")
    return [row[name]["text"] for row in rows for name in row if name != "prompt"]


def test_policy_and_evaluation_are_those_without_servers(
    workspace: Workspace, finished_run: Path, fake: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one process, the evaluation by two as well, whose shares differ in size."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    workspace.run_here(run, *served(fake))
    assert [entry["policy_loss"] for entry in history(run)] == pytest.approx(
        [entry["policy_loss"] for entry in history(finished_run)], abs=TOLERANCE
    )
    assert shown(run) == shown(finished_run)
    assert evaluation(run) == pytest.approx(evaluation(finished_run), abs=TOLERANCE)
    proof = read_json(run / "evaluate" / "manifest.json")["report"]["engine"]
    assert proof["tokens"] > 500
    assert proof["largest"] < 1e-4

    before = len(fake.log)
    shutil.rmtree(run / "evaluate")
    workspace.launch("evaluate", run, *served(fake), "evaluate.num_prompts=23")
    names = [name for path, name in fake.log[before:] if path == "/v1/completions"]
    assert len(set(names)) == 2  # one adapter for both processes
    assert len(names) == 23 * (8 + 1 + 1)

    fake.lie, fake.from_version = "base", 1
    capsys.readouterr()
    assert main(["run", "--only", "evaluate", *workspace.options(run, *served(fake))]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"private-rlhf: the engine at {fake.url} does not draw from this policy")
    assert "likely cause: the base model without the adapter" in line
    assert not (run / "evaluate" / "manifest.json").exists()

    workspace.run_here(run, "--from", "ppo")
    assert not (run / "ppo" / "adapter").exists()


@pytest.mark.slow
def test_rloo_on_split_weights_is_that_without_servers(
    workspace: Workspace, finished_run: Path, fake: FakeVllm, tmp_path: Path
) -> None:
    """And a replica that lies is named by both processes, where only one of them has a response of it."""
    keys = ("iterations=3", "rollouts=8", "batch_size=8", "learning_rate=1e-3", "lora.rank=4")
    settings = ("aligner=rloo", *(f"rloo.{key}" for key in keys))
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        shutil.copytree(finished_run, run)
    workspace.run(one, "--only", "rloo", *settings)
    workspace.launch("rloo", two, *settings, *served(fake), **FSDP)
    ours, theirs = (history(run, "rloo") for run in (two, one))
    names = sorted(theirs[0])
    for row, expected in zip(ours, theirs, strict=True):
        assert [row[name] for name in names] == pytest.approx([expected[name] for name in names], abs=TOLERANCE)
    assert ours[-1]["engine"]["policy"]["from_previous"] > 1e-3
    assert (two / "rloo" / "adapter" / "adapter_model.safetensors").is_file()
    fake.lie, lying = "temperature", tmp_path / "lying"
    replicas = f"rollout.urls=[{fake.url},{fake.url.replace('127.0.0.1', 'localhost')}]"
    pair = (*served(fake), replicas, "rloo.rollouts=2", "rloo.batch_size=2", "rloo.samples_per_prompt=2")
    shutil.copytree(finished_run, lying)
    with pytest.raises(AssertionError, match=r"likely cause: temperature 0\.5 in place of 1"):
        workspace.launch("rloo", lying, *settings, *pair, **FSDP)


def test_dpo_is_evaluated_by_servers(workspace: Workspace, finished_run: Path, fake: FakeVllm, tmp_path: Path) -> None:
    settings = ("aligner=dpo", "dpo.max_steps=6", "dpo.batch_size=8", "dpo.lora.rank=4", "dpo.learning_rate=1e-2")
    runs = tmp_path / "own", tmp_path / "served"
    for run, more in zip(runs, ((), served(fake)), strict=True):
        shutil.copytree(finished_run, run)
        workspace.run_here(run, *settings, *more)
    assert shown(runs[1]) == shown(runs[0])
    assert evaluation(runs[1]) == pytest.approx(evaluation(runs[0]), abs=TOLERANCE)
    config = json.loads((runs[1] / "dpo" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["base_model_name_or_path"]) == (4, None)
