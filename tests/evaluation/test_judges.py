"""Judges that score each answer by itself, what names and settings mean, and what judged pairs come to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation.chat_endpoint import serving
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.data.render import Renderer
from private_rlhf.evaluation.chat_judge import ChatJudge
from private_rlhf.evaluation.judges import judged_rates, make_judge, parse_judge, truth_judge
from private_rlhf.lm.base_models import tiny_checkpoint, tiny_tokenizer
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import JudgeSettings
from private_rlhf.reward_models import external
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.reward_models.scorer import Scores
from private_rlhf.stages.declarations import preflight
from pydantic import ValidationError
from support.recipes import recipe_of

NAMES = ("--judge rm:", "--judge-public")
CPU = torch.device("cpu")
TALK = [
    {"role": "user", "content": "I have a peanut allergy."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What should I cook?"},
]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer(["x"]), 60, 8)


@pytest.fixture(scope="module")
def their_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as other tools save one: no metadata."""
    folder = tmp_path_factory.mktemp("models")
    base = tiny_checkpoint(folder / "base", ["the quick brown fox", "write one kind sentence"], 0)
    tokenizer = load_tokenizer(base)
    model: Any = build_reward_backbone(base, pad_token_id=tokenizer.pad_token_id)
    set_score_weight(model, torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(folder / "their-model")
    tokenizer.save_pretrained(folder / "their-model")
    return folder / "their-model"


def outcomes(rows: list[dict[str, Any]]) -> list[float | None]:
    return [row["outcome"] for row in rows]


def test_the_chat_judge_gets_the_whole_dialogue() -> None:
    with serving() as endpoint:
        settings = JudgeSettings(url=endpoint.url, model="m", public=True, allow_http=True)
        ChatJudge(settings).compare([TALK], ["Satay."], ["Risotto."])
        asked = [json.loads(request["messages"][-1]["content"]) for request in endpoint.seen]
    assert [question["conversation"] for question in asked] == [TALK, TALK]
    assert {(question["answer_A"], question["answer_B"]) for question in asked} == {
        ("Satay.", "Risotto."),
        ("Risotto.", "Satay."),
    }


def test_names_are_read(tmp_path: Path) -> None:
    assert parse_judge("truth") is None
    judge = parse_judge("openai:https://h:1/v1#gpt")
    assert judge is not None
    assert (judge.url, judge.model) == ("https://h:1/v1", "gpt")
    plain = parse_judge("openai:http://localhost:8000/v1", allow_http=True)
    assert plain is not None
    assert (plain.url, plain.model) == ("http://localhost:8000/v1", "default")
    assert parse_judge(f"rm:{tmp_path}", public=True) == JudgeSettings(path=tmp_path, public=True)
    assert parse_judge(f"lm:{tmp_path}") == JudgeSettings(lm=tmp_path, public=True)
    assert parse_judge("embedding") == JudgeSettings(embedding=True)


@pytest.mark.parametrize("name", ["", "truth:x", "rm:", "rm", "openai:", "gpt", "truths", "lm:", "lm", "embedding:x"])
def test_other_names_are_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UserError, match="must be truth, rm:PATH, lm:PATH, embedding or openai:URL"):
        parse_judge(name)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://judge.example:8000/v1", "url must be https"),
        ("http://localhost.judge.example/v1", "url must be https"),
        ("ftp://h/v1", "url must be the address of an endpoint"),
        ("h/v1", "url must be the address of an endpoint"),
        ("https://", "url must be the address of an endpoint"),
        ("https://h:port/v1", "url must be the address of an endpoint"),
        ("https://user:secret@h/v1", "a user, password or query"),
        ("https://h/v1?api_key=secret", "a user, password or query"),
    ],
)
def test_addresses_that_may_not_be_used_are_refused_without_repeating_them(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_judge(f"openai:{url}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "judge must have one of url"),
        ({"url": "https://h/v1", "path": "p", "model": "m", "public": True}, "judge must have one of url"),
        ({"lm": "p", "path": "p", "public": True}, "judge must have one of url"),
        ({"embedding": False}, "judge must have one of url"),
        ({"lm": "p"}, "set it if they are public"),
        ({"lm": "p", "model": "m", "public": True}, "model must be given with url"),
        ({"url": "https://h/v1", "public": True}, "model must be given with url"),
        ({"path": "p", "model": "m"}, "model must be given with url"),
        ({"url": "https://h/v1", "model": "m"}, "set it if they are public"),
        ({"url": "https://h/v1", "model": "m", "public": True, "request": {"messages": []}}, "request holds messages"),
        ({"url": "https://h/v1", "model": "m", "public": True, "concurrency": 0}, "greater than 0"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        JudgeSettings(**keys)


def test_a_reward_model_that_cannot_be_used_is_named(renderer: Renderer, tmp_path: Path, their_model: Path) -> None:
    with pytest.raises(UserError, match=r"--judge rm: must be a checkpoint folder, got .*none"):
        make_judge(JudgeSettings(path=tmp_path / "none"), renderer, CPU, NAMES)
    with pytest.raises(UserError, match=r"their-model has no reward_metadata\.json.* set --judge-public if they"):
        make_judge(JudgeSettings(path=their_model), renderer, CPU, NAMES)
    with pytest.raises(UserError, match=r"evaluate\.judge\.path .* set evaluate\.judge\.public=true if they"):
        preflight(recipe_of(evaluate={"judge": {"path": str(their_model)}}), ["evaluate"], World(0, 1))


def test_an_external_reward_model_judges_once_its_labels_are_declared_public(
    renderer: Renderer, their_model: Path
) -> None:
    judge = make_judge(JudgeSettings(path=their_model, public=True), renderer, CPU, NAMES)
    assert judge.facts == {
        "kind": "reward model",
        "mode": "external",
        "source": "their-model",
        "fitted_by": "others",
        "labels": "declared public",
        "epsilon": None,
    }
    (row, turned) = judge.compare([TALK, TALK], ["the fox", "write one"], ["write one", "the fox"])
    assert row["outcome"] == 1 - turned["outcome"] != 0.5
    assert row["policy_score"] == pytest.approx(turned["reference_score"], rel=1e-5)
    assert row["reference_score"] == pytest.approx(turned["policy_score"], rel=1e-5)


def test_a_reward_model_goes_to_the_device_of_the_run(
    renderer: Renderer, their_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a GPU: a tensor cannot come there but by being moved."""
    scored = []
    monkeypatch.setattr(external, "RewardScorer", lambda checkpoint, *_, **__: scored.append(checkpoint))
    make_judge(JudgeSettings(path=their_model, public=True), renderer, torch.device("meta"), NAMES)
    assert {tensor.device.type for each in scored for tensor in each.model.model.parameters()} == {"meta"}


def test_the_truth_prefers_the_pleasant_sentence_and_ties_with_itself() -> None:
    good, bad = "What a lovely, happy and kind river this is.", "The river is horrible, ugly and sad today."
    assert outcomes(truth_judge().compare(["p"] * 3, [good, bad, good], [bad, good, good])) == [1.0, 0.0, 0.5]


def test_the_reward_judge_compares_rewards_not_bounds(
    renderer: Renderer, their_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(_: list[str], texts: list[str]) -> Scores:
        lengths = torch.tensor([float(len(t)) for t in texts])
        return Scores(lengths, torch.full((len(texts),), 100.0), torch.zeros(len(texts)))

    monkeypatch.setattr(external, "RewardScorer", lambda *_, **__: SimpleNamespace(score=score))
    judge = make_judge(JudgeSettings(path=their_model, public=True), renderer, torch.device("cpu"), NAMES)
    rows = judge.compare(["p"] * 3, ["aa", "a", "a"], ["a", "aa", "b"])
    assert outcomes(rows) == [1.0, 0.0, 0.5]
    assert rows[0] == {"outcome": 1.0, "policy_score": 2.0, "reference_score": 1.0}


def test_rates_are_those_of_the_clear_pairs() -> None:
    rows = [{"outcome": value} for value in (1.0, 0.0, 1.0, None, 1.0, None)]
    rates = judged_rates(rows, [1, 0, -1, 9, 0, 9], 0)
    assert (rates["win_rate"]["value"], rates["win_rate"]["n"], rates["mean_outcome"]["value"]) == (0.75, 4, 0.75)
    assert rates["length_controlled_win_rate"]["n"] == 4
    assert (rates["unclear_pairs"], rates["unclear_verdicts"]) == (2, 0)
