"""Releases of rows that a test makes up, and what the ledger shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.ledger import Ledger

Row = dict[str, Any]
NAMES = ("labeler_column", "event_column", "corrects_column", "columns")


def run(rows: list[Row], output: Path, key: Path, epsilon: float = 1.0, **more: Any) -> list[ReleasedPair]:
    """The rows of a release to `output`; more: columns of `Options`, and keys of `Request`."""
    data = output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {name: more.pop(name) for name in NAMES if name in more}
    privatize_source(Request(str(data), output, epsilon, key, options=Options(**named), **more))
    return list(read_release(output).rows)


def shown(key: Path) -> dict[str, Any]:
    """What the ledger of a key shows."""
    return Ledger.open(load_key(key)).show()
