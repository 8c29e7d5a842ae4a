"""Bundles made the leaky way, one generator or more per leak of the design's section 3.

Each takes a `World` (pairs with fair-coin labels) and a folder, and writes what a careless program would release. But
for the leak in question they are sound: flips from the operating system, columns in a neutral order, random ids.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from audit.worlds import COINS, World, bundle, flip, flips, keep_prob, sound, trl_rows, write_jsonl
from private_rlhf.privacy.keys import insecure_seed_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import RawPair

from support.leaky_coordinates import (
    column_of_own_label,
    id_bit_is_the_label,
    kept_in_a_side_file,
    rate_of_train_with_evaluation,
    raw_evaluation,
    sorted_by_own_label,
)
from support.plain_release import release_pairs

# --- 1: column order --------------------------------------------------------------------------------------------------


def chosen_first(world: World, folder: Path) -> Path:
    """The chosen answer is always a1; the label beside it is soundly flipped."""
    rows = []
    for number, z in enumerate(flips(world, 0.5)):
        prompt, chosen, rejected = world.preferred(number)
        rows.append({"prompt": prompt, "a1": chosen, "a2": rejected, "z": z * world.labels[number]})
    random.Random(1).shuffle(rows)
    return bundle(folder, rows, 0.5)


# --- 2: public randomness ---------------------------------------------------------------------------------------------


def _seeded(world: World, folder: Path, epsilon: float, uniform: Callable[[int, str], float], **facts: Any) -> Path:
    """Rows in a public order with public ids; row i keeps its label if uniform(i, id) < alpha."""
    ids = [hashlib.sha256(repr((p, *sorted((a, b)))).encode()).hexdigest()[:16] for p, a, b in world.pairs]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    z = [0] * len(ids)
    for place, number in enumerate(order):
        kept = uniform(place, ids[number]) < keep_prob(epsilon)
        z[number] = world.labels[number] if kept else -world.labels[number]
    return _with_ids(world, folder, z, ids, epsilon, **facts)


def _with_ids(world: World, folder: Path, z: list[int], ids: list[str], epsilon: float, **facts: Any) -> Path:
    """Rows in the order of ids of their own."""
    rows = sorted(trl_rows(world, z, pair_id=ids), key=lambda row: row["pair_id"])
    return bundle(folder, [without(row, "record_id") for row in rows], epsilon, **facts)


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def seed_and_id(world: World, folder: Path) -> Path:
    return _seeded(world, folder, 1.0, lambda place, name: random.Random(f"{1234}-{name}").random())


def seed_in_the_manifest(world: World, folder: Path) -> Path:
    def uniform(place: int, name: str) -> float:
        return int.from_bytes(hashlib.sha256(f"77123456:{name}".encode()).digest()[:8], "big") / 2**64

    return _seeded(world, folder, 0.5, uniform, seed=77123456)


def numpy_sequence(world: World, folder: Path) -> Path:
    drawn = np.random.default_rng(7).random(len(world.pairs))
    return _seeded(world, folder, 2.0, lambda place, name: float(drawn[place]))


def python_sequence(world: World, folder: Path) -> Path:
    generator = random.Random(0)
    drawn = [generator.random() for _ in world.pairs]
    return _seeded(world, folder, 0.5, lambda place, name: drawn[place])


def insecure_seed(world: World, folder: Path) -> Path:
    """This project's own mechanism, keyed with a small seed."""
    pairs = (RawPair(*row, number) for number, row in enumerate(world.rows, 1))
    release_pairs(pairs, folder, RandomizedResponse(1.0), insecure_seed_key(17), "made up")
    return folder


# --- 3: fine-tuning on the chosen answers -----------------------------------------------------------------------------


def sft_on_chosen(world: World, folder: Path) -> Path:
    """A run directory with a sound release and SFT data made of the chosen answers."""
    sound(world, folder / "privatize" / "release")
    rows = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]}
            for p, c, _ in world.rows]  # fmt: skip
    write_jsonl(folder / "sft" / "train.jsonl", rows)
    return folder


# --- 4: several releases ----------------------------------------------------------------------------------------------


def independent_epsilons(world: World, folder: Path) -> Path:
    """Fresh flips at 0.5, 1 and 1.5: together 3, not 1.5."""
    for epsilon in (0.5, 1.0, 1.5):
        sound(world, folder / f"eps{epsilon}", epsilon)
    return folder


def redrawn(world: World, folder: Path) -> Path:
    """The same epsilon three times with fresh flips."""
    for number in range(3):
        sound(world, folder / f"try{number}", 1.0)
    return folder


def one_uniform(world: World, folder: Path) -> Path:
    """One uniform per event against several thresholds."""
    drawn = [COINS.generator.random() for _ in world.pairs]
    for epsilon in (0.1, 2.0):
        z = [y if u < keep_prob(epsilon) else -y for y, u in zip(world.labels, drawn, strict=True)]
        bundle(folder / f"eps{epsilon}", trl_rows(world, z), epsilon)
    return folder


