"""The rules by which the embedded data is made: selection of demonstrations, pairing; and what makes the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_rlhf.embedded import task
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf_lab.benches import make_embedded_data as make
from private_rlhf_lab.benches.embedded_topics import EVAL_TOPICS, TRAIN_TOPICS, prompts, topic_of
from private_rlhf_lab.benches.make_embedded_data import Completion

PROMPT = "Write one short sentence about a river."
GOOD = "The river flows slowly past the old town."


def test_every_prompt_is_answered_as_often_as_asked(tmp_path: Path) -> None:
    """In the order of the prompts, by the pipeline's own renderer and sampler; the same again from the same seed."""
    tiny = ["model.source=tiny", f"model.cache_dir={tmp_path}", "model.max_response_tokens=5"]
    recipe = load_recipe(Recipe, make.RECIPE, tiny)
    asked = ["Write one short sentence about a river.", "Tell me something about a cat."]
    found = make.sample(base_checkpoint(recipe.model), recipe, asked, 3, "train")
    assert [answer.prompt for answer in found] == [asked[0]] * 3 + [asked[1]] * 3
    assert len({answer.response for answer in found}) > 1
    assert make.sample(base_checkpoint(recipe.model), recipe, asked, 3, "train") == found
    assert make.sample(base_checkpoint(recipe.model), recipe, asked, 3, "eval") != found


@pytest.mark.parametrize(
    ("response", "finished", "kept"),
    [
        (GOOD, True, True),
        (GOOD, False, False),
        (GOOD.rstrip("."), True, False),
        ("The river flows.", True, False),
        ("The road goes slowly past the old town.", True, False),  # off the topic
        ("I'm sorry, but the river is not known to me.", True, False),
        ("The river the river the river the river flows.", True, False),
        ("The river flows slowly\npast the old town.", True, False),
        (GOOD.rstrip(".") + " and on" * 8 + ".", True, False),
        ("", True, False),
    ],
)
def test_demonstrations_are_selected_by_form(response: str, finished: bool, kept: bool) -> None:
    assert make.is_demonstration(Completion(PROMPT, response, finished)) is kept


def test_selection_keeps_the_first_different_answers() -> None:
    drafts = [Completion(PROMPT, GOOD.replace("old", w), True) for w in ("old", "old", "new", "big", "red", "tiny")]
    kept = [c.response.split()[-2] for c in make.select(drafts)]
    assert kept == ["old", "new", "big"]


def test_pairs_use_each_answer_once_and_never_twice_the_same() -> None:
    answers = [Completion("p", r, True) for r in "abccde"] + [Completion("q", r, True) for r in "xyz"]
    pairs = [(p["prompt"], p["response_a"], p["response_b"]) for p in make.pair_up(answers)]
    assert pairs == [("p", "a", "b"), ("p", "d", "e"), ("q", "x", "y")]


def test_the_shipped_prompts_are_these_topics_and_splits_share_none() -> None:
    assert not set(TRAIN_TOPICS) & set(EVAL_TOPICS)
    for split in make.SPLITS:
        assert task.load_prompts(split) == prompts(split)
    assert {topic_of(row.prompt) for row in task.load_demonstrations()} <= set(TRAIN_TOPICS)


def test_topic_of_refuses_foreign_prompts() -> None:
    with pytest.raises(ValueError, match="not a prompt of the embedded task"):
        topic_of("Hello")
