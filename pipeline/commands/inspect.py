"""The `inspect` command: what will be learnt from a source, before a label of it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from private_rlhf.core.errors import UserError

if TYPE_CHECKING:
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
    from private_rlhf.recipe.load import load_recipe

    if config is not None:
        stated = {"--split": split, "--format": shape, "--label-column": label_column, "--labels": labels}
        stated |= {"--labeler-column": labeler_column}
        if surplus := [name for name, value in stated.items() if value is not None]:
            raise UserError(f"inspect --config takes no {surplus[0]}: set section.key=value")
        recipe = load_recipe(Recipe, config, [f"data.preferences={source}", *(overrides or [])])
        lines = _lines(recipe, tokens=True)
    else:
        if overrides:
            raise UserError(f"inspect without --config takes no '{overrides[0]}': give --config, or leave it out")
        columns = Options(labeler_column, None, (), label_column, parse_labels(labels), ties="coin", format=shape)
        lines = summary_of(source, split, columns).lines()
    print("\n".join(lines))


def head_lines(recipe: Recipe) -> list[str]:
    """Lines of a plan about the first rows of a recipe's raw preferences, in tokens where its model is a folder."""
    from private_rlhf.data.source_summary import HEAD_ROWS

    return _lines(recipe, Path(recipe.model.source).expanduser().is_dir(), HEAD_ROWS)


def _lines(recipe: Recipe, tokens: bool, most: int | None = None) -> list[str]:
    """tokens: by the recipe's model, which is made or fetched for it."""
    from private_rlhf.data.inputs import make_renderer
    from private_rlhf.data.raw_source import RawSource
    from private_rlhf.lm.base_models import base_checkpoint
    from private_rlhf.lm.models import load_tokenizer

    source = RawSource(recipe.data, recipe.privatize, Path("runs") / recipe.name)
    if most is not None and not source.in_files:
        return []
    renderer = None
    if tokens:
        folder = base_checkpoint(recipe.model)
        renderer = make_renderer(recipe.model, load_tokenizer(folder, revision=recipe.model.revision))
    return [line for summary in source.summaries(renderer, most) for line in summary.lines()]
