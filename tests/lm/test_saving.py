"""Merging and saving against peft and plain transformers; what was written wrong is found when it is read again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from private_rlhf.core.errors import RunStopped
from private_rlhf.lm import saving
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.lm.saving import merged_copy, save_merged, whole_copy, write_checkpoint
from private_rlhf.recipe import LoraSettings
from safetensors.torch import load_file
from support.families import family_checkpoint
from support.pipeline_runs import tree
from transformers import AutoModelForCausalLM, AutoTokenizer

IDS = torch.tensor([[5, 9, 200, 31, 7]])


@torch.no_grad()
def adapted(path: Path, dtype: str = "float32", size: float = 0.1) -> Any:
    """A LoRA model whose adapter does something."""
    model = add_lora(load_causal_lm(path, dtype), LoraSettings(rank=4, scale=3.0), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, size, generator=generator)
    return model.eval()


@torch.no_grad()
def test_the_merged_copy_is_peft_s(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    before = model(IDS).logits
    state = merged_copy(model, model.state_dict(), torch.float32).state_dict()
    expected = copy.deepcopy(model).merge_and_unload()
    reloaded = type(expected)(expected.config).eval()
    reloaded.load_state_dict(state)
    torch.testing.assert_close(reloaded(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reloaded(IDS).logits, before, atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        assert (model(IDS).logits - before).abs().max() > 0.1
    torch.testing.assert_close(model(IDS).logits, before, atol=0, rtol=0)  # merging left the model alone


def test_a_plain_model_merges_to_itself(checkpoint: Path) -> None:
    model = load_causal_lm(checkpoint, "float32")
    state = model.state_dict()
    made = merged_copy(model, state, torch.float32).state_dict()
    assert made.keys() == state.keys()
    assert all(torch.equal(made[name], state[name]) for name in state)


def test_weights_that_are_not_the_model_s_are_refused(checkpoint: Path) -> None:
    model = adapted(checkpoint)
    state = model.state_dict()
    lost = next(name for name in state if "lora_A" in name)
    with pytest.raises(RunStopped, match=r"lack base_model.*lora_A.*: nothing was saved"):
        merged_copy(model, {name: tensor for name, tensor in state.items() if name != lost}, torch.float32)
    with pytest.raises(RunStopped, match="have extra too many: nothing was saved"):
        merged_copy(model, {**state, "extra": state[lost]}, torch.float32)
    with pytest.raises(RunStopped, match="cannot be merged"):
        merged_copy(model, {**state, lost: torch.full_like(state[lost], float("nan"))}, torch.float32)


@pytest.mark.parametrize("change", ["weights", "settings", "names"])
def test_a_checkpoint_that_computes_something_else_is_not_kept(
    change: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts did that were drawn at random on every load."""
    model, tokenizer, target = adapted(checkpoint), load_tokenizer(checkpoint), tmp_path / "model"
    save_merged(Accelerator(cpu=True), model, tokenizer, target, "float32")
    before = tree(target)

    def spoilt(*arguments: Any) -> Any:
        made = merged_copy(*arguments)
        if change == "weights":
            made.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)
        elif change == "settings":
            made.config.rms_norm_eps = 10.0
        else:
            made.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
        return made

    monkeypatch.setattr(saving, "merged_copy", spoilt)
    said = {
        "weights": r"does not hold the weights that were trained \(model.layers.0.mlp.up_proj",
        "settings": "does not compute what was trained",
        "names": "unexpected weights, such as model.layers.0.mlp",
    }
    with pytest.raises(RunStopped, match=said[change]) as caught:
        save_merged(Accelerator(cpu=True), model, tokenizer, target, "float32")
    assert "\n" not in str(caught.value)
    assert tree(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("Llama", "float32"),
        ("Llama", "bfloat16"),
        ("GPT-2", "bfloat16"),
        pytest.param("Mixtral", "float32", marks=pytest.mark.slow),
        pytest.param("Mixtral", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_one_small_adapter_left_out_is_found(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter in its turn. What the model computes does not show it."""
    source = family_checkpoint(family, tmp_path / "source", ["the quick brown fox"])
    model, tokenizer, target = adapted(source, dtype, 1e-4), load_tokenizer(source), tmp_path / "model"
    state = model.state_dict()

    def without(lost: str) -> Any:
        return merged_copy(model, {**state, lost: torch.zeros_like(state[lost])}, getattr(torch, dtype))

    names = [name for name in state if "lora_B" in name]
    whole = whole_copy(model, state)
    assert saving.wrong_weight(whole, merged_copy(model, state, getattr(torch, dtype))) is None
    found = [saving.wrong_weight(whole, without(name)) for name in names]
    assert None not in found
    assert len(set(found)) == len(names)

    monkeypatch.setattr(saving, "merged_copy", lambda *_: without(names[-1]))
    with pytest.raises(RunStopped, match="does not hold the weights that were trained"):
        save_merged(Accelerator(cpu=True), model, tokenizer, target, dtype)
    assert not target.exists()
    monkeypatch.setattr(saving, "wrong_weight", lambda whole, found: None)
    save_merged(Accelerator(cpu=True), model, tokenizer, target, dtype)  # as it was saved before


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_checkpoint_is_an_ordinary_one(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    """Merged in float32 and rounded once: a bf16 sum of base and update would differ."""
    model = adapted(checkpoint, dtype)
    tokenizer = load_tokenizer(checkpoint)
    write_checkpoint(model, model.state_dict(), tokenizer, tmp_path / "out", dtype)
    ours = load_causal_lm(tmp_path / "out", dtype)
    kernel = ours.config._attn_implementation  # kernels differ in the last bits; the checkpoint is what is tested
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=kernel).eval()
    assert plain.dtype == getattr(torch, dtype)
    torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, atol=0, rtol=0)
    if dtype == "float32":
        torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    name = "model.layers.0.mlp.up_proj"
    layer = model.base_model.model.get_submodule(name)
    update = 3.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    weight = load_file(tmp_path / "out" / "model.safetensors")[f"{name}.weight"]
    expected = (layer.base_layer.weight.float() + update).to(getattr(torch, dtype))
    torch.testing.assert_close(weight, expected, atol=1e-7, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert not list((tmp_path / "out").glob("*.bin"))
    assert not list((tmp_path / "out").glob("adapter*"))


def test_tied_weights_are_written_once_however_they_were_gathered(checkpoint: Path, tmp_path: Path) -> None:
    """Weights that were split over processes come back as one tensor for each of a weight's two names."""
    model = adapted(checkpoint)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, state in (("plain", model.state_dict()), ("gathered", gathered)):
        write_checkpoint(model, state, load_tokenizer(checkpoint), tmp_path / name, "float32")
    plain, written = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "gathered"))
    assert "lm_head.weight" not in plain
    assert plain.keys() == written.keys()


def test_saving_through_accelerate_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    model = adapted(checkpoint)
    save_merged(Accelerator(cpu=True), model, load_tokenizer(checkpoint), tmp_path / "one", "float32")
    write_checkpoint(model, model.state_dict(), load_tokenizer(checkpoint), tmp_path / "two", "float32")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_trained_under_bf16_autocast_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    """Its log-probabilities are rounded as those of bfloat16 weights are; its float32 weights are still exact."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = load_causal_lm(checkpoint, "float32")
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)
        plain = saving.probe_logprobs(model, model)
        wrapped = accelerator.prepare(model)
        assert saving.distance(saving.probe_logprobs(wrapped, model), plain) > saving.TOLERANCE[torch.float32]
        save_merged(accelerator, model, load_tokenizer(checkpoint), tmp_path / "out", "float32", wrapped=wrapped)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
