"""`private-rlhf design`: what labels would bring, before anyone is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from private_rlhf.cli import main
from private_rlhf.commands.design import consent, draw, head, terms
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.data.container import settle, write_shard
from private_rlhf.data.release import read_release
from private_rlhf.evaluation import forecast
from private_rlhf.evaluation.forecast import (
    Answers,
    Forecast,
    Terms,
    agreement_of,
    central_worth,
    forecasts,
    learn,
    margin_scale,
    noise_of,
    pilot_scales,
)
from private_rlhf.lm import base_models
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import RawPair
from support.plain_release import release_pairs

FEW = Answers(Answers.normal().x[:40, :8, :8])


@pytest.mark.parametrize("agreement", [0.51, 0.65, 0.9])
def test_the_scale_of_margins_is_that_of_the_agreement(agreement: float) -> None:
    """Against a million draws of a margin and of two people's labels: 5 standard errors, a false alarm in 10⁶."""
    scale = margin_scale(agreement)
    assert agreement_of(scale) == pytest.approx(agreement, abs=1e-9)
    generator = np.random.default_rng(0)
    chance = 1 / (1 + np.exp(-scale * generator.standard_normal(10**6)))
    one, other = generator.random((2, 10**6)) < chance
    assert np.mean(one == other) == pytest.approx(agreement, abs=5 * math.sqrt(agreement * (1 - agreement) / 10**6))


def test_the_gain_is_that_of_the_gibbs_policy_of_what_was_learnt() -> None:
    """By the sum over two answers: J of π ∝ exp(θ̂x/kl_coef), against the uniform one."""
    answers = Answers(torch.tensor([[[1.0], [0.0]]], dtype=torch.float64))
    theta, learnt, kl_coef = torch.tensor([2.0]).double(), torch.tensor([0.5]).double(), 0.5
    p = 1 / (1 + math.exp(-1.0))
    expected = 2 * (p - 0.5) - kl_coef * (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))
    assert answers.gain(theta, learnt, kl_coef) == pytest.approx(expected, abs=1e-12)
    assert answers.gain(theta, 0 * learnt, kl_coef) == 0.0
    assert answers.gain(theta, theta, kl_coef) > answers.gain(theta, learnt, kl_coef)


def test_gains_rise_with_labels_and_epsilon_and_follow_the_law() -> None:
    cells = [(400, 0.5), (400, 2.0), (1600, 2.0), (400, math.inf), (round(400 / math.tanh(1.0) ** 2), 2.0)]
    low, middle, more, public, law = forecasts(FEW, cells, [margin_scale(0.7)] * 8, 0.5)
    means = [each.gain.mean() for each in (low, middle, more)]
    assert 0 < means[0] < means[1] < means[2]
    assert (public.retained == 1).all()
    assert public.right.mean() > middle.right.mean() > low.right.mean() > 0.5
    assert law.gain.mean() == pytest.approx(public.gain.mean(), rel=0.08)  # n/tanh²(ε/2) labels are worth n true ones


def test_labels_are_flipped_where_the_coin_says_so() -> None:
    """At ε = 0⁺ half of the labels are flipped, and nothing is learnt; coins below α keep every label."""
    rows, true = FEW.differences[:300], torch.ones(300, dtype=torch.float64)
    kept = learn(rows, true, torch.zeros(300, dtype=torch.float64), 1.0)
    flipped = learn(rows, true, torch.ones(300, dtype=torch.float64), 1.0)
    assert torch.allclose(kept, -flipped, atol=1e-4)
    assert (rows @ kept).mean() > 0


def test_a_share_is_never_outside_0_and_1() -> None:
    """And nothing is retained of a gain that is none."""
    gains, public = [-0.1, 0.2, 0.5, -0.1, 0.1], [0.4, 0.4, 0.4, -0.05, 0.0]
    result = Forecast(np.array(gains), np.array(public), np.zeros(5))
    assert result.retained == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.0])


def test_a_budget_buys_the_best_number_of_answers() -> None:
    assert terms(20, 1.0, None) == (20, 1.0)
    assert terms(20, None, 2.0) == (1, 2.0)
    asked, epsilon = terms(20, None, 20.0)
    assert (asked, epsilon) == (9, pytest.approx(20 / 9))


