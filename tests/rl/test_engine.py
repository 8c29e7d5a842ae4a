"""Rollouts by vLLM servers: what the policy learns is what it learns from its own draws, and no lie gets through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.lm.distributed import adapter_off
from private_rlhf.recipe import RolloutConfig
from private_rlhf.recipe.load import to_tree
from private_rlhf.recipe.recipe import changed_keys, shareable
from private_rlhf.rl import resume_state
from private_rlhf.rl.engines import check_servable
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.sync_proof import BINS, Draws, Gap, SyncProof
from support.engine_worker import SETTINGS, TOKENS, serve, steps
from support.fake_vllm import LIES, FakeVllm
from support.ppo_problem import PAD, Problem
from support.recipes import recipe_of
from support.two_processes import run_two


@pytest.fixture
def fake(problem: Problem) -> Iterator[FakeVllm]:
    """An honest server of π_ref."""
    with FakeVllm(problem.model, PAD).running() as running:
        yield running


def served(problem: Problem, folder: Path, *fakes: FakeVllm, **settings: Any) -> PpoTrainer:
    return serve(problem.trainer(**SETTINGS, **settings), folder, [fake.url for fake in fakes])


def test_a_run_by_servers_is_the_run_of_transformers(problem: Problem, fake: FakeVllm, tmp_path: Path) -> None:
    """The server of the test inverts the same uniform numbers, and ratios are of the trainer's log-probabilities."""
    problem.references = {}
    expected = steps(problem.trainer(**SETTINGS), 0, 3)
    drawn = problem.references
    problem.references = {}
    trainer = served(problem, tmp_path, fake)
    found = steps(trainer, 0, 3)
    assert [step["losses"] for step in found] == [step["losses"] for step in expected]
    assert [step["responses"] for step in found] == [step["responses"] for step in expected]
    assert drawn.keys() == problem.references.keys()
    proofs = [step["proofs"] for step in found]
    assert [set(proof) for proof in proofs] == [{"policy", "reference"}, {"policy"}, {"policy"}]
    for proof in proofs:
        for facts in proof.values():
            assert facts["largest"] < 1e-5
            assert facts["mean"] <= facts["largest"]
            assert 0 <= facts["kl"] < 1e-9
            assert facts["sampler_p"] > 1e-6
    assert proofs[2]["policy"]["from_previous"] > 0.01  # a proof of unchanged weights proves nothing
    assert proofs[2]["policy"]["from_base"] > proofs[2]["policy"]["from_previous"] / 2


def test_adapters_come_under_new_names_and_leave_one_version_later(
    problem: Problem, fake: FakeVllm, tmp_path: Path
) -> None:
    trainer = served(problem, tmp_path, fake)
    steps(trainer, 0, 3)
    names = [name for path, name in fake.log if path.endswith("/load_lora_adapter")]
    assert len(set(names)) == 3
    assert [name for path, name in fake.log if path.endswith("unload_lora_adapter")] == names[:2]
    assert list(fake.adapters) == names[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]
    steps(served(problem, tmp_path, fake), 0, 1)  # another start
    assert len({name for path, name in fake.log if path.endswith("/load_lora_adapter")}) == 4


@pytest.mark.parametrize("lie", [*sorted(LIES.keys() - {"biased"}), pytest.param("biased", marks=pytest.mark.thorough)])
def test_every_lie_is_caught_before_anything_is_learnt_from_it(problem: Problem, tmp_path: Path, lie: str) -> None:
    """Told from the first moved weights on; the log-probabilities are right where only the sampler is biased."""
    warmth = {"temperature": 2.0} if lie == "raw" else {}
    size = {"rollouts": 256, "minibatch_size": 64} if lie == "biased" else {}
    with FakeVllm(problem.model, PAD, lie).running() as fake:
        trainer = serve(problem.trainer(**SETTINGS | warmth | size), tmp_path, [fake.url])
        if lie == "biased":
            trainer.engine.proof.places += 0  # type: ignore[attr-defined]
        steps(trainer, 0, 1)
        before = {name: each.clone() for name, each in trainer.bare.named_parameters()}
        with pytest.raises(RunStopped, match=LIES[lie]) as caught:
            steps(trainer, 1, 2)
    assert "\n" not in str(caught.value)
    assert fake.url in str(caught.value)
    assert all(torch.equal(each, before[name]) for name, each in trainer.bare.named_parameters())


def test_one_stale_replica_of_two_is_named(problem: Problem, fake: FakeVllm, tmp_path: Path) -> None:
    with FakeVllm(problem.model, PAD, "stale").running() as other:
        trainer = served(problem, tmp_path, fake, other)
        steps(trainer, 0, 1)
        assert {name for path, name in fake.log} >= set(other.adapters)
        with pytest.raises(RunStopped, match=f"{other.url} does not draw from this policy.*stale"):
            steps(trainer, 1, 2)


