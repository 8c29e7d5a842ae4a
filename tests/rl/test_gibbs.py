"""PPO against the exact answer: on an enumerable problem it reaches 95 % of J(Gibbs) − J(π_ref)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

KL_COEF = 1.0
ITERATIONS = 40


def test_the_yardstick_itself(problem: Any) -> None:
    """π_ref gains 0, the Gibbs policy gains 1, and nothing gains more."""
    assert problem.gain(problem.model, KL_COEF) == pytest.approx(0, abs=1e-9)
    prompt = problem.prompts[0]
    reference, reward = problem.log_probabilities(problem.model, prompt), problem.reward_vector(prompt)
    assert float(reference.exp().sum()) == pytest.approx(1, abs=1e-5)

    def objective(log_policy: torch.Tensor) -> float:
        return float((log_policy.exp() * (reward - KL_COEF * (log_policy - reference))).sum())

    best = float(KL_COEF * (reference + reward / KL_COEF).logsumexp(0))
    gibbs = torch.log_softmax(reference + reward / KL_COEF, dim=0)
    assert objective(gibbs) == pytest.approx(best, abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = 0.1 * torch.randn(57, generator=generator, dtype=torch.float64)
        assert objective(torch.log_softmax(gibbs + noise, dim=0)) < best


@pytest.mark.parametrize(("lora", "learning_rate"), [(True, 5e-3), (False, 1e-3)], ids=["lora", "full"])
def test_ppo_reaches_the_gibbs_policy(problem: Any, lora: bool, learning_rate: float) -> None:
    """The mean of three seeds: after some iterations a trajectory turns by the last bits of a processor's sums."""
    gains = []
    for seed in range(3):
        trainer = problem.trainer(
            lora,
            seed,
            rollouts=128,
            minibatch_size=64,
            ppo_epochs=3,
            learning_rate=learning_rate,
            value_learning_rate=1e-2,
            kl_coef=KL_COEF,
            iterations=ITERATIONS,
            lr_schedule="linear",  # at a constant rate, what is left is the noise of the last steps
        )
        for iteration in range(ITERATIONS):
            trainer.update(trainer.collect(iteration)[0], iteration)
        gains.append(problem.gain(trainer.policy, KL_COEF))
    shown = ", ".join(f"{gain:.1%}" for gain in gains)
    print(f"\nPPO, {'LoRA' if lora else 'all weights'}: {shown} of J(Gibbs) - J(pi_ref)")  # pytest -s shows it
    assert sum(gains) / 3 >= 0.95
    assert max(gains) <= 1.0
