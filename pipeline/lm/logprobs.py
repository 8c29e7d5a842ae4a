"""Log-probabilities, entropies and values of responses, with logits for response tokens only.

Shapes: B responses of at most C tokens, N real response tokens in all, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from pipeline.lm.generate import pad_right
from pipeline.lm.token_terms import token_kl, token_logprobs, token_terms
from reward_models.model import unwrap
from reward_models.shared_prompt import can_share

__all__ = [
    "PolicyWithValue",
    "TokenBatch",
    "can_share",
    "response_forward",
    "token_batch",
    "token_kl",
    "token_logprobs",
]


@dataclass(frozen=True)
class TokenBatch:
    """Responses behind their prompts; neighbours with equal prompts may share one row, so that it is computed once.

    A row holds a prompt and its responses one after the other, then padding; each response attends to the prompt and to
    itself, at the positions it would have alone. R rows of T tokens; R = B where no prompts repeat.

    Attributes:
        input_ids: (R, T) int64.
        attention: (R, T) int64, 1 on real tokens; or (R, 1, T, T) bool, which token sees which, where rows are shared.
        position_ids: (R, T) int64.
        response_ids: (B, C) int64, right-padded.
        response_mask: (B, C) int64, 1 on real response tokens.
        before: (N,) int64 index into the R·T columns: the one that foretells each real response token, in the order in
            which `response_mask` has them.
    """

    input_ids: torch.Tensor
    attention: torch.Tensor
    position_ids: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    before: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """(N,) int64: the real response tokens."""
        return self.response_ids[self.response_mask.bool()]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) of the real response tokens -> (B, C), 0 at padding."""
        place = self.response_mask.bool()
        return torch.zeros(place.shape, dtype=values.dtype, device=values.device).masked_scatter(place, values)


def token_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_token_id: int,
    device: torch.device,
    *,
    share: bool = False,
) -> TokenBatch:
    """Joins prompts and responses and pads on the right.

    share: neighbours with equal prompts share a row, which the model must be fit for (`can_share`).

    Raises:
        ValueError: a prompt is empty, so that nothing foretells the first token.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    response_ids, response_mask = pad_right(responses, pad_token_id, device)
    groups = [len(list(rows)) for _, rows in groupby(map(tuple, prompts))] if share else [1] * len(prompts)
    starts = [sum(groups[:row]) for row in range(len(groups))]
    rows = [_Row(prompts[start], responses[start : start + count]) for start, count in zip(starts, groups, strict=True)]
    width = max(row.width for row in rows)
    segments = torch.tensor([row.segments(width) for row in rows])
    before = [number * width + column for number, row in enumerate(rows) for column in row.before()]
    shared = len(groups) < len(prompts)
    return TokenBatch(
        input_ids=torch.tensor([row.ids(width, pad_token_id) for row in rows], device=device),
        attention=(_seen(segments) if shared else (segments >= 0).long()).to(device),
        position_ids=torch.tensor([row.positions(width) for row in rows], device=device),
        response_ids=response_ids,
        response_mask=response_mask,
        before=torch.tensor(before, dtype=torch.long, device=device),
    )


@dataclass(frozen=True)
class _Row:
    """A prompt and the responses that share it."""

    prompt: Sequence[int]
    responses: Sequence[Sequence[int]]

    @property
    def width(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))

    def ids(self, width: int, pad_token_id: int) -> list[int]:
        return [*self.prompt, *(t for row in self.responses for t in row), *[pad_token_id] * (width - self.width)]

    def positions(self, width: int) -> list[int]:
        first = len(self.prompt)
        own = [first + t for row in self.responses for t in range(len(row))]
        return [*range(first), *own, *[0] * (width - self.width)]

    def segments(self, width: int) -> list[int]:
        """0 the prompt, then 1, 2, … the responses; −1 padding."""
        own = [number for number, row in enumerate(self.responses, start=1) for _ in row]
        return [*[0] * len(self.prompt), *own, *[-1] * (width - self.width)]

    def before(self) -> list[int]:
        """The column that foretells each response token: the prompt's last one for every first token."""
        columns, column = [], len(self.prompt)
        for row in self.responses:
            columns += [len(self.prompt) - 1, *range(column, column + len(row) - 1)][: len(row)]
            column += len(row)
        return columns


def _seen(segments: torch.Tensor) -> torch.Tensor:
    """(R, T) -> (R, 1, T, T) bool: a token sees the prompt and what comes before it in its own response."""
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    size = segments.shape[1]
    seen &= (segments[:, None, :] >= 0) & torch.ones(size, size, dtype=torch.bool).tril()
    seen |= torch.eye(size, dtype=torch.bool)  # padding sees itself: a row of −∞ would be NaN
    return seen[:, None]


def response_forward(model: Any, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, V) of each real response token given what comes before it, and the last hidden states (N, d) there.

    The model is called as a whole, so that what it does to its logits is done; its output layer sees N rows alone.
    """
    attention = batch.attention
    if attention.dtype == torch.bool:  # every attention kernel takes a mask that is added
        added = torch.zeros(attention.shape, dtype=model.dtype, device=attention.device)
        attention = added.masked_fill_(~attention, torch.finfo(model.dtype).min)
    states: list[torch.Tensor] = []

    def pick(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]
        states.append(hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.before))
        return (states[0][None], *arguments[1:])

    inner: Any = unwrap(model)
    handle = inner.get_output_embeddings().register_forward_pre_hook(pick, prepend=True)
    try:
        output = model(
            input_ids=batch.input_ids, attention_mask=attention, position_ids=batch.position_ids, use_cache=False
        )
    finally:
        handle.remove()
    return output.logits[0], states[0]


class PolicyWithValue(nn.Module):
    """A causal LM (usually under LoRA) and a float32 linear value head on its last hidden states.

    The head reads detached states: value errors do not disturb the policy, and both come out of one forward pass.
    It samples as well, so that all that is done with the policy goes through one module (`pipeline.lm.sharding`).
    """

    def __init__(self, policy: Any, hidden_size: int) -> None:
        super().__init__()
        self.policy = policy
        self._no_split_modules = list(getattr(self.get_base_model(), "_no_split_modules", None) or [])
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, batch: TokenBatch, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(log-probabilities (B, C), values (B, C), entropies (B, C) or None), float32, 0 at padding."""
        logits, states = response_forward(self.policy, batch)
        values = self.value_head(states.detach().float()).squeeze(-1)
        logprobs, entropies = token_terms(logits, batch.tokens, temperature, entropy=entropy)
        return (
            batch.spread(logprobs),
            batch.spread(values),
            None if entropies is None else batch.spread(entropies),
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's own."""
        return self.policy.generate(*args, **kwargs)

    def get_base_model(self) -> Any:
        """The causal LM without adapter and value head."""
        return unwrap(self.policy)
