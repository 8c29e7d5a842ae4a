"""`private-rlhf plan`: what a recipe will cost, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.outputs import json_with, output_file


def plan(
    config: Annotated[Path, typer.Option("--config", help="The recipe: a YAML file, see configs/.")],
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Default: runs/NAME of the recipe.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Preferences (data.preferences).")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Plan for that many GPUs.")] = None,
    gpu_memory: Annotated[float | None, typer.Option("--gpu-memory", min=0.1, max=1e6, help="GiB of each.")] = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="Weights are split over the GPUs (FSDP2).")] = False,
    model_config: Annotated[Path | None, typer.Option("--model-config", help="config.json of another model.")] = None,
    _calibrate: Annotated[
        bool, typer.Option("--calibration/--no-calibration", hidden=True, help="Ignored: hours are not estimated.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the plan here as JSON.")] = None,
    force: Force = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. ppo.minibatch_size=8")] = None,
) -> None:
    """Estimate the peak memory of every stage; refuse what cannot fit."""
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import all_overrides, load_recipe

    if (gpus is None) != (gpu_memory is None):
        raise UserError("--gpus and --gpu-memory go together: give both, or neither for this machine")
    if sharded and gpus is None:
        raise UserError("--sharded needs --gpus and --gpu-memory")
    if output is not None:
        written = json_with("recipe", "device", "limit_bytes", "stages")
        output = output_file(output, "--json", rewrites=written, inputs=(config, model_config, data), force=force)
    recipe = load_recipe(Recipe, config, all_overrides(data, overrides))
    recipe.data.check_preferences()
    from private_rlhf.commands.memory import GIB, Machine, estimate, this_machine
    from private_rlhf.core import atomic
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.core.world import declared_world
    from private_rlhf.lm.numerics import resolve_dtype

    run = RunDir(run_dir or Path("runs") / recipe.name)
    here = machine = this_machine()
    if gpus and gpu_memory:
        machine = Machine("cuda", gpu_memory * GIB, gpus, sharded)
    if machine.device == here.device:
        model = resolve_dtype(recipe.model, run.saved("model", "dtype"), run.root, declared_world())
        recipe = replace(recipe, model=model)
    elif recipe.model.dtype == "auto":
        recipe = replace(recipe, model=replace(recipe.model, dtype="bfloat16"))  # fast on every recent GPU
    estimated = estimate(recipe, machine, model_config)
    warning = estimated.check_fits()
    for name, terms in estimated.peaks.items():
        largest = sorted(terms, key=lambda term: -terms[term])[:3]
        described = ", ".join(f"{term} {terms[term] / GIB:.2f}" for term in largest)
        print_lines(f"{name:<10}{sum(terms.values()) / GIB:>7.2f} GiB: {described}")
    limit = machine.limit / GIB
    print_lines(f"there are {limit:.1f} GiB for each of {machine.processes} process(es) on {machine.device}")
    print_lines("an estimate for texts as long as the recipe allows; leave a margin of a third")
    if warning:
        print_lines(f"it may not fit: {warning}")
    if output is not None:
        stages = {
            name: {"bytes": round(sum(terms.values())), "terms": {term: round(size) for term, size in terms.items()}}
            for name, terms in estimated.peaks.items()
        }
        document: dict[str, Any] = {"recipe": recipe.name, "dtype": recipe.model.dtype, "device": machine.device}
        document |= {"processes": machine.processes, "limit_bytes": round(machine.limit), "stages": stages}
        atomic.write_text(output, json.dumps(document, indent=2) + "\n")
