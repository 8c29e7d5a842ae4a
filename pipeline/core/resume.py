"""Resume state of a stage: used by what it belongs to, and set aside for anything else; never deleted unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from private_rlhf.core import atomic

MARKER = "fingerprint.json"
CODE = "code"


def claim(folder: Path, identity: Mapping[str, str], code: str) -> str | None:
    """Makes `folder` ready for resume state of `identity`; what is of another one moves to `folder`-aside-N beside it.

    Args:
        folder: of the stage's resume state.
        identity: what the state depends on, by names that a message can show.
        code: version of the code; another one may go on from the state.

    Returns:
        What to tell the user, or None.
    """
    marker, message = folder / MARKER, None
    if any(path != marker for path in folder.glob("*")):
        before = _read(marker)
        changed = [name for name in identity if before.get(name) != identity[name]]
        if changed:
            aside = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}-aside-{n}")).exists())
            folder.rename(aside)
            message = (
                f"starts anew, as the resume state here is of another {' and '.join(changed)}: it is kept in {aside}; "
                f"to go on from it, undo the change and move it back to {folder}"
            )
        elif before.get(CODE) != code:
            message = f"goes on from what another version of the code left in {folder}; delete it to start anew"
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_json(marker, {**identity, CODE: code})
    return message


def _read(marker: Path) -> dict[str, str]:
    """The identity in a folder; empty where there is none."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
