"""Reward models of architectures without a score layer, and of experts; checkpoints whose weights are not all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.reward_models import checkpoint
from private_rlhf.reward_models.backbone import build_reward_backbone, merge_adapters
from private_rlhf.reward_models.checkpoint import load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from safetensors.torch import load_file, save_file
from support.families import family_checkpoint
from support.reward_checkpoints import features, metadata, raw_scores
from transformers import AutoModelForCausalLM

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers"]
IDS = torch.tensor([[5, 9, 20, 31, 7, 8], [8, 9, 7, 40, 41, 6]])
UNTRAINED = metadata(reward_bound=None, kappa=None)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Cohere", "Granite", "OLMoE"])
def test_an_architecture_without_a_classifier_gets_a_plain_one(family: str, tmp_path: Path) -> None:
    """Its features are the states that enter the causal LM's output layer; saved and loaded it scores the same."""
    source = family_checkpoint(family, tmp_path / "source", TEXTS)
    states: list[torch.Tensor] = []
    causal = AutoModelForCausalLM.from_pretrained(source).eval()
    causal.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0][:, -1]))
    causal(input_ids=IDS)
    backbone = build_reward_backbone(source)
    found = features(RewardModel(backbone), IDS.tolist())
    torch.testing.assert_close(found, states[0], atol=1e-5, rtol=1e-5)
    set_score_weight(backbone, torch.linspace(-1, 1, 64))
    save_reward_checkpoint(tmp_path / "rm", backbone, UNTRAINED)
    loaded = load_reward_checkpoint(tmp_path / "rm").model
    torch.testing.assert_close(raw_scores(loaded, IDS.tolist()), raw_scores(RewardModel(backbone), IDS.tolist()))
    assert build_reward_backbone(source, 1).config.num_hidden_layers == 1


@torch.no_grad()
def test_experts_are_merged(tmp_path: Path) -> None:
    backbone = build_reward_backbone(family_checkpoint("Mixtral", tmp_path, TEXTS))
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"])
    adapted: Any = get_peft_model(backbone, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    with adapted.disable_adapter():
        before = features(RewardModel(adapted), IDS.tolist())
    expected = raw_scores(RewardModel(adapted), IDS.tolist())
    assert (features(RewardModel(adapted), IDS.tolist()) - before).abs().max() > 0.1
    found = raw_scores(RewardModel(merge_adapters(adapted)), IDS.tolist())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_not_all_there_are_refused(tiny_causal_lm: Path, tmp_path: Path) -> None:
    """transformers would draw them at random and go on; layers that are cut off, and the output layer, may be there."""
    backbone = build_reward_backbone(tiny_causal_lm, 1)
    save_reward_checkpoint(tmp_path / "rm", backbone, UNTRAINED)
    file = tmp_path / "rm" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in state.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 missing weights, such as {name}"):
        load_reward_checkpoint(tmp_path / "rm")
    save_file({**state, "model.extra": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 unexpected weights, such as model\.extra"):
        load_reward_checkpoint(tmp_path / "rm")


def test_a_checkpoint_that_scores_otherwise_is_not_kept(
    tiny_causal_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = build_reward_backbone(tiny_causal_lm)
    set_score_weight(backbone, torch.linspace(-1, 1, 32))
    monkeypatch.setattr(checkpoint, "_stored_score_weight", lambda folder: torch.linspace(1, -1, 32))
    with pytest.raises(RuntimeError, match="read again after it was saved, the reward model scores"):
        save_reward_checkpoint(tmp_path / "rm", backbone, UNTRAINED)
    assert not list(tmp_path.iterdir())
