"""The likelihood win rate and its debiasing, and the longer-answer rule on real data."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.stats import Estimate, wilson
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Renderer
from private_rlhf.evaluation.rates import (
    like_length,
    likelihood_win_rate,
    longer_answer_baseline,
    longer_answers,
    pair_rows,
    preferences,
    prefers_longer,
    win_rate_at_like_length,
)
from private_rlhf.lm.base_models import tiny_config, tiny_tokenizer
from private_rlhf.lm.logprobs import mean_logprobs
from transformers import LlamaForCausalLM

NOISE, QUARTER = LabelNoise.of(0.5), LabelNoise(math.log(3), Fraction(3, 4))
FLIP = 1 / (1 + math.exp(0.5))


def test_rows_are_chosen_then_rejected_and_the_rate_reads_them_so() -> None:
    renderer = Renderer(tiny_tokenizer(["good", "bad"]), 60, 8)
    rows = pair_rows([ReleasedPair("p", "good", "bad", "1"), ReleasedPair("q", "bad", "good", "2")], renderer)
    texts = [renderer.text(response) for _, response in rows]
    assert texts == ["good", "bad", "bad", "good"]
    assert likelihood_win_rate(np.array([-1.0, -2.0, -1.0, -2.0, -3.0, -2.0, -1.0, -1.0]), PUBLIC) == wilson(2.5, 4)


def test_debiasing_in_closed_form() -> None:
    share = Estimate(0.6, 0.5, 0.7, 100)
    assert PUBLIC.debias(share) == share
    found = QUARTER.debias(share)
    assert (found.value, found.ci_low, found.ci_high, found.n) == pytest.approx((0.7, 0.5, 0.9, 100))
    assert QUARTER.debias(Estimate(0.9, 0.85, 0.95, 9)).value > 1  # clipping would bias it
    for truth in (0.0, 0.3, 1.0):
        assert NOISE.debias(Estimate(FLIP + (1 - 2 * FLIP) * truth, 0, 1, 1)).value == pytest.approx(truth)


def test_debiased_rates_on_private_labels_are_unbiased_and_cover() -> None:
    """2,000 releases of 500 labels at ε = 0.5, true rate 0.7: the mean is within 4 standard errors (6e-5 of false
    alarms), and 95 ± 2.5 % of the intervals hold the truth (5 standard errors)."""
    generator = np.random.default_rng(0)
    values, held = [], 0
    for _ in range(2000):
        agrees = generator.random(500) < 0.7
        kept = generator.random(500) >= FLIP
        likelier = np.where(agrees == kept, 1.0, -1.0)  # against z
        found = likelihood_win_rate(np.stack([likelier, np.zeros(500)], axis=1).ravel(), NOISE)
        values.append(found.value)
        held += found.ci_low <= 0.7 <= found.ci_high
    assert abs(np.mean(values) - 0.7) < 4 * np.std(values) / math.sqrt(2000)
    assert abs(held / 2000 - 0.95) < 0.025
    assert abs(FLIP + (1 - 2 * FLIP) * 0.7 - 0.7) > 0.1  # what the raw share on z would say


@torch.no_grad()
def test_mean_logprobs_are_per_token_and_do_not_depend_on_batches() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(8, 1, 0)).eval()
    rows = [([3, 4], [5, 1]), ([5], [0, 0, 6, 1]), ([2, 6, 7, 3], [1]), ([7, 7], [2, 3, 4, 5, 6])]
    expected = []
    for prompt, response in rows:
        logprobs = torch.log_softmax(model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1], -1)
        expected.append(float(logprobs[torch.arange(len(response)), torch.tensor(response)].mean()))
    for size in (1, 3, 4):
        found = mean_logprobs(model, rows, pad_token_id=0, batch_size=size, device=torch.device("cpu"))
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_longer_answer_counts_characters_and_a_tie_half() -> None:
    pairs = [
        ReleasedPair("p", "aaaa", "b b", "1"),
        ReleasedPair("q", "aa", "bbb", "2"),
        ReleasedPair("r", "aa", "bb", "3"),
        ReleasedPair("s", [{"role": "assistant", "content": "aaaa"}], [{"role": "assistant", "content": "b"}], "4"),
    ]
    assert longer_answer_baseline(pairs, PUBLIC) == wilson(2.5, 4)
    assert longer_answer_baseline(pairs, QUARTER).value == pytest.approx((0.625 - 0.25) / 0.5)


def test_equally_long_answers_do_not_bias_the_debiased_rate() -> None:
    """300 true labels: the longer answer wins 150, loses 90, 60 pairs are equally long, so .6. The mean over 400
    releases at ε = 0.5 is within 4 standard errors of it (6e-5 of false alarms); with ties as misses it was .19."""
    generator, values = np.random.default_rng(1), []
    texts = [("aa", "b")] * 150 + [("a", "bb")] * 90 + [("a", "b")] * 60
    for _ in range(400):
        kept = generator.random(300) >= FLIP
        released = [own if keep else own[::-1] for own, keep in zip(texts, kept, strict=True)]
        values.append(longer_answer_baseline([ReleasedPair("p", *own, "1") for own in released], NOISE).value)
    assert abs(np.mean(values) - 0.6) < 4 * np.std(values) / math.sqrt(400)
    assert 4 * np.std(values) / math.sqrt(400) < 0.05


def test_choices_say_which_response_is_preferred() -> None:
    assert preferences(np.array([-1.0, -2.0, -3.0, -2.0, -1.0, -1.0])).tolist() == [1, -1, 0]
    pairs = [ReleasedPair("p", *texts, "1") for texts in (("longer", "no"), ("a", "bb"), ("a", "b"))]
    assert longer_answers(pairs).tolist() == [1, -1, 0]
    assert longer_answers([]).tolist() == []


def test_the_longer_answer_on_real_pairs(hh_helpful: Path) -> None:
    rows = [json.loads(line) for line in (hh_helpful / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [ReleasedPair(row["prompt"], row["chosen"], row["rejected"], str(i)) for i, row in enumerate(rows)]
    found = longer_answer_baseline(pairs, PUBLIC)
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    ties = sum(len(row["chosen"]) == len(row["rejected"]) for row in rows)
    assert (found.n, longer, ties) == (764, 591, 5), "32 answers to one prompt, of which the longer one wins 28"
    assert found.value == 0.5935


def test_a_policy_that_only_prefers_longer_answers_gains_nothing_at_like_length() -> None:
    """200 pairs of like length whose label is a coin, 300 others of which the longer answer is chosen in 200."""
    like = [("a" * 10, "b" * 11)] * 100 + [("a" * 11, "b" * 10)] * 100
    other = [("a" * 30, "b" * 10)] * 200 + [("a" * 10, "b" * 30)] * 100
    pairs = [ReleasedPair(f"p{i}", *texts, "1") for i, texts in enumerate(like + other)]
    assert like_length(pairs).tolist() == [True] * 200 + [False] * 300
    longest = np.array([[len(str(pair.chosen)), len(str(pair.rejected))] for pair in pairs], dtype=float).ravel()
    assert likelihood_win_rate(longest, PUBLIC).value == 0.6
    assert win_rate_at_like_length(longest, pairs, PUBLIC) == wilson(100, 200)
    longer = longer_answers(pairs)
    assert prefers_longer(preferences(longest), longer).value == 1.0
    assert prefers_longer(preferences(-longest), longer).value == 0.0
    assert prefers_longer(preferences(np.zeros(1000)), longer) == wilson(250, 500)
    assert win_rate_at_like_length(longest[400:], pairs[200:], PUBLIC) is None
    private = win_rate_at_like_length(longest, pairs, QUARTER)
    assert private is not None
    assert private == QUARTER.debias(wilson(100, 200))
