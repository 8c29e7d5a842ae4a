"""The sampler draws from exactly π: against enumeration, and whatever the batch, the order or the shard."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats

from pipeline.lm.generate import Sampling, cut_after, pad_left, pad_right, sample_key, sample_responses
from pipeline.lm.logprobs import response_forward, token_batch, token_logprobs

PAD, EOS = 0, 1
RESPONSES = [(EOS,), *((a, b) for a, b in itertools.product(range(8), repeat=2) if a != EOS)]
CPU = torch.device("cpu")


def sample(model: Any, prompts: list[list[int]], keys: list[int], batch_size: int = 512, **how: float) -> list[Any]:
    sampling = Sampling(2, **how)
    return sample_responses(model, prompts, keys, sampling, pad_token_id=PAD, eos_token_id=EOS, batch_size=batch_size)


@torch.no_grad()
def exact(model: Any, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(57,) float64: the probability of every response of at most two tokens."""
    batch = token_batch([prompt] * len(RESPONSES), RESPONSES, PAD, CPU)
    logits, _ = response_forward(model, batch)
    found = batch.spread(token_logprobs(logits, batch.tokens, temperature))
    return found.double().sum(dim=1).exp()


def p_value(model: Any, probability: torch.Tensor, count: int, **how: float) -> float:
    """χ² of sampled response counts against `probability`, cells under 5 pooled."""
    rows = sample(model, [[3, 4]] * count, [sample_key("chi2", i) for i in range(count)], **how)
    seen = Counter(tuple(row) for row in rows)
    expected = probability.numpy() * count
    observed = [seen[response] for response in RESPONSES]
    assert sum(observed) == count
    large = expected >= 5
    pooled = [*expected[large], expected[~large].sum()]
    counts = [*(o for o, keep in zip(observed, large, strict=True) if keep), 0]
    counts[-1] = count - sum(counts)
    if pooled[-1] < 1:
        pooled, counts = pooled[:-1], counts[:-1]
    scale = sum(counts) / sum(pooled)
    return float(stats.chisquare(counts, [e * scale for e in pooled]).pvalue)


def test_probabilities_of_all_responses_sum_to_one(small: Any) -> None:
    assert float(exact(small, [3, 4]).sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_frequencies_are_the_enumerated_probabilities(small: Any, temperature: float) -> None:
    """6,000 draws, fixed keys; a true sampler fails one seed in 1,000. The near miss must be rejected."""
    assert p_value(small, exact(small, [3, 4], temperature), 6000, temperature=temperature) > 1e-3
    assert p_value(small, exact(small, [3, 4], temperature * 1.2), 6000, temperature=temperature) < 1e-3


def test_top_p_keeps_the_nucleus_and_renormalises_it(small: Any) -> None:
    with torch.no_grad():
        first = torch.softmax(small(torch.tensor([[3, 4]])).logits[0, -1] / 3, dim=-1)
    order = first.argsort(descending=True)
    before = first[order].cumsum(0) - first[order]
    nucleus = {int(token) for token, mass in zip(order, before, strict=True) if mass < 0.8}
    assert 1 < len(nucleus) < 8
    rows = sample(small, [[3, 4]] * 3000, [sample_key("p", i) for i in range(3000)], top_p=0.8, temperature=3.0)
    counts = Counter(row[0] for row in rows)
    assert set(counts) == nucleus
    kept = sorted(nucleus)
    share = first[kept] / first[kept].sum()
    expected = share.double().numpy() * 3000
    assert stats.chisquare([counts[t] for t in kept], expected * 3000 / expected.sum()).pvalue > 1e-3


def test_samples_do_not_depend_on_batch_size_order_or_shard(small: Any) -> None:
    prompts = [[3, 4], [5], [2, 6, 7, 3, 4], [7, 7, 7]] * 6
    keys = [sample_key(0, "x", i) for i in range(len(prompts))]
    whole = sample(small, prompts, keys)
    assert len({tuple(row) for row in whole}) > 5
    assert sample(small, prompts, keys, batch_size=1) == whole
    assert sample(small, prompts, keys, batch_size=5) == whole
    assert sample(small, prompts[::-1], keys[::-1]) == whole[::-1]
    shards = [sample(small, prompts[rank::3], keys[rank::3], batch_size=4) for rank in range(3)]
    assert [shards[i % 3][i // 3] for i in range(len(prompts))] == whole


def test_ended_responses_leave_the_batch_and_change_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[2 + i % 6] * (1 + i % 9) for i in range(64)]
    keys = [sample_key("stride", i) for i in range(64)]
    rows, sizes = {}, []
    small.register_forward_pre_hook(lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True)
    for stride in (1, 4, 7, 40):
        monkeypatch.setattr("pipeline.lm.generate.STRIDE", stride)
        sizes.clear()
        rows[stride] = sample_responses(
            small, prompts, keys, Sampling(20), pad_token_id=PAD, eos_token_id=EOS, batch_size=64
        )
        assert sizes == sorted(sizes, reverse=True)
        if stride == 1:
            assert sizes == [sum(len(row) > step for row in rows[1]) for step in range(len(sizes))]
    assert len({len(row) for row in rows[1]}) > 3
    assert rows[1] == rows[4] == rows[7] == rows[40]


def test_sampling_touches_no_global_randomness(small: Any) -> None:
    state = torch.get_rng_state()
    first = sample(small, [[3, 4]] * 4, [1, 2, 3, 1])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert sample(small, [[3, 4]] * 4, [1, 2, 3, 1]) == first
    assert first[0] == first[3]  # equal keys, equal prompts
    torch.set_rng_state(state)


def test_responses_end_at_the_first_end_of_turn_or_the_cap(small: Any) -> None:
    rows = sample(small, [[3, 4]] * 300, [sample_key("e", i) for i in range(300)])
    assert {len(row) for row in rows} == {1, 2}
    assert all((len(row) == 1) == (row[0] == EOS) for row in rows)
    assert cut_after([5, EOS, 6, EOS], EOS) == [5, EOS]
    assert cut_after([5, 6], EOS) == [5, 6]


def test_keys_are_injective_in_their_parts() -> None:
    parts = [(1, 2), (12,), ("1", 2), (1, "2"), ("12",), (2, 1), ("a", "b"), ("ab",), (1, 2, 0)]
    keys = [sample_key(*p) for p in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key < 2**63 for key in keys)
    assert sample_key(0, "rollout", 3, 4) == sample_key(0, "rollout", 3, 4)


def test_padding_is_masked_by_length() -> None:
    rows = [[PAD, 5], [6]]  # a real token may have the pad id
    ids, mask = pad_left(rows, PAD, CPU)
    assert ids.tolist() == [[PAD, 5], [PAD, 6]]
    assert mask.tolist() == [[1, 1], [0, 1]]
    ids, mask = pad_right(rows, PAD, CPU)
    assert ids.tolist() == [[PAD, 5], [6, PAD]]
    assert mask.tolist() == [[1, 1], [1, 0]]
