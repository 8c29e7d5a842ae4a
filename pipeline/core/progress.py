"""Progress lines on stderr."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One progress line on stderr."""
    print(f"[private-rlhf] {line}", file=sys.stderr, flush=True)
