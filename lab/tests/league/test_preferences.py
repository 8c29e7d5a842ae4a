"""The preference benchmark: what its arms do, that all see the same labels, that its verdict can fall either way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.linear import ridge_in_units_of
from private_rlhf.reward_models.losses import get_loss
from private_rlhf_lab.cli import app
from private_rlhf_lab.league import arms, central, preferences
from private_rlhf_lab.league import pool as pool_module
from private_rlhf_lab.league.beds import Bed, draw_private, linear_bed, pool_bed
from safetensors.torch import save_file
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def bed() -> Bed:
    return linear_bed(0, dimension=8, prompts=200, answers=6)


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_are_nested_paired_and_of_distinct_pairs(bed: Bed) -> None:
    few, many, weak = draw_private(bed, 300, 2.0, 5), draw_private(bed, 2000, 2.0, 5), draw_private(bed, 2000, 0.5, 5)
    assert torch.equal(few.x, many.x[:300])
    assert torch.equal(few.y, many.y[:300])
    assert torch.equal(many.y, weak.y)
    flipped, more = many.z != many.y, weak.z != weak.y
    assert bool((more | ~flipped).all())  # who is flipped at a large ε is flipped at a small one
    pairs = {tuple(x) for x in many.x.tolist()}
    assert len(pairs) == 2000
    with pytest.raises(UserError, match="distinct pairs"):
        draw_private(bed, bed.most_pairs + 1, 1.0, 5)


def test_flips_and_answers_have_their_rates(bed: Bed) -> None:
    """Binomial, 5 standard errors: a false alarm in two millions."""
    labels = draw_private(bed, bed.most_pairs, 1.0, 1)
    keep = LabelNoise.of(1.0).keep_prob
    kept = float((labels.z == labels.y).double().mean())
    assert abs(kept - keep) < 5 * math.sqrt(keep * (1 - keep) / bed.most_pairs)
    theta = torch.linalg.lstsq(bed.x.reshape(-1, 8), bed.truth.reshape(-1, 1)).solution[:, 0]
    prefer = torch.sigmoid(labels.x @ theta)
    z = float((labels.y * (2 * prefer - 1)).mean() - ((2 * prefer - 1) ** 2).mean())
    assert abs(z) < 5 / math.sqrt(bed.most_pairs)


# --- arms -------------------------------------------------------------------------------------------------------------


def test_smoothing_has_its_derivative() -> None:
    margin = torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True)
    label = torch.tensor([1.0, -1.0] * 4 + [1.0], dtype=torch.float64)
    arms.smoothed_loss(margin, label, 1.0).sum().backward()
    assert margin.grad is not None
    assert torch.allclose(margin.grad, arms.smoothed_slope(margin.detach(), label, 1.0))


def test_the_chi_squared_policy_solves_its_equation_and_beats_its_neighbours() -> None:
    reward = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    policy = arms.chi_squared_policy(reward, 0.4)
    assert torch.allclose(policy.sum(dim=1), torch.ones(3, dtype=torch.float64))
    u = 5 * policy
    constant = reward - 0.4 * (u + u.log())
    assert float((constant - constant.mean(dim=1, keepdim=True)).abs().max()) < 1e-9

    def objective(w: torch.Tensor) -> float:  # E[r] − c(½χ² + KL)
        return float((w * reward).sum() - 0.4 * ((5 * w**2).sum() / 2 + (w * (5 * w).log()).sum()))

    for seed in range(20):
        step = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
        near = (policy + step - step.mean(dim=1, keepdim=True)).clamp_min(1e-9)
        assert objective(near) <= objective(policy) + 1e-12


@pytest.mark.parametrize("arm", [*arms.ARMS, *central.CENTRAL])
def test_every_arm_learns_without_noise(bed: Bed, arm: str) -> None:
    """At ε = 8 and 3,000 labels each arm has three quarters of what can be had; χ² regularises more, so a half."""
    found = preferences.measure(bed, draw_private(bed, 3000, 8.0, 0), arm)
    assert found["j"] > (0.5 if arm in ("square chi-PO", "smoothing", "central, clusters") else 0.75) * bed.best
    assert found["j"] <= bed.best
    assert 0.5 < found["accuracy"] < 1.0


def test_props_takes_the_more_reliable_of_two(bed: Bed) -> None:
    """At ε = 0.1 the first model is more often right than randomised response, at ε = 8 less often."""
    for epsilon, follows_model in ((0.1, True), (8.0, False)):
        labels = draw_private(bed, 2900, epsilon, 3)
        first, second = arms.halves(bed, labels)
        assert not set(first.prompt.tolist()) & set(second.prompt.tolist())
        model = arms.fit(bed, first, arms.get_loss("debiased"))
        right = ((second.x @ model.theta > 0) == (second.y > 0)).double().mean()
        assert (float(right) > LabelNoise.of(epsilon).keep_prob) == follows_model


def test_the_central_reward_reads_true_labels_through_one_noisy_sum(bed: Bed) -> None:
    """One changed label changes θ; released labels z are not read; another part has other noise; Γ is of s̃ as well."""
    labels = draw_private(bed, 500, 1.0, 4)
    y = labels.y.clone()
    y[7] = -y[7]
    theta = central.central_fit(labels).theta
    assert not torch.equal(theta, central.central_fit(replace(labels, y=y)).theta)
    assert torch.equal(theta, central.central_fit(labels.relabelled(-labels.z)).theta)
    assert not torch.equal(theta, central.central_fit(labels, part=1).theta)
    plain, careful = (central.CENTRAL[name](bed, labels).reward for name in ("central", "central, pessimism"))
    assert bool((careful < plain).all())


def test_calibration_in_nats_is_the_divergence_of_the_chances(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 for the truth; for no reward at all log 2 less the entropy of the labels."""
    labels = draw_private(bed, 100, 1.0, 0)
    uniform = torch.full_like(bed.held_truth, 1.0 / bed.held_truth.shape[1])
    found = {}
    for name, reward in (("truth", bed.held_truth), ("nothing", torch.zeros_like(bed.held_truth))):
        outcome = arms.Outcome(reward, uniform)
        monkeypatch.setitem(preferences.ARMS, "planted", lambda *_, made=outcome: made)
        found[name] = preferences.measure(bed, labels, "planted")["nats"]
    half = bed.held_truth.shape[1] // 2
    chance = torch.sigmoid(bed.held_truth[:, :half] - bed.held_truth[:, half:])
    entropy = torch.special.entr(chance) + torch.special.entr(1.0 - chance)
    assert found["truth"] == pytest.approx(0.0, abs=1e-12)
    assert found["nothing"] == pytest.approx(math.log(2.0) - float(entropy.mean()))


