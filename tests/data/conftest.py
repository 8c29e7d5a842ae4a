"""The owner's key of a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_rlhf.privacy.keys import keygen


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keygen(tmp_path / "owner.key")
