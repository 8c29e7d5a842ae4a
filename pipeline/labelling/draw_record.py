"""The record that `label-filter` keeps, as evidence of who randomised the answers in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.privacy.local import DrawStore

DRAWS = "draws.db"
LABELS = (-1, 1)  # as `label-filter` has them


class DrawRecord(DrawStore):
    """A store of draws that is read and draws nothing."""

    def recorded(self, event: str, epsilon: float) -> int | None:
        """The label that was drawn for an event at this epsilon; None where none was."""
        name = hashlib.sha256(event.encode()).digest()
        with self._named_errors():
            row = self._base.execute(
                "SELECT draw FROM draws WHERE event = ? AND epsilon = ?", (name, float(epsilon))
            ).fetchone()
        return None if row is None else LABELS[row[0]]


def check_draws(folder: Path, answers: Mapping[str, int | None], epsilon: float) -> None:
    """UserError for an answer, other than a skip, that is not the draw of the folder's record; it names no label."""
    with closing(DrawRecord(folder / DRAWS, LABELS)) as record:
        for id, label in answers.items():
            if label is not None and record.recorded(id, epsilon) != label:
                raise UserError(
                    f"{folder / 'answers.jsonl'}: answer {id!r} must be the draw of {DRAWS} at epsilon {epsilon:g}, got"
                    " another: put there what `private-rlhf label-filter` gave"
                )
