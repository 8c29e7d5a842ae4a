"""The raw preferences of a recipe, for the stages that may read labels: where they lie, how they are split, whose key.

Pairs are put into an order that does not depend on their label, duplicates keep the first. What holds true labels on
the way lies in the key's state folder, and what is not finished in hidden folders that the next start sweeps.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import is_public
from private_rlhf.core.progress import say
from private_rlhf.core.rundir import RunDir
from private_rlhf.data import curate
from private_rlhf.data.adopted import held_out, is_adopted, open_adopted
from private_rlhf.data.chunks import CHUNK_BYTES
from private_rlhf.data.curate import OpenedSource, Workspace
from private_rlhf.data.engine import gather_events
from private_rlhf.data.formats import PAIR
from private_rlhf.data.layout import Options
from private_rlhf.data.sources import Part, Row, is_hub_id, open_source, source_chunks
from private_rlhf.data.workers import default_workers, start_workers
from private_rlhf.data.workfolder import work_folder
from private_rlhf.embedded import task
from private_rlhf.privacy.guarantee import DropCounts, nothing_left
from private_rlhf.privacy.keys import PrivacyKey, insecure_seed_key, keygen, load_key, make_private_folder, state_folder
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.sorted_runs import KeptRows, id_at
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.shareable import bare_name
from private_rlhf.stages.context import StageContext

FIRST_ROWS = 100


def open_sources(recipe: Recipe) -> list[OpenedSource]:
    """The training and the evaluation split of the preferences; one opened where a file serves for both."""
    source, own = recipe.data.preferences, recipe.privatize
    fold = own.labeler_column is not None and _folds(recipe)
    options = Options(own.labeler_column, own.event_column, corrects_column=own.corrects_column, fold_names=fold)
    splits = ("train",) if single_file(source) else ("train", "eval")
    if source == "embedded":
        return [OpenedSource.open(source, [embedded_part(recipe, split)], options) for split in splits]
    return [OpenedSource.open(source, open_source(source, split), options) for split in splits]


def _folds(recipe: Recipe) -> bool:
    """Spellings of a labeller's name are one person under the key that the recipe's labels go out with."""
    path = recipe.privatize.key_path
    return recipe.private and path.exists() and Ledger(load_key(path)).folds_names


def embedded_part(recipe: Recipe, split: str) -> Part:
    """The built-in task as a source of rows; its labels are drawn when they are read."""

    def rows(wanted: Any) -> Iterator[tuple[int, Row]]:
        for number, pair in enumerate(task.load_pairs("train" if split == "train" else "eval"), start=1):
            (label,) = task.draw_labels([pair], recipe.data.label_seed)
            chosen, rejected = (pair.response_a, pair.response_b)[::label]
            yield number, {"prompt": pair.prompt, "chosen": chosen, "rejected": rejected}

    return Part("embedded", "row", ("prompt", *PAIR), rows)


def check_input(recipe: Recipe, run: RunDir) -> None:
    """A look before anything is written: the key file's place and permissions, the first rows of every split.

    A data set of the hub is not looked at: a plan must not wait for a download.

    Raises:
        UserError: the key is readable by others or inside the run directory, its ledger is damaged or would be over a
            budget, or the preferences cannot be read.
    """
    source = recipe.data.preferences
    if is_adopted(source):
        open_adopted(recipe)
        return
    if source != "embedded" or recipe.private:
        path = key_path(recipe)
        if any(run.root.resolve() in {place, *place.parents} for place in _places(path)):
            raise UserError(f"privatize.key_file {path} is inside the run directory: keep the key elsewhere")
        if path.exists():
            key = load_key(path)
            if recipe.private:
                Ledger(key).check(bare_name(source), recipe.privatize.epsilon, budget(recipe))
    if source == "embedded" or is_hub_id(source):
        return
    for opened in open_sources(recipe):
        part = opened.parts[0]
        rows = islice(part.rows(opened.layout.options.wanted), FIRST_ROWS)
        opened.layout.row_columns(rows, f"{part.name}, {part.unit}")


def _places(path: Path) -> set[Path]:
    """Where a key file and its state lie, and where the path leads through."""
    places = {path.resolve(), state_folder(path).resolve()}
    while path.is_symlink():
        places.add(path.parent.resolve() / path.name)
        path = path.parent / path.readlink()
    return places | {path.parent.resolve() / path.name}


def single_file(source: str) -> bool:
    """Whether the preferences are one file, of which a tenth is held out for evaluation."""
    return Path(source).expanduser().is_file()


@contextmanager
def workspace_for(context: StageContext, key: PrivacyKey, sources: list[OpenedSource]) -> Iterator[Workspace]:
    """Raw labels on the way lie beside the key; those of the built-in task, which anyone can draw, in the run."""
    recipe = context.recipe
    home = context.checkpoints
    if key.path is not None or recipe.data.preferences != "embedded":
        home = (key if key.path is not None else owner_key(recipe)).state.folder
        make_private_folder(home)
        home /= "work"
        make_private_folder(home)
    folder = home / hashlib.sha256(str(context.run.root.resolve()).encode()).hexdigest()[:16]
    plan = curate.work_plan(sources, recipe.privatize.epsilon, key, CHUNK_BYTES)
    workers = 1 if key.path is None else default_workers(sum(opened.size for opened in sources))
    context.folder.mkdir(parents=True, exist_ok=True)
    try:
        with work_folder(folder, plan, context.folder) as work, start_workers(workers) as pool:
            yield Workspace(key, work, pool)
    finally:
        for name in ("release", "evaluation"):
            shutil.rmtree(context.folder / f".{name}.new.tmp", ignore_errors=True)


# --- training and evaluation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The rows that are released. overlap: evaluation rows left out because their pair is trained on."""

    train: KeptRows
    test: KeptRows
    train_rows: int
    test_rows: int
    train_of: int  # all rows of their sources
    test_of: int
    overlap: int
    train_counts: DropCounts
    test_counts: DropCounts

    def capped(self, kept: Sequence[KeptRows], rows: Sequence[int]) -> Split:
        """Without the events over the cap; kept, rows: of training and, unless its labels are public, evaluation."""
        train = replace(self.train_counts, over_cap=self.train_rows - rows[0])
        changed = replace(self, train=kept[0], train_rows=rows[0], train_counts=train)
        if len(kept) == 1:
            return changed
        test = replace(self.test_counts, over_cap=self.test_rows - rows[1])
        return replace(changed, test=kept[1], test_rows=rows[1], test_counts=test)