def test_a_restarted_or_busy_server_is_asked_again(problem: Problem, fake: FakeVllm, tmp_path: Path) -> None:
    expected = steps(problem.trainer(**SETTINGS), 0, 2)
    trainer = served(problem, tmp_path, fake)
    found = steps(trainer, 0, 1)
    fake.restart_after, fake.failures = 5, [503, 500, 429]
    found += steps(trainer, 1, 2)
    assert [step["losses"] for step in found] == [step["losses"] for step in expected]
    assert list(fake.adapters) == [trainer.engine._name(2)]  # type: ignore[attr-defined]


def test_a_server_that_stays_away_stops_the_run_and_resuming_goes_on(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(problem.trainer(**SETTINGS), 0, 2)
    with FakeVllm(problem.model, PAD).running() as fake:
        trainer = served(problem, tmp_path / "adapters", fake)
        resume_state.install_hooks(trainer.accelerator)
        steps(trainer, 0, 1)
        resume_state.save(trainer.accelerator, tmp_path / "state", 1, {})
    with pytest.raises(RunStopped, match=r"has not answered for .* s .*: start it again") as caught:
        steps(trainer, 1, 2)
    assert "\n" not in str(caught.value)
    with FakeVllm(problem.model, PAD).running() as fake:
        resumed = served(problem, tmp_path / "adapters", fake)
        resume_state.install_hooks(resumed.accelerator)
        resume_state.load_latest(resumed.accelerator, tmp_path / "state")
        assert steps(resumed, 1, 2)[0]["losses"] == expected[1]["losses"]


@pytest.mark.thorough
def test_two_processes_send_their_own_rows_and_learn_what_one_does(
    problem: Problem, fake: FakeVllm, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text(fake.url)
    run_two("engine_worker", tmp_path)
    asked = [name for path, name in fake.log if path == "/v1/completions"]
    assert len(asked) == 3 * SETTINGS["rollouts"]  # none twice
    assert len([name for path, name in fake.log if path == "/v1/load_lora_adapter"]) == 3
    expected = steps(problem.trainer(**SETTINGS), 0, 3)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"said-{rank}.json").read_text())
        assert [step["responses"] for step in found] == [step["responses"] for step in expected]
        for one, other in zip(found, expected, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], abs=1e-4, rel=1e-3)
        assert all(step["proofs"]["policy"]["tokens"] == sum(map(len, step["responses"])) for step in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.31.1"}, "must be servers of vLLM 0.32 or later"),
        ({"version": "fast"}, "must be servers of vLLM"),
        ({"max_model_len": TOKENS - 1}, f"--max-model-len of .* must be at least {TOKENS}"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_once(
    problem: Problem, fake: FakeVllm, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    vars(fake).update(change)
    with pytest.raises(UserError, match=message):
        served(problem, tmp_path, fake)


def test_a_server_that_does_not_see_the_folder_says_so(
    problem: Problem, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "load", lambda name, path: (404, f"No adapter found for '{path}'"))
    with pytest.raises(RunStopped, match=r"does not load the adapter .* let it see that folder under that path"):
        steps(served(problem, tmp_path, fake), 0, 1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"r": 513}, "rank must be at most 512"),
    ],
)
def test_an_adapter_that_vllm_leaves_out_is_refused(problem: Problem, options: dict[str, Any], name: str) -> None:
    config: Any = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    with pytest.raises(UserError, match=name):
        check_servable(get_peft_model(problem.model, LoraConfig(**config)))


def test_all_weights_are_refused_and_plain_adapters_are_not(problem: Problem) -> None:
    check_servable(problem.trainer().policy)
    with pytest.raises(UserError, match="lora must not be null"):
        check_servable(problem.model)


# --- the proof --------------------------------------------------------------------------------------------------------


def proof(problem: Problem) -> SyncProof:
    trainer = problem.trainer(**SETTINGS)
    return SyncProof(trainer.accelerator, problem.model, problem.renderer.tokenizer, 1.0, (1e-4, 2e-3))


def exact_draws(problem: Problem, count: int, seed: int, policy: Any = None) -> Draws:
    """Exact draws of π_ref or a policy, with π_ref's log-probabilities of them."""
    generator = torch.Generator().manual_seed(seed)
    prompt = problem.prompts[0]
    mass = problem.log_probabilities(policy or problem.model, prompt).exp()
    chosen = torch.multinomial(mass, count, True, generator=generator)
    responses = [problem.responses[index] for index in chosen.tolist()]
    made = Draws([problem.renderer.prompt_ids(prompt)] * count, responses, [], ["one"] * count)
    return Draws(made.prompts, responses, proof(problem).read(made), made.replicas)


