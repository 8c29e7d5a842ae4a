"""Cost of a stage in the plan of `run --dry-run`: peak memory as `plan` estimates it, and time as it was measured.

The time is that of the stage's last run in the same directory. Before stage sft has run there, a pass of one batch is
measured, of a model that is SMALL and on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from private_rlhf.commands.memory import GIB, estimate, this_machine
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World, device_type
from private_rlhf.data.inputs import demonstrations
from private_rlhf.data.render import evenly_spaced, make_renderer
from private_rlhf.lm.base_models import base_checkpoint, is_here
from private_rlhf.lm.logprobs import take_batches, token_batch
from private_rlhf.lm.models import load_policy, load_tokenizer
from private_rlhf.lm.rows import sharing_of
from private_rlhf.recipe import OF_RELEASE, Recipe

SMALL = 500_000_000
"""Parameters of a model of which a CPU passes a batch forward and back in seconds."""
START = 20.0  # seconds that loading libraries and weights, and saving, may take besides: a round number
NOTE = "memory: of a process, for the longest texts (parts: `private-rlhf plan`); time: known once a stage has run here"
PACE = "all steps at the pace of one that was measured now, or half as long again and 20 s to load and save"


def stage_costs(recipe: Recipe, run: RunDir, names: Collection[str], world: World) -> dict[str, str]:
    """By stage of `names`, its memory and its time in words. recipe: states its dtype. world: of the planned run."""
    peaks, small = {}, False
    try:
        estimated = estimate(recipe, replace(this_machine(), processes=world.size))
        peaks, small = estimated.peaks, estimated.shape.parameters <= SMALL
    except UserError:  # the model's config is not on this machine
        pass
    has_rows = recipe.data.demonstrations not in OF_RELEASE or (run.stage("privatize") / "release").is_dir()
    costs = {}
    for name in names:
        memory = f"up to {sum(peaks[name].values()) / GIB:.1f} GiB" if name in peaks else "memory not known"
        spent = "time not known"
        if manifest := run.manifest(name):
            spent = f"its last run here took {manifest['seconds']:.0f} s"
        elif (
            name == "sft" and small and has_rows and world.size == 1 and is_here(recipe.model)
            and (seconds := sft_seconds(recipe, run.stage("privatize")))
        ):  # fmt: skip
            spent = f"{seconds:.0f} to {1.5 * seconds + START:.0f} s ({PACE})"
        costs[name] = f"{memory}, {spent}"
    return costs


def limits(recipe: Recipe) -> str:
    """The keys that bound what the stages read and draw, as they are given on a command line."""
    keys = ("max_demonstrations", "max_pairs", "iterations", "rollouts", "max_prompts", "num_prompts")
    sections = {name: getattr(recipe, name) for name in ("sft", "reward", recipe.aligner, "evaluate")}
    return " ".join(f"{name}.{key}={value}" for name, section in sections.items() for key in keys
                    if (value := getattr(section, key, None)) is not None)  # fmt: skip


def sft_seconds(recipe: Recipe, released: Path) -> float | None:
    """Seconds of all steps of stage sft on this process, from the second pass of one micro-batch of its rows.

    None where none of the rows that were looked at is short enough."""
    settings, base, revision = recipe.sft, base_checkpoint(recipe.model), recipe.model.revision
    rows = evenly_spaced(demonstrations(recipe.data, released), settings.max_demonstrations)
    micro = min(settings.micro_batch_size or settings.batch_size, settings.batch_size)
    steps = settings.max_steps if settings.max_steps > 0 else settings.epochs * (len(rows) // settings.batch_size)
    renderer = make_renderer(recipe.model, load_tokenizer(base, revision=revision))
    spread = rows[:: max(1, len(rows) // (4 * micro))]
    picked = list(islice((row for row in spread if renderer.fits(row.prompt, row.response)), micro))
    if not picked:
        return None
    texts = [renderer.prompt_ids(row.prompt) for row in picked], [renderer.learnt_ids(row.response) for row in picked]
    policy = load_policy(base, recipe.model.dtype, settings.lora, recipe.seed, revision=revision).to(device_type())
    pad, sharing, device = renderer.tokenizer.pad_token_id, sharing_of(policy), torch.device(device_type())
    take_batches(policy)
    for _ in range(2):  # the first pass also prepares the kernels
        started = time.monotonic()
        policy(token_batch=token_batch(*texts, pad, device, sharing=sharing)).sum().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.monotonic() - started
    return math.ceil(steps) * settings.batch_size / micro * seconds