def test_the_consent_form_says_what_a_report_and_all_of_them_tell() -> None:
    text = consent(4, [1.0])
    assert "of 100 people who prefer A, 73 reports say A" in text
    assert "at most 2.8; whoever sees all of yours, by 54.6.”" in text
    assert "at most once. " in consent(1, [0.2])
    assert consent(1, [0.2]).endswith("at most 1.3.”")  # e^0.2 is 1.22
    assert "more than 99 reports say A" in consent(1, [6.0])
    assert "at most 404; whoever sees all of yours, by 162,755. So your answers are hardly" in consent(2, [6.0])
    assert "e^20. So each answer is protected, and all of yours together hardly.”" in consent(20, [1.0])


def test_the_command_prints_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "design.md"
    command = ["design", "--people", "10", "--answers", "2", "--epsilon", "1", "--rewards", "8", "--output", str(page)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# 20 labels at ε = 1: 2 of each of 10 people\n\nThey carry what 4 true labels would")
    assert page.read_text(encoding="utf-8").startswith(printed.rstrip())
    rows = [line.split(" | ")[:2] for line in printed.splitlines() if line.startswith("| ")]
    assert rows.pop() == ["| 20, seen by one party", "1"]
    assert len(rows) == len({*map(tuple, rows)}) == 1 + 5 + 4  # the head, five ε at 20 labels, four other numbers
    assert "Retained gain" in (tmp_path / "design.svg").read_text(encoding="utf-8")
    assert main(command) == 0  # its own page is written again
    page.write_text("notes", encoding="utf-8")
    assert main(command) == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "--epsilon (of an answer), --budget (of a person's answers) or --mix must be given"),
        (["--epsilon", "1", "--budget", "2"], "--epsilon (of an answer), --budget"),
        (["--epsilon", "1", "--mix", "0.5:0.5,2:0.5"], "--epsilon (of an answer), --budget"),
        (["--mix", "0.5:0.3,2:0.6"], "--mix must be EPSILON:SHARE, where shares add up to 1"),
        (["--mix", "0.5,2"], "--mix must be EPSILON:SHARE"),
        (["--mix", "0.5:1.2,2:-0.2"], "--mix must be EPSILON:SHARE"),
        (["--mix", "0.5:nan,2:0.5"], "--mix must be EPSILON:SHARE"),
        (["--mix", "0.5:0.5,0.5:0.5"], "--mix must be 2 to"),
        (["--mix", "0.5:0.5,inf:0.5"], "--mix must be a finite number above 0"),
        (["--epsilon", "1", "--pilot", "prefs.jsonl"], "prefs.jsonl: no such release folder"),
        (["--epsilon", "1", "--pilot", "release", "--agreement", "0.7"], "--agreement must be left out with --pilot"),
        (["--epsilon", "0"], "--epsilon"),
        (["--epsilon", "1", "--agreement", "0.5"], "--agreement must lie between 0.5 and 1, got 0.5"),
        (["--epsilon", "1", "--policy", "absent"], "--policy"),
        (["--epsilon", "1", "--output", "page.svg"], "--output must be a Markdown page, got page.svg"),
    ],
)
def test_what_cannot_be_forecast_is_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["design", "--people", "10", "--answers", "2", *options]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_of_any_number_of_labels_each_epsilon_has_its_share() -> None:
    for count in (10, 100, 1000):
        levels = noise_of(((0.5, 0.3), (2.0, 0.7)), count).level  # type: ignore[union-attr]
        assert np.mean(levels == 0) == pytest.approx(0.3, abs=1.5 / count)


def test_a_mix_brings_what_the_law_counts() -> None:
    """Σ tanh²(ε/2): 250 labels at 0.5 and 250 at 4 carry as much as 247 true ones."""
    mix: Terms = ((0.5, 0.5), (4.0, 0.5))
    true = round(500 * (math.tanh(0.25) ** 2 + math.tanh(2.0) ** 2) / 2)
    assert f"They carry what {true} true labels would" in head(50, 10, mix)[2]
    cells: list[tuple[int, Terms]] = [(500, mix), (true, math.inf), (500, 0.5), (500, 4.0)]
    mixed, law, low, high = (each.gain.mean() for each in forecasts(FEW, cells, [margin_scale(0.7)] * 16, 0.5))
    assert mixed == pytest.approx(law, rel=0.08)
    assert low < 0.8 * mixed < 0.9 * high


