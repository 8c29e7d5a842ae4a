"""The ledger's file: everything the ledger states, in one JSON file with a keyed MAC, replaced as a whole.

One file replaced by rename was preferred to a journal or a database: each step of a release (reserve, written,
released) is one rename, so there is no half-written state to tell from tampering, nothing to replay, and the entry of
a release, the totals and the data files that hold its events change together or not at all. A key has few releases
(one entry each), so rewriting the file costs milliseconds.

The MAC finds every edit and truncation. An older ledger put back in place is found by the revision in the lock file,
which is never behind the ledger; a whole state folder put back is not found, and nor is what a copy of the key
released elsewhere.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.atomic import sync, write_json
from pipeline.core.documents import parse_json
from pipeline.core.errors import UserError
from pipeline.privacy.events import EVENT, Generation
from pipeline.privacy.keys import PrivacyKey
from pipeline.privacy.labelers import TALLY, LabelerTotals
from pipeline.privacy.owner_files import read_number

FORMAT = 1
_MAC_DOMAIN = b"private-rlhf/ledger/v1"
_ID_DOMAIN = b"private-rlhf/key-id/v1"
_RESTORE = "restore the key's state folder from a backup"


@dataclass
class Book:
    """The content of the file. `revision` rises with every write, `serial` with every reservation."""

    revision: int = 0
    serial: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    budgets: list[dict[str, Any]] = field(default_factory=list)
    events: Generation = field(default_factory=Generation)
    labelers: LabelerTotals = field(default_factory=LabelerTotals)


class LedgerFile:
    """`ledger.json` in the key's state folder, and its place beside the lock and the data files."""

    def __init__(self, key: PrivacyKey) -> None:
        self.folder = key.state.folder
        self.path = self.folder / "ledger.json"
        self.lock_path = self.folder / "ledger.lock"
        self._key = key
        self.key_id = key.keyed_digest([], _ID_DOMAIN)[:16]

    def read(self) -> Book:
        """The book; an empty one for a key that has released nothing. UserError if it is missing, older or damaged.

        Needs no lock: a writer may replace the book and remove the old data in between, so data that do not fit are an
        error only where the book has stayed the same.
        """
        book = self._read_book()
        while True:
            try:
                _check_size(book.events.path, book.events.rows * EVENT.itemsize)
                _check_size(book.labelers.path, book.labelers.bounds[-1] * TALLY.itemsize)
                return book
            except UserError:
                newer = self._read_book()
                if newer.revision == book.revision:
                    raise
                book = newer

    def _read_book(self) -> Book:
        known = read_number(self.lock_path)
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

    def _mac(self, body: dict[str, Any]) -> str:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return self._key.keyed_digest([text.encode()], _MAC_DOMAIN)

    def _body(self, book: Book) -> dict[str, Any]:
        events, labelers = book.events, book.labelers
        return {
            "format": FORMAT,
            "key": self.key_id,
            "revision": book.revision,
            "serial": book.serial,
            "entries": book.entries,
            "budgets": book.budgets,
            "events": {
                "file": _name(events.path),
                "bounds": list(events.bounds),
                "epsilon": events.epsilon,
                "digest": events.digest,
            },
            "labelers": {
                "file": _name(labelers.path),
                "bounds": list(labelers.bounds),
                "labelers": labelers.labelers,
                "unattributed": labelers.unattributed,
                "busiest": [list(level) for level in labelers.busiest],
                "most": labelers.most,
                "digest": labelers.digest,
            },
        }

    def _parse(self, text: str) -> Book:
        try:
            content = parse_json(text)
            body, mac = content["ledger"], str(content["mac"])
            version, key_id = body["format"], body["key"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: the ledger is damaged or cut short; {_RESTORE}") from None
        if version != FORMAT:
            raise UserError(f"{self.path}: has format {version}, not {FORMAT}; use the version that wrote it")
        if key_id != self.key_id:
            raise UserError(f"{self.path}: belongs to another key; put each key back beside its own state folder")
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise UserError(f"{self.path}: the ledger was changed or damaged (its MAC is wrong); {_RESTORE}")
        events, labelers = body["events"], body["labelers"]
        return Book(
            revision=body["revision"],
            serial=body["serial"],
            entries=body["entries"],
            budgets=body["budgets"],
            events=Generation(self._data(events["file"]), tuple(events["bounds"]), events["epsilon"], events["digest"]),
            labelers=LabelerTotals(
                self._data(labelers["file"]),
                tuple(labelers["bounds"]),
                labelers["labelers"],
                labelers["unattributed"],
                tuple((epsilon, count) for epsilon, count in labelers["busiest"]),
                labelers["digest"],
                labelers.get("most", events["bounds"][-1]),  # a ledger of before: no person has more than all
            ),
        )

    def _data(self, name: str | None) -> Path | None:
        return None if name is None else self.folder / "events" / name


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name


def _check_size(path: Path | None, size: int) -> None:
    """A cheap look at a data file; `Ledger.verify` reads it."""
    if path is None:
        return
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: the ledger's data cannot be read ({error.strerror}); {_RESTORE}") from error
    if found != size:
        raise UserError(f"{path}: holds {found} bytes where the ledger states {size}; {_RESTORE}")
