"""One PPO iteration of this project beside peers, on the same model, prompts and settings: seconds by phase, tokens/s,
peak memory, and the ratios peer/ours. Beside them the ratio that the work itself allows: the floating-point operations
of all products and attentions of an iteration per response token, counted in processes of their own after the timing.

Loops, each in a process of its own, taking turns iteration by iteration:

    reference   the published loop's work, written anew: separate policy and reference copies, full fine-tuning, logits
                of whole sequences, a forward pass for values alone, a reward model over prompt and response
                (--mc-dropout: ten passes), entropy over the whole vocabulary, default AdamW
    ours-full   this project's PpoTrainer with `lora: null`, same dtype and same trained weights
    ours-lora   the default recipe: LoRA on weights of the dtype that `model.dtype: auto` takes here (in both tables)
    trl         with --trl: TRL 1.10's experimental PPO, in an environment of its own that this script makes and throws
                away (or keeps and uses again in --trl-env DIR), or run by the interpreter --trl ENV/bin/python

16 prompts (HH-RLHF where PRIVATE_RLHF_TEST_DATA names it, else the built-in ones), at most 256 + 64 tokens, 3 epochs,
minibatches of 4, temperature 1. `tokens` are response tokens up to the end of turn. Samples differ between loops, and
so do their lengths: `tokens/s` is the fairer ratio where they differ much.

What is not alike:
- The published loop scores with a causal LM whose vocabulary logits it throws away, samples with top_p 0.9 (here
  --top-p, 1 by default, for it and ours alike; TRL always 1) and for at least 16 tokens: `reference` spares that work.
- `reference` has one value and one advantage a response, as published; ours and TRL have one a token (GAE).
- `reference` and ours detach nothing and the hidden states, respectively, before the value head; ours starts it at 0.
- In bf16 tables all weights of `reference`, `ours-full` and `trl` are bfloat16 and so is their AdamW state: good for
  timing, poor for learning. Recipes never do that; they keep what is trained in float32.
- With --mc-dropout ours computes its own uncertainty (Fisher): 8 completions of π_ref for each prompt, drawn once and
  kept, so they fall into the first round, which is warm-up; then next to nothing. The model has no dropout: the ten
  passes of `reference` all say the same.
- TRL trains a second whole model as value net (see `trainable`), reads log-probabilities off the sampler's logits,
  does not clip gradients, and its entropy is logged, not trained.
- TRL's own defaults are its row of the fp32 table. Its `bf16` and `gradient_checkpointing` are on by default and change
  nothing: its PPO hands neither to accelerate or the model (transformers 5), which is loaded in float32. Its adapters
  (`peft_config`) are for the policy alone; the value net is trained whole. Against them stands `trl / ours-lora` there.
- On x86 processors that are not Intel's, ours computes float32 products with oneDNN and says so; the peers have
  PyTorch's own (MKL).
- Memory: all loops are loaded at the same time (some 20 GiB in fp32 with TRL for SmolLM2-135M).

Run:  python tests/benchmarks/ppo_peers.py [--model smollm2|tiny|PATH] [--dtype both] [--trl]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import peer_inputs
from peer_processes import Measured, in_turn, spread, table, write_json
from trl_environment import trl_interpreter

HERE = Path(__file__).parent
PHASES = ("generate", "score", "update")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What every loop is told; the same in all tables but for `dtype`."""
    path = peer_inputs.checkpoint(arguments.model, arguments.cache)
    render = peer_inputs.renderer(path, arguments.max_prompt, arguments.max_response)
    source, prompts = peer_inputs.prompts(render, arguments.rollouts)
    return {
        "path": path,
        "prompts": prompts,
        "prompt_ids": [render.prompt_ids(prompt) for prompt in prompts],
        "source": source,
        "max_prompt": arguments.max_prompt,
        "max_response": arguments.max_response,
        "epochs": 3,
        "minibatch": 4,
        "top_p": arguments.top_p,
        "mc_dropout": arguments.mc_dropout,
    }


def commands(arguments: argparse.Namespace, settings: Path) -> dict[str, list[str]]:
    """How each loop is started."""
    script = str(HERE / "peer_ppo_loops.py")
    found = {name: [sys.executable, script, name, str(settings)] for name in ("reference", "ours-full", "ours-lora")}
    if arguments.trl:
        found["trl"] = [arguments.trl, str(HERE / "trl_ppo_loop.py"), str(settings)]
    return {name: command for name, command in found.items() if not arguments.loops or name in arguments.loops}


def total(iteration: Measured) -> float:
    """Seconds of one iteration."""
    return float(sum(iteration["seconds"].values()))


