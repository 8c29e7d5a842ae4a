"""Attacks on the randomness: recompute the flips from public ids, places and small seeds, and undo them. Leak 2.

A way of drawing is tried on some events whose labels are known; the ways that explain all of those flips (or nearly)
are then used on the others. Numbers found in the manifests are tried as seeds first.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import random
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.view import Table, View
from private_rlhf.core.noise import LabelNoise
from private_rlhf.privacy.keys import insecure_seed_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import ID_DOMAIN, Text, canonical_record, encode_text, event_bytes, text_kind

SCREEN = 64  # known events on which a way of drawing is tried
GLANCE = 12  # of which it must explain the first ones but one
COMMON = (*range(11), 42, 99, 100, 123, 137, 1000, 1234, 1337, 2020, 2021, 2022, 2023, 2024, 2025, 2026, 12345)
SEQUENCE_SEEDS = 2000
INSECURE_SEEDS = 256
MOST_STATED = 24

Uniforms = Callable[[Sequence[int]], np.ndarray]  # places in `Table.event` -> uniforms in [0, 1)


@dataclass(frozen=True)
class Way:
    """A way of drawing: its name, and the uniforms it gives for some of a table's rows."""

    name: str
    uniforms: Uniforms


def recomputation(view: View) -> Iterator[Guesses]:
    """Undo flips that were drawn from public things, for every table with labels."""
    stated = stated_seeds(view)
    for table in view.tables:
        known = view.known[table.event]
        usable = np.flatnonzero((known != 0) & (table.z != 0))
        if len(usable) >= 8 and table.epsilon is not None:
            yield from _by_uniforms(view, table, usable, stated)
            yield from _by_insecure_seed(view, table, usable, stated)


def stated_seeds(view: View) -> list[int]:
    """Whole numbers that stand behind the word "seed" in any JSON or YAML file of the roots."""
    found: list[int] = []
    for path in view.files:
        texts = ("", ".json", ".yaml", ".yml", ".txt", ".log", ".md")
        if path.suffix.lower() in texts and path.stat().st_size < 1 << 22:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [int(number) for number in re.findall(r"seed[\"']?\s*[:=]?\s*(\d{1,18})", text, re.IGNORECASE)]
    return list(dict.fromkeys(found))[:MOST_STATED]


# ---------------------------------------------------------------- uniforms of common generators


def _by_uniforms(view: View, table: Table, usable: np.ndarray, stated: Sequence[int]) -> Iterator[Guesses]:
    """The way and the convention (keep below alpha, or flip below 1 - alpha) that explain the known flips best."""
    assert table.epsilon is not None
    keep = LabelNoise.of(table.epsilon).keep_prob
    screen = usable[:SCREEN]
    kept = table.z[screen] == view.known[table.event[screen]]
    best: tuple[int, Way, bool] | None = None
    for way in chain(_per_row(table, stated), _sequences(table, stated)):
        start = way.uniforms(screen[:GLANCE].tolist())
        for below in (True, False):
            if (_keeps(start, keep, below) != kept[:GLANCE]).sum() > 1:
                continue
            explained = int((_keeps(way.uniforms(screen.tolist()), keep, below) == kept).sum())
            if best is None or explained > best[0]:
                best = (explained, way, below)
    if best is None:
        return
    _, way, below = best
    rest = np.flatnonzero((view.known[table.event] == 0) & (table.z != 0))
    keeps = _keeps(way.uniforms(rest.tolist()), keep, below)
    labels = np.where(keeps, table.z[rest], -table.z[rest]).astype(np.int8)
    yield Guesses("recomputation", f"{table.name}: {way.name}", table.event[rest], labels, learned=True)


def _keeps(uniforms: np.ndarray, keep: float, below: bool) -> np.ndarray:
    return uniforms < keep if below else uniforms >= 1 - keep


