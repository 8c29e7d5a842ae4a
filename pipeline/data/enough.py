"""Are there rows enough for one batch? What is known before anything runs is said then, not after hours of training.

Only counts are looked at, and of a large source only its first rows. Texts that are too long are left out later, so the
stages that learn count what they have once more.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from private_rlhf.core.rundir import RunDir
from private_rlhf.data.adopted import held_out, is_adopted
from private_rlhf.data.formats import read_demonstrations
from private_rlhf.data.inputs import release
from private_rlhf.data.overlap import protected_pairs
from private_rlhf.data.release import read_release
from private_rlhf.data.sources import is_hub_id
from private_rlhf.embedded import task
from private_rlhf.recipe import Recipe


def demonstrations(recipe: Recipe, run: RunDir, new: bool, size: int) -> int | None:
    """How many demonstrations there are, or at least `size` of them; None where it is not known. new: see below."""
    source = recipe.data.demonstrations
    if recipe.data.from_release("demonstrations"):
        found = pairs(recipe, run, new, size)
        return None if found is None else found * (2 if source == "release_both" else 1)
    rows = task.load_demonstrations() if source == "embedded" else read_demonstrations(source)
    return sum(1 for _ in islice(rows, size))


def pairs(recipe: Recipe, run: RunDir, new: bool, size: int, fraction: float = 0.0) -> int | None:
    """How many released pairs a stage learns from that holds a fraction of them out; None where it is not known."""
    found = training_pairs(recipe, run, new, 3 * size + 10)
    if found is None:
        return None
    return len(found) - (max(1, round(len(set(found)) * fraction)) if fraction else 0)


def training_pairs(recipe: Recipe, run: RunDir, new: bool, enough: int) -> list[str] | None:
    """What tells one released training pair from another, of each or of the first `enough`, or more than there will be.

    None where it is not known: a data set of the hub, several labels of one pair, many pairs that are written twice.

    Args:
        new: the privatize stage is about to run; else its release is there.
        enough: nobody needs more; over twice the largest batch.
    """
    source = recipe.data.preferences
    if recipe.online is not None:
        return None  # it depends on which questions will be asked
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