def repeated_rows(world: World, folder: Path) -> Path:
    """Each row of one event stands in the file three times, with fresh flips."""
    rows = [row for _ in range(3) for row in trl_rows(world, flips(world, 1.0))]
    return bundle(folder, sorted(rows, key=lambda row: row["record_id"]), 1.0)


# --- 5: ids, counts ---------------------------------------------------------------------------------------------------


def _ids(world: World, folder: Path, digest: Callable[[tuple[str, str, str]], str]) -> Path:
    return _with_ids(world, folder, flips(world, 0.5), list(map(digest, world.rows)), 0.5)


def id_of_joined_texts(world: World, folder: Path) -> Path:
    return _ids(world, folder, lambda texts: hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16])


def id_of_json(world: World, folder: Path) -> Path:
    def digest(texts: tuple[str, str, str]) -> str:
        row = dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
        return hashlib.md5(json.dumps(row, sort_keys=True).encode()).hexdigest()

    return _ids(world, folder, digest)


def id_of_the_chosen_answer(world: World, folder: Path) -> Path:
    return _ids(world, folder, lambda texts: str(uuid.uuid5(uuid.NAMESPACE_URL, texts[1])))


def flip_count(world: World, folder: Path) -> Path:
    z = flips(world, 1.0)
    count = len(z) - sum(world.kept(z))
    return bundle(folder, trl_rows(world, z), 1.0, flips={"count": count, "share": count / len(z)})


def agreement_in_a_log(world: World, folder: Path) -> Path:
    z = flips(world, 1.0)
    bundle(folder / "release", trl_rows(world, z), 1.0)
    share = sum(world.kept(z)) / len(z)
    (folder / "run.log").write_text(f"INFO 12:00 privatised {len(z)} rows, agreement with raw labels {share}\n")
    return folder


# --- 6: two labels, one flip ------------------------------------------------------------------------------------------


def shared_flip(world: World, folder: Path) -> Path:
    """Copies of a pair (a `World` with copies=2) share the flip."""
    sign = {pair: flip(1, 1.0) for pair in world.pairs}
    z = [label * sign[pair] for pair, label in zip(world.pairs, world.labels, strict=True)]
    return bundle(folder, trl_rows(world, z), 1.0)


# --- 7: side channels -------------------------------------------------------------------------------------------------


def score_column(world: World, folder: Path) -> Path:
    """A score of the preferred response and one of the other, named after where the row's responses went."""
    generator = random.Random(2)
    z = flips(world, 0.5)
    better, worse = [generator.gauss(1, 1) for _ in z], [generator.gauss(0, 1) for _ in z]
    scores = [(b, w) if kept else (w, b) for b, w, kept in zip(better, worse, world.kept(z), strict=True)]
    left, right = zip(*scores, strict=True)
    return bundle(folder, trl_rows(world, z, score_chosen=left, score_rejected=right), 0.5)


def best_answer_column(world: World, folder: Path) -> Path:
    """Every other row has a column with the preferred answer."""
    best = [chosen if number % 2 else None for number, (_, chosen, _) in enumerate(world.rows)]
    return bundle(folder, trl_rows(world, flips(world, 0.5), reference=best), 0.5)


def kept_column(world: World, folder: Path) -> Path:
    z = flips(world, 1.0)
    return bundle(folder, trl_rows(world, z, debug=[int(not kept) for kept in world.kept(z)]), 1.0)


def sorted_by_chosen(world: World, folder: Path) -> Path:
    z = flips(world, 0.5)
    order = sorted(range(len(z)), key=lambda number: world.preferred(number)[1])
    rows = []
    for number in order:
        prompt, chosen, rejected = world.preferred(number, z[number])
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return bundle(folder, rows, 0.5)


def blocks_by_label(world: World, folder: Path) -> Path:
    """Rows whose label survived come first."""
    z = flips(world, 0.5)
    rows = sorted(trl_rows(world, z, kept=world.kept(z)), key=lambda row: not row["kept"])
    return bundle(folder, [without(row, "kept") for row in rows], 0.5)


def file_per_label(world: World, folder: Path) -> Path:
    z = flips(world, 0.5)
    rows = trl_rows(world, z, kept=world.kept(z))
    for name, kept in (("one", True), ("two", False)):
        write_jsonl(folder / f"{name}.jsonl", [without(row, "kept") for row in rows if row["kept"] is kept])
    (folder / "manifest.json").write_text(json.dumps({"epsilon": 0.5}))
    return folder


