"""The `inspect` command: what will be learnt from a source, before a label of it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from private_rlhf.core.errors import UserError, print_lines

if TYPE_CHECKING:
    from private_rlhf.data.raw_source import RawSource
    from private_rlhf.data.render import Renderer
    from private_rlhf.recipe import Recipe


def inspect(
    source: Annotated[str, typer.Argument(help="Preferences: file, folder or hub id.")],
    config: Annotated[Path | None, typer.Option("--config", help="Read as this recipe does; count tokens.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Of a folder or hub data set; default train.")] = None,
    shape: Annotated[str | None, typer.Option("--format", help="Name of a public or a tool's shape.")] = None,
    label_column: Annotated[str | None, typer.Option("--label-column", help="As of privatize.")] = None,
    labels: Annotated[str | None, typer.Option("--labels", help="As of privatize.")] = None,
    labeler_column: Annotated[str | None, typer.Option("--labeler-column", help="Who gave the label.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="With --config: section.key=value")] = None,
) -> None:
    """Show rows, columns, what is left out and why, lengths, and two rows as the model sees them; no label."""
    from private_rlhf.data.declared_columns import Options, parse_labels
    from private_rlhf.data.source_summary import summary_of
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import all_overrides, load_recipe

    if config is not None:
        stated = {"--split": split, "--format": shape, "--label-column": label_column, "--labels": labels}
        stated |= {"--labeler-column": labeler_column}
        if surplus := [name for name, value in stated.items() if value is not None]:
            raise UserError(f"inspect --config takes no {surplus[0]}: set section.key=value")
        recipe = load_recipe(Recipe, config, all_overrides(source, overrides))
        lines = [line for summary in _source(recipe).summaries(_renderer(recipe)) for line in summary.lines()]
    else:
        if overrides:
            raise UserError(f"inspect without --config takes no '{overrides[0]}': give --config, or leave it out")
        columns = Options(labeler_column, None, (), label_column, parse_labels(labels), ties="coin", format=shape)
        lines = summary_of(source, split, columns).lines()
    print_lines(*lines)


def head_lines(recipe: Recipe) -> list[str]:
    """Lines of a plan about the first rows of a recipe's raw preferences, in tokens where its model is here."""
    from private_rlhf.lm.base_models import is_here

    source = _source(recipe)
    return source.head(_renderer(recipe) if source.in_files and is_here(recipe.model) else None)


def _source(recipe: Recipe) -> RawSource:
    from private_rlhf.data.raw_source import RawSource

    return RawSource(recipe.data, recipe.privatize, Path("runs") / recipe.name)


def _renderer(recipe: Recipe) -> Renderer:
    """By the recipe's model, which is made or fetched for it."""
    from private_rlhf.data.render import make_renderer
    from private_rlhf.lm.base_models import base_checkpoint
    from private_rlhf.lm.models import load_tokenizer

    folder = base_checkpoint(recipe.model)
    return make_renderer(recipe.model, load_tokenizer(folder, revision=recipe.model.revision))
