"""A local language model as judge: its log-odds of naming one of two answers, asked in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.evaluation.verdicts import messages
from private_rlhf.lm.logprobs import response_forward, token_batch
from private_rlhf.lm.model_folders import check_lm_folder, weights_digest
from private_rlhf.lm.rows import batches, sharing_of

BATCH = 8
"""Questions per forward pass."""
QUESTION = "Which answer is better? Reply with one letter, A or B."


class LmJudge:
    """Zheng et al. 2023 (arXiv 2306.05685), pairwise comparison with swapped positions, read off the next token instead
    of a written verdict: nothing is sampled, and no reply is unclear.

    margin = ½ (log-odds of A over B with the policy's answer as A − the same with it as B), nats. A preference for a
    letter or a position adds the same to both and cancels. outcome: 1 for margin > 0, 0 below, ½ at 0 exactly.

    Args:
        folder: checkpoint of a causal LM whose tokenizer has a chat template.
        device: where it goes.

    Raises:
        UserError: no whole checkpoint, no chat template, or A and B begin with the same token.
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
            raise UserError(f"{folder}: its tokenizer does not tell A from B: choose another judge")
        self.facts: dict[str, Any] = {
            "kind": "language model",
            "source": folder.resolve().name,
            "sha256": weights_digest(folder),
        }

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
            if first is None or second is None:
                rows.append({"outcome": None, "margin": None, "log_odds": [first, second]})
                continue
            margin = (first - second) / 2
            outcome = 0.5 if margin == 0 else float(margin > 0)
            rows.append({"outcome": outcome, "margin": margin, "log_odds": [first, second]})
        return rows

    def _question(self, prompt: Prompt, first: str, second: str) -> list[int] | None:
        instruction, question = messages(prompt, first, second)
        instructions = instruction["content"].partition(" End with")[0]
        text = f"{instructions}\n\n{question['content']}\n\n{QUESTION}"
        size = self.renderer.prompt_size(text)
        return self.renderer.prompt_ids(text) if size < self.positions else None

    @torch.no_grad()
    def _log_odds(self, questions: Sequence[list[int] | None]) -> list[float | None]:
        """log P(A)/P(B) as the next token, of each question."""
        places = [place for place, question in enumerate(questions) if question is not None]
        known = [questions[place] or [] for place in places]
        log_odds: list[float | None] = [None] * len(questions)
        sharing = sharing_of(self.model)
        for picked in batches([[*ids, self.letters[0]] for ids in known], sharing, BATCH):
            batch = token_batch(
                [known[i] for i in picked],
                [[self.letters[0]]] * len(picked),
                self.renderer.tokenizer.pad_token_id,
                self.device,
                sharing=sharing,
            )
            logits = response_forward(self.model, batch)[0].float()
            odds = logits[:, self.letters[0]] - logits[:, self.letters[1]]
            for i, value in zip(picked, odds.tolist(), strict=True):
                log_odds[places[i]] = value
        return log_odds
