"""4-bit LoRA and 8-bit optimisers on a CPU: they train, and the checkpoint is an ordinary one of the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.lm.models import is_four_bit
from private_rlhf.recipe import EarlyStoppingSettings
from private_rlhf.reward_models.backbone import build_reward_backbone, merge_adapters
from private_rlhf.reward_models.checkpoint import load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.model import RewardModel, score_layer, set_score_weight
from private_rlhf.reward_models.training import HeldOutStopping
from support.reward_checkpoints import metadata, raw_scores
from support.reward_trainers import make_rows, make_trainer, save_llama, step_losses
from transformers import AutoModelForSequenceClassification

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["score"], task_type="SEQ_CLS")


@pytest.fixture(scope="module")
def wide_causal_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 64 features: 4-bit blocks hold 64 weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 4}
    return save_llama(tmp_path_factory.mktemp("lm") / "wide", **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qlora_trains_and_saves_an_ordinary_checkpoint(
    wide_causal_lm: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    pytest.importorskip("bitsandbytes")
    base = build_reward_backbone(wide_causal_lm, dtype=dtype, four_bit=True)
    assert is_four_bit(base)
    head = 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(4))
    set_score_weight(base, head)
    rows = make_rows(8)
    stopping = HeldOutStopping(rows, EarlyStoppingSettings(every=3, patience=5))
    trainer = make_trainer(
        wide_causal_lm,
        tmp_path,
        model=base,
        peft_config=LORA,
        train_dataset=rows,
        max_steps=6,
        lr_scheduler_type="constant",
        callbacks=[stopping],
    )
    stopping.attach(trainer)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert torch.equal(score_layer(trainer.model).weight[0], head)  # not rounded on the way
    packed = base.model.layers[0].mlp.up_proj.weight
    assert packed.dtype == torch.uint8
    trainer.train()
    losses = step_losses(trainer)
    assert losses[-1] < losses[0] - 0.02
    assert all(value.dtype == torch.float32 for value in before.values())
    trained = dict(trainer.model.named_parameters())
    assert all(not torch.equal(before[name], trained[name]) for name in before)

    ids = torch.tensor([[5, 6, 7, 2], [9, 8, 3, 11]])
    with torch.no_grad():
        expected = raw_scores(RewardModel(trainer.model.eval()), ids.tolist())
    merged = merge_adapters(trainer.model)
    assert not is_four_bit(merged)
    assert {value.dtype for value in merged.state_dict().values()} == {torch.float32}
    save_reward_checkpoint(tmp_path / "rm", merged, metadata(mode="lora", kappa=None))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05  # bfloat16 rounds every product of the 4-bit layers
    with torch.no_grad():
        loaded = raw_scores(load_reward_checkpoint(tmp_path / "rm").model, ids.tolist())
        torch.testing.assert_close(loaded, expected, rtol=tolerance, atol=tolerance)
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
        torch.testing.assert_close(plain(ids).logits[:, 0], expected, rtol=tolerance, atol=tolerance)
    # The adapter corrects the quantised weights, not the original ones: those give another score.
    original = build_reward_backbone(wide_causal_lm)
    assert not torch.allclose(original.model.layers[0].mlp.up_proj.weight, merged.model.layers[0].mlp.up_proj.weight)


def test_an_evaluation_does_not_cut_the_gradient(wide_causal_lm: Path) -> None:
    """On CPUs with AVX512-bf16 bitsandbytes would repack the weights in the first evaluation and lose it."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS", init_lora_weights=False
    )
    model = get_peft_model(build_reward_backbone(wide_causal_lm, dtype=torch.bfloat16, four_bit=True), config)
    set_score_weight(model, torch.linspace(-1, 1, 64))
    ids = torch.tensor([[5, 6, 7, 2]])

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.train()(ids).logits.sum().backward()
        return [value.grad.clone() for value in model.parameters() if value.grad is not None]

    before = gradients()
    with torch.no_grad():
        model.eval()(ids)
    after = gradients()
    assert len(before) == 5  # two adapters of two matrices, and the head
    assert all(float(value.abs().max()) > 0 for value in before)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_eight_bit_optimiser_trains_on_a_cpu(wide_causal_lm: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    rows = make_rows(8)
    model = build_reward_backbone(wide_causal_lm)
    set_score_weight(model, 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(4)))
    trainer = make_trainer(
        wide_causal_lm,
        tmp_path,
        model=model,
        train_dataset=rows,
        max_steps=6,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        optim="adamw_bnb_8bit",
    )
    trainer.train()
    losses = step_losses(trainer)
    assert losses[-1] < losses[0] - 0.005
    # Matrices of at least 4096 weights keep their moments in eight bits.
    moments = {state["state1"].dtype for state in trainer.optimizer.state.values() if "state1" in state}
    assert torch.uint8 in moments


def test_without_bitsandbytes_the_remedy_is_named(tiny_causal_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"4-bit loading needs bitsandbytes: install it with pip install"):
        build_reward_backbone(tiny_causal_lm, four_bit=True)
