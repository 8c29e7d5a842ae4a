"""Loading models and tokenizers, in 4 bits too; tokenizers that pad with their end-of-turn."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.models import add_lora, end_ids, load_causal_lm, load_tokenizer
from private_rlhf.lm.saving import merged_copy, write_checkpoint
from private_rlhf.recipe import LoraSettings, ModelConfig
from safetensors.torch import load_file, save_file
from support.pipeline_runs import Workspace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPTJConfig

IDS = torch.tensor([[5, 9, 200, 31, 7]])
FORMAT = {"format": "pt"}


@torch.no_grad()
def test_a_fresh_adapter_is_the_identity_in_float32_and_seeded(checkpoint: Path) -> None:
    state = torch.get_rng_state()
    base = load_causal_lm(checkpoint, "bfloat16")
    expected = base(IDS).logits
    first, second, third = (
        add_lora(load_causal_lm(checkpoint, "bfloat16"), LoraSettings(rank=4), seed=s) for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first(IDS).logits, expected)
    trainable = {name: p for name, p in first.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trainable.items())
    same, other = dict(second.named_parameters()), dict(third.named_parameters())
    assert all(torch.equal(p, same[name]) for name, p in trainable.items())
    assert any(not torch.equal(p, other[name]) for name, p in trainable.items())


# --- what cannot be loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "missing", "no config", "broken config"])
def test_a_checkpoint_that_is_not_whole_is_a_user_error(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no config":
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(UserError) as caught:
        load_causal_lm(folder, "float32")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_that_is_no_checkpoint_is_a_user_error(checkpoint: Path, tmp_path: Path) -> None:
    for source in (str(tmp_path / "none"), "tinyy", str(tmp_path)):
        with pytest.raises(UserError, match=r"model\.source"):
            base_checkpoint(ModelConfig(source=source))
    assert base_checkpoint(ModelConfig(source=str(checkpoint))) == str(checkpoint)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def retokenized(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_padding_is_never_the_end_of_turn(pad: str | None, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(retokenized(checkpoint, tmp_path / "t", pad_token=pad))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == len(load_tokenizer(checkpoint))  # an existing token, so that no embedding is missing


def test_a_fitting_pad_token_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    assert load_tokenizer(retokenized(checkpoint, tmp_path / "t", pad_token="<|im_start|>")).pad_token == "<|im_start|>"


def test_a_turn_ends_as_the_chat_template_ends_it(checkpoint: Path, tmp_path: Path) -> None:
    """The tokenizers of Gemma and Phi name another end of sequence than the one that their turns end with."""
    other = load_tokenizer(retokenized(checkpoint, tmp_path / "other", eos_token="<|endoftext|>"))
    assert other.eos_token == "<|im_end|>" != other.pad_token
    for number, (template, end) in enumerate(
        [
            ("{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}", "<|endoftext|>"),
            ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "<|im_end|>"),  # says nothing
            ("{{ raise_exception('one turn only') }}", "<|im_end|>"),
        ]
    ):
        changed = retokenized(checkpoint, tmp_path / str(number), chat_template=template)
        assert load_tokenizer(changed).eos_token == end


def test_a_base_model_gets_a_plain_template_and_keeps_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = load_tokenizer(retokenized(checkpoint, tmp_path / "base", chat_template=None))
    assert "has no chat template: a plain one is used and saved" in capsys.readouterr().err
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    said = "System:\ns\n\nUser:\nu\n\nAssistant:\na<|im_end|>\n\nUser:\nu\n\nAssistant:\n"
    assert base.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == said
    assert Renderer(base, 60, 8, "").prompt_ids("u") == Renderer(base, 60, 8).prompt_ids("u")
    base.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat_template == base.chat_template
    assert not capsys.readouterr().err
    base.bos_token = "<|im_start|>"
    base._tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", base.bos_token_id)])
    base.chat_template = None
    base.save_pretrained(tmp_path / "begins")
    assert Renderer(load_tokenizer(tmp_path / "begins"), 60, 8).prompt_ids("u")[0] == base.bos_token_id


def test_whatever_the_generation_config_lists_ends_a_response(checkpoint: Path) -> None:
    model, tokenizer = load_causal_lm(checkpoint, "float32"), load_tokenizer(checkpoint)
    own = tokenizer.eos_token_id
    for listed, ends in ((None, {own}), (7, {own, 7}), ([7, own, 9], {own, 7, 9})):
        model.generation_config.eos_token_id = listed
        assert end_ids(model, tokenizer) == end_ids(add_lora(model, LoraSettings(rank=2), 0), tokenizer) == ends


def test_tokenizers_that_cannot_serve_are_user_errors(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must have a chat template: save the one it was trained with"):
        load_tokenizer(retokenized(checkpoint, tmp_path / "plain", chat_template=None), plain_template=False)
    with pytest.raises(UserError, match="must have an end-of-sequence token"):
        load_tokenizer(retokenized(checkpoint, tmp_path / "endless", eos_token=None, chat_template="{{ messages }}"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="must hold a tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_a_checkpoint_without_all_weights_is_a_user_error(checkpoint: Path, tmp_path: Path) -> None:
    """transformers draws a missing one at random, and goes on."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in state.items() if key != name}, folder / "model.safetensors", FORMAT)
    with pytest.raises(UserError, match=rf"a whole causal-LM checkpoint, got 1 missing weights, such as {name}"):
        load_causal_lm(folder, "float32")
    save_file({**state, "model.extra": state[name].clone()}, folder / "model.safetensors", FORMAT)
    with pytest.raises(UserError, match=r"got 1 unexpected weights, such as model\.extra"):
        load_causal_lm(folder, "float32")
    save_file({**state, name: state[name][:1].clone()}, folder / "model.safetensors", FORMAT)
    with pytest.raises(UserError, match="a whole causal-LM checkpoint"):
        load_causal_lm(folder, "float32")


