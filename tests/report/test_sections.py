"""Sentences and numbers: worded by what the intervals allow."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from private_rlhf.core.noise import LabelNoise
from private_rlhf.privacy.guarantee import PrivacyStatus
from private_rlhf.report import plots, sections
from private_rlhf.report.run_facts import RunFacts
from private_rlhf.report.sections import duration, number, percent, significant

PRIVATE = PrivacyStatus(2.0, 0.8808, (), False)


def facts(**result: Any) -> RunFacts:
    return RunFacts("x", {}, evaluation={"methods": {"gibbs": {"kl": 1.0}, "private": result, "sft": {"kl": 0.0}}})


def share(value: float, low: float, high: float) -> dict[str, Any]:
    return {"value": value, "ci_low": low, "ci_high": high, "n": 200}


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (share(0.7, 0.63, 0.76), "the policy beats the reference policy"),
        (share(0.55, 0.48, 0.62), "cannot be told apart from the reference"),
        (share(0.55, 0.5, 0.62), "cannot be told apart from the reference"),
        (share(0.3, 0.24, 0.37), "loses to the reference policy"),
    ],
)
def test_win_sentence_follows_the_interval(estimate: dict[str, Any], said: str) -> None:
    assert said in sections.headline(facts(generation_win_rate_truth=estimate), PRIVATE)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (share(0.4, 0.1, 0.7), "rises by 0.40 [0.10, 0.70]."),
        (share(-0.4, -0.7, -0.1), "falls by 0.40 [−0.70, −0.10]."),
        (share(0.4, -0.1, 0.9), "changes by +0.40 [−0.10, 0.90], which may be chance."),
    ],
)
def test_objective_sentence_follows_the_interval(gain: dict[str, Any], said: str) -> None:
    assert said in sections.headline(
        facts(generation_win_rate_truth=share(0.7, 0.6, 0.8), objective_gain=gain), PRIVATE
    )


def test_the_truth_judges_before_the_reward_model() -> None:
    both = facts(generation_win_rate_truth=share(0.6, 0.52, 0.67), generation_win_rate_rm=share(0.9, 0.85, 0.94))
    assert "judged by the true reward" in sections.headline(both, PRIVATE)
    model = facts(generation_win_rate_truth=None, generation_win_rate_rm=share(0.9, 0.85, 0.94))
    assert "judged by the reward model it was trained on" in sections.headline(model, PRIVATE)


def test_methods_are_ordered_and_the_policy_is_found_by_exclusion() -> None:
    assert list(facts(kl=0.5).methods) == ["sft", "private", "gibbs"]
    other = RunFacts("x", {}, evaluation={"methods": {"sft": {"kl": 0.0}, "uncorrected": {"kl": 1.0}}})
    assert other.policy == "uncorrected"
    assert RunFacts("x", {}).policy is None


def test_no_label_claims_privacy_for_a_marked_run() -> None:
    assert sections.label_of("private", {"epsilon": 2.0}) == "PPO, ε = 2"
    assert sections.label_of("nonprivate", {"epsilon": None}) == "PPO, ε = ∞"
    marked = PrivacyStatus(2.0, 0.88, ("seed",), False)
    assert "not private" in sections.headline(facts(kl=1.0), marked)
    assert sections.privacy_sentence(marked) == "Nothing is private in this run: seed."


def test_a_page_says_who_must_be_trusted() -> None:
    status = PrivacyStatus(1.0, 0.73, (), False, "the holder")
    assert sections.privacy_sentence(status).endswith(" Who must be trusted: the holder.")


def test_the_first_paragraph_names_the_assumption_and_the_person() -> None:
    keyed = sections.privacy_sentence(PrivacyStatus(1.0, 0.7310585786300048, keyed=True))
    local = sections.privacy_sentence(PrivacyStatus(1.0, 0.7310585786300048))
    assert "under the other, for whoever lacks the key and cannot break BLAKE2b. A person with m labels" in keyed
    assert "under the other. A person with m labels loses up to m·ε. Not private" in local
    assert "kept with probability 73.1\u00a0%" in keyed
    assert "Beware" not in keyed + local


@pytest.mark.parametrize(("epsilon", "kept"), [(10.0, "99.995\u00a0%"), (60.0, "over 99.9999999\u00a0%")])
def test_the_page_says_when_next_to_nothing_is_protected(epsilon: float, kept: str) -> None:
    status = PrivacyStatus(epsilon, LabelNoise.of(epsilon).keep_prob)
    said = sections.privacy_sentence(status)
    assert f"kept with probability {kept} and" in said
    assert f"Beware: at ε = {epsilon:g} nearly every label is released as it is: about one in " in said


@pytest.mark.parametrize(("epsilon", "bound"), [(0.2, "1.3"), (10 / 3, "28.1"), (20.0, "e^20")])
def test_a_bound_on_odds_is_rounded_up(epsilon: float, bound: str) -> None:
    """e^0.2 = 1.2214 and e^(10/3) = 28.03, which "at most 1.22" and "at most 28" are not."""
    status = PrivacyStatus(epsilon, LabelNoise.of(epsilon).keep_prob)
    assert f"at most {bound} times (e^ε, rounded up) as likely" in sections.privacy_sentence(status)


def test_the_fit_s_keep_probability_is_1_for_public_labels_only() -> None:
    shown = [dict(sections.fit_facts(LabelNoise.of(each).as_json()))["α"] for each in (2.0, 10.0, math.inf)]
    assert shown == ["0.8808", "0.99995", "1"]


def test_a_page_claims_what_was_seen_and_charges_what_was_asked() -> None:
    """By whose word labels are private, and what all answers about one pair cost, where that is more than one does."""
    seen = PrivacyStatus(1.0, 0.731, trusted="the holder", pair_total=1.0)
    assert sections.privacy_sentence(seen).startswith("Private: each preference label. It was kept with probability 73")
    assert "together" not in sections.privacy_sentence(seen)
    told = PrivacyStatus(1.0, 0.731, trusted="x", claim="as stated by y; not verified here", pair_total=12.0)
    said = sections.privacy_sentence(told)
    assert said.startswith("Private: each preference label (as stated by y; not verified here). By that statement it")
    assert "All answers about one pair together cost up to ε = 12." in said
    assert sections.tiles(facts(kl=1.0), told)[-1]["note"] == "kept with probability 0.731, as stated"


def test_table_leaves_out_what_nobody_measured() -> None:
    columns, rows = sections.methods_table(facts(kl=0.5, kl_ci=[0.4, 0.6], true_reward=None))
    assert columns == ["π_ref (SFT)", "private", "Gibbs"]
    assert rows == [("KL from π_ref, nats per response", [("0.00", ""), ("0.50", "[0.40, 0.60]"), ("1.00", "")])]


def test_fit_facts_keep_unknown_scalars_and_skip_structures() -> None:
    shown = dict(
        sections.fit_facts({"new_fact": 3, "epsilon": None, "ridge_path": [[1, 2, 3]], "weights": [1.0], "ok": True})
    )
    assert shown == {"ε": "∞", "New fact": "3", "Ok": "yes"}


def test_texts_left_out_of_the_stages_that_ran() -> None:
    prompts = {"what": "prompts", "read": 1200, "too_long": 34, "max_prompt_tokens": 96, "max_text_tokens": None}
    pairs = {"what": "pairs", "read": 20, "too_long": 0, "max_prompt_tokens": 96, "max_text_tokens": 512}
    ran = {"privatize": {}, "reward": {"report": {"texts": [pairs]}}, "ppo": {"report": {"texts": [prompts]}}}
    assert sections.texts_table(RunFacts("x", {}, manifests=ran)) == [
        ["reward", "pairs", "20", "0", "prompt 96, with a response 512"],
        ["ppo", "prompts", "1 200", "34", "prompt 96"],
    ]
    assert sections.texts_table(RunFacts("x", {}, manifests={"sft": {"report": {"summary": "before"}}})) == []


def test_numbers() -> None:
    assert number(-0.001) == "0.00"
    assert number(float("nan")) == "–"
    assert number(None) == "–"
    assert number(-1.5) == "−1.50"
    assert percent(0.714) == "71\u00a0%"
    assert significant(148413.159) == "148413"
    assert significant(2.0) == "2"
    assert [duration(s).replace("\u00a0", " ") for s in (1.94, 59.6, 3599.7, 7800)] == [
        "1.9 s",
        "1 min 00 s",
        "1 h 00 min",
        "2 h 10 min",
    ]


def test_frontier_without_a_reference_or_history_is_none() -> None:
    assert plots.frontier("f", [], {}, [], "reward") is None
    assert plots.win_rates("w", [("private", "PPO", {})]) is None
    assert plots.curves("l", [{"loss": None}], [("loss", "loss", plots.POLICY)], "nats") is None
    assert plots.stage_times("t", {}, {}) is None
    assert plots.ridge_path("r", [[1.0, -0.5, 0.1]], 1.0) is None
    assert plots.ridge_path("r", [[1.0, -0.5, None], [10.0, -0.6, None]], 1.0) is not None


def test_a_drawing_ignores_the_users_settings() -> None:
    import matplotlib

    def draw() -> str | None:
        return plots.curves("l", [{"loss": 2.0}, {"loss": 1.5}], [("loss", "loss", plots.POLICY)], "nats")

    plain = draw()
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "none"}):
        assert draw() == plain
        assert matplotlib.rcParams["font.size"] == 20


def test_a_share_of_nothing_is_not_printed() -> None:
    wild = RunFacts(
        "x", {}, evaluation={"ppo_over_gibbs": {"value": -228.8, "ci_low": -3862.0, "ci_high": 3099.0, "n": 24}}
    )
    assert "22" not in sections.yardstick(wild)
    assert "too little" in sections.yardstick(wild)


def test_a_debiased_share_above_one_is_drawn_and_printed_as_the_table_shows_it() -> None:
    above = plots.win_rates("w", [("private", "PPO", share(1.08, 0.9, 1.26))], share(-0.07, -0.3, 0.16))
    inside = plots.win_rates("w", [("private", "PPO", share(1.0, 0.9, 1.0))], share(0.0, 0.0, 0.16))
    assert above is not None
    assert above == inside
    bar = re.compile(r'<path d="([^"]*)"[^>]*style="fill: var\(--policy\)')
    assert bar.findall(above)
