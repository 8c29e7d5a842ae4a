"""Peak memory of stages as `private-rlhf plan` predicts it and as manifests record it, on a CPU.

Every stage runs in a process of its own, briefly but with whole batches: two iterations of PPO, three steps of other
trainers. SFT hardly learns (learning rate 1e-6), so that sampled responses reach the cap, which is what the prediction
is for. `held out`: settings that no part of the formula was tuned on. The tiny recipe is not among them: beside the
process it holds little but kernels of repeated shapes, and is predicted up to 1.5 times too high.

Run:  python -m private_rlhf_lab.benches.plan_memory [--directory DIR] [--only NAME …]  (2 minutes each)
"""

# This process imports nothing large: a child's peak begins at its parent's.
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TARGET = 0.15
SHORT = (
    "data.limit=200", "sft.max_steps=3", "sft.learning_rate=1e-6", "ppo.iterations=2", "ppo.rollouts=32",
    "ppo.max_prompts=16", "evaluate.num_prompts=16", "evaluate.max_pairs=16",
)  # fmt: skip
FULL = ("sft.lora=null", "ppo.lora=null", "reward.mode=full", "reward.ridge=1.0", "reward.max_steps=3")


@dataclass(frozen=True)
class Configuration:
    """A recipe of configs/ with overrides; `held_out`: the formula was not tuned on it."""

    recipe: str
    overrides: tuple[str, ...]
    aligner: str = "ppo"
    held_out: bool = False

    @property
    def given(self) -> list[str]:
        """All overrides; later ones win."""
        return [*SHORT, *self.overrides, f"aligner={self.aligner}"]


CONFIGURATIONS = {
    "bf16 LoRA": Configuration("demo", ("model.dtype=bfloat16",)),
    "fp32 LoRA": Configuration("demo", ("model.dtype=float32",)),
    "bf16, all weights": Configuration(
        "demo", ("model.dtype=bfloat16", *FULL, "reward.batch_size=8", "ppo.minibatch_size=8")
    ),
    "bf16, 128 tokens": Configuration(
        "demo",
        ("model.dtype=bfloat16", "model.max_response_tokens=128", "ppo.minibatch_size=8", "ppo.rollouts=16",
         "ppo.generate_batch_size=64", "evaluate.batch_size=64", "ppo.max_prompts=8", "evaluate.num_prompts=8",
         "ppo.lora={rank: 16}", "sft.lora={rank: 16}"),
    ),
    "fp32, 64 tokens, whole reward model": Configuration(
        "demo",
        ("model.dtype=float32", "model.max_response_tokens=64", "ppo.minibatch_size=8", "ppo.generate_batch_size=32",
         "evaluate.batch_size=32", "sft.batch_size=24", "reward.num_layers=null", "ppo.lora={rank: 8}",
         "evaluate.num_prompts=8"),
        held_out=True,
    ),
    "bf16 DPO, all weights": Configuration(
        "demo",
        ("model.dtype=bfloat16", "sft.batch_size=8", "sft.micro_batch_size=4", "dpo.max_steps=3", "dpo.batch_size=8",
         "dpo.lora=null"),
        aligner="dpo", held_out=True,
    ),
}


def cli(*arguments: str) -> None:
    """`private-rlhf` with these arguments; SystemExit with what it said where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "private_rlhf.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr[-2000:]}")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def compared(name: str, configuration: Configuration, directory: Path) -> list[tuple[str, float, float]]:
    """(stage, predicted, measured) in MiB of every stage that runs a model."""
    run, plan = directory / name.replace(" ", "-"), directory / "plan.json"
    options = ["--config", str(ROOT / "configs" / f"{configuration.recipe}.yaml"), "--run-dir", str(run)]
    given = [*configuration.given, f"privatize.key_file={directory / 'owner.key'}"]
    cli("plan", *options, "--no-calibration", "--json", str(plan), *given)
    predicted = {stage: facts["bytes"] / 2**20 for stage, facts in read_json(plan)["stages"].items()}
    found = []
    for stage in ("privatize", *predicted):
        cli("run", *options, "--only", stage, *given)
        if stage in predicted:
            measured = read_json(run / stage / "manifest.json")["peak_rss_mb"]
            found.append((stage, predicted[stage], measured))
    return found


def main() -> None:
    """Prints a line per stage and configuration, then the worst ratio of tuned and of held-out ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="where runs go; default: a temporary folder")
    parser.add_argument("--only", nargs="+", choices=sorted(CONFIGURATIONS), default=list(CONFIGURATIONS))
    options = parser.parse_args()
    worst = {False: 1.0, True: 1.0}
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        print(f"{'configuration':<38}{'stage':<10}{'predicted':>10}{'measured':>10}{'ratio':>7}   MiB")
        for name in options.only:
            configuration = CONFIGURATIONS[name]
            label = f"{name}{' (held out)' if configuration.held_out else ''}"
            for stage, predicted, measured in compared(name, configuration, directory):
                ratio = predicted / measured
                print(f"{label:<48}"[:48] + f"{stage:<10}{predicted:>8.0f}{measured:>10.0f}{ratio:>7.2f}", flush=True)
                held_out = configuration.held_out
                worst[held_out] = max(worst[held_out], ratio, 1 / ratio, key=lambda value: abs(value))
    for held_out, ratio in worst.items():
        verdict = "within" if ratio <= 1 + TARGET else "outside"
        print(f"worst of {'held-out' if held_out else 'tuned'} ones: off by a factor of {ratio:.2f}, {verdict} 15 %")


if __name__ == "__main__":
    main()
