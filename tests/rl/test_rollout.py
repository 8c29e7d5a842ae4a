"""The rollout record, learning targets, and which prompt and minibatch come when."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.lm.rows import Sharing
from private_rlhf.rl.ppo_losses import generalised_advantages, whiten
from private_rlhf.rl.rollout import Rollout, learning_targets, minibatch_order, pad_numbers, prompt_index, shares


def rollout(**changes: torch.Tensor) -> Rollout:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    made = Rollout(
        prompts=[[1], [2, 3]],
        responses=[[4, 5], [6]],
        mask=mask,
        finished=torch.tensor([True, False]),
        logprobs=torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]]),
        reference_logprobs=torch.tensor([[-1.5, -1.0, 0.0], [-2.5, 0.0, 0.0]]),
        values=torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]]),
        reward=torch.tensor([2.0, 1.0]),
        bonus=torch.tensor([0.5, 0.0]),
        baseline=torch.tensor([0.0, 0.0]),
        scores=torch.tensor([1.5, 1.0]),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["logprobs", "reference_logprobs", "values", "reward", "bonus", "scores", "mask"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stops_before_the_update(name: str, bad: float) -> None:
    tensor = getattr(rollout(), name).clone()
    tensor.view(-1)[0] = bad
    with pytest.raises(FloatingPointError, match=f"rollout field '{name}' is not finite"):
        rollout(**{name: tensor})


def test_the_baseline_shifts_rewards_per_prompt_before_learning() -> None:
    settings = {"kl_coef": 0.0, "estimator": "k1", "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
    shifted = rollout(baseline=torch.tensor([1.0, 0.25]))
    expected = rollout(scores=torch.tensor([0.5, 0.75]))
    found, wanted = learning_targets(shifted, **settings), learning_targets(expected, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(found.returns, wanted.returns)
    assert not torch.equal(found.returns, learning_targets(rollout(), **settings).returns)  # type: ignore[arg-type]


def test_kl_sums_the_log_ratio_of_real_tokens() -> None:
    made = rollout(logprobs=torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]]))
    torch.testing.assert_close(made.log_ratio, torch.tensor([[0.5, -1.0, 0.0], [2.0, 0.0, 0.0]]))
    torch.testing.assert_close(made.kl, torch.tensor([-0.5, 2.0]))


def test_targets_are_gae_of_penalised_scores_and_whitened_only_when_asked() -> None:
    made = rollout()
    plain = learning_targets(made, kl_coef=0.1, estimator="k1", gamma=0.9, lam=0.8, whiten_advantages=False)
    rewards = torch.tensor([[-0.05, 0.1 + 1.5, 0.0], [-0.2 + 1.0, 0.0, 0.0]])
    advantages, returns = generalised_advantages(rewards, made.values, made.mask, 0.9, 0.8)
    torch.testing.assert_close(plain.advantages, advantages)
    torch.testing.assert_close(plain.returns, returns)
    white = learning_targets(made, kl_coef=0.1, estimator="k1", gamma=0.9, lam=0.8, whiten_advantages=True)
    torch.testing.assert_close(white.advantages, whiten(advantages, made.mask))
    torch.testing.assert_close(white.returns, returns)  # the value head learns returns as they are


@given(batches=st.integers(1, 20), size=st.integers(1, 16), seed=st.integers(0, 2**62))
def test_minibatches_are_a_permutation_and_a_pure_function(batches: int, size: int, seed: int) -> None:
    state = torch.get_rng_state()
    order = minibatch_order([[i] for i in range(batches * size)], size, seed)
    assert sorted(index for batch in order for index in batch) == list(range(batches * size))
    assert {len(batch) for batch in order} == {size}
    assert order == minibatch_order([[i] for i in range(batches * size)], size, seed)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_shuffle_minibatches_differently() -> None:
    orders = {str(minibatch_order([[i] for i in range(64)], 8, seed)) for seed in range(20)}
    assert len(orders) == 20


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 30), seed=st.integers(0, 10**6), epochs=st.integers(1, 3))
def test_every_prompt_comes_once_per_epoch(count: int, seed: int, epochs: int) -> None:
    found = [prompt_index(position, count, seed) for position in range(count * epochs)]
    for epoch in range(epochs):
        assert sorted(found[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [prompt_index(number * 40 + i, 40, seed) for i in range(40)]

    assert epoch(0, 1) != epoch(1, 1)
    assert epoch(0, 1) != epoch(0, 2)
    assert epoch(0, 1) == epoch(0, 1)


def test_padding_is_zero_on_the_right() -> None:
    found = pad_numbers([[1.0], [2.0, 3.0]], torch.device("cpu"))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_rollouts_of_one_prompt_share_a_minibatch() -> None:
    prompts = [[prompt] for prompt in range(8) for _ in range(4)]
    order = minibatch_order(prompts, 8, 0)
    assert sorted(i for batch in order for i in batch) == list(range(32))
    for batch in order:
        assert len({prompts[i][0] for i in batch}) == 2
    assert order != minibatch_order(prompts, 8, 1)


def test_processes_share_a_minibatch_in_equally_many_micro_batches() -> None:
    made = rollout()
    made.prompts = [[1, 2], [3], [1, 2], [4, 5, 6], [3], [7], [7, 7], [1, 2], [9]]
    made.responses = [[0] * (1 + n % 4) for n in range(9)]
    for sharing in (None, Sharing(10**9, 0)):
        for processes, size in ((1, 4), (2, 2), (4, 1), (4, 3)):
            found = [shares(made, [8, 7, 5, 4, 3, 2, 0], size, p, processes, sharing) for p in range(processes)]
            assert len({len(own) for own in found}) == 1
            assert all(len(batch) <= size for own in found for batch in own)
            rows = sorted(row for own in found for batch in own for row in batch)
            assert rows == [0, 2, 3, 4, 5, 7, 8]
    (alike,) = shares(made, [0, 2, 7], 4, 0, 1, Sharing(10**9, 0))
    assert sorted(alike) == [0, 2, 7]
