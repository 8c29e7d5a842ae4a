"""The folder and key of the user of this machine, shared by all projects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from private_rlhf.core.errors import UserError


def user_folder() -> Path:
    """~/.local/state/private-rlhf, or below $XDG_STATE_HOME where that is set. UserError without a home."""
    home = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()) / "private-rlhf"
    except RuntimeError:
        raise UserError("HOME or XDG_STATE_HOME must name a folder for your keys, got neither: set one") from None


def default_key() -> Path:
    """The user's key, the default of every command and recipe."""
    return user_folder() / "owner.key"


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Move `user_folder` into `folder` within the block, for throw-away keys."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder.absolute())
    try:
        yield
    finally:
        os.environ.pop("XDG_STATE_HOME") if before is None else os.environ.update(XDG_STATE_HOME=before)
