"""What belongs to the user of this machine and to no project."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder() -> Path:
    """~/.local/state/private-rlhf, or below $XDG_STATE_HOME where that is set."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()) / "private-rlhf"
