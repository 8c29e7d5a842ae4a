"""The PPO trainer: what one iteration collects, what an update changes, and what it must not depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_rlhf.recipe import LoraSettings
from private_rlhf.reward_models.scorer import Scores
from private_rlhf.rl import reader
from private_rlhf.rl.ppo_trainer import PpoTrainer, make_optimizer

Snapshot = Callable[[PpoTrainer], dict[str, torch.Tensor]]
SMALL = {"rollouts": 16, "minibatch_size": 8, "ppo_epochs": 2, "learning_rate": 1e-3, "value_learning_rate": 1e-3}
BOTH = pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])


def parameters(trainer: PpoTrainer, trainable: bool) -> dict[str, torch.Tensor]:
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {name: tensor.detach().clone() for name, tensor in named if tensor.requires_grad == trainable}


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


# --- collecting -------------------------------------------------------------------------------------------------------


@BOTH
def test_kl_is_exactly_zero_at_step_zero_and_not_later(problem: Any, lora: bool) -> None:
    trainer = problem.trainer(lora, **SMALL)
    rollout, _ = trainer.collect(0)
    assert torch.equal(rollout.logprobs, rollout.reference_logprobs)
    assert not rollout.kl.any()
    trainer.update(rollout, 0)
    later, _ = trainer.collect(1)
    assert later.log_ratio.abs().max() > 1e-4


@BOTH
def test_the_reference_stays_pi_ref_while_the_policy_moves(problem: Any, lora: bool) -> None:
    trainer = problem.trainer(lora, **SMALL)
    trainer.update(trainer.collect(0)[0], 0)
    rollout, _ = trainer.collect(1)
    responses = problem.responses
    for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        text = problem.renderer.text(prompt)
        position = responses.index(response)
        for model, found in ((problem.model, rollout.reference_logprobs), (trainer.policy, rollout.logprobs)):
            exact = float(problem.log_probabilities(model, text)[position])
            assert float(found[row].sum()) == pytest.approx(exact, abs=1e-4)


def test_a_rollout_holds_what_was_sampled_and_its_own_scores(problem: Any) -> None:
    trainer = problem.trainer(**SMALL, missing_eos_penalty=0.25)
    rollout, seconds = trainer.collect(3)
    assert set(seconds) == {"generate", "score"}
    for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        reward = problem.rewards[problem.renderer.text(prompt), problem.renderer.text(response)]
        ended = response[-1] == 1
        assert rollout.reward[row].item() == pytest.approx(reward)
        assert bool(rollout.finished[row]) == ended
        assert rollout.scores[row].item() == pytest.approx(reward - (0 if ended else 0.25))
        assert rollout.mask[row].tolist() == [1.0] * len(response) + [0.0] * (rollout.mask.shape[1] - len(response))
    counts = [rollout.prompts.count(problem.renderer.prompt_ids(prompt)) for prompt in problem.prompts]
    assert counts == [8, 8]
    assert not rollout.values.any()  # the value head starts at zero


def test_an_iteration_can_ask_for_several_responses_to_a_prompt(problem: Any) -> None:
    rollout, _ = problem.trainer(**SMALL, samples_per_prompt=8).collect(1)
    first, second = (problem.renderer.prompt_ids(prompt) for prompt in problem.prompts)
    assert rollout.prompts in ([first] * 8 + [second] * 8, [second] * 8 + [first] * 8)
    assert len({tuple(response) for response in rollout.responses}) > 2


def test_pessimism_enters_the_score(problem: Any) -> None:
    def score(prompts: list[str], responses: list[str]) -> Scores:
        return Scores(torch.full((len(prompts),), 2.0), torch.full((len(prompts),), 0.5), torch.zeros(len(prompts)))

    problem.score = score
    rollout, _ = problem.trainer(**SMALL).collect(0)
    assert rollout.scores.unique().tolist() == [1.5]


def test_what_is_sampled_depends_on_the_seed_and_the_iteration_alone(problem: Any) -> None:
    first = problem.trainer(**SMALL).collect(2)[0]
    again = problem.trainer(**SMALL, generate_batch_size=3).collect(2)[0]
    assert first.responses == again.responses
    assert first.prompts == again.prompts
    torch.testing.assert_close(first.logprobs, again.logprobs, atol=1e-5, rtol=0)
    assert problem.trainer(**SMALL).collect(3)[0].responses != first.responses
    assert problem.trainer(**SMALL, seed=1).collect(2)[0].responses != first.responses


# --- updating ---------------------------------------------------------------------------------------------------------


@BOTH
def test_every_trainable_tensor_moves_at_the_paper_s_rate_and_no_frozen_one(problem: Any, lora: bool) -> None:
    trainer = problem.trainer(lora, rollouts=16, minibatch_size=4, learning_rate=1e-6, value_learning_rate=5e-6)
    before, frozen = parameters(trainer, True), parameters(trainer, False)
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    assert any("value_head" in name for name in before)
    assert bool(frozen) == lora
    trainer.update(trainer.collect(0)[0], 0)
    after = parameters(trainer, True)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert gap(before, after) < 1e-3
    assert not frozen or gap(frozen, parameters(trainer, False)) == 0
    if not lora:
        reference = dict(trainer.reader.reference.named_parameters())
        assert gap({k: v.detach() for k, v in problem.model.named_parameters()}, reference) == 0


@BOTH
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_micro_batches_do_not_change_the_update(problem: Any, lora: bool, micro_batch_size: int) -> None:
    results = []
    for size in (None, micro_batch_size):
        how = {**SMALL, "ppo_epochs": 1, "optimizer": "sgd", "learning_rate": 0.1}  # Adam would enlarge rounding
        trainer = problem.trainer(lora, **how, micro_batch_size=size, entropy_coef=0.01)
        rollout, _ = trainer.collect(0)
        metrics = trainer.update(rollout, 0)
        results.append((parameters(trainer, True), metrics))
    assert gap(results[0][0], results[1][0]) < 2e-6
    for name, value in results[0][1].items():
        assert results[1][1][name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.usefixtures("kernels")
def test_updates_that_leave_the_frozen_layers_out_are_the_same(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = LoraSettings(rank=4, last_layers=1, target_modules=["q_proj", "down_proj"])
    results = []
    for kept in (1 << 30, 0):
        monkeypatch.setattr(reader, "KEPT_BYTES", kept)
        trainer = problem.trainer(adapter, **SMALL, entropy_coef=0.01)
        rollouts, metrics = [trainer.collect(0)[0]], []
        assert bool(trainer.reader._states) == (kept > 0)
        metrics.append(trainer.update(rollouts[0], 0))
        rollouts.append(trainer.collect(1)[0])
        metrics.append(trainer.update(rollouts[1], 1))
        results.append((parameters(trainer, True), metrics, rollouts[1].responses, rollouts[0].kl.abs().max()))
    assert gap(results[0][0], results[1][0]) < 2e-6
    assert results[0][2] == results[1][2]
    assert results[0][3] == 0  # the policy is π_ref before it learns, to the last bit
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_the_order_inside_a_minibatch_does_not_change_the_update(problem: Any) -> None:
    from private_rlhf.rl.rollout import learning_targets

    results = []
    for picked in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]):
        trainer = problem.trainer(**SMALL, micro_batch_size=2)
        rollout, _ = trainer.collect(0)
        targets = learning_targets(rollout, kl_coef=0.1, estimator="k1", gamma=1.0, lam=0.95, whiten_advantages=True)
        trainer._step(rollout, targets, picked, 0)
        results.append(parameters(trainer, True))
    assert gap(results[0], results[1]) < 1e-6


def test_the_loss_of_a_step_is_the_mean_over_its_tokens(problem: Any) -> None:
    """Against the formulas on the rollout's own numbers: at the sampling policy the ratio is 1."""
    from private_rlhf.rl.rollout import learning_targets

    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(0)
    targets = learning_targets(rollout, kl_coef=0.1, estimator="k1", gamma=1.0, lam=0.95, whiten_advantages=True)
    found = trainer._step(rollout, targets, list(range(16)), 0)
    tokens = rollout.mask.sum()
    assert found["policy_loss"] == pytest.approx(float(-(targets.advantages * rollout.mask).sum() / tokens), abs=1e-5)
    expected = float(0.5 * (targets.returns.square() * rollout.mask).sum() / tokens)  # values are 0 still
    assert found["value_loss"] == pytest.approx(expected, rel=1e-4)
    assert found["clip_fraction"] == 0
    assert found["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_warm_up_moves_the_value_head_alone(problem: Any) -> None:
    trainer = problem.trainer(**SMALL, warmup_iterations=1, entropy_coef=0.01)
    before = parameters(trainer, True)
    trainer.update(trainer.collect(0)[0], 0)
    moved = {name for name, tensor in parameters(trainer, True).items() if not torch.equal(tensor, before[name])}
    assert moved == {"value_head.weight", "value_head.bias"}
    trainer.update(trainer.collect(1)[0], 1)
    assert gap(before, parameters(trainer, True)) > 1e-4


def test_gradients_of_policy_and_value_head_are_clipped_apart(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = problem.trainer(**SMALL, max_grad_norm=1e-3)
    norms = []
    step = trainer.optimizer.step

    def record() -> None:
        for group in trainer.optimizer.param_groups:
            held = [p.grad for p in group["params"] if p.grad is not None]
            norms.append(float(torch.stack([gradient.norm() for gradient in held]).norm()))
        step()

    monkeypatch.setattr(trainer.optimizer, "step", record)
    metrics = trainer.update(trainer.collect(0)[0], 0)
    assert norms == pytest.approx([1e-3] * 8, rel=1e-2)
    assert min(metrics["grad_norm"], metrics["value_grad_norm"]) > 1e-3  # what is logged is the norm before clipping


def test_a_gradient_that_is_not_finite_stops_before_the_step(problem: Any) -> None:
    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(0)
    before = parameters(trainer, True)
    trainer.model.value_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="gradient norm is nan at iteration 0"):
        trainer.update(rollout, 0)
    assert gap(before, parameters(trainer, True)) == 0


def test_the_entropy_bonus_spreads_the_policy(problem: Any) -> None:
    problem.rewards = dict.fromkeys(problem.rewards, 0.0)
    entropies = []
    for coefficient in (0.0, 0.3):
        trainer = problem.trainer(**{**SMALL, "rollouts": 32}, entropy_coef=coefficient, kl_coef=1e-3)
        for iteration in range(10):
            metrics = trainer.update(trainer.collect(iteration)[0], iteration)
        log_probability = problem.log_probabilities(trainer.policy, problem.prompts[0])
        entropies.append(float(-(log_probability.exp() * log_probability).sum()))
        assert (metrics["entropy"] > 0) == (coefficient > 0)  # not computed when not used
    assert entropies[1] > entropies[0] + 0.05


def test_the_adaptive_coefficient_follows_the_kl(problem: Any) -> None:
    trainer = problem.trainer(**SMALL, kl_coef=0.1, kl_target=1.0, kl_horizon=100)
    trainer.update(trainer.collect(0)[0], 0)
    assert trainer.controller.value == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))  # KL was 0, below its target


