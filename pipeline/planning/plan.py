"""The plan of a recipe: tokens, memory and hours of each stage, as a table, as JSON, or as a refusal."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.recipe import Recipe
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import declared_world, on_cpu
from private_rlhf.data.inputs import make_renderer
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.planning.memory import CONTEXT, GIB, Machine, Planner, Terms, peak, trains_with
from private_rlhf.planning.model import Adapter, ModelShape, adapter_of, config_of, shape_of, skeleton
from private_rlhf.planning.tokens import Texts, Work, passes_of, texts_of, work_of

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
BATCH = ("activations", "logits", "KV cache")
"""Terms that grow with a batch."""
REMEDIES = {
    "activations": "lower {section}.micro_batch_size or model.max_prompt_tokens",
    "logits": "lower {section}.micro_batch_size or model.max_response_tokens",
    "KV cache": "lower {batch} or model.max_response_tokens",
    "packed weights": "take a smaller model or fewer processes on this machine",
    "gathered weights": "set ppo.gather_once=false, which takes more time",
    "reference": "train an adapter ({section}.lora) in place of all weights",
    "optimizer": "train an adapter ({section}.lora) in place of all weights, or more GPUs with --sharded",
    "gradients": "train an adapter ({section}.lora) in place of all weights, or more GPUs with --sharded",
    "weights": "a smaller model, ppo.quantize=4bit under an adapter, or more GPUs with --sharded",
}


@dataclass(frozen=True)
class StagePlan:
    """One line: the tokens of a stage, the terms of its largest moment in bytes, and hours if they could be told."""

    name: str
    work: Work
    terms: Terms
    hours: float | None = None

    @property
    def bytes(self) -> float:
        """Peak of one process."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Plan:
    """All stages that run a model. `exact`: texts were read; else lengths are the recipe's limits."""

    recipe: Recipe
    stages: list[StagePlan]
    machine: Machine
    exact: bool


def make_plan(recipe: Recipe, run: RunDir, machine: Machine, model_config: Path | None = None) -> Plan:
    """The plan without hours; `recipe` states its dtype.

    Raises:
        UserError: the model's config is not here, or its tokenizer cannot be used.
    """
    config = config_of(recipe.model, model_config)
    shape = shape_of(skeleton(config))
    renderer = None if model_config or not config.is_dir() else make_renderer(recipe.model, load_tokenizer(config))
    texts = texts_of(recipe, run, renderer)
    adapters = {stage: adapter_of(config, lora) for stage, lora in trains_with(recipe).items()}
    if adapters.get("reward") is not None:
        adapters["reward"] = _cut(adapters["reward"], shape, recipe.reward.num_layers)
    machine = replace(machine, base=machine.base or resident())
    return plan_of(recipe, shape, adapters, texts, machine)


def plan_of(
    recipe: Recipe, shape: ModelShape, adapters: Mapping[str, Adapter | None], texts: Texts, machine: Machine
) -> Plan:
    """The plan for a model of this shape; adapters by stage as `Planner` takes them."""
    planner = Planner(recipe, shape, adapters, texts, machine, passes_of(recipe, texts, machine.processes))
    work = work_of(recipe, texts)
    stages = [StagePlan(name, each, peak(planner.stage(name))) for name, each in work.items()]
    return Plan(recipe, stages, machine, texts.read)


def _cut(adapter: Adapter | None, shape: ModelShape, layers: int | None) -> Adapter | None:
    """The adapter on the first `layers` layers."""
    if adapter is None or layers is None:
        return adapter
    share = layers / shape.layers
    return Adapter(round(adapter.trained * share), round(adapter.adapted * share), min(layers, adapter.layers))


def this_machine() -> Machine:
    """CPU: a process's share of the memory; GPU: all of the first one. The base is measured by `make_plan`."""
    processes = declared_world().size
    if not on_cpu():
        import torch

        device: Any = torch.accelerator.current_accelerator()
        total = torch.get_device_module(device).get_device_properties(0).total_memory
        return Machine("cuda", total, processes, CONTEXT)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Machine("cpu", machine_memory() / here, processes, 0.0, packs=runs("packed"))


def gpus(count: int, gib: float, sharded: bool) -> Machine:
    """`count` GPUs of `gib` GiB each, a process on each."""
    return Machine("cuda", gib * GIB, count, CONTEXT, sharded=sharded)


