"""Log-probabilities, entropies and values of responses, with logits for response tokens only.

Shapes: B responses, P prompt tokens (left-padded), C response tokens (right-padded), V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.lm.generate import pad_left, pad_right


@dataclass(frozen=True)
class TokenBatch:
    """Prompts and responses side by side.

    Attributes:
        input_ids: (B, P + C) int64, prompts left-padded, responses right-padded.
        attention_mask: (B, P + C) int64, from lengths.
        response_ids: (B, C) int64.
        response_mask: (B, C) int64, 1 on real response tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor


def token_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> TokenBatch:
    """Pads prompts on the left and responses on the right and joins them."""
    prompt_ids, prompt_mask = pad_left(prompts, pad_token_id, device)
    response_ids, response_mask = pad_right(responses, pad_token_id, device)
    return TokenBatch(
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, response_mask], dim=1),
        response_ids=response_ids,
        response_mask=response_mask,
    )


def response_forward(
    model: Any, batch: TokenBatch, *, hidden: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits (B, C, V) of each response token given what comes before it and, if asked, the last hidden states there.

    Position ids follow the mask, so left padding does not shift them.
    """
    count = batch.response_ids.shape[1]
    position_ids = (batch.attention_mask.cumsum(dim=1) - 1).clamp_min(0)
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=position_ids,
        logits_to_keep=count + 1,
        output_hidden_states=hidden,
        use_cache=False,
    )
    states = output.hidden_states[-1][:, -count - 1 : -1] if hidden else None
    return output.logits[:, :-1], states


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
