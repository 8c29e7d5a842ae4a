"""Reads an iteration's responses under π and π_ref: log-probabilities and values, and the batches that updates use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from private_rlhf.lm.distributed import adapter_off, split_frozen, turns
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import TokenBatch, frozen_layers, record_states, response_forward, token_batch
from private_rlhf.lm.rows import batches, sharing_of

Evaluated = tuple[list[list[float]], list[list[float]], list[list[float]]]
"""Per response and token: log-probabilities under π, under π_ref, and values."""

KEPT_BYTES = 1 << 30
"""Of the states of an iteration's responses that updates start from (`private_rlhf.lm.logprobs`)."""


class PolicyReader:
    """The policy, its π_ref, and what is kept of the responses that were read last.

    Args:
        accelerator: of the run.
        model: the prepared policy with its value head.
        reference: a frozen π_ref for full fine-tuning; None under LoRA, where the adapter is switched off instead.
        tokenizer: has `eos_token_id` and `pad_token_id`.
        temperature: of every log-probability.
        together: whether each forward pass needs every process.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        reference: Any | None,
        tokenizer: Any,
        temperature: float,
        together: bool,
    ) -> None:
        self.bare: Any = accelerator.unwrap_model(model)  # without DDP, which would wait for the other processes
        self.reference = split_frozen(accelerator, reference) if reference is not None else None
        self.device, self.together = accelerator.device, together
        self.tokenizer, self.temperature = tokenizer, temperature
        self.sharing = sharing_of(self.bare.policy)
        # Responses may be learnt from by another process than read them, which would have to be sent the states.
        self._layers = frozen_layers(self.bare.policy) if accelerator.num_processes == 1 else 0
        self._states: dict[int, torch.Tensor] = {}  # by response: what enters the first adapted layer

    @torch.no_grad()
    def read(
        self,
        prompts: Sequence[list[int]],
        responses: Sequence[list[int]],
        size: int,
        at_reference: bool = False,
        keep: bool = True,
    ) -> Evaluated:
        """Log-probabilities under π and π_ref and values of each response token; `size` responses a forward pass.

        at_reference: nothing was learnt yet, so that π is π_ref and one forward pass tells both.
        keep: updates will be on these responses; otherwise on those that were read before.
        """
        joined = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        found: dict[int, tuple[list[float], list[float], list[float]]] = {}
        layers = self._layers if keep else 0
        if keep:
            self._states = {}
        for picked in turns(batches(joined, self.sharing, size), self.device, self.together):
            batch = self.batch([prompts[i] for i in picked], [responses[i] for i in picked])
            with record_states(self.bare.policy, layers) as states:
                logprobs, values, _ = self.bare(batch, self.temperature)
            if states:
                self._keep(batch, states[0], picked, sum(map(len, joined)))
                batch = batch.above(self._layers, states[0])
            reference = logprobs if at_reference else self._reference_logprobs(batch)
            terms = torch.stack([logprobs, reference, values]).tolist()
            for row, index in enumerate(picked):
                one, other, value = (each[row][: len(responses[index])] for each in terms)
                found[index] = one, other, value
        ordered = [found[index] for index in range(len(prompts))]
        return [item[0] for item in ordered], [item[1] for item in ordered], [item[2] for item in ordered]

    def remember(self, prompts: Sequence[list[int]], responses: Sequence[list[int]], size: int) -> None:
        """Keeps what enters the first adapted layer of these responses for the updates, where that saves anything."""
        if self._layers:
            self.read(prompts, responses, size, at_reference=True)

    def _keep(self, batch: TokenBatch, states: torch.Tensor, picked: Sequence[int], tokens: int) -> None:
        """Keeps what enters the first adapted layer for the updates, if that of all `tokens` is not too much."""
        if tokens * states.shape[-1] * states.element_size() <= KEPT_BYTES:
            self._states |= dict(zip(picked, batch.states_of(states), strict=True))

    def _reference_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """(B, C) log-probabilities under π_ref."""
        if self.reference is None:
            with adapter_off(self.bare.policy):
                logprobs: torch.Tensor = self.bare(batch, self.temperature)[0]
                return logprobs
        logits, _ = response_forward(self.reference, batch)
        return batch.spread(token_logprobs(logits, batch.tokens, self.temperature))

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[Any]:
        """π_ref: the frozen copy, or the policy's own weights with the adapter off."""
        if self.reference is not None:
            yield self.reference
        else:
            with adapter_off(self.bare.policy):
                yield self.bare

    def batch(
        self, prompts: Sequence[list[int]], responses: Sequence[list[int]], indices: Sequence[int] = ()
    ) -> TokenBatch:
        """A batch for the policy; of no responses, a stand-in of one token.

        indices: which of the responses that were read last these are, to start from what was kept of them.
        """
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        made = token_batch(prompts or [[eos]], responses or [[eos]], pad, self.device, sharing=self.sharing)
        if indices and self._states:
            made = made.above(self._layers, made.placed([self._states[index] for index in indices]))
        return made
