"""Rewards beside r̂: weighted and added for PPO alone, from other models and from functions; every refusal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC
from private_rlhf.core.world import World
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.report.run_card import extra_rewards as on_card
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.checkpoint import METADATA_FILE, RewardMetadata, save_reward_checkpoint
from private_rlhf.reward_models.external import ExtraReward, checked, load_extra_rewards
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.stages.declarations import preflight, stage_of
from support.recipes import recipe_of
from support.reward_checkpoints import rewards

CPU = torch.device("cpu")
SMALL = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 1}


def lengths(prompts: Sequence[Any], responses: Sequence[str]) -> list[int]:
    """A reward for tests: whole numbers are numbers."""
    assert len(prompts) == len(responses)
    return [len(response) for response in responses]


def loaded(given: Recipe) -> list[ExtraReward]:
    """As stage ppo does."""
    return load_extra_rewards(given.ppo.extra_rewards, given.model, CPU)


def recipe(*rewards: dict[str, Any]) -> Recipe:
    model = {"source": "tiny", "max_prompt_tokens": 40, "max_response_tokens": 20}
    return recipe_of(model=model, ppo={"extra_rewards": list(rewards)})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module on the path that gives lengths, and what is wrong."""
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test, in its folder
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rewards.py").write_text(
        "value = 3\n"
        "def lengths(prompts, responses): return [len(r) for r in responses]\n"
        "def one(prompts, responses): return [1.0]\n"
        "def nan(prompts, responses): return [float('nan') for _ in responses]\n"
        "def words(prompts, responses): return ['long' for _ in responses]\n"
        "def nothing(prompts, responses): return None\n"
        "def fails(prompts, responses): return {}[0]\n"
    )
    return "my_rewards"


# --- in training ------------------------------------------------------------------------------------------------------


def constant(name: str, weight: float, value: float) -> ExtraReward:
    return ExtraReward(name, weight, lambda prompts, responses: torch.full((len(responses),), value))


def test_their_weighted_sum_is_added_to_the_score_and_to_nothing_else(problem: Any) -> None:
    plain, _ = problem.trainer(**SMALL).collect(1)
    long = ExtraReward("long", 0.5, lambda prompts, responses: torch.tensor(lengths(prompts, responses)).float())
    problem.extra_rewards = [constant("nice", -2.0, 3.0), long]
    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(1)
    assert rollout.responses == plain.responses
    sizes = torch.tensor([len(problem.renderer.text(row)) for row in rollout.responses])
    torch.testing.assert_close(rollout.scores, plain.scores - 6.0 + 0.5 * sizes)
    torch.testing.assert_close(rollout.extra, torch.stack([torch.full((8,), 3.0), sizes.float()], dim=1))
    assert torch.equal(rollout.reward, plain.reward)
    entry = trainer.describe(rollout, False)
    assert entry["extra_rewards"] == pytest.approx({"nice": 3.0, "long": float(sizes.float().mean())})
    assert entry["score_over_reference"] == pytest.approx(float((plain.scores - plain.baseline).mean()), abs=1e-5)
    assert entry["score"] == pytest.approx(float(rollout.scores.mean()))


def test_reference_completions_get_them_too(problem: Any) -> None:
    problem.extra_rewards = [constant("nice", 2.0, 3.0)]
    problem.references = {}
    rollout, _ = problem.trainer(**SMALL, reference_rollouts=True, reference_samples=2).collect(0)
    assert len(rollout.responses) == 4
    torch.testing.assert_close(rollout.scores, rollout.reward + 6.0)


def test_ppo_follows_an_extra_reward(problem: Any) -> None:
    """The private reward is flat; one short response is liked."""
    problem.rewards = dict.fromkeys(problem.rewards, 0.0)
    likes = ExtraReward("likes", 4.0, lambda prompts, responses: torch.tensor([float(r == "1") for r in responses]))
    problem.extra_rewards = [likes]
    trainer = problem.trainer(rollouts=64, minibatch_size=32, ppo_epochs=4, learning_rate=1e-2, kl_coef=0.1)
    first, _ = trainer.collect(0)
    for iteration in range(6):
        rollout, _ = trainer.collect(iteration)
        trainer.update(rollout, iteration)
    assert float(rollout.extra.mean()) > float(first.extra.mean()) + 0.2


