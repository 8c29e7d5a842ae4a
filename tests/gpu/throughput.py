"""How fast a PPO iteration runs on one GPU, beside the published loop, and how much of the chip that uses.

    python tests/gpu/throughput.py [--model 1b 8b] [--shape llama qwen] [--json PATH]

Models have random weights in bfloat16, made on the device in the sizes of Llama 3 and Qwen 3: nothing is downloaded.
Their responses are no text, so ids are written as numbers instead of through a tokenizer, and read back as they were;
hardly any ends before the cap. Prompts begin alike, as with a chat template, and then differ.

ours, LoRA       this project's PpoTrainer with its default adapter; π_ref is the policy without it
published loop   its work re-created (`benchmarks/peer_ppo_loops.py`): policy, π_ref and all weights trained

Both score with a reward model of the policy's size. `tokens/s` counts response tokens. `of peak` is the least that
the phase must compute over what the chip could in that time, at the speed of one large bfloat16 product measured in
the same run. Counted are 2 operations per weight and token forward, 4 with a backward pass through frozen weights, 6
where they are trained; no attention, no embedding, and an output layer for response tokens alone, whatever the loop
itself does. Sampling reads prompts and responses once; scoring has three forward passes: policy, π_ref, reward.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "benchmarks")]

import peer_ppo_loops  # noqa: E402
from gpu.machine import device_or_none  # noqa: E402
from peer_inputs import random_head, trainable  # noqa: E402
from peer_processes import Measured, table, write_json  # noqa: E402
from private_rlhf.lm.logprobs import PolicyWithValue  # noqa: E402
from private_rlhf.lm.models import add_lora  # noqa: E402
from private_rlhf.recipe import LoraSettings, PpoConfig  # noqa: E402
from private_rlhf.reward_models.checkpoint import RewardCheckpoint  # noqa: E402
from private_rlhf.reward_models.model import RewardModel, set_score_weight  # noqa: E402
from private_rlhf.reward_models.scorer import RewardScorer  # noqa: E402
from private_rlhf.rl.ppo_trainer import PpoTrainer  # noqa: E402
from support.ppo_problem import EOS, PAD, StubRenderer  # noqa: E402

PHASES = ("generate", "score", "update")
ALIKE = 16
"""Tokens that every prompt begins with."""
CONFIGS = {"llama": LlamaConfig, "qwen": Qwen3Config}
VOCABULARY = {"llama": 128_256, "qwen": 151_936}
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "1b"): {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    ("llama", "8b"): {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    ("qwen", "1b"): {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    ("qwen", "8b"): {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
}
HEADS = {("llama", "1b"): 32, ("llama", "8b"): 32, ("qwen", "1b"): 16, ("qwen", "8b"): 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


def model_config(shape: str, size: str) -> Any:
    """The published sizes of the families' models of about 1B and 8B; `tiny` for tests."""
    heads = HEADS.get((shape, size), 4)
    own = SIZES.get((shape, size), TINY)
    shared = {"num_attention_heads": heads, "num_key_value_heads": 2 if size == "tiny" else 8}
    head_dim = 64 if (shape, size) == ("llama", "1b") else 128
    return CONFIGS[shape](
        **{
            "vocab_size": VOCABULARY[shape],
            "head_dim": 16 if size == "tiny" else head_dim,
            "tie_word_embeddings": size != "8b",
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": None,
            "num_labels": 1,  # of the reward model
            **shared,
            **own,
        }
    )


@dataclass(frozen=True)
class NumberRenderer(StubRenderer):
    """Texts are token ids written as numbers."""

    def response_ids(self, text: str) -> list[int]:
        """Ids that end as those of a response do, once."""
        ids = self.prompt_ids(text)
        return ids if ids[-1:] == [EOS] else [*ids, EOS]


@dataclass(frozen=True)
class Task:
    """What both loops are given."""

    config: Any
    device: torch.device
    arguments: argparse.Namespace

    @property
    def renderer(self) -> Any:
        return NumberRenderer(self.arguments.response)

    @property
    def settings(self) -> dict[str, Any]:
        """As `peer_ppo_loops` takes them."""
        given = self.arguments
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, self.config.vocab_size, (given.rollouts, given.prompt), generator=generator)
        ids[:, :ALIKE] = ids[0, :ALIKE]
        own = {"epochs": given.epochs, "minibatch": given.minibatch, "max_response": given.response}
        return {"prompts": [" ".join(map(str, row)) for row in ids.tolist()], "top_p": 1.0, "mc_dropout": False, **own}

    def make(self, kind: Any) -> Any:
        """A model of random weights on the device."""
        torch.manual_seed(0)
        with self.device:
            return kind.from_config(self.config, dtype=torch.bfloat16).eval().requires_grad_(False)


class Published(peer_ppo_loops.ReferenceLoop):
    """The re-created loop with models made on the device."""

    def __init__(self, task: Task) -> None:
        peer_ppo_loops.CPU = task.device  # where that module puts its batches
        self.settings, self.renderer = task.settings, task.renderer
        self.tokenizer = self.renderer.tokenizer
        self.policy = task.make(AutoModelForCausalLM).requires_grad_(True)
        self.reference = task.make(AutoModelForCausalLM)
        self.reward = task.make(AutoModelForSequenceClassification)
        self.value_head = nn.Linear(task.config.hidden_size, 1, device=task.device)
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-6) for each in (self.policy, self.value_head)]

    def generate(self) -> Any:
        return finished(super().generate())

    def score(self, *arguments: Any) -> Any:
        return finished(super().score(*arguments))

    def update(self, *arguments: Any) -> None:
        finished(super().update(*arguments))