def machine_memory() -> float:
    """Bytes of memory that this machine, or the container it is in, has."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP:
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdecimal():
            total = min(total, float(text))
    return total


def resident() -> float:
    """Bytes of this process that are in memory, once it has imported what stages import."""
    import datasets  # noqa: F401
    import trl  # noqa: F401
    from trl import DPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        from private_rlhf.core.rundir import peak_rss_mb

        return peak_rss_mb() * 2**20
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def check_fits(plan: Plan) -> None:
    """Refuses a plan that cannot run.

    Raises:
        UserError: names the stage that needs most, what takes it, and what to change.
    """
    worst = max(plan.stages, key=lambda stage: stage.bytes)
    if worst.bytes <= plan.machine.limit:
        return
    small = worst.bytes - sum(worst.terms.get(name, 0.0) for name in BATCH)
    fits = small <= plan.machine.limit  # with a small batch; else it is the weights that have to change
    named = [name for name in worst.terms if name in REMEDIES and (name in BATCH) == fits]
    term = max(named or worst.terms, key=lambda name: worst.terms[name])
    section = worst.name
    batch = "evaluate.batch_size" if section == "evaluate" else f"{section}.generate_batch_size"
    remedy = REMEDIES.get(term, "take a machine with more memory").format(section=section, batch=batch)
    if section == "ppo" and term in ("activations", "logits"):
        remedy = remedy.replace("ppo.micro_batch_size", "ppo.micro_batch_size (or ppo.minibatch_size)")
    if section == "ppo" and term == "activations" and not plan.recipe.ppo.gradient_checkpointing:
        remedy += ", or set ppo.gradient_checkpointing=true"
    raise UserError(
        f"{section} needs {worst.bytes / GIB:.1f} GiB per process and has {plan.machine.limit / GIB:.1f}, "
        f"of it {term} ({worst.terms[term] / GIB:.1f} GiB): {remedy}"
    )


def table(plan: Plan, unknown_hours: str | None) -> list[str]:
    """Lines for the terminal. unknown_hours: why there are none, or None where they stand in the plan."""
    head = ("stage", "sampled", "scored", "trained", "GiB/process", "hours", "most of the memory")
    rows: list[tuple[str, ...]] = [head]
    for stage in plan.stages:
        work = stage.work
        scored = None if work.read is None or work.scored is None else work.read + work.scored
        largest = sorted(stage.terms, key=lambda name: -stage.terms[name])[:3]
        described = ", ".join(f"{name} {stage.terms[name] / GIB:.2f}" for name in largest)
        hours = "?" if stage.hours is None else f"{stage.hours:.2f}"
        counts = tuple(map(_count, (work.sampled, scored, work.trained)))
        rows.append((stage.name, *counts, f"{stage.bytes / GIB:.2f}", hours, described))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    machine, limit = plan.machine, plan.machine.limit / GIB
    lines.append(f"tokens; there are {limit:.1f} GiB for each of {machine.processes} process(es) on {machine.device}")
    if not plan.exact:
        lines.append("lengths: where texts were not read, the recipe's limits; ?: how many there are is not known yet")
    return [*lines, f"hours: {unknown_hours}"] if unknown_hours else lines


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in JSON values: bytes, tokens, hours (null where unknown)."""
    return {
        "recipe": plan.recipe.name,
        "dtype": plan.recipe.model.dtype,
        "device": plan.machine.device,
        "processes": plan.machine.processes,
        "limit_bytes": round(plan.machine.limit),
        "texts_read": plan.exact,
        "stages": {
            stage.name: {
                "tokens": {
                    name: None if value is None else round(value)
                    for name, value in vars(stage.work).items()
                    if name != "responses"
                },
                "bytes": round(stage.bytes),
                "terms": {name: round(value) for name, value in stage.terms.items()},
                "hours": stage.hours,
            }
            for stage in plan.stages
        },
    }


def _count(tokens: float | None) -> str:
    """1234567 -> 1.2M; ? for an unknown number, – for none."""
    if tokens is None or math.isinf(tokens):
        return "?"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f}{letter}"
    return f"{tokens:.0f}" if tokens else "–"
