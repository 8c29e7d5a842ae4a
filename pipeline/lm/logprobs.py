"""Log-probabilities, entropies and values of responses, with logits for response tokens only.

Shapes: B responses, P prompt tokens (left-padded), C response tokens (right-padded), V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from pipeline.lm.generate import pad_left, pad_right


@dataclass(frozen=True)
class TokenBatch:
    """Responses beside their prompts; neighbours with equal prompts share one row, so that it is computed once.

    A row holds a prompt, left-padded to P tokens, and its responses one after the other; each response attends to the
    prompt and to itself, at the positions it would have alone. R rows of T tokens; R = B where no prompts repeat.

    Attributes:
        input_ids: (R, T) int64.
        attention: (R, T) int64, 1 on real tokens; or (R, 1, T, T) bool, which token sees which, where rows are shared.
        position_ids: (R, T) int64.
        response_ids: (B, C) int64, right-padded.
        response_mask: (B, C) int64, 1 on real response tokens.
        before: (B, C) int64 index into the R·(T − P + 1) columns from the prompts' last tokens on: the column that
            foretells each response token (0 where masked). None where rows are not shared: response column t is then
            foretold by column t.
    """

    input_ids: torch.Tensor
    attention: torch.Tensor
    position_ids: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    before: torch.Tensor | None = None
    prompt_width: int = 0
    """P, where rows are shared."""

    @property
    def kept(self) -> int:
        """Columns from the prompts' last tokens on."""
        if self.before is None:
            return self.response_ids.shape[1] + 1
        return self.input_ids.shape[1] - self.prompt_width + 1


def token_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> TokenBatch:
    """Pads prompts on the left and responses on the right and joins them; equal neighbours share a prompt."""
    groups = [len(list(rows)) for _, rows in groupby(map(tuple, prompts))]
    if len(groups) < len(prompts):
        return _shared_batch(prompts, responses, groups, pad_token_id, device)
    prompt_ids, prompt_mask = pad_left(prompts, pad_token_id, device)
    response_ids, response_mask = pad_right(responses, pad_token_id, device)
    attention = torch.cat([prompt_mask, response_mask], dim=1)
    return TokenBatch(
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention=attention,
        position_ids=(attention.cumsum(dim=1) - 1).clamp_min(0),  # left padding does not shift positions
        response_ids=response_ids,
        response_mask=response_mask,
    )


def _shared_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    groups: Sequence[int],
    pad_token_id: int,
    device: torch.device,
) -> TokenBatch:
    """A batch whose rows hold `groups` neighbouring responses each."""
    response_ids, response_mask = pad_right(responses, pad_token_id, device)
    starts = [sum(groups[:row]) for row in range(len(groups))]
    width = max(len(prompts[start]) for start in starts)
    lengths = [sum(len(r) for r in responses[start : start + n]) for start, n in zip(starts, groups, strict=True)]
    shape = (len(groups), width + max(lengths))
    ids = torch.full(shape, pad_token_id)
    positions = torch.zeros(shape, dtype=torch.long)
    segment = torch.full(shape, -1)  # −1 padding, 0 the prompt, then the responses
    before = torch.zeros(response_ids.shape, dtype=torch.long)
    for row, (start, count) in enumerate(zip(starts, groups, strict=True)):
        prompt = prompts[start]
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        positions[row, width - len(prompt) : width] = torch.arange(len(prompt))
        segment[row, width - len(prompt) : width] = 0
        column = width
        for index in range(start, start + count):
            size = len(responses[index])
            ids[row, column : column + size] = torch.tensor(responses[index])
            positions[row, column : column + size] = torch.arange(len(prompt), len(prompt) + size)
            segment[row, column : column + size] = index - start + 1
            origin = row * (shape[1] - width + 1)
            before[index, :size] = origin + torch.arange(column - width, column - width + size)
            before[index, 0] = origin
            column += size
    seen = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    seen &= (segment[:, None, :] >= 0) & torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    seen |= torch.eye(shape[1], dtype=torch.bool)  # padding sees itself: a row of −∞ would be NaN
    return TokenBatch(
        input_ids=ids.to(device),
        attention=seen[:, None].to(device),
        position_ids=positions.to(device),
        response_ids=response_ids,
        response_mask=response_mask,
        before=before.to(device),
        prompt_width=width,
    )


def response_forward(
    model: Any, batch: TokenBatch, *, hidden: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits (B, C, V) of each response token given what comes before it; if asked, the last hidden states there."""
    attention = batch.attention
    if attention.dtype == torch.bool:  # every attention kernel takes a mask that is added
        added = torch.zeros(attention.shape, dtype=model.dtype, device=attention.device)
        attention = added.masked_fill_(~attention, torch.finfo(model.dtype).min)
    output = model(
        input_ids=batch.input_ids,
        attention_mask=attention,
        position_ids=batch.position_ids,
        logits_to_keep=batch.kept,
        output_hidden_states=hidden,
        use_cache=False,
    )
    states = output.hidden_states[-1][:, -batch.kept :] if hidden else None
    if batch.before is None:
        return output.logits[:, :-1], None if states is None else states[:, :-1]
    return _picked(output.logits, batch.before), None if states is None else _picked(states, batch.before)


def _picked(columns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(R, K, n) and (B, C) -> (B, C, n)."""
    flat = columns.reshape(-1, columns.shape[-1])
    return flat.index_select(0, index.reshape(-1)).view(*index.shape, -1)


def token_logprobs(logits: torch.Tensor, response_ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log π(token) (B, C) float32 from logits (B, C, V) at `temperature`."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    chosen = scaled.gather(-1, response_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)


def token_entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy (B, C) in nats of each next-token distribution."""
    log_probability = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(log_probability.exp() * log_probability).sum(dim=-1)


def token_kl(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL(π(·|context) ‖ π_ref(·|context)) (B, C) in nats over the whole vocabulary.

    Summed along responses sampled from π it is an unbiased estimate of the sequence KL with a lower variance than
    the log-ratio of the sampled tokens (its Rao–Blackwell form).
    """
    log_policy = torch.log_softmax(logits.float(), dim=-1)
    log_reference = torch.log_softmax(reference_logits.float(), dim=-1)
    return (log_policy.exp() * (log_policy - log_reference)).sum(dim=-1)


class PolicyWithValue(nn.Module):
    """A causal LM (usually under LoRA) and a float32 linear value head on its last hidden states.

    The head reads detached states: value errors do not disturb the policy, and both come out of one forward pass.
    """

    def __init__(self, policy: Any, hidden_size: int) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, batch: TokenBatch, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-probabilities (B, C), values (B, C), entropies (B, C) or None), float32."""
        logits, states = response_forward(self.policy, batch, hidden=True)
        assert states is not None
        values = self.value_head(states.detach().float()).squeeze(-1)
        return (
            token_logprobs(logits, batch.response_ids, temperature),
            values,
            token_entropy(logits, temperature) if entropy else None,
        )
