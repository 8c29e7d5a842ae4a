"""The `compare` command: finished runs on one page."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.noise import epsilon_of
from private_rlhf.core.outputs import begins_with, output_file

if TYPE_CHECKING:
    from private_rlhf.evaluation.runs import Run


PAGE = r"# \d+ runs on \d+ held-out prompts"
FIGURE = r'<svg [^>]*aria-label="Utility by ε'


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; the others are compared with the first.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the page here too (Markdown), its figure beside it (SVG).")
    ] = None,
    force: Force = False,
) -> None:
    """Put runs on one page: paired by held-out prompt, corrected for how many are compared."""
    figure = None
    if output is not None:
        if output.suffix == ".svg":
            raise UserError(f"--output must be a Markdown page, got {output}: its figure is the .svg beside it")
        check_installed("report")
        output = output_file(output, "--output", rewrites=begins_with(PAGE), inputs=runs, force=force)
        figure = output_file(output.with_suffix(".svg"), "--output", rewrites=begins_with(FIGURE), force=force)
    from private_rlhf.core import atomic
    from private_rlhf.evaluation.runs import compare_runs, utility_by_epsilon

    finished = [replace(read_run(folder), name=name) for folder, name in zip(runs, names_of(runs), strict=True)]
    page = compare_runs(finished)
    print_lines(page)
    if output is not None and figure is not None:
        from private_rlhf.report.plots import svg_file, utility_curve

        if (drawing := utility_curve("utility", utility_by_epsilon(finished))) is not None:
            atomic.write_text(figure, svg_file(drawing))
            page += f"\n![Utility by ε, with 95 % intervals over prompts]({figure.name})\n"
            print_lines(f"figure {figure}")
        atomic.write_page(output, page)


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the paths where two runs would have one name; as cells of a table."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    names = names if len(set(names)) == len(set(paths)) else [str(folder) for folder in folders]
    return [name.replace("|", r"\|") for name in names]


def read_run(folder: Path) -> Run:
    """A run whose evaluation is complete, on the terms that its evaluation states. UserError otherwise."""
    from private_rlhf.core.rundir import RunDir, read_evaluation
    from private_rlhf.evaluation.runs import Run, read_rows
    from private_rlhf.evaluation.truths import truth_name
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe

    run = RunDir(folder)
    run.require("evaluate")
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    rows, reference, judge = read_rows(run.stage("evaluate"))
    methods = read_evaluation(run)["methods"]
    method = next(name for name in methods if name not in ("sft", "gibbs"))
    stated, aligner = methods[method], method.partition("_")[2] or "ppo"
    truth = truth_name(recipe.evaluate.truth, recipe.data.evaluation_prompts)
    terms = {
        "judge": truth or judge,
        "kl_coef": f"{stated['kl_coef']:g}",
        "truth": str(truth),
        "sampling": f"temperature {recipe.ppo.temperature:g} and top_p {recipe.ppo.top_p:g}",
    }
    return Run(folder.name, epsilon_of(stated["epsilon"]), aligner, recipe.seed, reference, terms, rows)


def sample(
    policy: Annotated[str, typer.Option("--policy", help="Checkpoint folder, e.g. runs/demo/ppo/model.")],
    prompt: Annotated[list[str], typer.Argument(help="Prompts to answer.")],
    count: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=2, help="Cap on a response; default: the policy's own.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message; default: the policy's own.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Recipe of its run, whose servers draw.")] = None,
) -> None:
    """Print sampled answers of a policy."""
    from private_rlhf.lm.model_folders import check_given

    check_given({"--policy": policy})
    from private_rlhf.evaluation.checkpoint_comparison import sample_text

    servers, folder = ({}, None) if config is None else servers_of(config, Path(policy).expanduser())
    try:
        sampled = sample_text(policy, prompt, count, seed, max_response_tokens, system_prompt, **servers)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    for text, answers in zip(prompt, sampled, strict=True):
        print_lines(f"> {text}", *(f"  {answer}" for answer in answers))


def servers_of(config: Path, policy: Path) -> tuple[dict[str, Any], Path | None]:
    """Arguments of `sample_text` by which a recipe's servers draw for `policy`, RUN/STAGE/model, and the folder that
    then has its adapter; nothing where the recipe has no servers."""
    from private_rlhf.recipe import EvaluateConfig, Recipe
    from private_rlhf.recipe.load import load_recipe

    recipe = load_recipe(Recipe, config)
    stage, at_reference = policy.parent, policy.parent.name == "sft"
    if recipe.rollout is None:
        return {}, None
    folder = (recipe.rollout.folder or stage.parent / "checkpoints") / "sample"  # not that of a run that goes on
    settings = replace(recipe.rollout, folder=folder)

    def connection(model: Any, renderer: Any) -> Any:
        from private_rlhf.core.world import join_world
        from private_rlhf.lm.distributed import make_accelerator
        from private_rlhf.lm.models import load_causal_lm
        from private_rlhf.lm.saving import ADAPTER
        from private_rlhf.rl.engines import connect

        dtype = str(model.dtype).removeprefix("torch.")
        reference = model if at_reference else load_causal_lm(stage.parent / "sft" / "model", dtype).to(model.device)
        how = folder, dtype, 1.0, EvaluateConfig().batch_size
        engine = connect(make_accelerator(join_world()), settings, model, renderer, *how, reference=reference)
        if not at_reference:
            engine.publish(stage / ADAPTER)
        return partial(engine.draw, at_reference=at_reference)

    return {"max_prompt_tokens": recipe.model.max_prompt_tokens, "connect": connection}, folder
