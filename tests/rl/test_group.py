"""RLOO and GRPO on the enumerable problem: their gradients against J's, and the share of the Gibbs gain they reach."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.core.world import World
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.hf_trainer import trainer_config
from private_rlhf.lm.models import add_lora, load_causal_lm, unwrap
from private_rlhf.recipe import GroupConfig, LoraSettings, PpoConfig, RolloutConfig
from private_rlhf.rl.engines import VllmEngine
from private_rlhf.rl.group import TRAINERS, Task, history_of, prompt_dataset, trl_arguments
from private_rlhf.rl.sync_proof import SyncProof
from private_rlhf.stages.declarations import preflight
from support.fake_vllm import FakeVllm
from support.ppo_problem import CAP, EOS, PAD, VOCABULARY, Problem, StubRenderer
from support.recipes import recipe_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, PrinterCallback

KL_COEF = 1.0
SMALL = {"iterations": 4, "rollouts": 8, "batch_size": 4, "samples_per_prompt": 4, "learning_rate": 5e-3}
# As many responses and steps as PPO has in tests/rl/test_gibbs.py.
AS_PPO = {"iterations": 40, "rollouts": 128, "batch_size": 64, "epochs": 3, "samples_per_prompt": 8}
GRPO_OPTIMUM = 0.9526  # of the Gibbs gain; see the test of it

AlignerName = str


@pytest.fixture
def base(problem: Problem, tmp_path: Path) -> Path:
    problem.model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trainer(problem: Problem, base: Path, aligner: AlignerName, lora: bool = True, seed: int = 0, **given: Any) -> Any:
    """One from π_ref; the problem's own model stays as it is."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    settings = GroupConfig(
        **{"lora": LoraSettings(rank=8) if lora else None, "trainer_args": {"disable_tqdm": True}, **given}
    )
    kind, schema = TRAINERS[aligner]
    fixed = trl_arguments(aligner, settings, PpoConfig(kl_coef=KL_COEF), CAP)
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token=str(PAD)))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=str(PAD), eos_token=str(EOS))
    renderer: Any = StubRenderer(tokenizer=tokenizer)
    scorer: Any = problem
    model = load_causal_lm(base, "float32")
    made = kind(
        model=add_lora(model, settings.lora, seed) if settings.lora else model.requires_grad_(True),
        args=trainer_config(aligner, settings, schema, base.parent / "checkpoints", seed, World(0, 1), **fixed),
        train_dataset=prompt_dataset(len(problem.prompts), settings, seed),
        processing_class=tokenizer,
        task=Task(scorer, renderer, problem.prompts, Sampling(CAP), 128, 2, 0.0, seed, has_truth=False),
    )
    made.remove_callback(PrinterCallback)
    return made


def moved(made: Any) -> Any:
    """The trainer with a policy away from π_ref."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in made.model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


# --- what is estimated ------------------------------------------------------------------------------------------------


def parts_of(logprobs: torch.Tensor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log π of the 57 responses -> the place of each one's first token, log π of the first tokens (8,), and log π of
    each response given its first token (57,).
    """
    first = torch.tensor([row[0] for row in problem.responses])
    alone = torch.stack([logprobs[first == token].logsumexp(0) for token in range(VOCABULARY)])
    return first, alone, logprobs - alone[first]


def grpo_objective(current: torch.Tensor, reference: torch.Tensor, reward: torch.Tensor, problem: Problem) -> Any:
    """What GRPO's loss ascends: E[r] − kl_coef·KL of each token, where the KL of the second is weighted by how often
    its first token comes, as a constant."""
    first, alone, given = parts_of(current, problem)
    _, reference_alone, reference_given = parts_of(reference, problem)
    later = alone.exp().detach()[first] * given.exp() * (given - reference_given)
    kl = (alone.exp() * (alone - reference_alone)).sum() + later.sum()
    return (current.exp() * reward).sum() - KL_COEF * kl


