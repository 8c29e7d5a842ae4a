"""Where the time of a PPO iteration goes: shares of processor time by kind of work, in a part of each of its phases.

The same model, prompts and settings as `ppo_peers.py`; one thread, so that time adds up. The parts: 16 tokens of every
response are decoded, the rest is that of one minibatch. `bound` is the share that the products would take alone if all
of them ran at the speed of a large one in that dtype (measured first): nothing could go below it without computing
less. Decoding has none: its few rows are bound by reading the weights.

Run:  python tests/benchmarks/ppo_profile.py [--model smollm2|tiny|PATH] [--loop ours-lora|ours-full] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_inputs
import torch
from peer_ppo_loops import OurLoop
from peer_processes import table
from ppo_peers import settings_of
from private_rlhf.rl.rollout import learning_targets
from torch.profiler import ProfilerActivity, profile

DECODED = 16  # tokens

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention, fused": ("aten::_scaled_dot_product", "aten::_flash"),
    "softmax, exp, log": (
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::exp",
        "aten::log",
        "aten::cumsum",
        "aten::amax",
    ),
    "copies and casts": (
        "aten::copy_",
        "aten::cat",
        "aten::_to_copy",
        "aten::clone",
        "aten::index",
        "mkldnn::_reorder",
    ),
    "optimiser": ("aten::_fused_adamw_", "aten::_foreach"),
}


def kind_of(name: str) -> str:
    """The kind of work that an operator of the profile does; the first that fits."""
    for kind, names in KINDS.items():
        if name.startswith(names):
            return kind
    return "the rest (norms, activations, sums, views)"


def profiled(work: Callable[[], Any]) -> tuple[Any, dict[str, float], float]:
    """What `work` returns, its seconds by kind, and the floating-point operations of its products."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as recorded:
        result = work()
    seconds: dict[str, float] = {}
    operations = 0.0
    for event in recorded.key_averages():
        kind = kind_of(event.key)
        seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
        operations += event.flops if kind == "products" else 0
    return result, seconds, operations


def phases(loop: OurLoop) -> dict[str, tuple[dict[str, float], float]]:
    """By phase, after an iteration that warms up: seconds by kind, and operations.

    Of each phase a part is recorded, as the recorder keeps every operator: `DECODED` tokens of each response, and what
    follows for the first minibatch, with its one step.
    """
    trainer, config = loop.trainer, loop.trainer.config
    loop.iterate(0)
    picked = list(range(config.minibatch_size))
    prompts = [trainer.renderer.prompt_ids(prompt) for prompt in trainer.prompts]
    short = dataclasses.replace(trainer.sampling, max_new_tokens=DECODED)
    _, *generate = profiled(lambda: trainer._sample(trainer.bare, prompts, list(range(len(prompts))), short))
    rollout, _ = trainer.collect(1)
    asked, answers = [rollout.prompts[i] for i in picked], [rollout.responses[i] for i in picked]
    _, *likelihoods = profiled(lambda: trainer._read(asked, answers))
    texts, read = trainer._texts(answers), [trainer.prompt_of(1, i) for i in picked]
    _, *scores = profiled(lambda: trainer.scorer.features(read, texts))
    targets = learning_targets(
        rollout,
        kl_coef=config.kl_coef,
        estimator=config.kl_estimator,
        gamma=config.gamma,
        lam=config.lam,
        whiten_advantages=config.whiten_advantages,
    )
    _, *update = profiled(lambda: trainer._step(rollout, targets, picked, 1))
    named = {"generate": generate, "log π, log π_ref, values": likelihoods, "reward": scores, "update": update}
    return {name: (found[0], found[1]) for name, found in named.items()}


def product_speed(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of 2048 rows with a weight of SmolLM2's largest layer."""
    rows, weight = torch.randn(2048, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    best = 0.0
    for _ in range(10):
        started = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        best = max(best, 2.0 * rows.shape[0] * weight.numel() / (time.perf_counter() - started))
    return best


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a checkpoint folder")
    parser.add_argument("--loop", choices=["ours-lora", "ours-full"], default="ours-lora")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=256)
    parser.add_argument("--max-response", type=int, default=64)
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="where converted models are kept")
    arguments = parser.parse_args()
    arguments.top_p, arguments.mc_dropout = 1.0, False
    torch.set_num_threads(1)
    loop = OurLoop({**settings_of(arguments), "dtype": arguments.dtype}, lora=arguments.loop == "ours-lora")
    speed = product_speed(peer_inputs.DTYPES[arguments.dtype])
    rows = []
    for name, (seconds, operations) in phases(loop).items():
        total = sum(seconds.values())
        shares = [f"{seconds.get(kind, 0.0) / total:.0%}" for kind in KINDS]
        rest = total - sum(seconds.get(kind, 0.0) for kind in KINDS)
        bound = "-" if name == "generate" else f"{operations / speed / total:.0%}"
        rows.append([name, f"{total:.2f}", *shares, f"{rest / total:.0%}", bound])
    print(f"{arguments.loop}, {arguments.dtype}; large products run at {speed / 1e9:.0f} GFLOP/s\n")
    print(table(["phase", "s", *KINDS, "rest", "bound"], rows))


if __name__ == "__main__":
    main()