class Ours(peer_ppo_loops.OurLoop):
    """The project's trainer with models made on the device."""

    def __init__(self, task: Task, lora: LoraSettings = LoraSettings()) -> None:  # noqa: B008 - frozen
        settings, renderer = task.settings, task.renderer
        config = PpoConfig(
            rollouts=len(settings["prompts"]),
            ppo_epochs=settings["epochs"],
            minibatch_size=settings["minibatch"],
            lora=lora,
        )
        policy = add_lora(task.make(AutoModelForCausalLM), lora, 0)
        model = PolicyWithValue(policy, task.config.hidden_size).eval()
        self.trainable = trainable(model)
        reward = task.make(AutoModelForSequenceClassification)
        set_score_weight(reward, random_head(task.config.hidden_size))
        scorer = RewardScorer(RewardCheckpoint(RewardModel(reward), None, None), renderer, use_bonus=False)
        accelerator = Accelerator(cpu=task.device.type == "cpu")
        prompts = settings["prompts"]
        self.trainer = PpoTrainer(accelerator, model, None, scorer, renderer, prompts, config, seed=0)


def finished(result: Any) -> Any:
    """`result`, once the device has computed it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def peak_flops(device: torch.device) -> tuple[str, float]:
    """What was multiplied, and the operations per second of the best of several turns."""
    size = 8192 if device.type == "cuda" else 512
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        finished(None)
        started = time.perf_counter()
        finished(factor @ factor)
        best = min(best, time.perf_counter() - started)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return f"one {size}×{size} bfloat16 product on {name}", 2 * size**3 / best


def work(config: Any, task: Task, tokens: int, trained: int | None) -> dict[str, float]:
    """The least operations of each phase for `tokens` response tokens; trained: weights of an adapter, None for all."""
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).get_decoder().layers
    body = sum(parameter.numel() for parameter in layers.parameters())
    every = tokens + task.arguments.prompt * task.arguments.rollouts
    policy = body * every + config.vocab_size * config.hidden_size * tokens  # weights times tokens
    learning = 6 * policy if trained is None else 4 * policy + 6 * trained * every
    scoring = 2 * (2 * policy + body * every)
    return {"generate": 2 * policy, "score": scoring, "update": task.arguments.epochs * learning}


def measure(make: Callable[[Task], Any], task: Task, peak: float) -> dict[str, Any]:
    """Median seconds, tokens per second and share of the peak by phase, and the peak memory; or that it did not fit."""
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        loop = make(task)
        rows: list[Measured] = [loop.iterate(number) for number in range(task.arguments.iterations + 1)][1:]
    except torch.cuda.OutOfMemoryError as error:
        return {"error": "out of memory", "said": str(error)[:200]}
    trained = loop.trainable if make is Ours else None
    phases: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        seconds = median(row["seconds"][phase] for row in rows)
        speed = median(row["tokens"] / row["seconds"][phase] for row in rows)
        rate = median(work(task.config, task, row["tokens"], trained)[phase] / row["seconds"][phase] for row in rows)
        phases[phase] = {"seconds": seconds, "tokens_per_second": speed, "of_peak": rate / peak}
    memory = torch.cuda.max_memory_allocated() / 2**30 if task.device.type == "cuda" else None
    return {"phases": phases, "peak_gib": memory, "trainable": loop.trainable}


def line(name: str, figures: dict[str, Any]) -> list[str]:
    """One row of the table."""
    if "error" in figures:
        return [name, *([figures["error"]] * len(PHASES)), "-", "-"]
    phases = figures["phases"]
    cells = [
        f"{phases[phase]['seconds']:.2f} s, {phases[phase]['tokens_per_second']:.0f}, {phases[phase]['of_peak']:.1%}"
        for phase in PHASES
    ]
    total = sum(phases[phase]["seconds"] for phase in PHASES)
    memory = "-" if figures["peak_gib"] is None else f"{figures['peak_gib']:.1f}"
    return [name, *cells, f"{total:.2f}", memory]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["tiny", "1b", "8b"], default=["1b"])
    parser.add_argument("--shape", nargs="+", choices=list(CONFIGS), default=["llama"])
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=64, help="cap on tokens of a response")
    parser.add_argument("--iterations", type=int, default=3, help="counted ones, after one that is not")
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    device = device_or_none()
    if device is None:
        sys.exit("needs a GPU")
    named, peak = peak_flops(device)
    print(f"peak: {peak / 1e12:.2f} TFLOP/s, {named}; torch {torch.__version__}")
    models = {}
    for shape, size in ((shape, size) for size in arguments.model for shape in arguments.shape):
        task = Task(model_config(shape, size), device, arguments)
        loops = {}
        for name, make in (("ours, LoRA", Ours), ("published loop", Published)):
            loops[name] = measure(make, task, peak)
            gc.collect()
        models[f"{shape} {size}"] = {"loops": loops}
        print(f"\n{shape} {size}: seconds, response tokens/s, share of the peak\n")
        rows = [line(name, figures) for name, figures in loops.items()]
        print(table(["loop", *PHASES, "total, s", "peak GiB"], rows), flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_json(arguments.json, {"peak": {"of": named, "flops": peak}, "settings": settings, "models": models})


if __name__ == "__main__":
    main()
