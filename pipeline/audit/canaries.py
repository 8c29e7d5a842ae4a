"""True labels on the owner's side: canary events planted into raw data, their truth file, and raw files themselves.

A canary is a real pair of the data set whose label was replaced by a fair coin, independent of the text. Its truth is
kept in an owner-only file (0600) beside the key, never in a release or a run directory. Planted data must go through
the whole pipeline in place of the real ones, under a key that has not released the real labels of those pairs yet.

The only module of the suite that reads raw labels.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from private_rlhf.core.atomic import new_file, write_text
from private_rlhf.core.documents import parse_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.layout import read_preferences, read_rows
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import Text, canonical_record, encode_text

HEADER = "private-rlhf canaries v1"
KEY_BYTES = 16
DIGESTS = ("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s")

FRAMES = ("response_a", "the longer response")
"""Orders of a pair, besides that of its texts, to which a label may be relative."""

Coin = Callable[[], int]


@dataclass(frozen=True)
class RawFacts:
    """Facts of a raw file that a program might publish: plain digests (hex), size in bytes, time in seconds."""

    digests: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    time: int | None = None


@dataclass(frozen=True)
class Truth:
    """labels: pair key -> the labels of its events, +1 if the first response was preferred (one event, mostly).
    coins: the labels are fair coins (canaries), not people's. facts: of the raw files. frames: pair key -> for each of
    FRAMES +1 if that is the first response, -1 if it is the second, 0 for neither; older files have none.
    """

    labels: Mapping[bytes, tuple[int, ...]]
    coins: bool
    facts: tuple[RawFacts, ...] = ()
    frames: Mapping[bytes, tuple[int, ...]] = field(default_factory=dict)


def pair_key(prompt: Text, left: Text, right: Text) -> tuple[bytes, int]:
    """(16-byte name of the unordered pair, side): +1 if `left` is its first response, -1 if `right` is, 0 if equal.

    "First" is the smaller encoding. Independent of the release's own order, which is one of the things attacked.
    """
    one, two = encode_text(left), encode_text(right)
    side = (one < two) - (one > two)
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"attack-pair")
    for part in (encode_text(prompt), min(one, two), max(one, two)):
        digest.update(frame(part))
    return digest.digest(), side


def frames_of(prompt: Text, left: Text, right: Text) -> tuple[int, int]:
    """FRAMES of a pair of two different responses."""
    first, second = sorted((left, right), key=encode_text)
    record = canonical_record(prompt, first, second)
    assert record is not None
    one, two = len(encode_text(first)), len(encode_text(second))
    return record.label, (one > two) - (one < two)


def fair_coin() -> int:
    """A label, -1 or +1."""
    return 1 - 2 * secrets.randbits(1)


def plant(
    source: str, output: Path, truth_file: Path, count: int, coin: Coin = fair_coin, columns: tuple[str, ...] = ()
) -> int:
    """Write `source` to `output` (JSONL: prompt, chosen, rejected; rows in their order) with `count` labels replaced by
    coins, and the coins to `truth_file`; both 0600. Returns the number of canaries.

    The pairs are picked at random among those that occur once in the source. columns: others that are carried over, of
    which none may hold the label. Memory: 24 bytes per row. UserError: count < 1, an output that exists, fewer than
    `count` pairs, or a source that cannot be read.
    """
    if output.resolve() == truth_file.resolve():
        raise UserError(f"--truth must be another file than --plant, got {truth_file}: choose another place")
    for path in (output, truth_file):
        if path.exists():
            raise UserError(f"{path}: exists and is not overwritten; choose another place for the planted data")
    if count < 1:
        raise UserError(f"--canaries {count}: plant at least one")
    keys = [pair_key(pair.prompt, pair.chosen, pair.rejected) for pair in read_preferences(source)]
    times = Counter(key for key, _ in keys)
    eligible = array("q", (row for row, (key, side) in enumerate(keys) if side and times[key] == 1))
    if len(eligible) < count:
        raise UserError(f"{source}: has {len(eligible)} pairs that occur once, fewer than --canaries {count}: lower it")
    picked = set(secrets.SystemRandom().sample(eligible, count))
    truth: dict[bytes, tuple[int, ...]] = {}
    frames: dict[bytes, tuple[int, int]] = {}

    def lines() -> Iterator[str]:
        options = Options(ties="coin", special_tokens="keep", columns=columns)
        for row, ((prompt, chosen, rejected, _), read) in enumerate(read_rows(source, None, options)):
            if row in picked:
                label = coin()
                key, side = keys[row]
                truth[key], frames[key] = (label,), frames_of(prompt, chosen, rejected)
                if label != side:
                    chosen, rejected = rejected, chosen
            if missing := sorted(set(columns) - set(read)):
                raise UserError(f"{source}: row {row + 1} has no column {missing[0]!r}; name others with --carry")
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            yield json.dumps(pair | {name: read[name] for name in columns}, ensure_ascii=False) + "\n"

    with new_file(output, 0o600) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines())
    write_truth(truth_file, Truth(truth, coins=True, facts=(raw_facts(output),), frames=frames))
    return len(truth)


def write_truth(path: Path, truth: Truth) -> None:
    """The truth file: a header line, then one line per pair; 0600."""
    header: dict[str, Any] = {"format": HEADER}
    for facts in truth.facts:
        header["raw"] = {"digests": dict(facts.digests), "size": facts.size, "time": facts.time}
    lines = [header]
    for key, values in truth.labels.items():
        lines.append({"pair": key.hex(), "labels": list(values), "frames": list(truth.frames.get(key, ()))})
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines), mode=0o600)


def truth_path(key_file: Path) -> Path:
    """The truth file of planted canaries: beside the key."""
    return key_file.with_name(key_file.name + ".canaries.jsonl")


def read_truth(path: Path, limit: int | None = None) -> Truth:
    """The (first `limit`) canaries of a truth file. UserError if it is missing, readable by others, or damaged."""
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: the canaries' labels can be read by others; run `chmod 600 {path}`")
        lines = path.read_text(encoding="utf-8").splitlines()
        header = parse_json(lines[0]) if lines else {}
        if header.get("format") != HEADER:
            raise ValueError(HEADER)
        raw = header.get("raw")
        facts = () if raw is None else (RawFacts(raw["digests"], raw["size"], raw["time"]),)
        rows = {bytes.fromhex(row["pair"]): row for row in map(parse_json, lines[1:][:limit])}
        labels = {key: tuple(map(int, row["labels"])) for key, row in rows.items()}
        signs = {key: row.get("frames") or (0,) * len(FRAMES) for key, row in rows.items()}
        frames = {key: (int(by_id), int(by_length)) for key, (by_id, by_length) in signs.items()}
    except FileNotFoundError:
        remedy = "plant some with `attack SRC --plant FILE --key KEY`"
        raise UserError(f"{path}: no such file of canaries; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: must be a file of canaries, and whole; plant them again") from None
    return Truth(labels, coins=True, facts=facts, frames=frames)


def raw_truth(source: str) -> Truth:
    """The labels of a raw data set, for its owner. Memory: about 150 bytes per row."""
    labels: dict[bytes, tuple[int, ...]] = {}
    for pair in read_preferences(source):
        key, side = pair_key(pair.prompt, pair.chosen, pair.rejected)
        if side:
            labels[key] = (*labels.get(key, ()), side)
    path = Path(source)
    return Truth(labels, coins=False, facts=(raw_facts(path),) if path.is_file() else ())


def raw_facts(path: Path) -> RawFacts:
    """Digests, size and time of a raw file."""
    hashes = {name: hashlib.new(name) for name in DIGESTS}
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            for digest in hashes.values():
                digest.update(chunk)
    info = path.stat()
    return RawFacts({name: digest.hexdigest() for name, digest in hashes.items()}, info.st_size, int(info.st_mtime))
