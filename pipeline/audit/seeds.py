"""Attacks on the randomness: recompute the flips from public ids, places and small seeds, and undo them. Leak 2.

A way of drawing is tried on some events whose labels are known; the ways that explain all of those flips (or nearly)
are then used on the others. Numbers found in the manifests are tried as seeds first.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import operator
import random
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
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
COMMON = (*range(11), 42, 99, 100, 123, 137, 1000, 1234, 1337, *range(2020, 2027), 12345)
SEQUENCE_SEEDS = 2000
INSECURE_SEEDS = 256
MOST_STATED = 24


@dataclass(frozen=True)
class Way:
    """A way of drawing: its name, and the number in [0, 1) that `draw` makes of a row's value in `values`."""

    name: str
    draw: Callable[[Any], float]
    values: Sequence[Any] | np.ndarray

    def uniforms(self, places: np.ndarray) -> np.ndarray:
        """The numbers (m,) of rows at some places of `Table.event`."""
        return np.array([self.draw(self.values[place]) for place in places.tolist()])


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
    """Whole numbers that stand behind the word "seed" in any document of the roots."""
    texts = (text for _, text in view.documents())
    numbers = (re.findall(r"seed[\"']?\s*[:=]?\s*(\d{1,18})", text, re.IGNORECASE) for text in texts)
    return list(dict.fromkeys(map(int, chain.from_iterable(numbers))))[:MOST_STATED]


# ---------------------------------------------------------------- uniforms of common generators


def _by_uniforms(view: View, table: Table, usable: np.ndarray, stated: Sequence[int]) -> Iterator[Guesses]:
    """The way and the convention (keep below alpha, or flip below 1 - alpha) that explain the known flips best."""
    assert table.epsilon is not None
    keep = LabelNoise.of(table.epsilon).keep_prob
    screen = usable[:SCREEN]
    kept = table.z[screen] == view.known[table.event[screen]]
    best: tuple[int, Way, bool] | None = None
    for way in chain(_per_row(table, stated), _sequences(table, stated)):
        start = way.uniforms(screen[:GLANCE])
        for below in (True, False):
            if (_keeps(start, keep, below) != kept[:GLANCE]).sum() > 1:
                continue
            explained = int((_keeps(way.uniforms(screen), keep, below) == kept).sum())
            if best is None or explained > best[0]:
                best = (explained, way, below)
    if best is None:
        return
    _, way, below = best
    rest = np.flatnonzero((view.known[table.event] == 0) & (table.z != 0))
    labels = np.where(_keeps(way.uniforms(rest), keep, below), table.z[rest], -table.z[rest]).astype(np.int8)
    yield Guesses("recomputation", f"{table.name}: {way.name}", table.event[rest], labels, learned=True)


def _keeps(uniforms: np.ndarray, keep: float, below: bool) -> np.ndarray:
    return uniforms < keep if below else uniforms >= 1 - keep


def _mixtures() -> dict[str, str]:
    """Templates of texts that mix a seed with the name and the place of a row (and epsilon), by name."""
    templates = {"(seed, id)": "({seed}, {id!r})", "seed-row": "{seed}-{row}"}
    for separator, words in product("-:_|", ("seed id epsilon", "seed epsilon id")):
        templates[separator.join(words.split())] = separator.join(f"{{{word}}}" for word in words.split())
    for separator, words in product([*"-:_|/ ,", ""], ("seed id", "id seed")):
        templates[separator.join(words.split())] = separator.join(f"{{{word}}}" for word in words.split())
    return templates


def _number(name: str, size: int, text: str) -> int:
    """The first bytes of a text's digest as a number."""
    return int.from_bytes(hashlib.new(name, text.encode(), usedforsecurity=False).digest()[:size], "big")


def _share(name: str, size: int, text: str) -> float:
    return _number(name, size, text) / 256.0**size


def _seeded(name: str, size: int, text: str) -> float:
    return random.Random(_number(name, size, text)).random()


