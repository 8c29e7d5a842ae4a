"""Seconds and peak memory of `privatize`, `reward` and sampling as their input grows, with exponents.

An exponent is the slope of log seconds against log size between the two largest sizes, less the seconds of the smallest
size, which are those of starting: 1 is linear. Inputs are generated (`privatize_throughput.generate`). The reward is
`head` on the tiny random Llama, so its seconds are those of everything but the backbone; sampling is SmolLM2's, in one
process of its own.

Run:  python tests/benchmarks/cost_curves.py [--privatize 1000 10000 100000 1000000] [--reward 1000 10000 100000]
      [--prompts 16 64 256] [--tokens 16 64 256] [--csv PATH]     (10^7 rows of --privatize need 40 GB of disk)
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from privatize_throughput import generate, measured

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "private_rlhf.cli"]
SAMPLING = """
import sys
from pathlib import Path
from private_rlhf.embedded.task import load_prompts
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.lm.numerics import fast_dtype
count, tokens, cache = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
folder = smollm2_checkpoint(cache)
model, tokenizer = load_causal_lm(folder, fast_dtype("cpu")[0]).eval(), load_tokenizer(folder)
prompts = [tokenizer(text)["input_ids"] for text in load_prompts("train")]
rows = [prompts[row % len(prompts)] for row in range(count)]
never = tokenizer.vocab_size + 10**6  # every answer goes on to the cap
ends = {"pad_token_id": 0, "eos_token_id": never}
answers = sample_responses(model, rows, range(count), Sampling(tokens), batch_size=128, **ends)
assert {len(each) for each in answers} <= {tokens}
"""


def releases(sizes: Sequence[int], folder: Path) -> Iterator[dict[str, Any]]:
    """A release of each size, from rows of 1.2 kB."""
    for rows in sizes:
        folder.mkdir()
        data, key, output = folder / "rows.jsonl", folder / "owner.key", folder / "release"
        generate(data, rows, "long")
        cli = ["env", f"XDG_STATE_HOME={folder}", *CLI]  # without the other keys of this user
        measured([*cli, "keygen", "--output", str(key)])
        where = ["--data", str(data), "--output", str(output), "--key", str(key), "--epsilon", "1"]
        yield record("privatize", "rows", rows, *measured([*cli, "privatize", *where]))
        shutil.rmtree(folder)


def rewards(sizes: Sequence[int], folder: Path) -> Iterator[dict[str, Any]]:
    """The stage `reward` on each number of pairs; the stages before it are not counted."""
    for rows in sizes:
        data, run = folder / "data", folder / "run"
        data.mkdir(parents=True)
        generate(folder / "rows.jsonl", rows + 100, "short")
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (data / "train.jsonl").write_text("".join(lines[100:]), encoding="utf-8")
        (data / "eval.jsonl").write_text("".join(lines[:100]), encoding="utf-8")
        settings = [f"data.preferences={data}", "data.limit=null", f"privatize.key_file={folder}/owner.key"]
        where = ["--config", str(ROOT / "configs" / "tiny.yaml"), "--run-dir", str(run)]
        common = ["env", f"XDG_STATE_HOME={folder}", *CLI, "run", *where, *settings]
        for stage in ("privatize", "sft"):
            measured([*common, "--only", stage])
        yield record("reward", "pairs", rows, *measured([*common, "--only", "reward"]))
        shutil.rmtree(folder)


def draws(prompts: Sequence[int], tokens: Sequence[int], folder: Path) -> Iterator[dict[str, Any]]:
    """Answers of SmolLM2: 32 tokens to each number of prompts, and each number of tokens to 32 prompts."""
    start = [sys.executable, "-c", SAMPLING, "0", "1", str(folder)]
    if prompts or tokens:
        measured(start)  # makes the checkpoint
    for unit, sizes in (("prompts", prompts), ("tokens", tokens)):
        if not sizes:
            continue
        yield record("sampling", unit, 0, *measured(start))
        for size in sizes:
            count, length = (size, 32) if unit == "prompts" else (32, size)
            yield record("sampling", unit, size, *measured([*start[:3], str(count), str(length), str(folder)]))


def record(what: str, unit: str, size: int, seconds: float, cpu: float, peak: float) -> dict[str, Any]:
    """A row of the table, which is also printed."""
    measures = {"seconds": round(seconds, 2), "cpu_s": round(cpu, 2), "peak_mib": round(peak)}
    print(f"{what:<10} {size:>9} {unit:<8} {seconds:8.2f} s {cpu:8.2f} CPU s {peak:7.0f} MiB", flush=True)
    return {"what": what, "unit": unit, "size": size, **measures}


def exponent(rows: Sequence[dict[str, Any]]) -> float | None:
    """Of the seconds, between the two largest of three sizes or more; None where starting hides them."""
    if len(rows) < 3:
        return None
    (one, less), (other, more) = ((row["size"], row["seconds"] - rows[0]["seconds"]) for row in rows[-2:])
    return math.log(more / less) / math.log(other / one) if min(less, more) > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--privatize", type=int, nargs="*", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--reward", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--prompts", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--csv", type=Path, help="write the table there as well")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for curve in (draws(given.prompts, given.tokens, folder / "cache"), releases(given.privatize, folder / "one"),
                      rewards(given.reward, folder / "other")):  # fmt: skip
            rows += list(curve)
    for what, unit in dict.fromkeys((row["what"], row["unit"]) for row in rows):
        power = exponent([row for row in rows if (row["what"], row["unit"]) == (what, unit)])
        if power is not None:
            print(f"{what} by {unit}: seconds grow with the power {power:.2f}")
    if given.csv is not None:
        with given.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
