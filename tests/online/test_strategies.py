"""Which pairs are asked: against brute force, and by released answers alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.online.pool import AnsweredPairs, Candidates, OpenPairs, Pool
from private_rlhf.online.posterior import Learner, Posterior
from private_rlhf.online.rounds import measure
from private_rlhf.online.strategies import STRATEGIES, Strategy, by_information, choose
from private_rlhf.reward_models.losses import fisher_weight

NOISE, KL = LabelNoise.of(1.0), 0.5


def candidates(prompts: int = 5, answers: int = 4, components: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, answers, components, generator=generator, dtype=torch.float64)


def posterior(components: int = 3, seed: int = 1, bound: float | None = 8.0) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(components, generator=generator, dtype=torch.float64)
    root = torch.randn(components, components, generator=generator, dtype=torch.float64)
    return Posterior(theta, root @ root.T + torch.eye(components, dtype=torch.float64), 1.0, NOISE, bound, KL)


def all_pairs(x: torch.Tensor) -> OpenPairs:
    """Of candidates whose texts all differ."""
    return OpenPairs.among(torch.arange(x.shape[1]).expand(x.shape[:2]))


def fresh(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_pair(x: torch.Tensor) -> list[tuple[int, int, int]]:
    return [(s, i, j) for s in range(x.shape[0]) for i, j in itertools.combinations(range(x.shape[1]), 2)]


def information_of(held: Posterior, x: torch.Tensor, pair: tuple[int, int, int]) -> torch.Tensor:
    s, i, j = pair
    difference = held.gradient(x[s, i]) - held.gradient(x[s, j])
    weight = fisher_weight((held.reward(x[s, i]) - held.reward(x[s, j]))[None], NOISE)
    return weight * torch.outer(difference, difference)


def policy_variance(held: Posterior, x: torch.Tensor, information: torch.Tensor) -> float:
    """E_s Σ_a π(a)·(centred g)ᵀ H⁻¹ (centred g), one answer at a time."""
    total, inverse = 0.0, torch.linalg.inv(information)
    for s in range(len(x)):
        weights = torch.softmax(held.reward(x[s]) / KL, dim=0)
        gradients = held.gradient(x[s])
        mean = (weights[:, None] * gradients).sum(dim=0)
        total += sum(float(w * ((g - mean) @ inverse @ (g - mean))) for w, g in zip(weights, gradients, strict=True))
    return total / len(x)


@pytest.mark.parametrize("strategy", ["fisher", "policy"])
@pytest.mark.parametrize("bound", [8.0, None])
def test_designs_are_the_greedy_choice_by_brute_force(strategy: Strategy, bound: float | None) -> None:
    x, held = candidates(), posterior(bound=bound)
    picked = [tuple(row) for row in choose(strategy, held, x, all_pairs(x), 6, fresh()).tolist()]
    information, left = held.information.clone(), every_pair(x)
    for found in picked:
        def value(pair: tuple[int, int, int], before: torch.Tensor = information) -> float:
            after = before + information_of(held, x, pair)
            return float(torch.logdet(after)) if strategy == "fisher" else -policy_variance(held, x, after)

        assert value(found) == pytest.approx(max(map(value, left)), rel=1e-9)  # type: ignore[arg-type]
        information += information_of(held, x, found)  # type: ignore[arg-type]
        left.remove(found)  # type: ignore[arg-type]


def test_the_most_informative_pair_comes_first_by_brute_force() -> None:
    x, held = candidates(), posterior()
    picked = choose("passive", held, x, all_pairs(x), 6, fresh())
    ordered, left = by_information(held, x, picked).tolist(), picked.tolist()
    information = held.information.clone()
    for pair in ordered:
        values = {tuple(each): float(torch.logdet(information + information_of(held, x, tuple(each)))) for each in left}
        assert values[tuple(pair)] == pytest.approx(max(values.values()), rel=1e-12)
        information += information_of(held, x, tuple(pair))
        left.remove(pair)
    assert not left


# --- an ε of each answer ----------------------------------------------------------------------------------------------

LEVELS = (0.5, 4.0)


def answers_at(epsilons: list[float], seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LevelledNoise]:
    """Coordinates of both sides, fair coins, and their noise."""
    one, other = candidates(2, len(epsilons), seed=seed)
    z = torch.where(torch.rand(len(epsilons), generator=fresh(seed)) < 0.5, 1.0, -1.0).double()
    return one, other, z, LevelledNoise.of(LEVELS, epsilons)


def test_a_learner_reads_each_answer_at_its_own_epsilon() -> None:
    """By the slope of −Σ log P̃ᵢ, P̃ᵢ = αᵢσ(zᵢΔᵢ) + (1 − αᵢ)σ(−zᵢΔᵢ), which is nought at θ and not with one α."""
    rounds = [answers_at([0.5, 4.0, 0.5]), answers_at([4.0, 4.0, 0.5, 4.0], seed=6)]
    learner = Learner(3, LevelledNoise.of(LEVELS, []), None, KL, ridge=0.3)
    assert learner.worth == 0
    for each in rounds:
        held = learner.add(*each)
    epsilons = torch.tensor([0.5, 4.0, 0.5, 4.0, 4.0, 0.5, 4.0], dtype=torch.float64)
    one, other, z = (torch.cat([each[part] for each in rounds]) for part in range(3))

    def slope(keep: torch.Tensor) -> float:
        theta = held.theta.clone().requires_grad_()
        margin = z * ((one - other) @ theta)
        chance = keep * torch.sigmoid(margin) + (1 - keep) * torch.sigmoid(-margin)
        (grad,) = torch.autograd.grad(-chance.log().sum() + 0.15 * theta @ theta, theta)
        return float(grad.abs().max())

    assert slope(torch.sigmoid(epsilons)) < 1e-3
    assert min(slope(torch.sigmoid(one_for_all)) for one_for_all in (epsilons.mean(), epsilons.max())) > 0.05
    assert learner.worth == pytest.approx(float((torch.tanh(epsilons / 2) ** 2).sum() / math.tanh(2.0) ** 2))
    assert held.noise == LabelNoise.of(4.0), "of the next question"
    assert torch.equal(learner.add(*(part[:0] for part in answers_at([0.5])[:3])).theta, held.theta)
    with pytest.raises(UserError, match="same levels"):
        learner.add(*answers_at([0.5])[:3], LabelNoise.of(4.0))


def test_held_out_answers_are_debiased_each_at_its_own_epsilon() -> None:
    one, other, z, noise = answers_at([0.5, 4.0, 0.5, 4.0])
    checked, held = AnsweredPairs([], one, other, z, noise), posterior()
    pool = Pool(Candidates([], [], [], one, one), one, None)
    row = measure(held, 4, pool, checked)["held_out_accuracy_debiased"]
    agrees = (((held.reward(one) - held.reward(other)) * z) > 0).double()
    keep = torch.sigmoid(torch.tensor([0.5, 4.0, 0.5, 4.0], dtype=torch.float64))
    shrink = 2 * keep - 1
    assert row["value"] == pytest.approx(float((shrink * (agrees - 1 + keep)).sum() / (shrink**2).sum()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pairs_are_of_one_prompt_and_two_answers(strategy: Strategy) -> None:
    x = candidates(prompts=7)
    picked = choose(strategy, posterior(), x, all_pairs(x), 20, fresh(), asked=10)
    assert picked.shape == (20, 3)
    assert (picked[:, 1] != picked[:, 2]).all()
    assert int(picked[:, 0].max()) < 7
    assert int(picked[:, 1:].max()) < 4
    assert torch.equal(picked, choose(strategy, posterior(), x, all_pairs(x), 20, fresh(), asked=10))
    if strategy not in ("fisher", "policy"):
        assert set(picked[:, 0].bincount(minlength=7).tolist()) <= {2, 3}  # prompts evenly


def test_a_design_asks_no_pair_twice_in_a_round_and_needs_enough_of_them() -> None:
    x = candidates(prompts=2, answers=3)
    assert len({tuple(row) for row in choose("policy", posterior(), x, all_pairs(x), 6, fresh()).tolist()}) == 6
    with pytest.raises(ValueError, match="6 pairs for 7 questions"):
        choose("fisher", posterior(), x, all_pairs(x), 7, fresh())
    with pytest.raises(ValueError, match="0 pairs for 1 questions"):
        choose("passive", posterior(), x[:, :1], all_pairs(x[:, :1]), 1, fresh())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_pair_of_texts_is_asked_twice(strategy: Strategy) -> None:
    """Over rounds, until the pool is dry; answer 2 of each prompt repeats answer 0, and answer 3 of one is blank."""
    x = candidates(prompts=6, answers=5)
    texts = [[f"{row} {place if place != 2 else 0}" for place in range(5)] for row in range(6)]
    x[:, 2], texts[1][3] = x[:, 0], " "
    pairs = OpenPairs.of(texts)
    assert len(pairs) == 5 * 6 + 3
    pairs.close_texts([f"prompt {row}" for row in range(6)], texts, [("prompt 4", "4 3", "4 0", 1), ("x", "a", "b")])
    asked = [
        frozenset((prompt, texts[prompt][place]) for place in sides)
        for number in range(4)
        for prompt, *sides in choose(strategy, posterior(), x, pairs, 8, fresh(number), asked=8 * number).tolist()
    ]
    assert len(set(asked)) == len(asked) == 32
    assert all(len(pair) == 2 for pair in asked)
    assert all((1, " ") not in pair for pair in asked)
    assert frozenset({(4, "4 3"), (4, "4 0")}) not in asked
    assert len(pairs) == 0
    with pytest.raises(ValueError, match="0 pairs for 1 questions"):
        choose(strategy, posterior(), x, pairs, 1, fresh())


def test_answers_of_one_text_are_one_answer() -> None:
    """Its weight is that of all its copies: 20,000 questions about a, a, b; within five standard errors."""
    x = candidates(prompts=1, answers=3).expand(20_000, -1, -1).clone()
    x[:, 1] = x[:, 0]
    held, pairs = posterior(), OpenPairs.among(torch.tensor([0, 0, 2]).expand(20_000, 3))
    picked = choose("pokl", held, x, pairs, 20_000, fresh())
    weights = torch.softmax(held.reward(x[0]) / KL, dim=0)
    assert set(picked[:, 1:].flatten().tolist()) == {0, 2}
    assert float((picked[:, 1] == 0).double().mean()) == pytest.approx(float(weights[0] + weights[1]), abs=0.018)


def shares(strategy: Strategy, held: Posterior, x: torch.Tensor, **how: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each answer of the one prompt is the first and the second, of 20,000 questions."""
    many = x.expand(20_000, -1, -1)
    picked = choose(strategy, held, many, all_pairs(many), 20_000, fresh(), **how)  # type: ignore[arg-type]
    count = x.shape[1]
    return picked[:, 1].bincount(minlength=count) / 20_000, picked[:, 2].bincount(minlength=count) / 20_000


