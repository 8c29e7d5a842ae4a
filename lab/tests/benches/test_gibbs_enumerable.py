"""The enumerable problem: shares with known answers, losses whose optimum is the Gibbs policy, gradients of J."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_rlhf_lab.benches import gibbs_enumerable as bench
from private_rlhf_lab.benches.gibbs_losses import LOSSES


def test_pi_ref_has_none_of_the_gain_and_the_gibbs_policy_all() -> None:
    problems = bench.make_problems([3, 4])
    gibbs = (problems.reference + problems.reward / bench.KL_COEF).log_softmax(-1)
    assert problems.reference.exp().sum(-1) == pytest.approx(1.0)
    assert problems.share(problems.reference) == pytest.approx(0.0)
    assert problems.share(gibbs) == pytest.approx(1.0)
    noise = torch.randn(gibbs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (problems.share((gibbs + 0.1 * noise).log_softmax(-1)) < 1).all()


@pytest.mark.parametrize("loss", ["variance", "listwise", "rebel", "soft_dpo"])
def test_nothing_moves_the_gibbs_policy(loss: str) -> None:
    """Log-ratios that are r̂/β and a constant of the prompt have a gradient of 0, and others do not."""
    generator = torch.Generator().manual_seed(0)
    utility = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    at_optimum = (utility - torch.randn(4, 1, generator=generator)).requires_grad_()
    elsewhere = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    zero, some = (torch.autograd.grad(LOSSES[loss](each, utility), each)[0] for each in (at_optimum, elsewhere))
    assert zero.abs().max() < 1e-12
    assert some.abs().max() > 1e-3


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_policy_gradients_are_those_of_the_objective(method: str) -> None:
    """On 50,000 draws of a policy away from π_ref, first step."""
    problems = bench.make_problems([0])
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(problems.logits.shape, generator=generator, dtype=torch.float64)
    table = (problems.logits + 0.5 * noise).requires_grad_()
    logs = bench.token_logprobs(table)
    picked = bench.sample(logs.detach().sum(-1), 50_000, generator)
    value = torch.zeros(1, bench.PROMPTS, 1 + bench.VOCABULARY, dtype=torch.float64)
    critic = bench.Adam(value, torch.ones(1))
    loss = bench.policy_gradient(method, problems, logs, logs.detach(), picked, value, critic, 0.0)
    (estimate,) = torch.autograd.grad(loss, table, retain_graph=True)
    (exact,) = torch.autograd.grad(-problems.objective(logs.sum(-1)).sum(), table)
    assert torch.cosine_similarity(estimate.flatten(), exact.flatten(), dim=0) > 0.99
    assert float(estimate.norm() / exact.norm()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("method", "rate", "share"), [("variance", 0.3, 0.98), ("weighted", 0.1, 0.95)])
def test_many_draws_teach_the_gibbs_policy(method: str, rate: float, share: float) -> None:
    problems = bench.make_problems([0])
    assert problems.share(bench.learn(method, problems, torch.full((1,), rate), 4096, 512)) >= share


def test_draws_needed_lie_between_two_counts_by_their_logarithms() -> None:
    rows: list[bench.Row] = [{"draws_per_prompt": 16, "share": 0.7}, {"draws_per_prompt": 64, "share": 0.9}]
    assert bench.needed(rows, 0.8) == "32"
    assert bench.needed(rows, 0.5) == "≤ 16"
    assert bench.needed(rows, 0.95) == "> 64"


def test_the_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished row is not measured again."""
    monkeypatch.setattr(bench, "METHODS", ("listwise",))
    monkeypatch.setattr(bench, "STEPS", 4)
    table = bench.run(tmp_path, 2, counts=(16,))
    assert "listwise | equal steps" in table
    monkeypatch.setattr(bench, "cell", None)
    assert bench.run(tmp_path, 2, counts=(16,)) == table