# --- the table --------------------------------------------------------------------------------------------------------


def rows(difference: float, seeds: int = 12) -> list[preferences.Row]:
    generator = np.random.default_rng(0)
    found = []
    for seed in range(seeds):
        base = generator.normal()
        for arm in (arms.OURS, "debiased"):
            for epsilon in (1.0, None):
                j = base + (difference + 0.1 * generator.normal() if arm != arms.OURS else 0.0)
                cell = {"seed": seed, "n": 500, "epsilon": epsilon, "arm": arm}
                found.append(cell | {"j": j, "accuracy": 0.7, "scale": 1.0, "nats": 0.01})
    return found


@pytest.mark.parametrize(
    ("difference", "said"), [(0.5, "The claim is refuted"), (0.0, "The claim holds"), (-0.5, "in 1 it is worse")]
)
def test_the_verdict_falls_either_way(difference: float, said: str) -> None:
    assert said in "\n".join(preferences.league(preferences.Table(rows(difference))))


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(seed: int) -> Bed:
        return linear_bed(seed, dimension=4, prompts=60, answers=4)

    first = preferences.run(small, tmp_path, 2, (1.0,), (100,))
    before = (tmp_path / "arms.jsonl").read_text()
    assert {json.loads(line)["arm"] for line in before.splitlines()} == {*arms.ARMS, *central.CENTRAL}
    monkeypatch.setattr(preferences, "measure", None)
    assert preferences.run(small, tmp_path, 2, (1.0,), (100,)) == first
    assert (tmp_path / "arms.jsonl").read_text() == before
    assert (tmp_path / "league.png").stat().st_size > 1000


