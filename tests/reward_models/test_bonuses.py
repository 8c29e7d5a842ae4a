"""The other bonuses: constants against the formula, spreads against closed forms, one interface, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import identity_basis, pair_basis
from private_rlhf.reward_models.bonuses import BONUS_KINDS, Bonus, bonus_from_tensors, bonus_kind, bonus_tensors
from private_rlhf.reward_models.checkpoint import RewardMetadata, load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.dropout import DropoutBonus, DropoutRewardModel, has_dropout
from private_rlhf.reward_models.elliptical import EllipticalAccumulator, EllipticalBonus, EllipticalConstants
from private_rlhf.reward_models.ensemble import EnsembleBonus, fit_ensemble
from private_rlhf.reward_models.linear import LinearFit, fit_linear
from private_rlhf.reward_models.model import PaddedTexts, RewardModel, set_score_weight
from private_rlhf.reward_models.uncertainty import FisherAccumulator, FisherBonus
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification


def pairs(n: int = 400, d: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs with labels from a known linear reward, privatised at ε = 1."""
    generator = torch.Generator().manual_seed(seed)
    phi_a, phi_b = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    margin = (phi_a - phi_b) @ torch.linspace(-0.5, 0.5, d, dtype=torch.float64)
    private = 0.5 + 0.5 * LabelNoise.of(1.0).factor * torch.tanh(margin / 2)
    label = (torch.rand(n, dtype=torch.float64, generator=generator) < private).double() * 2 - 1
    return phi_a, phi_b, label


def elliptical(fit: LinearFit, **changes: Any) -> EllipticalBonus:
    phi_a, phi_b, _ = pairs()
    own = {"noise": fit.noise, "ridge": fit.ridge, "reward_bound": fit.reward_bound, "basis": fit.basis}
    accumulator = EllipticalAccumulator(fit.weight, **own)
    accumulator.update(phi_a, phi_b)
    return accumulator.bonus(**changes)


def every_bonus(kappa: float = 1.0) -> dict[str, Bonus]:
    phi_a, phi_b, label = pairs()
    basis = pair_basis(phi_a, phi_b, num_components=4, centre=False)
    fit = fit_linear(phi_a, phi_b, label, 1.0, ridge=2.0, reward_bound=4.0, basis=basis)
    common: dict[str, Any] = {"ridge": 2.0, "reward_bound": 4.0, "basis": basis}
    heads = fit_ensemble(phi_a, phi_b, label, 1.0, weight=fit.weight, num_heads=4, kappa=kappa, **common)
    constants = EllipticalConstants(c=0.01, delta=0.1, log_covering=3.0)
    return {
        "fisher": FisherBonus.from_fit(fit, kappa),
        "elliptical": elliptical(fit, kappa=kappa, constants=constants),
        "ensemble": heads,
        "mc_dropout": DropoutBonus(fit.weight, 4.0, samples=3, seed=5, kappa=kappa),
    }


def inputs(bonus: Bonus, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    width = 5 + (bonus.samples if isinstance(bonus, DropoutBonus) else 0)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, width, generator=generator), torch.randn(size, 8, width, generator=generator)


@pytest.mark.parametrize("kind", BONUS_KINDS)
def test_one_interface_with_either_sign(kind: str) -> None:
    bonus, double = every_bonus()[kind], every_bonus(kappa=2.0)[kind]
    features, reference = inputs(bonus)
    score = bonus.score(features, reference)
    for tensor in score:
        assert tensor.shape == (6,)
        assert tensor.dtype == torch.float32
    assert float(score.bonus.min()) > 0
    torch.testing.assert_close(score.optimistic() - score.pessimistic(), 2 * score.bonus)
    torch.testing.assert_close(double.score(features, reference).bonus, 2 * score.bonus)
    # Every kind has the reward of the fit, whatever it says about its doubt.
    expected = 2.0 * torch.tanh(features[:, :5].double() @ bonus.weight / 2.0)
    torch.testing.assert_close(score.reward.double(), expected, rtol=1e-5, atol=1e-6)
    kept = bonus.score_centred(features, bonus.reference_gradient(reference))
    assert torch.equal(kept.bonus, score.bonus)
    assert len(bonus.reference_gradient(reference)) == 6


