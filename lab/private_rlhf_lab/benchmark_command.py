"""`private-rlhf-lab benchmark`: private-preference methods, and ways to the Gibbs policy, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import output_folder

app = typer.Typer(no_args_is_help=True, help="Measure methods against each other where the truth is known.")
ASKED, HELD_OUT = 24, 64


@app.callback()
def benchmark() -> None:
    """Measure methods against each other where the truth is known."""


@app.command()
def preferences(
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="A run whose sft is done: a pool of its own answers is the bed.")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option("--pool", help="A pool that is there (safetensors: features and truth).")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=2, help="Draws of labels, the same for all arms.")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="n up to 5,000, three ε.")] = False,
    kl_coef: Annotated[float, typer.Option("--kl-coef", min=1e-3, help="Of J, with --pool.")] = 0.5,
    output: Annotated[Path, typer.Option("--output", help="Results go to OUTPUT/BED.")] = Path("runs/benchmark"),
) -> None:
    """All arms at equal data, ε and tuning, with their trust models; without --run or --pool on a linear truth.

    Resumable. Minutes on the linear bed, under an hour on a pool.
    """
    check_installed("train", "report")
    if run_dir is not None and pool is not None:
        raise UserError("--run and --pool are two beds: give one of them")
    if run_dir is not None and not (run_dir / "recipe.yaml").is_file():
        raise UserError(f"{run_dir}: is no run directory; name one whose sft is done")
    name = "pool" if run_dir is not None else "linear" if pool is None else pool.stem
    written = ("arms.jsonl", "pool.safetensors")
    results = output_folder(output_folder(output, "--output") / name, "--output", rewrites=written)
    from private_rlhf_lab.league import preferences as bench
    from private_rlhf_lab.league.beds import Bed, linear_bed, pool_bed

    bed = None
    if run_dir is not None:
        from private_rlhf.core.rundir import RunDir
        from private_rlhf.recipe import Recipe
        from private_rlhf.recipe.load import load_recipe

        from private_rlhf_lab.league.pool import make_pool

        run = RunDir(run_dir)
        recipe = load_recipe(Recipe, run.root / "recipe.yaml")
        pool = results / "pool.safetensors"
        make_pool(run, recipe, pool, ASKED, HELD_OUT)
        kl_coef = recipe.ppo.kl_coef
    if pool is not None:
        bed = pool_bed(pool, kl_coef)

    def make_bed(seed: int) -> Bed:
        return linear_bed(seed) if bed is None else bed

    epsilons, sizes = ((0.5, 1.0, 2.0), (500, 1500, 5000)) if quick else (bench.EPSILONS, bench.COUNTS)
    counts = [count for count in sizes if count <= make_bed(0).most_pairs]
    print(bench.run(make_bed, results, seeds, epsilons, counts))
    print(f"written: {results}")


@app.command()
def gibbs(
    seeds: Annotated[int, typer.Option("--seeds", min=5, help="Problems, the same for all methods.")] = 8,
    output: Annotated[Path, typer.Option("--output", help="Results go to OUTPUT/gibbs.")] = Path("runs/benchmark"),
) -> None:
    """Draws that PPO, RLOO, GRPO and regressions need to reach the Gibbs policy, where J is an exact sum.

    Resumable. Half an hour on one core.
    """
    check_installed("train", "report")
    written = ("rows.jsonl",)
    results = output_folder(output_folder(output, "--output") / "gibbs", "--output", rewrites=written)
    from private_rlhf_lab.benches import gibbs_enumerable

    print(gibbs_enumerable.run(results, seeds))
    print(f"written: {results}")
