"""How often the host waits for the device: never for a token. Counted on the CPU, with ends looked at as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_rlhf.lm import generate
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.logprobs import PolicyWithValue, token_batch
from private_rlhf.lm.rows import sharing_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique2", "equal"}
"""Operations of ATen whose result, or its shape, the host reads."""


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait on a GPU; copies to the CPU cannot be told apart here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += name in WAITS or by_mask
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def waits_of_drawing(model: Any, tokens: int) -> int:
    prompts, keys = [[3 + i, 4, 5] for i in range(8)], [sample_key("waits", i) for i in range(8)]
    with Waits() as waits:
        rows = sample_responses(model, prompts, keys, Sampling(tokens), pad_token_id=0, eos_token_id=299, batch_size=8)
    assert max(map(len, rows)) == tokens
    return waits.count


def test_replayed_drawing_waits_at_looks_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each look once, and once more where rows leave; a look at every token shows that this would be seen."""
    monkeypatch.setattr(generate, "replays", lambda model: True)
    monkeypatch.setattr(generate, "recorded", lambda step: step)
    monkeypatch.setitem(generate.LOOK, "cpu", 16)
    few, many = waits_of_drawing(model, 9), waits_of_drawing(model, 41)
    assert 2 <= many - few <= 4
    monkeypatch.setitem(generate.LOOK, "cpu", 1)
    assert waits_of_drawing(model, 41) - few >= 32


def test_plain_drawing_waits_once_a_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers makes the mask; split, quantised and autocast models draw in this way."""
    monkeypatch.setitem(generate.LOOK, "cpu", 16)
    assert 32 <= waits_of_drawing(model, 41) - waits_of_drawing(model, 9) <= 32 + 4


def test_reading_does_not_wait_for_tokens(model: Any) -> None:
    """Log-probabilities, values and gradients of long responses take as many waits as those of short ones."""
    policy, counts = PolicyWithValue(model, 32), []
    for length in (30, 60):
        responses = [[7 + i] * length for i in range(4)]
        batch = token_batch([[3, 4]] * 4, responses, 0, torch.device("cpu"), sharing=sharing_of(model))
        with Waits() as waits:
            logprobs, values, _ = policy(batch, 1.0)
            (logprobs.sum() + values.sum()).backward()
        counts.append(waits.count)
    assert counts[0] == counts[1] <= 2
