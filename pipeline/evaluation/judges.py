"""Judges of two policies' answers: the known truth, a reward model, sentence embeddings, a local language model, or a
chat model (`private_rlhf.evaluation.chat_judge`). A judge gives for each prompt the outcome of the policy's answer: 1,
½ for a tie, 0, or None without a clear verdict; and what the outcome was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.stats import bootstrap_mean, wilson
from private_rlhf.data.render import Prompt, Renderer, plain_prompt
from private_rlhf.evaluation.chat_judge import ChatJudge, messages
from private_rlhf.evaluation.rates import agreement, beats, decided_win_rate, length_controlled
from private_rlhf.evaluation.truths import HUMAN, load_truth, reward_function
from private_rlhf.lm.model_folders import check_lm_folder, weights_digest
from private_rlhf.recipe import JudgeSettings
from private_rlhf.recipe.load import parse

if TYPE_CHECKING:
    import torch

ORDERS = ("policy_first", "reference_first")
VALUES = {"policy": 1.0, "reference": 0.0, "tie": 0.5}


@dataclass(frozen=True)
class ScoreJudge:
    """A score of each answer by itself: the known truth, a reward checkpoint (r̄, no uncertainty) or a truth that was
    read from people; the higher score wins."""

    facts: dict[str, Any]
    score: Callable[[Sequence[Prompt], Sequence[str]], np.ndarray]

    def compare(
        self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]
    ) -> list[dict[str, Any]]:
        """See `Judge`."""
        policy, reference = self.score(prompts, answers), self.score(prompts, references)
        return [
            {"outcome": float(outcome), "policy_score": float(a), "reference_score": float(b)}
            for outcome, a, b in zip(beats(policy, reference), policy, reference, strict=True)
        ]


def truth_judge() -> ScoreJudge:
    """The embedded task's known reward as judge."""
    reward = reward_function("embedded")

    def score(prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        return np.array([reward(plain_prompt(prompt), text) for prompt, text in zip(prompts, texts, strict=True)])

    return ScoreJudge({"kind": "truth"}, score)


def human_judge() -> ScoreJudge:
    """r* of `hh_truth`, right on 60 % of people's pairs that it was not fitted to. UserError: it is not installed."""
    truth = load_truth(HUMAN, "the judge's embedding")()

    def score(prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        return np.asarray(truth.rewards([plain_prompt(prompt) for prompt in prompts], texts))

    return ScoreJudge({"kind": "embeddings", "source": HUMAN, "labels": "public"}, score)


def parse_judge(name: str, *, public: bool = False, allow_http: bool = False) -> JudgeSettings | None:
    """Settings of the judge that `--judge` names; None for the known truth. name: `truth`, `rm:PATH`, `lm:PATH`,
    `embedding`, `openai:URL` or `openai:URL#MODEL`. public, allow_http: see `JudgeSettings`; the command makes no claim
    about labels, so of lm and openai `public` is not asked. UserError: something else."""
    kind, _, target = name.partition(":")
    if kind == "truth" and not target:
        return None
    if kind in ("rm", "lm") and target and not Path(target).is_dir():
        raise UserError(f"--judge {kind}: must name a checkpoint folder, got {target}: check the path")
    if kind == "rm" and target:
        return JudgeSettings(path=Path(target), public=public)
    if kind == "lm" and target:
        return JudgeSettings(lm=Path(target), public=True)
    if kind == "embedding" and not target:
        return JudgeSettings(embedding=True)
    if kind == "openai" and target:
        url, _, model = target.partition("#")
        tree = {"url": url, "model": model or "default", "public": True, "allow_http": allow_http}
        return parse(JudgeSettings, tree, "--judge openai")
    choices = "truth, rm:PATH, lm:PATH, embedding or openai:URL (openai:URL#MODEL names the model)"
    raise UserError(f"--judge must be {choices}, got {name}: give one of these")


def make_judge(
    settings: JudgeSettings | None,
    renderer: Renderer,
    device: torch.device,
    names: tuple[str, str],
    *,
    log: Path | None = None,
    share: int = 1,
    own_host: bool = False,
) -> Judge:
    """The judge of `settings`; None is the known truth.

    renderer: of the policy, for its limits. device: of a model. names: what messages call the folder of a reward model
    and its declaration. log, share, own_host: see `ChatJudge`. UserError: a model that cannot be loaded, undeclared
    labels, or a truth that is not installed.
    """
    if settings is None:
        return truth_judge()
    if settings.url is not None:
        return ChatJudge(settings, log, share, own_host=own_host)
    if settings.embedding:
        return human_judge()
    if settings.lm is not None:
        return LmJudge(settings.lm, device)
    import torch
    from private_rlhf.reward_models.external import external_scorer

    assert settings.path is not None
    # It scores as the program on its card does, in float32; on a GPU in the dtype of the folder.
    dtype = torch.float32 if device.type == "cpu" else None
    scorer, facts = external_scorer(settings.path, settings.public, names, renderer, device, dtype=dtype, plain=True)
    return ScoreJudge({"kind": "reward model", **facts}, lambda *texts: scorer.score(*texts).reward.numpy())


def judged_rates(
    rows: Sequence[dict[str, Any]], longer: Sequence[int], seed: int, truth: np.ndarray | None = None
) -> dict[str, Any]:
    """Win rates of the pairs with a clear outcome, and how many had none: counted as half they would pull to a tie.

    rows: of `Judge.compare`. longer: length of the policy's answer minus the reference's. truth: (n,) outcomes by the
    known truth, for agreement. JSON types; None where no outcome is clear, or where lengths separate the two policies.
    """
    clear = [place for place, row in enumerate(rows) if row["outcome"] is not None]
    verdicts = [row[order]["verdict"] for row in rows for order in ORDERS if order in row]
    counts = {"unclear_pairs": len(rows) - len(clear), "unclear_verdicts": verdicts.count("unclear")}
    if not clear:
        names = ("win_rate", "length_controlled_win_rate", "decided_win_rate", "mean_outcome", "agreement")
        return {**dict.fromkeys(names), **counts}
    outcome = np.array([rows[place]["outcome"] for place in clear])
    length = np.array([longer[place] for place in clear])
    controlled = length_controlled(outcome, length)
    agreement_rate = None if truth is None else agreement(outcome, truth[clear])
    return {
        "win_rate": wilson(float(outcome.sum()), len(outcome)).as_dict(),
        "length_controlled_win_rate": controlled.as_dict() if controlled else None,
        "decided_win_rate": decided_win_rate(np.array([by_order(rows[place]) for place in clear])).as_dict(),
        "agreement": agreement_rate.as_dict() if agreement_rate else None,
        "mean_outcome": bootstrap_mean(outcome, seed).as_dict(),
        **counts,
    }


def by_order(row: dict[str, Any]) -> list[float]:
    """The verdicts of a row with a clear outcome: both of a judge that is asked in both orders, or the outcome."""
    return [VALUES[row[order]["verdict"]] for order in ORDERS if order in row] or [float(row["outcome"])]


def judged_pairs(
    prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The judged texts beside their rows of `Judge.compare`, to be saved."""
    return [
        {"prompt": prompt, "policy": answer, "reference": other, **row}
        for prompt, answer, other, row in zip(prompts, answers, references, rows, strict=True)
    ]


BATCH = 8
"""Questions per forward pass."""
QUESTION = "Which answer is better? Reply with one letter, A or B."


class LmJudge:
    """Zheng et al. 2023 (arXiv 2306.05685), pairwise comparison with swapped positions, read off the next token:
    nothing is sampled, and no reply is unclear.

    margin = ½ (log-odds of A over B with the policy's answer as A − the same with it as B), nats: a preference for a
    letter or a position cancels. outcome: 1 for margin > 0, 0 below, ½ at 0. UserError: no whole checkpoint, no chat
    template, or A and B begin with the same token.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        from private_rlhf.lm.models import load_causal_lm, load_tokenizer

        check_lm_folder(folder, "judge: lm")
        self.device = device
        model: Any = load_causal_lm(folder, "float32" if device.type == "cpu" else "bfloat16")
        self.model = model.to(device)
        tokenizer = load_tokenizer(folder)
        self.positions = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        self.renderer = Renderer(tokenizer, self.positions, 1)
        self.letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "AB"]
        if self.letters[0] == self.letters[1]:
            raise UserError(f"judge: lm must have different tokens for A and B, got {folder}: choose another judge")
        source, digest = folder.resolve().name, weights_digest(folder)
        self.facts: dict[str, Any] = {"kind": "language model", "source": source, "sha256": digest}

    def compare(
        self, prompts: Sequence[Prompt], answers: Sequence[str], references: Sequence[str]
    ) -> list[dict[str, Any]]:
        """See `Judge`. `margin` in nats, and `log_odds` of A with the policy's answer [as A, as B]; outcome None where
        the question is longer than the model reads."""
        triples = list(zip(prompts, answers, references, strict=True))
        questions = [self._question(prompt, *both) for prompt, a, b in triples for both in ((a, b), (b, a))]
        odds = self._log_odds(questions)
        rows: list[dict[str, Any]] = []
        for first, second in zip(odds[0::2], odds[1::2], strict=True):
            margin = None if first is None or second is None else (first - second) / 2
            outcome = None if margin is None else 0.5 if margin == 0 else float(margin > 0)
            rows.append({"outcome": outcome, "margin": margin, "log_odds": [first, second]})
        return rows

    def _question(self, prompt: Prompt, first: str, second: str) -> list[int] | None:
        instruction, question = messages(prompt, first, second)
        instructions = instruction["content"].partition(" End with")[0]
        text = f"{instructions}\n\n{question['content']}\n\n{QUESTION}"
        return self.renderer.prompt_ids(text) if self.renderer.prompt_size(text) < self.positions else None

    def _log_odds(self, questions: Sequence[list[int] | None]) -> list[float | None]:
        """log P(A)/P(B) as the next token, of each question."""
        import torch
        from private_rlhf.lm.logprobs import response_forward, token_batches
        from private_rlhf.lm.rows import sharing_of

        places = [place for place, question in enumerate(questions) if question is not None]
        rows = [(questions[place] or [], [self.letters[0]]) for place in places]
        log_odds: list[float | None] = [None] * len(questions)
        pad = self.renderer.tokenizer.pad_token_id
        for indices, batch in token_batches(rows, pad, BATCH, self.device, sharing_of(self.model)):
            with torch.no_grad():
                logits = response_forward(self.model, batch)[0].float()
            odds = logits[:, self.letters[0]] - logits[:, self.letters[1]]
            for index, value in zip(indices, odds.tolist(), strict=True):
                log_odds[places[index]] = value
        return log_odds


Judge = ScoreJudge | LmJudge | ChatJudge
"""Compares answers pair by pair: `facts` are the judge as JSON types, and `compare` gives one row of JSON types per
prompt, `outcome` in [0, 1] or None, and what it was made of."""
