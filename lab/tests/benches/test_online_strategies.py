"""The bench of ways to ask: what was measured on other answers, or at another kl_coef, is not taken for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.online.posterior import Posterior
from private_rlhf_lab.benches import online_strategies as bench


def a_bed(kl_coef: float, seed: int = 0) -> bench.Bed:
    """Six answers to each of 60 prompts, as many held out."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for split in ("train", "eval"):
        tensors[f"{split}_features"] = torch.randn(60, 6, 2 * bench.COMPONENTS, generator=generator)
        tensors[f"{split}_truth"] = tensors[f"{split}_features"][..., 0].clone()
    return bench.Bed(tensors, kl_coef, 8.0)


def test_rows_are_of_one_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "EPSILONS", (2.0,))
    monkeypatch.setattr(bench, "ARMS", ("passive",))
    path, own = tmp_path / "arms.jsonl", a_bed(0.5)
    first = bench.arms(own, path, 2, bench.BATCH)
    assert len(first) == 2
    monkeypatch.setattr(bench, "ask", None)
    assert bench.arms(a_bed(0.5), path, 2, bench.BATCH) == first
    for other in (a_bed(0.2), a_bed(0.5, seed=1)):
        with pytest.raises(UserError, match="other data or settings"):
            bench.arms(other, path, 2, bench.BATCH)


def test_the_pessimistic_policy_by_hand() -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theta = torch.tensor([0.4, 0.1, -0.3], dtype=torch.float64)
    information = torch.diag(torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64))
    policy = bench.pessimistic_policy(Posterior(theta, information, 1.0, LabelNoise.of(1.0), None, 0.5), x)
    for row, found in zip(x, policy, strict=True):
        centred = [g - row.mean(dim=0) for g in row]
        score = [float(g @ theta) - float(c @ torch.linalg.inv(information) @ c) ** 0.5
                 for g, c in zip(row, centred, strict=True)]  # fmt: skip
        weight = torch.tensor(score).div(0.5).exp()
        assert found.tolist() == pytest.approx((weight / weight.sum()).tolist())
