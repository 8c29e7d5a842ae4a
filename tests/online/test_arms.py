"""Passive and offline arms beside a run: their rows, their regret, and what pessimism does."""

from __future__ import annotations

import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.online.pool import Candidates, Pool
from private_rlhf.online.posterior import Learner, Posterior
from private_rlhf.online.rounds import other_arms, regret_of
from private_rlhf.recipe import OnlineConfig

KL = 0.5


def a_pool(known: bool = True, prompts: int = 24, answers: int = 4) -> Pool:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(prompts, answers, 3, generator=generator, dtype=torch.float64)
    texts = [[f"{row} {place}" for place in range(answers)] for row in range(prompts)]
    ratio = 0.3 * torch.randn(prompts, answers, generator=generator)
    drawn = Candidates([f"prompt {row}" for row in range(prompts)], texts, x.float(), ratio)
    return Pool(drawn, x, x @ torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) if known else None)


def arms(kappa: float, epsilon: float = 4.0) -> dict[str, list[dict[str, float]]]:
    settings = OnlineConfig(rounds=3, questions=40, kappa=kappa)
    learner = Learner(3, LabelNoise.of(epsilon), None, KL)
    return other_arms(a_pool(), learner, settings, torch.Generator().manual_seed(0))


def test_both_arms_have_a_row_a_round_and_learn() -> None:
    found, best = arms(1.0), a_pool().best(KL)
    for rows in found.values():
        assert [row["labels"] for row in rows] == [40, 80, 120]
        assert 0.5 * best < rows[-1]["gibbs_objective_gain"] <= best
    assert [row["regret"] for row in found["offline"]] == pytest.approx([40 * best, 80 * best, 120 * best])
    passive, pool = [row["regret"] for row in found["passive"]], a_pool()
    assert passive[0] == pytest.approx(40 * (best - pool.gain(_ignorant().policy(pool.x, pool.log_ratio), KL)))
    assert passive[0] < passive[1] < passive[2] < 120 * best


def test_without_pessimism_offline_is_passive() -> None:
    found = arms(0.0)
    gains = [[row["gibbs_objective_gain"] for row in rows] for rows in found.values()]
    assert gains[0] == pytest.approx(gains[1])


def test_a_pool_without_truth_has_no_arms() -> None:
    with pytest.raises(ValueError, match="known truth"):
        other_arms(a_pool(known=False), Learner(3, LabelNoise.of(1.0), None, KL), OnlineConfig(), torch.Generator())
    assert regret_of(_ignorant(), a_pool(known=False), 40) == 0.0


def test_the_pessimistic_policy_by_hand() -> None:
    pool = a_pool(prompts=2)
    theta = torch.tensor([0.4, 0.1, -0.3], dtype=torch.float64)
    information = torch.diag(torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64))
    held = Posterior(theta, information, 1.0, LabelNoise.of(1.0), None, KL)
    policy = held.pessimistic_policy(pool.x, 2.0, pool.log_ratio)
    for row in range(2):
        reference = torch.softmax(pool.log_ratio[row], dim=0)
        mean = sum(p * g for p, g in zip(reference, pool.x[row], strict=True))
        gamma = [2.0 * float((g - mean) @ torch.linalg.inv(information) @ (g - mean)) ** 0.5 for g in pool.x[row]]
        score = torch.stack([g @ theta for g in pool.x[row]]) - torch.tensor(gamma, dtype=torch.float64)
        weight = reference * torch.exp(score / KL)
        assert policy[row].tolist() == pytest.approx((weight / weight.sum()).tolist())


def _ignorant() -> Posterior:
    return Learner(3, LabelNoise.of(4.0), None, KL).posterior