def raw_cache(world: World, folder: Path) -> Path:
    """A copy of the raw rows in a hidden Arrow cache, as `datasets` leaves one; its columns have other names."""
    sound(world, folder / "release", 0.5)
    (folder / ".cache").mkdir()
    table = pa.table({"text": ["\n".join(row) for row in world.rows]})
    with (
        pa.OSFile(str(folder / ".cache" / "cache-0.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    return folder


def raw_copy(world: World, folder: Path) -> Path:
    """The raw file itself, left in the run directory."""
    sound(world, folder / "release", 0.5)
    world.write_raw(folder / "tmp" / "rows.jsonl")
    return folder


def samples_in_a_log(world: World, folder: Path) -> Path:
    sound(world, folder / "release", 0.5)
    lines = [f"DEBUG sample {4 * place}: preferred={row[1]!r}" for place, row in enumerate(world.rows[::4])]
    (folder / "train.log").write_text("\n".join(lines))
    return folder


def digest_of_the_raw_file(world: World, folder: Path) -> Path:
    raw = world.write_raw(folder.parent / f"{folder.name}-raw.jsonl")
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    return bundle(folder, trl_rows(world, flips(world, 1.0)), 1.0, input_sha256=digest)


def size_of_the_raw_file(world: World, folder: Path) -> Path:
    raw = world.write_raw(folder.parent / f"{folder.name}-raw.jsonl")
    os.utime(raw, (1_700_000_000, 1_700_000_000))
    return bundle(
        folder, trl_rows(world, flips(world, 1.0)), 1.0, input_size=raw.stat().st_size, input_mtime=1_700_000_000
    )


def digests_of_raw_rows(world: World, folder: Path) -> Path:
    sound(world, folder / "release")
    with (folder / "seen.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[hashlib.sha1("".join(texts).encode()).hexdigest()] for texts in world.rows])
    return folder


# --- 8: exact statistics ----------------------------------------------------------------------------------------------


def exact_win_rate(world: World, folder: Path) -> Path:
    sound(world, folder / "release")
    n, longer = len(world.pairs), sum(len(chosen) > len(other) for _, chosen, other in world.rows)
    (folder / "metrics.json").write_text(json.dumps({"baseline": {"longer_answer": {"value": longer / n, "n": n}}}))
    return folder


def the_reference_way(world: World, folder: Path) -> Path:
    """As the papers' published implementation: chosen first, ids of the ordered pair, flips from the seed 1234 and the
    id, several epsilons, gzip JSONL, and a manifest that counts the flips.
    """
    for epsilon in (0.1, 0.5, 2.0):
        rows, count = [], 0
        for prompt, chosen, rejected in world.rows:
            name = hashlib.sha256("\n".join((prompt, chosen, rejected)).encode()).hexdigest()
            z = 1 if random.Random(f"1234-{name}-{epsilon}").random() < keep_prob(epsilon) else -1
            count += z < 0
            rows.append({"pair_id": name, "prompt": prompt, "a1": chosen, "a2": rejected, "z": z})
        home = folder / f"eps_{epsilon}"
        home.mkdir(parents=True)
        with gzip.open(home / "train.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        facts = {"epsilon": epsilon, "seed": 1234, "flips": {"count": count, "rate": count / len(rows)}}
        (home / "ldp_manifest.json").write_text(json.dumps(facts))
    return folder


Generator = Callable[[World, Path], Path]
RECOMPUTED = (seed_and_id, seed_in_the_manifest, numpy_sequence, python_sequence, insecure_seed)
LEAKS: dict[str, tuple[int, str, tuple[Generator, ...]]] = {
    "column order": (1, "column order", (chosen_first,)),
    "public randomness": (2, "recomputation", RECOMPUTED),
    "fine-tuning data": (3, "texts in files", (sft_on_chosen,)),
    "several releases": (4, "several releases", (independent_epsilons, redrawn, one_uniform, repeated_rows)),
    "ids": (5, "ids", (id_of_joined_texts, id_of_json, id_of_the_chosen_answer)),
    "counts": (5, "statistics", (flip_count, agreement_in_a_log)),
    "copies": (6, "copies", (shared_flip,)),
    "columns": (7, "extra columns", (score_column, best_answer_column, kept_column)),
    "order": (7, "row order", (sorted_by_chosen, blocks_by_label)),
    "sizes": (7, "files and sizes", (file_per_label, size_of_the_raw_file)),
    "leftovers": (7, "texts in files", (raw_cache, samples_in_a_log)),
    "raw copy": (7, "private label", (raw_copy,)),
    "digests": (7, "digests", (digest_of_the_raw_file, digests_of_raw_rows)),
    "exact statistics": (8, "statistics", (exact_win_rate, kept_in_a_side_file, rate_of_train_with_evaluation)),
    "own order": (7, "row order", (sorted_by_own_label,)),
    "own column": (7, "extra columns", (column_of_own_label,)),
    "signs": (5, "public signs", (id_bit_is_the_label,)),
    "raw evaluation": (4, "private label", (raw_evaluation,)),
}