def _shapes(epsilon: float | None) -> dict[str, Callable[[int, str, int], str]]:
    """The ways to mix a seed with the name and the place of a row (and epsilon) into one text."""
    made: dict[str, Callable[[int, str, int], str]] = {}
    for separator in ("-", ":", "_", "|", "/", " ", "", ","):
        made[f"seed{separator}id"] = lambda seed, name, row, s=separator: f"{seed}{s}{name}"  # type: ignore[misc]
        made[f"id{separator}seed"] = lambda seed, name, row, s=separator: f"{name}{s}{seed}"  # type: ignore[misc]
    for separator in ("-", ":", "_", "|"):
        made[f"seed{separator}id{separator}epsilon"] = lambda seed, name, row, s=separator: s.join(  # type: ignore[misc]
            (str(seed), name, str(epsilon))
        )
        made[f"seed{separator}epsilon{separator}id"] = lambda seed, name, row, s=separator: s.join(  # type: ignore[misc]
            (str(seed), str(epsilon), name)
        )
    made["(seed, id)"] = lambda seed, name, row: str((seed, name))
    made["seed-row"] = lambda seed, name, row: f"{seed}-{row}"
    return made


_FROM_TEXT: dict[str, Callable[[str], float]] = {
    "random.Random": lambda text: random.Random(text).random(),
    "SHA-256": lambda text: int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2.0**64,
    "SHA-256, 32 bits": lambda text: int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2.0**32,
    "MD5": lambda text: int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16) / 2.0**128,
    "MD5, 32 bits": lambda text: int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8], 16) / 2.0**32,
    "SHA-1": lambda text: int(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), 16) / 2.0**160,
    "random.Random of SHA-256": lambda text: random.Random(int(hashlib.sha256(text.encode()).hexdigest(), 16)).random(),
    "random.Random of SHA-256, 32 bits": lambda text: random.Random(
        int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    ).random(),
    "random.Random of MD5": lambda text: random.Random(
        int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)
    ).random(),
    "CRC-32": lambda text: zlib.crc32(text.encode()) / 2.0**32,
    "NumPy of CRC-32": lambda text: float(np.random.RandomState(zlib.crc32(text.encode())).rand()),
}


def _names(table: Table) -> dict[str, list[str]]:
    """Public names of the rows: every column of short strings or whole numbers, as text."""
    named = {}
    for column, values in table.columns.items():
        if all(isinstance(value, str | int) and len(str(value)) <= 256 for value in values[:SCREEN]):
            named[column] = [str(value) for value in values]
    return named


def _per_row(table: Table, stated: Sequence[int]) -> Iterator[Way]:
    """One generator per row, seeded from a seed and the row's name, prompt or place."""
    seeds = list(dict.fromkeys((*stated, *COMMON)))
    names = _names(table)
    for column, values in names.items():
        for how, draw in _FROM_TEXT.items():
            for shape, mix in _shapes(table.epsilon).items():
                for seed in seeds if how in ("random.Random", "SHA-256") else (*stated, 0, 42):
                    yield Way(f"{how} of {shape}, seed {seed}, {column}", _from_text(table, values, draw, mix, seed))
        for how, draw in _FROM_TEXT.items():
            yield Way(
                f"{how} of {column}",
                lambda places, draw=draw, values=values: np.array([draw(values[place]) for place in places]),  # type: ignore[misc]
            )
        yield from _keyed_by_seed(column, values, seeds)
    for column, digits in id_columns(table).items():
        yield from _numeric_ids(column, digits, seeds)
    for seed in seeds:
        yield Way(
            f"random.Random(seed + row), seed {seed}",
            lambda places, seed=seed: np.array(  # type: ignore[misc]
                [random.Random(seed + int(table.row[place])).random() for place in places]
            ),
        )


def _from_text(
    table: Table,
    values: Sequence[str],
    draw: Callable[[str], float],
    mix: Callable[[int, str, int], str],
    seed: int,
) -> Uniforms:
    return lambda places: np.array([draw(mix(seed, values[place], int(table.row[place]))) for place in places])


def _keyed_by_seed(column: str, values: Sequence[str], seeds: Sequence[int]) -> Iterator[Way]:
    def draw(key: bytes, name: str) -> float:
        return int.from_bytes(hmac.digest(key, name.encode(), "sha256")[:8], "big") / 2.0**64

    for seed in seeds:
        key = str(seed).encode()
        yield Way(
            f"HMAC-SHA-256 keyed with seed {seed} of {column}",
            lambda places, key=key: np.array([draw(key, values[place]) for place in places]),  # type: ignore[misc]
        )


