"""Two CPU processes under accelerate give what one gives, on the same global batch."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from private_rlhf.core.atomic import read_rows
from safetensors.torch import load_file
from support.pipeline_runs import Workspace, clean_environment, numbers, read_json

TOLERANCE = 1e-4
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
REGRESSION = ("batch_size=8", "samples_per_prompt=4", "learning_rate=1e-3", "passes=1", "lora.rank=4")
LORA = ("reward.mode=lora", "reward.ridge=1.0", "reward.max_steps=6", "reward.batch_size=8", "reward.lora.rank=4")


def rerun(
    workspace: Workspace, finished_run: Path, run: Path, stage: str, *overrides: str, processes: int = 2
) -> Path:
    """A copy of the finished run with `stage` done again by several processes."""
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / stage)
    workspace.launch(stage, run, *overrides, processes=processes)
    assert read_json(run / stage / "manifest.json")["world_size"] == processes
    return run


def losses(run: Path, stage: str) -> list[float]:
    """Every loss a stage reports, in order."""
    report = read_json(run / stage / "manifest.json")["report"]
    if stage == "ppo":
        return [value for row in report["losses"] for value in row]
    if stage == "sft":
        return list(report["loss"])
    fit = read_json(run / "reward" / "fit.json")
    path = [value for row in fit["ridge_path"] or [] for value in row]
    return [fit["validation_log_likelihood"], *path, *(loss for _, loss in fit["training_loss"])]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_losses_are_those_of_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path, stage: str, processes: int
) -> None:
    run = rerun(workspace, finished_run, tmp_path / "run", stage, processes=processes)
    expected = losses(finished_run, stage)
    assert len(expected) >= 6
    assert losses(run, stage) == pytest.approx(expected, abs=TOLERANCE)


def test_lora_reward_losses_are_those_of_one_process(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    shutil.copytree(finished_run, one)
    workspace.run(one, "--only", "reward", *LORA)
    run = rerun(workspace, finished_run, tmp_path / "two", "reward", *LORA)
    expected = losses(one, "reward")
    assert len(read_json(one / "reward" / "fit.json")["training_loss"]) == 6
    assert losses(run, "reward") == pytest.approx(expected, abs=TOLERANCE)
    # Each process sums the statistics of Γ over its share of the pairs.
    ours, theirs = (load_file(folder / "reward" / "model" / "bonus.safetensors") for folder in (run, one))
    torch.testing.assert_close(ours["information"], theirs["information"], rtol=1e-3, atol=1e-3)


def test_dpo_losses_are_those_of_one_process(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    settings = ("aligner=dpo", "dpo.max_steps=6", "dpo.batch_size=8", "dpo.lora.rank=4")
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        shutil.copytree(finished_run, run)
    workspace.run(one, *settings)
    workspace.launch("dpo", two, *settings)
    expected = read_json(one / "dpo" / "manifest.json")["report"]["loss"]
    assert len(expected) == 6
    assert read_json(two / "dpo" / "manifest.json")["report"]["loss"] == pytest.approx(expected, abs=TOLERANCE)
    metrics = read_json(one / "metrics.json")
    assert metrics["private_dpo"]["epsilon"] == 2.0
    assert metrics["private_dpo"]["kl"] > 0
    assert set(metrics["seconds"]) == {"privatize", "sft", "reward", "dpo", "evaluate", "report"}
    assert "DPO, ε = 2" in (one / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("aligner", "lora", "strategy"),
    [
        ("rloo", "lora.rank=4", {}),
        pytest.param("grpo", "lora.rank=4", {}, marks=pytest.mark.slow),
        pytest.param("rloo", "lora=null", FSDP2, marks=pytest.mark.slow),
        pytest.param("grpo", "lora.rank=4", FSDP2, marks=pytest.mark.slow),
    ],
)
def test_rloo_and_grpo_are_those_of_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path, aligner: str, lora: str, strategy: dict[str, str]
) -> None:
    keys = ("iterations=4", "rollouts=8", "batch_size=8", "learning_rate=1e-3", "save_every=2", lora)
    settings = (f"aligner={aligner}", *(f"{aligner}.{key}" for key in keys))
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        shutil.copytree(finished_run, run)
    workspace.run(one, *settings)
    workspace.launch(aligner, two, *settings, **strategy)
    ours, theirs = (
        [json.loads(line) for line in (run / aligner / "history.jsonl").read_text().splitlines()] for run in (two, one)
    )
    assert len(theirs) == 4
    assert theirs[0]["kl"] == 0
    assert theirs[0]["bonus"] > 0
    names = sorted(set(theirs[0]) - {"tokens_per_second"})
    for row, expected in zip(ours, theirs, strict=True):
        assert [row[name] for name in names] == pytest.approx([expected[name] for name in names], abs=TOLERANCE)
    assert len(list((one / aligner / "replay").glob(f"{aligner}-*-0-of-1.safetensors"))) == 4
    assert len(list((two / aligner / "replay").glob("*-of-2.safetensors"))) == 2 * (4 + 1)
    metrics = read_json(one / "metrics.json")
    assert metrics[f"private_{aligner}"]["epsilon"] == 2.0
    page = (one / "report" / "report.html").read_text(encoding="utf-8")
    assert f"{aligner.upper()}, ε = 2" in page
    assert f"How did {aligner.upper()} get there?" in page
    assert "Privacy card" in (one / aligner / "model" / "README.md").read_text(encoding="utf-8")


def test_gvpo_is_that_of_one_process(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    keys = ("max_prompts=8", "released_answers=2", "held_out_prompts=4", "held_out_samples=2", "evaluate_every=4",
            "rounds=1", *REGRESSION)  # fmt: skip
    longer = "model.max_response_tokens=40"  # some of the released answers are within it
    settings = ("aligner=gvpo", longer, *(f"gvpo.{key}" for key in keys))
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(finished_run, one)
    workspace.run(one, *settings)
    shutil.copytree(one, two)
    shutil.rmtree(two / "gvpo")
    workspace.launch("gvpo", two, *settings)
    ours, theirs = (
        [json.loads(line) for line in (run / "gvpo" / "history.jsonl").read_text().splitlines()] for run in (two, one)
    )
    assert [row["step"] for row in theirs] == [0, 4, 8, 12]
    names = sorted(set(theirs[0]) - {"policy_loss", "grad_norm", "true_reward"})
    for row, expected in zip(ours, theirs, strict=True):
        assert [row[name] for name in names] == pytest.approx([expected[name] for name in names], abs=TOLERANCE)
    assert [row["policy_loss"] for row in ours[1:]] == pytest.approx(
        [row["policy_loss"] for row in theirs[1:]], abs=TOLERANCE
    )
    shards = {run.name: sorted(path.name for path in (run / "gvpo" / "replay").glob("*")) for run in (one, two)}
    assert shards["one"] == [
        "gvpo-00001-0-of-1.safetensors", "held_out-00000-0-of-1.safetensors", "index.json",
        "reference-00000-0-of-1.safetensors", "release-00000-0-of-1.safetensors",
    ]  # fmt: skip
    assert len(shards["two"]) == 9
    assert read_json(one / "metrics.json")["private_gvpo"]["epsilon"] == 2.0
    page = (one / "report" / "report.html").read_text(encoding="utf-8")
    assert "GVPO, ε = 2" in page
    assert "How did GVPO get there?" in page
    assert "Privacy card" in (one / "gvpo" / "model" / "README.md").read_text(encoding="utf-8")


def test_ppo_with_the_regression_before_and_after_is_that_of_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    settings = ("ppo.warm_start=regression", "ppo.polish=regression", "ppo.max_prompts=7", "ppo.iterations=3",
                *(f"gvpo.{key}" for key in REGRESSION))  # fmt: skip
    one = tmp_path / "one"
    shutil.copytree(finished_run, one)
    workspace.run(one, "--only", "ppo", *settings)
    run = rerun(workspace, finished_run, tmp_path / "two", "ppo", *settings)
    assert losses(run, "ppo") == pytest.approx(losses(one, "ppo"), abs=TOLERANCE)
    ours, theirs = (read_json(each / "ppo" / "manifest.json")["report"]["polish"] for each in (run, one))
    assert theirs["policy_loss"] > 0
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_learning_from_reference_completions_is_that_of_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    settings = ("ppo.reference_rollouts=true", "ppo.samples_per_prompt=4", "ppo.max_prompts=7", "ppo.iterations=3")
    one = tmp_path / "one"
    shutil.copytree(finished_run, one)
    workspace.run(one, "--only", "ppo", *settings)
    run = rerun(workspace, finished_run, tmp_path / "two", "ppo", *settings)
    expected = losses(one, "ppo")
    assert len(expected) == 6
    assert losses(run, "ppo") == pytest.approx(expected, abs=TOLERANCE)


def test_evaluation_is_that_of_one_process(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    run = rerun(workspace, finished_run, tmp_path / "run", "evaluate")
    ours, theirs = (numbers(read_json(folder / "evaluate" / "evaluation.json")) for folder in (run, finished_run))
    assert len(theirs) > 50
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_evaluation_on_split_weights_is_that_of_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    """One prompt and three pairs: a process without a prompt, and one with a pair less, take part all the same."""
    few = ("evaluate.num_prompts=1", "evaluate.max_pairs=3")
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        shutil.copytree(finished_run, run)
        shutil.rmtree(run / "evaluate")
    workspace.run(one, "--only", "evaluate", *few)
    workspace.launch("evaluate", two, *few, **FSDP2)
    assert read_json(two / "evaluate" / "manifest.json")["report"]["split_weights"] is True
    ours, theirs = (numbers(read_json(run / "evaluate" / "evaluation.json")) for run in (two, one))
    assert len(theirs) > 50
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_two_checkpoints_are_compared_as_by_one_process(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    """Each process samples its share; one of them judges, prints and writes. Two go on from what one left. Of three
    batches on split weights one process has one, and takes part in two passes."""
    found = []
    for processes, strategy in ((1, {}), (2, {}), (2, FSDP2)):
        given = {"policy": finished_run / "ppo" / "model", "reference": finished_run / "sft" / "model"}
        given |= {"prompts": "embedded", "judge": "truth", "limit": 70, "output": tmp_path / f"{len(found)}.json"}
        options = [f"--{name}={value}" for name, value in given.items()]
        if len(found) == 1:
            killed, kept = workspace.start(workspace.command("evaluate", *options)), tmp_path / "1.json.partial"
            while killed.poll() is None and not read_rows(kept / "answers-0.jsonl"):
                time.sleep(0.01)
            killed.kill()
            killed.communicate()
        done = workspace.launch_command("evaluate", *options, processes=processes, **strategy)
        assert done.stdout.count("win rate by truth") == 1
        assert not (tmp_path / f"{len(found)}.json.partial").exists()
        found.append(read_json(tmp_path / f"{len(found)}.json"))
    one, *others = found
    for other in others:
        assert other["pairs"] == one["pairs"]


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "'two'"),
    ],
)
def test_a_world_without_a_launcher_is_refused_at_once(
    workspace: Workspace, tmp_path: Path, environment: dict[str, str], named: str
) -> None:
    """It would otherwise wait half an hour for a second process."""
    assert "WORLD_SIZE" not in clean_environment()
    options = workspace.options(tmp_path / "run")
    done = workspace.finish(workspace.command("run", *options), **environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "WORLD_SIZE" in done.stderr
    assert named in done.stderr
    assert not (tmp_path / "run").exists()
