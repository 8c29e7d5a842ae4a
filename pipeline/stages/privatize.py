"""Stage privatize: randomised response on every preference label (PPKL Eq. 7); the only stage that reads raw labels.

Pairs are put into an order that does not depend on their label, duplicates keep the first, and each label is kept with
probability α = e^ε/(1+e^ε) by a keyed function of the labelling event, so that a repeated run releases the same bits.
The steps are those of `private-rlhf privatize` (`pipeline.data.curate`), taken for two folders at once; what holds true
labels on the way lies in the key's state folder, and what is not finished in hidden folders that the next start sweeps.

Reads:   data.preferences (raw), the owner's key file.
Writes:  privatize/release (Parquet + manifest), privatize/evaluation (raw labels only where declared public).
Run alone: python -m pipeline.stages.privatize --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.core.atomic import write_json
from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.rundir import RunDir
from pipeline.data import curate
from pipeline.data.adopted import adopt, held_out, is_adopted, open_adopted
from pipeline.data.chunks import CHUNK_BYTES
from pipeline.data.curate import Bench, Bundle, Entry, Intake
from pipeline.data.engine import count_right, gather_events
from pipeline.data.formats import PAIR
from pipeline.data.layout import Options
from pipeline.data.release import refusals
from pipeline.data.sources import Part, Row, is_hub_id, open_source, source_chunks
from pipeline.data.workers import default_workers, start_workers
from pipeline.data.workfolder import work_folder
from pipeline.embedded import task
from pipeline.privacy import counts as privacy_counts
from pipeline.privacy.keys import PrivacyKey, insecure_seed_key, keygen, load_key, make_private_folder
from pipeline.privacy.ledger import Budget, Ledger, ReleasePlan
from pipeline.privacy.mechanism import Mechanism, PublicLabels, RandomizedResponse, make_mechanism
from pipeline.privacy.prf import frame
from pipeline.privacy.privatize import DropCounts, guarantee, nothing_left
from pipeline.privacy.runs import KeptRows, id_at
from pipeline.runner import StageContext, say
from pipeline.stages.entry import main_for

FIRST_ROWS = 100


def run(context: StageContext) -> dict[str, Any]:
    """Works on the main process alone (and workers of its own): labels are read once."""
    if not context.world.main:
        return {}
    recipe = context.recipe
    if is_adopted(recipe.data.preferences):
        return adopt(recipe, context.folder)
    mechanism = make_mechanism(recipe.privatize.epsilon, recipe.data.public_labels)
    test_mechanism: Mechanism = PublicLabels() if recipe.evaluation_labels == "public" else mechanism
    key = randomiser_key(recipe)
    ledger = Ledger.open(key) if key.mode == "keyed" and not isinstance(mechanism, PublicLabels) else None
    intakes = open_intakes(recipe)
    with refusals(context.folder), bench_for(context, key, intakes) as bench:
        # --- which rows are for training, which for evaluation --------------------------------------------------------
        split = split_rows(bench, recipe, intakes)
        source = declared_source(recipe.data.preferences)
        bundles = [
            Bundle(
                rows,
                intake.layout,
                by,
                curate.describe(intake.layout, count, of, source, guarantee(by, key), counts),
                context.folder / f".{name}.new.tmp",
                context.folder / name,
            )
            for name, rows, intake, by, count, of, counts in (
                ("release", split.train, intakes[0], mechanism, split.train_rows, split.train_of, split.train_counts),
                (
                    "evaluation",
                    split.test,
                    intakes[-1],
                    test_mechanism,
                    split.test_rows,
                    split.test_of,
                    split.test_counts,
                ),
            )
        ]

        # --- released, once everything is known to be sound and the ledger has it -------------------------------------
        private = [bundle.rows for bundle in bundles if not isinstance(bundle.mechanism, PublicLabels)]
        with entered(bench, recipe, ledger, private) as reservation:  # a refusal leaves an earlier release as it is
            for bundle in bundles:
                curate.write(bench, bundle)
            if reservation is not None:
                reservation.written()
            for bundle in bundles:
                curate.replace(bench, bundle)
            if reservation is not None:
                reservation.commit(context.folder.resolve())
    remember_input(recipe, context.run)
    return report(recipe, guarantee(mechanism, key), split, ledger)


def report(recipe: Recipe, facts: dict[str, Any], split: Split, ledger: Ledger | None) -> dict[str, Any]:
    """What the stage's manifest says; no statistic of true labels."""
    epsilon, dropped = facts["epsilon"], split.train_counts.as_dict()
    mark = f" — {facts['mark']}" if facts["mark"] else ""
    return {
        "events": split.train_rows,
        "evaluation_events": split.test_rows,
        "evaluation_overlap_dropped": split.overlap,
        "dropped": dropped,
        "epsilon": epsilon,
        "keep_prob": facts["keep_prob"],
        "mark": facts["mark"],
        "ledger": None if ledger is None else ledger.card_facts(),
        "summary": f"{split.train_rows} labels at ε = {'∞' if epsilon is None else epsilon} "
        f"(each kept with probability {facts['keep_prob']:.3f}){mark}; {sum(dropped.values())} rows "
        f"dropped; {split.test_rows} evaluation pairs ({recipe.evaluation_labels} labels)",
    }


