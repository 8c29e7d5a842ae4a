"""How many answers of a person count within a budget: the law by derivatives, the split by enumeration."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.release import read_release
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.online.rounds import make_labeller
from private_rlhf.privacy.person import BEST_EPSILON, epsilon_each, information, split_budget
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import parse, to_tree
from support.recipes import recipe_of


def fisher(epsilon: float, margin: float) -> float:
    """Information about the margin of one released answer, by differences of its probability."""

    def chance(at: float) -> float:
        keep = 1 / (1 + math.exp(-epsilon))
        return (1 - keep) + (2 * keep - 1) / (1 + math.exp(-at))

    slope = (chance(margin + 1e-5) - chance(margin - 1e-5)) / 2e-5
    return slope**2 / (chance(margin) * (1 - chance(margin)))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.18, 8.0])
def test_the_law_that_the_split_follows(epsilon: float) -> None:
    assert information(epsilon, 1) / 4 == pytest.approx(fisher(epsilon, 0.0), rel=1e-8)
    for margin in (0.7, -3.0):
        shrink, t = math.tanh(epsilon / 2), math.tanh(margin / 2)
        law = shrink**2 * (1 - t**2) ** 2 / (4 * (1 - (shrink * t) ** 2))
        assert law == pytest.approx(fisher(epsilon, margin), rel=1e-6)


def test_one_answer_carries_what_twenty_do_11_6_times() -> None:
    assert split_budget(2.0, 20) == (1, 2.0)
    assert information(2.0, 1) / information(2.0, 20) == pytest.approx(11.62, abs=0.005)


def test_the_best_epsilon_of_an_answer() -> None:
    best = BEST_EPSILON
    assert best == pytest.approx(2.17731898, abs=1e-8)
    rate = [math.tanh(each / 2) ** 2 / each for each in (best - 1e-4, best, best + 1e-4)]
    assert rate[1] > max(rate[0], rate[2])


@pytest.mark.parametrize("questions", [1, 2, 3, 7, 40])
def test_no_other_whole_number_carries_more(questions: int) -> None:
    """By enumeration, from budgets of a hundredth on, also beside every budget where two numbers carry the same."""
    for step in range(1, 1201):
        total = step / 20
        answers, epsilon = split_budget(total, questions)
        assert information(total, answers) == max(information(total, k) for k in range(1, questions + 1)), total
        assert epsilon == epsilon_each(total, answers)


def test_without_a_limit_and_at_the_ends() -> None:
    assert split_budget(20.0) == (9, math.nextafter(20 / 9, 0.0))  # 9 times 20/9 in floats is above 20
    assert split_budget(20.0, 3)[0] == 3
    assert [split_budget(total)[0] for total in (1e-9, 1e-300, 2.0, 2.9, 3.2)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("answers", [1, 3, 7, 49, 1000])
def test_what_all_answers_cost_is_never_above_the_budget(answers: int) -> None:
    for total in (0.1, 1.0, 2.3, 17.77, 1e6):
        each = epsilon_each(total, answers)
        assert Fraction(each) * answers <= Fraction(total) < Fraction(math.nextafter(each, math.inf)) * answers


@pytest.mark.parametrize(("total", "questions"), [(0.0, 3), (-1.0, 3), (math.inf, 3), (math.nan, 3), (1.0, 0)])
def test_nonsense_is_refused(total: float, questions: int) -> None:
    with pytest.raises(UserError, match="a person"):
        split_budget(total, questions)


# --- in a recipe ------------------------------------------------------------------------------------------------------


def recipe(own: dict[str, Any], **more: Any) -> Recipe:
    return recipe_of(privatize=own, **more)


def test_a_recipe_shares_out_what_a_person_may_lose() -> None:
    own = recipe({"person_budget": 5.0, "labeler_column": "who"}).privatize
    assert (own.epsilon, own.max_events_per_person, own.budget, own.budget_per) == (2.5, 2, 5.0, "person")
    again = parse(Recipe, to_tree(recipe({"person_budget": 5.0, "labeler_column": "who"})), "r")
    assert again.privatize == own  # what a run saves is the same recipe
    few = recipe({"person_budget": 20.0, "person_questions": 3, "labeler_column": "who"}).privatize
    assert few.max_events_per_person == 3


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"person_budget": 2.0}, "labeler_column must be given"),
        ({"person_budget": 2.0, "labeler_column": "who", "epsilon": 1.0}, "makes epsilon 2.0, not 1.0"),
        ({"person_budget": 2.0, "labeler_column": "who", "max_events_per_person": 3}, "max_events_per_person 1, not 3"),
        ({"person_budget": 2.0, "labeler_column": "who", "budget": 3.0}, "makes budget 2.0, not 3.0"),
        ({"person_questions": 2, "epsilon": 1.0}, "must go with person_budget"),
        ({}, "key 'privatize.epsilon' is required"),
    ],
)
def test_what_does_not_go_with_a_person_s_budget(own: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe(own)


def test_online_asks_a_person_that_often_and_no_more() -> None:
    crowd = {"labeller": "crowd", "crowd": {"persons": 500, "most": 1}}
    public = {"public_labels": True}
    assert recipe({"person_budget": 2.0}, online=crowd, data=public).privatize.epsilon == 2.0
    with pytest.raises(UserError, match="a person answers 1: lower"):
        recipe({"person_budget": 2.0}, online=crowd | {"crowd": {"persons": 9, "most": 2}}, data=public)
    with pytest.raises(UserError, match="truth does not know persons"):
        recipe({"person_budget": 2.0}, online={}, data=public)
    for key, cap in (("budget", 1.0), ("max_events_per_person", 1)):
        with pytest.raises(UserError, match=rf"\.{key} must be null with online, got {cap}: set person_budget only"):
            recipe({"epsilon": 1.0, key: cap, "labeler_column": "who"}, online=crowd, data=public)


def test_a_release_holds_everyone_to_it(tmp_path: Path) -> None:
    """60 labels of 3 persons, E = 5: two of each are released, at 2.5, and the ledger states the person's epsilon."""
    rows = [{"prompt": f"p{i}", "chosen": f"a{i}", "rejected": f"b{i}", "who": f"w{i % 3}"} for i in range(60)]
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = recipe(
        {"person_budget": 5.0, "labeler_column": "who", "key_file": str(tmp_path / "own.key")},
        data={"preferences": str(data), "demonstrations": "release", "prompts": "release"},
    )
    run = RunDir(tmp_path / "run")
    runner.execute(settings, run, runner.Selection(only="privatize"))
    released = [read_release(run.stage("privatize") / part).manifest for part in ("release", "evaluation")]
    assert sum(manifest.rows for manifest in released) == 6
    assert {manifest.guarantee["epsilon"] for manifest in released} == {2.5}
    ledger = run.require("privatize")["report"]["ledger"]
    assert ledger["budgets"]["person"] == 5.0
    assert ledger["labelers"]["max_epsilon"] == 5.0


