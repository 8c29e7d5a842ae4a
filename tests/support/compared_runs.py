"""Runs as `private-rlhf compare` reads them."""

from __future__ import annotations

import numpy as np
from private_rlhf.evaluation.runs import Run

TERMS = {"judge": "embedded", "kl_coef": "0.5", "truth": "embedded", "sampling": "temperature 1"}


def a_run(name: str, better: float, seed: int, count: int = 120, first: int = 0, known: bool = True) -> Run:
    """Gains that hang on the prompt far more than on the run."""
    generator, own = np.random.default_rng(0), np.random.default_rng(seed)
    hardness = generator.normal(0, 3, 1000)
    rows = {}
    for place in range(first, first + count):
        gain = float(hardness[place] + better + own.normal(0, 0.3))
        row = {"kl": 0.5 + 0.01 * float(own.normal()), "win": float(gain > 0), "longer": int(own.integers(-5, 6))}
        row["verdicts"] = [row["win"]]
        rows[f"prompt {place}"] = row | {"objective_gain": gain if known else None, "true_reward": None}
    return Run(name, 2.0, "ppo", seed, "π_ref", TERMS, rows)
