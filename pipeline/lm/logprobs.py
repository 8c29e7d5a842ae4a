"""Log-probabilities, entropies and values of responses, with logits for response tokens only.

Shapes: B responses of at most C tokens, N real response tokens in all, V vocabulary, d hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from private_rlhf.lm.generate import pad_right
from private_rlhf.lm.kernels.token_terms import token_kl, token_logprobs, token_terms
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import Rows, Sharing, make_rows
from private_rlhf.lm.trunk import left_out
from torch import nn

__all__ = [
    "PolicyWithValue",
    "TokenBatch",
    "response_forward",
    "take_batches",
    "token_batch",
    "token_kl",
    "token_logprobs",
]


@dataclass(frozen=True)
class TokenBatch:
    """Responses behind their prompts, in rows that may share what they begin with (`private_rlhf.lm.rows`).

    Attributes:
        rows: R rows of T tokens, of the B prompts with their responses.
        response_ids: (B, C) int64, right-padded.
        response_mask: (B, C) int64, 1 on real response tokens that count.
        before: (N,) int64 index into the R·T columns: the one that foretells each real response token, in the order in
            which `response_mask` has them.
        layers: bottom layers that are left out (`private_rlhf.lm.trunk`).
        states: (R, T, d) what enters the layer above them; None to start from the tokens.
    """

    rows: Rows
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    before: torch.Tensor
    layers: int = 0
    states: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """(N,) int64: the real response tokens."""
        return self.response_ids[self.response_mask.bool()]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) of the real response tokens -> (B, C), 0 at padding."""
        place = self.response_mask.bool()
        return torch.zeros(place.shape, dtype=values.dtype, device=values.device).masked_scatter(place, values)

    def above(self, layers: int, states: torch.Tensor) -> TokenBatch:
        """The batch as seen by the layers above the bottom `layers`, into which `states` (R, T, d) go."""
        return replace(self, layers=layers, states=states)

    def states_of(self, states: torch.Tensor, row: int) -> torch.Tensor:
        """The part of (R, T, d) that belongs to sequence `row` (its length, d)."""
        return states.flatten(0, 1)[self.rows.paths[row]]

    def placed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse: (R, T, d) from one part per sequence; 0 at padding."""
        shape = (*self.rows.input_ids.shape, parts[0].shape[-1])
        states = torch.zeros(shape, dtype=parts[0].dtype, device=parts[0].device)
        for path, part in zip(self.rows.paths, parts, strict=True):
            states.view(-1, shape[-1])[path] = part
        return states


def token_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_token_id: int,
    device: torch.device,
    *,
    sharing: Sharing | None = None,
) -> TokenBatch:
    """Joins prompts and responses into rows; `sharing` is what `sharing_of` says of the model that will read them.

    A response token below 0 is ~id of one that is read and not counted: it is not in `response_mask`.

    Raises:
        ValueError: a prompt is empty, so that nothing foretells the first token.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    counted = [[int(token >= 0) for token in response] for response in responses]
    responses = [[token if token >= 0 else ~token for token in response] for response in responses]
    response_ids, _ = pad_right(responses, pad_token_id, device)
    response_mask, _ = pad_right(counted, 0, device)
    joined = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    rows = make_rows(joined, pad_token_id, device, sharing)
    before = [
        column
        for prompt, path, count in zip(prompts, rows.paths, counted, strict=True)
        for column, counts in zip(path[len(prompt) - 1 : -1], count, strict=True)
        if counts
    ]
    return TokenBatch(rows, response_ids, response_mask, torch.tensor(before, dtype=torch.long, device=device))


def response_forward(
    model: Any, batch: TokenBatch, call: Callable[..., Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, V) of each real response token given what comes before it, and the last hidden states (N, d) there.

    The model is called as a whole, so that what it does to its logits is done; its output layer sees N rows alone.
    call: how it is called; None is its own call.
    """
    inner: Any = unwrap(model)
    states: list[torch.Tensor] = []

    def pick(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]
        states.append(hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.before))
        return (states[0][None], *arguments[1:])

    given: dict[str, Any] = {
        "attention_mask": batch.rows.attention(inner.dtype),
        "position_ids": batch.rows.position_ids,
        "use_cache": False,
    }
    shortened: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if batch.states is None:
        given["input_ids"] = batch.rows.input_ids
    else:
        given["inputs_embeds"], shortened = batch.states, left_out(model, batch.layers)
    handle = inner.get_output_embeddings().register_forward_pre_hook(pick, prepend=True)
    try:
        with shortened:
            output = (call or model)(**given)
    finally:
        handle.remove()
    return output.logits[0], states[0]


def take_batches(model: Any) -> None:
    """Lets `model` be called with a `token_batch` alone, for log π (N,), nats, of its real response tokens; else as
    before. Through the model's own call, as wrappers of several processes act on that.
    """
    model.forward = functools.partial(_forward, model, model.forward)


def _forward(
    model: Any, plain: Callable[..., Any], /, *args: Any, token_batch: TokenBatch | None = None, **kwargs: Any
) -> Any:
    if token_batch is None:
        return plain(*args, **kwargs)
    # Not through the model's own call again: accelerate's autocast around it, entered twice, would never end.
    logits, _ = response_forward(model, token_batch, plain)
    return token_logprobs(logits, token_batch.tokens)


class PolicyWithValue(nn.Module):
    """A causal LM (usually under LoRA) and a float32 linear value head on its last hidden states.

    The head reads detached states: value errors do not disturb the policy, and both come out of one forward pass.
    It samples as well, so that all that is done with the policy goes through one module (`private_rlhf.lm.sharding`).
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
        with torch.autocast(states.device.type, enabled=False):  # a value of 4 has steps of 0.02 in bfloat16
            values = self.value_head(states.detach().float()).squeeze(-1)
        logprobs, entropies = token_terms(logits, batch.tokens, temperature, entropy=entropy)
        return (
            batch.spread(logprobs),
            batch.spread(values),
            None if entropies is None else batch.spread(entropies),
        )

    def read(self, **inputs: Any) -> Any:
        """One call of the causal LM, as sampling makes it."""
        return self.policy(**inputs)

    def get_base_model(self) -> Any:
        """The causal LM without adapter and value head."""
        return unwrap(self.policy)