def test_a_labelling_page_asks_nobody_more(tmp_path: Path) -> None:
    def settings(folder: Path) -> Recipe:
        return recipe({"person_budget": 2.0}, online={"labeller": "page", "folder": str(folder)})

    for name, budget in {"without": None, "above": 8.0}.items():
        AnswerStore(tmp_path / name, 2.0, budget).close()
        own = settings(tmp_path / name)
        assert own.online is not None
        with pytest.raises(UserError, match="must allow at most 1 answers a person"):
            make_labeller(own.online, own.privatize, own.seed, tmp_path)
    AnswerStore(tmp_path / "levels", (0.5, 2.0), 3.0).close()  # one answer at 2, and six at .5
    own = settings(tmp_path / "levels")
    assert own.online is not None
    with pytest.raises(UserError, match="must allow at most 1 answers a person"):
        make_labeller(own.online, own.privatize, own.seed, tmp_path)
    AnswerStore(tmp_path / "right", 2.0, 2.0).close()
    own = settings(tmp_path / "right")
    assert own.online is not None
    make_labeller(own.online, own.privatize, own.seed, tmp_path)


def test_counts_are_not_charged_on_top_of_all_of_it() -> None:
    with pytest.raises(UserError, match="for labels only: set it"):
        recipe({"person_budget": 5.0, "labeler_column": "who", "count_epsilon": 1.0}, evaluation_labels="laplace")
