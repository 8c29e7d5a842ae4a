"""Stage privatize: randomised response on every preference label (PPKL Eq. 7). Only it and stage count read raw labels.

Pairs are put into an order that does not depend on their label, duplicates keep the first, and each label is kept with
probability α = e^ε/(1+e^ε) by a keyed function of the labelling event, so that a repeated run releases the same bits.
The steps are those of `private-rlhf privatize` (`data.curate`), taken for two folders at once; what holds true
labels on the way lies in the key's state folder, and what is not finished in hidden folders that the next start sweeps.

Reads:   data.preferences (raw), the owner's key file.
Writes:  privatize/release (Parquet + manifest), privatize/evaluation (raw labels only where declared public).
Command: python -m private_rlhf.stages.privatize --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from private_rlhf.core.errors import print_lines
from private_rlhf.core.noise import LabelNoise
from private_rlhf.data import curate
from private_rlhf.data.curate import Bundle, LedgerEntry, Workspace
from private_rlhf.data.engine import Events
from private_rlhf.data.publish import check_output, refusals
from private_rlhf.data.raw_source import RawSource, Split, split_rows
from private_rlhf.data.release_import import import_bundle, names_bundle
from private_rlhf.privacy.guarantee import dropped_text, guarantee
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.privacy.mechanism import (
    LevelledResponse,
    Mechanism,
    PublicLabels,
    RandomizedResponse,
    make_mechanism,
)
from private_rlhf.privacy.signatures import public_key
from private_rlhf.privacy.sorted_runs import KeptRows
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.data_section import bare_name, is_hub_id
from private_rlhf.stages.context import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Works on the main process alone (and workers of its own): labels are read once."""
    if not context.world.main:
        return {}
    recipe = context.recipe
    own = recipe.privatize
    if names_bundle(recipe.data.preferences):
        return import_bundle(recipe.data, own, recipe.evaluation_labels, context.folder)
    raw = RawSource(recipe.data, own, context.run.root)
    sources = raw.open_sources()
    mechanism = make_mechanism(own.epsilon, recipe.data.public_labels)
    if own.epsilon_column is not None:
        mechanism = curate.response(own.epsilon, sources[0].layout.options)
    test_mechanism: Mechanism = PublicLabels() if recipe.evaluation_labels == "public" else mechanism
    key = raw.randomiser_key()
    ledger = Ledger.open(key) if key.mode == "keyed" and not isinstance(mechanism, PublicLabels) else None
    if is_hub_id(recipe.data.preferences):  # not read by the plan
        raw.check_rows()
    if sys.stderr.isatty():  # for people, before anything is spent
        print_lines(*raw.head(), file=sys.stderr)
    with (
        refusals(context.folder),
        raw.workspace(key, sources, context.folder, context.checkpoints) as workspace,
    ):
        # --- which rows are for training, which for evaluation --------------------------------------------------------
        split = split_rows(workspace, recipe.data, sources)
        tested = not isinstance(test_mechanism, PublicLabels)  # through the randomiser
        parts = [split.train, split.test] if tested else [split.train]
        private, events, cap = curate.capped(workspace, ledger, parts, own.max_events_per_person)
        if cap is not None:
            split = split.capped(private, events.rows)
        source = bare_name(recipe.data.preferences)
        train_levels, *levels = curate.chosen_levels(source, mechanism, events, own.levels_before_labels)
        test_levels = levels[0] if tested else None
        bundles = [
            Bundle(
                rows,
                opened.layout,
                by,
                curate.describe(opened.layout, count, of, source, guarantee(by, key), counts, levels_of),
                context.folder / f".{name}.new.tmp",
                context.folder / name,
            )
            for name, rows, opened, by, count, of, counts, levels_of in (
                ("release", split.train, sources[0], mechanism, split.train_rows, split.train_of, split.train_counts,
                 train_levels),
                ("evaluation", split.test, sources[-1], test_mechanism, split.test_rows, split.test_of,
                 split.test_counts, test_levels),
            )
        ]

        for bundle in bundles:
            check_output(bundle.target)

        # --- released, once everything is known to be sound and the ledger has it -------------------------------------
        with entered(workspace, raw, ledger, mechanism, private, events, cap) as reservation:  # or refused: all stays
            for bundle in bundles:
                curate.write(workspace, bundle)
            if reservation is not None:
                reservation.written()
            for bundle in bundles:
                curate.put(workspace, bundle)
            if reservation is not None:
                reservation.commit(context.folder.resolve())
    raw.remember_input()
    signer = public_key(key) if ledger is not None else None
    return report(recipe, guarantee(mechanism, key), split, ledger) | {"signer": signer}


def report(recipe: Recipe, facts: dict[str, Any], split: Split, ledger: Ledger | None) -> dict[str, Any]:
    """What the stage's manifest says; no statistic of true labels."""
    epsilon, dropped = facts["epsilon"], split.train_counts.as_dict()
    tested = split.test_counts.as_dict() | {"a pair that is trained on": split.overlap}
    mark = f" — {facts['mark']}" if facts["mark"] else ""
    noise, levels = LabelNoise.from_json(facts), facts.get("levels", [epsilon])
    at = " or ".join("∞" if level is None else str(level) for level in levels)
    kept = " or ".join(LabelNoise.of(level).keep_text() for level in facts.get("levels", ())) or noise.keep_text()
    said = f"{split.train_rows} labels at ε = {at} (each kept with probability {kept})"
    said += f"; beware: {noise.warning}" if noise.warning else ""
    return {
        "events": split.train_rows,
        "evaluation_events": split.test_rows,
        "evaluation_overlap_dropped": split.overlap,
        "dropped": dropped,
        "epsilon": epsilon,
        "keep_prob": facts["keep_prob"],
        "mark": facts["mark"],
        "ledger": None if ledger is None else ledger.card_facts(),
        "summary": f"{said}{mark}; {dropped_text(dropped)}; {split.test_rows} evaluation pairs "
        f"({recipe.evaluation_labels} labels), {dropped_text(tested)}",
    }


@contextmanager
def entered(
    workspace: Workspace,
    raw: RawSource,
    ledger: Ledger | None,
    mechanism: Mechanism,
    rows: list[KeptRows],
    events: Events,
    cap: int | None,
) -> Iterator[Any]:
    """The reservation of the release in the key's ledger; None where no key file protects the labels (public ones, or a
    seed's flips)."""
    if ledger is None or not isinstance(mechanism, RandomizedResponse | LevelledResponse):
        yield None
        return
    entry = LedgerEntry(
        ledger,
        bare_name(raw.data.preferences),
        mechanism,
        events,
        rows,
        budget=raw.budget(),
        max_events=cap,
        unnamed=curate.unnamed({run.path: run for part in rows for run in part.runs}.values()),
        add_up=raw.privatize.add_up_renamed,
        # labels that are public or synthetic have nobody to protect: another draw is charged and stops no run
        add_up_keys=raw.privatize.add_up_keys or raw.data.public_labels or raw.data.preferences == "embedded",
        remedies=(
            "a corrected label needs an event id of its own (privatize.event_column) and names the record that it"
            " corrects (privatize.corrects_column)",
            "keep the names of the first release, leave the rows out, or charge both draws (privatize.add_up_renamed)",
            "name that key (privatize.key_file), leave the pairs out, or charge both draws (privatize.add_up_keys)",
            "give the first texts, leave the pairs out, or charge both draws (privatize.add_up_renamed)",
        ),
    )
    with curate.reserved(workspace, entry) as reservation:
        yield reservation


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("privatize")
