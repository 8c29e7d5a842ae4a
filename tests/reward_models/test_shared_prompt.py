"""One row for both texts of a pair: the scores and gradients of two rows, in every family that is trusted with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from reward_trainers import make_rows, make_trainer
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from reward_models.model import RewardModel
from reward_models.shared_prompt import (
    FAMILIES,
    PAD,
    SHORT,
    added_mask,
    can_share,
    join_pairs,
    pair_scores,
    pick_attention,
    row_length,
    shared_length,
)
from reward_models.trainer import PairCollator

PROMPT = [5, 9, 7, 30, 31, 8]
PAIRS = [
    ([*PROMPT, 11, 12, 2], [*PROMPT, 13, 2]),
    ([*PROMPT, 20, 21, 22, 23, 24, 2], [*PROMPT, 20, 21, 40, 2]),  # answers that begin alike
    ([5, 6, 2], [7, 8, 9, 10, 2]),  # nothing alike, as where a tokenizer cuts the prompt in two ways
    ([*PROMPT, 2], [*PROMPT, 2]),  # the same text
    ([*PROMPT, 11], [*PROMPT, 11, 12, 2]),  # one begins the other
    ([3], [4, 2]),
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


def alone(model: Any, ids: list[int], left: int = 0) -> Tensor:
    """The score of one text in a row of its own, after `left` pad tokens."""
    mask = torch.tensor([[0] * left + [1] * len(ids)])
    return RewardModel(model).features(torch.tensor([[0] * left + ids]), mask).double() @ model.score.weight[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_scores_and_gradients_are_those_of_two_rows(family: str, attention: str) -> None:
    model = tiny(family, attention)
    assert can_share(model)
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0, 2.0], dtype=torch.float64)
    expected = torch.stack([torch.cat([alone(model, text) for text in side]) for side in zip(*PAIRS, strict=True)])
    ((expected[0] - expected[1]) * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    scores, output = pair_scores(model, model, join_pairs(PAIRS, 0))
    assert float((expected[0] - expected[1]).detach().abs().max()) > 1e-3
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)  # the score itself is float32
    torch.testing.assert_close(output.logits[:, 0], scores.reshape(-1), rtol=0, atol=0)
    ((scores[0] - scores[1]) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        assert scale > 0
        # Rotary embeddings, norms and the softmax are float32 in any model.
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=2e-6 * scale, msg=name)


def test_scores_are_those_of_left_padded_rows() -> None:
    model = tiny("llama")
    scores, _ = pair_scores(model, model, join_pairs(PAIRS, 0))
    for row, pair in enumerate(PAIRS):
        for side, text in enumerate(pair):
            torch.testing.assert_close(
                scores[side, row : row + 1].double(), alone(model, text, 3), rtol=1e-5, atol=1e-6
            )


texts = st.lists(st.integers(3, 5), min_size=1, max_size=8)


@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_a_row_holds_both_texts_and_no_token_sees_the_other_text(pairs: list[tuple[list[int], list[int]]]) -> None:
    joined = join_pairs(pairs, 0)
    seen = added_mask(joined["segments"], torch.float32)[:, 0] == 0
    for row, pair in enumerate(pairs):
        assert int((joined["segments"][row] != PAD).sum()) == row_length(*pair)
        assert shared_length(*pair) < min(map(len, pair))
        for side, text in enumerate(pair):
            column = joined["last"][row, side]
            assert joined["input_ids"][row][seen[row, column]].tolist() == text
            assert joined["position_ids"][row][seen[row, column]].tolist() == list(range(len(text)))


def test_models_that_mix_tokens_otherwise_are_left_alone() -> None:
    assert not can_share(tiny("mistral", sliding_window=4))
    assert not can_share(tiny("mistral", attention="flex_attention"))
    config = AutoConfig.for_model("gpt2", vocab_size=8, n_embd=8, n_layer=1, n_head=2, num_labels=1)
    assert not can_share(AutoModelForSequenceClassification.from_config(config))


def test_the_collator_takes_two_rows_where_they_are_less_to_compute() -> None:
    collator = PairCollator(pad_token_id=0, share=True)
    apart = [{"chosen_ids": [5, 6, 2], "rejected_ids": [7, 8, 2]}]
    alike = [{"chosen_ids": [5, 6, 2], "rejected_ids": [5, 8, 2]}]
    assert collator(apart)["input_ids"].shape == (2, 3)
    assert collator(alike)["input_ids"].shape == (1, 5)
    assert PairCollator(pad_token_id=0)(alike)["input_ids"].shape == (2, 3)


@pytest.mark.parametrize("lora", [False, True])
def test_the_trainer_s_loss_and_gradients_do_not_change(tiny_causal_lm: Path, tmp_path: Path, lora: bool) -> None:
    rows = Dataset.from_dict({"chosen_ids": [pair[0] for pair in PAIRS], "rejected_ids": [pair[1] for pair in PAIRS]})
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["score"], task_type="SEQ_CLS")
    found = []
    for share in (False, True):
        torch.manual_seed(0)  # of the adapter
        trainer = make_trainer(
            tiny_causal_lm, tmp_path, train_dataset=rows, share_prompts=share, peft_config=config if lora else None
        )
        batch = trainer.data_collator(list(rows))
        assert ("segments" in batch) == share
        losses = trainer.pair_losses(rows)
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), losses, gradients))
    assert len(found[0][2]) > 10
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_short_rows_train_without_fused_attention_on_a_cpu(tiny_causal_lm: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_causal_lm, tmp_path, train_dataset=make_rows(8))
    config = trainer.model.config
    trainer.train()
    assert config._attn_implementation == "eager"
    pick_attention(trainer.model, SHORT + 1)
    assert config._attn_implementation == "sdpa"
    pick_attention(trainer.model, SHORT)
    with torch.no_grad():
        pick_attention(trainer.model, SHORT)
    assert config._attn_implementation == "sdpa"
