"""Local mode: a label is randomised where it is given, before it goes anywhere; nobody downstream ever holds it.

Needs only the standard library and works as a single file: copy it beside a labelling tool and start it with
`python local.py --epsilon 1 --store draws.db` (inside the package: `private-rlhf label-filter`). JSON lines come in on
stdin, one JSON line goes out on stdout for each, in order and as soon as its draw is safe:

    {"id": "event-17", "label": 1}   ->   {"id": "event-17", "label": -1}

**Unit**: one labelling event, named by an id that the tool chooses: a string or an integer (7 and "7" are one id). A
second opinion, or a label that somebody corrects, is a new event with a new id, and costs another epsilon. Ids and
fields named in `--keep` pass through as they are: they must not depend on the label.

**Guarantee**: for each event P(out | label) / P(out | other label) <= e^epsilon, with the operating system's randomness
and drawn in integers, however often the event is sent. Draws add up, so each event is drawn once:

- the draw is on the disk before it is sent, and a retry gets the stored draw, also with another label;
- true labels are never stored, nor anything computed from one but the draw itself;
- a known id at another epsilon is refused, and so is a store that was made for other labels;
- several processes may share one store: each batch of lines is one exclusive transaction.

**Not protected**: that the event took place and when, its id, the kept fields; anything that the labelling tool itself
logs. Events whose store was deleted, or restored from an older copy, would be drawn again: keep the store.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import secrets
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from numbers import Real
from pathlib import Path
from typing import Any

try:
    from private_rlhf.core.errors import UserError
except ImportError:  # as a single file

    class UserError(Exception):  # type: ignore[no-redef]
        """Wrong use or wrong input, in one line that names the remedy."""


LEVELS = 1 << 128
MAX_LINE_BYTES = 1 << 20
_APPLICATION_ID = 0x50524C46  # "PRLF" in the file's header: tells a store from other SQLite files
_FORMAT = 1
_CHUNK_BYTES = 1 << 16
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE draws (event BLOB PRIMARY KEY, epsilon REAL NOT NULL, draw INTEGER NOT NULL) WITHOUT ROWID;
"""

Label = str | int | bool


# --- the mechanism ----------------------------------------------------------------------------------------------------


