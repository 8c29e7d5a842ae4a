"""docs/examples/private_ppo_loop.py: the loop that is written out gives the numbers of PpoTrainer, and it learns."""

from __future__ import annotations

import copy
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import PpoTrainer

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "private_ppo_loop.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_the_loop_equals_the_trainer(example: dict[str, Any], tmp_path: Path) -> None:
    """Losses, KL and rewards of each iteration, to float32 rounding."""
    policy, tokenizer = example["load"](tmp_path)
    settings = example["ppo"].__globals__["SETTINGS"] = replace(example["SETTINGS"], iterations=4, learning_rate=3e-3)
    reward = example["PessimisticReward"](copy.deepcopy(policy), tokenizer, pairs=64)
    trainer = PpoTrainer.from_policy(
        copy.deepcopy(policy), tokenizer, reward, example["PROMPTS"], settings, max_response_tokens=example["CAP"]
    )
    entries = trainer.train()
    history = example["ppo"](policy, tokenizer, reward)
    assert [set(row) for row in history] == [{"reward", "kl", "policy_loss", "value_loss"}] * 4
    assert abs(history[-1]["kl"]) > 0.05  # it moved, so that the comparison can fail
    for row, entry in zip(history, entries, strict=True):
        assert row == pytest.approx({name: entry[name] for name in row}, rel=1e-3, abs=1e-5)
