"""`private-rlhf plan`: the formula by hand on a tiny model, the table, JSON, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import TINY, Workspace, read_json
from private_rlhf.cli import main
from private_rlhf.core.rundir import RunDir
from private_rlhf.planning.calibration import Rates, hours
from private_rlhf.planning.memory import (
    GIB,
    Learner,
    Machine,
    Planner,
    activation,
    decoding,
    kernels,
    peak,
    trains_with,
)
from private_rlhf.planning.model import Adapter, ModelShape, adapter_of, shape_of, skeleton
from private_rlhf.planning.plan import StagePlan, gpus, make_plan
from private_rlhf.planning.tokens import Lengths, Work, passes_of, texts_of, work_of
from private_rlhf.recipe import LoraSettings, Recipe
from private_rlhf.recipe.load import load_recipe

Capture = pytest.CaptureFixture[str]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
LAYER = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8  # q and o, k and v, the MLP, two norms
CPU = Machine("cpu", 8 * GIB, 1, 100.0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def shape(config: Path) -> ModelShape:
    return shape_of(skeleton(config))


def recipe(*overrides: str) -> Recipe:
    return load_recipe(Recipe, TINY, ["model.dtype=float32", *overrides])


@pytest.mark.usefixtures("kernels")  # whether rows are shared is asked
def test_parameters_are_counted_without_weights(config: Path, shape: ModelShape) -> None:
    assert shape.linear == 3 * LAYER
    assert shape.parameters == 100 * 8 + 3 * LAYER + 8
    assert (shape.layers, shape.groups, shape.head_size, shape.shares_rows) == (3, 2, 2, True)
    assert shape.cut(1) == 100 * 8 + LAYER
    adapter = adapter_of(config, LoraSettings(rank=2, last_layers=1, target_modules=["q_proj"]))
    assert adapter is not None
    assert (adapter.trained, adapter.adapted, adapter.layers) == (2 * (8 + 8), 64, 1)
    assert adapter_of(config, None) is None


def test_what_a_layer_keeps_of_a_token(shape: ModelShape) -> None:
    """Two norms; their outputs, q, o's input, k and v, four inner states; the attention weights of 10 columns."""
    linear = 2 * 8 + 2 * (4 + 2) * 2 + 4 * 16
    assert activation(shape, 4, 10, CPU, full=False) == 2 * 8 * 4 + 4 * linear + 4 * 10 * 4
    assert activation(shape, 2, 10, CPU, full=False) == 2 * 8 * 4 + 2 * linear + 4 * 10 * (4 + 2)
    assert activation(shape, 4, 10, CPU, full=True) == 2 * 2 * 8 * 4 + 4 * linear + 4 * 10 * 4
    assert activation(shape, 2, 10, gpus(1, 8, False), full=False) == 2 * 8 * 4 + 2 * linear


def test_a_step_of_training(shape: ModelShape) -> None:
    learner = Learner(shape, None, 2, 8, summed=False)
    begins, ends = learner.steps(CPU, tokens=20, width=10, responses=5)
    head = 100 * 8 * 4
    assert begins["weights"] == shape.parameters * 4
    assert begins["optimizer"] == shape.parameters * 8
    assert begins["activations"] == 20 * (3 + 1) * activation(shape, 4, 10, CPU, full=True)
    assert begins["logits"] == 2 * 5 * 100 * 4 + 3 * 2**18 * 4
    assert begins["gradients"] == head
    assert ends["gradients"] == shape.parameters * 4 + head
    assert peak([begins, ends]) == begins
    split = replace(learner, summed=True).held(replace(gpus(4, 8, True)))
    assert split == {"weights": shape.parameters, "optimizer": shape.parameters * 2}


def test_layers_that_are_computed_again_keep_what_enters_them(shape: ModelShape) -> None:
    """Of all three layers the 8 numbers that enter; of one what it computes again, with gradients of half of it."""
    learner, width = Learner(shape, None, 2, 8, summed=False, recomputes=True), 10
    begins, _ = learner.steps(CPU, 20, width, responses=5)
    assert begins["activations"] == 20 * (3 * 8 * 4 + 1.5 * activation(shape, 4, width, CPU, full=True))
    adapted = replace(learner, adapter=Adapter(trained=32, adapted=64, layers=1))
    begins, _ = adapted.steps(CPU, 20, width, responses=5)
    assert begins["activations"] == 20 * (1 * 8 * 2 + 1.5 * activation(shape, 2, width, CPU, full=False))


