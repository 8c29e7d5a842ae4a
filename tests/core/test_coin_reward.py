"""A reward that may be a coin stops the run before a policy is trained on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import RunStopped
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.recipe import shareable_yaml
from private_rlhf.runner import Selection
from private_rlhf.stages.checks import check_reward_verdict
from support.recipes import recipe_of
from support.stub_stages import stub_stages

BEFORE = ["privatize", "sft", "reward"]


def recipe(aligner: str, **sections: Any) -> Recipe:
    model, data = {"source": "tiny", "dtype": "float32"}, {"preferences": "embedded"}
    return recipe_of(**{"name": "one", "aligner": aligner, "model": model, "data": data, **sections})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that ran, in order; they do nothing."""
    return stub_stages(monkeypatch)


def state_accuracy(directory: RunDir, low: float) -> None:
    """What the reward stage says of its held-out labels."""
    accuracy = {"value": 0.56, "ci_low": low, "ci_high": 0.7, "n": 20}
    fit = {"validation_accuracy_debiased": accuracy, **LabelNoise.of(2.0).as_json()}
    write_json(directory.stage("reward") / "fit.json", fit | {"validation_pairs": 20, "num_pairs": 180})


@pytest.mark.parametrize("aligner", ["ppo", "rloo", "grpo", "gvpo"])
def test_a_coin_trains_no_policy(tmp_path: Path, ran: list[str], aligner: str) -> None:
    """In the run that fits it, in every later one, and in a dry run; accepted, or better than a coin, it does."""
    directory, plain = RunDir(tmp_path / "run"), recipe(aligner)
    directory.claim(plain.name, shareable_yaml(plain), {})
    state_accuracy(directory, low=0.45)
    attempts: list[Callable[[], Any]] = [
        lambda: runner.execute(plain, directory, Selection()),
        lambda: runner.execute(plain, directory, Selection()),
        lambda: runner.execute_one(aligner, plain, directory),
        lambda: runner.check(plain, directory, Selection(), World(rank=0, size=1)),
    ]
    stopped = r"may be a coin: .* 0\.560 \[0\.450, 0\.700\], .*--accept-reward \(reward\.accept_coin=true\)$"
    for attempt in attempts:
        with pytest.raises(RunStopped, match=stopped):
            attempt()
        assert ran == BEFORE
    with pytest.raises(RunStopped, match=r"bring more labels or raise reward\.max_pairs \(now 100\), raise privatize"):
        check_reward_verdict(directory, 100)
    runner.execute(recipe(aligner, reward={"accept_coin": True}), directory, Selection())
    assert ran == [*BEFORE, aligner, "evaluate", "report"]  # and nothing before it again
    runner.execute(plain, directory, Selection())
    assert ran == [*BEFORE, aligner, "evaluate", "report"]
    state_accuracy(directory, low=0.51)
    runner.execute_one(aligner, recipe(aligner, ppo={"kl_coef": 0.2}), directory)
    assert ran[6:] == [aligner]


def test_dpo_learns_from_labels_whatever_the_reward_is(tmp_path: Path, ran: list[str]) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim("one", shareable_yaml(recipe("dpo")), {})
    state_accuracy(directory, low=0.45)
    runner.execute(recipe("dpo"), directory, Selection())
    assert "dpo" in ran