def test_the_optimum_of_grpo_is_not_the_gibbs_policy(problem: Problem) -> None:
    """π(a|s) ∝ π_ref(a|s)·exp(E[r|s, a]/kl_coef): nothing moves it, and it has 95 % of the Gibbs policy's gain."""
    reached = possible = 0.0
    for prompt in problem.prompts:
        reference, reward = problem.log_probabilities(problem.model, prompt), problem.reward_vector(prompt)
        first, alone, given = parts_of(reference, problem)
        tilted = given + reward / KL_COEF
        norms = torch.stack([tilted[first == token].logsumexp(0) for token in range(VOCABULARY)])
        second = tilted - norms[first]
        expected = torch.zeros(VOCABULARY).double().index_add(0, first, second.exp() * reward)
        logits = (torch.log_softmax(alone + expected / KL_COEF, 0)[first] + second).requires_grad_()
        optimum = torch.log_softmax(logits, 0)
        grpo_objective(optimum, reference, reward, problem).backward()
        assert logits.grad is not None
        assert float(logits.grad.abs().max()) < 1e-9
        start = float((reference.exp() * reward).sum())
        optimum = optimum.detach()
        reached += float((optimum.exp() * (reward - KL_COEF * (optimum - reference))).sum()) - start
        possible += float(KL_COEF * (reference + reward / KL_COEF).logsumexp(0)) - start
    assert reached / possible == pytest.approx(GRPO_OPTIMUM, abs=1e-4)


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_the_expected_gradient_is_that_of_the_objective(problem: Problem, base: Path, aligner: str) -> None:
    """Σ π(y)·∇loss(y) over all responses: of J for RLOO, of `grpo_objective`, per token of the cap, for GRPO."""
    made = moved(trainer(problem, base, aligner, **SMALL))
    model = made.model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prompt = torch.tensor([problem.renderer.prompt_ids(problem.prompts[0])])
    current = problem.log_probabilities(model, problem.prompts[0])
    reference = problem.log_probabilities(problem.model, problem.prompts[0])
    reward = problem.reward_vector(problem.prompts[0])
    total = reward - KL_COEF * (current - reference) if aligner == "rloo" else reward
    found = [torch.zeros_like(parameter) for parameter in trained]
    for row, response in enumerate(problem.responses):
        ids = torch.tensor([response])
        inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids}
        inputs |= {"completion_mask": torch.ones_like(ids), "advantages": total[row : row + 1].float() - 0.3}
        inputs["old_logps"] = current[row : row + 1].float()
        with torch.no_grad(), model.disable_adapter():
            text = torch.cat([prompt, ids], dim=1)
            called = (model, text, torch.ones_like(text), ids.shape[1])
            inputs["ref_per_token_logps"] = made._get_per_token_logps_and_entropies(*called)[0]
        gradient = torch.autograd.grad(made._compute_loss(model, inputs), trained)
        for sum_, part in zip(found, gradient, strict=True):
            sum_ -= float(current[row].exp()) * part
    live = live_log_probabilities(problem, model)
    if aligner == "rloo":
        objective = (live.exp() * (reward - KL_COEF * (live - reference))).sum()
    else:
        objective = grpo_objective(live, reference, reward, problem) / CAP
    expected = torch.autograd.grad(objective, trained)
    assert max(float(part.abs().max()) for part in expected) > 1e-2
    for sum_, part in zip(found, expected, strict=True):
        torch.testing.assert_close(sum_, part, atol=2e-5, rtol=1e-3)


