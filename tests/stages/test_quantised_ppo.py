"""PPO on a 4-bit base from the command line: killed and resumed, evaluated against its own π_ref, sampled from."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from accelerate import Accelerator
from private_rlhf.cli import main
from private_rlhf.data.render import Renderer
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.lm.saving import save_policy
from safetensors.torch import load_file
from support.pipeline_runs import Workspace, history, read_json, stages_started, trained, tree

pytest.importorskip("bitsandbytes")

SETTINGS = ("ppo.quantize=4bit", "ppo.optimizer=adamw_8bit", "ppo.iterations=3", "ppo.lora.rank=64")
SAID = "sft/model quantised to 4 bits (NF4)"
TOLERANCE = 1e-4


def without_ppo(finished_run: Path, target: Path) -> Path:
    shutil.copytree(finished_run, target)
    shutil.rmtree(target / "ppo")
    return target


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace, finished_run: Path) -> Path:
    run = without_ppo(finished_run, workspace.root / "undisturbed-4bit")
    workspace.run(run, "--only", "ppo", *SETTINGS)
    return run


def test_killed_resumed_evaluated_and_sampled(
    workspace: Workspace,
    finished_run: Path,
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = without_ppo(finished_run, tmp_path / "run")
    whole = run / "checkpoints" / "ppo" / "step-2"
    assert workspace.signal_when(whole, run, *SETTINGS) == -signal.SIGKILL
    assert not (run / "ppo" / "model").exists()
    assert stages_started(workspace.run(run, *SETTINGS)) == ["ppo", "evaluate", "report"]
    assert trained(run / "ppo" / "model") == trained(undisturbed / "ppo" / "model")
    assert tree(run / "ppo" / "reference") == tree(undisturbed / "ppo" / "reference")
    assert history(run) == history(undisturbed)
    assert history(run)[0]["kl"] == 0.0
    assert history(run)[-1]["kl"] != 0.0

    # The evaluation's π_ref is that of the training, and everything that speaks of π_ref says which it is.
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
    assert any(SAID in note for note in read_json(run / "evaluate" / "evaluation.json")["judge_notes"])
    assert SAID in read_json(run / "ppo" / "manifest.json")["report"]["reference_policy"]
    assert SAID in read_json(run / "report" / "card.json")["facts"]["reference_policy"]
    assert SAID in (run / "ppo" / "model" / "README.md").read_text(encoding="utf-8")
    assert "No preference label was read" in (run / "ppo" / "reference" / "README.md").read_text(encoding="utf-8")

    # The saved folders are ordinary checkpoints.
    folders = ["--policy", str(run / "ppo" / "model"), "--reference", str(run / "ppo" / "reference")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(4)))
    assert main(["sample", *folders[:2], "Say hello."]) == 0
    assert main(["evaluate", *folders, "--prompts", str(prompts), "--judge", "truth"]) == 0
    assert "win rate by truth" in capsys.readouterr().out

    # Without the key π_ref is sft/model again, and nothing is left of the other one.
    renderer = Renderer(load_tokenizer(run / "sft" / "model"), 256, 64)
    policy = load_causal_lm(run / "sft" / "model", "float32")
    save_policy(Accelerator(cpu=True), policy, renderer, run / "ppo", "float32", False, policy)
    assert not (run / "ppo" / "reference").exists()


@pytest.mark.slow
def test_two_processes_give_what_one_gives(
    workspace: Workspace, finished_run: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = without_ppo(finished_run, tmp_path / "run")
    workspace.launch("ppo", run, *SETTINGS)
    ours, theirs = (read_json(folder / "ppo" / "manifest.json") for folder in (run, undisturbed))
    assert (ours["world_size"], theirs["world_size"]) == (2, 1)
    for mine, expected in zip(ours["report"]["losses"], theirs["report"]["losses"], strict=True):
        assert mine == pytest.approx(expected, abs=TOLERANCE)
    assert (run / "ppo" / "reference" / "model.safetensors").is_file()
