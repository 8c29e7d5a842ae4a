"""What the reward model is given to read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.base_models import tiny_tokenizer
from private_rlhf.reward_models import scorer as scoring


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scorer whose features are the lengths and last tokens of the rows."""

    def features(model: Any, rows: list[list[int]], **_: Any) -> torch.Tensor:
        return torch.tensor([[len(row), row[-1]] for row in rows])

    monkeypatch.setattr(scoring, "extract_features", features)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=60))
    model = SimpleNamespace(config=config, weight=torch.zeros(1))
    checkpoint: Any = SimpleNamespace(model=model, bonus=None)
    return scoring.RewardScorer(checkpoint, Renderer(tiny_tokenizer(["a fox runs"]), 40, 8), use_bonus=False)


def test_uncertainty_without_its_statistics_is_refused(scorer: Any) -> None:
    with pytest.raises(UserError, match="use_bonus must be False for a checkpoint without bonus statistics"):
        replace(scorer, use_bonus=True)


def test_every_response_is_read_whole_and_at_the_end_of_its_turn(scorer: Any) -> None:
    """r̄ was fitted at no other token."""
    short, long = scorer.features(["a fox"] * 2, ["a fox runs", "a fox runs " * 8]).tolist()
    assert short[1] == long[1] == scorer.renderer.tokenizer.eos_token_id
    assert long[0] - short[0] > 8  # the cap on sampled responses


def test_more_tokens_than_the_reward_model_takes_are_refused(scorer: Any) -> None:
    with pytest.raises(UserError, match=r"have \d+ tokens for the reward model, which has 60 positions: lower"):
        scorer.features(["a fox"], ["xyz " * 60])


@pytest.mark.parametrize("how", [{"use_bonus": True}, {"use_baseline": True}, {}])
def test_a_process_without_a_prompt_scores_nothing(scorer: Any, how: dict[str, bool]) -> None:
    """Of fewer prompts than processes, when the draws of π_ref are the first rollouts."""
    for name, value in how.items():
        setattr(scorer, name, value)
    scores = scorer.score_features([], torch.empty(0))
    assert len(scores.reward) == len(scores.bonus) == len(scores.baseline) == 0
