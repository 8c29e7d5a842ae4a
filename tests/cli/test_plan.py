"""`private-rlhf plan`: the formula by hand on a tiny model, the table, JSON, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.commands.memory import (
    GIB,
    Adapter,
    Learner,
    Machine,
    Shape,
    activation,
    adapter_of,
    estimate,
    shape_of,
)
from private_rlhf.lm.base_models import skeleton
from private_rlhf.recipe import LoraSettings, Recipe
from private_rlhf.recipe.load import load_recipe
from support.pipeline_runs import ROOT, TINY, Workspace, read_json
from transformers import AutoConfig

Capture = pytest.CaptureFixture[str]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA = {
    "1b": {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "8b": {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip
with (ROOT / "docs" / "results" / "data" / "gpu-throughput.csv").open(encoding="utf-8") as lines:
    MEASURED = list(csv.DictReader(lines))
LAYER = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8  # q and o, k and v, the MLP, two norms
CPU, GPU = Machine("cpu", 8 * GIB, 1), Machine("cuda", 8 * GIB, 1)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def shape(config: Path) -> Shape:
    return shape_of(skeleton(AutoConfig.from_pretrained(config), "the model"))


def peaks(config: Path, machine: Machine, *overrides: str) -> dict[str, dict[str, float]]:
    recipe = load_recipe(Recipe, TINY, ["model.dtype=float32", "model.max_text_tokens=200", *overrides])
    return estimate(recipe, machine, config).peaks


def needed(config: Path, stage: str, *overrides: str) -> float:
    return sum(peaks(config, GPU, *overrides)[stage].values())


def test_parameters_are_counted_without_weights(config: Path, shape: Shape) -> None:
    assert shape.linear == 3 * LAYER
    assert shape.parameters == 100 * 8 + 3 * LAYER + 8
    assert (shape.layers, shape.groups, shape.head_size) == (3, 2, 2)
    assert shape.cut(1).parameters == 100 * 8 + LAYER
    settings = LoraSettings(rank=2, last_layers=1, target_modules=["q_proj"])
    adapter = adapter_of(AutoConfig.from_pretrained(config), settings)
    assert adapter == Adapter(2 * (8 + 8), 64, 1)
    assert adapter_of(AutoConfig.from_pretrained(config), None) is None


def test_a_step_of_training(shape: Shape) -> None:
    """A layer keeps of a token: two norms in float32; their outputs, q, o's input, k and v, inner states, attention."""
    one = 2 * 8 * 4 + 4 * (2 * 8 + 2 * (4 + 2) * 2 + 4 * 16 + 4 * 10)
    assert activation(shape, 4, 10, on_cpu=True) == one
    assert activation(shape, 4, 10, on_cpu=False) == one - 4 * 40 + 4 * 2 * 2 * 2  # keys and values for each query
    learner = Learner(shape, None, 2, 8)
    begins, ends, saves = learner.moments(1, texts=2, length=10, responses=5)
    assert begins["weights"] == ends["gradients"] == shape.parameters * 4
    assert begins["optimizer"] == shape.parameters * 8
    assert begins["activations"] == 20 * 3 * one
    assert begins["logits"] == 2 * 2 * 5 * 100 * 4 + 4 * 2 * 5 * 100 * 4  # and those worked on, all of so few
    assert begins["gradients"] == 0
    assert saves["merged weights"] == shape.parameters * 2
    split = replace(learner, summed=True).moments(4, 2, 10, 5)[0]
    assert (split["weights"], split["gradients"]) == (shape.parameters, shape.parameters)


def test_merging_takes_float32_layers_on_a_cpu_and_nothing_of_a_gpu_where_weights_are_split(shape: Shape) -> None:
    learner = Learner(shape, Adapter(trained=32, adapted=64, layers=2), 2, 8)
    on_gpu = replace(learner, on_cpu=False)
    cases = (learner, 1), (on_gpu, 1), (on_gpu, 2)
    assert [each.moments(split, 1, 1, 1)[2]["merged weights"] for each, split in cases] == [64 * 6, 64 * 2, 0]


@pytest.mark.parametrize("row", [row for row in MEASURED if row["loop"] == "ours LoRA"], ids=lambda row: row["model"])
def test_the_estimate_is_near_what_a_gpu_measured(config: Path, row: dict[str, str]) -> None:
    """PPO on an H200 (docs/results/gpu.md): the estimate is at most 7 % too high, and not too low."""
    config.write_text(json.dumps(CONFIG | LLAMA[row["model"]]))
    sizes = {"rollouts": "responses", "generate_batch_size": "responses", "minibatch_size": "minibatch"}
    overrides = [f"ppo.{key}={row[column]}" for key, column in sizes.items()]
    overrides += [f"model.max_{part}_tokens={row[f'{part}_tokens']}" for part in ("prompt", "response")]
    overrides += ["model.dtype=bfloat16", "model.max_text_tokens=400", "reward.num_layers=null", "ppo.lora={}"]
    estimated = sum(peaks(config, GPU, *overrides)["ppo"].values()) / GIB
    assert 1 <= estimated / float(row["peak_gib"]) <= 1.07