@pytest.mark.parametrize("kind", BONUS_KINDS)
def test_stored_and_read_again_it_is_the_same(kind: str) -> None:
    bonus = every_bonus(kappa=0.5)[kind]
    assert bonus_kind(bonus) == kind
    again = bonus_from_tensors(kind, bonus_tensors(bonus), bonus.reward_bound, bonus.kappa, LabelNoise.of(1.0))
    for mine, theirs in zip(bonus.score(*inputs(bonus)), again.score(*inputs(bonus)), strict=True):
        assert torch.equal(mine, theirs)


# --- elliptical ------------------------------------------------------------------------------------------------------


def test_elliptical_constants_are_those_of_equation_10() -> None:
    phi_a, phi_b, label = pairs()
    fit = fit_linear(phi_a, phi_b, label, 1.0, ridge=2.0, reward_bound=4.0)
    constants = EllipticalConstants(c=0.3, delta=0.1, tau=0.02, log_covering=7.0)
    bonus = elliptical(fit, constants=constants, kappa=0.5)
    features, reference = torch.randn(3, 5).double(), torch.randn(3, 8, 5).double()

    def gradient(phi: torch.Tensor) -> torch.Tensor:
        return phi / torch.cosh(phi @ fit.weight / 2.0).square()[..., None]

    difference = gradient(phi_a) - gradient(phi_b)
    sigma = 0.5 * difference.T @ difference / 400 + 2.0 / 400 * torch.eye(5)
    centred = gradient(features) - gradient(reference).mean(1)
    distance = torch.einsum("bi,ij,bj->b", centred, torch.linalg.inv(sigma), centred)
    squared = distance * 0.3 * math.exp(4.0) / LabelNoise.of(1.0).factor ** 2 * ((7.0 + math.log(10)) / 400 + 0.02)
    torch.testing.assert_close(bonus.score(features, reference).bonus, (0.5 * squared.sqrt()).float())


def test_default_constants_are_the_covering_of_a_ball_at_one_over_n() -> None:
    width = EllipticalConstants().width(LabelNoise.of(2.0), 1.0, num_pairs=1000, num_components=10)
    rate = (10 * math.log(1000) + math.log(20)) / 1000 + 1 / 1000
    assert width == pytest.approx(math.sqrt(math.e * rate) / math.tanh(1.0))
    # The factor that makes it useless at a wide bound.
    assert EllipticalConstants().width(LabelNoise.of(2.0), 10.0, 1000, 10) / width == pytest.approx(math.exp(4.5))


def test_pairs_estimate_the_covariance() -> None:
    """Σ from 40,000 pairs; prompts shift all their features. An entry of the estimate has a standard error below 0.013;
    the tolerance is 0.07, and the shift alone is 25.
    """
    generator = torch.Generator().manual_seed(2)
    mix = torch.tensor([[1.0, 0.0], [0.8, 0.6]]).double()

    def draw(prompts: int, completions: int) -> torch.Tensor:
        shift = 5.0 * torch.randn(prompts, 1, 2, dtype=torch.float64, generator=generator)
        return shift + torch.randn(prompts, completions, 2, dtype=torch.float64, generator=generator) @ mix.T

    weight = torch.zeros(2)
    by_pairs = EllipticalAccumulator(weight, noise=1.0, ridge=0.0, reward_bound=2.0)
    first, second = draw(40_000, 2).unbind(1)
    by_pairs.update(first, second)
    truth = mix @ mix.T
    torch.testing.assert_close(by_pairs.bonus().covariance, truth, rtol=0, atol=0.07)
    assert by_pairs.bonus(num_pairs=50).num_pairs == 50


def test_elliptical_refusals() -> None:
    phi_a, phi_b, label = pairs()
    unbounded = fit_linear(phi_a, phi_b, label, 1.0, ridge=2.0)
    with pytest.raises(ValueError, match=r"needs a reward_bound: its constant is e\^\(B/2\)"):
        elliptical(unbounded)
    for changes, message in (
        ({"c": 0.0}, "c must be"),
        ({"delta": 1.0}, "delta must lie between 0 and 1"),
        ({"tau": 2.0}, "tau must lie"),
        ({"log_covering": -1.0}, "log_covering must be"),
    ):
        with pytest.raises(ValueError, match=message):
            EllipticalConstants(**changes)
    empty = EllipticalAccumulator(torch.zeros(2), noise=1.0, ridge=0.0, reward_bound=2.0)
    with pytest.raises(ValueError, match="nothing was added"):
        empty.bonus()
    empty.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    with pytest.raises(ValueError, match="covariance matrix is not positive definite"):
        empty.bonus()