def test_without_any_the_history_says_nothing_of_them(problem: Any) -> None:
    trainer = problem.trainer(**SMALL)
    rollout, _ = trainer.collect(0)
    assert "extra_rewards" not in trainer.describe(rollout, False)
    assert not rollout.weighted_extra.any()


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_function_is_named_by_its_module(module: str) -> None:
    (reward,) = loaded(recipe({"callable": f"{module}:lengths", "weight": 0.25}))
    assert reward.score(["p", "q"], ["", "four"]).tolist() == [0.0, 4.0]
    assert (reward.name, reward.weight, reward.renderer) == (f"{module}:lengths", 0.25, None)
    said = on_card([reward.facts])
    assert said == f"weight 0.25: the function {module}:lengths; what it reads is not checked"
    assert on_card([]) is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one", r"ppo\.extra_rewards\.0\.callable .*:one must give 2 numbers, got 1: return one for each"),
        ("nan", r":nan must give finite numbers, got nan for 'first'"),
        ("words", r":words must give numbers, got list"),
        ("nothing", r":nothing must give numbers, got NoneType"),
    ],
)
def test_what_a_function_gives_is_checked(module: str, function: str, message: str) -> None:
    (reward,) = loaded(recipe({"callable": f"{module}:{function}"}))
    with pytest.raises(UserError, match=message):
        reward.score(["p", "q"], ["first", "second"])


