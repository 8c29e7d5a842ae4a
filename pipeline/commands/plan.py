"""`private-rlhf plan`: what a recipe will cost, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import json_with, output_file

UNKNOWN = "unknown here (no GPU to calibrate on)"


def plan(
    config: Annotated[Path, typer.Option("--config", help="The recipe: a YAML file, see configs/.")],
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Default: runs/NAME of the recipe.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Plan for that many GPUs.")] = None,
    gpu_memory: Annotated[float | None, typer.Option("--gpu-memory", min=0.1, help="GiB of each of them.")] = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="Weights are split over the GPUs (FSDP2).")] = False,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", help="config.json of a model that is not here.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibration/--no-calibration", help="Time some steps of the model for the hours.")
    ] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Write the plan here as JSON.")] = None,
    force: Force = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. ppo.minibatch_size=8")] = None,
) -> None:
    """Predict tokens, memory and hours of every stage; refuse what cannot fit."""
    from dataclasses import replace

    from private_rlhf.core import atomic
    from private_rlhf.core.rundir import RunDir
    from private_rlhf.core.world import declared_world
    from private_rlhf.lm.numerics import resolve_dtype
    from private_rlhf.planning import plan as planning
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe

    if (gpus is None) != (gpu_memory is None):
        raise UserError("--gpus and --gpu-memory go together: give both, or neither for this machine")
    if sharded and gpus is None:
        raise UserError("--sharded needs --gpus and --gpu-memory")
    if output is not None:
        written = json_with("recipe", "device", "limit_bytes", "stages")
        output = output_file(output, "--json", rewrites=written, inputs=(config, model_config), force=force)
    recipe = load_recipe(Recipe, config, overrides or [])
    recipe.data.check_preferences()
    run = RunDir(run_dir or Path("runs") / recipe.name)
    here = planning.this_machine()
    machine = planning.gpus(gpus, gpu_memory, sharded) if gpus and gpu_memory else here
    if machine.device == here.device:
        model = resolve_dtype(recipe.model, run.saved("model", "dtype"), run.root, declared_world())
        recipe = replace(recipe, model=model)
    elif recipe.model.dtype == "auto":
        recipe = replace(recipe, model=replace(recipe.model, dtype="bfloat16"))  # what a GPU of today multiplies fast
    made = planning.make_plan(recipe, run, machine, model_config)
    planning.check_fits(made)
    unknown = None
    if machine.device != here.device:
        unknown = UNKNOWN
    elif not calibrate:
        unknown = "not asked for (--no-calibration)"
    else:
        from private_rlhf.planning.calibration import with_hours

        made, unknown = with_hours(made, model_config)
    print("\n".join(planning.table(made, unknown)))
    if output is not None:
        atomic.write_text(output, json.dumps(planning.as_json(made), indent=2) + "\n")
