"""Shared by the tests of what lies beside the key."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    """fsync does nothing: a test that kills processes, not the machine, cannot tell, and need not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