def split_rows(workspace: Workspace, recipe: Recipe, sources: list[OpenedSource]) -> Split:
    """Ranges of record ids, which are hashes of the pairs: a choice that depends on no label. A pair is on one side
    whole, with all that was said about it. UserError: too few rows."""
    source, scratch = recipe.data.preferences, workspace.work / "survey"
    everything = KeptRows(curate.read(workspace, sources[0], "train"))
    survey = gather_events(workspace.pool, [everything], workspace.key, scratch)
    counts, test_counts = curate.dropped(everything.runs, survey.duplicates), DropCounts()
    total = len(survey)
    if not total:
        raise nothing_left(source, counts)
    train, count = everything, total
    if len(sources) == 1:
        if total < 2:
            raise too_few()
        count = total - held_out(total)
        cut = id_at(everything, survey.bounds, count)
        train, test = replace(everything, high=cut), replace(everything, low=cut)
    if recipe.data.limit is not None and recipe.data.limit < count:
        train = replace(train, high=id_at(everything, survey.bounds, recipe.data.limit))
    before, of = 0, total
    if len(sources) > 1:
        test = KeptRows(curate.read(workspace, sources[1], "eval"))
        survey = gather_events(workspace.pool, [test], workspace.key, scratch)
        before = of = len(survey)
        test_counts = curate.dropped(test.runs, survey.duplicates)
        if not before:
            raise nothing_left(source, test_counts)
        test = replace(test, without=train)
    train_rows, test_rows = gather_events(workspace.pool, [train, test], workspace.key, scratch).rows
    if not train_rows:
        raise too_few()
    if not test_rows:
        raise UserError(
            f"{source}: no evaluation pair is left that is not also a training pair: bring other evaluation rows"
        )
    return Split(train, test, train_rows, test_rows, total, of, max(0, before - test_rows), counts, test_counts)


