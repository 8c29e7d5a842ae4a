"""Table 1 on people's pairs: its intervals on planted wins, when a share is stated, and that finished arms stay."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf_lab.benches import human_policies as bench
from private_rlhf_lab.benches.alignment_arms import Arm, Workshop

WHOLE, HALF = Arm("ppo", math.inf, 0), Arm("ppo", 0.5, 0)


def planted(share: float, generator: np.random.Generator, pairs: int = 1000) -> np.ndarray:
    """Wins (pairs,) of a policy that is right on that share."""
    return (generator.random(pairs) < share).astype(float)


def test_a_share_is_stated_only_of_a_gain_of_three_half_widths() -> None:
    """Half width of 1,000 pairs of sd .5: .031. A gain of .15 is enough, one of .06 is clear of 0 and not enough."""
    noise = np.random.default_rng(2).choice([-0.5, 0.5], size=1000)
    noise -= noise.mean()
    none, large = np.zeros((1, 1000)), (noise + 0.15)[None]
    assert bench.retained(large * 0.5, large) is not None
    for gain, stated in ((0.06, False), (0.09, False), (0.1, True)):
        assert (bench.retained(none, (noise + gain)[None]) is not None) == stated
    assert bench.over_pairs((noise + 0.06)[None]).ci_low > 0


def test_the_power_calculation_is_that_of_a_simulation() -> None:
    """8 in 10 of 2,000 simulated tests find the difference it names: .76 to .84 (a false alarm in 10,000)."""
    generator, pairs, share = np.random.default_rng(4), 1000, 0.1
    difference = bench.detectable(share, pairs)
    turns = generator.choice([-1.0, 0.0, 1.0], p=[share / 2 - difference / 2, 1 - share, share / 2 + difference / 2],
                             size=(2000, pairs))  # fmt: skip
    found = np.mean([bench.p_value(row[None]) < 0.05 for row in turns])
    assert 0.76 < found < 0.84


def test_rows_are_paired_and_the_common_seeds_compared() -> None:
    generator = np.random.default_rng(5)
    reference = {seed: planted(0.5, generator) for seed in (0, 1)}
    better = {seed: np.maximum(values, planted(0.5, generator)) for seed, values in reference.items()}
    found = {Arm("ppo", math.inf, seed): values for seed, values in better.items()} | {HALF: reference[0]}
    lengths = bench.Lengths(np.ones(1000, np.int8), np.arange(1000) < 200)
    whole, half = bench.summarise(found, reference, lengths)
    assert whole["gain"].value == pytest.approx(np.mean([better[seed] - reference[seed] for seed in (0, 1)]))
    assert whole["different"]
    assert not math.isnan(whole["gain_over_seeds"])
    assert (half["gain"].value, half["p"], half["different"]) == (0.0, 1.0, False)
    assert half["loss"].value == pytest.approx(-np.mean(better[0] - reference[0]))
    assert half["retained"] == pytest.approx((0.0, 0.0, 0.0))
    assert whole["like"].n == 200
    text = bench.table([whole, half], reference, bench.over_pairs(reference[0][None]), lengths, 3)
    assert "3 arms were not run." in text
    assert "| PPO, Eq. 9 reward | 0.5 | 1 |" in text


def test_a_policy_that_finds_longer_answers_likelier_gains_nothing_on_pairs_of_like_length() -> None:
    """Planted: it takes the longer answer, and a coin decides between two of like length."""
    sizes = [(30, 10)] * 60 + [(10, 30)] * 40 + [(11, 10), (10, 11)] * 50
    lengths = bench.Lengths.of([bench.ReleasedPair("p", "x" * one, "y" * other, "") for one, other in sizes])
    won = np.where(lengths.like, np.tile([1.0, 1.0, 0.0, 0.0], 50), 0.5 + 0.5 * lengths.longer)
    (entry,) = bench.summarise({WHOLE: won}, {0: np.full(200, 0.5)}, lengths)
    assert (lengths.like.sum(), entry["like"].n, entry["like"].value) == (100, 100, 0.0)
    assert entry["gain"].value == pytest.approx(0.05)
    assert entry["prefers_longer"] == pytest.approx(0.75)


def test_demonstrations_do_not_depend_on_labels(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    made = []
    for name, rows in (("one", [row] * 16), ("other", [row | {"chosen": "b", "rejected": "a"}] * 16)):
        source = tmp_path / name
        source.mkdir()
        for file in ("train", "eval"):
            (source / f"{file}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        bench.write_data(source, tmp_path / f"{name}-home", 16, False)
        made.append((tmp_path / f"{name}-home" / "demonstrations.jsonl").read_text())
    assert made[0] == made[1]
    with pytest.raises(UserError, match="fewer than --pairs 32"):
        bench.write_data(tmp_path / "one", tmp_path / "home", 32, False)


def test_a_home_is_of_one_set_of_settings(tmp_path: Path) -> None:
    """They may change while no arm is finished; the same ones go on."""
    for settings in ({"pairs": 16}, {"pairs": 32}, {"pairs": 32}):
        bench.claim(tmp_path / "home", settings)
    (tmp_path / "home" / "wins").mkdir()
    np.save(tmp_path / "home" / "wins" / "sft-seed0.npy", np.zeros(1))
    bench.claim(tmp_path / "home", {"pairs": 32})
    with pytest.raises(UserError, match="choose another --home"):
        bench.claim(tmp_path / "home", {"pairs": 16})
    (tmp_path / "home" / "settings.json").unlink()
    with pytest.raises(UserError, match="choose another --home"):
        bench.claim(tmp_path / "home", {"pairs": 32})


def test_another_recipe_is_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is a setting that all arms share, as their pairs are."""
    for name in ("train.jsonl", "eval.jsonl", "recipe.yaml"):
        (tmp_path / name).write_text("a: 1\n")
    options = Namespace(data=tmp_path, pairs=16, choose=False, set=[])
    monkeypatch.setattr(bench, "RECIPE", tmp_path / "recipe.yaml")
    before = bench.settings_of(options)
    assert bench.settings_of(options) == before
    (tmp_path / "recipe.yaml").write_text("a: 2\n")
    assert bench.settings_of(options) != before