def test_the_places_of_exact_draws_are_uniform(problem: Problem) -> None:
    """False alarm: 1e-6 in all, by Bonferroni over the bins; the seed is fixed."""
    made = proof(problem)
    made.read(exact_draws(problem, 2000, 0), places=True)
    count = made.places.sum()
    share = made.places / count
    assert count > 3000
    assert (abs(share - 1 / BINS) < 5.4 * (0.09 / count) ** 0.5).all()


def test_gaps_add_up_to_what_they_are_of_all_tokens() -> None:
    first, second = Gap.of([-1.0, -2.0], [-1.5, -2.0]), Gap.of([-3.0], [-1.0])
    whole = Gap.of([-1.0, -2.0, -3.0], [-1.5, -2.0, -1.0])
    assert vars(first + second) == pytest.approx(vars(whole))
    assert (whole.largest, whole.least, whole.mean) == (2.0, -2.0, 2.5 / 3)
    assert whole.facts["kl"] == pytest.approx((2.718281828**0.5 - 1.5 + 2.718281828**-2 + 1) / 3)


def test_a_number_that_is_not_finite_stops_the_run(problem: Problem) -> None:
    draws = exact_draws(problem, 8, 1)
    draws.logprobs[3][0] = float("nan")
    with pytest.raises(RunStopped, match="does not draw from this policy"):
        proof(problem).check(draws, None, {})


@pytest.mark.parametrize("stale", [True, False])
def test_rounding_does_not_hide_other_weights(problem: Problem, stale: bool) -> None:
    """As in bfloat16: the engine's numbers are off by more than the weights have moved, and within the bounds."""
    trainer = problem.trainer(**SETTINGS)
    steps(trainer, 0, 1)
    made = SyncProof(trainer.accelerator, trainer.policy, problem.renderer.tokenizer, 1.0, (10.0, 100.0))
    draws = exact_draws(problem, 512, 2, None if stale else trainer.policy)
    moved = made.read(draws)
    noise = torch.Generator().manual_seed(4)
    told = [
        [each + 0.1 * float(torch.randn((), generator=noise)) for each in row]
        for row in (draws.logprobs if stale else moved)
    ]
    told = Draws(draws.prompts, draws.responses, told, draws.replicas)
    others = {"base": lambda: adapter_off(trainer.policy)}
    if stale:
        with pytest.raises(RunStopped, match="base model without the adapter"):
            made.check(told, None, others)
        return
    facts = made.check(told, None, others)
    assert 0.05 < facts["mean"] < 0.1  # 0.08 = 0.1·√(2/π)


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_bounds_follow_the_dtype() -> None:
    settings = RolloutConfig(engine="vllm", urls=["http://127.0.0.1:8000"])
    assert settings.bounds("float32") == (1e-4, 2e-3)
    assert settings.bounds("bfloat16") == (0.1, 3.0)
    with pytest.raises(ValueError, match="urls must go with engine: vllm"):
        RolloutConfig(engine="vllm")
    with pytest.raises(ValueError, match="without a password"):
        RolloutConfig(engine="vllm", urls=["http://me:secret@host:8000"])
    own = RolloutConfig(engine="vllm", urls=["http://127.0.0.1:8000"], tolerance=0.5, largest=7.0)
    assert own.bounds("float32") == (0.5, 7.0)


VLLM = {"engine": "vllm", "urls": ["http://127.0.0.1:8000"]}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"aligner": "dpo", "dpo": {"lora": None}}, "dpo.lora must not be null"),
        ({"ppo": {"lora": None}}, "ppo.lora must not be null"),
        ({"aligner": "rloo", "rloo": {"lora": {"rank": 600}}}, "rloo.lora.rank must be at most 512"),
        ({"ppo": {"lora": {"target_modules": ["q_proj", "lm_head"]}}}, "target_modules must not have lm_head"),
        ({"ppo": {"quantize": "4bit"}}, "ppo.quantize must be null"),
        ({"ppo": {"top_p": 0.9}, "evaluate": {"gibbs_candidates": 0}}, "ppo.top_p must be 1"),
    ],
)
def test_a_recipe_that_vllm_cannot_serve_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(rollout=VLLM, **sections)


def test_no_stage_runs_again_for_a_section_that_changes_nothing() -> None:
    assert changed_keys(recipe_of(rollout={"engine": "transformers"}), to_tree(recipe_of())) == []
    whole = recipe_of(rollout=VLLM)
    assert changed_keys(whole, to_tree(recipe_of())) == ["rollout"]
    other = recipe_of(rollout=VLLM | {"urls": ["http://other:1"], "folder": "/x/adapters", "tolerance": 1.0})
    assert changed_keys(other, to_tree(whole)) == []
    assert str(shareable(other).rollout.folder) == "adapters"  # type: ignore[union-attr]
