"""A released bundle as the preferences of a run: whoever trains need not hold the true labels, nor the key.

The bundle was written elsewhere by `private-rlhf privatize`; its labels are private already, so nothing is randomised
and no ledger is kept here: both are with the holder of the labels. A tenth of the pairs is held out for evaluation.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.data.answer_bundle import write_pairs
from private_rlhf.data.publish import publish, refusals
from private_rlhf.data.release import ROWS_PER_SHARD, Release, ReleaseManifest, is_release, read_release
from private_rlhf.data.totals import check_totals
from private_rlhf.recipe import DataConfig, PrivatizeConfig

HELD_OUT_SHARE = 0.1


def names_bundle(source: str) -> bool:
    """True if data.preferences names a released bundle."""
    return is_release(Path(source).expanduser())


def held_out(total: int) -> int:
    """Number of `total` pairs of one file or bundle to keep for evaluation: a tenth, and at least one."""
    return max(1, round(HELD_OUT_SHARE * total))


def open_bundle(data: DataConfig, privatize: PrivatizeConfig, evaluation_labels: str) -> Release:
    """Open the bundle that data.preferences names and check that it is as the recipe says. UserError: a damaged bundle,
    another ε or signer than the recipe's, or evaluation labels that no bundle holds."""
    source = data.preferences
    bundle = read_release(Path(source).expanduser())
    noise, signer = bundle.manifest.largest_noise, data.signer
    if signer is not None and bundle.signer != signer:
        raise UserError(f"{source}: is signed by {bundle.signer or 'nobody'}, and data.signer is {signer}")
    if not noise.factor:
        raise UserError(f"{source}: its labels are fair coins (keep_prob 1/2), from which nothing is learnt")
    if privatize.epsilon != noise.epsilon:
        raise UserError(
            f"{source}: was released at ε = {noise.epsilon:g} and the recipe says {privatize.epsilon:g}: "
            f"set privatize.epsilon={noise.epsilon:g}".replace("=inf", "=.inf")
        )
    if evaluation_labels != "private" and not noise.public:
        raise UserError(
            f"{source}: a released bundle holds no true labels for evaluation_labels: {evaluation_labels}; "
            "set evaluation_labels=private"
        )
    bundle.check_rows()
    check_totals(bundle)
    return bundle


def import_bundle(data: DataConfig, privatize: PrivatizeConfig, evaluation_labels: str, folder: Path) -> dict[str, Any]:
    """Copy the bundle into folder/release (training) and folder/evaluation; returns the facts for the manifest.
    UserError: see `open_bundle`; fewer than two pairs."""
    bundle, made = open_bundle(data, privatize, evaluation_labels), folder / ".adopted.tmp"
    with refusals(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        try:
            rows, test_rows = divide(bundle, data.limit, made / "release", made / "evaluation")
            for name in ("release", "evaluation"):
                shutil.rmtree(folder / name, ignore_errors=True)
                publish(made / name, folder / name)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    stated = bundle.manifest.largest_noise.as_json()
    epsilon = stated["epsilon"]
    at = bundle.manifest.epsilon_text if bundle.manifest.levels else "∞" if epsilon is None else epsilon
    return {
        "adopted": True,
        "events": rows,
        "evaluation_events": test_rows,
        "epsilon": epsilon,
        "keep_prob": stated["keep_prob"],
        "mark": bundle.manifest.guarantee["mark"],
        "ledger": None,
        "signer": bundle.signer,
        "summary": f"{rows} labels taken over as they were released, at ε = {at}, "
        f"signed by {bundle.signer or 'NOBODY (data.signer refuses such bundles)'}; {test_rows} evaluation pairs "
        "(released labels); the ledger is with the holder of the labels",
    }


def divide(bundle: Release, limit: int | None, train: Path, test: Path) -> tuple[int, int]:
    """Writes at most `limit` of the bundle's training pairs to the folder `train` and the held-out ones to `test`;
    returns how many each got.

    The cut is a record id, a hash of the pair, so a choice that depends on no label; all that was said about a pair is
    on one side. UserError: fewer than two pairs.
    """
    everything = [(row.record_id, row.epsilon) for row in bundle]
    ids = [name for name, _ in everything]
    first = len(ids) - held_out(len(ids))
    before = sum(name < ids[first] for name in ids)
    if not before:
        raise UserError(f"{bundle.directory}: one pair is too few to hold one out; bring a larger release")
    taken, manifest = min(before, limit or before), _taken_over(bundle)
    for folder, start, end in ((train, 0, taken), (test, before, len(ids))):
        levels = None
        if manifest.levels is not None:
            counts = Counter(epsilon for _, epsilon in everything[start:end])
            levels = {**manifest.levels, "events": [[each, counts[each]] for each, _ in manifest.levels["events"]]}
        # the columns that the holder named are left behind
        part = replace(manifest, rows=end - start, rows_per_shard=ROWS_PER_SHARD, extra_columns=(), levels=levels)
        write_pairs(folder, part, islice(bundle, start, end), bundle.message_keys)
    return taken, len(ids) - before


def _taken_over(bundle: Release) -> ReleaseManifest:
    """The bundle's manifest; it says where nobody signed for it, and what local answers about one pair cost."""
    manifest = bundle.manifest
    if manifest.guarantee["key_mode"] == "local" and manifest.totals is None:
        manifest = replace(manifest, totals={"record": check_totals(bundle), "person": None})
    if bundle.signer is None and manifest.private:
        facts = {**manifest.guarantee, "unsigned": True}
        marks = {name: facts.pop(name) for name in ("mark", "mark_reason")}  # last, as `stated` has them
        manifest = replace(manifest, guarantee=facts | marks)
    return manifest
