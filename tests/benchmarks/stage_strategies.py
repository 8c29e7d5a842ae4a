"""Every stage under every strategy that is let in, on CPUs: how far it is from one process, and its peak memory.

A Llama of six layers of width 256 is trained for a few steps on the embedded task, in float32, at the same global
batches. `off`: the largest difference to one process among losses, rates and other numbers that the stage reports, and
among the weights that it saves, relative to 1 or to the number. Peaks are resident memory of one process, MiB, of which
some 600 are imported code; whole models are loaded before they are split.

Run:  python tests/benchmarks/stage_strategies.py [--directory DIR] [--processes 1 2 4] [--rows ppo reward]
      (all rows: some ten minutes)
"""

# This process imports nothing large: a child's peak begins at its parent's.
from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
GROUP = ("iterations=2", "rollouts=8", "batch_size=8", "learning_rate=1e-4")
SHORT = (
    "model.dtype=float32", "data.limit=80", "sft.max_steps=3", "sft.batch_size=8", "sft.lora=null",
    "reward.max_steps=3", "reward.batch_size=8", "ppo.iterations=2", "ppo.max_prompts=6",
    "ppo.reference_samples=2", "dpo.max_steps=3", "dpo.batch_size=8", "evaluate.num_prompts=8",
    "evaluate.gibbs_candidates=2", "evaluate.max_pairs=8", "sft.learning_rate=1e-4",
    "ppo.learning_rate=1e-4", "reward.num_components=8", "reward.ridge=1.0",
    "gvpo.max_prompts=6", "gvpo.held_out_prompts=2", "gvpo.evaluate_every=2", "gvpo.passes=1", "gvpo.rounds=1",
    "gvpo.samples_per_prompt=2",
    "gvpo.learning_rate=1e-4",
    *(f"{name}.{key}" for name in ("rloo", "grpo") for key in GROUP),
)  # fmt: skip
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
ENVIRONMENT = {"PYTHONPATH": str(ROOT), **os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
NOT_COMPARED = {"seconds", "peak_rss_mb", "peak_gpu_mb", "tokens_per_second"}


@dataclass(frozen=True)
class Case:
    """A row: a stage, its overrides, and stages that are there before."""

    stage: str
    overrides: tuple[str, ...]
    before: tuple[str, ...]


BEFORE = ("privatize", "sft")
CASES = {
    "sft, all weights": Case("sft", (), ("privatize",)),
    "reward, head": Case("reward", (), BEFORE),
    "reward, LoRA": Case("reward", ("reward.mode=lora",), BEFORE),
    "reward, all weights": Case("reward", ("reward.mode=full",), BEFORE),
    "ppo, LoRA": Case("ppo", (), (*BEFORE, "reward")),
    "ppo, all weights": Case("ppo", ("ppo.lora=null",), (*BEFORE, "reward")),
    "dpo, LoRA": Case("dpo", ("aligner=dpo",), (*BEFORE, "reward")),
    "dpo, all weights": Case("dpo", ("aligner=dpo", "dpo.lora=null"), (*BEFORE, "reward")),
    "rloo, LoRA": Case("rloo", ("aligner=rloo",), (*BEFORE, "reward")),
    "rloo, all weights": Case("rloo", ("aligner=rloo", "rloo.lora=null"), (*BEFORE, "reward")),
    "grpo, LoRA": Case("grpo", ("aligner=grpo",), (*BEFORE, "reward")),
    "grpo, all weights": Case("grpo", ("aligner=grpo", "grpo.lora=null"), (*BEFORE, "reward")),
    "gvpo, LoRA": Case("gvpo", ("aligner=gvpo",), (*BEFORE, "reward")),
    "gvpo, all weights": Case("gvpo", ("aligner=gvpo", "gvpo.lora=null"), (*BEFORE, "reward")),
    "evaluate": Case("evaluate", (), (*BEFORE, "reward", "ppo")),
}


# --- one process of a group -------------------------------------------------------------------------------------------


def work(folder: Path, base: Path, names: list[str]) -> None:
    """Runs the cases `names` one after another, each in a run directory that its main process copies together."""
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.core.world import World, barrier, declared_world, join_world
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe
    from private_rlhf.runner import execute_one

    world: World = declared_world()
    if world.size > 1:
        join_world()
    peaks = {}
    for name in names:
        case, run = CASES[name], folder / name.replace(", ", "-").replace(" ", "-")
        if world.main:
            run.mkdir(parents=True)
            for stage in case.before:
                shutil.copytree(base / stage, run / stage)
            shutil.copy(base / "recipe.yaml", run)
        barrier(world)
        recipe = load_recipe(Recipe, ROOT / "configs" / "tiny.yaml", [*settings(base.parent), *case.overrides])
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        execute_one(case.stage, recipe, RunDir(run))
        status = Path("/proc/self/status").read_text()
        peaks[name] = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    (folder / f"peaks-{world.rank}.json").write_text(json.dumps(peaks))


def settings(root: Path) -> list[str]:
    """Overrides of every run below `root`."""
    return [*SHORT, f"model.source={root / 'model'}", f"privatize.key_file={root / 'owner.key'}"]


def prepare(root: Path) -> None:
    """The base model, and a run of every stage on one process for later stages to start from."""
    import torch
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.embedded.task import load_demonstrations
    from private_rlhf.lm.base_models import tiny_config, tiny_tokenizer
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe
    from private_rlhf.runner import execute_one
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer(f"{row.prompt}\n{row.response}" for row in load_demonstrations())
    config = tiny_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    config.update({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64})
    config.update({"initializer_range": 0.04})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    recipe = load_recipe(Recipe, ROOT / "configs" / "tiny.yaml", settings(root))
    for stage in ("privatize", "sft", "reward", "ppo"):
        execute_one(stage, recipe, RunDir(root / "base"))


# --- the group --------------------------------------------------------------------------------------------------------


def launch(folder: Path, base: Path, names: list[str], processes: int, environment: Mapping[str, str]) -> None:
    """`processes` of this script that share the cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", **environment}
    if processes > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, __file__, "--work", str(folder), "--base", str(base), "--cases", *names]
    folder.mkdir()
    group = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        log = (folder / f"log-{rank}.txt").open("w")
        group.append(subprocess.Popen(command, env=common | own, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait() for process in group]
    finally:
        for process in group:
            process.kill()
    if any(codes):
        tail = "\n".join((folder / "log-0.txt").read_text().splitlines()[-5:])
        raise SystemExit(f"{folder.name}: exit codes {codes}\n{tail}")


def numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """Every number of a JSON value by its path, but for times and memory."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {prefix: float(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    pairs = [(f"{prefix}/{key}", item) for key, item in items if key not in NOT_COMPARED]
    return {name: number for path, item in pairs for name, number in numbers(item, path).items()}


def results(run: Path, stage: str) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers that a stage reports, and the weights that it saved."""
    from safetensors.torch import load_file

    found = numbers(json.loads((run / stage / "manifest.json").read_text())["report"])
    for path in (run / stage).glob("*.json"):
        if path.name in ("fit.json", "evaluation.json"):
            found |= numbers(json.loads(path.read_text()), path.name)
    weights = run / stage / "model" / "model.safetensors"
    return found, load_file(weights) if weights.is_file() else {}


def difference(run: Path, one: Path, stage: str) -> float:
    """The largest between two runs of a stage; infinite where one says more than the other."""
    (ours, weights), (theirs, expected) = results(run, stage), results(one, stage)
    if ours.keys() != theirs.keys() or weights.keys() != expected.keys():
        return float("inf")
    reported = [abs(value - theirs[name]) / max(1.0, abs(theirs[name])) for name, value in ours.items()]
    saved = [float((tensor - expected[name]).abs().max()) for name, tensor in weights.items()]
    return max([*reported, *saved])


def cell(folder: Path, one: Path, name: str, processes: int) -> str:
    """`off 2e-06, 812 MiB`."""
    place = name.replace(", ", "-").replace(" ", "-")
    off = difference(folder / place, one / place, CASES[name].stage)
    peak = max(json.loads((folder / f"peaks-{rank}.json").read_text())[name] for rank in range(processes))
    verdict = f"off {off:.0e}" if off <= TOLERANCE else f"**off {off:.0e}**"
    return f"{peak:,.0f} MiB" if folder == one else f"{verdict}, {peak:,.0f} MiB"


def main(root: Path, counts: list[int], rows: list[str]) -> None:
    subprocess.run([sys.executable, __file__, "--prepare", str(root)], env=ENVIRONMENT, check=True, capture_output=True)
    columns = {"one process": (1, {})}
    for count in [count for count in counts if count > 1]:
        columns |= {f"DDP, {count}": (count, {}), f"FSDP2, {count}": (count, FSDP)}
    for column, (processes, asked) in columns.items():
        print(f"{column} …", file=sys.stderr, flush=True)
        launch(root / column, root / "base", rows, processes, asked)
    print(f"| stage | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in rows:
        cells = [
            cell(root / column, root / "one process", name, processes) for column, (processes, _) in columns.items()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of their names; all unless given")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.base, given.cases)
    elif given.prepare:
        prepare(given.prepare)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            kept = given.directory or Path(temporary)
            kept.mkdir(parents=True, exist_ok=True)
            rows = [name for name in CASES if name.startswith(tuple(given.rows))]
            main(kept.resolve(), given.processes, rows)