_FROM_TEXT: dict[str, Callable[[str], float]] = {
    "random.Random": lambda text: random.Random(text).random(),
    "SHA-256": partial(_share, "sha256", 8),
    "SHA-256, 32 bits": partial(_share, "sha256", 4),
    "MD5": partial(_share, "md5", 16),
    "MD5, 32 bits": partial(_share, "md5", 4),
    "SHA-1": partial(_share, "sha1", 20),
    "random.Random of SHA-256": partial(_seeded, "sha256", 32),
    "random.Random of SHA-256, 32 bits": partial(_seeded, "sha256", 4),
    "random.Random of MD5": partial(_seeded, "md5", 16),
    "CRC-32": lambda text: zlib.crc32(text.encode()) / 2.0**32,
    "NumPy of CRC-32": lambda text: float(np.random.RandomState(zlib.crc32(text.encode())).rand()),
}


def _names(table: Table) -> dict[str, list[str]]:
    """Public names of the rows: every column of short strings or whole numbers, as text."""
    return {
        column: [str(value) for value in values]
        for column, values in table.columns.items()
        if all(isinstance(value, str | int) and len(str(value)) <= 256 for value in values[:SCREEN])
    }


def _per_row(table: Table, stated: Sequence[int]) -> Iterator[Way]:
    """One generator per row, seeded from a seed and the row's name, prompt or place."""
    seeds = list(dict.fromkeys((*stated, *COMMON)))
    mixtures = _mixtures()
    for column, values in _names(table).items():
        named = list(zip(values, table.row.tolist(), strict=True))
        for (how, draw), (mixture, template) in product(_FROM_TEXT.items(), mixtures.items()):
            for seed in seeds if how in ("random.Random", "SHA-256") else (*stated, 0, 42):
                mix = partial(template.format, seed=seed, epsilon=table.epsilon)
                yield Way(f"{how} of {mixture}, seed {seed}, {column}", partial(_mixed, draw, mix), named)
        for how, draw in _FROM_TEXT.items():
            yield Way(f"{how} of {column}", draw, values)
        for seed in seeds:
            keyed = partial(_keyed_share, str(seed).encode())
            yield Way(f"HMAC-SHA-256 keyed with seed {seed} of {column}", keyed, values)
    for column, digits in id_columns(table).items():
        numbers = {width: [int(text[:width], 16) for text in digits] for width in (8, 16, 128)}
        for width, seed, (mix, join) in product(numbers, seeds, (("+", operator.add), ("xor", operator.xor))):
            name = f"random.Random of {column}[:{width}] {mix} seed {seed}"
            yield Way(name, partial(_seeded_by, random.Random, join, seed), numbers[width])
        for seed in seeds[:16]:
            name = f"NumPy of {column}[:8] + seed {seed}"
            yield Way(name, partial(_seeded_by, np.random.default_rng, operator.add, seed), numbers[8])
    for seed in seeds:
        drawn = partial(_seeded_by, random.Random, operator.add, seed)
        yield Way(f"random.Random(seed + row), seed {seed}", drawn, table.row.tolist())


def _mixed(draw: Callable[[str], float], mix: Callable[..., str], row: tuple[str, int]) -> float:
    return draw(mix(id=row[0], row=row[1]))


def _keyed_share(key: bytes, name: str) -> float:
    return int.from_bytes(hmac.digest(key, name.encode(), "sha256")[:8], "big") / 2.0**64


def _seeded_by(make: Callable[[int], Any], join: Callable[[int, int], int], seed: int, number: int) -> float:
    """The first number of a generator that is seeded with a row's number and a seed together."""
    return float(make(join(number, seed)).random())


def _sequences(table: Table, stated: Sequence[int]) -> Iterator[Way]:
    """One generator for the whole table, a draw per row in file order (or in the order of an id column)."""
    orders = {"file order": table.row}
    if len(table.event) == table.total:
        for column, values in table.columns.items():
            if all(isinstance(value, str | int) for value in values):
                orders[f"order of {column}"] = np.argsort(sorted(range(len(values)), key=lambda at: str(values[at])))
    makers: dict[str, Callable[[int], np.ndarray]] = {
        "numpy.random.default_rng": lambda seed: np.random.default_rng(seed).random(table.total),
        "numpy.random.RandomState": lambda seed: np.random.RandomState(seed % 2**32).rand(table.total),
        "random.Random": lambda seed: np.fromiter(islice(iter(random.Random(seed).random, None), table.total), float),
    }
    many = 0 if table.total > 50_000 else SEQUENCE_SEEDS * 1000 // max(1000, table.total)
    for (how, make), seed in product(makers.items(), dict.fromkeys((*stated, *COMMON, *range(many)))):
        drawn = make(seed)
        for order, rows in orders.items():
            yield Way(f"{how}({seed}) in {order}", drawn.__getitem__, rows)


