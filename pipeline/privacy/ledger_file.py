"""The ledger's file: everything the ledger states, in one JSON file with a keyed MAC, replaced as a whole.

Each step of a release is one rename: there is no half-written state to tell from tampering and nothing to replay, and
the entry of a release, the totals and the data files that hold its events change together.

The MAC finds every edit and truncation. An older ledger put back in place is found by the revision in the lock file,
which is never behind the ledger; an older state folder, and a copy of key and state at another place, by the anchor: a
file in the user's own folder, named by the key's keyed fingerprint, that keeps the ledger's place and revision. What is
left is another user or another machine, which have no anchor.
"""

from __future__ import annotations

import hmac
import json
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from private_rlhf.core.atomic import sweep_temporaries, sync, write_json
from private_rlhf.core.documents import parse_json, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.user import user_folder
from private_rlhf.privacy import events, labelers
from private_rlhf.privacy.events import EVENT, Generation
from private_rlhf.privacy.keys import PrivacyKey, begin_state, lock_file, make_private_folder, read_number
from private_rlhf.privacy.labelers import TALLY, LabelerTotals

FORMAT = 2
WITH_SUMS = 3  # holds a noisy sum of an earlier version, which programs before it would not add up
WITH_FOLDED_NAMES = 4  # once labellers are told apart by folded names, which earlier programs would not fold
WITH_LETTERS = 5  # once events have tags of letters, which earlier programs would not compare
READABLE = (1, FORMAT, WITH_SUMS, WITH_FOLDED_NAMES, WITH_LETTERS)
_MAC_DOMAIN = b"private-rlhf/ledger/v1"
_ID_DOMAIN = b"private-rlhf/key-id/v1"
_RESTORE = "restore the key's state folder from a backup"

Kind = Literal["labels", "counts", "sum", "stated"]
ON_TOP: tuple[Kind, ...] = ("counts", "sum", "stated")  # these add up, and to the largest ε of the labels


@dataclass
class Book:
    """The content of the file. `revision` rises with every write, `serial` with every reservation. `max_events`: of one
    person, over the ledger's life. `folded`: its labellers go by `records.fold_name`."""

    revision: int = 0
    serial: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    budgets: list[dict[str, Any]] = field(default_factory=list)
    events: Generation = field(default_factory=Generation)
    labelers: LabelerTotals = field(default_factory=LabelerTotals)
    max_events: int | None = None
    folded: bool = False