def test_a_label_of_a_mix_is_flipped_and_read_at_its_own_level() -> None:
    rows, true = FEW.differences[:300], torch.ones(300, dtype=torch.float64)
    mix = ((0.1, 0.5), (6.0, 0.5))
    noise = noise_of(mix, 300)
    coins = torch.full((300,), 0.9, dtype=torch.float64)  # kept with probability 0.525 and 0.998
    label = torch.where(torch.as_tensor(noise.level) == 1, 1.0, -1.0)  # type: ignore[union-attr]
    bold = rows[label > 0]
    learnt = learn(rows, true, coins, mix)
    assert (bold @ learnt).mean() > 0
    assert torch.allclose(learnt, learn(bold, true[: len(bold)], coins, 6.0), atol=0.15)  # the others carry nothing


def pilot(count: int, scale: float, epsilons: Sequence[float], seed: int) -> tuple[torch.Tensor, LevelledNoise]:
    """Pairs of FEW in the order of their private labels, at these ε in turn, of another reward for each seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    theta = scale * FEW.reward(seed, generator)
    x = FEW.differences[torch.randint(len(FEW.differences), (count,), generator=generator)]
    noise = LevelledNoise.of(epsilons, [epsilons[i % len(epsilons)] for i in range(count)])
    coins = torch.rand(2, count, generator=generator, dtype=torch.float64)
    true = torch.where(coins[0] < torch.sigmoid(x @ theta), 1.0, -1.0)
    z = torch.where(coins[1] < torch.as_tensor(noise.flip_prob), -true, true)
    return z[:, None] * x, noise


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Many small products are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("agreement", "epsilons"), [(0.6, (1.0,)), (0.75, (0.5, 4.0))])
def test_the_interval_of_a_pilot_holds_the_agreement(
    agreement: float, epsilons: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 90 % of 200 pilots of 100 labels or more. One that holds it in 95 % fails that for one seed in 600."""
    monkeypatch.setattr(forecast, "PILOT_SCALES", np.geomspace(0.1, 8.0, 10))
    monkeypatch.setattr(forecast, "PILOT_DRAWS", 200)
    scale = margin_scale(agreement)
    told = [pilot_scales(FEW, *pilot(100, scale, epsilons, seed), 0) for seed in range(200)]
    assert np.mean([low <= scale <= high for low, _, high in told]) >= 0.9


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_the_interval_of_a_pilot_misses_where_flips_are_not_known() -> None:
    """Labels at ε = 1 that are read as nearly true ones seem to come from people who hardly agree."""
    scale = margin_scale(0.8)
    pilots = [pilot(400, scale, (1.0,), seed) for seed in range(20)]
    wrong = noise_of(9.0, 400)
    assert np.mean([pilot_scales(FEW, x, noise, 0)[2] >= scale for x, noise in pilots]) >= 0.85
    assert np.mean([pilot_scales(FEW, x, wrong, 0)[2] < scale for x, _ in pilots]) >= 0.85


@pytest.mark.usefixtures("one_thread")
def test_a_larger_pilot_tells_more() -> None:
    widths = []
    for count in (30, 300):
        told = [pilot_scales(FEW, *pilot(count, 1.9, (2.0,), seed), 8) for seed in range(10)]
        assert all(np.diff(quantiles[3:]).min() >= 0 and len(quantiles) == 3 + 8 for quantiles in told)
        widths.append(np.mean([agreement_of(high) - agreement_of(low) for low, _, high, *_ in told]))
    assert widths[1] < 0.75 * widths[0]
    assert np.mean([agreement_of(centre) for _, centre, *_ in told]) == pytest.approx(agreement_of(1.9), abs=0.04)


