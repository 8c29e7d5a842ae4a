"""What the TRL stages share: refused arguments, batches that divide, checkpoints that are whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.data.render import Renderer
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.hf_trainer import check_trainer_args, global_batch, last_whole_step
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.recipe import LoraSettings, RolloutConfig
from private_rlhf.recipe import SftConfig as SftSection
from private_rlhf.rl.group import trl_arguments
from safetensors.torch import load_file
from support.recipes import recipe_of
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig


def test_an_unknown_trainer_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"sft\.trainer_args: trl\.SFTConfig has no 'weight_decey'; did you mean"):
        check_trainer_args("sft", {"weight_decey": 0.1}, SFTConfig)
    check_trainer_args("sft", {"weight_decay": 0.1, "gradient_checkpointing": True}, SFTConfig)


CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "grpo": GRPOConfig, "rloo": RLOOConfig}


@pytest.mark.parametrize("section", CONFIGS)
def test_what_a_stage_owns_is_refused_with_the_key_that_does_it(section: str) -> None:
    """Every argument that the stage sets beside the recipe's, and all of evaluation while training."""
    schema, recipe = CONFIGS[section], recipe_of()
    names = {item.name for item in dataclasses.fields(schema)}
    settings = getattr(recipe, section)
    fixed = trl_arguments(section, settings, recipe.ppo, 8) if section in ("grpo", "rloo") else {}
    owned = names & (hf_trainer.OWNED.keys() | fixed.keys())
    assert "max_length" in owned or fixed
    assert {"logging_steps", "logging_strategy", "logging_first_step"} <= owned  # histories have a line a step
    assert "save_only_model" in owned  # a resumed run needs its optimiser
    unread = {"top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs"}
    assert not unread & names - owned  # responses are drawn by the pipeline
    for key in owned:
        message = rf"^{section}\.trainer_args\.{key} is set by the stage itself: (use|remove)"
        with pytest.raises(UserError, match=message) as caught:
            check_trainer_args(section, {key: 1}, schema, fixed)
        told = str(caught.value).partition("use ")[2].partition(" (")[0]
        for part, name in re.findall(r"([a-z]+)\.([a-z_]+)", told):
            keys = dataclasses.fields(getattr(recipe, part) or RolloutConfig)
            assert name in {item.name for item in keys}, f"{key}: {told}"
    for key in sorted(name for name in names if name.startswith("eval_") or name in hf_trainer.JUDGED):
        with pytest.raises(UserError, match="it evaluates meanwhile: use"):
            check_trainer_args(section, {key: 1}, schema, fixed)


@pytest.mark.parametrize(
    "given_one",
    [
        {"push_to_hub": True}, {"push_to_hub_model_id": "a/b"}, {"hub_model_id": "a/b"}, {"hub_token": "t"},
        {"hub_strategy": "all_checkpoints"}, {"hub_always_push": True}, {"trackio_space_id": "a/b"},
        {"trackio_bucket_id": "a/b"}, {"log_completions_hub_repo": "a/b"},
    ],
)
def test_nothing_is_published_by_itself(given_one: dict[str, Any]) -> None:
    """Weights, texts and metrics of a run leave its folder by its holder's hand alone."""
    (key,) = given_one
    for section, schema in (("sft", SFTConfig), ("reward", RewardConfig), ("dpo", DPOConfig), ("grpo", GRPOConfig)):
        with pytest.raises(UserError, match=rf"{section}\.trainer_args\.{key} would publish what the run holds"):
            check_trainer_args(section, given_one, schema)
        for trackers in ("wandb", ["tensorboard"]):
            with pytest.raises(UserError, match=r"report_to is set by the stage itself: use ppo\.report_to"):
                check_trainer_args(section, {"report_to": trackers}, schema)