def test_layers_that_are_computed_again_keep_what_enters_them(shape: Shape) -> None:
    learner = Learner(shape, Adapter(trained=32, adapted=64, layers=2), 2, 8, recomputes=True)
    assert learner.moments(1, 2, 10, 5)[0]["activations"] == 20 * (2 * 8 * 2 + activation(shape, 2, 10, True))


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_checkpointing_is_asked_for_by_each_stage_s_own_key(config: Path, stage: str) -> None:
    key = {"sft": "sft.trainer_args.gradient_checkpointing", "ppo": "ppo.gradient_checkpointing"}[stage]
    few = "ppo.generate_batch_size=1"  # so that learning is PPO's peak
    on, off, default = (needed(config, stage, few, *given) for given in ([f"{key}=true"], [f"{key}=false"], []))
    assert on < off == default


@pytest.mark.parametrize("aligner", ["ppo", "rloo", "grpo", "gvpo", "dpo"])
def test_stages_and_micro_batches_of_every_aligner(config: Path, aligner: str) -> None:
    overrides = [f"aligner={aligner}", f"{aligner}.batch_size=8"]
    if aligner == "ppo":
        overrides[1] = "ppo.minibatch_size=8"
    assert list(peaks(config, GPU, *overrides)) == ["sft", "reward", aligner, "evaluate"]
    assert needed(config, aligner, *overrides, f"{aligner}.micro_batch_size=2") < needed(config, aligner, *overrides)


def test_a_rollout_on_split_weights_holds_whole_ones_beside_them(config: Path, shape: Shape) -> None:
    """gather_once: the whole model beside a process's quarter. A cache of 32 MiB makes decoding the peak."""
    machine, overrides = Machine("cuda", 8 * GIB, 4, sharded=True), ["ppo.lora=null", "ppo.generate_batch_size=100000"]
    ppo = peaks(config, machine, *overrides)["ppo"]
    assert ppo["weights"] == ppo["reference"] == shape.parameters
    assert ppo["gathered weights"] == 4 * shape.parameters
    assert ppo["KV cache"] == 25_000 * (96 + 12) * 2 * 2 * 2 * 4 * 3
    assert "gathered weights" not in peaks(config, machine, *overrides, "ppo.gather_once=false")["ppo"]
    rloo = peaks(config, machine, "aligner=rloo", "rloo.lora=null", "rloo.generate_batch_size=100000")["rloo"]
    assert rloo["gathered weights"] == rloo["reference"] == 4 * rloo["weights"]  # TRL splits π_ref as one piece
    assert rloo["reward model"] == ppo["reward model"]


def test_an_evaluation_on_split_weights_holds_a_share_of_both_models(config: Path, shape: Shape) -> None:
    machine, once = Machine("cuda", 8 * GIB, 4, sharded=True), "evaluate.batch_size=100000"
    evaluate = peaks(config, machine, once)["evaluate"]
    assert evaluate["weights"] == 2 * peaks(config, replace(machine, sharded=False), once)["evaluate"]["weights"] / 8
    assert evaluate["weights"] == evaluate["gathered weights"] / 2  # a quarter of both, and one whole
    assert "gathered weights" not in peaks(config, machine, once, "ppo.gather_once=false")["evaluate"]


def planned(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", "--config", str(TINY), *arguments])
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if line.startswith("private-rlhf: ")]
    return code, captured.out, "\n".join(said)


def test_the_table_and_json(workspace: Workspace, tmp_path: Path, capsys: Capture) -> None:
    """`--no-calibration` of earlier versions is still taken."""
    output = tmp_path / "plan.json"
    cache = f"model.cache_dir={workspace.root / 'cache'}"
    code, out, _ = planned(capsys, "--no-calibration", "--run-dir", str(tmp_path / "run"), "--json", str(output), cache)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["sft", "reward", "ppo", "evaluate"]
    assert "leave a margin" in out
    for stage in read_json(output)["stages"].values():
        assert stage["bytes"] == pytest.approx(sum(stage["terms"].values()), abs=len(stage["terms"]))
        assert stage["terms"]["process"] > 100 * 2**20
    assert not (tmp_path / "run").exists()  # a plan writes nothing but its own output


def test_gpus_are_planned_without_one(config: Path, capsys: Capture) -> None:
    code, out, _ = planned(capsys, "--gpus", "2", "--gpu-memory", "16", "--model-config", str(config))
    assert code == 0
    assert "16.0 GiB for each of 2 process(es) on cuda" in out


def test_preferences_are_named_as_in_a_run(config: Path, capsys: Capture) -> None:
    plan = ["plan", "--config", "own_data", "--gpus", "1", "--gpu-memory", "16", "--model-config", str(config)]
    assert main(plan) == 2
    assert "give --data PATH" in capsys.readouterr().err
    assert main([*plan, "--data", "mine.jsonl"]) == 0


@pytest.mark.parametrize(
    ("changed", "overrides", "remedy"),
    [
        ({"vocab_size": 200_000}, ["ppo.minibatch_size=64", "ppo.rollouts=64"],
         "of it logits"),
        ({"vocab_size": 20_000, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16},
         ["ppo.lora=null"], "train an adapter (ppo.lora)"),
        ({"vocab_size": 20_000, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 16}, [],
         "--sharded"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_a_remedy(
    config: Path, capsys: Capture, changed: dict[str, int], overrides: list[str], remedy: str
) -> None:
    config.write_text(json.dumps(CONFIG | changed))
    options = ["--gpus", "1", "--gpu-memory", "1.8", "--model-config", str(config)]
    code, out, err = planned(capsys, *options, *overrides)
    if "logits" in remedy:  # shorter texts would fit: a warning
        assert (code, err) == (0, "")
        line = out.splitlines()[-1]
    else:
        assert (code, out) == (2, "")
        line = err
    assert "GiB per process and has 1.8" in line
    assert remedy in line