# ---------------------------------------------------------------- this project's own mechanism under a small seed


def _by_insecure_seed(view: View, table: Table, usable: np.ndarray, stated: Sequence[int]) -> Iterator[Guesses]:
    """`insecure_seed`: z of both labels under the seed's key; where they differ, the released z tells the label.

    They differ in a share tanh(epsilon/2) of the events, so a small epsilon takes more events to find the seed.
    """
    assert table.epsilon is not None
    screen = usable[: math.ceil(24 / LabelNoise.of(table.epsilon).factor)]
    known = view.known[table.event[screen]]
    prepared = _events(view, table, screen)

    def score(seed: int) -> int:
        labels = _inverse(prepared, table.epsilon or 0.0, seed)
        return int((labels == known).sum()) - 4 * int((labels == -known).sum())

    seed = max(dict.fromkeys((*stated, *range(INSECURE_SEEDS))), key=score)
    rest = np.flatnonzero((view.known[table.event] == 0) & (table.z != 0))
    labels = _inverse(_events(view, table, rest), table.epsilon, seed)
    certain = labels != 0
    variant = f"{table.name}: this project's mechanism under insecure_seed {seed}"
    yield Guesses("recomputation", variant, table.event[rest][certain], labels[certain], learned=True)


def _events(view: View, table: Table, places: np.ndarray) -> list[tuple[bytes, int, int]]:
    """(the mechanism's name of the event, +1 if the canonical order is the view's, released label in that order)."""
    named = []
    for place in places.tolist():
        event = table.event[place]
        record = canonical_record(view.prompts[event], view.first[event], view.second[event])
        assert record is not None  # a view holds pairs of different responses
        named.append((event_bytes(record.record_id), record.label, int(table.z[place]) * record.label))
    return named


def _inverse(events: Sequence[tuple[bytes, int, int]], epsilon: float, seed: int) -> np.ndarray:
    """(m,) int8 labels recomputed under `insecure_seed`; 0 where z would be the same for both labels."""
    prf, mechanism = insecure_seed_key(seed).prf, RandomizedResponse(epsilon)
    labels = np.zeros(len(events), dtype=np.int8)
    for number, (name, order, released) in enumerate(events):
        agree = [mechanism.release(prf, name, label) == released for label in (1, -1)]
        labels[number] = order * (agree[0] - agree[1])
    return labels


SAMPLE = 24  # rows on which every recipe is tried; one hit in them is enough for all rows to be tried
ID_DIGITS = re.compile("[0-9a-f]{8,}")
_SEPARATORS = (*("", "\n", "\n\n", "\t", " ", "|", "||", "|||", ",", ":", "::", ";"), *"-_#", "###", *"\0\x1e\x1f")

Recipe = Callable[[Text, Text, Text], bytes]  # prompt, preferred, other -> what is digested


def _raw(text: Text) -> str:
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _joined(separator: str, with_prompt: bool, *texts: Text) -> bytes:
    return separator.join(map(_raw, texts[not with_prompt :])).encode()


_SHAPES: dict[str, Callable[[Text, Text, Text], Any]] = {
    "object": lambda prompt, one, two: {"prompt": prompt, "chosen": one, "rejected": two},
    "object of two": lambda _, one, two: {"chosen": one, "rejected": two},
    "list": lambda *texts: list(texts),
    "list of two": lambda _, one, two: [one, two],
}


def _as_json(
    build: Callable[[Text, Text, Text], Any], options: Mapping[str, Any], prompt: Text, one: Text, two: Text
) -> bytes:
    return json.dumps(build(prompt, one, two), **options).encode()


