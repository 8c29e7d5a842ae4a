"""Every stage under every way of sharing work over processes: let in or refused in one line, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.lm.hf_trainer import LAUNCHED
from private_rlhf.recipe import ALIGNERS, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.declarations import preflight, stage_of
from private_rlhf.stages.launch_strategies import STRATEGIES, TESTED, check_strategy, strategy
from support.recipes import recipe_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "whole weights": {"ACCELERATE_USE_FSDP": "false"},
    "FSDP2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "FSDP1": {"ACCELERATE_USE_FSDP": "true"},
    "ZeRO-2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "ZeRO-3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "Megatron-LM": {"ACCELERATE_USE_MEGATRON_LM": "true"},
    "a parallelism_config": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
}


def of_row(row: str) -> tuple[str, Recipe]:
    """A stage and a recipe that are this row of the table."""
    stage, _, mode = row.partition(".mode ")
    reward = {} if mode in ("", "head") else {"mode": mode, "ridge": 1.0}
    return stage, recipe_of(reward=reward, aligner=stage if stage in ALIGNERS else "ppo")


@pytest.mark.parametrize("asked", ENVIRONMENTS)
@pytest.mark.parametrize("row", TESTED)
def test_a_stage_is_welcome_where_it_ran_and_refused_in_one_line_elsewhere(
    row: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strategy(ENVIRONMENTS[asked]) == asked
    for name, value in ENVIRONMENTS[asked].items():
        monkeypatch.setenv(name, value)
    stage, made = of_row(row)
    if asked in STRATEGIES:
        preflight(made, [stage], World(0, 2))
        return
    with pytest.raises(UserError, match=f"^{row} cannot run under {asked}, ") as caught:
        preflight(made, [stage], World(0, 2))
    assert "\n" not in str(caught.value)
    assert "ddp.yaml" in str(caught.value) or "fsdp_version: 2" in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "stage", "named"),
    [
        ({"ppo": {"optimizer": "adafactor"}}, "ppo", "ppo.optimizer adafactor"),
        ({"ppo": {"quantize": "4bit"}}, "ppo", "ppo.quantize 4bit"),
        ({"sft": {"trainer_args": {"optim": "adafactor"}}}, "sft", "sft.trainer_args.optim adafactor"),
    ],
)
def test_keys_that_do_not_go_with_split_weights(sections: dict[str, Any], stage: str, named: str) -> None:
    with pytest.raises(UserError, match=f"^{named} cannot run under FSDP2: take launch/ddp.yaml$"):
        check_strategy(recipe_of(**sections), [stage], ENVIRONMENTS["FSDP2"])
    check_strategy(recipe_of(**sections), [stage], {})


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "evaluate"])
def test_autocast_is_bf16_or_none(stage: str) -> None:
    for precision in ("fp16", "fp8"):
        with pytest.raises(UserError, match=f"^{stage}.* cannot run under mixed_precision {precision}, .*bf16 or no"):
            check_strategy(recipe_of(), [stage], {"ACCELERATE_MIXED_PRECISION": precision})
    for precision in ("no", "bf16", ""):
        check_strategy(recipe_of(), [stage], {"ACCELERATE_MIXED_PRECISION": precision})
    check_strategy(recipe_of(), ["privatize", "report"], {"ACCELERATE_MIXED_PRECISION": "fp16"})  # they train nothing


@pytest.mark.parametrize("section", ["sft", "reward", "dpo", "rloo", "grpo"])
@pytest.mark.parametrize("key", sorted(LAUNCHED))
def test_no_strategy_comes_in_through_trainer_args(section: str, key: str) -> None:
    """transformers would take a DeepSpeed file there, whatever the table says."""
    aligner = section if section in ALIGNERS else "ppo"
    own = {"trainer_args": {key: "x"}} | ({"mode": "lora"} if section == "reward" else {})
    with pytest.raises(UserError, match=rf"^{section}\.trainer_args\.{key} is the launcher's: .*launch/fsdp2\.yaml"):
        preflight(recipe_of(aligner=aligner, **{section: own}), [section], World(0, 1))


def test_every_launch_file_is_one_that_a_stage_may_use() -> None:
    """Its sections become the variables that `strategy` reads."""
    for path in (ROOT / "launch").glob("*.yaml"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        kind = content["distributed_type"]
        assert kind in ("NO", "MULTI_GPU", "FSDP"), path.name
        assert kind != "FSDP" or content["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_a_natural_number_of_processes_suits_every_recipe(name: str, processes: int) -> None:
    """The Llama recipe's minibatches of 4 were refused on 8 GPUs."""
    made = load_recipe(Recipe, ROOT / "configs" / f"{name}.yaml")
    for stage in ("sft", "reward", "ppo", "dpo"):
        stage_of(stage).check_batches(made, World(0, processes))


def test_more_processes_than_responses_are_refused_with_the_rule() -> None:
    with pytest.raises(UserError, match=r"^ppo\.rollouts must be at least 17, one for each process, got 16"):
        stage_of("ppo").check_batches(recipe_of(), World(0, 17))
