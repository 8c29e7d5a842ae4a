"""More bundles made the leaky way: leaks in the program's own coordinates, over several tables, in one small table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audit.worlds import COINS, World, bundle, flips, sound, trl_rows


def _own(world: World, number: int, record_id: str) -> int:
    """The label relative to response_a: the lower text unless the id is odd."""
    _, a, b = world.pairs[number]
    lower = world.labels[number] if a.encode() < b.encode() else -world.labels[number]
    return lower if int(record_id[-1], 16) % 2 == 0 else -lower


def _own_rows(world: World, epsilon: float) -> list[tuple[int, dict[str, Any]]]:
    """(own label, sound row) of every pair, in the order of random ids."""
    z, rows = flips(world, epsilon), []
    for number in range(len(world.pairs)):
        prompt, chosen, rejected = world.preferred(number, z[number])
        record_id = COINS.generator.randbytes(16).hex()
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "record_id": record_id}
        rows.append((_own(world, number, record_id), row))
    return sorted(rows, key=lambda found: found[1]["record_id"])


def sorted_by_own_label(world: World, folder: Path) -> Path:
    """Rows of a shard sorted by the true label relative to response_a, whose side is the parity of the id."""
    rows = sorted(_own_rows(world, 0.1), key=lambda found: found[0])
    return bundle(folder, [row for _, row in rows], 0.1)


def column_of_own_label(world: World, folder: Path) -> Path:
    return bundle(folder, [row | {"bucket": label % 3} for label, row in _own_rows(world, 0.1)], 0.1)


def id_bit_is_the_label(world: World, folder: Path) -> Path:
    """The second bit of an id says whether the lower text was preferred; the first stays a coin."""
    rows = []
    for label, row in _own_rows(world, 0.5):
        digit = int(row["record_id"][-1], 16)
        lower = label if digit % 2 == 0 else -label
        rows.append(row | {"record_id": row["record_id"][:-1] + f"{digit & 13 | (lower > 0) << 1:x}"})
    return bundle(folder, sorted(rows, key=lambda row: row["record_id"]), 0.5)


def kept_in_a_side_file(world: World, folder: Path) -> Path:
    z = flips(world, 1.0)
    bundle(folder, trl_rows(world, z), 1.0)
    (folder / "quality.json").write_text(json.dumps({"kept": sum(world.kept(z))}))
    return folder


def rate_of_train_with_evaluation(world: World, folder: Path) -> Path:
    """An exact rate over the whole raw file, which stands in two tables."""
    rows = trl_rows(world, flips(world, 1.0))
    cut = 2 * len(rows) // 3
    bundle(folder / "release", rows[:cut], 1.0)
    bundle(folder / "evaluation", rows[cut:], 1.0)
    longer = sum(len(chosen) > len(other) for _, chosen, other in world.rows)
    (folder / "baseline.json").write_text(json.dumps({"longer": longer / len(world.rows)}))
    return folder


def raw_evaluation(world: World, folder: Path) -> Path:
    """A fifth of the rows, in a table of their own, has true labels under a manifest that says epsilon."""
    cut = len(world.pairs) // 5
    test = World(world.pairs[:cut], world.labels[:cut])
    train = World(world.pairs[cut:], world.labels[cut:])
    bundle(folder / "evaluation", trl_rows(test, test.labels), 0.5)
    sound(train, folder / "release", 0.5)
    return folder
