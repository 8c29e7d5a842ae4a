"""Fixtures for every test. No network; the real data only where it lies on the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from pipeline_runs import Workspace

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch with one thread each is faster than all of them with a thread per core. Set before
    # torch is imported, and handed on to the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, and no time limit: the machine may be busy with something else.
hypothesis.settings.register_profile("deterministic", deadline=None, derandomize=True)
hypothesis.settings.load_profile("deterministic")


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


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Key and base model shared by the runs of the session."""
    return Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def finished_run(workspace: Workspace) -> Path:
    """The run directory of one complete tiny run; tests read it or work on a copy."""
    run = workspace.root / "finished"
    workspace.run(run)
    return run


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    """fsync does nothing: a test that kills processes, not the machine, cannot tell, and need not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
