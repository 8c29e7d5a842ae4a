"""`hh_truth`: a known reward r* that people's preferences were read into, on real prompts and free answers.

r*(prompt, answer) is linear in MiniLM's sentence embeddings: of the answer, of prompt and answer as one text, and the
product of the prompt's and the answer's. It is the ridge-penalised Bradley–Terry fit to all 3,100 public labels of the
helpful HH-RLHF pairs (by `benches/make_human_truth.py`, which says how well it predicts people), with its scale
set by pairs that were held out, and centred over the pairs' answers. Units are logits of a preference.

It is a truth because it is declared one: labels are drawn from it at any n by Bradley–Terry, and J, suboptimality and
over-optimisation are exact. It is like people as far as 22 million weights can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from private_rlhf.lm.sentences import SentenceModel
from safetensors import safe_open

WEIGHTS = Path(__file__).with_name("human_truth.safetensors")


class HumanTruth:
    """r* with its sentence model.

    Raises:
        UserError: the extra `truth` is not installed.
    """

    def __init__(self, weights: Path = WEIGHTS) -> None:
        self.sentences = SentenceModel()
        with safe_open(weights, "pt") as file:
            self.weight: torch.Tensor = file.get_tensor("weight").double()
            self.centre = float(file.metadata()["centre"])

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
        """r* (n,) float64, logits; prompts may repeat and are read once each."""
        return truth_features(self.sentences, prompts, answers).double() @ self.weight - self.centre


def truth_features(sentences: SentenceModel, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    """What r* is linear in, (n, 1152) float32: three blocks of 384."""
    distinct = list(dict.fromkeys(prompts))
    place = {prompt: row for row, prompt in enumerate(distinct)}
    asked = sentences.embed(distinct)[[place[prompt] for prompt in prompts]]
    answered = sentences.embed(answers)
    both = sentences.embed([f"{prompt}\n\n{answer}" for prompt, answer in zip(prompts, answers, strict=True)])
    return torch.cat([answered, both, asked * answered], dim=1)


def human_reward(prompt: str, response: str) -> float:
    """r*(prompt, response) of one answer, logits; many are some ten times faster by `HumanTruth.rewards`."""
    return float(_truth().rewards([prompt], [response])[0])


@lru_cache(maxsize=1)
def _truth() -> HumanTruth:
    return HumanTruth()
