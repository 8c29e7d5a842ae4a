"""The table of what privacy costs: shares with known answers, folders of finished arms, π_ref copied between runs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.recipe.recipe import shareable_yaml
from private_rlhf.runner import stage_fingerprint
from private_rlhf.stages.declarations import stage_of
from private_rlhf_lab.benches import alignment_cost
from private_rlhf_lab.benches.alignment_arms import Arm, Workshop, adopt_reference
from private_rlhf_lab.benches.epsilon_tables import mean_sd, over_prompts, share_of

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"
PROMPTS = 50
WHOLE = np.random.default_rng(0).normal(1.0, 0.4, (3, PROMPTS))


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_fixed_share_of_a_gain_is_known_exactly() -> None:
    share = share_of(0.5 * WHOLE, WHOLE)
    assert share is not None
    assert share.value == pytest.approx(0.5)
    assert share.prompts == pytest.approx((0.5, 0.5))
    assert share.seeds == pytest.approx(0.0, abs=1e-12)


def test_the_interval_over_seeds_is_that_of_a_ratio_of_means() -> None:
    gain, whole = (np.repeat(np.array(means)[:, None], PROMPTS, axis=1) for means in ([0.4, 0.6], [1.0, 1.0]))
    share = share_of(gain, whole)
    assert share is not None
    assert share.value == pytest.approx(0.5)
    assert share.prompts == pytest.approx((0.5, 0.5))  # prompts do not differ: seeds alone do
    assert share.seeds == pytest.approx(12.7062 * math.sqrt(0.02) / math.sqrt(2), rel=1e-4)
    alone = share_of(gain[:1], whole[:1])
    assert alone is not None
    assert math.isnan(alone.seeds)


def test_the_interval_over_prompts_pairs_them() -> None:
    """A constant difference costs no certainty; the same numbers in another order do."""
    shuffled = np.random.default_rng(1).permutation(WHOLE, axis=1)
    widths = [
        np.ptp(share.prompts) for share in (share_of(WHOLE - 0.1, WHOLE), share_of(shuffled - 0.1, WHOLE)) if share
    ]
    assert 4 * widths[0] < widths[1]


def test_a_share_of_nothing_is_not_stated() -> None:
    assert share_of(WHOLE, WHOLE - WHOLE.mean()) is None


def test_cells() -> None:
    assert mean_sd([1.0, 3.0], "+.2f") == "+2.00 ± 1.41"
    assert mean_sd([1.0]) == "1.00"


# --- arms -------------------------------------------------------------------------------------------------------------


def workshop(home: Path) -> Workshop:
    return Workshop(home, TINY, (), lanes=1)


def finish(home: Path, arm: Arm, gain: np.ndarray) -> RunDir:
    """Leaves what a finished arm with these gains leaves; the Gibbs policy gains 1 everywhere."""
    shop = workshop(home)
    run = shop.run_dir(arm)
    recipe = load_recipe(Recipe, TINY, shop.arm_overrides(arm))
    run.claim(recipe.name, shareable_yaml(recipe), {})
    measured: dict[str, Any] = {
        "generation_win_rate_truth": {"value": 0.7, "ci_low": 0.6, "ci_high": 0.8, "n": PROMPTS},
        "kl": 0.5,
        "kl_ci": [0.4, 0.6],
        "true_reward": 5.0,
        "objective_gain": over_prompts(gain[None]).as_dict(),
    }
    metrics = {"sft": {**measured, "objective_gain": None}, "private": measured, "seconds": {arm.method: 60.0}}
    atomic.write_json(run.root / "metrics.json", metrics)
    rows = [{"index": i, "objective_gain": float(one), "gibbs_objective_gain": 1.0} for i, one in enumerate(gain)]
    atomic.write_json(run.stage("evaluate") / "by_prompt.json", rows)
    return run


def test_the_report_of_what_is_there(tmp_path: Path) -> None:
    options = argparse.Namespace(epsilons=[0.5, math.inf], seeds=[0, 1, 2], gvpo_seeds=[1], dpo_seeds=[0])
    arms = alignment_cost.arms_of(options)
    assert len(arms) == 10
    for seed in (0, 1):
        finish(tmp_path, Arm("ppo", math.inf, seed), WHOLE[seed])
        finish(tmp_path, Arm("ppo", 0.5, seed), 0.25 * WHOLE[seed])
    finish(tmp_path, Arm("ppo", math.inf, 2), WHOLE[2])  # without its private arm: in no ratio
    finish(tmp_path, Arm("dpo", 0.5, 0), 0.25 * WHOLE[0] - 0.125)
    finish(tmp_path, Arm("gvpo", 0.5, 1), 0.25 * WHOLE[1] + 0.25)
    text = alignment_cost.write_report(workshop(tmp_path), arms, {})
    assert "| PPO | 0.5 | 2 | 0.700 ± 0.000 | 0.50 ± 0.00 |" in text
    assert "| 25 % [25, 25], seeds ± 0 |" in text
    assert "- regression, ε = 0.5, 1 seeds: -0.25 [-0.25, -0.25]" in text
    assert "- private DPO, ε = 0.5, 1 seeds: +0.12 [+0.12, +0.12]" in text
    assert text.endswith("Not there yet: dpo-epsinf-seed0, gvpo-epsinf-seed1, ppo-eps0.5-seed2\n")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [entry["epsilon"] for entry in results["table"]] == [0.5, None, 0.5, 0.5]
    assert results["table"][0]["retained"]["value"] == pytest.approx(0.25)
    assert results["table"][0]["of_gibbs"]["value"] == pytest.approx(0.25 * WHOLE[:2].mean())
    assert len(results["runs"]) == 7
    assert (tmp_path / "gains.png").stat().st_size > 1000


def test_the_share_in_the_reward_is_that_of_its_objective() -> None:
    """r̂ less kl_coef·KL: 1 for π_ref, 3 − 0.5·2 for the policy, 4 − 0.5·2 for the Gibbs policy."""
    policy = {"pessimistic_reward": 3.0, "kl": 2.0, "kl_coef": 0.5}
    others = {"sft": {"pessimistic_reward": 1.0, "kl": 0.0}, "gibbs": {"pessimistic_reward": 4.0, "kl": 2.0}}
    assert alignment_cost.reward_share(policy, others) == pytest.approx(0.5)
    assert alignment_cost.reward_share(policy, {"sft": others["sft"]}) is None


def test_an_arm_under_way_is_not_read(tmp_path: Path) -> None:
    arm = Arm("ppo", 2.0, 1)
    run = finish(tmp_path, arm, WHOLE[0])
    (run.root / "metrics.json").unlink()
    assert alignment_cost.read_arm(arm, run) is None
    with pytest.raises(UserError, match="holds no finished arm"):
        alignment_cost.write_report(workshop(tmp_path), [arm], {})


def test_a_directory_with_another_arm_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path, Arm("ppo", 2.0, 1), WHOLE[0])
    with pytest.raises(UserError, match="another arm than its name says"):
        alignment_cost.read_arm(Arm("ppo", 2.0, 0), run)


def test_arms_on_different_prompts_are_not_compared(tmp_path: Path) -> None:
    arms = [Arm("ppo", 2.0, 0), Arm("ppo", math.inf, 0)]
    finish(tmp_path, arms[0], WHOLE[0])
    finish(tmp_path, arms[1], WHOLE[0, :-1])
    with pytest.raises(UserError, match="on different prompts"):
        alignment_cost.write_report(workshop(tmp_path), arms, {})


def test_the_reference_of_a_seed_fits_every_arm_of_it(tmp_path: Path) -> None:
    """The runner takes the copied stage for its own; that of another seed it does not."""
    shop, sft = workshop(tmp_path), stage_of("sft")
    source = RunDir(tmp_path / "sft-seed1")
    made = load_recipe(Recipe, TINY, shop._seeded(1))
    source.claim(made.name, shareable_yaml(made), {})
    atomic.write_text(source.stage("sft") / "model" / "weights", "w")
    source.complete("sft", {"fingerprint": stage_fingerprint(sft, made, source)})
    for arm, fits in ((Arm("dpo", 0.5, 1), True), (Arm("ppo", math.inf, 1), True), (Arm("ppo", math.inf, 2), False)):
        run, recipe = shop.run_dir(arm), load_recipe(Recipe, TINY, shop.arm_overrides(arm))
        adopt_reference(source, run)
        run.check(recipe.name)
        assert (run.require("sft")["fingerprint"] == stage_fingerprint(sft, recipe, run)) == fits
    copied = shop.run_dir(Arm("dpo", 0.5, 1))
    atomic.write_text(copied.stage("sft") / "model" / "weights", "own")
    adopt_reference(source, copied)  # has it already
    assert (copied.stage("sft") / "model" / "weights").read_text() == "own"
