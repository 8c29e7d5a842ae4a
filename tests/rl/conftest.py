"""The enumerable problem of tests/support/ppo_problem.py for every test here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from private_rlhf.rl.ppo_trainer import PpoTrainer
from support.ppo_problem import Problem, make_problem


@pytest.fixture
def problem() -> Problem:
    """See `make_problem`."""
    return make_problem()


@pytest.fixture
def trainable() -> Callable[[PpoTrainer], dict[str, torch.Tensor]]:
    """Copies of a trainer's trainable tensors by name."""

    def snapshot(trainer: PpoTrainer) -> dict[str, torch.Tensor]:
        named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}

    return snapshot
