"""Reward-model training of this project beside peers, on the same model, pairs and settings: pairs/s, peak memory, and
the ratios ours/peer.

Loops, each in a process of its own, taking turns epoch by epoch:

    plain   chosen and rejected texts in two forward passes, each padded to its batch's longest, default AdamW: what
            the published loop does, less the vocabulary logits that it computes and throws away
    trl     TRL's RewardTrainer with its defaults (fused AdamW, one forward pass of both texts), gradient
            checkpointing and autocast off
    ours    this project's PrivateRewardTrainer with batches of similar length (`reward.group_by_length`), both texts of
            a pair in one row that holds the prompt once, and the CPU's faster attention for the row's length

Full fine-tuning in float32 and bfloat16, and LoRA (the default adapter) on weights of either. The first --pairs pairs
of the HH-RLHF evaluation data where PRIVATE_RLHF_TEST_DATA names it, else as many of the built-in pairs; at most 512
tokens a text (the prompt 256, the response 256), batches of 4. An epoch's time holds its data loading, not the
trainer's start.

What is not alike:
- The losses: `plain` and ours the private likelihood at ε = 2, TRL plain Bradley-Terry. Ours bounds the reward and
  logs the debiased accuracy. They cost next to nothing.
- Length groups are what a recipe asks for, not a default: --no-groups switches them off. They find little to group in
  16 pairs; --pairs 64 is nearer to a real run.
- Full fine-tuning in bfloat16 keeps all weights and AdamW's state in bfloat16 in all loops (ours: the head in
  float32): good for timing, poor for learning. Recipes train float32 weights.

Run:  python tests/benchmarks/reward_peers.py [--model smollm2|tiny|PATH] [--settings fp32 bf16 lora-fp32 lora-bf16]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import peer_inputs
from peer_processes import Measured, in_turn, spread, table, write_json

SCRIPT = Path(__file__).with_name("peer_reward_loops.py")
SETTINGS = ("fp32", "bf16", "lora-fp32", "lora-bf16")
LOOPS = ("plain", "trl", "ours")


def speed(iteration: Measured) -> float:
    """Pairs per second."""
    return float(iteration["pairs"] / iteration["seconds"]["train"])


def row(name: str, result: dict[str, Any], ours: float | None) -> list[str]:
    """One line of the table."""
    done = result["iterations"]
    return [
        name,
        f"{result['facts']['trainable'] / 1e6:.2f}",
        spread([speed(iteration) for iteration in done]),
        f"{max(iteration['peak_rss_mib'] for iteration in done):.0f}",
        f"{max(iteration['other_cpus'] for iteration in done):.2f}",
        f"{ours / median(map(speed, done)):.2f}" if ours else "",
    ]


def compare(arguments: argparse.Namespace, shared: dict[str, Any], setting: str) -> dict[str, Any]:
    """Runs and prints the table of one setting."""
    told = {**shared, "dtype": setting.removeprefix("lora-"), "lora": setting.startswith("lora")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(told))
        commands = {name: [sys.executable, str(SCRIPT), name, str(path)] for name in arguments.loops}
        results = in_turn(commands, arguments.iterations, arguments.warmup)
    ours = median(map(speed, results["ours"]["iterations"])) if "ours" in results else None
    header = ["loop", "trainable, M", "pairs/s", "peak MiB", "other CPUs", "ours / loop"]
    print(f"\n{setting}: median [min-max] of {arguments.iterations} epochs\n")
    print(table(header, [row(name, result, ours) for name, result in results.items()]), flush=True)
    factors = {n: ours / median(map(speed, r["iterations"])) for n, r in results.items()} if ours else {}
    return {"loops": results, "ratios": factors}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a checkpoint folder")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--iterations", type=int, default=3, help="epochs that count")
    parser.add_argument("--warmup", type=int, default=1, help="epochs that are run and not counted")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-groups", action="store_true", help="random batches for ours too")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="where converted models are kept")
    parser.add_argument("--output", type=Path, metavar="JSON")
    arguments = parser.parse_args()
    if arguments.pairs % arguments.batch:
        parser.error("--batch must divide --pairs")
    path = peer_inputs.checkpoint(arguments.model, arguments.cache)
    source, pairs = peer_inputs.pairs(peer_inputs.renderer(path, 256, 256), arguments.pairs)
    lengths = [len(text) for pair in pairs for text in pair]
    print(f"{arguments.model}; {len(pairs)} {source} pairs, {sum(lengths) / len(lengths):.0f} tokens a text on average")
    shared = {"path": path, "pairs": pairs, "source": source, "batch": arguments.batch}
    shared["grouped"] = not arguments.no_groups
    result = {setting: compare(arguments, shared, setting) for setting in arguments.settings}
    write_json(arguments.output, {"settings": shared, **result})


if __name__ == "__main__":
    main()
