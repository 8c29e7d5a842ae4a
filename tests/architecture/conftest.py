"""The project's own sources, parsed once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.rooms import read_sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> dict[str, ast.Module]:
    """Every module of the two packages by its path in the checkout, e.g. `pipeline/core/errors.py`."""
    return read_sources(ROOT)
