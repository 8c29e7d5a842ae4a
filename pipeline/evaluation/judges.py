"""Judges for `private-rlhf evaluate`: the known truth, a reward model, or an OpenAI-compatible chat endpoint.

A judge gives, for each prompt, the probability that the policy's answer beats the reference's: 1, ½ (tie) or 0, and for
a chat judge the mean over both presentation orders, so that a preference for a position cancels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.core.errors import UserError
from pipeline.data.render import Prompt, Renderer, plain_prompt
from pipeline.evaluation.gibbs import beats

INSTRUCTION = (
    "You compare two answers to the same message. Judge helpfulness, correctness and clarity; do not favour the longer "
    "one. Reply with one letter: A if the first answer is better, B if the second is, C if they are equally good."
)


class Judge(Protocol):
    """Compares answers pair by pair."""

    def compare(self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """(n,) in [0, 1]: 1 where the answer beats the reference, ½ for a tie."""
        ...


@dataclass(frozen=True)
class TruthJudge:
    """The embedded task's known reward."""

    def compare(self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """See `Judge`."""
        from pipeline.embedded.truth import true_reward

        def score(texts: Sequence[str]) -> np.ndarray:
            return np.array(
                [true_reward(plain_prompt(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]
            )

        return beats(score(answers), score(references))


@dataclass(frozen=True)
class RewardJudge:
    """A reward checkpoint of this project (r̄, no uncertainty)."""

    scorer: Any

    def compare(self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """See `Judge`."""
        return beats(
            self.scorer.score(prompts, answers).reward.numpy(), self.scorer.score(prompts, references).reward.numpy()
        )


@dataclass(frozen=True)
class ChatJudge:
    """A chat model behind an OpenAI-compatible endpoint; asked twice per pair with the answers swapped.

    Attributes:
        url: base address, e.g. http://localhost:8000/v1.
        model: name sent with each request.
    """

    url: str
    model: str

    def compare(self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """See `Judge`."""
        from tqdm import tqdm

        results = []
        pairs = list(zip(prompts, answers, references, strict=True))
        for prompt, answer, reference in tqdm(pairs, desc="judging", unit="pair"):
            first = self._ask(prompt, answer, reference)
            second = 1.0 - self._ask(prompt, reference, answer)
            results.append((first + second) / 2)
        return np.array(results)

    def _ask(self, prompt: Prompt, first: str, second: str) -> float:
        """1 when the first answer is preferred, 0 for the second, ½ for a tie."""
        from huggingface_hub import InferenceClient
        from huggingface_hub.errors import HTTPError  # base of its own and of the transport's, whichever httpx it uses

        client = InferenceClient(base_url=self.url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=120)
        question = f"Message:\n{plain_prompt(prompt)}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich is better?"
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
        try:
            reply = client.chat_completion(messages, model=self.model, max_tokens=8, temperature=0.0)
        except (HTTPError, OSError, ValueError) as error:
            cause = (str(error).splitlines() or ["no reason given"])[0]
            raise UserError(
                f"--judge openai:{self.url} did not answer ({cause}): check that the endpoint runs"
            ) from None
        return parse_verdict(reply.choices[0].message.content or "")


def parse_verdict(text: str) -> float:
    """1 for A, 0 for B, ½ for C or anything unclear."""
    found = re.search(r"\b([ABC])\b", text.upper())
    return {"A": 1.0, "B": 0.0}.get(found.group(1), 0.5) if found else 0.5


def make_judge(name: str, renderer: Renderer) -> Judge:
    """The judge that `--judge` names.

    Raises:
        UserError: unknown kind, or a reward model that cannot be loaded.
    """
    kind, _, target = name.partition(":")
    if kind == "truth" and not target:
        return TruthJudge()
    if kind == "rm" and target:
        return RewardJudge(_scorer(Path(target), renderer))
    if kind == "openai" and target:
        url, _, model = target.partition("#")
        return ChatJudge(url, model or "default")
    raise UserError(f"--judge {name}: choose truth, rm:PATH or openai:URL (openai:URL#MODEL names the model)")


def _scorer(path: Path, renderer: Renderer) -> Any:
    from safetensors import SafetensorError

    from pipeline.lm.models import load_tokenizer
    from pipeline.rl.scoring import RewardScorer
    from reward_models.checkpoint import load_reward_checkpoint

    try:
        checkpoint = load_reward_checkpoint(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"--judge rm:{path}: {' '.join(str(error).split())[:200]}") from None
    own = Renderer(
        load_tokenizer(path), renderer.max_prompt_tokens, renderer.max_response_tokens, renderer.system_prompt
    )
    return RewardScorer(checkpoint, own, use_bonus=False)
