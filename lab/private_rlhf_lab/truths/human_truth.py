"""`hh_truth`: a known reward r* that people's preferences were read into, on real prompts and free answers.

r*(prompt, answer) is linear in MiniLM's sentence embeddings: of the answer, of prompt and answer as one text, and the
product of the prompt's and the answer's. It is the ridge-penalised Bradley–Terry fit to the public labels of the 3,097
helpful HH-RLHF pairs that fit 512 tokens (by `benches/make_human_truth.py`, which says how well it predicts people),
with its scale set by pairs that were held out, and centred over the pairs' answers. Units are logits of a preference.

It is a truth because it is declared one: labels are drawn from it at any n by Bradley–Terry, and J, suboptimality and
over-optimisation are exact. It is like people as far as 22 million weights can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from private_rlhf_lab.truths.sentences import SentenceModel, check_sentence_model

WEIGHTS = Path(__file__).with_name("human_truth.safetensors")


class HumanTruth:
    """r* with its sentence model, as `private_rlhf.evaluation.truths.Truth`.

    Raises:
        UserError: the extra `truth` is not installed.
    """

    description = "a known reward r* fitted to people's public labels"
    check = staticmethod(check_sentence_model)

    def __init__(self, weights: Path = WEIGHTS) -> None:
        self.sentences = SentenceModel()
        with safe_open(weights, "pt") as file:
            self.weight: torch.Tensor = file.get_tensor("weight").double()
            self.centre = float(file.metadata()["centre"])

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
        """r* (n,) float64, logits; prompts may repeat and are read once each."""
        return truth_features(self.sentences, prompts, answers).double() @ self.weight - self.centre


def truth_features(sentences: SentenceModel, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
    """The features that r* is linear in, (n, 1152) float32: three blocks of 384."""
    distinct = list(dict.fromkeys(prompts))
    place = {prompt: row for row, prompt in enumerate(distinct)}
    of_prompts = sentences.embed(distinct)[[place[prompt] for prompt in prompts]]
    of_answers = sentences.embed(answers)
    both = sentences.embed([f"{prompt}\n\n{answer}" for prompt, answer in zip(prompts, answers, strict=True)])
    return torch.cat([of_answers, both, of_prompts * of_answers], dim=1)
