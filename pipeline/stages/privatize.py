"""Stage privatize: randomised response on every preference label (PPKL Eq. 7); the only stage that reads raw labels.

Pairs are put into an order that does not depend on their label, duplicates keep the first, and each label is kept with
probability α = e^ε/(1+e^ε) by a keyed function of the labelling event, so that a repeated run releases the same bits.

Reads:   data.preferences (raw), the owner's key file.
Writes:  privatize/release (Parquet + manifest), privatize/evaluation (raw labels only where declared public).
Run alone: python -m pipeline.stages.privatize --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.core.errors import UserError
from pipeline.core.recipe import Recipe
from pipeline.core.rundir import RunDir
from pipeline.data.formats import read_preferences
from pipeline.data.release import ReleaseManifest, text_format, write_release
from pipeline.data.sources import source_chunks
from pipeline.embedded import task
from pipeline.privacy.entries import EventLog, spent
from pipeline.privacy.keys import PrivacyKey, insecure_seed_key, keygen, load_key
from pipeline.privacy.ledger import Ledger
from pipeline.privacy.mechanism import Mechanism, PublicLabels, make_mechanism
from pipeline.privacy.privatize import DropCounts, guarantee, privatize_records
from pipeline.privacy.records import PrivateRecord, RawPair
from pipeline.runner import StageContext, say
from pipeline.stages.entry import main_for

HELD_OUT_SHARE = 0.1
FIRST_ROWS = 100


def run(context: StageContext) -> dict[str, Any]:
    """Works on the main process alone: labels are read once."""
    if not context.world.main:
        return {}
    recipe = context.recipe
    mechanism = make_mechanism(recipe.privatize.epsilon, recipe.data.public_labels)
    key = randomiser_key(recipe)

    # --- training labels: always through the mechanism ----------------------------------------------------------------
    log = EventLog()
    records, counts = privatize_records(raw_pairs(recipe, "train"), mechanism, key, recipe.data.preferences, log)
    held_out: list[PrivateRecord] = []
    if single_file(recipe.data.preferences):
        records, held_out = split_by_id(records)
    records = records[: recipe.data.limit]  # record ids are hashes, so their first ones are a label-independent choice

    # --- evaluation labels: raw only where they are declared public ---------------------------------------------------
    test_mechanism: Mechanism = PublicLabels() if recipe.evaluation_labels == "public" else mechanism
    if single_file(recipe.data.preferences):
        if recipe.evaluation_labels == "public":
            chosen = {record.record_id for record in held_out}
            everything, _ = privatize_records(raw_pairs(recipe, "train"), test_mechanism, key)
            held_out = [record for record in everything if record.record_id in chosen]
        test_records, test_counts = held_out, DropCounts()
    else:
        test_log = None if recipe.evaluation_labels == "public" else log
        test_records, test_counts = privatize_records(raw_pairs(recipe, "eval"), test_mechanism, key, log=test_log)
    trained_on = {record.record_id for record in records}
    overlap = sum(record.record_id in trained_on for record in test_records)
    test_records = [record for record in test_records if record.record_id not in trained_on]
    if not test_records:
        raise UserError(
            f"{recipe.data.preferences}: no evaluation pair is left that is not also a training pair: "
            "bring other evaluation rows"
        )

    # --- released, once everything is known to be sound and the ledger has it -----------------------------------------
    released = {record.record_id for record in [*records, *test_records]}
    with entered(recipe, key, log.only(released)) as ledger:  # a refusal leaves an earlier release as it is
        for name in ("release", "evaluation"):
            shutil.rmtree(context.folder / name, ignore_errors=True)
        release_to(context.folder / "release", recipe, records, counts, guarantee(mechanism, key))
        release_to(context.folder / "evaluation", recipe, test_records, test_counts, guarantee(test_mechanism, key))
    remember_input(recipe, context.run)
    facts = guarantee(mechanism, key)
    epsilon = facts["epsilon"]
    mark = f" — {facts['mark']}" if facts["mark"] else ""
    return {
        "events": len(records),
        "evaluation_events": len(test_records),
        "evaluation_overlap_dropped": overlap,
        "dropped": counts.as_dict(),
        "epsilon": epsilon,
        "keep_prob": facts["keep_prob"],
        "mark": facts["mark"],
        "ledger": None if ledger is None else ledger.card_facts(),
        "summary": f"{len(records)} labels at ε = {'∞' if epsilon is None else epsilon} "
        f"(each kept with probability {facts['keep_prob']:.3f}){mark}; {sum(counts.as_dict().values())} rows "
        f"dropped; {len(test_records)} evaluation pairs ({recipe.evaluation_labels} labels)",
    }


@contextmanager
def entered(recipe: Recipe, key: PrivacyKey | None, events: list[tuple[bytes, int]]) -> Iterator[Ledger | None]:
    """The release in the key's ledger; None where no key file protects the labels (public ones, or a seed's flips)."""
    if key is None or key.mode != "keyed":
        yield None
        return
    with spent(key, declared_source(recipe.data.preferences), recipe.privatize.epsilon, events) as ledger:
        yield ledger


def check_input(recipe: Recipe, run: RunDir) -> None:
    """A look before anything is written: the key file's place and permissions, the first rows of every split.

    Raises:
        UserError: the key is readable by others or inside the run directory, or the preferences cannot be read.
    """
    source, path = recipe.data.preferences, recipe.privatize.key_file.expanduser()
    if source != "embedded" or recipe.private:
        if run.root.resolve() in path.resolve().parents:
            raise UserError(f"privatize.key_file {path} is inside the run directory: keep the key elsewhere")
        if path.exists():
            load_key(path)
    if source == "embedded":
        return
    for split in ("train",) if single_file(source) else ("train", "eval"):
        deque(islice(raw_pairs(recipe, split), FIRST_ROWS), maxlen=0)


def raw_pairs(recipe: Recipe, split: str) -> Iterator[RawPair]:
    """The raw pairs of a split: of the embedded task (labels drawn now) or of the recipe's source."""
    if recipe.data.preferences == "embedded":
        pairs = task.load_pairs("train" if split == "train" else "eval")
        labels = task.draw_labels(pairs, recipe.data.label_seed)
        for number, (pair, label) in enumerate(zip(pairs, labels, strict=True), start=1):
            first, second = (pair.response_a, pair.response_b) if label > 0 else (pair.response_b, pair.response_a)
            yield RawPair(pair.prompt, first, second, number)
    elif single_file(recipe.data.preferences):
        yield from read_preferences(recipe.data.preferences)
    else:
        yield from read_preferences(recipe.data.preferences, split)


