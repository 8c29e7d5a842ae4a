"""Log-probabilities, entropies and values of responses, with logits for response tokens only.

Shapes: B responses of at most C tokens, N real response tokens in all, V vocabulary, d hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from private_rlhf.lm.distributed import is_sharded, turns
from private_rlhf.lm.generate import pad_rows
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.kernels.token_terms import token_logprobs, token_terms
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import Rows, Sharing, batches, make_rows, sharing_of
from torch import Tensor, nn
from tqdm import tqdm


@dataclass(frozen=True)
class TokenBatch:
    """Responses behind their prompts, in rows that may share what they begin with (`private_rlhf.lm.rows`).

    - rows: R rows of T tokens, of the B prompts with their responses.
    - response_ids, response_mask: (B, C) int64, right-padded; the mask is 1 on real response tokens that count.
    - tokens: (N,) int64: those tokens, in the mask's order.
    - before: (N,) int64 index into the R·T columns: the one that predicts each of them.
    - layers: bottom layers that are left out (`skip_layers`).
    - states: (R, T, d) what enters the layer above them; None to start from the tokens.
    """

    rows: Rows
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    tokens: torch.Tensor
    before: torch.Tensor
    layers: int = 0
    states: torch.Tensor | None = None

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) of the real response tokens -> (B, C), 0 at padding."""
        place = self.response_mask.bool()
        return torch.zeros(place.shape, dtype=values.dtype, device=values.device).masked_scatter(place, values)

    def above(self, layers: int, states: torch.Tensor) -> TokenBatch:
        """The batch as seen by the layers above the bottom `layers`, into which `states` (R, T, d) go."""
        return replace(self, layers=layers, states=states)

    def states_of(self, states: torch.Tensor) -> list[torch.Tensor]:
        """The part of (R, T, d) that belongs to each sequence (its length, d)."""
        return [states.flatten(0, 1)[columns] for columns in self.rows.columns]

    def placed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse: (R, T, d) from one part per sequence; 0 at padding."""
        shape = (*self.rows.input_ids.shape, parts[0].shape[-1])
        states = torch.zeros(shape, dtype=parts[0].dtype, device=parts[0].device)
        for columns, part in zip(self.rows.columns, parts, strict=True):
            states.view(-1, shape[-1])[columns] = part
        return states


def token_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_token_id: int,
    device: torch.device,
    *,
    sharing: Sharing | None = None,
) -> TokenBatch:
    """Joins prompts and responses into rows; `sharing` is `sharing_of` the model that will read them. A response token
    below 0 is ~id of one that is read and not counted. ValueError where a prompt is empty."""
    if not all(prompts):
        raise ValueError("prompts must have tokens, got an empty one: drop it")
    flags = [[int(token >= 0) for token in response] for response in responses]
    responses = [[token if token >= 0 else ~token for token in response] for response in responses]
    response_ids, _ = pad_rows(responses, pad_token_id, device)
    response_mask, _ = pad_rows(flags, 0, device)
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    rows = make_rows(sequences, pad_token_id, device, sharing)
    counted = [
        place
        for prompt, response, path, count in zip(prompts, responses, rows.paths, flags, strict=True)
        for *place, counts in zip(response, path[len(prompt) - 1 : -1], count, strict=True)
        if counts
    ]
    tokens, before = torch.tensor(counted, dtype=torch.long).view(-1, 2).T.contiguous().to(device)
    return TokenBatch(rows, response_ids, response_mask, tokens, before)


def response_forward(
    model: Any, batch: TokenBatch, call: Callable[..., Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (N, V) of each real response token given the tokens before it, and the last hidden states (N, d) there.
    The whole model runs, through `call` if given; its output layer sees only N rows."""
    inner: Any = unwrap(model)
    states: list[torch.Tensor] = []

    def pick(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]
        states.append(hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.before))
        return (states[0][None], *arguments[1:])

    rows, whole = batch.rows, batch.states is None
    entry = {"input_ids": rows.input_ids} if whole else {"inputs_embeds": batch.states}
    mask, positions = rows.attention(inner.dtype), rows.position_ids
    handle = inner.get_output_embeddings().register_forward_pre_hook(pick, prepend=True)
    try:
        with contextlib.nullcontext() if whole else skip_layers(model, batch.layers):
            output = (call or model)(**entry, attention_mask=mask, position_ids=positions, use_cache=False)
    finally:
        handle.remove()
    return output.logits[0], states[0]


