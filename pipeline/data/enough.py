"""Are there rows enough for one batch? What is known before anything runs is said then, not after hours of training.

Only counts are looked at, and of a large source only its first rows. Texts that are too long are left out later, so the
stages that learn count what they have once more.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path

from pipeline.core.recipe import Recipe
from pipeline.core.rundir import RunDir
from pipeline.core.world import check_rows
from pipeline.data.adopted import held_out, is_adopted
from pipeline.data.formats import read_demonstrations
from pipeline.data.inputs import release
from pipeline.data.overlap import protected_pairs
from pipeline.data.release import read_release
from pipeline.data.sources import is_hub_id
from pipeline.embedded import task


def check_enough(recipe: Recipe, run: RunDir, stages: Collection[str]) -> None:
    """Every one of `stages` that learns in batches will find at least one, as far as is known now.

    Raises:
        UserError: see `check_rows`.
    """
    data, reward = recipe.data, recipe.reward
    sizes = {name: getattr(recipe, name).batch_size for name in ("sft", "reward", "dpo") if name in stages}
    if reward.mode == "head" or reward.external is not None:
        sizes.pop("reward", None)
    if "sft" in sizes and not data.from_release("demonstrations"):
        size = sizes.pop("sft")
        source = data.demonstrations
        rows = task.load_demonstrations() if source == "embedded" else read_demonstrations(source)
        check_rows(sum(1 for _ in islice(rows, size)), "sft", size)
    pairs = training_pairs(recipe, run, "privatize" in stages, 3 * max(sizes.values()) + 10) if sizes else None
    if pairs is None:
        return
    held = max(1, round(len(set(pairs)) * reward.validation_fraction))
    shown = 2 if data.demonstrations == "release_both" else 1
    counts = {"sft": shown * len(pairs), "reward": len(pairs) - held, "dpo": len(pairs)}
    for section, size in sizes.items():
        check_rows(counts[section], section, size)


def training_pairs(recipe: Recipe, run: RunDir, new: bool, enough: int) -> list[str] | None:
    """What tells one released training pair from another, of each or of the first `enough`, or more than there will be.

    None where it is not known: a data set of the hub, several labels of one pair, many pairs that are written twice.

    Args:
        new: the privatize stage is about to run; else its release is there.
        enough: nobody needs more; over twice the largest batch.
    """
    source = recipe.data.preferences
    if not new:
        return [row.record_id for row in islice(release(run), enough)]
    if is_adopted(source):
        pairs = [row.record_id for row in islice(read_release(Path(source).expanduser()), enough)]
    elif is_hub_id(source) or recipe.privatize.labeler_column or recipe.privatize.event_column:
        return None
    else:
        read = [repr(pair) for pair in islice(protected_pairs(recipe, run, True, ("train",)), enough)]
        pairs = list(dict.fromkeys(read))
        if len(pairs) < len(read) == enough:
            return None
    divided = is_adopted(source) or Path(source).expanduser().is_file()
    if divided and len(pairs) < enough:
        pairs = pairs[: len(pairs) - held_out(len(pairs))]
    return pairs[: recipe.data.limit]
