"""Copies of one key on machines of their own, as twin runs need them: on one machine a key has one ledger."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from private_rlhf.privacy.keys import begin_state, state_folder


def move_to(folder: Path) -> None:
    """From here to the end of the test, what belongs to the user lies in `folder`/user."""
    os.environ["XDG_STATE_HOME"] = str(folder / "user")


def copy_key(source: Path, target: Path) -> Path:
    """The key as `target`, with a new ledger; use it on a machine of its own."""
    shutil.copy(source, target)
    begin_state(state_folder(target))
    return target
