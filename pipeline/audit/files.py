"""Attacks on the other files: which response do they hold, and which one first? Leaks 3 and 7.

Fine-tuning data made of the chosen answers, samples in a log, a cache of the raw rows, a raw copy: each holds the
texts of events in a way that depends on their labels. Files are searched as bytes (decompressed where they are gzip),
as rows where they are data files, for pieces of text that belong to one response of one event alone.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import cell_guesses, crossed
from private_rlhf.audit.view import View, file_rows, plain_text
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import SUFFIXES

PIECE = 16  # bytes of a response that are searched for
STARTS = 24  # bytes within which a piece starts, or at the response's end; the first that is its own is taken
MOST_EVENTS = 50_000  # whose texts are searched for
LARGEST = 1 << 26  # bytes of a file that are searched
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".png", ".svg")
NEVER = np.iinfo(np.int64).max


def texts_in_files(view: View) -> Iterator[Guesses]:
    """For each file that is no table: the response it holds, the one it holds first, the one it holds more often."""
    pieces = own_pieces(view)
    if not pieces:
        return
    for path in view.files:
        if path in view.table_files or path.suffix.lower() in WEIGHTS:
            continue
        first_seen = positions(content(path), pieces, view.size)
        held = first_seen < NEVER
        if not held.any():
            continue
        name = _relative(path, view)
        one, two = held[:, 0].astype(np.int64), held[:, 1].astype(np.int64)
        single = np.flatnonzero(one != two)
        labels = np.where(one[single] == 1, 1, -1).astype(np.int8)
        yield Guesses("texts in files", f"{name}: the response it holds", single, labels)
        both = np.flatnonzero(held.all(axis=1))
        earlier = np.where(first_seen[both, 0] < first_seen[both, 1], 1, -1).astype(np.int8)
        yield Guesses("texts in files", f"{name}: the response it holds first", both, earlier)
        order = np.sign(first_seen[:, 1] - first_seen[:, 0]) if len(both) else np.zeros(view.size)
        cells = np.where(held.any(axis=1), 2 * one + two, -1)
        signs = [view.own_z(table) for table in view.tables[:1]]
        fitted = cell_guesses(crossed(cells, order.astype(np.int64), *signs), view.known, view.alpha)
        yield Guesses("texts in files", f"{name}: what it holds, and z", *fitted, learned=True)


def own_pieces(view: View) -> dict[bytes, tuple[int, int]]:
    """piece -> (event, 0 for the first response or 1 for the second), for pieces that belong to one response alone.

    A piece has 16 bytes without quotes, backslashes or control characters, so that JSON leaves it as it is.
    """
    times: Counter[bytes] = Counter()
    offered: list[tuple[int, int, list[bytes]]] = []
    for event in range(min(view.size, MOST_EVENTS)):
        for which, text in enumerate((view.first[event], view.second[event])):
            found = _pieces(plain_text(text))
            offered.append((event, which, found))
            times.update(set(found))
    chosen = {}
    for event, which, found in offered:
        piece = next((piece for piece in found if times[piece] == 1), None)
        if piece is not None:
            chosen[piece] = (event, which)
    return chosen


def _pieces(text: str) -> list[bytes]:
    """The first pieces of a text and its last one; a text shorter than a piece has none."""
    data = text.encode("utf-8", "replace")[: STARTS + PIECE]
    end = text.encode("utf-8", "replace")[-PIECE:]
    starts = [data[start : start + PIECE] for start in range(0, max(0, len(data) - PIECE + 1), 4)]
    return [piece for piece in (*starts, end) if len(piece) == PIECE and _plain(piece)]


def _plain(piece: bytes) -> bool:
    return all(32 <= byte < 127 and byte not in b"\"\\<>&'/" for byte in piece)


def content(path: Path) -> bytes:
    """The file's bytes to search, at most 64 MiB: decompressed if gzip, rows as JSON if a compressed data file."""
    name = path.name.lower()
    try:
        if name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                return file.read(LARGEST)
        if name.endswith((".parquet", ".arrow")) and name.endswith((*SUFFIXES, ".arrow")):
            return _rows_as_text(path)
        with path.open("rb") as file:
            return file.read(LARGEST)
    except (OSError, EOFError, zlib.error):
        return b""


def _rows_as_text(path: Path) -> bytes:
    lines, size = [], 0
    try:
        for row in file_rows(path):
            lines.append(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace"))
            size += len(lines[-1])
            if size > LARGEST:
                break
    except UserError:
        pass  # damaged from here on: what was read counts
    return b"\n".join(lines)


def positions(data: bytes, pieces: dict[bytes, tuple[int, int]], events: int) -> np.ndarray:
    """(events, 2) int64: where each response's piece first stands in the data, `NEVER` if nowhere.

    Windows of 16 bytes are two 64-bit words; the first is looked up in the sorted first words of the pieces, and only
    the few windows that are found there are compared in full.
    """
    found = np.full((events, 2), NEVER, dtype=np.int64)
    if len(data) < PIECE:
        return found
    heads = np.unique(np.frombuffer(b"".join(piece[:8] for piece in pieces), dtype="<u8"))
    raw = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 22
    for start in range(0, len(data) - PIECE + 1, step):
        block = raw[start : start + step + 7].astype(np.uint64)
        words = np.zeros(len(block) - 7, dtype=np.uint64)
        for byte in range(8):
            words |= block[byte : byte + len(words)] << np.uint64(8 * byte)
        at = np.searchsorted(heads, words)
        hits = np.flatnonzero(heads[np.minimum(at, len(heads) - 1)] == words) + start
        for place in hits.tolist():
            owner = pieces.get(data[place : place + PIECE])
            if owner is not None and found[owner] == NEVER:
                found[owner] = place
    return found


def _relative(path: Path, view: View) -> str:
    root = next((root for root in view.roots if root in path.parents), path.parent)
    return str(path.relative_to(root))