def test_policy_and_value_head_have_rates_of_their_own(problem: Any) -> None:
    trainer = problem.trainer(**{**SMALL, "value_learning_rate": 0.5})
    policy, value = make_optimizer(trainer.accelerator.unwrap_model(trainer.model), trainer.config).param_groups
    assert (policy["lr"], value["lr"]) == (1e-3, 0.5)
    assert (policy["weight_decay"], policy["eps"]) == (0.0, 1e-8)
    assert [tuple(tensor.shape) for tensor in value["params"]] == [(1, 64), (1,)]


def test_the_value_head_learns_the_return_without_moving_the_policy_s_states(problem: Any) -> None:
    """A constant reward of 2, only the head learning: V → 2 everywhere."""
    problem.rewards = dict.fromkeys(problem.rewards, 2.0)
    trainer = problem.trainer(
        **{**SMALL, "value_learning_rate": 0.02, "value_clip_range": 100.0}, warmup_iterations=100, max_grad_norm=100.0
    )
    for iteration in range(25):
        metrics = trainer.update(trainer.collect(iteration)[0], iteration)
    rollout, _ = trainer.collect(99)
    assert (rollout.values[rollout.mask.bool()] - 2.0).abs().max() < 0.2
    assert metrics["value_loss"] < 0.01
    assert not rollout.kl.any()


def test_a_linear_schedule_falls_to_zero_over_the_iterations(problem: Any) -> None:
    trainer = problem.trainer(True, iterations=4, lr_schedule="linear", learning_rate=8e-3, value_learning_rate=4e-2)
    for iteration, scale in enumerate((1.0, 0.75, 0.5, 0.25)):
        trainer.update(trainer.collect(iteration)[0], iteration)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([8e-3 * scale, 4e-2 * scale])
