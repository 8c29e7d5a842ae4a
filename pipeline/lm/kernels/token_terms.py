"""Log-probabilities, entropies and divergences of next-token distributions, from their logits.

The vocabulary is long and memory slow: rows are worked through a few at a time, so that what one step writes the next
still finds in the cache, and the gradients are written out in closed form instead of being recorded step by step.

Shapes: N tokens, V vocabulary. Everything is computed in float32, whatever the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from private_rlhf.lm.kernels import runs
from torch.autograd.function import FunctionCtx, once_differentiable


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log π(ids) (N,) float32 from logits (N, V) at `temperature`; ids (N,) int64."""
    return token_terms(logits, ids, temperature)[0]


def token_terms(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `token_logprobs`; if asked, with the entropy (N,) float32, nats, of each distribution for little more."""
    if not runs("token_terms", logits.device.type):
        log_mass = torch.log_softmax(_scaled(logits, temperature), dim=-1)
        entropies = -(log_mass.exp() * log_mass).sum(dim=-1) if entropy else None
        return log_mass.gather(-1, ids[:, None]).squeeze(-1), entropies
    logprobs, entropies = _TokenTerms.apply(logits, ids, temperature, entropy)
    return logprobs, entropies if entropy else None


@torch.no_grad()
def token_kl(logits: torch.Tensor, reference_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """KL(π(·|context) ‖ π_ref(·|context)) (N,) float32, nats, over the whole vocabulary, at `temperature`; no gradient.

    Summed along responses sampled from π it is an unbiased estimate of the sequence KL with a lower variance than
    the log-ratio of the sampled tokens (its Rao–Blackwell form).
    """
    result = torch.empty(len(logits), device=logits.device)
    for rows in row_chunks(logits):
        log_policy = torch.log_softmax(_scaled(logits[rows], temperature), dim=-1)
        log_reference = torch.log_softmax(_scaled(reference_logits[rows], temperature), dim=-1)
        result[rows] = (log_policy - log_reference).mul_(log_policy.exp()).sum(dim=-1)
    return result


class _TokenTerms(torch.autograd.Function):
    """With p = softmax(l), z = log p and H the entropy: d log p_i/dl = e_i − p and dH/dl = −p·(z + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (N, V), ids (N,) -> log-probabilities (N,) and entropies (N,), the latter 0 if not asked for."""
        logprobs = torch.empty(len(logits), device=logits.device)
        normalisers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for rows in row_chunks(logits):
            scaled = _scaled(logits[rows], temperature)
            top = scaled.amax(dim=-1, keepdim=True)
            shifted = scaled - top
            mass = shifted.exp()
            total = mass.sum(dim=-1)
            log_total = total.log()
            logprobs[rows] = shifted.gather(-1, ids[rows, None]).squeeze(-1) - log_total
            normalisers[rows] = top.squeeze(-1) + log_total
            if with_entropy:
                entropies[rows] = log_total - mass.mul_(shifted).sum(dim=-1) / total
        ctx.save_for_backward(logits, ids, normalisers, entropies)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits, in their dtype."""
        saved: Any = ctx
        logits, ids, normalisers, entropies = saved.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in row_chunks(logits):
            weight = grad_logprobs[rows, None]
            log_mass = _scaled(logits[rows], saved.temperature) - normalisers[rows, None]
            mass = log_mass.exp()
            if saved.with_entropy:
                factor = log_mass.add_(entropies[rows, None]).mul_(grad_entropies[rows, None]).add_(weight).neg_()
            else:
                factor = -weight
            part = mass.mul_(factor).scatter_add_(-1, ids[rows, None], weight)
            gradient[rows] = part if saved.temperature == 1.0 else part / saved.temperature
        return gradient, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def chunk_numbers(device: str) -> int:
    """Logits that are worked on at a time, in float32, on a device of that type."""
    return 1 << (18 if device == "cpu" else 26)


def row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Runs of rows that fit a processor's cache; large ones on other devices, where only memory counts."""
    step = max(1, chunk_numbers(logits.device.type) // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))