def too_few() -> UserError:
    """The error of a file that is too small to be divided."""
    return UserError("one usable preference row is too few to hold one out: bring a folder with train and eval files")


def randomiser_key(recipe: Recipe) -> PrivacyKey:
    """The owner's key; a seed's where the recipe asks for one, and for public labels, whose events need names alone."""
    if recipe.privatize.insecure_seed is not None:
        return insecure_seed_key(recipe.privatize.insecure_seed)
    return insecure_seed_key(0) if is_public(recipe.privatize.epsilon) else owner_key(recipe)


def key_path(recipe: Recipe) -> Path:
    """Where the owner's key is. UserError where another one was the default until now."""
    before = Path("keys/private-rlhf.key")
    if recipe.privatize.key_file is None and before.exists():
        raise UserError(
            f"{before}: was the default key of this folder, and another key would draw its labels anew: state"
            f" privatize.key_file={before}, or put that key elsewhere"
        )
    return recipe.privatize.key_path


def owner_key(recipe: Recipe) -> PrivacyKey:
    """The owner's key; made, and said so, on first use."""
    path = key_path(recipe)
    if not path.exists():
        keygen(path)
        say(f"privatize: new secret key in {path} (owner-only); whoever holds it can undo the noise")
    return load_key(path)


def budget(recipe: Recipe) -> Budget | None:
    """The budget that the recipe states."""
    own = recipe.privatize
    return None if own.budget is None else Budget(own.budget, own.budget_per)


def check_no_cap(recipe: Recipe, cap: int | None) -> None:
    """UserError where the key's ledger caps a person's events and the recipe asks for a noisy sum, which knows no
    person."""
    if recipe.privatize.by_holder and cap is not None:
        raise UserError(
            f"privatize.trust: holder: this key's ledger releases at most {cap} labels of a person, and a noisy sum"
            " keeps no account per person: use another key, or leave trust out"
        )


def changed(recipe: Recipe) -> UserError:
    """The error of counts and sums that would not be about the labels that were released."""
    return UserError(
        f"{recipe.data.preferences}: is not what the privatise stage released, so its labels are not counted: run again"
        " with --from privatize"
    )


# --- has the raw input changed? the answer is kept beside the key, keyed, never in the run directory ------------------


def _input_name(run: RunDir) -> str:
    return f"run:{run.root.resolve()}"


def _input_digest(recipe: Recipe) -> str:
    key, source = owner_key(recipe), recipe.data.preferences
    if single_file(source):
        return key.keyed_digest(source_chunks(source))
    return key.keyed_digest(chunk for split in ("train", "eval") for chunk in source_chunks(source, split))


def remember_input(recipe: Recipe, run: RunDir) -> None:
    """Keeps the keyed digest of the raw input; built-in data is identified by the code digest instead."""
    if recipe.data.preferences != "embedded":
        owner_key(recipe).state.remember_input(_input_name(run), _input_digest(recipe))


def input_unchanged(recipe: Recipe, run: RunDir) -> bool:
    """Whether the raw input is the one of the last completed run here."""
    if recipe.data.preferences == "embedded" or is_adopted(recipe.data.preferences):
        return True
    if not recipe.privatize.key_path.exists():
        return False
    return owner_key(recipe).state.recall_input(_input_name(run)) == _input_digest(recipe)
