"""Fixtures for every test. No network; the real data only where it lies on the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch with one thread each is faster than all of them with a thread per core. Set before
    # torch is imported, and handed on to the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def hh_helpful() -> Path:
    """Folder with `train.jsonl` and `eval.jsonl` of real HH-RLHF pairs; skips where it is absent."""
    root = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    if not root:
        pytest.skip("PRIVATE_RLHF_TEST_DATA is not set: it names the folder that holds hh_helpful/")
    folder = Path(root) / "hh_helpful"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist: PRIVATE_RLHF_TEST_DATA names the folder that holds hh_helpful/")
    return folder