def _record(prompt: Text, one: Text, two: Text) -> bytes:
    """The bytes that `record_id` digests, but for the order of the responses."""
    texts = [encode_text(text) for text in (prompt, one, two)]
    return ID_DOMAIN + text_kind(prompt) + b"".join(len(text).to_bytes(8, "big") for text in texts) + b"".join(texts)


def recipes() -> dict[str, Recipe]:
    """Every serialisation that is tried, by name. Each depends on which response comes first."""
    table: dict[str, Recipe] = {}
    for separator, with_prompt in product(_SEPARATORS, (True, False)):
        name = f"{'prompt, ' * with_prompt}two responses joined by {separator!r}"
        table[name] = partial(_joined, separator, with_prompt)
    for sort, ascii_only, tight in product((False, True), repeat=3):
        options = {"sort_keys": sort, "ensure_ascii": ascii_only, "separators": (",", ":") if tight else None}
        for shape, build in _SHAPES.items():
            name = f"JSON {shape} (sort_keys={sort}, ensure_ascii={ascii_only}, compact={tight})"
            table[name] = partial(_as_json, build, options)
    return table | {
        "repr of a tuple": lambda *texts: repr(texts).encode(),
        "repr of a list": lambda *texts: repr(list(texts)).encode(),
        "framed texts": lambda *texts: b"".join(frame(_raw(text).encode()) for text in texts),
        "framed encodings": lambda *texts: b"".join(frame(encode_text(text)) for text in texts),
        "this program's records, their responses unsorted": _record,
        "prompt and preferred response": lambda prompt, one, _: (_raw(prompt) + _raw(one)).encode(),
        "prompt, line break, preferred response": lambda prompt, one, _: f"{_raw(prompt)}\n{_raw(one)}".encode(),
        "preferred response": lambda _, one, __: _raw(one).encode(),
        "other response": lambda _, __, two: _raw(two).encode(),
    }


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
            rows = [
                (event, (value, view.prompts[event], view.first[event], view.second[event]))
                for event, value in zip(table.event, values, strict=True)
            ]
            for label, recipe in _fitting([row for _, row in rows[:SAMPLE]], available).items():
                orders = [(event, _order(recipe, *row)) for event, row in rows]
                labels = np.array([(event, order) for event, order in orders if order], dtype=np.int64).reshape(-1, 2)
                variant = f"{table.name}: {name} is a digest of {label}"
                yield Guesses("ids", variant, labels[:, 0], labels[:, 1].astype(np.int8))


def id_columns(table: Table) -> dict[str, list[str]]:
    """Columns of hexadecimal strings (dashes and a prefix of letters such as `pair-` removed), as digits."""
    columns = {name: [_digits(value) for value in values] for name, values in table.columns.items()}
    return {name: digits for name, digits in columns.items() if digits and all(digits[:SAMPLE])}


def _digits(value: Any) -> str:
    """The digits of an id; empty for anything else."""
    if not isinstance(value, str):
        return ""
    text = re.sub("^[^0-9a-f]+", "", re.sub("[-_]", "", value.lower()).split(":")[-1])
    return text if ID_DIGITS.fullmatch(text) else ""


Row = tuple[str, Text, Text, Text]  # id, prompt, one response, the other


def _fitting(rows: Sequence[Row], available: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes that explain at least one id, in either order of the responses; not those that explain all of them
    in one order, which is then that of the texts and tells nothing."""
    orders = {name: [_order(recipe, *row) for row in rows] for name, recipe in available.items()}
    return {name: available[name] for name, each in orders.items() if any(each) and abs(sum(each)) < len(each)}


def _order(recipe: Recipe, value: str, prompt: Text, one: Text, two: Text) -> int:
    """+1 if the id is (the start of) a digest of the texts in this order, -1 in the other one, 0 in neither or both."""
    return _is_digest(recipe, value, prompt, one, two) - _is_digest(recipe, value, prompt, two, one)


def _is_digest(recipe: Recipe, value: str, *texts: Text) -> bool:
    try:
        return any(digest.startswith(value) for digest in digests(recipe(*texts)))
    except (TypeError, UnicodeEncodeError):
        return False
