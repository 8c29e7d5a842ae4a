"""The sampler draws from exactly π: against enumeration, and whatever the batch, the order or the shard."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import RunStopped
from private_rlhf.lm import generate
from private_rlhf.lm.generate import (
    BLOCK,
    Sampling,
    draw,
    noise_of,
    pad_rows,
    sample_key,
    sample_responses,
)
from private_rlhf.lm.kernels.recorded_step import check_replay
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import response_forward, token_batch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

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
    small.register_forward_pre_hook(lambda _, __, inputs: sizes.append(inputs["input_ids"].shape), with_kwargs=True)
    for ended in (0.0, 0.15, 1.0):  # they leave at once, a few at a time, never
        monkeypatch.setattr(generate.Steps, "ended", ended)
        sizes.clear()
        rows[ended] = sample_responses(
            small, prompts, keys, Sampling(20), pad_token_id=PAD, eos_token_id=EOS, batch_size=64
        )
        decoding = [count for count, width in sizes[1:] if width == 1]
        assert decoding == sorted(decoding, reverse=True)
        assert len(decoding) == max(map(len, rows[ended])) - 1
        alive = [sum(len(row) > step for row in rows[ended]) for step in range(1, len(decoding) + 1)]
        assert all(alive[i] <= count for i, count in enumerate(decoding))
        if ended == 0.0:
            assert decoding == alive
    assert len({len(row) for row in rows[0.0]}) > 3
    assert rows[0.0] == rows[0.15] == rows[1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_memory_of_fixed_shape_draw_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The steps that a CUDA graph replays, without one; rows leave in between. A step done twice is done once."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2)
    model = LlamaForCausalLM(config).to(dtype).eval()
    prompts, keys = [[2 + i % 6] * (1 + i % 9) for i in range(64)], [sample_key("fixed", i) for i in range(64)]
    how = {"pad_token_id": PAD, "eos_token_id": EOS, "batch_size": 48}
    expected = sample_responses(model, prompts, keys, Sampling(20), **how)
    records = []

    def twice(step: Any) -> Any:
        records.append(step)
        step()
        return step

    monkeypatch.setattr(generate, "replays", lambda model: True)
    monkeypatch.setattr(generate, "recorded", twice)
    assert sample_responses(model, prompts, keys, Sampling(20), **how) == expected
    assert len(records) > 2


def test_a_recorded_step_that_draws_otherwise_stops_the_run() -> None:
    drawn = torch.arange(40)
    check_replay(drawn, torch.where(drawn < 3, -1, drawn))
    with pytest.raises(RunStopped, match="draws 12% other tokens than the step itself: set PRIVATE_RLHF_KERNELS=plain"):
        check_replay(drawn, torch.where(drawn < 5, -1, drawn))


@pytest.mark.parametrize("look", [3, 7, 50])
def test_rare_looks_at_the_ends_change_nothing(small: Any, monkeypatch: pytest.MonkeyPatch, look: int) -> None:
    """As on a GPU: what a row draws past its end is dropped."""
    prompts, keys = [[2 + i % 6] * (1 + i % 9) for i in range(64)], [sample_key("look", i) for i in range(64)]
    how = {"pad_token_id": PAD, "eos_token_id": EOS, "batch_size": 64}
    expected = sample_responses(small, prompts, keys, Sampling(20), **how)
    monkeypatch.setitem(generate.LOOK, "cpu", look)
    assert sample_responses(small, prompts, keys, Sampling(20), **how) == expected
    assert len({len(row) for row in expected}) > 3


class KeyedSampler(LogitsProcessor):
    """Turns greedy decoding by transformers' own loop into the same draws."""

    def __init__(self, keys: list[int], steps: int, sampling: Sampling) -> None:
        self.noise, self.sampling, self.step = noise_of(keys, steps), sampling, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = draw(scores, self.noise[:, self.step], self.sampling)
        self.step += 1
        return torch.full_like(scores, float("-inf")).scatter_(1, token[:, None], 0.0)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"top_p": 0.8}])