def planner(config: Path, machine: Machine, *overrides: str) -> Planner:
    chosen, shape = recipe("model.max_text_tokens=200", *overrides), shape_of(skeleton(config))
    texts = texts_of(chosen, RunDir(config.parent / "run"), None)
    adapters = {stage: adapter_of(config, lora) for stage, lora in trains_with(chosen).items()}
    return Planner(chosen, shape, adapters, texts, machine, passes_of(chosen, texts, machine.processes))


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_checkpointing_is_asked_for_by_each_stage_s_own_key(config: Path, stage: str) -> None:
    key = {"sft": "sft.trainer_args.gradient_checkpointing", "ppo": "ppo.gradient_checkpointing"}[stage]

    def activations(*overrides: str) -> float:
        return max(moment.get("activations", 0) for moment in planner(config, CPU, *overrides).stage(stage))

    assert activations(f"{key}=true") < 0.8 * activations(f"{key}=false")
    assert activations(f"{key}=false") == activations()


@pytest.mark.parametrize("lora", ["null", "{rank: 2, target_modules: [q_proj]}"])
def test_a_rollout_on_split_weights_holds_whole_ones_beside_them(config: Path, shape: ModelShape, lora: str) -> None:
    """gather_once: all of them to sample and to read, beside a process's quarter; not to learn."""
    machine, trained = gpus(4, 8, True), 3 * 2 * (8 + 8)
    whole = 4 * (shape.parameters + (0 if lora == "null" else trained))
    sampling, reading, *learning = planner(config, machine, f"ppo.lora={lora}").stage("ppo")
    assert sampling["weights"] == reading["weights"] == whole / 4
    assert sampling["gathered weights"] == reading["gathered weights"] == whole
    assert not any("gathered weights" in moment for moment in learning)
    assert sampling.get("reference", 0) == (shape.parameters if lora == "null" else 0)  # the frozen copy is split too
    for other in (
        planner(config, machine, f"ppo.lora={lora}", "ppo.gather_once=false"),
        planner(config, gpus(4, 8, False), f"ppo.lora={lora}"),
    ):
        assert not any("gathered weights" in moment for moment in other.stage("ppo"))


def test_decoding_and_kernels(shape: ModelShape) -> None:
    terms = decoding(shape, 2, replace(CPU, packs=True), batch=6, prompt=7, cap=5)
    assert terms["KV cache"] == 2 * 2 * 2 * 2 * 6 * (7 + 5) * (3 + 1)
    assert terms["packed weights"] == (3 * LAYER + 800) * 2
    assert kernels(CPU, 2, 1, 2) == 0.65 * 2**20 * (2 * 7 + 30)
    assert kernels(CPU, 1e9, 0, 2) == 0.65 * 2**20 * 1024
    assert kernels(gpus(1, 8, False), 2, 1, 2) == 0


def test_a_large_batch_of_texts() -> None:
    lengths = Lengths.of([10, 14])
    assert lengths.batch(4) == 4 * 12 + 2 * 2 * 2
    assert lengths.batch(1) == 14  # never over the longest
    assert Lengths.at_most(9).batch(3) == 27


def test_tokens_of_stages(tmp_path: Path) -> None:
    """Without a tokenizer every text is as long as its limit: 96 and 12 tokens sampled, 96 and 104 given."""
    chosen = recipe("model.max_text_tokens=200")
    work = work_of(chosen, texts_of(chosen, RunDir(tmp_path / "run"), None))
    assert work["sft"].trained == 12 * 8 * (96 + 104)
    assert work["reward"].scored == 200 * (96 + 2 * 104)
    assert work["ppo"].sampled == (6 * 8 + 48 * 4) * 12
    assert work["ppo"].trained == 2 * 48 * (96 + 12)
    assert work["evaluate"].sampled == 24 * (8 + 2) * 12
    assert work["evaluate"].read == 2 * 24 * 108 + 2 * 32 * (96 + 2 * 104)
    unknown = recipe("data.limit=null")
    assert work_of(unknown, texts_of(unknown, RunDir(tmp_path / "run"), None))["reward"].scored is None


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_tokens_of_rloo_and_grpo(config: Path, tmp_path: Path, aligner: str) -> None:
    own = [f"aligner={aligner}", f"{aligner}.iterations=3", f"{aligner}.rollouts=8", f"{aligner}.epochs=2"]
    chosen, run = recipe(*own, f"{aligner}.batch_size=8"), RunDir(tmp_path / "run")
    work = work_of(chosen, texts_of(chosen, run, None))
    assert work[aligner].sampled == (3 * 8 + 3 * 2 * 4) * 12  # and 4 references for each of 6 prompts
    assert work[aligner].trained == 2 * 3 * 8 * (96 + 12)
    more = recipe(*own, f"{aligner}.batch_size=8", f"{aligner}.micro_batch_size=2")
    large, small = (make_plan(each, run, gpus(1, 8, False), config) for each in (chosen, more))
    assert [stage.name for stage in large.stages] == ["sft", "reward", aligner, "evaluate"]
    assert small.stages[2].bytes < large.stages[2].bytes


