"""Metrics of hand-made results, and measuring real answers of a tiny model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from private_rlhf.core.stats import wilson
from private_rlhf.evaluation.evaluation_sampler import Answer, PromptResult
from private_rlhf.evaluation.summary import FRONTIER, Summary, distinct_n, per_prompt
from private_rlhf.recipe import EvaluateConfig
from private_rlhf.stages.evaluate import shown_samples


def answer(truth: float | None, kl: float = 0.0, tokens: int = 3, text: str = "a b c") -> Answer:
    """r̄ is the truth plus one, r̂ the truth."""
    value = 0.0 if truth is None else truth
    return Answer(text, tokens, truth, value + 1, value, kl)


def results(count: int = 40, policy: float = 2.0, kl: float = 0.5) -> list[PromptResult]:
    """π_ref answers are worth 0 and 4 with equal chance, so every expectation is known; `policy` is certain."""
    return [
        PromptResult(i, f"p{i}", [answer(4.0 * (i % 2))], [answer(policy, kl)], [answer(0.0), answer(4.0)])
        for i in range(count)
    ]


def test_win_rates_and_gains_of_the_policy() -> None:
    metrics = Summary(results(policy=3.0), kl_coef=2.0, seed=0).policy_metrics()
    assert metrics["generation_win_rate_truth"] == wilson(20, 40).as_dict()  # beats 0, loses to 4
    assert metrics["generation_win_rate_rm"] == wilson(20, 40).as_dict()
    assert (metrics["true_reward"], metrics["reward"], metrics["pessimistic_reward"]) == (3.0, 4.0, 3.0)
    assert (metrics["kl"], metrics["kl_ci"]) == (0.5, [0.5, 0.5])
    assert metrics["objective"] == pytest.approx(3.0 - 2.0 * 0.5)
    assert metrics["objective_gain"]["value"] == pytest.approx(2.0 - 2.0)  # the candidates' mean is 2
    assert metrics["response_tokens"] == 3.0
    tied = Summary(results(policy=4.0), 2.0, 0).policy_metrics()
    assert tied["generation_win_rate_truth"]["value"] == 0.75


def test_the_reference_has_no_kl_and_is_judged_by_a_second_draw() -> None:
    metrics = Summary(results(), kl_coef=2.0, seed=0).reference_metrics()
    assert metrics["kl"] == 0
    assert metrics["true_reward"] == metrics["objective"] == 2.0
    assert metrics["objective_gain"] is None
    assert metrics["generation_win_rate_truth"] == wilson(10, 40).as_dict()  # worth 0: half ties with 0, loses to 4
    alone = [dataclasses.replace(result, candidates=[]) for result in results()]
    assert Summary(alone, 2.0, 0).reference_metrics()["generation_win_rate_truth"] is None


def gibbs_value(kl_coef: float) -> tuple[float, float]:
    """(E[r*], KL) of the Gibbs policy over {0, 4} with equal reference weights."""
    share = 1 / (1 + math.exp(-4 / kl_coef))
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return 4 * share, math.log(2) - entropy


def test_the_yardstick_is_the_closed_form() -> None:
    summary = Summary(results(), kl_coef=2.0, seed=0)
    metrics = summary.gibbs_metrics()
    assert metrics is not None
    reward, kl = gibbs_value(2.0)
    assert metrics["true_reward"] == pytest.approx(reward)
    assert (metrics["reward"], metrics["pessimistic_reward"]) == pytest.approx((reward + 1, reward))
    assert metrics["kl"] == pytest.approx(kl)
    assert metrics["objective"] == pytest.approx(reward - 2.0 * kl)
    share = reward / 4
    expected = 0.5 * (share + 0.5 * (1 - share)) + 0.5 * (0.5 * share)  # against 0, and against 4
    assert metrics["generation_win_rate_truth"]["value"] == pytest.approx(expected)
    frontier = summary.frontier()
    assert frontier is not None
    assert [point["kl_coef"] for point in frontier] == list(FRONTIER)
    for point in frontier:
        assert (point["true_reward"], point["kl"]) == pytest.approx(gibbs_value(point["kl_coef"]))
    picks = summary.gibbs_picks()
    assert picks == summary.gibbs_picks()
    assert abs(np.mean(picks) - share) < 4 * math.sqrt(share * (1 - share) / 40)


def test_ppo_s_share_of_the_gibbs_gain() -> None:
    reward, kl = gibbs_value(2.0)
    ideal = reward - 2.0 * kl - 2.0
    found = Summary(results(policy=reward, kl=kl), 2.0, 0).ppo_over_gibbs()
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert found.n == 40
    half = Summary(results(policy=2.0 + ideal / 2, kl=0.0), 2.0, 0).ppo_over_gibbs()
    assert half is not None
    assert half.value == pytest.approx(0.5)
    assert half.ci_low <= half.value <= half.ci_high


def test_the_rows_of_prompts_make_up_the_means() -> None:
    summary = Summary(results(policy=3.0, kl=0.25), kl_coef=2.0, seed=0)
    rows = summary.by_prompt()
    assert [row["index"] for row in rows] == list(range(40))
    assert {row["kl"] for row in rows} == {0.25}
    assert {row["objective_gain"] for row in rows} == {3.0 - 2.0 * 0.25 - 2.0}
    truth, kl = gibbs_value(2.0)
    assert [row["gibbs_objective_gain"] for row in rows] == pytest.approx([truth - 2.0 * kl - 2.0] * 40)
    blind = [dataclasses.replace(result, policy=[answer(None, 0.25)], candidates=[]) for result in results()]
    assert Summary(blind, 2.0, 0).by_prompt()[0] == {
        "index": 0,
        "kl": 0.25,
        "objective_gain": None,
        "gibbs_objective_gain": None,
    }


def test_a_share_of_nothing_is_not_stated() -> None:
    flat = [dataclasses.replace(r, candidates=[answer(2.0), answer(2.0)]) for r in results()]
    assert Summary(flat, 2.0, 0).ppo_over_gibbs() is None
    without = [dataclasses.replace(r, candidates=[]) for r in results()]
    summary = Summary(without, 2.0, 0)
    assert summary.ppo_over_gibbs() is None
    assert summary.gibbs_metrics() is None
    assert summary.frontier() is None


def test_without_truth_nothing_is_said_about_it() -> None:
    blind = [
        PromptResult(r.index, r.prompt, [answer(None)], [answer(None, 0.5)], [answer(None), answer(None)])
        for r in results()
    ]
    summary = Summary(blind, 2.0, 0)
    metrics = summary.policy_metrics()
    for name in ("generation_win_rate_truth", "true_reward", "objective", "objective_gain"):
        assert metrics[name] is None
    assert metrics["generation_win_rate_rm"]["value"] == 0.5
    assert summary.ppo_over_gibbs() is None
    gibbs = summary.gibbs_metrics()
    assert gibbs is not None
    assert gibbs["true_reward"] is None


def test_means_are_per_prompt_first() -> None:
    groups = [[answer(0.0), answer(2.0)], [answer(5.0)]]
    assert per_prompt(groups, "true_reward").tolist() == [1.0, 5.0]


def test_distinct_n() -> None:
    assert distinct_n(["a b a b"], 1) == 0.5
    assert distinct_n(["A b", "a c"], 1) == 0.75
    assert distinct_n(["a b c", "a b d"], 2) == 0.75
    assert distinct_n(["a"], 2) == 0.0
    assert distinct_n([], 1) == 0.0


def test_the_worst_prompt_is_shown_beside_those_spread_evenly() -> None:
    given = [dataclasses.replace(row, policy=[answer(-9.0 * (row.index == 3))]) for row in results(9)]
    summary = Summary(given, kl_coef=1.0, seed=0)
    rows = shown_samples(given, summary, "private", EvaluateConfig(shown_samples=2))
    assert [(row["prompt"], row["private"]["worst"]) for row in rows] == [("p0", False), ("p8", False), ("p3", True)]
    assert shown_samples(given, summary, "private", EvaluateConfig(shown_samples=0)) == []