# --- what is read -----------------------------------------------------------------------------------------------------


def open_intakes(recipe: Recipe) -> list[Intake]:
    """The training and the evaluation split of the preferences; one intake where a file serves for both."""
    source, own = recipe.data.preferences, recipe.privatize
    options = Options(labeler_column=own.labeler_column, event_column=own.event_column)
    splits = ("train",) if single_file(source) else ("train", "eval")
    if source == "embedded":
        return [Intake.open(source, [embedded_part(recipe, split)], options) for split in splits]
    return [Intake.open(source, open_source(source, split), options) for split in splits]


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
        UserError: the key is readable by others or inside the run directory, or the preferences cannot be read.
    """
    source, path = recipe.data.preferences, recipe.privatize.key_file.expanduser()
    if is_adopted(source):
        open_adopted(recipe)
        return
    if source != "embedded" or recipe.private:
        if run.root.resolve() in path.resolve().parents:
            raise UserError(f"privatize.key_file {path} is inside the run directory: keep the key elsewhere")
        if path.exists():
            load_key(path)
    if source == "embedded" or is_hub_id(source):
        return
    for intake in open_intakes(recipe):
        part = intake.parts[0]
        rows = islice(part.rows(intake.layout.options.wanted), FIRST_ROWS)
        intake.layout.row_columns(rows, f"{part.name}, {part.unit}")


def single_file(source: str) -> bool:
    """Whether the preferences are one file, of which a tenth is held out for evaluation."""
    return Path(source).expanduser().is_file()


@contextmanager
def bench_for(context: StageContext, key: PrivacyKey, intakes: list[Intake]) -> Iterator[Bench]:
    """Raw labels on the way lie beside the key; those of the built-in task, which anyone can draw, in the run."""
    recipe = context.recipe
    home = context.checkpoints
    if key.path is not None or recipe.data.preferences != "embedded":
        home = (key if key.path is not None else owner_key(recipe)).state.folder
        make_private_folder(home)
        home /= "work"
        make_private_folder(home)
    folder = home / hashlib.sha256(str(context.run.root.resolve()).encode()).hexdigest()[:16]
    plan = curate.work_plan(intakes, recipe.privatize.epsilon, key, CHUNK_BYTES)
    workers = 1 if key.path is None else default_workers(sum(intake.size for intake in intakes))
    context.folder.mkdir(parents=True, exist_ok=True)
    try:
        with work_folder(folder, plan, context.folder) as work, start_workers(workers) as crew:
            yield Bench(key, work, crew)
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


def split_rows(bench: Bench, recipe: Recipe, intakes: list[Intake]) -> Split:
    """Ranges of record ids, which are hashes of the pairs: a choice that depends on no label. A pair is on one side
    whole, with all that was said about it. UserError: too few rows."""
    source, scratch = recipe.data.preferences, bench.work / "survey"
    everything = KeptRows(curate.read(bench, intakes[0], "train"))
    survey = gather_events(bench.crew, [everything], bench.key, scratch)
    counts, test_counts = curate.dropped(everything.runs, survey.duplicates), DropCounts()
    total = len(survey)
    if not total:
        raise nothing_left(source, counts)
    train, count = everything, total
    if len(intakes) == 1:
        if total < 2:
            raise too_few()
        count = total - held_out(total)
        cut = id_at(everything, survey.bounds, count)
        train, test = replace(everything, high=cut), replace(everything, low=cut)
    if recipe.data.limit is not None and recipe.data.limit < count:
        train = replace(train, high=id_at(everything, survey.bounds, recipe.data.limit))
    before, of = 0, total
    if len(intakes) > 1:
        test = KeptRows(curate.read(bench, intakes[1], "eval"))
        survey = gather_events(bench.crew, [test], bench.key, scratch)
        before = of = len(survey)
        test_counts = curate.dropped(test.runs, survey.duplicates)
        if not before:
            raise nothing_left(source, test_counts)
        test = replace(test, without=train)
    train_rows, test_rows = gather_events(bench.crew, [train, test], bench.key, scratch).rows
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


@contextmanager
def entered(bench: Bench, recipe: Recipe, ledger: Ledger | None, rows: list[KeptRows]) -> Iterator[Any]:
    """The reservation of the release in the key's ledger; None where no key file protects the labels (public ones, or a
    seed's flips)."""
    if ledger is None:
        with nullcontext() as nothing:
            yield nothing
        return
    entry = Entry(
        ledger,
        declared_source(recipe.data.preferences),
        recipe.privatize.epsilon,
        gather_events(bench.crew, rows, bench.key, bench.work / "events"),
        budget=budget(recipe),
        remedy="give a correction or a second opinion an event id (privatize.event_column), or these labels a key of"
        " their own (privatize.key_file)",
    )
    with curate.reserved(bench, entry) as reservation:
        yield reservation


