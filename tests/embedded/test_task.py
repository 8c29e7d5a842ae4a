"""The embedded files (form, size, disjointness, no labels) and the label draws (a pure function, calibrated)."""

from __future__ import annotations

import math
import random
from pathlib import Path

import private_rlhf.embedded
import pyarrow.parquet as pq
import pytest
from private_rlhf.embedded import task
from private_rlhf.embedded.truth import true_reward
from scipy.stats import binomtest, chi2

FOLDER = Path(private_rlhf.embedded.__file__).parent
SCHEMAS = {
    "pairs.parquet": ["prompt", "response_a", "response_b"],
    "eval_pairs.parquet": ["prompt", "response_a", "response_b"],
    "demonstrations.parquet": ["prompt", "response"],
    "train_prompts.parquet": ["prompt"],
    "eval_prompts.parquet": ["prompt"],
}


@pytest.fixture(scope="module")
def train_pairs() -> list[task.PairRecord]:
    return task.load_pairs("train")


def test_files_hold_exactly_the_named_columns_and_no_label() -> None:
    assert {p.name: pq.read_schema(p).names for p in FOLDER.glob("*.parquet")} == SCHEMAS


def test_files_are_compressed_and_at_most_2_mb_together() -> None:
    files = list(FOLDER.glob("*.parquet"))
    assert sum(p.stat().st_size for p in files) <= 2_000_000
    for path in files:
        assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def test_counts(train_pairs: list[task.PairRecord]) -> None:
    assert 3500 <= len(train_pairs) <= 4500
    assert len(task.load_pairs("eval")) >= 500 - 10  # 510 drawn; pairs of equal answers are dropped
    assert len(task.load_demonstrations()) >= 250
    assert len(task.load_prompts("eval")) >= 240


def test_prompts_of_the_splits_are_disjoint() -> None:
    assert not {p.prompt for p in task.load_pairs("eval")} & {p.prompt for p in task.load_pairs("train")}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_rows_use_the_prompts_of_their_split(split: task.Split) -> None:
    loaded = task.load_prompts(split)
    assert len(set(loaded)) == len(loaded)
    assert {p.prompt for p in task.load_pairs(split)} == set(loaded)


def test_demonstrations_are_on_training_prompts_only() -> None:
    demonstrations = task.load_demonstrations()
    assert {d.prompt for d in demonstrations} <= set(task.load_prompts("train"))
    assert len(set(demonstrations)) == len(demonstrations)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_responses_of_a_pair_differ(split: task.Split) -> None:
    assert all(p.response_a != p.response_b for p in task.load_pairs(split))


def test_sides_carry_no_preference(train_pairs: list[task.PairRecord]) -> None:
    """a is the better response in half of the pairs: two-sided binomial test, false alarms at most 0.1 %."""
    margins = [true_reward("", p.response_a) - true_reward("", p.response_b) for p in train_pairs]
    better, worse = sum(m > 0 for m in margins), sum(m < 0 for m in margins)
    assert binomtest(better, better + worse).pvalue > 0.001


def test_most_answers_are_finished_and_the_truth_is_spread(train_pairs: list[task.PairRecord]) -> None:
    responses = [r for p in train_pairs for r in p[1:]]
    rewards = [true_reward("", r) for r in responses]
    assert sum(r.rstrip("\"'”)").endswith((".", "!", "?")) for r in responses) / len(responses) > 0.6
    assert 3.0 < sum(rewards) / len(rewards) < 5.5  # the middle of [0, 8]: something is left to align


def test_a_label_depends_on_its_pair_alone(train_pairs: list[task.PairRecord]) -> None:
    labels = dict(zip(train_pairs, task.draw_labels(train_pairs, seed=3), strict=True))
    shuffled = random.Random(0).sample(train_pairs, 500)
    assert task.draw_labels(shuffled, seed=3) == [labels[p] for p in shuffled]
    swapped = [(p.prompt, p.response_b, p.response_a) for p in shuffled]
    assert task.draw_labels(swapped, seed=3) == [-labels[p] for p in shuffled]


def test_seeds_give_different_draws(train_pairs: list[task.PairRecord]) -> None:
    first, second = (task.draw_labels(train_pairs, seed=s) for s in (0, 1))
    agreement = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    assert 0.5 < agreement < 0.95


def calibration_pvalue(pairs: list[task.PairRecord], labels: list[int], slope: float = 1.0) -> float:
    """Chi-square over ten bins of |margin|: how often the better response wins against sigmoid(slope * margin)."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for pair, label in zip(pairs, labels, strict=True):
        margin = true_reward("", pair.response_a) - true_reward("", pair.response_b)
        p = 1 / (1 + math.exp(-slope * margin))
        bins.setdefault(min(int(p * 10), 9), []).append(((label + 1) / 2 - p, p * (1 - p)))
    statistic = sum(sum(d for d, _ in rows) ** 2 / sum(v for _, v in rows) for rows in bins.values())
    return float(chi2.sf(statistic, df=len(bins)))


def test_labels_are_bradley_terry_draws(train_pairs: list[task.PairRecord]) -> None:
    """False alarms 0.1 % for a fresh seed (this one is fixed); the same test rejects a slope of 0.8 instead of 1."""
    labels = task.draw_labels(train_pairs, seed=11)
    assert calibration_pvalue(train_pairs, labels) > 0.001
    assert calibration_pvalue(train_pairs, labels, slope=0.8) < 0.001


def test_equal_rewards_are_a_fair_coin() -> None:
    """Two-sided binomial test on 4,000 pairs with margin 0, false alarms at most 0.1 %."""
    pairs = [("p", f"The box holds {i} red pens today.", f"The box holds {i} blue pens today.") for i in range(4000)]
    labels = task.draw_labels(pairs, seed=0)
    assert binomtest(labels.count(1), len(labels)).pvalue > 0.001