def row(name: str, result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    done = result["iterations"]
    return [
        name,
        f"{result['facts']['trainable'] / 1e6:.1f}",
        *(spread([iteration["seconds"][phase] for iteration in done]) for phase in PHASES),
        spread([total(iteration) for iteration in done]),
        spread([iteration["tokens"] / total(iteration) for iteration in done], 1),
        f"{max(iteration['peak_rss_mib'] for iteration in done):.0f}",
        f"{max(iteration['other_cpus'] for iteration in done):.2f}",
    ]


def count(commands: dict[str, list[str]]) -> dict[str, float]:
    """Operations of one iteration per response token, by loop that counts them (not TRL's)."""
    found = {}
    for name, command in commands.items():
        if name != "trl":
            said = subprocess.run([*command, "--count"], stdout=subprocess.PIPE, text=True, check=True).stdout
            counted = json.loads(said.splitlines()[-1])
            found[name] = counted["operations"] / counted["tokens"]
    return found


def ratios(results: dict[str, dict[str, Any]], operations: dict[str, float]) -> dict[str, dict[str, float]]:
    """peer/ours of median seconds, by phase and in all, of tokens/s (ours/peer), of peak memory and `operations`."""
    found = {}
    for ours in ("ours-full", "ours-lora"):
        for peer in ("reference", "trl"):
            if ours not in results or peer not in results:
                continue
            a, b = results[peer]["iterations"], results[ours]["iterations"]
            phases = {p: median(i["seconds"][p] for i in a) / median(i["seconds"][p] for i in b) for p in PHASES}
            speeds = [median(i["tokens"] / total(i) for i in rows) for rows in (b, a)]
            peaks = [max(i["peak_rss_mib"] for i in rows) for rows in (a, b)]
            found[f"{peer} / {ours}"] = {
                **phases,
                "total": median(map(total, a)) / median(map(total, b)),
                "tokens/s": speeds[0] / speeds[1],
                "memory": peaks[0] / peaks[1],
                "operations": operations[peer] / operations[ours] if peer in operations else float("nan"),
            }
    return found


def compare(arguments: argparse.Namespace, settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Runs and prints the table of one dtype."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**settings, "dtype": dtype}))
        loops = commands(arguments, path)
        results = in_turn(loops, arguments.iterations, arguments.warmup)
        operations = count(loops)
    header = ["loop", "trainable, M", *(f"{phase}, s" for phase in PHASES), "total, s", "tokens/s", "peak MiB"]
    print(f"\n{dtype}: median [min-max] of {arguments.iterations}; other CPUs: the most that other processes used\n")
    print(table([*header, "other CPUs"], [row(name, result) for name, result in results.items()]))
    factors = ratios(results, operations)
    if factors:
        columns = [*PHASES, "total", "tokens/s", "memory", "operations"]
        rows = [[name, *(f"{values[column]:.2f}" for column in columns)] for name, values in factors.items()]
        print("\n" + table(["ratio", *columns], rows), flush=True)
    return {"loops": results, "operations per token": operations, "ratios": factors}


def measure(arguments: argparse.Namespace) -> None:
    """All tables that were asked for."""
    settings = settings_of(arguments)
    lengths = [len(ids) for ids in settings["prompt_ids"]]
    print(f"{arguments.model}; {len(lengths)} {settings['source']} prompts of {min(lengths)}-{max(lengths)} tokens")
    dtypes = ["fp32", "bf16"] if arguments.dtype == "both" else [arguments.dtype]
    result = {dtype: compare(arguments, settings, dtype) for dtype in dtypes}
    write_json(arguments.output, {"settings": settings, **result})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a checkpoint folder")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are run and not counted")
    parser.add_argument("--mc-dropout", action="store_true", help="score with uncertainty")
    parser.add_argument(
        "--trl",
        nargs="?",
        const="auto",
        metavar="ENV_PYTHON",
        help="an interpreter that has trl 1.10; without a value, or 'auto': of an environment made here",
    )
    parser.add_argument("--trl-env", type=Path, metavar="DIR", help="where that environment is kept and used again")
    parser.add_argument("--loops", nargs="+", choices=["reference", "ours-full", "ours-lora", "trl"])
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=256)
    parser.add_argument("--max-response", type=int, default=64)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="where converted models are kept")
    parser.add_argument("--output", type=Path, metavar="JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.trl == "auto" or (arguments.trl_env and not arguments.trl):
            arguments.trl = trl_interpreter(arguments.trl_env or Path(folder))
        measure(arguments)


if __name__ == "__main__":
    main()
