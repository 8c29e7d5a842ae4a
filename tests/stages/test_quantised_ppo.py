"""PPO on a 4-bit base from the command line: killed and resumed, evaluated against its own π_ref, sampled from."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from pipeline_runs import Workspace, history, read_json, stages_started, tree
from safetensors.torch import load_file

SETTINGS = ("ppo.quantize=4bit", "ppo.optimizer=adamw_8bit", "ppo.iterations=4", "ppo.lora.rank=64")


def test_a_four_bit_policy_goes_through_the_whole_pipeline(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        shutil.copytree(finished_run, folder)
        shutil.rmtree(folder / "ppo")
    workspace.run(other, "--only", "ppo", *SETTINGS)
    state = run / "checkpoints" / "ppo"
    assert workspace.signal_when((state / "step-2").exists, run, *SETTINGS) == -signal.SIGKILL
    assert not (run / "ppo" / "model").exists()
    assert stages_started(workspace.run(run, *SETTINGS)) == ["ppo", "evaluate", "report"]

    # --- resumed is never killed, and the KL starts at exactly 0
    for folder in ("ppo/model", "ppo/reference"):
        assert tree(run / folder) == tree(other / folder)
    assert history(run) == history(other)
    assert history(run)[0]["kl"] == 0.0
    assert history(run)[-1]["kl"] != 0.0

    # --- π_ref of the evaluation is that of the training
    sft, reference, policy = (
        load_file(run / name / "model.safetensors") for name in ("sft/model", "ppo/reference", "ppo/model")
    )
    assert sft.keys() == reference.keys() == policy.keys()
    changed = {name for name in sft if not sft[name].equal(reference[name])}
    assert changed == {name for name in sft if "_proj" in name}
    assert changed == {name for name in sft if not reference[name].equal(policy[name])}
    metrics = read_json(run / "metrics.json")
    assert metrics["sft"]["kl"] == 0
    assert 0 < metrics["private"]["kl"] < 5
    said = "sft/model quantised to 4 bits (NF4)"
    assert any(said in note for note in read_json(run / "evaluate" / "evaluation.json")["judge_notes"])
    assert said in read_json(run / "ppo" / "manifest.json")["report"]["reference_policy"]
    assert said in read_json(run / "report" / "card.json")["facts"]["reference_policy"]
    assert said in (run / "ppo" / "model" / "README.md").read_text(encoding="utf-8")
    assert "No preference label was read" in (run / "ppo" / "reference" / "README.md").read_text(encoding="utf-8")

    # --- the saved folders are ordinary checkpoints
    answered = workspace.finish(workspace.command("sample", "--policy", str(run / "ppo" / "model"), "Say hello."))
    assert answered.returncode == 0, answered.stderr
    folders = ["--policy", str(run / "ppo" / "model"), "--reference", str(run / "ppo" / "reference")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(4)))
    compared = workspace.finish(workspace.command("evaluate", *folders, "--prompts", str(prompts), "--judge", "truth"))
    assert compared.returncode == 0, compared.stderr
    assert "win rate by truth" in compared.stdout

    # --- without the key the reference is sft/model again, and nothing is left of the other one
    workspace.run(run, "--only", "ppo", "ppo.iterations=1")
    assert not (run / "ppo" / "reference").exists()