@pytest.mark.parametrize("config", [GPT2Config, GPTJConfig])
def test_causal_masks_of_old_checkpoints_are_not_weights(config: Any, tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "rotary_dim": 4}
    AutoModelForCausalLM.from_config(config(**shape)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    masks = {"masked_bias": torch.tensor(-1e4), "bias": torch.ones(1, 1, 8, 8).tril()}
    state |= {f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}
    save_file(state, tmp_path / "model.safetensors", FORMAT)
    load_causal_lm(tmp_path, "float32")


@pytest.mark.parametrize("cause", ["", "\n", "two\nlines"])
def test_whatever_a_loader_says_is_one_line(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(cause)

    monkeypatch.setattr("private_rlhf.lm.models.load_whole", fails)
    with pytest.raises(UserError, match=f"got {' '.join(cause.split())}: check or make it again"):
        load_causal_lm("x", "float32")


def test_an_adapter_on_modules_that_are_not_there_is_a_user_error(checkpoint: Path) -> None:
    settings = LoraSettings(rank=2, target_modules=["query"])
    with pytest.raises(UserError, match=r"lora\.target_modules must be modules of the model, got \['query'\]"):
        add_lora(load_causal_lm(checkpoint, "float32"), settings, seed=0)
    partly = LoraSettings(rank=2, target_modules=["q_proj", "qkv_proj"])
    with pytest.raises(UserError, match=r"lora\.target_modules must be .*'qkv_proj'"):
        add_lora(load_causal_lm(checkpoint, "float32"), partly, seed=0)


# --- 4 bits -----------------------------------------------------------------------------------------------------------


def four_bit_adapted(path: Path, dtype: str) -> Any:
    """As `adapted`, on a 4-bit base."""
    model = add_lora(load_causal_lm(path, dtype, four_bit=True), LoraSettings(rank=4, scale=3.0), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model.eval()


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(IDS).logits.float(), dim=-1)


# In float32 only the order of sums differs; in bfloat16 the merged weights, and every product, are rounded.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_what_is_written_of_a_four_bit_policy_is_what_was_trained(
    dtype: str, tolerance: float, checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    model, tokenizer = four_bit_adapted(checkpoint, dtype), load_tokenizer(checkpoint)
    trained = logprobs(model)
    write_checkpoint(model, model.state_dict(), tokenizer, tmp_path / "model", dtype)
    torch.testing.assert_close(logprobs(load_causal_lm(tmp_path / "model", dtype)), trained, atol=tolerance, rtol=0)
    with model.disable_adapter():
        base = logprobs(model)
        write_checkpoint(model, model.state_dict(), tokenizer, tmp_path / "reference", dtype)
    torch.testing.assert_close(logprobs(load_causal_lm(tmp_path / "reference", dtype)), base, atol=tolerance, rtol=0)
    assert torch.equal(logprobs(model), trained)  # saving left the model alone
    assert (trained - base).abs().max() > 1

    # Merged into the weights before quantisation the adapter would be another policy.
    state = merged_copy(model, model.state_dict(), torch.float32).state_dict()
    original = load_file(checkpoint / "model.safetensors")
    written = load_file(tmp_path / "reference" / "model.safetensors")
    assert written.keys() == original.keys()
    assert {*state} - {"lm_head.weight"} == {*original}  # tied
    assert (logprobs(load_causal_lm(checkpoint, dtype)) - base).abs().max() > 2 * tolerance
    for name in ("config.json", "generation_config.json"):
        assert "quant" not in (tmp_path / "model" / name).read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_written_reference_quantises_to_itself(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    """So a 4-bit load of it is the π_ref of training, to the last bit."""
    pytest.importorskip("bitsandbytes")
    model = load_causal_lm(checkpoint, dtype, four_bit=True)
    write_checkpoint(model, model.state_dict(), load_tokenizer(checkpoint), tmp_path / "reference", dtype)
    assert torch.equal(logprobs(load_causal_lm(tmp_path / "reference", dtype, four_bit=True)), logprobs(model))


def test_four_bits_without_bitsandbytes_name_the_remedy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="4-bit loading needs bitsandbytes: install it with pip install"):
        load_causal_lm(checkpoint, "float32", four_bit=True)


@pytest.mark.thorough
def test_bitsandbytes_advertises_nothing(workspace: Workspace) -> None:
    """peft imports it wherever it is installed."""
    pytest.importorskip("bitsandbytes")
    done = workspace.finish([sys.executable, "-c", "import pipeline, bitsandbytes"])
    assert (done.returncode, done.stderr) == (0, "")