def live_log_probabilities(problem: Problem, model: Any) -> torch.Tensor:
    """(57,) float64 log π(response | first prompt), to differentiate."""
    ids = problem.renderer.prompt_ids(problem.prompts[0])
    found = []
    for response in problem.responses:
        logits = model(input_ids=torch.tensor([[*ids, *response]])).logits[0].double().log_softmax(-1)
        found.append(sum(logits[len(ids) - 1 + t, token] for t, token in enumerate(response)))
    return torch.stack(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_advantages_are_against_the_other_responses(problem: Problem, base: Path, aligner: str) -> None:
    made = moved(trainer(problem, base, aligner, **SMALL))
    made.model.train()
    output = made._generate_and_score_completions([{"prompt": place} for place in (0, 0, 0, 0, 1, 1, 1, 1)])
    rows = [
        row[mask.bool()].tolist() for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    places = [problem.responses.index(row) for row in rows]
    expected = []
    for prompt, group in ((0, places[:4]), (1, places[4:])):
        values = problem.reward_vector(problem.prompts[prompt])[group]
        if aligner == "rloo":
            current = problem.log_probabilities(made.model, problem.prompts[prompt])
            values = (
                values - KL_COEF * (current - problem.log_probabilities(problem.model, problem.prompts[prompt]))[group]
            )
        expected += [float(value - (values.sum() - value) / 3) for value in values]
    assert output["advantages"].tolist() == pytest.approx(expected, abs=1e-4)
    assert len({tuple(row) for row in rows}) > 3  # each has noise of its own


# --- what is reached --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("aligner", "least", "most"), [("rloo", 0.95, 1.0), ("grpo", 0.85, GRPO_OPTIMUM)])
def test_the_share_of_the_gibbs_gain(problem: Problem, base: Path, aligner: str, least: float, most: float) -> None:
    made = trainer(problem, base, aligner, **AS_PPO, learning_rate=5e-3)
    made.train()
    gain = problem.gain(made.model, KL_COEF)
    assert least <= gain <= most
    history = history_of(made.state, 128, KL_COEF)
    assert [row["iteration"] for row in history] == list(range(40))
    assert history[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert history[-1]["kl"] == pytest.approx(kl_of(problem, made.model), abs=0.2)
    assert history[-1]["score"] > history[0]["score"] + 0.5


def kl_of(problem: Problem, policy: Any) -> float:
    """KL(π‖π_ref) per response, over both prompts."""
    rows = [
        (problem.log_probabilities(policy, p), problem.log_probabilities(problem.model, p)) for p in problem.prompts
    ]
    return sum(float((one.exp() * (one - other)).sum()) for one, other in rows) / len(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "learning_rate"), [(True, 5e-3), (False, 1e-3)], ids=["lora", "full"])
def test_shares_beside_ppo_s(problem: Problem, base: Path, lora: bool, learning_rate: float) -> None:
    """Three seeds at PPO's numbers of responses and steps; pytest -s shows the shares for the README."""
    means = {}
    for aligner in ("rloo", "grpo"):
        gains = []
        for seed in range(3):
            made = trainer(problem, base, aligner, lora, seed, **AS_PPO, learning_rate=learning_rate)
            made.train()
            gains.append(problem.gain(made.model, KL_COEF))
        means[aligner] = sum(gains) / 3
        print(f"\n{aligner}, {'LoRA' if lora else 'all weights'}: {', '.join(f'{gain:.1%}' for gain in gains)}")
    assert 0.95 <= means["rloo"] <= 1.0
    assert 0.85 <= means["grpo"] <= GRPO_OPTIMUM


# --- the trainers as stages use them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_a_resumed_run_ends_where_a_whole_one_does(problem: Problem, base: Path, aligner: str) -> None:
    whole = trainer(problem, base, aligner, **SMALL, save_every=2)
    whole.train()
    resumed = trainer(problem, base, aligner, **SMALL, save_every=2)
    resumed.train(resume_from_checkpoint=str(base.parent / "checkpoints" / "checkpoint-4"))
    ours, theirs = (history_of(made.state, 8, KL_COEF) for made in (resumed, whole))
    assert len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert {**one, "tokens_per_second": 0} == {**other, "tokens_per_second": 0}
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_under_autocast_all_computes_in_one_context(
    problem: Problem, base: Path, monkeypatch: pytest.MonkeyPatch, aligner: str, lora: bool
) -> None:
    """As the launch files for GPUs ask for it. Sampling outside of it failed with adapters, in packed products."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made = trainer(problem, base, aligner, lora, **SMALL)
    assert made.accelerator.mixed_precision == "bf16"
    seen: set[tuple[bool, torch.dtype]] = set()
    head = unwrap(made.model).get_output_embeddings()
    head.register_forward_hook(lambda _, __, output: seen.add((torch.is_autocast_enabled("cpu"), output.dtype)))
    made.train()
    history = history_of(made.state, 8, KL_COEF)
    assert seen == {(True, torch.bfloat16)}
    assert history[0]["kl"] == 0.0
    assert abs(history[-1]["kl"]) > 1e-3


@pytest.mark.parametrize("aligner", TRAINERS)
def test_the_checkpoint_s_own_sampling_defaults_are_not_inherited(problem: Problem, base: Path, aligner: str) -> None:
    """Published checkpoints carry the sampling that their makers advise for chats; samples must be the policy's own."""
    plain = trainer(problem, base, aligner, **{**SMALL, "iterations": 1})
    plain.train()
    greedy = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0}
    GenerationConfig(**greedy, eos_token_id=EOS).save_pretrained(base)
    made = trainer(problem, base, aligner, **{**SMALL, "iterations": 1})
    assert unwrap(made.model).generation_config.top_k == 1
    made.train()
    expected, found = (history_of(each.state, 8, KL_COEF) for each in (plain, made))
    for row in (*expected, *found):
        del row["tokens_per_second"]
    assert found == expected


def test_a_reward_that_is_not_finite_stops_the_run(problem: Problem, base: Path) -> None:
    """TRL would leave the response out and go on."""
    problem.rewards = dict.fromkeys(problem.rewards, math.nan)
    with pytest.raises(FloatingPointError, match="reward of a response is not finite"):
        trainer(problem, base, "rloo", **SMALL).train()


def test_references_are_drawn_for_every_prompt(problem: Problem, base: Path) -> None:
    problem.references = {}
    trainer(problem, base, "rloo", **SMALL).draw_references()
    assert {prompt: len(rows) for prompt, rows in problem.references.items()} == dict.fromkeys(problem.prompts, 2)


# --- what is refused before anything runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "cannot run under FSDP1, it was never run here"),
        ({}, {"micro_batch_size": 3}, "batch_size 16 must be a multiple of 1 process"),
        ({}, {"trainer_args": {"loss_tipe": "x"}}, "has no 'loss_tipe'"),
        ({}, {"trainer_args": {"beta": 0.1}}, "trainer_args.beta is set by the stage itself: use .*kl_coef"),
        ({}, {"trainer_args": {"use_vllm": True}}, "trainer_args.use_vllm is set .*: use rollout.engine"),
    ],
)
def test_what_cannot_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, aligner: str, environment: dict[str, str], settings: dict[str, Any], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = recipe_of(**{"aligner": aligner, aligner: settings})
    with pytest.raises(UserError, match=f"^{aligner}.*{said}") as caught:
        preflight(recipe, [aligner], World(0, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("aligner", ["rloo", "grpo"])
def test_servers_draw_what_the_policy_would_and_a_stale_one_is_caught(
    problem: Problem, base: Path, tmp_path: Path, aligner: AlignerName
) -> None:
    def learnt(lie: str | None) -> list[dict[str, Any]]:
        made = trainer(problem, base, aligner, **SMALL)
        if lie is not None:
            settings = RolloutConfig(engine="vllm", urls=[fake.url])
            bounds = settings.bounds("float32")
            proof = SyncProof(made.accelerator, made.model, made.task.renderer.tokenizer, 1.0, bounds)
            made.engine = VllmEngine(made.accelerator, settings, proof, tmp_path / "adapters", made.ends, 6, 8)
        made.train()
        return history_of(made.state, SMALL["rollouts"], KL_COEF)

    expected = learnt(None)
    with FakeVllm(problem.model, PAD).running() as fake:
        found = learnt("")
    assert [entry["policy_loss"] for entry in found] == [entry["policy_loss"] for entry in expected]
    assert all(entry["engine"]["policy"]["largest"] < 1e-5 for entry in found)
    assert found[-1]["engine"]["policy"]["from_previous"] > 1e-3
    with FakeVllm(problem.model, PAD, "stale").running() as fake, pytest.raises(RunStopped, match="stale"):
        learnt("stale")
