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
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError, say
from private_rlhf.core.noise import is_public
from private_rlhf.data import curate
from private_rlhf.data.chunks import CHUNK_BYTES
from private_rlhf.data.curate import OpenedSource, Workspace
from private_rlhf.data.declared_columns import NAMED_COLUMNS, PAIR, Options
from private_rlhf.data.engine import gather_events
from private_rlhf.data.release_import import held_out, names_bundle, open_bundle
from private_rlhf.data.render import Renderer
from private_rlhf.data.source_summary import HEAD_ROWS, SourceSummary
from private_rlhf.data.sources import Part, Row, open_source, run_splits, source_chunks
from private_rlhf.data.workers import default_workers, start_workers
from private_rlhf.data.workfolder import boot_id, work_folder
from private_rlhf.embedded import task
from private_rlhf.privacy.guarantee import DropCounts, nothing_left
from private_rlhf.privacy.keys import PrivacyKey, insecure_seed_key, keygen, load_key, make_private_folder, state_folder
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.sorted_runs import KeptRows, id_at
from private_rlhf.recipe import DataConfig, PrivatizeConfig
from private_rlhf.recipe.data_section import bare_name, is_hub_id

TOO_FEW = "one usable preference row is too few to hold one out: bring a folder with train and eval files"


@dataclass(frozen=True)
class RawSource:
    """The raw preferences of a run and the key that protects them. root: the run directory."""

    data: DataConfig
    privatize: PrivatizeConfig
    root: Path

    def open_sources(self) -> list[OpenedSource]:
        """Open the training and the evaluation split of the preferences; only one where a file serves for both."""
        source, settings = self.data.preferences, self.privatize
        if self.data.signer is not None:
            raise UserError(f"data.preferences must be a bundle of data.signer, got {bare_name(source)}: give it")
        path, named = settings.key_path, settings.private and settings.labeler_column is not None
        # spellings of a name are one person, also under a key that this run is about to make
        fold = named and (not path.exists() or Ledger(load_key(path)).folds_names)
        columns = {name: getattr(settings, name) for name in NAMED_COLUMNS}
        levels = tuple(sorted(settings.epsilon_levels or ()))
        options = Options.of(self.data, **columns, epsilon_levels=levels, fold_names=fold)
        splits = run_splits(source, self.data.split)
        if source == "embedded":
            seed = self.data.label_seed
            return [OpenedSource.open(source, [embedded_part(split or "train", seed)], options) for split in splits]
        return [OpenedSource.open(source, open_source(source, split), options) for split in splits]

    def check_input(self, evaluation_labels: str) -> None:
        """Check, before anything is written, the key file's place and permissions and the first rows of every split.

        A data set of the hub is not read: a plan must not wait for a download. UserError: the key is readable by others
        or inside the run directory, its ledger is damaged or would be over a budget, or the preferences cannot be read.
        """
        source, settings = self.data.preferences, self.privatize
        if names_bundle(source):
            open_bundle(self.data, settings, evaluation_labels)
            return
        if source != "embedded" or settings.private:
            path = self.key_path()
            if any(self.root.resolve() in {place, *place.parents} for place in _places(path)):
                raise UserError(f"privatize.key_file {path} is inside the run directory: keep the key elsewhere")
            if path.exists():
                key = load_key(path)
                if settings.private:
                    Ledger(key).check(bare_name(source), settings.epsilon, self.budget())
        if self.in_files:
            self.check_rows()

    def check_rows(self) -> None:
        """UserError for splits of which many of the first rows look odd."""
        for summary in self.summaries(most=HEAD_ROWS):
            summary.check(self.data.accept_odd)

    @property
    def in_files(self) -> bool:
        """True where the recipe names raw rows that lie in files on this machine."""
        source = self.data.preferences
        return not (self.data.without_pairs or names_bundle(source) or is_hub_id(source))

    def summaries(self, renderer: Renderer | None = None, most: int | None = None) -> list[SourceSummary]:
        """Summaries of the splits, or of their first rows. Nothing in it depends on a label."""
        return [SourceSummary(opened, renderer, most) for opened in self.open_sources()]

    def head(self, renderer: Renderer | None = None) -> list[str]:
        """Lines for people about the first rows of every split; none where the rows are not on this machine."""
        summaries = self.summaries(renderer, HEAD_ROWS) if self.in_files else ()
        return [line for summary in summaries for line in summary.lines()]

    @contextmanager
    def workspace(
        self, key: PrivacyKey, sources: list[OpenedSource], folder: Path, checkpoints: Path
    ) -> Iterator[Workspace]:
        """Yield the place for raw labels on the way: beside the key, or for the built-in task, whose labels anyone can
        draw, in `checkpoints`. folder: of the stage that releases."""
        home = checkpoints
        if key.path is not None or self.data.preferences != "embedded":
            home = (key if key.path is not None else self.owner_key()).state.folder
            make_private_folder(home)
            home /= "work"
            make_private_folder(home)
        home /= hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:16]
        plan = curate.work_plan(sources, self.privatize.epsilon, key, CHUNK_BYTES, boot_id())
        workers = 1 if key.path is None else default_workers(sum(opened.size for opened in sources))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with work_folder(home, plan, folder) as work, start_workers(workers) as pool:
                yield Workspace(key, work, pool)
        finally:
            for name in ("release", "evaluation"):
                shutil.rmtree(folder / f".{name}.new.tmp", ignore_errors=True)

    # --- the key ------------------------------------------------------------------------------------------------------

    def randomiser_key(self) -> PrivacyKey:
        """The owner's key; a seed's where the recipe asks for one, and for public labels, whose events need only
        names."""
        if self.privatize.insecure_seed is not None:
            return insecure_seed_key(self.privatize.insecure_seed)
        return insecure_seed_key(0) if is_public(self.privatize.epsilon) else self.owner_key()

    def key_path(self) -> Path:
        """The path of the owner's key. UserError where another one was the default until now."""
        before = Path("keys/private-rlhf.key")
        if self.privatize.key_file is None and before.exists():
            raise UserError(
                f"{before}: was the default key of this folder, and another key would draw its labels anew: state"
                f" privatize.key_file={before}, or put that key elsewhere"
            )
        return self.privatize.key_path

    def owner_key(self) -> PrivacyKey:
        """The owner's key; made, with a line on stderr, on first use."""
        path = self.key_path()
        if not path.exists():
            keygen(path)
            say(f"privatize: new secret key in {path} (owner-only); whoever holds it can undo the noise")
        return load_key(path)

    def budget(self) -> Budget | None:
        """The budget that the recipe states."""
        settings = self.privatize
        return None if settings.budget is None else Budget(settings.budget, settings.budget_per)

    # --- has the raw input changed? the answer is kept beside the key, keyed, never in the run directory --------------

    def remember_input(self) -> None:
        """Keep the keyed digest of the raw input; the code digest identifies built-in data instead."""
        if self.data.preferences != "embedded":
            self.owner_key().state.remember_input(self._name(), self._digest())

    def input_unchanged(self) -> bool:
        """True if the raw input is the one of the last completed run here."""
        if self.data.preferences == "embedded" or names_bundle(self.data.preferences):
            return True
        if not self.privatize.key_path.exists():
            return False
        return self.owner_key().state.recall_input(self._name()) == self._digest()

    def changed(self) -> UserError:
        """The error of counts and sums that would not be about the labels that were released."""
        return UserError(
            f"{self.data.preferences}: is not what the privatise stage released, so its labels are not counted: run"
            " again with --from privatize"
        )

    def _name(self) -> str:
        return f"run:{self.root.resolve()}"

    def _digest(self) -> str:
        key, source = self.owner_key(), self.data.preferences
        splits = run_splits(source, self.data.split)
        return key.keyed_digest(chunk for split in splits for chunk in source_chunks(source, split))