def test_hours_are_tokens_times_seconds() -> None:
    rates = Rates(decode=2.0, response=3.0, read=1.0, learn={"ppo": 4.0})
    work = Work(sampled=10, read=20, scored=40, trained=5, responses=2)
    seconds = 10 * 2 + 2 * 3 + 20 * 1 + 40 * 1 * 0.5 + 5 * 4
    assert hours(StagePlan("ppo", work, {}), rates, 0.5, processes=2) == seconds / 2 / 3600
    assert hours(StagePlan("ppo", replace(work, trained=None), {}), rates, 0.5, processes=2) is None


def planned(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", "--config", str(TINY), *arguments])
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if line.startswith("private-rlhf: ")]
    return code, captured.out, "\n".join(said)


def test_the_table_and_json(workspace: Workspace, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "plan.json"
    cache = f"model.cache_dir={workspace.root / 'cache'}"
    code, out, _ = planned(capsys, "--no-calibration", "--run-dir", str(tmp_path / "run"), "--json", str(output), cache)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["stage", "sampled", "scored"]
    assert [line.split()[0] for line in lines[1:5]] == ["sft", "reward", "ppo", "evaluate"]
    assert lines[-1] == "hours: not asked for (--no-calibration)"
    stages: dict[str, Any] = read_json(output)["stages"]
    assert read_json(output)["texts_read"] is True
    for stage in stages.values():
        assert stage["bytes"] == pytest.approx(sum(stage["terms"].values()), abs=len(stage["terms"]))
        assert stage["hours"] is None
    assert stages["ppo"]["terms"]["process"] > 100 * 2**20
    assert not (tmp_path / "run").exists()  # a plan writes nothing but its own output


def test_gpus_are_planned_without_one(config: Path, capsys: Capture) -> None:
    options = ["--gpus", "2", "--gpu-memory", "16", "--model-config", str(config)]
    code, out, _ = planned(capsys, *options)
    assert code == 0
    assert "hours: unknown here (no GPU to calibrate on)" in out
    assert "16.0 GiB for each of 2 process(es) on cuda" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "2"], "--gpus and --gpu-memory go together"),
        (["--sharded"], "--sharded needs --gpus"),
        (["--model-config", "nowhere.json"], "--model-config nowhere.json: no such file"),
        (["model.source=owner/model"], "model.source owner/model is not on this machine"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], said: str, capsys: Capture) -> None:
    code, _, err = planned(capsys, *arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "overrides", "said"),
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
    config: Path, capsys: Capture, changed: dict[str, int], overrides: list[str], said: str
) -> None:
    config.write_text(json.dumps(CONFIG | changed))
    options = ["--gpus", "1", "--gpu-memory", "1.8", "--model-config", str(config)]
    code, out, err = planned(capsys, *options, *overrides)
    assert code == 2
    assert not out
    assert "GiB per process and has 1.8" in err
    assert said in err


def test_a_smaller_minibatch_needs_less(config: Path, tmp_path: Path) -> None:
    def needed(*overrides: str) -> float:
        plan = make_plan(recipe(*overrides), RunDir(tmp_path / "run"), gpus(1, 8, False), config)
        return next(stage.bytes for stage in plan.stages if stage.name == "ppo")

    assert needed("ppo.minibatch_size=2") < needed("ppo.minibatch_size=8")
    assert needed("ppo.minibatch_size=8", "ppo.micro_batch_size=2") < needed("ppo.minibatch_size=8")