# --- ensemble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "ridge"), [(3000, 1.0), (60, 200.0), (400, 60.0)])
def test_heads_spread_like_the_fisher_posterior(n: int, ridge: float) -> None:
    """Labels dominate, the prior dominates, both matter. 200 heads give a standard deviation a relative standard error
    of 5 %; each of 9 checks allows 25 %, half of it for the Gaussian approximation.
    """
    phi_a, phi_b, label = pairs(n=n, d=3)
    fit = fit_linear(phi_a, phi_b, label, 1.0, ridge=ridge)
    heads = fit_ensemble(
        phi_a, phi_b, label, 1.0, weight=fit.weight, ridge=ridge, start=fit.theta, num_heads=200, seed=1
    )
    directions = torch.eye(3, dtype=torch.float64)
    spread = heads.score(directions, torch.zeros(3, 1, 3)).bonus
    torch.testing.assert_close(spread.double(), FisherBonus.from_fit(fit).bonus(directions), rtol=0.25, atol=0)


def test_a_bootstrap_without_a_prior_draw_would_hide_the_doubt() -> None:
    """Where the ridge rules, resampling alone leaves a fifth of the spread: the reason for the anchors."""
    phi_a, phi_b, label = pairs(n=60, d=3)
    fit = fit_linear(phi_a, phi_b, label, 1.0, ridge=200.0)
    generator = torch.Generator().manual_seed(0)
    plain = []
    for _ in range(50):
        rows = torch.randint(60, (60,), generator=generator)
        plain.append(fit_linear(phi_a[rows], phi_b[rows], label[rows], 1.0, ridge=200.0).weight)
    assert float((torch.stack(plain).std(0) / FisherBonus.from_fit(fit).bonus(torch.eye(3).double())).max()) < 0.4


def test_an_ensemble_is_deterministic_and_ignores_a_shift_of_the_prompt() -> None:
    phi_a, phi_b, label = pairs()
    make = lambda seed: fit_ensemble(  # noqa: E731
        phi_a, phi_b, label, 1.0, weight=torch.ones(5), ridge=1.0, num_heads=3, seed=seed
    )
    assert torch.equal(make(0).heads, make(0).heads)
    assert not torch.equal(make(0).heads, make(1).heads)
    features, reference = phi_a[:4], phi_b[:32].reshape(4, 8, 5)
    base = make(0).score(features, reference)
    moved = make(0).score(features + 3.0, reference + 3.0)
    torch.testing.assert_close(base.bonus, moved.bonus, rtol=1e-4, atol=1e-6)


def test_ensemble_refusals() -> None:
    phi_a, phi_b, label = pairs(n=20)
    with pytest.raises(ValueError, match="num_heads must be at least 2"):
        fit_ensemble(phi_a, phi_b, label, 1.0, weight=torch.ones(5), ridge=1.0, num_heads=1)
    with pytest.raises(ValueError, match="ridge must be a finite number above 0"):
        fit_ensemble(phi_a, phi_b, label, 1.0, weight=torch.ones(5), ridge=0.0)
    with pytest.raises(ValueError, match=r"heads must be \(H, 2\)"):
        EnsembleBonus(torch.zeros(2), torch.zeros(1, 2), None)
    with pytest.raises(ValueError, match="non-finite weight"):
        EnsembleBonus(torch.zeros(2), torch.full((2, 2), math.nan), None)
    with pytest.raises(ValueError, match="same prompts"):
        EnsembleBonus(torch.zeros(2), torch.ones(2, 2), None).score(torch.zeros(3, 2), torch.zeros(4, 8, 2))


# --- dropout ---------------------------------------------------------------------------------------------------------


def gpt2(dropout: float) -> GPT2ForSequenceClassification:
    config = GPT2Config(
        vocab_size=16,
        n_embd=8,
        n_layer=1,
        n_head=1,
        n_positions=16,
        num_labels=1,
        pad_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2ForSequenceClassification(config).eval()
    set_score_weight(model, torch.linspace(-1, 1, 8))
    return model


def test_a_model_without_dropout_is_refused() -> None:
    llama = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1
        )
    )
    assert not has_dropout(llama)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no active dropout"):
        DropoutRewardModel(llama)
    assert has_dropout(gpt2(0.1))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no active dropout"):
        DropoutRewardModel(gpt2(0.0))