def test_samples_are_those_of_transformers_own_loop(small: Any, how: dict[str, float]) -> None:
    prompts = [[2 + i % 6] * (1 + i % 4) for i in range(48)]
    keys, sampling = [sample_key("loop", i) for i in range(48)], Sampling(12, **how)
    ids, mask = pad_rows(prompts, PAD, CPU, left=True)
    whole = small.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        logits_processor=LogitsProcessorList([KeyedSampler(keys, 12, sampling)]),
    )[:, ids.shape[1] :].tolist()
    expected = [row[: row.index(EOS) + 1] if EOS in row else row for row in whole]
    assert len({tuple(row) for row in expected}) > 5
    found = sample_responses(small, prompts, keys, sampling, pad_token_id=PAD, eos_token_id=EOS, batch_size=48)
    assert found == expected


def test_any_of_several_ids_ends_a_response(small: Any) -> None:
    """Samples are those of one end, up to the first id that ends one."""
    keys, prompts = [sample_key("ends", i) for i in range(64)], [[3, 4]] * 64
    how: dict[str, Any] = {"pad_token_id": PAD, "batch_size": 64}
    long = sample_responses(small, prompts, keys, Sampling(12), eos_token_id=EOS, **how)
    ends = frozenset([EOS, 6, 7])
    expected = [row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1] for row in long]
    assert sample_responses(small, prompts, keys, Sampling(12), eos_token_id=ends, **how) == expected
    assert {row[-1] for row in expected} >= ends


def test_a_token_of_probability_0_is_never_drawn() -> None:
    """At the ends of the distribution and of its blocks, where rounding would step over the edge."""
    generator = torch.Generator().manual_seed(0)
    for size in (8, BLOCK, BLOCK + 1, 3 * BLOCK + 7):
        logits = torch.full((400, size), float("-inf"))
        for row in logits:
            alive = torch.randperm(size, generator=generator)[: int(torch.randint(1, 9, (1,), generator=generator))]
            row[alive] = torch.randn(len(alive), generator=generator)
        for uniform in (torch.zeros(400), torch.full((400,), 1 - 2**-24), torch.rand(400, generator=generator)):
            token = draw(logits, uniform, Sampling(1))
            assert (logits[torch.arange(400), token] > float("-inf")).all()
        first = (logits > float("-inf")).int().argmax(dim=1)
        assert torch.equal(draw(logits, torch.zeros(400), Sampling(1)), first)


def test_prompts_that_are_alike_are_read_once(small: Any, kernels: None) -> None:
    sizes = []
    small.register_forward_pre_hook(lambda _, __, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True)
    prompts = [[3, 4, 5, 6, 7, 2, 3, 4]] * 24 + [[3, 4, 5, 6, 7, 2, 3, 5]] * 24
    sample(small, prompts, list(range(48)))
    assert sizes[0] <= 18


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


def test_keys_are_injective_in_their_parts() -> None:
    parts = [(1, 2), (12,), ("1", 2), (1, "2"), ("12",), (2, 1), ("a", "b"), ("ab",), (1, 2, 0)]
    keys = [sample_key(*p) for p in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key < 2**63 for key in keys)
    assert sample_key(0, "rollout", 3, 4) == sample_key(0, "rollout", 3, 4)


def test_padding_is_masked_by_length() -> None:
    rows = [[PAD, 5], [6]]  # a real token may have the pad id
    ids, mask = pad_rows(rows, PAD, CPU, left=True)
    assert ids.tolist() == [[PAD, 5], [PAD, 6]]
    assert mask.tolist() == [[1, 1], [0, 1]]
    ids, mask = pad_rows(rows, PAD, CPU)
    assert ids.tolist() == [[PAD, 5], [6, PAD]]
    assert mask.tolist() == [[1, 1], [1, 0]]


def test_settings_and_keys_that_give_no_sample_are_refused() -> None:
    """A top_p of 0 or 2 was a sampler of its own; keys too many were dropped."""
    for wrong in ({"max_new_tokens": 0}, {"temperature": 0}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 2}):
        with pytest.raises(ValueError, match="max_new_tokens must be at least 1, temperature above 0 and top_p in"):
            Sampling(**{"max_new_tokens": 2, **wrong})  # type: ignore[arg-type]
    for keys, size in (([1], 2), ([1, 2, 3], 2), ([1, 2], 0)):
        with pytest.raises(ValueError, match="keys must be one for each prompt and batch_size at least 1"):
            sample(None, [[3], [4]], keys, size)


def test_weights_that_give_no_numbers_stop_in_one_line(small: Any) -> None:
    """Without the check an index into the vocabulary fails, on a GPU in an assertion of the device."""
    model = copy.deepcopy(small)
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(RunStopped, match="logits must be finite"):
        sample(model, [[3, 4]], [0])