def test_settings_are_chosen_on_pairs_that_nobody_learns_from_and_that_do_not_judge(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(48)]
    (tmp_path / "train.jsonl").write_text(bench.lines_of(rows[:32]))
    (tmp_path / "eval.jsonl").write_text(bench.lines_of(rows[32:]))
    for choose, judging in ((False, rows[32:]), (True, rows[16:32])):
        bench.write_data(tmp_path, tmp_path / "home", 16, choose)
        assert (tmp_path / "home" / "data" / "eval.jsonl").read_text() == bench.lines_of(judging)
        assert (tmp_path / "home" / "data" / "train.jsonl").read_text() == bench.lines_of(rows[:16])


def test_finished_arms_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is an arm that fails judged; with --report-only nothing is made at all."""
    (tmp_path / "wins").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "eval.jsonl").write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    np.save(tmp_path / "wins" / f"{WHOLE.name}.npy", np.ones(1))
    np.save(tmp_path / "wins" / "sft-seed0.npy", np.zeros(1))
    asked: list[Arm] = []

    def failing(self: Workshop, arms: list[Arm]) -> list[str]:
        asked.extend(arms)
        return [arm.name for arm in arms]

    monkeypatch.setattr(Workshop, "make", failing)
    workshop = bench.workshop_of(tmp_path, 16, 1, ())
    found, reference = bench.measure(workshop, [WHOLE, HALF], report_only=False)
    assert (list(found), list(reference), asked) == ([WHOLE], [0], [HALF])
    bench.measure(workshop, [WHOLE, HALF], report_only=True)
    assert asked == [HALF]