def take_batches(model: Any) -> None:
    """Lets `model` take a `token_batch` by its own call, on which wrappers of several processes act: it then returns
    log π (N,), nats, of the real response tokens."""
    model.forward = functools.partial(_batch_forward, model, model.forward)


def _batch_forward(
    model: Any, plain: Callable[..., Any], /, *args: Any, token_batch: TokenBatch | None = None, **kwargs: Any
) -> Any:
    if token_batch is None:
        return plain(*args, **kwargs)
    # Not through the model's own call again: accelerate's autocast around it, entered twice, would never end.
    logits, _ = response_forward(model, token_batch, plain)
    return token_logprobs(logits, token_batch.tokens)


class PolicyWithValue(nn.Module):
    """A causal LM (usually under LoRA) and a float32 linear value head on its last hidden states, detached: value
    errors do not disturb the policy. It samples as well, so that everything goes through one module (`lm.distributed`).
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
        return batch.spread(logprobs), batch.spread(values), None if entropies is None else batch.spread(entropies)

    def read(self, **inputs: Any) -> Any:
        """One call of the causal LM, as sampling makes it."""
        return self.policy(**inputs)

    def get_base_model(self) -> Any:
        """The causal LM without adapter and value head."""
        return unwrap(self.policy)


SCALES_EMBEDDINGS = frozenset({"gemma"})
"""Families that scale what stands in for embeddings, and would scale the states."""


def frozen_layers(model: Any) -> int:
    """The number of frozen layers from the bottom up, embeddings included; 0 where the kernel does not fit. The states
    that enter the first adapted layer are kept from the first reading of a response: later readings start there."""
    inner: Any = unwrap(model)
    if sharing_of(model) is None or not runs("trunk", inner.device.type) or not hasattr(inner.get_decoder(), "layers"):
        return 0
    if inner.config.model_type in SCALES_EMBEDDINGS or _learns(inner.get_input_embeddings()):
        return 0
    layers = list(inner.get_decoder().layers)
    return next((number for number, layer in enumerate(layers) if _learns(layer)), 0)


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextlib.contextmanager
def record_states(model: Any, layers: int) -> Iterator[list[Tensor]]:
    """Within, each forward pass adds the states (R, T, d) above the bottom `layers`; none are recorded for 0 layers."""
    states: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        states.append(arguments[0].detach())

    inner: Any = unwrap(model)
    handle = inner.get_decoder().layers[layers].register_forward_pre_hook(keep) if layers else None
    try:
        yield states
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def skip_layers(model: Any, layers: int) -> Iterator[None]:
    """Within, the model has no bottom `layers`: it takes the states that enter the next one as `inputs_embeds`."""
    inner: Any = unwrap(model)
    decoder = inner.get_decoder()
    whole = decoder.layers
    decoder.layers = nn.ModuleList(list(whole)[layers:])
    try:
        yield
    finally:
        decoder.layers = whole


def token_batches(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    pad_token_id: int,
    batch_size: int,
    device: torch.device,
    sharing: Sharing | None,
    together: bool = False,
) -> Iterator[tuple[Sequence[int], TokenBatch]]:
    """(indices, batch) of `rows` (prompt ids, response ids), for one forward pass after another.

    together: each pass needs every process. One that has no rows left gets a stand-in of one text, without indices.
    """
    texts = [[*prompt, *response] for prompt, response in rows]
    stand_in = [([pad_token_id], [pad_token_id])]
    for indices in turns(batches(texts, sharing, batch_size), device, together):
        prompts, responses = zip(*([rows[index] for index in indices] or stand_in), strict=True)
        yield indices, token_batch(prompts, responses, pad_token_id, device, sharing=sharing)


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
    """Length-normalised log-likelihood (n,) of each (prompt ids, response ids) at `temperature`, nats per token.
    Where the model's weights are split, every process calls it, also without rows."""
    result, together = np.zeros(len(rows)), is_sharded(model)
    with tqdm(total=len(rows), desc=progress, unit="text", disable=progress is None, leave=False) as bar:
        for indices, batch in token_batches(rows, pad_token_id, batch_size, device, sharing_of(model), together):
            logits, _ = response_forward(model, batch)
            logprobs = batch.spread(token_logprobs(logits, batch.tokens, temperature))
            result[indices] = (logprobs.sum(dim=1) / batch.response_mask.sum(dim=1))[: len(indices)].cpu().numpy()
            bar.update(len(indices))
    return result
