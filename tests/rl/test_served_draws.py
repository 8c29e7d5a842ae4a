"""Servers draw for the evaluation, the online rounds and `sample` what the models draw themselves, or are found out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from private_rlhf.cli import main
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.evaluation.evaluation_sampler import PromptResult, Sampler
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.lm.drawing import Engine, TransformersEngine
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import load_causal_lm, load_policy, load_tokenizer
from private_rlhf.lm.saving import ADAPTER, adapter_tensors, write_adapter
from private_rlhf.online.pool import CandidateSampler, candidate_key
from private_rlhf.recipe import LoraSettings, RolloutConfig
from private_rlhf.reward_models.scorer import Scores
from private_rlhf.rl.engines import VllmEngine, connect
from private_rlhf.rl.ppo_trainer import PpoTrainer
from safetensors.torch import load_file
from support.engine_worker import SETTINGS, steps
from support.fake_vllm import LIES, FakeVllm
from support.ppo_problem import PAD, Problem
from support.recipes import SMALLEST

CAUSES = LIES | {"stale": "another adapter"}
AT_REFERENCE = ("temperature", "raw", "top_p", "tokens", "biased")
HOT = 2.0


@pytest.fixture
def trained(problem: Problem) -> PpoTrainer:
    """After an iteration."""
    trainer = problem.trainer(**SETTINGS)
    steps(trainer, 0, 1)
    problem.use_bonus = False  # type: ignore[attr-defined]
    problem.score = lambda prompts, responses, progress=None: Scores(*torch.zeros(3, len(responses)))  # type: ignore[method-assign, assignment, misc]
    return trainer


@pytest.fixture
def merged(trained: PpoTrainer) -> Any:
    """The checkpoint that is evaluated."""
    return copy.deepcopy(trained.policy).merge_and_unload().eval()


def servers(trained: PpoTrainer, policy: Any, reference: Any, fake: FakeVllm, folder: Path, warmth: float) -> Any:
    settings = RolloutConfig(engine="vllm", urls=[fake.url], patience=1.5)
    renderer: Any = trained.renderer
    how = folder / "published", "float32", warmth, 8
    return connect(trained.accelerator, settings, policy, renderer, *how, reference=reference)


def adapter(trained: PpoTrainer, folder: Path) -> Path:
    write_adapter(trained.policy, adapter_tensors(trained.policy), folder / ADAPTER)
    return folder / ADAPTER


def evaluated(trained: PpoTrainer, merged: Any, engine: Engine, warmth: float = 1.0) -> list[PromptResult]:
    """128 answers of each policy to each prompt, and four candidates of π_ref."""
    problem: Any = trained.scorer
    how = problem, None, Sampling(2, warmth), 0, engine
    made = Sampler(trained.accelerator, merged, problem.model, trained.renderer, *how)
    return made.measure(list(enumerate(problem.prompts)), 128, 4)


def test_the_evaluation_by_a_server_is_that_of_the_models(
    problem: Problem, trained: PpoTrainer, merged: Any, tmp_path: Path
) -> None:
    """The server inverts the same uniform numbers; each of its answers was asked of the right weights."""
    own = TransformersEngine(trained.accelerator, trained.renderer.tokenizer, 8)
    expected = evaluated(trained, merged, own)
    with FakeVllm(problem.model, PAD).running() as fake:
        engine = servers(trained, merged, problem.model, fake, tmp_path, 1.0)
        engine.publish(adapter(trained, tmp_path))
        found = evaluated(trained, merged, engine)
    assert [[answer.text for answer in result.policy] for result in found] == [
        [answer.text for answer in result.policy] for result in expected
    ]
    assert found == expected
    assert max(answer.kl for result in found for answer in result.policy) > 1e-3
    asked = [name for path, name in fake.log if path == "/v1/completions"]
    (policy,) = set(asked) - {"base"}
    assert (asked.count("base"), asked.count(policy)) == (2 * (128 + 4), 2 * 128)
    facts = engine.summary()
    assert facts["tokens"] > 300
    assert facts["largest"] < 1e-5
    assert [set(proof) >= {"from_base"} for proof in engine.proofs] == [False, False, True]


@pytest.mark.parametrize("lie", CAUSES)
def test_every_lie_about_the_policy_stops_the_evaluation(
    problem: Problem, trained: PpoTrainer, merged: Any, tmp_path: Path, lie: str
) -> None:
    """Of a stale server: the checkpoint that was published before is another one."""
    warmth = HOT if lie == "raw" else 1.0
    first = adapter(trained, tmp_path / "first")
    steps(trained, 1, 2)
    merged = copy.deepcopy(trained.policy).merge_and_unload().eval()
    with FakeVllm(problem.model, PAD, lie).running() as fake:
        engine = servers(trained, merged, problem.model, fake, tmp_path, warmth)
        engine.publish(first)
        engine.publish(adapter(trained, tmp_path / "second"))
        with pytest.raises(RunStopped, match=CAUSES[lie]) as caught:
            evaluated(trained, merged, engine, warmth)
    assert "\n" not in str(caught.value)
    assert f"the engine at {fake.url}" in str(caught.value)


def candidates(
    trained: PpoTrainer, engine: Engine | None, monkeypatch: pytest.MonkeyPatch, warmth: float = 1.0
) -> list[list[str]]:
    problem: Any = trained.scorer
    monkeypatch.setattr(CandidateSampler, "features", lambda self, rows, progress=None: torch.zeros(len(rows), 1))
    monkeypatch.setattr(type(trained.renderer), "response_ids", lambda self, text: [1], raising=False)
    backbone: Any = None
    renderer: Any = trained.renderer
    sampler = CandidateSampler(problem.model, backbone, renderer, 8, engine=engine, temperature=warmth)
    return sampler.draw(problem.prompts, 128, candidate_key(0, "train")).texts


@pytest.mark.parametrize("lie", ["", *AT_REFERENCE])
def test_candidates_come_from_the_base_model_or_the_rounds_stop(
    problem: Problem, trained: PpoTrainer, tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = candidates(trained, None, monkeypatch)
    with FakeVllm(problem.model, PAD, lie, from_version=0).running() as fake:
        warmth = HOT if lie == "raw" else 1.0
        engine = servers(trained, problem.model, problem.model, fake, tmp_path, warmth)
        if lie:
            with pytest.raises(RunStopped, match=LIES[lie]):
                candidates(trained, engine, monkeypatch, warmth)
            return
        assert candidates(trained, engine, monkeypatch) == expected
    assert {name for _, name in fake.log if name} == {"base"}


def test_an_adapter_says_nothing_of_the_folder_of_its_base(trained: PpoTrainer, tmp_path: Path) -> None:
    trained.policy.peft_config["default"].base_model_name_or_path = "/home/clinic/secret"
    folder = adapter(trained, tmp_path)
    assert "secret" not in (folder / "adapter_config.json").read_text(encoding="utf-8")
    assert trained.policy.peft_config["default"].base_model_name_or_path == "/home/clinic/secret"
    kept = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".lora_")[1][0] for name in kept} == {"A", "B"}


def test_a_policy_without_an_adapter_is_refused(problem: Problem, trained: PpoTrainer, tmp_path: Path) -> None:
    with FakeVllm(problem.model, PAD).running() as fake:
        engine: VllmEngine = servers(trained, problem.model, problem.model, fake, tmp_path, 1.0)
        with pytest.raises(UserError, match=r"ppo/adapter must hold the policy's adapter, got none: run ppo again"):
            engine.publish(tmp_path / "ppo" / ADAPTER)


# --- private-rlhf sample ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sft/model, ppo/model and ppo/adapter of a run, at random."""
    root = tmp_path_factory.mktemp("run")
    home = tiny_checkpoint(root / "sft" / "model", ["the quick brown fox", "a kind sentence about rivers"])
    policy = load_policy(home, "float32", LoraSettings(rank=4), 0)
    for name, each in policy.named_parameters():
        if "lora_B" in name:
            each.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    write_adapter(policy, adapter_tensors(policy), root / "ppo" / ADAPTER)
    policy.merge_and_unload().save_pretrained(root / "ppo" / "model")
    load_tokenizer(home).save_pretrained(root / "ppo" / "model")
    return root