def keep_threshold(epsilon: float) -> int:
    """T with (2^128 + T)/2^129 <= e^epsilon/(1+e^epsilon): floor(tanh(epsilon/2) 2^128), 0 <= T < 2^128.

    Computed with 120 digits, so a label is never kept with more than its due probability, also where a float would
    round it to 1 (from epsilon = 37 on). UserError unless epsilon is a finite number above 0.
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise UserError(f"epsilon must be a finite number above 0, got {epsilon!r}; for example 1")
    if epsilon >= 100:  # 1 - tanh(eps/2) < 2^-128 from eps = 90 on
        return LEVELS - 1
    if epsilon < 2.0**-127:  # tanh(eps/2) < eps/2
        return 0
    context = Context(prec=120)
    growth = context.exp(Decimal(epsilon))
    tanh = context.divide(context.subtract(growth, Decimal(1)), context.add(growth, Decimal(1)))
    scaled = context.subtract(context.multiply(tanh, Decimal(LEVELS)), Decimal("1e-30"))
    return max(0, int(scaled.to_integral_value(rounding=ROUND_FLOOR)))


def privatize_label(label: int, epsilon: float) -> int:
    """One draw of randomised response: `label` in {-1, +1} with probability (2^128 + T)/2^129, or -label.

    Each call is a new draw and costs another epsilon: `DrawStore` keeps the draw of an event and gives it again.
    UserError for another label or a bad epsilon; the label is not printed.
    """
    if isinstance(label, bool) or not isinstance(label, Real) or label not in (-1, 1):
        raise UserError("a label must be -1 or +1: map labels of 0 and 1 with 2*label - 1")
    label = int(label)
    return label if secrets.randbits(129) < LEVELS + keep_threshold(epsilon) else -label


# --- the store --------------------------------------------------------------------------------------------------------


class DrawStore:
    """Draws by event id in an owner-only SQLite file: made once, on the disk before they are known, given again.

    A draw is 0 or 1, the place of the answered label in `labels`. Ids are kept as SHA-256. UserError if the file is
    readable by others, is not a store, is damaged, was made for other labels, or cannot be written.
    """

    def __init__(self, path: str | Path, labels: tuple[Label, Label], wait_seconds: float = 60.0) -> None:
        self.path = Path(path)
        self.created = _create(self.path, labels)
        _check_owner_only(self.path)
        with self._named_errors():
            uri = self.path.resolve().as_uri() + "?mode=rw"
            self._base = sqlite3.connect(uri, uri=True, timeout=wait_seconds, isolation_level=None)
            self._base.execute("PRAGMA synchronous = EXTRA")  # fsync of the folder too, once the journal is gone
            kind = self._base.execute("PRAGMA application_id").fetchone()[0]
            if kind != _APPLICATION_ID or self._base.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                raise UserError(f"{self.path}: must be a store of label draws of this version; choose another --store")
            (stored,) = self._base.execute("SELECT value FROM facts WHERE name = 'labels'").fetchone()
        if stored != json.dumps(labels):
            raise UserError(f"{self.path}: was made for the labels {stored}; give those, or choose another --store")

    def answer(self, events: Sequence[tuple[str, int]], epsilon: float) -> list[int | None]:
        """The draws of (event id, place of the true label), in order; None for an id that has another epsilon.

        All draws are on the disk when this returns; if it raises, none was made. UserError: a place is not 0 or 1.
        """
        if not {place for _, place in events} <= {0, 1}:
            raise UserError("the place of a label must be 0 or 1: give -1 and +1 to privatize_label")
        threshold = keep_threshold(epsilon)
        draws: list[int | None] = []
        with self._named_errors(), self._transaction():
            for event, place in events:
                name = hashlib.sha256(event.encode()).digest()
                row = self._base.execute("SELECT epsilon, draw FROM draws WHERE event = ?", (name,)).fetchone()
                if row is None:
                    row = float(epsilon), place if secrets.randbits(129) < LEVELS + threshold else 1 - place
                    self._base.execute("INSERT INTO draws VALUES (?, ?, ?)", (name, *row))
                draws.append(row[1] if row[0] == epsilon else None)
        return draws

    def close(self) -> None:
        """Closes the file."""
        self._base.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(
                f"{self.path}: cannot be used ({error}); nothing was sent for the last lines: fix that and send them"
                " again"
            ) from None
        except (sqlite3.DatabaseError, TypeError, IndexError):
            raise UserError(
                f"{self.path}: is damaged or not a store of label draws; restore it from a backup, and never delete it"
                " while events may be sent again, since they would be drawn again"
            ) from None


def _create(path: Path, labels: tuple[Label, Label]) -> bool:
    """Makes an empty store, whole or not at all (a link gives it its name); False if there is something already."""
    if os.path.lexists(path):
        return False
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        base = sqlite3.connect(partial, isolation_level=None)
        base.executescript(_SCHEMA)
        base.execute("INSERT INTO facts VALUES ('labels', ?)", (json.dumps(labels),))
        base.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        base.execute(f"PRAGMA user_version = {_FORMAT}")
        base.close()
        _sync(partial)
        os.link(partial, path)
        _sync(path.parent)
    except FileExistsError:  # another process was faster
        return False
    except (OSError, sqlite3.Error) as error:
        why = f"{getattr(error, 'strerror', 0) or error}" + ", hard links" * bool(getattr(error, "filename2", None))
        raise UserError(f"{path}: cannot make a store here ({why}); choose another --store") from None
    finally:
        for leftover in filter(os.path.lexists, (partial, partial.with_name(partial.name + "-journal"))):
            leftover.unlink(missing_ok=True)
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_owner_only(path: Path) -> None:
    try:
        info = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); choose another --store") from None
    if not stat.S_ISREG(info.st_mode) or info.st_size == 0:
        raise UserError(f"{path}: must be a store of label draws; choose another --store")
    if info.st_mode & 0o077:
        raise UserError(f"{path}: the store can be read by others; run `chmod 600 {path}`")


# --- the filter -------------------------------------------------------------------------------------------------------


def parse_labels(text: str) -> tuple[Label, Label]:
    """The two labels of `--labels`: whole numbers and true/false are read as JSON, all other values as text.

    The answer is always written as one of these two values, never in the form in which a label came in, which could
    tell it. UserError unless there are exactly two, different ones.
    """
    values: list[Label] = []
    for part in text.split(","):
        try:
            value = json.loads(part)
        except ValueError:
            value = None
        values.append(value if isinstance(value, int) else part.strip())
    if len(values) != 2 or values[0] == values[1] or "" in values:
        raise UserError(f"--labels {text!r} does not name two different labels; for example --labels=-1,1 or A,B")
    return values[0], values[1]


def _check_fields(*names: str) -> None:
    if len(set(names)) < len(names) or "error" in names or "line" in names:
        raise UserError(f"the fields {', '.join(names)} must be different and none 'error' or 'line': give each once")


@dataclass(frozen=True)
class LabelFilter:
    """Answers lines. keep: further fields to pass through; all others are dropped."""

    store: DrawStore
    epsilon: float
    labels: tuple[Label, Label]
    id_field: str = "id"
    label_field: str = "label"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keep_threshold(self.epsilon)
        _check_fields(self.id_field, self.label_field, *self.keep)

    def serve(self, read: Callable[[], bytes], write: Callable[[bytes], None]) -> int:
        """Answers every line until `read` gives b""; returns how many lines were refused.

        Lines that arrive together are drawn in one transaction and then written together, so a tool that waits for
        each answer gets it at once and a file costs one fsync per 64 KiB.
        """
        refused, number, rest, ended = 0, 0, b"", False
        while not ended:
            chunk = read()
            ended = not chunk
            *lines, rest = (rest + chunk).split(b"\n") if not ended else (rest, b"")
            if len(rest) > MAX_LINE_BYTES:
                raise UserError(f"line {number + len(lines) + 1} is over {MAX_LINE_BYTES} bytes; end lines with \\n")
            numbered = [(number + place, line) for place, line in enumerate(lines, 1) if line.strip()]
            number += len(lines)
            answers = self._answer(numbered)
            refused += sum("error" in answer for answer in answers)
            if answers:
                write("".join(json.dumps(answer) + "\n" for answer in answers).encode())
        return refused

    def _answer(self, lines: Sequence[tuple[int, bytes]]) -> list[dict[str, Any]]:
        """One answer per (number, line); one with "error" is a refusal."""
        answers: list[dict[str, Any]] = []
        events: list[tuple[str, int]] = []
        waiting: list[tuple[int, dict[str, Any]]] = []  # lines whose answers a draw completes
        for number, line in lines:
            try:
                event, place, answer = self._parse(line)
            except _LineError as error:
                answers.append({"line": number, "error": str(error)})
                continue
            events.append((event, place))
            waiting.append((number, answer))
            answers.append(answer)
        draws = self.store.answer(events, self.epsilon) if events else []
        for (number, answer), draw in zip(waiting, draws, strict=True):
            if draw is None:
                event_id = answer[self.id_field]
                answer.clear()
                answer |= {"line": number, "error": _OTHER_EPSILON, self.id_field: event_id}
            else:
                answer[self.label_field] = self.labels[draw]
        return answers

    def _parse(self, line: bytes) -> tuple[str, int, dict[str, Any]]:
        """(event id, place of the label, the answer without its label). No message repeats a value of the line."""
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise _LineError("is not one JSON object in UTF-8")
        if len(json.loads(line.decode(), object_pairs_hook=list)) > len(row):  # of two `json` takes the last
            raise _LineError("gives a field twice")
        event, label = row.get(self.id_field), row.get(self.label_field)
        if isinstance(event, bool) or not isinstance(event, str | int) or event == "":
            raise _LineError(f"field {self.id_field!r} is not a string or whole number")
        places = [i for i, known in enumerate(self.labels) if type(label) is type(known) and label == known]
        if not places:
            raise _LineError(f"field {self.label_field!r} must be one of the two labels {json.dumps(self.labels)}")
        name = str(event)
        try:
            name.encode()
        except UnicodeEncodeError:
            raise _LineError(f"field {self.id_field!r} holds a lone surrogate") from None
        extra = {field: row[field] for field in self.keep if field in row}
        return name, places[0], {self.id_field: event, self.label_field: None} | extra


class _LineError(Exception):
    """The defect of one line."""


_OTHER_EPSILON = "this id was answered at another epsilon, and draws add up: use that epsilon, or a new id"


def filter_stdin(
    epsilon: float,
    store: Path,
    labels: str = "-1,1",
    id_field: str = "id",
    label_field: str = "label",
    keep: str = "",
) -> int:
    """The filter from stdin to stdout. Returns 0, 2 if lines were refused, or 1 if the reader went away.

    UserError before anything is read for a bad option or store.
    """
    keep_threshold(epsilon)
    pair = parse_labels(labels)
    fields = tuple(name for name in keep.split(",") if name)
    _check_fields(id_field, label_field, *fields)
    draws = DrawStore(store, pair)
    if draws.created:
        print(_printable(f"new store {store}: keep it, events in it are never drawn again"), file=sys.stderr)
    try:
        refused = LabelFilter(draws, epsilon, pair, id_field, label_field, fields).serve(
            lambda: os.read(0, _CHUNK_BYTES), _write_all
        )
    except BrokenPipeError:
        print("label-filter: the reader went away; its last draws are stored and will be sent again", file=sys.stderr)
        return 1
    finally:
        draws.close()
    if refused:
        print(f'label-filter: {refused} lines were refused, see the "error" answers; fix them', file=sys.stderr)
    return 2 if refused else 0


def _printable(line: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of the single file; exit codes as `private-rlhf`."""
    parser = argparse.ArgumentParser(description="Randomise labels on their way from stdin to stdout.")
    parser.add_argument("--epsilon", type=float, required=True, help="cost of one event, finite and above 0")
    parser.add_argument("--store", type=Path, required=True, help="file of the draws (0600); made on first use")
    parser.add_argument("--labels", default="-1,1", help="the two labels, e.g. --labels=-1,1 or --labels A,B")
    parser.add_argument("--id-field", default="id")
    parser.add_argument("--label-field", default="label")
    parser.add_argument("--keep", default="", help="further fields to pass through, comma-separated")
    options = parser.parse_args(arguments)
    try:
        return filter_stdin(**vars(options))
    except UserError as error:
        print(_printable(f"label-filter: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