class LedgerFile:
    """`ledger.json` in the key's state folder, and its place beside the lock and the data files."""

    def __init__(self, key: PrivacyKey) -> None:
        self.folder = key.state.folder
        self.path = self.folder / "ledger.json"
        self.lock_path = lock_file(self.folder)
        self._key = key
        self.key_id = key.keyed_digest([], _ID_DOMAIN)[:16]
        self._anchor = user_folder() / "ledgers" / f"{self.key_id}.json"

    def read(self, newest: bool = True) -> Book:
        """The book; an empty one for a key that has released nothing. UserError if it is missing, older (unless not
        `newest`) or damaged.

        Needs no lock: a writer may replace the book and remove the old data in between, so data that do not fit are an
        error only where the book has stayed the same.
        """
        book = self._read_book(newest)
        while True:
            try:
                _check_size(book.events.path, book.events.rows * book.events.dtype.itemsize)
                _check_size(book.labelers.path, book.labelers.bounds[-1] * TALLY.itemsize)
                return book
            except UserError:
                newer = self._read_book(newest)
                if newer.revision == book.revision:
                    raise
                book = newer

    def _read_book(self, newest: bool) -> Book:
        try:
            known = read_number(self.lock_path)
        except FileNotFoundError:
            raise UserError(self._without_state()) from None
        known = max(known, self._anchored()) if newest else 0
        if self.path.is_fifo():
            raise UserError(f"{self.path}: must be a ledger and is a pipe; {_RESTORE}")
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if known:
                raise UserError(f"{self.path}: the ledger is missing; {_RESTORE}") from None
            return Book()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); check its owner and mode") from error
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: the ledger is damaged; {_RESTORE}") from None
        book = self._parse(text)
        if book.revision < known:
            raise UserError(
                f"{self.path}: is older (revision {book.revision}) than what was recorded here ({known}); {_RESTORE}"
            )
        return book

    def write(self, book: Book) -> None:
        """Replace the file, durably, with the revision raised."""
        book.revision += 1
        body = self._body(book)
        write_json(self.path, {"ledger": body, "mac": self._mac(body)}, mode=0o600)
        sync(self.folder)
        self._drop_anchor(book)

    def sweep(self) -> None:
        """Removes what a killed writer left half made; the caller has the lock."""
        sweep_temporaries(self.folder)
        with suppress(OSError):  # a home that cannot be read holds nothing of ours
            sweep_temporaries(self._anchor.parent, self._anchor.name)

    def known(self) -> int:
        """The last revision that lock file and anchor know. UserError if the ledger is at another place."""
        return max(read_number(self.lock_path), self._anchored())

    def begin(self) -> None:
        """An empty state for a key that has none. UserError if there is a ledger already, here or elsewhere."""
        if self.lock_path.exists() or self.path.exists():
            raise UserError(f"{self.folder}: holds a ledger; `private-rlhf ledger show` prints it")
        self._anchored()
        begin_state(self.folder)

    def replace(self, source: Path) -> None:
        """Put a copy of the state folder `source` here; what was here is kept under another name.

        UserError if `source` is not a whole ledger of this key.
        """
        other = LedgerFile(self._key)
        other.folder, other.path, other.lock_path = source, source / "ledger.json", lock_file(source)
        self._anchored()
        if source.resolve() == self.folder or not other.path.is_file() or not other.lock_path.is_file():
            raise UserError(f"{source}: must be a copy of a state folder (it needs ledger.json and ledger.lock)")
        if problems := damage(other.read(newest=False)):
            raise UserError(f"{problems[0]}; give another copy")
        copy = self.folder.with_name(f".{self.folder.name}.new")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        if self.folder.exists():
            number = next(n for n in count(1) if not self.folder.with_name(f"{self.folder.name}.replaced-{n}").exists())
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.replaced-{number}"))
        copy.rename(self.folder)
        sync(self.folder.parent)

    def _anchored(self) -> int:
        """The last revision that the anchor knows, 0 without one. UserError if it knows this ledger at another place.

        A folder that was moved takes its anchor along; of two copies the one that the anchor names is the ledger.
        """
        try:
            anchor = read_json(self._anchor)
            folder, revision = Path(str(anchor["folder"])), int(anchor["revision"])
        except OSError:
            return 0  # none, or a home that cannot be read
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self._anchor}: is damaged; it keeps the place of this key's ledger: remove it only"
                " if nobody released anything under a copy of the key"
            ) from None
        if folder != self.folder and lock_file(folder).exists():
            key_file = folder.with_name(folder.name.removesuffix(".state"))
            raise UserError(
                f"{self._key.path}: is a copy of a key whose ledger lies in {folder}, and one key has one ledger: use"
                f" --key {key_file}"
            )
        return revision

    def _drop_anchor(self, book: Book) -> None:
        """Best effort: a home that cannot be written makes no release fail."""
        try:
            self._anchor.parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self._anchor.parent.parent, self._anchor.parent):
                make_private_folder(folder)
            spent = book.events.epsilon + added_epsilon(book.entries)
            facts = {"folder": str(self.folder), "revision": book.revision, "epsilon": spent}
            write_json(self._anchor, facts, mode=0o600)
        except OSError:
            pass

    def _without_state(self) -> str:
        """The error text for a key without its ledger."""
        self._anchored()
        return (
            f"{self._key.path}: has no ledger beside it ({self.folder}), as a copied or restored key: put the state"
            " folder back (`private-rlhf ledger restore`), or say what was released under this key"
            f" (`private-rlhf ledger init --key {self._key.path} --i-know EPSILON`, 0 for nothing)"
        )

    def _mac(self, body: dict[str, Any]) -> str:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return self._key.keyed_digest([text.encode()], _MAC_DOMAIN)

    def _body(self, book: Book) -> dict[str, Any]:
        version = WITH_SUMS if any(entry.get("kind") == "sum" for entry in book.entries) else FORMAT
        version = WITH_FOLDED_NAMES if book.folded else version
        events = _stated(book.events)
        if book.events.rows and book.events.dtype == EVENT:
            version = WITH_LETTERS
        else:
            del events["lettered"], events["unlettered"]
        return {
            "format": version,
            "folded": book.folded,
            "key": self.key_id,
            "revision": book.revision,
            "serial": book.serial,
            "entries": book.entries,
            "budgets": book.budgets,
            "max_events": book.max_events,
            "events": events,
            "labelers": _stated(book.labelers),
        }

    def _parse(self, text: str) -> Book:
        try:
            content = parse_json(text)
            body, mac = content["ledger"], str(content["mac"])
            version, key_id = body["format"], body["key"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: the ledger is damaged or cut short; {_RESTORE}") from None
        if version not in READABLE:
            raise UserError(f"{self.path}: has format {version}, not {FORMAT}; use the version that wrote it")
        if key_id != self.key_id:
            raise UserError(f"{self.path}: belongs to another key; put each key back beside its own state folder")
        if not hmac.compare_digest(mac.encode(errors="replace"), self._mac(body).encode()):
            raise UserError(f"{self.path}: the ledger was changed or damaged (its MAC is wrong); {_RESTORE}")
        events = {"legacy": version == 1, "lettered": version == WITH_LETTERS} | body["events"]
        # a ledger of format 1 does not state `most`: nobody has more events than there are
        labelers = {"most": events["bounds"][-1]} | body["labelers"]
        return Book(
            revision=body["revision"],
            serial=body["serial"],
            entries=body["entries"],
            budgets=body["budgets"],
            events=Generation(**self._fields(events)),
            labelers=LabelerTotals(**self._fields(labelers)),
            max_events=body.get("max_events"),
            folded=body.get("folded", version == WITH_FOLDED_NAMES),
        )

    def _fields(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `_stated`."""
        name = facts.pop("file")
        path = None if name is None else self.folder / "events" / name
        return {"path": path} | {field: _as_tuple(value) for field, value in facts.items()}


def added_epsilon(entries: list[dict[str, Any]], kinds: tuple[Kind, ...] = ON_TOP) -> float:
    """Σ ε of entries of these kinds, as far as they may be released: what they cost on top of the labels' own."""
    spent = (entry for entry in entries if entry["status"] != "reserved")
    return math.fsum(entry["epsilon"] for entry in spent if entry.get("kind", "labels") in kinds)


def damage(book: Book) -> list[str]:
    """Problems of the data files that a book names, one line each; reads them."""
    return [*events.problems(book.events), *labelers.problems(book.labelers, book.events.events)]


def _stated(data: Generation | LabelerTotals) -> dict[str, Any]:
    """The fields of a data file in their order, which is that of the ledger's text; its path as a name."""
    facts = vars(data).copy()
    path: Path | None = facts.pop("path")
    return {"file": None if path is None else path.name} | facts


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _check_size(path: Path | None, size: int) -> None:
    """A cheap look at a data file; `Ledger.verify` reads it."""
    if path is None:
        return
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: the ledger's data cannot be read ({error.strerror}); {_RESTORE}") from error
    if actual != size:
        raise UserError(f"{path}: holds {actual} bytes where the ledger states {size}; {_RESTORE}")
