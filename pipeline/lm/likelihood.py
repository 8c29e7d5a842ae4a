"""How likely a language model finds given responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from private_rlhf.lm.logprobs import response_forward, token_batch, token_logprobs
from private_rlhf.lm.rows import batches, sharing_of
from tqdm import tqdm


@torch.no_grad()
def mean_logprobs(
    model: Any,
    rows: Sequence[tuple[list[int], list[int]]],
    *,
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
    temperature: float = 1.0,
    progress: str | None = None,
) -> np.ndarray:
    """Length-normalised log-likelihood (n,) of each (prompt ids, response ids) at `temperature`, nats per token."""
    sharing = sharing_of(model)
    joined = [[*prompt, *response] for prompt, response in rows]
    result = np.zeros(len(rows))
    bar = tqdm(total=len(rows), desc=progress, unit="text", disable=progress is None, leave=False)
    for picked in batches(joined, sharing, batch_size):
        prompts, responses = [rows[i][0] for i in picked], [rows[i][1] for i in picked]
        batch = token_batch(prompts, responses, pad_token_id, device, sharing=sharing)
        logits, _ = response_forward(model, batch)
        logprobs = batch.spread(token_logprobs(logits, batch.tokens, temperature))
        result[picked] = (logprobs.sum(dim=1) / batch.response_mask.sum(dim=1)).cpu().numpy()
        bar.update(len(picked))
    bar.close()
    return result
