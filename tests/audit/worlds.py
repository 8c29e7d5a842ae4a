"""Preference sets with fair-coin labels, and a sound release of one, made by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from private_rlhf.audit.canaries import RawFacts, Truth, frames_of, pair_key, raw_facts

Row = dict[str, Any]
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "ledge")


@dataclass(frozen=True)
class World:
    """n pairs (prompt, a, b) and their labels: +1 if a is preferred. Fair coins, independent of everything."""

    pairs: list[tuple[str, str, str]]
    labels: list[int]

    def preferred(self, number: int, label: int | None = None) -> tuple[str, str, str]:
        """(prompt, preferred response, other response) under the true label, or another one."""
        prompt, a, b = self.pairs[number]
        return (prompt, a, b) if (label or self.labels[number]) > 0 else (prompt, b, a)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(prompt, preferred response, other response) of every pair."""
        return [self.preferred(number) for number in range(len(self.pairs))]

    def kept(self, z: Sequence[int]) -> list[bool]:
        """True where a released label is the true one."""
        return [label == released for label, released in zip(self.labels, z, strict=True)]

    def truth(self, facts: RawFacts | None = None) -> Truth:
        """What the owner knows."""
        labels: dict[bytes, tuple[int, ...]] = {}
        frames: dict[bytes, tuple[int, int]] = {}
        for number in range(len(self.pairs)):
            key, side = pair_key(*self.preferred(number))
            labels[key] = (*labels.get(key, ()), side)
            frames[key] = frames_of(*self.pairs[number])
        return Truth(labels, coins=True, facts=() if facts is None else (facts,), frames=frames)

    def write_raw(self, path: Path) -> Path:
        """The raw preference file: prompt, chosen, rejected."""
        return write_jsonl(path, [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in self.rows])


def make_world(n: int, seed: int = 0, copies: int = 1) -> World:
    """n different pairs, each `copies` times with independent labels."""
    generator = random.Random(seed)

    def text(i: int) -> str:
        return f"{' '.join(generator.choices(WORDS, k=generator.randint(4, 9)))} {i:x}-{generator.random():.12f}"

    pairs = [(f"Question {i}: {generator.choice(WORDS)}?", text(i), text(i)) for i in range(n)]
    pairs = [pair for pair in pairs for _ in range(copies)]
    return World(pairs, [generator.choice((-1, 1)) for _ in pairs])


def keep_prob(epsilon: float) -> float:
    return 1 / (1 + math.exp(-epsilon))


@dataclass
class Coins:
    """The randomness of the bundles made by hand: no public seed to an attack, and the same in every run of a test.

    conftest.py reseeds it with the test's name: an attack that misses a leak in one world of a hundred must not fail
    one run of the suite in a hundred.
    """

    generator: random.Random = field(default_factory=lambda: random.Random("worlds"))


COINS = Coins()


def flip(label: int, epsilon: float) -> int:
    """Sound randomised response."""
    return label if COINS.generator.random() < keep_prob(epsilon) else -label


def flips(world: World, epsilon: float) -> list[int]:
    return [flip(label, epsilon) for label in world.labels]


def trl_rows(world: World, z: Sequence[int], **extra: Sequence[Any]) -> list[Row]:
    """TRL rows by the private labels, with random ids, in an order of their own."""
    rows = []
    for number in range(len(world.pairs)):
        prompt, chosen, rejected = world.preferred(number, z[number])
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        row["record_id"] = COINS.generator.randbytes(16).hex()
        rows.append(row | {name: values[number] for name, values in extra.items()})
    return sorted(rows, key=lambda row: row["record_id"])


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def bundle(folder: Path, rows: Sequence[Row], epsilon: float, **manifest: Any) -> Path:
    """A release folder: one Parquet file and a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "part-00000.parquet")
    (folder / "manifest.json").write_text(json.dumps({"epsilon": epsilon, "rows": len(rows)} | manifest))
    return folder


def sound(world: World, folder: Path, epsilon: float = 1.0) -> Path:
    """Nothing leaks."""
    return bundle(folder, trl_rows(world, flips(world, epsilon)), epsilon)


def facts_of(folder: Path) -> RawFacts | None:
    """The facts of the raw file that a generator wrote beside its bundle."""
    raw = folder.parent / f"{folder.name}-raw.jsonl"
    return raw_facts(raw) if raw.is_file() else None
