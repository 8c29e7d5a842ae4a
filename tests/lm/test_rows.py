"""Rows of shared prefixes: what each token sees, when sharing pays, and that nothing else changes, in every family."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.lm.kernels.attention import NAME as GROUPED
from private_rlhf.lm.kernels.attention import use_grouped_attention
from private_rlhf.lm.rows import FAMILIES, LIKE, Rows, Sharing, batches, grouped, make_rows, sharing_of
from private_rlhf.reward_models.model import RewardModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

CPU = torch.device("cpu")
ALWAYS = Sharing(price=10**9, columns=0)
PROMPT = [5, 9, 7, 30, 31, 8]
TEXTS = [
    [*PROMPT, 11, 12, 2],
    [*PROMPT, 13, 2],
    [*PROMPT, 20, 21, 22, 23, 24, 2],
    [*PROMPT, 20, 21, 40, 2],  # answers that begin alike
    [5, 6, 2],
    [7, 8, 9, 10, 2],  # nothing alike
    [*PROMPT, 2],
    [*PROMPT, 2],  # the same text
    [*PROMPT, 11],  # one begins another
    [3],
]


def tiny(family: str, attention: str = "sdpa", **more: Any) -> Any:
    """A random float64 sequence-classification model."""
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
        **{"sliding_window": None, **more},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config, attn_implementation=attention).double().eval()


def seen(rows: Rows) -> Tensor:
    """(R, T, T) bool: which column sees which."""
    mask = rows.attention(torch.float32)
    if mask.dim() == 4:
        return mask[:, 0] == 0
    width = mask.shape[1]
    return mask[:, None, :].bool() & torch.ones(width, width, dtype=torch.bool).tril()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("attention", ["sdpa", "eager", GROUPED])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_features_and_gradients_are_those_of_each_text_alone(family: str, attention: str) -> None:
    model = tiny(family, "sdpa" if attention == GROUPED else attention)
    if attention == GROUPED:
        use_grouped_attention(model)
    assert model.config._attn_implementation == attention
    assert sharing_of(model) is not None
    reward = RewardModel(model)
    weights = torch.linspace(-1, 1, len(TEXTS) * 32, dtype=torch.float64).view(len(TEXTS), 32)
    expected = torch.cat([reward.row_features(make_rows([text], 0, CPU)) for text in TEXTS]).double()
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    rows = make_rows(TEXTS, 0, CPU, ALWAYS)
    assert len(rows.input_ids) < 5
    found = reward.row_features(rows).double()
    assert float((expected[0] - expected[1]).detach().abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # features are float32
    (found * weights).sum().backward()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        # Rotary embeddings, norms and the softmax are float32 in any model.
        other = model.get_parameter(name).grad
        torch.testing.assert_close(other, gradient, rtol=0, atol=4e-6 * scale, msg=name)


texts = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=8), min_size=1, max_size=7)


@given(sequences=texts, price=st.sampled_from([0, 1, 10, 10**9]))
def test_a_token_sees_its_own_prefix_at_its_own_positions(sequences: list[list[int]], price: int) -> None:
    rows = make_rows(sequences, 0, CPU, Sharing(price, 0) if price else None)
    sees, ids, places = seen(rows), rows.input_ids.flatten(), rows.position_ids.flatten()
    width = rows.input_ids.shape[1]
    for sequence, path in zip(sequences, rows.paths, strict=True):
        assert ids[path].tolist() == sequence
        assert places[path].tolist() == list(range(len(sequence)))
        for length, column in enumerate(path, start=1):
            row, own = divmod(column, width)
            visible = sees[row, own].nonzero()[:, 0] + row * width
            assert visible.tolist() == path[:length]
    assert rows.last.tolist() == [path[-1] for path in rows.paths]
    assert sees.any(dim=-1).all() or not price  # a row of −∞ would be NaN
    if not price:
        assert rows.input_ids.shape == (len(sequences), max(map(len, sequences)))


@given(sequences=texts, size=st.integers(1, 9), columns=st.integers(0, 30), shared=st.booleans())
def test_batches_hold_every_sequence_once(sequences: list[list[int]], size: int, columns: int, shared: bool) -> None:
    found = batches(sequences, Sharing(50, columns) if shared else None, size)
    assert sorted(index for batch in found for index in batch) == list(range(len(sequences)))
    assert all(0 < len(batch) <= size for batch in found)
    if not shared:
        assert len(found) == math.ceil(len(sequences) / size)


def test_large_passes_pad_little() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (300,), generator=generator).tolist()
    sequences = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    for batch in batches(sequences, Sharing(50, 0), 300):
        rows = make_rows([sequences[index] for index in batch], 0, CPU, Sharing(50, 0))
        assert sum(lengths[index] for index in batch) > LIKE * rows.input_ids.numel() - 200


@pytest.mark.parametrize(("common", "own", "price"), [(14, 30, 1728), (150, 60, 1728), (25, 20, 6144), (60, 10, 200)])
def test_a_tree_grows_to_the_width_that_costs_least(common: int, own: int, price: int) -> None:
    """Against every number of answers per tree, by the cost that the rule states: tokens, and pairs that could meet."""

    def cost(count: int) -> float:
        width = common + count * own
        return (width + width**2 / price) / count

    prompt = [1] * common
    answers = [[*prompt, 2 + number, *[0] * (own - 1)] for number in range(400)]
    chosen = len(grouped(answers, Sharing(price, 0))[0])
    best = min(range(1, 401), key=cost)
    assert cost(chosen) <= 1.03 * cost(best)
    assert cost(chosen) < cost(1)


def test_long_answers_do_not_share_and_pairs_do() -> None:
    """Sixteen answers of 512 tokens in one row were three times slower than a row each."""
    price = 3 * 256
    prompt = [1] * 200
    assert len(grouped([[*prompt, 2 + n, *[0] * 511] for n in range(16)], Sharing(price, 0))) == 16
    assert len(grouped([[*prompt, 2 + n, *[0] * 31] for n in range(16)], Sharing(price, 0))) < 4
    assert len(grouped([[*prompt, 2, *[0] * 99], [*prompt, 3, *[0] * 99]], Sharing(price, 0))) == 1
    assert grouped([[*prompt, 2], [*prompt, 3]], None) == [[0], [1]]


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="must have tokens"):
        make_rows([[3], []], 0, CPU)


@pytest.mark.usefixtures("kernels")
def test_models_that_mix_tokens_otherwise_are_left_alone() -> None:
    assert sharing_of(tiny("llama")) == Sharing(96, 256)
    assert sharing_of(tiny("mistral")) is not None
    assert sharing_of(tiny("mistral", sliding_window=4)) is None
    assert sharing_of(tiny("mistral", attention="flex_attention")) is None
    assert sharing_of(tiny("llama"), tiny("mistral", sliding_window=4)) is None
    config = AutoConfig.for_model("gpt2", vocab_size=8, n_embd=8, n_layer=1, n_head=2, num_labels=1)
    assert sharing_of(AutoModelForSequenceClassification.from_config(config)) is None


def test_what_is_shared_is_computed_once() -> None:
    rows = make_rows([[*PROMPT, a, b] for a, b in itertools.product(range(10, 14), repeat=2)], 0, CPU, ALWAYS)
    assert rows.input_ids.shape == (1, len(PROMPT) + 4 + 16)
