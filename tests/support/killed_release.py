"""A release that dies at a call: `python killed_release.py PLACE CALLS DATA OUTPUT KEY [STEP]`.

PLACE: a function of `data.curate` or `data.engine`. CALLS: of it that return before one ends the process by SIGKILL.
STEP: of a release by several tasks, in small pieces; without it one process makes the release.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from private_rlhf.data import curate, engine
from private_rlhf.data.curate import Request, privatize_source, release_step
from private_rlhf.data.declared_columns import Options


def kill_at(place: str, calls: int) -> None:
    """End this process at the call of `place` after `calls` others."""
    owner: Any = curate if hasattr(curate, place) else engine
    function, left = getattr(owner, place), iter(range(calls))

    def counting(*arguments: Any, **more: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)

    setattr(owner, place, counting)


def main(place: str, calls: str, data: str, output: str, key: str, step: str | None = None) -> None:
    """Make the release, or a step of it."""
    kill_at(place, int(calls))
    if step is None:
        privatize_source(Request(data, Path(output), 1.0, Path(key), chunk_bytes=1500))
        return
    curate.ROWS_PER_SHARD = 128  # type: ignore[misc]
    engine.ROWS_IN_MEMORY = 256  # type: ignore[misc]
    options = Options(labeler_column="who")
    release_step(Request(data, Path(output), 1.0, Path(key), options=options, chunk_bytes=8000, step=step))


if __name__ == "__main__":
    main(*sys.argv[1:])