@given(size=st.integers(1, 8), micro=st.none() | st.integers(1, 40), steps=st.integers(1, 8), rest=st.integers(0, 3))
def test_a_global_batch_divides_exactly_or_is_refused(size: int, micro: int | None, steps: int, rest: int) -> None:
    batch = size * steps * (micro or 3) + rest
    share, per_device = batch // size, min(micro or batch // size, batch // size)
    if batch % size or not share or share % per_device:
        with pytest.raises(UserError, match=rf"sft\.batch_size {batch} must be a multiple of {size} process\(es\)"):
            global_batch("sft", batch, micro, World(0, size))
    else:
        assert global_batch("sft", batch, micro, World(0, size)) == (per_device, batch // (per_device * size))


def test_trl_s_defaults_for_dtype_and_memory_are_undone_and_the_passthrough_wins(tmp_path: Path) -> None:
    settings = SftSection(batch_size=8, micro_batch_size=4, trainer_args={"bf16": True, "weight_decay": 0.5})
    arguments = hf_trainer.trainer_arguments("sft", settings, tmp_path, 7, World(0, 1))
    assert (arguments["bf16"], arguments["weight_decay"]) == (True, 0.5)
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (4, 2)
    assert (arguments["seed"], arguments["data_seed"], arguments["report_to"]) == (7, 7, "none")
    plain = hf_trainer.trainer_arguments("sft", SftSection(), tmp_path, 7, World(0, 1))
    assert (plain["bf16"], plain[hf_trainer.CHECKPOINTING]) == (False, False)


def test_the_newest_marked_checkpoint_counts_and_unmarked_ones_go(tmp_path: Path) -> None:
    assert last_whole_step(tmp_path / "absent") == 0
    for step in (9, 10, 11):  # 9 > 10 as text
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").touch()
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / hf_trainer.COMPLETE).touch()
    (tmp_path / "fingerprint.json").touch()
    assert last_whole_step(tmp_path) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9", "fingerprint.json"]


@pytest.mark.parametrize(("main", "marked"), [(True, True), (False, False)])
def test_the_marker_is_written_by_the_main_process_when_the_save_is_done(
    main: bool, marked: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    arguments: Any = SimpleNamespace(output_dir=str(tmp_path))
    state: Any = SimpleNamespace(is_world_process_zero=main, global_step=4)
    control: Any = None
    hf_trainer.CompletionMarker().on_save(arguments, state, control)
    assert (folder / hf_trainer.COMPLETE).exists() == marked


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("step", "remedy"), [(1, "check model.source"), (3, "lower the learning rate")])
def test_training_stops_at_a_loss_that_is_not_finite(name: str, bad: float, step: int, remedy: str) -> None:
    callback = hf_trainer.StopOnNonFinite()
    anything: Any = SimpleNamespace(global_step=step)
    callback.on_log(anything, anything, anything, logs={"loss": 1.0, "grad_norm": 2.0, "epoch": float("inf")})
    callback.on_log(anything, anything, anything)
    with pytest.raises(FloatingPointError, match=f"{name} is .* at step {step}: {remedy}"):
        callback.on_log(anything, anything, anything, logs={name: bad})


def test_saving_gathers_the_wrapped_weights_and_merges_the_adapter(checkpoint: Path, tmp_path: Path) -> None:
    """What is saved is the wrapped model's state, not the state of the model that the trainer was given."""
    model, wrapped = (
        add_lora(load_causal_lm(checkpoint, "float32"), LoraSettings(rank=4), seed=seed) for seed in (0, 1)
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    trainer: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, model_wrapped=wrapped)
    renderer = Renderer(load_tokenizer(checkpoint), 64, 8)
    hf_trainer.save_trained(trainer, renderer, tmp_path / "model", "bfloat16")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    merged = wrapped.merge_and_unload().state_dict()
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for name, tensor in saved.items():
        assert torch.equal(tensor, merged[name].to(torch.bfloat16)), name
    assert (tmp_path / "model" / "tokenizer.json").is_file()
