"""Building reward models, last-token pooling from masks, agreement with plain transformers, merging adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.lm.rows import make_rows
from private_rlhf.reward_models.backbone import build_reward_backbone, merge_adapters
from private_rlhf.reward_models.model import RewardModel, score_layer, set_score_weight
from support.reward_checkpoints import features, raw_scores, rewards
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

SEQUENCES = ([5, 6, 7, 8, 2], [9, 10], [11, 12, 13, 2, 14, 15, 16], [17])


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """SEQUENCES padded on one side: ids and mask (4, 9)."""
    ids, mask = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.long)
    for row, sequence in enumerate(SEQUENCES):
        start = 9 - len(sequence) if side == "left" else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


def random_weight(size: int = 32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(5))


def one_by_one(model: PreTrainedModel) -> torch.Tensor:
    """Raw scores without any padding, through plain transformers."""
    return torch.stack([model(torch.tensor([sequence])).logits[0, 0] for sequence in SEQUENCES])


@torch.no_grad()
def test_pooling_agrees_with_transformers_and_ignores_padding(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm)
    set_score_weight(model, random_weight())
    reward_model = RewardModel(model, reward_bound=10.0)
    expected = one_by_one(model)
    torch.testing.assert_close(raw_scores(reward_model, SEQUENCES), expected, rtol=1e-4, atol=1e-4)
    bounded = 5 * torch.tanh(expected / 5)
    torch.testing.assert_close(rewards(reward_model, SEQUENCES), bounded, rtol=1e-4, atol=1e-4)
    assert features(reward_model, SEQUENCES).shape == (4, 32)
    for side in ("right", "left"):
        ids, mask = padded(side)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_head_of_two_outputs_reads_the_last_token_and_the_sum_of_all(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm, token_sum=True)
    set_score_weight(model, random_weight(64))
    reward_model = RewardModel(model)
    states = [model.model(torch.tensor([sequence])).last_hidden_state[0] for sequence in SEQUENCES]
    expected = torch.stack([torch.cat([state[-1], state.sum(0)]) for state in states])
    torch.testing.assert_close(features(reward_model, SEQUENCES), expected, rtol=1e-4, atol=1e-4)
    alike = [[1, 2, 3, *sequence] for sequence in SEQUENCES]  # so that texts share rows
    shared = make_rows(alike, 0, torch.device("cpu"), reward_model.sharing)
    alone = make_rows(alike, 0, torch.device("cpu"))
    assert len(shared.input_ids) < len(alike)
    together = reward_model.row_features(shared)
    torch.testing.assert_close(together, reward_model.row_features(alone), rtol=1e-4, atol=1e-4)
    score = raw_scores(reward_model, SEQUENCES)
    torch.testing.assert_close(score, expected @ random_weight(64), rtol=1e-4, atol=1e-4)
    # What answers of one prompt differ by is a sum over the answers: the prompt's own states cancel.
    sums = together[:, 32:]
    answers = torch.stack([model.model(torch.tensor([row])).last_hidden_state[0, 3:].sum(0) for row in alike])
    torch.testing.assert_close(sums - sums[:1], answers - answers[:1], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_text_that_contains_or_ends_in_the_pad_token_is_pooled_at_its_end(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm)
    set_score_weight(model, random_weight())
    texts = [[5, 0, 6, 0], [1, 2, 3, 4, 5, 6]]
    unpadded = model.model(torch.tensor(texts[:1])).last_hidden_state[0, 3] @ random_weight()
    torch.testing.assert_close(raw_scores(RewardModel(model), texts)[0], unpadded, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_absolute_positions_survive_padding() -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config).eval()
    torch.testing.assert_close(raw_scores(RewardModel(model), SEQUENCES), one_by_one(model), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_truncated_backbone_keeps_the_first_layers(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm, 2)
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert float(score_layer(model).weight.abs().max()) == 0.0
    assert not model.training
    full = AutoModel.from_pretrained(tiny_causal_lm, dtype=torch.float32).eval()
    ids, mask = padded("right")
    second = full(ids, attention_mask=mask, output_hidden_states=True).hidden_states[2]
    expected = full.norm(second)[torch.arange(4), mask.sum(dim=1) - 1]
    torch.testing.assert_close(features(RewardModel(model), SEQUENCES), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_bfloat16_backbone_has_a_float32_head(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm, dtype=torch.bfloat16)
    set_score_weight(model, random_weight())
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert score_layer(model).weight.dtype == torch.float32
    ids, mask = padded("right")
    raw = raw_scores(RewardModel(model), SEQUENCES)
    assert raw.dtype == torch.float32
    # The model's own forward goes through the same float32 head, also under autocast.
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 0], raw, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids, attention_mask=mask).logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_adapter_is_an_ordinary_model_with_the_same_scores(
    tiny_causal_lm: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build_reward_backbone(tiny_causal_lm, dtype=dtype)
    set_score_weight(model, random_weight())
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        score_layer(adapted).weight.mul_(2.0)
        ids, mask = padded("right")
        before = raw_scores(RewardModel(adapted), SEQUENCES)
        base = RewardModel(build_reward_backbone(tiny_causal_lm))
        untouched = features(base, SEQUENCES) @ (2 * random_weight())
        merged = merge_adapters(adapted)
        after = raw_scores(RewardModel(merged), SEQUENCES)
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
        assert float((after - untouched).abs().max()) > 0.2  # the adapter is in there
        merged.save_pretrained(tmp_path / "merged")
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        torch.testing.assert_close(plain(ids, attention_mask=mask).logits[:, 0], after, rtol=1e-4, atol=1e-4)
    assert merge_adapters(merged) is merged


def test_features_are_differentiable(tiny_causal_lm: Path) -> None:
    model = build_reward_backbone(tiny_causal_lm, 1)
    set_score_weight(model, random_weight())
    raw_scores(RewardModel(model), SEQUENCES).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_errors_name_the_culprit(tiny_causal_lm: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_layers must lie between 1 and 3"):
        build_reward_backbone(tiny_causal_lm, 4)
    with pytest.raises(ValueError, match="pad_token_id must be a token that no text ends with, got 2"):
        build_reward_backbone(tiny_causal_lm, pad_token_id=2)
    no_pad = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(no_pad).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pad_token_id must be .*, got None"):
        build_reward_backbone(tmp_path)
    with pytest.raises(ValueError, match=r"weight must have shape .*, got \(3,\)"):
        set_score_weight(build_reward_backbone(tiny_causal_lm), torch.zeros(3))
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no bias-free `score` layer"):
        RewardModel(bert)
