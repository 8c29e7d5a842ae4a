"""Checkpoints that cannot be trained: refused by the plan, in one line that names the key and the remedy."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.lm.model_folders import check_checkpoint, check_lm_folder
from private_rlhf.lm.models import load_causal_lm, load_policy, load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import parse
from private_rlhf.stages.checks import check_base_model
from private_rlhf.stages.context import StageContext
from safetensors.torch import load_file
from support.recipes import recipe_of

TEXTS = ["the quick brown fox jumps over the lazy dog " * 3]


def put(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path, Path], None]:
    def make(source: Path, target: Path) -> None:
        model = load_causal_lm(source, "float32").to(dtype)
        list(model.parameters())[-1].data.view(-1)[-1] = value
        model.save_pretrained(target)
        load_tokenizer(source).save_pretrained(target)

    return make


def more_tokens(*names: str, pad: bool = False) -> Callable[[Path, Path], None]:
    def make(source: Path, target: Path) -> None:
        tokenizer = load_tokenizer(source)
        tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
        if pad:
            tokenizer.pad_token = names[0]
        load_causal_lm(source, "float32").save_pretrained(target)
        tokenizer.save_pretrained(target)

    return make


def pickled(source: Path, target: Path) -> None:
    put(float("nan"))(source, target)
    weights = target / "model.safetensors"
    torch.save(load_file(weights), target / "pytorch_model.bin")
    weights.unlink()


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def make(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        weights = target / "model.safetensors"
        weights.write_bytes(change(weights.read_bytes()))

    return make


def without_weights(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))


def adapter(source: Path, target: Path) -> None:
    model = get_peft_model(load_causal_lm(source, "float32"), LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(target)


KINDS: dict[str, tuple[Callable[[Path, Path], None], str | None]] = {
    "NaN": (put(float("nan")), "holds NaN or infinity: give an undamaged checkpoint"),
    "infinity": (put(float("-inf")), "holds NaN or infinity"),
    "infinity, bfloat16": (put(float("inf"), torch.bfloat16), "holds NaN or infinity"),
    "NaN in a pickle": (pickled, "holds NaN or infinity"),
    "a file cut short": (rewritten(lambda data: data[:-100]), "cannot be read .*: copy or download it again"),
    "a pointer in place of a file": (rewritten(lambda _: b"version https://git-lfs"), "cannot be read"),
    "no weights": (without_weights, "must hold weights"),
    "large and finite": (put(3e38), None),
    "a token without an embedding": (more_tokens("<|tool|>"), r"<\|tool\|> at id \d+, and its model has \d+ ids"),
    "a pad token without one": (more_tokens("<PAD>", pad=True), r"<PAD> at id \d+"),
    "a mark of another modality": (more_tokens("<image_soft_token>"), None),
    "an adapter": (adapter, r"is an adapter, not a whole checkpoint: merge it"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_taken_or_refused_before_anything_runs(tmp_path: Path, kind: str) -> None:
    make, message = KINDS[kind]
    source, target = tiny_checkpoint(tmp_path / "base", TEXTS), tmp_path / "model"
    make(source, target)
    tree = {"name": "x", "evaluation_labels": "private", "data": {"preferences": "embedded"}}
    recipe = parse(Recipe, tree | {"model": {"source": str(target)}, "privatize": {"epsilon": 1.0}}, "r")
    if message is None:
        check_base_model(recipe)
        return
    with pytest.raises(UserError, match=message) as caught:
        check_base_model(recipe)
    assert str(caught.value).startswith("model.source")


def test_an_adapter_is_named_wherever_a_model_is_given(tmp_path: Path) -> None:
    adapter(tiny_checkpoint(tmp_path / "base", TEXTS), tmp_path / "model")
    for check in (check_checkpoint, check_lm_folder):
        with pytest.raises(UserError, match="is an adapter"):
            check(str(tmp_path / "model") if check is check_checkpoint else tmp_path / "model", "--policy")  # type: ignore[arg-type]

def test_the_folder_of_a_stage_names_the_checkpoint_in_it(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "ppo" / "model", TEXTS)
    with pytest.raises(UserError, match=r"folder with config.json, got '.*/ppo': give .*/ppo/model$"):
        check_checkpoint(str(tmp_path / "ppo"), "--policy")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `someone/model` in a cache of the hub, for files of one revision; nothing is downloaded."""
    repository, revision = tmp_path / "hub" / "models--someone--model", "c" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots" / revision


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_the_plan_reads_the_weights_of_a_hub_id_that_the_cache_holds(tmp_path: Path, hub: Path, value: float) -> None:
    put(value)(tiny_checkpoint(tmp_path / "base", TEXTS), hub)
    refused = pytest.raises(UserError, match=r"model\.source '.*models--someone--model.*' ?: .* holds NaN or infinity")
    with contextlib.nullcontext() if value == 3e38 else refused:
        check_base_model(recipe_of(model={"source": "someone/model"}))


def test_sft_reads_the_weights_that_it_downloads_before_it_trains(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan finds everything but the weights; they come when the stage loads the model."""
    from private_rlhf.stages import sft

    put(float("nan"))(tiny_checkpoint(tmp_path / "base", TEXTS), hub)
    weights = (hub / "model.safetensors").rename(tmp_path / "model.safetensors")

    def download(*arguments: Any, **more: Any) -> Any:
        weights.rename(hub / weights.name)
        return load_policy(*arguments, **more)

    monkeypatch.setattr(sft, "load_policy", download)
    monkeypatch.setattr(sft, "RowSftTrainer", lambda *_, **__: pytest.fail("it trains on damaged weights"))
    model = {"source": "someone/model", "dtype": "float32", "max_prompt_tokens": 400, "max_response_tokens": 100}
    given = recipe_of(model=model, data={"demonstrations": "embedded"}, sft={"batch_size": 8, "micro_batch_size": 8})
    check_base_model(given)
    with pytest.raises(UserError, match="holds NaN or infinity: give an undamaged checkpoint"):
        sft.run(StageContext(given, RunDir(tmp_path / "run"), World(0, 1), "sft"))
