"""The recipe as a run directory keeps it: without the folders of its holder's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import MOST_NAME, one_line
from private_rlhf.recipe.data_section import has_hub_form
from private_rlhf.recipe.load import dump_yaml, effective, to_tree
from private_rlhf.recipe.model_section import ModelConfig
from private_rlhf.recipe.recipe import Recipe

OWN_FILES = ("preferences", "demonstrations", "prompts", "evaluation_prompts")  # of section data


def shareable_yaml(recipe: Recipe) -> str:
    """The text that a run directory keeps (`shareable`)."""
    return dump_yaml(shareable(recipe))


def changed_keys(recipe: Recipe, saved: Mapping[str, Any]) -> list[str]:
    """The keys (`section.key`) with an effect in which the recipe differs from a saved one; none if that is empty."""
    if not saved:
        return []
    return sorted(_differences(*(effective(Recipe, tree) for tree in (saved, to_tree(shareable(recipe))))))


def shareable(recipe: Recipe) -> Recipe:
    """The recipe as a run directory keeps it: of the files of its holder the last part of the name alone.

    The raw labels and the key are among them, and the folders above may tell what nobody else is to know.
    """
    data: dict[str, Any] = {name: bare_name(str(getattr(recipe.data, name))) for name in OWN_FILES}
    key_file, own = recipe.privatize.key_file, recipe.privatize
    own = dataclasses.replace(own, key_file=None if key_file is None else Path(key_file.name))
    cache = recipe.model.cache_dir
    model = dataclasses.replace(recipe.model, cache_dir=cache if cache == ModelConfig.cache_dir else Path(cache.name))
    asks = recipe.online
    if asks is not None:
        folder, after = (None if path is None else Path(path.name) for path in (asks.folder, asks.after))
        asks = dataclasses.replace(asks, folder=folder, after=after)
    data_of = dataclasses.replace(recipe.data, **data)
    return dataclasses.replace(recipe, data=data_of, privatize=own, model=model, online=asks)


def bare_name(source: str) -> str:
    """The last part of a path, whether or not it is there; a hub id as it is; printable (`one_line`)."""
    # A folder of the user's with the form of a hub id is read as a folder. Runs make none such, so twins agree on it.
    is_hub_id = has_hub_form(source) and not Path(source).exists()
    return one_line(source if is_hub_id else Path(source).name, MOST_NAME)


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Dotted paths at which two trees differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = before.keys() | after.keys()
        found = [_differences(before.get(name), after.get(name), f"{path}.{name}".lstrip(".")) for name in names]
        return [one for some in found for one in some]
    return [path] if before != after else []
