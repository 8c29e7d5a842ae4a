"""The paper's recipe: its plan, and one step of every stage on a tiny model of the same architecture."""

from __future__ import annotations

import json
from pathlib import Path

from support.pipeline_runs import ROOT, Workspace, read_json

RECIPE = ROOT / "configs" / "hh_rlhf_llama3_1b.yaml"
ONE_STEP = (
    "model.source=tiny",
    "sft.max_steps=1",
    "sft.batch_size=4",
    "sft.micro_batch_size=2",
    "reward.max_steps=1",
    "reward.batch_size=4",
    "reward.micro_batch_size=2",
    "reward.num_components=4",
    "reward.accept_coin=true",
    "ppo.iterations=1",
    "ppo.rollouts=4",
    "ppo.reference_samples=2",
    "model.max_response_tokens=8",
    "evaluate.num_prompts=4",
)


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    for split, first, count in (("train", 0, 40), ("eval", 40, 8)):
        rows = [{"prompt": f"Say {i}.", "chosen": f"{i}, gladly.", "rejected": f"no {i}"}
                for i in range(first, first + count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_recipe_as_it_stands_has_a_plan(workspace: Workspace, tmp_path: Path) -> None:
    """Without --data it names a data set of the hub, which a dry run does not ask for."""
    options = ["--config", str(RECIPE), "--run-dir", str(tmp_path / "run"), "model.source=tiny", "--dry-run"]
    plan = workspace.finish(workspace.command("run", *options))
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("not run yet") == 6


def test_one_step_of_every_stage_fully_fine_tuned(workspace: Workspace, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs")
    run = tmp_path / "run"
    own = [f"privatize.key_file={workspace.root / 'owner.key'}", f"model.cache_dir={workspace.root / 'cache'}"]
    options = ["--config", str(RECIPE), "--run-dir", str(run), "--data", str(tmp_path / "pairs"), *own, *ONE_STEP]
    plan = workspace.finish(workspace.command("run", *options, "--dry-run"))
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("not run yet") == 6
    assert not run.exists()
    done = workspace.finish(workspace.command("run", *options))
    assert done.returncode == 0, done.stderr
    sft = read_json(run / "sft" / "manifest.json")["report"]
    assert (sft["steps"], sft["lora"], sft["source"]) == (1, False, "release")
    fit = read_json(run / "reward" / "fit.json")
    assert (fit["mode"], fit["reward_bound"], fit["epsilon"]) == ("full", 10.0, 0.5)
    assert len(fit["training_loss"]) == 1
    history = [json.loads(line) for line in (run / "ppo" / "history.jsonl").read_text().splitlines()]
    assert len(history) == 1
    # Nucleus sampling at 0.9 is the paper's; the step-0 KL of π_ref against itself is 0 whatever the sampler, exactly:
    # π_ref is saved in bfloat16, and both copies of it are float32.
    assert history[0]["kl"] == 0.0
    assert read_json(run / "metrics.json")["private"]["epsilon"] == 0.5
