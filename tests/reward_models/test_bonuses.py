"""The other bonuses: constants against the formula, spreads against closed forms, one interface, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import identity_basis, pair_basis
from private_rlhf.reward_models.bonus_fit import BLOCK, elliptical_bonus, fit_ensemble
from private_rlhf.reward_models.checkpoint import load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.linear import LinearFit, fit_linear
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.reward_models.uncertainty import (
    BONUS_KINDS,
    Bonus,
    DropoutBonus,
    DropoutRewardModel,
    EllipticalConstants,
    EnsembleBonus,
    FisherBonus,
    bonus_from_tensors,
    bonus_kind,
    bonus_tensors,
)
from support.reward_checkpoints import features, fisher_bonus, labelled_pairs, metadata, rewards
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification


def fitted(bound: float | None = 4.0, ridge: float = 2.0, n: int = 400, d: int = 5) -> LinearFit:
    return fit_linear(*labelled_pairs(n, d), 1.0, ridge=ridge, reward_bound=bound)


def every_bonus(kappa: float = 1.0) -> dict[str, Bonus]:
    phi_a, phi_b, label = labelled_pairs()
    basis = pair_basis(phi_a, phi_b, num_components=4, centre=False)
    fit = fit_linear(phi_a, phi_b, label, 1.0, ridge=2.0, reward_bound=4.0, basis=basis)
    constants = EllipticalConstants(c=0.01, delta=0.1, log_covering=3.0)
    return {
        "fisher": FisherBonus.from_fit(fit, kappa),
        "elliptical": elliptical_bonus(fit, phi_a, phi_b, kappa, constants),
        "ensemble": fit_ensemble(fit, phi_a, phi_b, label, num_heads=4, kappa=kappa),
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
    fit, (phi_a, phi_b, _) = fitted(), labelled_pairs()
    constants = EllipticalConstants(c=0.3, delta=0.1, tau=0.02, log_covering=7.0)
    bonus = elliptical_bonus(fit, phi_a, phi_b, 0.5, constants)
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

    first, second = draw(40_000, 2).unbind(1)
    fit = replace(fitted(2.0, d=2), weight=torch.zeros(2).double(), prior=0.0)
    torch.testing.assert_close(elliptical_bonus(fit, first, second).covariance, mix @ mix.T, rtol=0, atol=0.07)


def test_half_precision_features_are_summed_in_full_and_in_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    phi_a, phi_b = (30.0 + torch.randn(2, 3000, 6, generator=generator)).bfloat16()
    assert len(phi_a) > 2 * BLOCK
    fit = replace(fitted(8.0, d=6), weight=torch.zeros(6).double(), prior=0.0)
    difference = phi_a.double() - phi_b.double()
    expected = difference.T @ difference / 6000
    torch.testing.assert_close(elliptical_bonus(fit, phi_a, phi_b).covariance, expected, rtol=1e-12, atol=1e-12)


def test_elliptical_refusals() -> None:
    phi_a, phi_b, _ = labelled_pairs()
    with pytest.raises(ValueError, match=r"reward_bound must be a number, got None: .* e\^\(B/2\)"):
        elliptical_bonus(fitted(None), phi_a, phi_b)
    for wrong in ({"c": 0.0}, {"c": math.inf}, {"delta": 1.0}, {"tau": 2.0}, {"log_covering": -1.0}, {"c": math.nan}):
        with pytest.raises(ValueError, match="constants must have c > 0, delta and tau in"):
            EllipticalConstants(**wrong)
    with pytest.raises(ValueError, match="pairs must not be empty"):
        elliptical_bonus(fitted(), phi_a[:0], phi_b[:0])
    with pytest.raises(ValueError, match="covariance matrix is not positive definite"):
        elliptical_bonus(replace(fitted(), prior=0.0), phi_a[:1], phi_b[:1])


# --- ensemble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "ridge"), [(3000, 1.0), (60, 200.0), (400, 60.0)])
def test_heads_spread_like_the_fisher_posterior(n: int, ridge: float) -> None:
    """Labels dominate, the prior dominates, both matter. 200 heads give a standard deviation a relative standard error
    of 5 %; each of 9 checks allows 25 %, half of it for the Gaussian approximation.
    """
    fit = fitted(None, ridge, n, 3)
    heads = fit_ensemble(fit, *labelled_pairs(n, 3), num_heads=200, seed=1)
    directions = torch.eye(3, dtype=torch.float64)
    spread = heads.score(directions, torch.zeros(3, 1, 3)).bonus
    fisher = FisherBonus.from_fit(fit).deviation(directions, directions)
    torch.testing.assert_close(spread.double(), fisher, rtol=0.25, atol=0)


def test_a_bootstrap_without_a_prior_draw_would_hide_the_doubt() -> None:
    """Where the ridge rules, resampling alone leaves a fifth of the spread: the reason for the anchors."""
    fit, (phi_a, phi_b, label) = fitted(None, 200.0, 60, 3), labelled_pairs(60, 3)
    generator = torch.Generator().manual_seed(0)
    plain = []
    for _ in range(50):
        rows = torch.randint(60, (60,), generator=generator)
        plain.append(fit_linear(phi_a[rows], phi_b[rows], label[rows], 1.0, ridge=200.0).weight)
    directions = torch.eye(3).double()
    fisher = FisherBonus.from_fit(fit).deviation(directions, directions)
    assert float((torch.stack(plain).std(0) / fisher).max()) < 0.4


def test_an_ensemble_is_deterministic_and_ignores_a_shift_of_the_prompt() -> None:
    pairs = labelled_pairs()
    make = lambda seed: fit_ensemble(fitted(None), *pairs, num_heads=3, seed=seed)  # noqa: E731
    assert torch.equal(make(0).heads, make(0).heads)
    assert not torch.equal(make(0).heads, make(1).heads)
    features, reference = pairs[0][:4], pairs[1][:32].reshape(4, 8, 5)
    base = make(0).score(features, reference)
    moved = make(0).score(features + 3.0, reference + 3.0)
    torch.testing.assert_close(base.bonus, moved.bonus, rtol=1e-4, atol=1e-6)


def test_ensemble_refusals() -> None:
    with pytest.raises(ValueError, match="num_heads must be at least 2"):
        fit_ensemble(fitted(), *labelled_pairs(), num_heads=1)
    with pytest.raises(ValueError, match="ridge must be a finite number above 0"):
        fit_ensemble(replace(fitted(), ridge=0.0), *labelled_pairs())
    with pytest.raises(ValueError, match=r"heads must be \(at least 2, 2\)"):
        EnsembleBonus(torch.zeros(2), torch.zeros(1, 2), None)
    with pytest.raises(ValueError, match="heads must be finite"):
        EnsembleBonus(torch.zeros(2), torch.full((2, 2), math.nan), None)
    with pytest.raises(ValueError, match="same prompts"):
        EnsembleBonus(torch.zeros(2), torch.ones(2, 2), None).score(torch.zeros(3, 2), torch.zeros(4, 8, 2))


# --- dropout ---------------------------------------------------------------------------------------------------------


def gpt2(dropout: float) -> GPT2ForSequenceClassification:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    size = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    config = GPT2Config(**size, **rates, num_labels=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2ForSequenceClassification(config).eval()
    set_score_weight(model, torch.linspace(-1, 1, 8))
    return model


def test_a_model_without_dropout_is_refused() -> None:
    size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForSequenceClassification(LlamaConfig(**size, num_labels=1))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification has no active dropout"):
        DropoutRewardModel(llama)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no active dropout"):
        DropoutRewardModel(gpt2(0.0))


def test_draws_spread_without_touching_mode_reward_or_random_state() -> None:
    model = gpt2(0.3)
    plain, stochastic = RewardModel(model), DropoutRewardModel(model, samples=16, seed=3)
    texts = [[5, 6, 7], [8, 9]]
    before = torch.random.get_rng_state()
    with torch.no_grad():
        read = features(stochastic, texts)
        assert torch.equal(features(stochastic, texts), read)
        assert torch.equal(read[:, :8], features(plain, texts))
        assert torch.equal(rewards(stochastic, texts), rewards(plain, texts))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    score = DropoutBonus(plain.weight.detach(), None, samples=16).score(read, read[:, None])
    torch.testing.assert_close(score.bonus, read[:, 8:].std(-1))
    assert float(score.bonus.min()) > 0.01
    with pytest.raises(ValueError, match="compute them with DropoutRewardModel"):
        DropoutBonus(plain.weight.detach(), None, samples=16).score(read[:, :8], read[:, None])
    with pytest.raises(ValueError, match="samples must be at least 2"):
        DropoutBonus(plain.weight.detach(), None, samples=1)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BONUS_KINDS)
def test_a_checkpoint_scores_texts_with_its_own_kind(kind: str, tmp_path: Path) -> None:
    model = gpt2(0.2)
    weight = RewardModel(model).weight.detach().double()
    fit = replace(fitted(4.0, d=8), weight=weight)
    bonus: Bonus = {
        "fisher": fisher_bonus(weight, 1.0),
        "elliptical": elliptical_bonus(fit, *labelled_pairs(d=8)[:2]),
        "ensemble": EnsembleBonus(weight, torch.stack([weight, -weight]), 4.0),
        "mc_dropout": DropoutBonus(weight, 4.0, samples=3),
    }[kind]
    stated = metadata(kappa=1.0, uncertainty=kind)
    save_reward_checkpoint(tmp_path / "rm", model, stated, bonus=bonus)
    loaded = load_reward_checkpoint(tmp_path / "rm")
    assert loaded.bonus is not None
    assert bonus_kind(loaded.bonus) == kind
    ids = torch.randint(1, 16, (10, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        read = features(loaded.model, ids.tolist())
        expected = rewards(RewardModel(model, reward_bound=4.0), ids[:2].tolist())
    score = loaded.bonus.score(read[:2], read[2:].reshape(2, 4, -1))
    torch.testing.assert_close(score.reward, expected, rtol=1e-5, atol=1e-6)
    assert float(score.bonus.min()) > 0
    scorer = RewardScorer(loaded, Any, use_baseline=True)  # type: ignore[arg-type]
    scorer.add_reference("Say.", read[2:6])
    assert torch.equal(scorer.score_features(["Say."], read[:1]).reward, score.reward[:1])
    other = "elliptical" if kind == "fisher" else "fisher"
    with pytest.raises(ValueError, match=rf"must be the bonus's .*{kind}.*, got .*{other}"):
        save_reward_checkpoint(tmp_path / "b", model, replace(stated, uncertainty=other), bonus=bonus)


def test_statistics_of_earlier_versions_without_a_basis_are_those_of_the_weights() -> None:
    tensors = {"weight": torch.zeros(3).double(), "information": 4 * torch.eye(3).double()}
    bonus = bonus_from_tensors("fisher", tensors, None, 1.0, LabelNoise.of(1.0))
    assert isinstance(bonus, FisherBonus)
    assert bonus.deviation(torch.eye(3), torch.eye(3)).tolist() == [0.5, 0.5, 0.5]
    assert torch.equal(bonus.basis.matrix, identity_basis(3).matrix)