def test_arrays_and_infinities(module: str) -> None:
    import numpy as np

    assert checked(np.array([1.0, 2.0]), ["a", "b"], "f").tolist() == [1.0, 2.0]
    assert checked(torch.tensor([1.0, 2.0]), ["a", "b"], "f").tolist() == [1.0, 2.0]
    with pytest.raises(UserError, match="f must give finite numbers, got -inf for 'b'"):
        checked([1.0, float("-inf")], ["a", "b"], "f")
    (reward,) = loaded(recipe({"callable": f"{module}:fails"}))
    with pytest.raises(RuntimeError, match=":fails failed: KeyError: 0"):
        reward.score(["p"], ["a"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent_module_of_mine:f", "No module named 'absent_module_of_mine': install it, or put its folder on"),
        ("private_rlhf.data.layout:read_preferences", "is a part of this package, not a reward"),
        ("private_rlhf.reward_models.model:score_layer", "is a part of this package, not a reward"),
        ("my_rewards:absent", "my_rewards has no function absent"),
        ("my_rewards:value", "my_rewards has no function value"),
        ("my_rewards.inner:f", r"No module named 'my_rewards\.inner'"),
        ("xml..dom:f", r"No module named 'xml\.\.dom'"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_anything_runs(module: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"ppo\.extra_rewards\.0\.callable {name}:? {message}"):
        preflight(recipe({"callable": name}), ["ppo"], World(0, 1))


def test_before_its_stage_no_line_of_it_runs(module: str, tmp_path: Path) -> None:
    """Nor of the packages around it: a dry run of somebody's recipe must do nothing."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\n"
    (folder / "__init__.py").write_text(trap)
    (folder / "wide.py").write_text(trap + "from my_rewards import *\n")
    (folder / "deep.py").write_text(trap + "try:\n  import nowhere\nexcept ImportError:\n  def f(p, r): return []\n")
    (folder / "broken.py").write_text("def f(p, r:\n")
    for name in ("deep:f", "wide:lengths"):
        preflight(recipe({"callable": f"my_package.{name}"}), ["ppo"], World(0, 1))
        assert len(stage_of("ppo").inputs(recipe({"callable": f"my_package.{name}"}))[f"my_package.{name}"]) == 64
    for name, said in (("deep:g", "has no function g"), ("broken:f", "valid Python"), ("deeper:f", "No module")):
        with pytest.raises(UserError, match=said):
            preflight(recipe({"callable": f"my_package.{name}"}), ["ppo"], World(0, 1))
    assert not (tmp_path / "sprung").exists()
    assert "my_package" not in sys.modules
    loaded(recipe({"callable": "my_package.deep:f"}))
    assert (tmp_path / "sprung").exists()


def test_a_module_that_fails_when_it_is_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def f(p, r): return []\n1 / 0\n")
    with pytest.raises(UserError, match=r"my_rewards:f: cannot be imported \(ZeroDivisionError: division by zero\)"):
        loaded(recipe({"callable": "my_rewards:f"}))


def test_a_changed_source_runs_ppo_again(module: str, tmp_path: Path) -> None:
    digests = stage_of("ppo").inputs(recipe({"callable": f"{module}:one"}))
    assert len(digests[f"{module}:one"]) == 64
    (tmp_path / "my_rewards.py").write_text("def one(prompts, responses): return []\n")
    assert stage_of("ppo").inputs(recipe({"callable": f"{module}:one"})) != digests
    assert stage_of("ppo").inputs(recipe({"callable": "absent_module:f"}))["absent_module:f"] == "absent"


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of another tool, whose tokenizer splits words that no policy of these tests knows."""
    root = tmp_path_factory.mktemp("extra")
    base = tiny_checkpoint(root / "base", ["3 4 5 6 7", "numbers and numbers of tokens"], seed=5)
    model = build_reward_backbone(base, pad_token_id=load_tokenizer(base).pad_token_id)
    set_score_weight(model, torch.randn(64, generator=torch.Generator().manual_seed(3)))
    metadata = RewardMetadata(
        noise=PUBLIC, loss="private_likelihood", reward_bound=2.0, ridge=1.0, n_pairs=4, kappa=None,
        mode="head", num_layers=2, base_model="tiny", public=True,
    )
    target = root / "theirs"
    save_reward_checkpoint(target, model, metadata, tokenizer=load_tokenizer(base))
    (target / METADATA_FILE).unlink()
    return target


def test_a_model_with_another_tokenizer_scores_the_text(folder: Path) -> None:
    (reward,) = loaded(recipe({"path": str(folder), "weight": 2.0, "public": True}))
    from private_rlhf.reward_models.checkpoint import load_reward_checkpoint

    model, tokenizer = load_reward_checkpoint(folder, declared_public=True).model, load_tokenizer(folder)
    expected = []
    for prompt, response in (("3 4", "5 6"), ("5 6 7 2", "hello there")):
        messages = [{"role": "user", "content": prompt}]
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = [*tokenizer(start + response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            expected.append(float(rewards(model, [ids])))
    found = reward.score(["3 4", "5 6 7 2"], ["5 6", "hello there"])
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    assert (reward.name, reward.weight) == ("theirs", 2.0)
    assert on_card([reward.facts]) == (
        "weight 2: theirs, from outside this pipeline; the holder of the run declares its labels public"
    )


def test_its_tokenizer_may_need_more_tokens_than_the_policy_s(folder: Path) -> None:
    (reward,) = loaded(recipe({"path": str(folder), "public": True}))
    assert reward.renderer is not None
    assert (reward.renderer.max_prompt_tokens, reward.renderer.max_response_tokens) == (160, 80)
    long = "ünïcode wörds " * 3  # more than 20 tokens here
    assert len(reward.renderer.response_ids(long)) > 20
    assert reward.score(["3"], [long]) != reward.score(["3"], [long[:20]])


def test_several_of_one_name_are_told_apart(folder: Path) -> None:
    rewards = loaded(recipe(*[{"path": str(folder), "public": True}] * 2))
    assert [reward.name for reward in rewards] == ["theirs", "theirs (1)"]


def test_a_model_whose_labels_nobody_declared_is_refused(folder: Path, tmp_path: Path) -> None:
    message = r"extra_rewards\.0\.path .*theirs has no reward_metadata\.json.* set ppo\.extra_rewards\.0\.public=true"
    for check in (lambda r: preflight(r, ["ppo"], World(0, 1)), loaded):
        with pytest.raises(UserError, match=message):
            check(recipe({"path": str(folder)}))
        with pytest.raises(UserError, match=r"extra_rewards\.0\.path must be a checkpoint folder, got .*absent"):
            check(recipe({"path": str(tmp_path / "absent"), "public": True}))
    preflight(recipe({"path": str(folder)}), ["evaluate"], World(0, 1))  # not read there


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "extra_rewards must have either path or callable"),
        ({"path": "a", "callable": "b:c"}, "must have either path or callable"),
        ({"callable": "no_colon"}, r"ppo\.extra_rewards\.0\.callable"),
        ({"callable": "b:c", "weight": 0}, "weight must not be 0"),
        ({"callable": "b:c", "weight": float("nan")}, r"ppo\.extra_rewards\.0\.weight"),
        ({"callable": "b:c", "public": True}, "remove it from a callable"),
        ({"callable": "b:c", "wieght": 2}, r"unknown key 'ppo\.extra_rewards\.0\.wieght'; did you mean 'weight'\?"),
        ({"callable": "b:c", "weight": True}, r"ppo\.extra_rewards\.0\.weight must be a number or a text, got true"),
    ],
)
def test_wrong_entries_are_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(entry)