def test_a_pilot_of_one_label_tells_nothing() -> None:
    """Then what is believed is what was: 50 % to 90 % alike."""
    low, centre, high = map(agreement_of, pilot_scales(FEW, *pilot(1, 1.9, (2.0,), 0), 0))
    assert low < 0.53 < 0.68 < centre < 0.74 < 0.86 < high


def test_central_trust_pays_from_some_number_of_labels_on() -> None:
    """As docs/results/central.md measured it, 32 features: from between 500 and 2,000 labels at ε = 1 and 2, and not
    from 2,000 at ε = 4."""
    answers = Answers.normal()
    measured = ((1.0, 500, False), (1.0, 2000, True), (2.0, 500, False), (2.0, 2000, True), (4.0, 2000, False))
    for epsilon, count, ahead in measured:
        assert (central_worth(answers, count, epsilon) > count * math.tanh(epsilon / 2) ** 2) == ahead
    assert central_worth(answers, 2000, 0.5) < central_worth(answers, 2000, 1.0) < 2000


def test_the_consent_form_of_a_mix_says_what_each_level_tells() -> None:
    text = consent(2, [0.5, 2.0])
    assert "You choose how often, before the first question; your choice is not hidden. At ε = 0.5, of 100" in text
    assert "62 reports say A. Whoever sees one report can change the odds of what you prefer by a factor of at" in text
    assert "most 1.7; whoever sees all of yours, by 2.8. At ε = 2, of 100" in text
    assert "At ε = 2, of 100 people who prefer A, 88 reports say A." in text
    assert text.endswith("by 54.6.”")


def test_a_pilot_that_was_edited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded; an ε that is none of the release's ended in a traceback after that."""
    pilot = tmp_path / "pilot"
    release_pairs([RawPair("Say it.", "yes", "no")], pilot, RandomizedResponse(2.0), PrivacyKey(bytes(32)))
    (pilot / "_signature").unlink()
    (shard,) = pilot.glob("part-*")
    rows = pq.read_table(shard)
    write_shard(shard, rows.schema, [rows.set_column(0, "prompt", pa.array(["Say no."]))])
    settle(pilot)
    monkeypatch.setattr("private_rlhf.commands.design.draw", lambda *_: pytest.fail("the pilot was taken as it is"))
    assert main(["design", "--people", "10", "--answers", "2", "--epsilon", "1", "--pilot", str(pilot)]) == 2
    assert "holds a record_id that is not that of its texts" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_pilot_is_read_in_the_features_of_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checkpoint, and without: then in those of the base model, here a tiny one."""
    home = tiny_checkpoint(tmp_path / "tiny", ["the quick brown fox jumps over the lazy dog"], 0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    pairs = [RawPair("the fox", f"{one} {other}", f"{other} {one} dog") for one in words for other in words]
    release_pairs(pairs, tmp_path / "pilot", RandomizedResponse(2.0), PrivacyKey(bytes(32)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick dog"}\n', encoding="utf-8")
    answers, told = draw(str(home), str(prompts), read_release(tmp_path / "pilot"), 8)
    assert answers.x.shape[:2] == (1, 8)
    assert len(told) == 3 + 8
    monkeypatch.setattr(base_models, "base_checkpoint", lambda model: str(home))
    answers, told = draw(None, "embedded", read_release(tmp_path / "pilot"), 8)
    assert answers.x.shape[:2] == (200, 32)
    assert answers.differences.square().mean() == pytest.approx(1.0, rel=0.1)  # as of pairs in a `pair_basis`
    assert len(told) == 3 + 8


def test_answers_of_a_checkpoint_are_drawn_in_its_features(tmp_path: Path) -> None:
    """A `pair_basis` of its answers: differences have a mean second moment of about 1."""
    home = tiny_checkpoint(tmp_path / "tiny", ["the quick brown fox jumps over the lazy dog"], 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick dog"}\n{"prompt": "the lazy fox"}\n', encoding="utf-8")
    answers, told = draw(str(home), str(prompts))
    assert not told
    assert answers.x.shape[:2] == (2, 8)
    assert answers.differences.square().mean() == pytest.approx(1.0, rel=0.8)
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file"):
        draw(str(home), str(tmp_path / "absent.jsonl"))
