"""A language model's log-odds as judge: both orders, what cancels, what is too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.data.render import Renderer
from private_rlhf.evaluation import judges
from private_rlhf.evaluation.judges import LmJudge, judged_rates, make_judge
from private_rlhf.lm.base_models import tiny_checkpoint, tiny_tokenizer
from private_rlhf.privacy.guarantee import outside_judge
from private_rlhf.recipe import JudgeSettings
from private_rlhf.stages.declarations import preflight
from support.recipes import recipe_of

CPU = torch.device("cpu")
NAMES = ("--judge rm:", "--judge-public")
PROMPTS = ["Name a river.", [{"role": "user", "content": "Hello?"}], "Sing."]
ONE, OTHER = ["The Rhine.", "Hello A.", "La la"], ["No", "Good morning to you.", "B"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["A B the river sings", "which answer is better"]
    return tiny_checkpoint(tmp_path_factory.mktemp("lm") / "judge", texts, 0)


@pytest.fixture(scope="module")
def judge(folder: Path) -> LmJudge:
    made = LmJudge(folder, CPU)
    made.renderer = Renderer(made.renderer.tokenizer, 4000, 1)  # the tiny model has few positions
    made.positions = 4000
    return made


def test_log_odds_are_those_of_the_next_token(judge: LmJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one and of all, against the plain forward pass of each question by itself."""
    rows = judge.compare(PROMPTS, ONE, OTHER)
    monkeypatch.setattr(judges, "BATCH", 1)
    for row, single in zip(rows, judge.compare(PROMPTS, ONE, OTHER), strict=True):
        assert row["log_odds"] == pytest.approx(single["log_odds"], abs=1e-4)
    for row, prompt, a, b in zip(rows, PROMPTS, ONE, OTHER, strict=True):
        for said, (first, second) in zip(row["log_odds"], ((a, b), (b, a)), strict=True):
            ids = judge._question(prompt, first, second)
            with torch.no_grad():
                logits = judge.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            assert said == pytest.approx(float(logits[judge.letters[0]] - logits[judge.letters[1]]), abs=1e-4)
        assert row["margin"] == pytest.approx((row["log_odds"][0] - row["log_odds"][1]) / 2)
        assert row["outcome"] == float(row["margin"] > 0)


def test_swapping_policy_and_reference_turns_every_outcome(judge: LmJudge) -> None:
    rows, turned = judge.compare(PROMPTS, ONE, OTHER), judge.compare(PROMPTS, OTHER, ONE)
    assert [row["margin"] for row in rows] == pytest.approx([-row["margin"] for row in turned], abs=1e-4)
    assert [row["outcome"] for row in rows] == [1 - row["outcome"] for row in turned]


@pytest.mark.parametrize("bias", [-8.0, 0.0, 8.0])
def test_a_preference_for_position_a_cancels(judge: LmJudge, monkeypatch: pytest.MonkeyPatch, bias: float) -> None:
    """Planted: answers as good as each other, a judge that likes A by 8 nats. Alone it would give 1.00; swapped, its
    win rate is that of its noise: .5 lies in the 95 % interval (seed fixed), and no outcome moves with the bias.
    """
    generator = np.random.default_rng(7)
    noise = generator.normal(size=800)
    monkeypatch.setattr(LmJudge, "_log_odds", lambda self, questions: (bias + noise).tolist())
    rows = judge.compare(["p"] * 400, ["a"] * 400, ["b"] * 400)
    assert [row["outcome"] for row in rows] == (noise[0::2] > noise[1::2]).astype(float).tolist()
    rate = judged_rates(rows, [0] * 400, 0)["win_rate"]
    assert rate["ci_low"] < 0.5 < rate["ci_high"]
    monkeypatch.setattr(LmJudge, "_log_odds", lambda self, questions: [bias] * len(questions))
    assert {row["outcome"] for row in judge.compare(["p"] * 3, ["a"] * 3, ["b"] * 3)} == {0.5}


def test_what_is_longer_than_the_model_reads_is_left_out(folder: Path) -> None:
    short = LmJudge(folder, CPU)
    short.renderer = Renderer(short.renderer.tokenizer, 4000, 1)
    short.positions = short.renderer.prompt_size("x") + short.renderer.prompt_size(
        judges.messages("p", "a", "b")[0]["content"] + judges.messages("p", "a", "b")[1]["content"]
    )  # fmt: skip
    fits, too_long = short.compare(["p", "p"], ["a", "a " * 2000], ["b", "b"])
    assert fits["outcome"] is not None
    assert (too_long["outcome"], too_long["margin"], too_long["log_odds"]) == (None, None, [None, None])
    assert judged_rates([fits, too_long], [0, 0], 0)["unclear_pairs"] == 1


def test_bad_folders_are_named_early(folder: Path, tmp_path: Path) -> None:
    renderer = Renderer(tiny_tokenizer(["x"]), 60, 8)
    with pytest.raises(UserError, match=r"must be the folder of a whole causal language model, got .*none: give it"):
        make_judge(JudgeSettings(lm=tmp_path / "none", public=True), renderer, CPU, NAMES)
    judge = {"lm": str(tmp_path), "public": True}
    with pytest.raises(UserError, match=r"evaluate\.judge\.lm must be the folder of a whole"):
        preflight(recipe_of(evaluate={"judge": judge}), ["evaluate"], World(0, 1))
    made = make_judge(JudgeSettings(lm=folder, public=True), renderer, CPU, NAMES)
    assert made.facts["kind"] == "language model"
    assert made.facts["source"] == "judge"
    assert len(made.facts["sha256"]) == 64


def test_the_card_names_them() -> None:
    assert "language model judge; the holder" in str(outside_judge({"kind": "language model", "source": "judge"}))
    assert "sentence embeddings" in str(outside_judge({"kind": "embeddings", "source": "hh_truth"}))