def _numeric_ids(column: str, digits: Sequence[str], seeds: Sequence[int]) -> Iterator[Way]:
    """Generators seeded with the id as a number: whole, or its first 8 or 16 digits, plus or xor a seed."""
    mixes: dict[str, Callable[[int, int], int]] = {"+": lambda a, b: a + b, "xor": lambda a, b: a ^ b}
    for width in (8, 16, 128):
        for seed in seeds:
            for mix, combine in mixes.items():
                yield Way(
                    f"random.Random of {column}[:{width}] {mix} seed {seed}",
                    lambda places, width=width, seed=seed, combine=combine: np.array(  # type: ignore[misc]
                        [random.Random(combine(int(digits[place][:width], 16), seed)).random() for place in places]
                    ),
                )
    for seed in seeds[:16]:
        yield Way(
            f"NumPy of {column}[:8] + seed {seed}",
            lambda places, seed=seed: np.array(  # type: ignore[misc]
                [np.random.default_rng(int(digits[place][:8], 16) + seed).random() for place in places]
            ),
        )


def _sequences(table: Table, stated: Sequence[int]) -> Iterator[Way]:
    """One generator for the whole table, a draw per row in file order (or in the order of an id column)."""
    orders = {"file order": table.row}
    if len(table.event) == table.total:
        for column, values in table.columns.items():
            if all(isinstance(value, str | int) for value in values):
                ranks = np.empty(len(values), dtype=np.int64)
                ranks[np.array(sorted(range(len(values)), key=lambda place: str(values[place])))] = np.arange(
                    len(values)
                )
                orders[f"order of {column}"] = ranks
    makers: dict[str, Callable[[int], np.ndarray]] = {
        "numpy.random.default_rng": lambda seed: np.random.default_rng(seed).random(table.total),
        "numpy.random.RandomState": lambda seed: np.random.RandomState(seed % 2**32).rand(table.total),
        "random.Random": lambda seed: _python_sequence(seed, table.total),
    }
    if table.total > 50_000:
        seeds = list(dict.fromkeys((*stated, *COMMON)))
    else:
        seeds = list(dict.fromkeys((*stated, *COMMON, *range(SEQUENCE_SEEDS * 1000 // max(1000, table.total)))))
    for how, make in makers.items():
        for seed in seeds:
            drawn = make(seed)
            for order, rows in orders.items():
                yield Way(f"{how}({seed}) in {order}", lambda places, d=drawn, r=rows: d[r[places]])  # type: ignore[misc]


def _python_sequence(seed: int, count: int) -> np.ndarray:
    generator = random.Random(seed)
    return np.fromiter((generator.random() for _ in range(count)), dtype=np.float64, count=count)


# ---------------------------------------------------------------- this project's own mechanism under a small seed


def _by_insecure_seed(view: View, table: Table, usable: np.ndarray, stated: Sequence[int]) -> Iterator[Guesses]:
    """`insecure_seed`: z of both labels under the seed's key; where they differ, the released z tells the label.

    They differ in a share tanh(epsilon/2) of the events, so a small epsilon takes more events to find the seed.
    """
    assert table.epsilon is not None
    screen = usable[: math.ceil(24 / LabelNoise.of(table.epsilon).factor)]
    known = view.known[table.event[screen]]
    prepared = _events(view, table, screen)
    seeds = list(dict.fromkeys((*stated, *range(INSECURE_SEEDS))))
    scores = []
    for seed in seeds:
        labels = _inverse(prepared, table.epsilon, seed)
        scores.append(int((labels == known).sum()) - 4 * int((labels == -known).sum()))
    seed = seeds[int(np.argmax(scores))]
    rest = np.flatnonzero((view.known[table.event] == 0) & (table.z != 0))
    labels = _inverse(_events(view, table, rest), table.epsilon, seed)
    certain = labels != 0
    variant = f"{table.name}: this project's mechanism under insecure_seed {seed}"
    yield Guesses("recomputation", variant, table.event[rest][certain], labels[certain], learned=True)


def _events(view: View, table: Table, places: np.ndarray) -> list[tuple[bytes, int, int]]:
    """(the mechanism's name of the event, +1 if the canonical order is the view's, released label in that order)."""
    found = []
    for place in places.tolist():
        event = table.event[place]
        record = canonical_record(view.prompts[event], view.first[event], view.second[event])
        assert record is not None  # a view holds pairs of different responses
        found.append((event_bytes(record.record_id), record.label, int(table.z[place]) * record.label))
    return found


def _inverse(events: Sequence[tuple[bytes, int, int]], epsilon: float, seed: int) -> np.ndarray:
    """(m,) int8 labels recomputed under `insecure_seed`; 0 where z would be the same for both labels."""
    prf, mechanism = insecure_seed_key(seed).prf, RandomizedResponse(epsilon)
    labels = np.zeros(len(events), dtype=np.int8)
    for number, (name, order, released) in enumerate(events):
        if mechanism.release(prf, name, 1) == released != mechanism.release(prf, name, -1):
            labels[number] = order
        elif mechanism.release(prf, name, -1) == released != mechanism.release(prf, name, 1):
            labels[number] = -order
    return labels


SAMPLE = 24  # rows on which every recipe is tried; one hit in them is enough for all rows to be tried
LEAST_DIGITS = 8
_SEPARATORS = (*("", "\n", "\n\n", "\t", " ", "|", "||", "|||", ",", ":", "::", ";"), *"-_#", "###", *"\0\x1e\x1f")

Recipe = Callable[[Text, Text, Text], bytes]  # prompt, preferred, other -> what is digested


def _raw(text: Text) -> str:
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _joined(separator: str, with_prompt: bool) -> Recipe:
    def recipe(prompt: Text, one: Text, two: Text) -> bytes:
        parts = [_raw(prompt)] * with_prompt + [_raw(one), _raw(two)]
        return separator.join(parts).encode()

    return recipe


_SHAPES: dict[str, Callable[[Text, Text, Text], Any]] = {
    "object": lambda prompt, one, two: {"prompt": prompt, "chosen": one, "rejected": two},
    "object of two": lambda _, one, two: {"chosen": one, "rejected": two},
    "list": lambda *texts: list(texts),
    "list of two": lambda _, one, two: [one, two],
}


def _as_json(build: Callable[[Text, Text, Text], Any], sort: bool, ascii_only: bool, tight: bool) -> Recipe:
    separators = (",", ":") if tight else None

    def recipe(prompt: Text, one: Text, two: Text) -> bytes:
        value = build(prompt, one, two)
        return json.dumps(value, sort_keys=sort, ensure_ascii=ascii_only, separators=separators).encode()

    return recipe


def _record(prompt: Text, one: Text, two: Text) -> bytes:
    """The bytes that `record_id` digests, but for the order of the responses."""
    texts = [encode_text(text) for text in (prompt, one, two)]
    return ID_DOMAIN + text_kind(prompt) + b"".join(len(text).to_bytes(8, "big") for text in texts) + b"".join(texts)


def recipes() -> dict[str, Recipe]:
    """Every serialisation that is tried, by name. Each depends on which response comes first."""
    made: dict[str, Recipe] = {}
    for separator, with_prompt in product(_SEPARATORS, (True, False)):
        made[f"{'prompt, ' * with_prompt}two responses joined by {separator!r}"] = _joined(separator, with_prompt)
    for sort, ascii_only, tight in product((False, True), repeat=3):
        tail = f"(sort_keys={sort}, ensure_ascii={ascii_only}, compact={tight})"
        for shape, build in _SHAPES.items():
            made[f"JSON {shape} {tail}"] = _as_json(build, sort, ascii_only, tight)
    made["repr of a tuple"] = lambda *texts: repr(texts).encode()
    made["repr of a list"] = lambda *texts: repr(list(texts)).encode()
    made["framed texts"] = lambda *texts: b"".join(frame(_raw(text).encode()) for text in texts)
    made["framed encodings"] = lambda *texts: b"".join(frame(encode_text(text)) for text in texts)
    made["this program's records, their responses unsorted"] = _record
    made["prompt and preferred response"] = lambda prompt, one, _: (_raw(prompt) + _raw(one)).encode()
    made["prompt, line break, preferred response"] = lambda prompt, one, _: f"{_raw(prompt)}\n{_raw(one)}".encode()
    made["preferred response"] = lambda _, one, __: _raw(one).encode()
    made["other response"] = lambda _, __, two: _raw(two).encode()
    return made


_HASHES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "blake2b", "blake2s", "sha3_256")
_NAMESPACES = (uuid.NAMESPACE_DNS, uuid.NAMESPACE_URL, uuid.NAMESPACE_OID, uuid.NAMESPACE_X500)


def digests(message: bytes) -> Iterator[str]:
    """The message's digests as hexadecimal digits: of common hashes (also short BLAKE2) and of name-based UUIDs."""
    for name in _HASHES:
        yield hashlib.new(name, message, usedforsecurity=False).hexdigest()
    for size in (8, 16, 20, 32):
        yield hashlib.blake2b(message, digest_size=size).hexdigest()
    for space in _NAMESPACES:
        yield uuid.uuid5(space, message.decode("utf-8", "replace")).hex


def ids(view: View) -> Iterator[Guesses]:
    """For each id column: find the serialisation whose digest it is, then read each row's label off its order."""
    available = recipes()
    for table in view.tables:
        for name, values in id_columns(table).items():
            for label, recipe in _fitting(view, table, values, available).items():
                yield _read_off(view, table, f"{table.name}: {name} is a digest of {label}", values, recipe)


def id_columns(table: Table) -> dict[str, list[str]]:
    """Columns of hexadecimal strings (dashes and a prefix of letters such as `pair-` removed), as digits."""
    found = {}
    for name, values in table.columns.items():
        plain = [_digits(value) for value in values]
        if plain and all(digits is not None for digits in plain[:SAMPLE]):
            found[name] = [digits or "" for digits in plain]
    return found


def _digits(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    text = value.lower().replace("-", "").replace("_", "")
    text = text.split(":")[-1]
    while text and text[0] not in "0123456789abcdef":
        text = text[1:]
    good = len(text) >= LEAST_DIGITS and all(digit in "0123456789abcdef" for digit in text)
    return text if good else None


def _fitting(view: View, table: Table, values: Sequence[str], available: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes that explain at least one id of the first rows, in either order of the responses; not those that
    explain all of them in one order, which is then that of the texts and tells nothing."""
    found: dict[str, Recipe] = {}
    sample = list(zip(table.event, values, strict=True))[:SAMPLE]
    rows = [(value, view.prompts[event], view.first[event], view.second[event]) for event, value in sample]
    for value, prompt, one, two in rows:
        for name, recipe in available.items():
            if name not in found and any(_tries(recipe, value, prompt, *pair) for pair in ((one, two), (two, one))):
                found[name] = recipe
    return {
        name: recipe
        for name, recipe in found.items()
        if not all(_tries(recipe, value, prompt, one, two) for value, prompt, one, two in rows)
        and not all(_tries(recipe, value, prompt, two, one) for value, prompt, one, two in rows)
    }


def _tries(recipe: Recipe, value: str, prompt: Text, one: Text, two: Text) -> bool:
    """True if the id is (the start of) a digest of the texts in this order."""
    try:
        return any(digest.startswith(value) for digest in digests(recipe(prompt, one, two)))
    except (TypeError, UnicodeEncodeError):
        return False


def _read_off(view: View, table: Table, variant: str, values: Sequence[str], recipe: Recipe) -> Guesses:
    events, labels = [], []
    for event, value in zip(table.event, values, strict=True):
        prompt, one, two = view.prompts[event], view.first[event], view.second[event]
        forward, backward = _tries(recipe, value, prompt, one, two), _tries(recipe, value, prompt, two, one)
        if forward != backward:
            events.append(event)
            labels.append(1 if forward else -1)
    return Guesses("ids", variant, np.array(events, dtype=np.int64), np.array(labels, dtype=np.int8))
