"""Whole runs on one GPU, as a user starts them."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gpu.machine import rehearsal
from support.pipeline_runs import ROOT, STAGES, Workspace, history, numbers, read_json

pytestmark = pytest.mark.gpu

CUT = (
    "data.limit=200",
    "sft.max_steps=3",
    "ppo.iterations=2",
    "ppo.rollouts=16",
    "ppo.max_prompts=16",
    "ppo.reference_samples=2",
    "evaluate.num_prompts=8",
    "reward.accept_coin=true",
    "evaluate.gibbs_candidates=2",
    "evaluate.max_pairs=8",
)
"""What is done less of in the demo."""
LESS = (
    "data.limit=40",
    "model.max_response_tokens=8",
    "sft.batch_size=4",
    "reward.num_layers=2",
    "ppo.rollouts=4",
    "ppo.minibatch_size=4",
    "ppo.max_prompts=4",
    "evaluate.num_prompts=4",
)
"""And still less of it in a rehearsal."""
VARIANTS = {
    "dpo": ("aligner=dpo", "dpo.max_steps=4"),
    "full": ("reward.mode=full", "reward.ridge=1", "reward.max_steps=2", "ppo.lora=null", "ppo.iterations=2"),
    "top-layers": ("ppo.lora.last_layers=1", "ppo.lora.target_modules=[q_proj, v_proj]", "ppo.iterations=2"),
}
FOUR_BIT = (
    "reward.mode=lora",
    "reward.quantize=4bit",
    "reward.optimizer=paged_adamw_8bit",
    "reward.ridge=1",
    "reward.max_steps=2",
    "ppo.quantize=4bit",
    "ppo.optimizer=adamw_8bit",
    "ppo.lora.rank=64",
    "ppo.iterations=2",
)
"""The paged optimiser is for GPUs alone; from rank 64 on the moments of these weights are kept in 8 bits."""


def start(home: Workspace, *command: str, **environment: str) -> None:
    """A command in `home` that must succeed; on the CPU in a rehearsal."""
    where = {"ACCELERATE_USE_CPU": "true"} if rehearsal() else {}
    done = home.finish(list(command), **where, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


def align(home: Workspace, recipe: str, run: Path, *overrides: str) -> None:
    """`private-rlhf run`."""
    config = ROOT / "configs" / f"{recipe}.yaml"
    start(home, *home.command("run", "--config", str(config), "--run-dir", str(run), *overrides))


def check(run: Path, device: torch.device, aligner: str = "ppo") -> None:
    """It ran to its end, where it should, and every figure of its evaluation is a number."""
    for stage in STAGES:
        assert (run / stage.replace("ppo", aligner) / "manifest.json").is_file()
    assert read_json(run / "environment.json")["device"] == device.type
    figures = numbers(read_json(run / "metrics.json"))
    assert figures
    assert all(map(math.isfinite, figures.values()))
    if aligner == "ppo":
        lines = history(run)
        assert lines[0]["kl"] == 0.0
        assert lines[-1]["kl"] != 0.0


@pytest.fixture(scope="module")
def tiny(home: Workspace) -> Path:
    """The tiny recipe as it stands."""
    run = home.root / "runs" / "tiny"
    align(home, "tiny", run)
    return run


def test_the_tiny_recipe(tiny: Path, device: torch.device) -> None:
    check(tiny, device)


def test_the_tiny_recipe_through_accelerate(home: Workspace, device: torch.device, tmp_path: Path) -> None:
    """`launch/single_gpu.yaml` adds autocast to bfloat16."""
    script, config = ROOT / "launch" / "run_pipeline.sh", ROOT / "configs" / "tiny.yaml"
    settings = {"PYTHON": sys.executable, "ACCELERATE_CONFIG": str(ROOT / "launch" / "single_gpu.yaml")}
    start(home, str(script), str(config), str(tmp_path / "run"), **settings)
    check(tmp_path / "run", device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(home: Workspace, tiny: Path, device: torch.device, tmp_path: Path, variant: str) -> None:
    run = shutil.copytree(tiny, tmp_path / "run")
    align(home, "tiny", run, *VARIANTS[variant])
    check(run, device, "dpo" if variant == "dpo" else "ppo")


def test_four_bits(home: Workspace, tiny: Path, device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = shutil.copytree(tiny, tmp_path / "run")
    paged = (setting.replace("paged_", "") if rehearsal() else setting for setting in FOUR_BIT)
    align(home, "tiny", run, *paged)
    check(run, device)


def test_the_real_model(home: Workspace, device: torch.device, tmp_path: Path) -> None:
    align(home, "demo", tmp_path / "run", *CUT, *(LESS if rehearsal() else ()))
    check(tmp_path / "run", device)