def embedded_part(split: str, label_seed: int) -> Part:
    """The built-in task as a source of rows; its labels are drawn when they are read."""

    def rows(wanted: Any) -> Iterator[tuple[int, Row]]:
        for number, pair in enumerate(task.load_pairs("train" if split == "train" else "eval"), start=1):
            (label,) = task.draw_labels([pair], label_seed)
            chosen, rejected = (pair.response_a, pair.response_b)[::label]
            yield number, {"prompt": pair.prompt, "chosen": chosen, "rejected": rejected}

    return Part("embedded", "row", ("prompt", *PAIR), rows)


def _places(path: Path) -> set[Path]:
    """The folders of a key file and its state, and those that the path leads through."""
    places = {path.resolve(), state_folder(path).resolve()}
    while path.is_symlink():
        places.add(path.parent.resolve() / path.name)
        path = path.parent / path.readlink()
    return places | {path.parent.resolve() / path.name}


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


def split_rows(workspace: Workspace, data: DataConfig, sources: list[OpenedSource]) -> Split:
    """Ranges of record ids, which are hashes of the pairs: a choice that depends on no label. A pair is on one side
    whole, with all that was said about it. UserError: too few rows."""
    source, scratch = data.preferences, workspace.work / "survey"
    everything = KeptRows(curate.read(workspace, sources[0], "train"))
    survey = gather_events(workspace.pool, [everything], workspace.key, scratch)
    counts, test_counts = curate.dropped(everything.runs, survey.duplicates), DropCounts()
    total = len(survey)
    if not total:
        raise nothing_left(source, counts)
    curate.say_repeated(source, sources[0].layout.options, counts.duplicates)
    train, count = everything, total
    if len(sources) == 1:
        if total < 2:
            raise UserError(TOO_FEW)
        count = total - held_out(total)
        cut = id_at(everything, survey.bounds, count)
        train, test = replace(everything, high=cut), replace(everything, low=cut)
    if data.limit is not None and data.limit < count:
        train = replace(train, high=id_at(everything, survey.bounds, data.limit))
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
        raise UserError(TOO_FEW)
    if not test_rows:
        raise UserError(
            f"{source}: no evaluation pair is left that is not also a training pair: bring other evaluation rows"
        )
    return Split(train, test, train_rows, test_rows, total, of, max(0, before - test_rows), counts, test_counts)
