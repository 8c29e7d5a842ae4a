"""References and evaluation are drawn as PPO draws; the baseline does not hang on Γ."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import prompt_key
from private_rlhf.evaluation.evaluation_sampler import Sampler
from private_rlhf.lm import drawing
from private_rlhf.lm.drawing import TransformersEngine
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import response_forward, token_batch
from private_rlhf.reward_models.scorer import RewardScorer, Scores
from support.ppo_problem import Problem
from support.recipes import recipe_of

HOT = 2.5


@torch.no_grad()
def at(problem: Problem, model: Any, prompt: str, temperature: float) -> torch.Tensor:
    """(57,) log π(response | prompt) at a temperature."""
    rows = problem.responses
    batch = token_batch([problem.renderer.prompt_ids(prompt)] * len(rows), rows, 0, torch.device("cpu"))
    logits, _ = response_forward(model, batch)
    return batch.spread(token_logprobs(logits, batch.tokens, temperature)).sum(dim=1)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Sampling]:
    """How everything is sampled, in order."""
    seen: list[Sampling] = []
    plain = drawing.sample_responses

    def record(model: Any, prompts: Any, keys: Any, sampling: Sampling, **more: Any) -> Any:
        seen.append(sampling)
        return plain(model, prompts, keys, sampling, **more)

    monkeypatch.setattr(drawing, "sample_responses", record)
    return seen


def test_reference_completions_are_drawn_as_the_rollouts_are(problem: Any, sampled: list[Sampling]) -> None:
    """Else they were no samples of the policy, from which the first iteration may learn."""
    problem.references = {}
    problem.trainer(temperature=HOT, top_p=0.9, rollouts=4, minibatch_size=4).collect(0)
    assert sampled == [Sampling(2, HOT, 0.9)] * 2


def test_nothing_draws_by_the_checkpoint_s_own_sampling_defaults(problem: Any) -> None:
    """Published checkpoints carry the sampling that their makers advise for chats; samples must be the policy's own."""

    def drawn() -> tuple[Any, Any, Any]:
        problem.references = {}
        made = problem.trainer(rollouts=32, minibatch_size=32)
        rollout, _ = made.collect(0)
        drawer = TransformersEngine(None, problem.renderer.tokenizer, 256)
        how: Any = (problem.renderer, problem, None, Sampling(2), 0, drawer)
        sampler = Sampler(Accelerator(cpu=True), made.policy, copy.deepcopy(problem.model), *how)
        return rollout.responses, dict(problem.references), sampler.measure(list(enumerate(problem.prompts)), 8, 8)

    problem.use_bonus = False
    problem.score = lambda prompts, responses, progress=None: Scores(*torch.zeros(3, len(responses)))
    expected = drawn()
    greedy = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0}
    problem.model.generation_config.update(**greedy)
    found = drawn()
    assert len({tuple(row) for row in expected[0]}) > 5
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][prompt], expected[1][prompt]) for prompt in expected[1])
    assert found[2] == expected[2]


def test_the_evaluation_draws_and_measures_at_the_temperature(problem: Any, sampled: list[Sampling]) -> None:
    policy = problem.trainer().policy
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    problem.use_bonus = False
    problem.score = lambda prompts, responses, progress=None: Scores(*torch.zeros(3, len(responses)))
    how = Sampling(2, temperature=HOT)
    drawer = TransformersEngine(None, problem.renderer.tokenizer, 256)
    made = Sampler(Accelerator(cpu=True), policy, problem.model, problem.renderer, problem, None, how, 0, drawer)
    (result,) = made.measure([(0, problem.prompts[0])], samples_per_prompt=200, candidates=0)
    assert set(sampled) == {how}
    reference, learnt = (at(problem, model, problem.prompts[0], HOT) for model in (problem.model, policy))
    exact = float((learnt.exp() * (learnt - reference)).sum())
    found = torch.tensor([answer.kl for answer in result.policy])
    error = float(found.std() / math.sqrt(len(found)))
    assert exact > 20 * error
    assert abs(float(found.mean()) - exact) < 4 * error


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ppo": {"top_p": 0.9}}, r"ppo\.top_p 0\.9 .* Gibbs .*: set evaluate\.gibbs_candidates: 0, or ppo\.top_p: 1"),
        ({"aligner": "dpo", "ppo": {"temperature": 0.7}}, r"ppo\.temperature must be 1 for aligner dpo"),
        (
            {"ppo": {"reference_rollouts": True, "baseline": False}, "reward": {"kappa": 0}},
            r"ppo\.reference_rollouts requires ppo\.baseline or reward\.kappa > 0",
        ),
    ],
)
def test_recipes_whose_draws_do_not_fit_are_refused_in_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        recipe_of(**more)
    assert "\n" not in str(caught.value)
    fits = {"ppo": {"top_p": 0.9, "reference_rollouts": True}, "evaluate": {"gibbs_candidates": 0}}
    recipe_of(**fits, reward={"kappa": 0})


class Linear:
    """A reward model whose features are its rewards."""

    reward_bound = None
    weight = torch.ones(1)

    def raw_score_of(self, features: torch.Tensor) -> torch.Tensor:
        return features.sum(dim=1)


def scorer(**how: bool) -> RewardScorer:
    checkpoint: Any = SimpleNamespace(model=Linear(), bonus=None)
    renderer: Any = None
    return RewardScorer(checkpoint, renderer, use_bonus=False, **how)


def test_without_pessimism_the_baseline_stays_unless_it_is_switched_off() -> None:
    """kappa 0 removed it too, so that an ablation of pessimism changed the control variate as well."""
    kept, off = scorer(use_baseline=True), scorer()
    assert off.has_reference("a")
    assert not kept.has_reference("a")
    kept.add_reference("a", torch.tensor([[1.0], [3.0]]))
    assert kept.has_reference("a")
    features = torch.tensor([[5.0], [7.0]])
    for made, baseline in ((kept, [2.0, 2.0]), (off, [0.0, 0.0])):
        found = made.score_features(["a", "a"], features)
        assert (found.reward.tolist(), found.bonus.tolist(), found.baseline.tolist()) == ([5, 7], [0, 0], baseline)


def test_a_trainer_without_pessimism_learns_against_the_mean_of_its_references(problem: Any) -> None:
    made = scorer(use_baseline=True)
    made.features = problem.features  # type: ignore[method-assign]
    made.score = lambda prompts, texts: made.score_features(prompts, problem.features(prompts, texts))  # type: ignore[method-assign, assignment, misc]
    learner = problem.trainer(rollouts=8, minibatch_size=8)
    learner.scorer = made
    rollout, _ = learner.collect(0)
    assert set(made.references) == {prompt_key(prompt) for prompt in problem.prompts}
    assert rollout.baseline.abs().min() > 0
    assert not rollout.bonus.any()
