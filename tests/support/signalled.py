"""`private-rlhf` whose process group gets a signal as soon as a file or folder exists.

Usage: signalled.py PATH SIGNAL-NUMBER ARGUMENTS…

The process looks by itself, at each of its audit events (every open, rename, import, …), so that a busy machine cannot
let it run past the moment, as it can with one that watches from outside.
"""

from __future__ import annotations

import os
import sys

from private_rlhf.cli import main


def signal_when(path: str, number: int) -> None:
    """Sends the signal once, at the first audit event after `path` came to exist."""
    sent = False

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal sent
        if not sent and os.path.exists(path):
            sent = True
            os.killpg(0, number)

    sys.addaudithook(look)


if __name__ == "__main__":
    signal_when(sys.argv[1], int(sys.argv[2]))
    sys.argv = ["private-rlhf", *sys.argv[3:]]
    sys.exit(main())