def test_draws_spread_without_touching_mode_reward_or_random_state() -> None:
    model = gpt2(0.3)
    plain, stochastic = RewardModel(model), DropoutRewardModel(model, samples=16, seed=3)
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    before = torch.random.get_rng_state()
    with torch.no_grad():
        features = stochastic.features(ids, mask)
        assert torch.equal(stochastic.features(ids, mask), features)
        assert torch.equal(features[:, :8], plain.features(ids, mask))
        assert torch.equal(stochastic.score(ids, mask), plain.score(ids, mask))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    score = DropoutBonus(plain.weight.detach(), None, samples=16).score(features, features[:, None])
    torch.testing.assert_close(score.bonus, features[:, 8:].std(-1))
    assert float(score.bonus.min()) > 0.01
    with pytest.raises(ValueError, match="compute them with DropoutRewardModel"):
        DropoutBonus(plain.weight.detach(), None, samples=16).score(features[:, :8], features[:, None])
    with pytest.raises(ValueError, match="samples must be at least 2"):
        DropoutBonus(plain.weight.detach(), None, samples=1)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BONUS_KINDS)
def test_a_checkpoint_scores_texts_with_its_own_kind(kind: str, tmp_path: Path) -> None:
    model = gpt2(0.2)
    weight = RewardModel(model).weight.detach()
    phi_a, phi_b = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    fisher = FisherAccumulator(weight, noise=2.0, ridge=1.0, reward_bound=4.0)
    ellipse = EllipticalAccumulator(weight, noise=2.0, ridge=1.0, reward_bound=4.0)
    for accumulator in (fisher, ellipse):
        accumulator.update(phi_a, phi_b)
    bonus: Bonus = {
        "fisher": fisher.bonus,
        "elliptical": ellipse.bonus,
        "ensemble": lambda: EnsembleBonus(weight.double(), torch.stack([weight, -weight]).double(), 4.0),
        "mc_dropout": lambda: DropoutBonus(weight.double(), 4.0, samples=3),
    }[kind]()
    metadata = RewardMetadata(
        noise=LabelNoise.of(2.0),
        loss="private_likelihood",
        reward_bound=4.0,
        ridge=1.0,
        n_pairs=50,
        kappa=1.0,
        mode="head",
        num_layers=1,
        base_model="gpt2",
        public=False,
        uncertainty=kind,
    )
    save_reward_checkpoint(tmp_path / "rm", model, metadata, bonus=bonus)
    loaded = load_reward_checkpoint(tmp_path / "rm")
    assert loaded.bonus is not None
    assert bonus_kind(loaded.bonus) == kind
    ids = torch.randint(1, 16, (2, 5), generator=torch.Generator().manual_seed(1))
    others = torch.randint(1, 16, (8, 5), generator=torch.Generator().manual_seed(2))
    score = loaded.score(PaddedTexts(ids, torch.ones_like(ids)), PaddedTexts(others, torch.ones_like(others)))
    with torch.no_grad():
        expected = RewardModel(model, reward_bound=4.0).score(ids, torch.ones_like(ids))
    torch.testing.assert_close(score.reward, expected, rtol=1e-5, atol=1e-6)
    assert float(score.bonus.min()) > 0
    with pytest.raises(ValueError, match="3 reference texts are not K for each of 2 texts"):
        loaded.score(PaddedTexts(ids, torch.ones_like(ids)), PaddedTexts(others[:3], torch.ones_like(others[:3])))
    if kind != "fisher":
        with pytest.raises(ValueError, match=f"the bonus is {kind}, but the metadata say fisher"):
            save_reward_checkpoint(tmp_path / "b", model, _as_fisher(metadata), bonus=bonus)


def _as_fisher(metadata: RewardMetadata) -> RewardMetadata:
    from dataclasses import replace

    return replace(metadata, uncertainty="fisher")


def test_an_identity_basis_is_neither_stored_nor_multiplied() -> None:
    bonus = FisherBonus(torch.zeros(3).double(), identity_basis(3), torch.eye(3).double() * 4, None)
    assert set(bonus_tensors(bonus)) == {"weight", "information"}
    assert bonus.bonus(torch.eye(3)).tolist() == [0.5, 0.5, 0.5]
    torch.testing.assert_close(identity_basis(3).matrix, torch.eye(3).double())