@pytest.fixture
def fake(run: Path) -> Iterator[FakeVllm]:
    home = run / "sft" / "model"
    with FakeVllm(load_causal_lm(home, "float32"), load_tokenizer(home).pad_token_id, from_version=1).running() as made:
        made.max_model_len = 128
        yield made


def sampled(run: Path, stage: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    policy = ["--policy", str(run / stage / "model"), "--max-response-tokens", "6", "--count", "3"]
    code = main(["sample", *policy, *more, "the quick fox"])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_sample_draws_by_the_servers_of_its_recipe(
    run: Path, fake: FakeVllm, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = sampled(run, stage, capsys)
    rollout = {"engine": "vllm", "urls": [fake.url], "patience": 1.5}
    recipe = {**SMALLEST, "model": {"source": "tiny", "max_prompt_tokens": 64}, "rollout": rollout}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    served = ["--config", str(tmp_path / "recipe.yaml")]
    assert sampled(run, stage, capsys, *served)[:2] == expected[:2]
    asked = [name for path, name in fake.log if path == "/v1/completions"]
    assert len(asked) == 3
    assert not list((run / "checkpoints").glob("*"))
    assert (set(asked) == {"base"}) == (stage == "sft")
    if stage == "ppo":
        fake.lie = "base"
        code, out, error = sampled(run, stage, capsys, *served)
        assert (code, out) == (1, "")
        assert "likely cause: the base model without the adapter" in error.splitlines()[-1]
    recipe["rollout"] = {"engine": "transformers"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    assert sampled(run, stage, capsys, *served)[:2] == expected[:2]
    assert len([path for path, _ in fake.log if path == "/v1/completions"]) == 3 * (1 + (stage == "ppo"))
