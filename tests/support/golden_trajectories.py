"""What the trained stages of the tiny recipe report step by step: recorded once, compared at each test run.

Record again, in a commit that says why the numbers moved:  python tests/support/golden_trajectories.py

bfloat16 is recorded and compared with oneDNN held down to AVX512-BF16: AMX adds products in another order, and six
steps of DPO at a rate that moves the losses make a twentieth of a nat of that rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "golden" / "trajectories.json"
LORA_REWARD = ("reward.mode=lora", "reward.ridge=1.0", "reward.max_steps=6", "reward.batch_size=8")
DPO = ("aligner=dpo", "dpo.max_steps=6", "dpo.batch_size=8", "dpo.lora.rank=4", "dpo.kl_coef=2.0")
FASTER = ("dpo.learning_rate=3.0e-3",)
SHORTER = ("ppo.iterations=4",)
GVPO = ("batch_size=8", "samples_per_prompt=4", "max_prompts=8", "held_out_prompts=4", "held_out_samples=2",
        "evaluate_every=4", "rounds=1", "passes=1", "learning_rate=1.0e-3", "lora.rank=4")  # fmt: skip
GROUP = ("iterations=4", "rollouts=8", "batch_size=4", "learning_rate=1.0e-3", "lora.rank=4")

Trajectories = dict[str, list[float]]


def trajectories(folder: Path, dtype: str) -> Trajectories:
    """By stage the numbers that one seeded run of the tiny recipe reports, in order.

    float32 runs all of them. In bfloat16 a sample of PPO turns at the slightest rounding, and what follows is another
    trajectory: only what does not sample is recorded.
    """
    run = folder / dtype
    public = "privatize.insecure_seed=0"  # flips that are the same in every run; the labels are synthetic
    own = [public, f"model.cache_dir={folder / 'cache'}", f"model.dtype={dtype}", *SHORTER]

    def stage(name: str, *overrides: str) -> None:
        from private_rlhf.cli import main

        command = ["run", "--config", str(ROOT / "configs" / "tiny.yaml"), "--run-dir", str(run), "--only", name]
        if code := main([*command, *own, *overrides]):
            raise RuntimeError(f"stage {name} ended with exit code {code}")

    found: Trajectories = {}
    stage("privatize")
    stage("sft")
    found["sft"] = _report(run, "sft")["loss"]
    stage("reward")
    fit = _json(run / "reward" / "fit.json")
    found["reward head"] = [number for row in fit["ridge_path"] for number in row] + [fit["validation_log_likelihood"]]
    if dtype == "float32":
        stage("ppo")
        shared = ("score", "reward", "bonus", "kl", "policy_loss", "grad_norm")
        found["ppo"] = _history(run, "ppo", (*shared, "value_loss", "entropy"))
        for aligner in ("rloo", "grpo"):
            stage(aligner, f"aligner={aligner}", *(f"{aligner}.{given}" for given in GROUP))
            found[aligner] = _history(run, aligner, shared)
        stage("gvpo", "aligner=gvpo", *(f"gvpo.{given}" for given in GVPO))
        found["gvpo"] = _history(run, "gvpo", ("score", "reward", "bonus", "kl", "objective_gain"))
    stage("reward", *LORA_REWARD, "reward.lora.rank=4")
    fit = _json(run / "reward" / "fit.json")
    found["reward lora"] = [loss for _, loss in fit["training_loss"]] + [fit["validation_log_likelihood"]]
    stage("dpo", *DPO, *FASTER)
    found["dpo"] = _report(run, "dpo")["loss"]
    return found


def _history(run: Path, stage: str, names: tuple[str, ...]) -> list[float]:
    lines = (run / stage / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[name] for line in lines for name in names]


def _report(run: Path, stage: str) -> Any:
    return _json(run / stage / "manifest.json")["report"]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def held_down(folder: Path, dtype: str) -> Trajectories:
    """`trajectories` in a process of its own on at most AVX512-BF16: oneDNN reads its limit once, when it starts."""
    output = folder / f"{dtype}.json"
    subprocess.run(
        [sys.executable, __file__, dtype, str(folder), str(output)],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        check=True,
    )
    found: Trajectories = _json(output)
    return found


def main() -> None:
    """Records both dtypes anew, or, given a dtype, a folder and a file, writes the trajectories of that one."""
    import torch

    torch.set_num_threads(1)
    if sys.argv[1:]:
        dtype, folder, output = sys.argv[1:]
        Path(output).write_text(json.dumps(trajectories(Path(folder), dtype)), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as home:
        found = {"float32": trajectories(Path(home), "float32"), "bfloat16": held_down(Path(home), "bfloat16")}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{RECORDED.relative_to(ROOT)}: {sum(len(row) for each in found.values() for row in each.values())} numbers")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    main()