def single_file(source: str) -> bool:
    """Whether the preferences are one file, of which a tenth is held out for evaluation."""
    return Path(source).expanduser().is_file()


def split_by_id(records: list[PrivateRecord]) -> tuple[list[PrivateRecord], list[PrivateRecord]]:
    """(training, held-out) records by their public id; at least one of each."""
    count = max(1, round(HELD_OUT_SHARE * len(records)))
    if len(records) < 2:
        raise UserError(
            "one usable preference row is too few to hold one out: bring a folder with train and eval files"
        )
    return records[:-count], records[-count:]


def release_to(
    folder: Path, recipe: Recipe, records: list[PrivateRecord], counts: DropCounts, facts: dict[str, Any]
) -> None:
    """Writes one release."""
    manifest = ReleaseManifest(
        format=text_format(records[0]),
        rows=len(records),
        source=declared_source(recipe.data.preferences),
        guarantee=facts,
        dropped=counts.as_dict(),
    )
    write_release(records, folder, manifest)


def declared_source(source: str) -> str:
    """The name a release gives its source: the last part of a path, never the path itself."""
    return Path(source).name if Path(source).expanduser().exists() else source


def randomiser_key(recipe: Recipe) -> PrivacyKey | None:
    """The key of the randomiser; None for public labels, a seed's key where the recipe asks for one."""
    if recipe.privatize.insecure_seed is not None:
        return insecure_seed_key(recipe.privatize.insecure_seed)
    return None if math.isinf(recipe.privatize.epsilon) else owner_key(recipe)


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
    if recipe.data.preferences == "embedded":
        return True
    if not recipe.privatize.key_file.expanduser().exists():
        return False
    return owner_key(recipe).state.recall_input(_input_name(run)) == _input_digest(recipe)


if __name__ == "__main__":
    main_for("privatize")