def second_without_first(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Distribution of a second draw that differs from the first."""
    found = torch.zeros_like(second)
    for i, weight in enumerate(first):
        rest = second.clone()
        rest[i] = 0
        found += weight * rest / rest.sum()
    return found


def test_the_sampled_strategies_have_the_distributions_that_they_state() -> None:
    """20,000 questions each, within five standard errors (0.018)."""
    x, held = candidates(prompts=1), posterior()
    policy = torch.softmax(held.reward(x[0]) / KL, dim=0)
    flat = torch.full((4,), 0.25, dtype=torch.float64)
    optimistic = policy * torch.exp(held.bonus(x, 0.7)[0] / KL)
    share = min(1.0, 30.0 / (NOISE.factor**2 * 1000))
    wanted = {
        "passive": (flat, flat),
        "pokl": (policy, optimistic / optimistic.sum()),
        "mixture": (policy, (1 - share) * policy + share * flat),
    }
    for strategy, (first, second) in wanted.items():
        one, other = shares(strategy, held, x, kappa=0.7, asked=1000, mixture=30.0)  # type: ignore[arg-type]
        assert torch.allclose(one.double(), first, atol=0.018), strategy
        assert torch.allclose(other.double(), second_without_first(first, second), atol=0.018), strategy
    one, other = shares("duel", held, x, kappa=0.7)
    best = (held.reward(x[0]) + held.bonus(x, 0.7)[0]).argsort(descending=True)
    assert one[best[0]] == 1
    assert other[best[1]] == 1


def test_the_bonus_is_centred_by_the_policy_and_shrinks_with_information() -> None:
    """Against the definition, one answer at a time; and a shift of all features of a prompt changes nothing."""
    x, held = candidates(), posterior(bound=None)
    weights, inverse = held.policy(x), torch.linalg.inv(held.information)
    for s, i in itertools.product(range(5), range(4)):
        centred = x[s, i] - (weights[s, :, None] * x[s]).sum(dim=0)
        assert float(held.bonus(x, 2.0)[s, i]) == pytest.approx(2.0 * math.sqrt(float(centred @ inverse @ centred)))
    assert torch.allclose(held.bonus(x + x[:1, :1], 1.0), held.bonus(x, 1.0))
    more = Posterior(held.theta, 4 * held.information, 1.0, NOISE, None, KL)
    assert torch.allclose(more.bonus(x, 1.0), held.bonus(x, 1.0) / 2)


def test_the_second_order_loss_is_what_the_policy_design_lowers() -> None:
    """J(π*) − J(π̄) ≈ Σ_s Var_π(r̄ − r*)/(2·kl_coef) for small errors: within a tenth at 2,000 draws of the error."""
    x = candidates(prompts=6, answers=5)
    truth = posterior(bound=None)
    scale = 0.05
    root = torch.linalg.cholesky(torch.linalg.inv(truth.information))
    draws = torch.randn(2000, 3, generator=fresh(), dtype=torch.float64) @ root.T * scale
    reward = truth.reward(x)

    def objective(policy: torch.Tensor) -> torch.Tensor:
        return ((policy * reward).sum(-1) - KL * (policy * torch.log(policy * 5)).sum(-1)).mean(-1)

    best = objective(torch.softmax(reward / KL, dim=-1))
    lost = torch.stack([best - objective(torch.softmax((x @ (truth.theta + e)) / KL, dim=-1)) for e in draws]).mean()
    assert float(lost) == pytest.approx(scale**2 * policy_variance(truth, x, truth.information) / (2 * KL), rel=0.1)


# --- the posterior ----------------------------------------------------------------------------------------------------


def answers(x: torch.Tensor, picked: torch.Tensor, theta: torch.Tensor, seed: int) -> torch.Tensor:
    prompt, one, other = picked.T
    plus = torch.sigmoid((x[prompt, one] - x[prompt, other]) @ theta)
    plus = NOISE.keep_prob * plus + NOISE.flip_prob * (1 - plus)
    return torch.where(torch.rand(len(plus), generator=fresh(seed), dtype=torch.float64) < plus, 1.0, -1.0)


def test_rounds_give_the_fit_to_all_answers_at_once() -> None:
    """Warm starts and rounds change nothing but the time: one fit of everything ends at the same weights."""
    x, theta = candidates(prompts=40), torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    rounds, once = (Learner(3, NOISE, 8.0, KL, ridge=0.5) for _ in range(2))
    parts = []
    for number in range(5):
        picked = choose("passive", rounds.posterior, x, all_pairs(x), 100, fresh(number))
        prompt, one, other = picked.T
        parts.append((x[prompt, one], x[prompt, other], answers(x, picked, theta, number)))
        rounds.add(*parts[-1])
    once.add(*(torch.cat([part[i] for part in parts]) for i in range(3)))
    assert len(rounds) == len(once) == 500
    assert torch.allclose(rounds.posterior.theta, once.posterior.theta, atol=1e-3)
    assert torch.allclose(rounds.posterior.information, once.posterior.information, rtol=1e-2)


def test_coins_are_given_a_strong_ridge() -> None:
    x = candidates(prompts=100)
    learner = Learner(3, NOISE, 8.0, KL)
    before = learner.posterior.ridge
    picked = choose("passive", learner.posterior, x, all_pairs(x), 400, fresh())
    prompt, one, other = picked.T
    coins = answers(x, picked, torch.zeros(3, dtype=torch.float64), 5)
    learner.add(x[prompt, one], x[prompt, other], coins)
    assert learner.posterior.ridge > before


def test_the_truth_is_found() -> None:
    x, theta = candidates(prompts=2000), torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    learner = Learner(3, NOISE, 8.0, KL)
    picked = choose("passive", learner.posterior, x, all_pairs(x), 12_000, fresh())
    prompt, one, other = picked.T
    learner.add(x[prompt, one], x[prompt, other], answers(x, picked, theta, 5))
    margin = learner.posterior.reward(x[:, 0]) - learner.posterior.reward(x[:, 1])
    wanted = (x[:, 0] - x[:, 1]) @ theta
    assert float(torch.corrcoef(torch.stack([margin, wanted]))[0, 1]) > 0.98


def test_no_answers_no_change() -> None:
    learner = Learner(3, NOISE, 8.0, KL)
    before = learner.posterior
    assert learner.add(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0)) is before