def budget(recipe: Recipe) -> Budget | None:
    """The budget that the recipe states."""
    own = recipe.privatize
    return None if own.budget is None else Budget(own.budget, own.budget_per)


# --- counts for the final evaluation ----------------------------------------------------------------------------------

KNOWN_ALREADY = 5e-324  # an ε that changes no total: the events are compared with the store and not entered


def noisy_counts(context: StageContext, decisions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """How many evaluation labels each rule is right about, with noise at privatize.count_epsilon for all rules together
    (`pipeline.privacy.counts`); also written to privatize/counts.json. Free for a question that was asked before.

    decisions: by rule, for every row of privatize/evaluation in its order: +1 if the rule prefers `chosen`, -1 if it
    prefers `rejected`, 0 if it abstains.

    Returns: JSON types: `epsilon`, `epsilon_per_count`, `counts` by rule, `ledger` (the card's facts, this included).

    Raises:
        UserError: the preferences changed since the release, or a budget would be exceeded.
    """
    recipe, run = context.recipe, context.run
    epsilon = recipe.privatize.count_epsilon
    assert epsilon is not None
    mechanism, key = RandomizedResponse(recipe.privatize.epsilon), owner_key(recipe)
    ledger = Ledger.open(key)
    if not input_unchanged(recipe, run):
        raise changed(recipe)
    intakes = open_intakes(recipe)
    with refusals(context.folder), bench_for(context, key, intakes) as bench:
        test = split_rows(bench, recipe, intakes).test
        events = gather_events(bench.crew, [test], key, bench.work / "events")
        if any(len(rule) != len(events) for rule in decisions.values()):
            raise changed(recipe)
        counts, names = count_right(test, mechanism, key, decisions, (repr(epsilon).encode(), events.content))
        identity = key.keyed_digest(map(frame, (b"counts", *names.values())))
        plan = ReleasePlan(declared_source(recipe.data.preferences), epsilon, len(events), identity, "counts")
        with ledger.reserve(plan, budget(recipe)) as reservation:
            if not reservation.already and any(
                events.merge(bench.crew, ledger.store, KNOWN_ALREADY, reservation.generation)
            ):
                raise changed(recipe)
            reservation.written()
            answer = privacy_counts.noisy_counts(key.prf, names, counts, epsilon)
            write_json(context.folder / "counts.json", answer)
            reservation.commit(context.folder.resolve())
    return answer | {"ledger": ledger.card_facts()}


def changed(recipe: Recipe) -> UserError:
    """The error of counts that would not be about the labels that were released."""
    return UserError(
        f"{recipe.data.preferences}: is not what the privatise stage released, so its labels are not counted: run again"
        " with --from privatize"
    )


def declared_source(source: str) -> str:
    """The name a release gives its source: the last part of a path, never the path itself."""
    return Path(source).name if Path(source).expanduser().exists() else source


def randomiser_key(recipe: Recipe) -> PrivacyKey:
    """The owner's key; a seed's where the recipe asks for one, and for public labels, whose events need names alone."""
    if recipe.privatize.insecure_seed is not None:
        return insecure_seed_key(recipe.privatize.insecure_seed)
    return insecure_seed_key(0) if math.isinf(recipe.privatize.epsilon) else owner_key(recipe)


def owner_key(recipe: Recipe) -> PrivacyKey:
    """The owner's key; made, and said so, on first use."""
    path = recipe.privatize.key_file.expanduser()
    if not path.exists():
        keygen(path)
        say(f"privatize: new secret key in {path} (owner-only); whoever holds it can undo the noise")
    return load_key(path)


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
    if not recipe.privatize.key_file.expanduser().exists():
        return False
    return owner_key(recipe).state.recall_input(_input_name(run)) == _input_digest(recipe)


if __name__ == "__main__":
    main_for("privatize")