def test_rows_of_another_bed_are_refused_and_a_cut_line_is_measured_again(tmp_path: Path) -> None:
    """Another kl_coef, and other answers under the same file name, would reprint what the first bed gave."""

    def a_bed(seed: int, kl_coef: float = 0.5, prompts: int = 60) -> Bed:
        return replace(linear_bed(seed, dimension=4, prompts=prompts, answers=4), kl_coef=kl_coef)

    rows, first = tmp_path / "arms.jsonl", preferences.run(a_bed, tmp_path, 2, (1.0,), (100,))
    for changes in ({"kl_coef": 0.2}, {"prompts": 61}):
        with pytest.raises(UserError, match=r"arms\.jsonl holds rows measured on other data or settings: choose"):
            preferences.run(partial(a_bed, **changes), tmp_path, 2, (1.0,), (100,))  # type: ignore[arg-type]
    whole = rows.read_text().splitlines()
    rows.write_text("\n".join(whole)[:-9])  # a kill within the last line
    assert preferences.run(a_bed, tmp_path, 2, (1.0,), (100,)) == first
    kept = [line for line in rows.read_text().splitlines() if line.endswith("}")]
    assert sorted(kept) == sorted(whole)
    rows.write_text("".join(json.dumps({**json.loads(line), "bed": None}) + "\n" for line in whole))
    with pytest.raises(UserError, match="other data"):  # of before rows named their bed
        preferences.run(a_bed, tmp_path, 2, (1.0,), (100,))


def test_a_pool_of_another_file_is_another_bed(tmp_path: Path) -> None:
    made = linear_bed(1, dimension=6, prompts=20, answers=4)
    names = ("train_features", "train_truth", "eval_features", "eval_truth")
    beds = []
    for number, scale in enumerate((1.0, 2.0)):
        (tmp_path / str(number)).mkdir()
        pool = dict(zip(names, (made.x, scale * made.truth, made.held_x, made.held_truth), strict=True))
        save_file(pool, tmp_path / str(number) / "mine.safetensors")
        beds += [pool_bed(tmp_path / str(number) / "mine.safetensors", kl_coef) for kl_coef in (0.5, 0.5, 0.2)]
    identities = [bed.identity for bed in beds]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 4


def test_the_pool_of_another_run_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whose it is gets compared: nothing is drawn here."""
    recipe = load_recipe(Recipe, Path(__file__).parents[3] / "configs" / "demo.yaml")
    digests = {"one": "a", "other": "b"}
    monkeypatch.setattr(RunDir, "require", lambda *_: None)
    monkeypatch.setattr(pool_module, "weights_digest", lambda home: digests[home.parts[-3]])
    home = tmp_path / "pool.safetensors"
    features = f"{recipe.reward.num_layers} layers, {recipe.reward.pooling}"
    save_file({"x": torch.ones(1)}, home, {"policy": "a", "answers": f"4, 8, seed {recipe.seed}", "features": features})
    assert pool_module.make_pool(RunDir(tmp_path / "one"), recipe, home, 4, 8)["x"].tolist() == [1.0]
    with pytest.raises(UserError, match=r"was not drawn from .*other: choose another --output"):
        pool_module.make_pool(RunDir(tmp_path / "other"), recipe, home, 4, 8)


def test_the_command_on_a_pool(tmp_path: Path) -> None:
    made = linear_bed(1, dimension=6, prompts=120, answers=6)
    names = ("train_features", "train_truth", "eval_features", "eval_truth")
    pool = dict(zip(names, (made.x, made.truth, made.held_x, made.held_truth), strict=True))
    save_file(pool, tmp_path / "mine.safetensors")
    assert pool_bed(tmp_path / "mine.safetensors", 0.5).most_pairs == 120 * 15
    called = CliRunner().invoke(
        app, ["benchmark", "preferences", "--pool", str(tmp_path / "mine.safetensors"), "--run", "x"]
    )
    assert called.exit_code == 2 or "two beds" in str(called.exception)
    (tmp_path / "bad.safetensors").write_bytes(b"no pool")
    with pytest.raises(UserError, match="no pool of answers"):
        pool_bed(tmp_path / "bad.safetensors", 0.5)


def test_with_equal_priors_least_squares_stands_where_the_likelihood_does() -> None:
    """At ε = 0.1, where the eight numbers themselves cost it as much as they do on the page."""
    likelihood, squares = get_loss("private_likelihood"), get_loss("private_least_squares")
    lost, left = [], []
    for seed in range(12):
        bed = linear_bed(seed)
        labels = draw_private(bed, 5000, 0.1, seed)
        equal = [ridge_in_units_of(squares, ridge, labels.noise) for ridge in arms.ridges_of(labels)]
        fits = [arms.fit(bed, labels, likelihood), arms.fit(bed, labels, squares)]
        fits.append(arms.fit_among(equal, bed, labels, squares, likelihood))
        best, as_published, with_equal_priors = (bed.gain(arms.gibbs(bed, fit).policy) for fit in fits)
        lost.append(best - as_published)
        left.append(best - with_equal_priors)
    assert np.mean(lost) > 0.01
    assert np.abs(left).max() < 1e-3
