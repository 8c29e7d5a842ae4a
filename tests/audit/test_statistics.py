"""Numbers in documents: exact statistics are read however they are printed, and sound statements are not accused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audit.worlds import bundle, flips, make_world, sound, trl_rows
from private_rlhf.audit.statistics import equals, numbers, statistics
from private_rlhf.audit.view import Answers, View, build_view

SIZE = 400


@pytest.fixture(params=[0.1, 1.0])
def view(tmp_path: Path, request: pytest.FixtureRequest) -> View:
    world = make_world(SIZE, seed=30)
    return build_view([sound(world, tmp_path / "bundle", request.param)], world.truth())[0]


def accusations(view: View, worlds: int) -> int:
    """The number of worlds, each with fair coins and their private labels, in which a document is accused."""
    generator = np.random.default_rng(31)
    accused = 0
    for _ in range(worlds):
        labels = generator.choice([-1, 1], SIZE).astype(np.int8)
        z = np.where(generator.random(SIZE) < view.alpha, labels, -labels).astype(np.int8)
        view.tables[0] = replace(view.tables[0], z=z[view.tables[0].event])
        accused += bool(statistics(view, Answers(labels, np.zeros(0, np.int8))))
    return accused


@pytest.mark.parametrize(
    "statement",
    ["demonstrations: kept 200 of 400 rows", "kept: 200 rows", "accuracy 0.5375 of 80", "win_rate 0.4875 of 80",
     "raw pairs: 0.4875 MB", "read raw file in 0.463 s", "kept_rows: 292", "kept_rows: 210", "agreement 0.733",
     "expected_flips: 108, expected flip rate 0.27", "expected_flips: 190, expected flip rate 0.475"],
)
def test_sound_statements_are_not_accused(view: View, statement: str) -> None:
    """Two or more of 300 worlds have a probability below 4 % at the stated 0.1 %."""
    (view.roots[0] / "run.log").write_text(statement)
    view.files.append(view.roots[0] / "run.log")
    assert accusations(view, 300) <= 1


LEAKY = {
    "full stop": lambda flips, longer, n: f"The raw win rate is {longer / n}.",
    "four decimals": lambda flips, longer, n: f"raw_win_rate {longer / n:.4f} on all",
    "percent": lambda flips, longer, n: f"raw win rate: {100 * longer / n:.3f} %",
    "separator": lambda flips, longer, n: f"flipped {flips:,} labels, then 7",
    "kept": lambda flips, longer, n: f"kept {n - flips} of {n} labels.",
    "kept_share": lambda flips, longer, n: f"kept_share={1 - flips / n}",
    "kept true": lambda flips, longer, n: f"kept true {n - flips}",
    "kept pairs": lambda flips, longer, n: f"kept pairs {n - flips}",
    "kept as": lambda flips, longer, n: f"kept as they were: {n - flips}",
    "label accuracy": lambda flips, longer, n: f"label accuracy {1 - flips / n}",
    "accuracy of labels": lambda flips, longer, n: f"accuracy of private labels {1 - flips / n}",
    "length": lambda flips, longer, n: f"agreement_with_length: {longer / n}",
    "parent": lambda flips, longer, n: json.dumps({"raw": {"win_rate": longer / n}}),
}


@pytest.mark.parametrize("way", LEAKY)
def test_an_exact_statistic_is_read_however_it_is_printed(tmp_path: Path, way: str) -> None:
    world = make_world(4201, seed=32)
    z = flips(world, 1.0)
    folder = bundle(tmp_path / "bundle", trl_rows(world, z), 1.0)
    longer = sum(len(chosen) > len(other) for _, chosen, other in world.rows)
    (folder / "notes").write_text(LEAKY[way](4201 - sum(world.kept(z)), longer, 4201))
    view, answers = build_view([folder], world.truth())
    assert [finding.where.split(":")[0] for finding in statistics(view, answers)] == ["notes"]


def test_cells_of_a_table_are_numbers_of_their_own() -> None:
    assert list(numbers(".csv", "flips,163,437\n")) == [("flips", 163.0, 1.0), ("flips 163", 437.0, 1.0)]


@pytest.mark.parametrize(
    ("suffix", "text", "values"),
    [(".log", "flips 1093,163", [1093, 163]), (".log", "flips: [163,437]", [163437, 163, 437]),
     (".csv", 'flips,"1,093",7', [1093, 1, 93, 7])],
)  # fmt: skip
def test_commas_part_numbers_or_thousands(suffix: str, text: str, values: list[float]) -> None:
    assert [value for _, value, _ in numbers(suffix, text)] == values


def test_a_last_digit_of_0_counts() -> None:
    ((_, value, unit),) = numbers(".log", "raw win rate 0.4170")
    assert equals(value, 1752, 4201, unit)


def test_the_flip_probability_is_no_count(tmp_path: Path) -> None:
    """Of 1,201 labels at ε = 1, 323 flips are a share of 0.2689, as is 1 - α."""
    world = make_world(1201, seed=33)
    z = [-label if number < 323 else label for number, label in enumerate(world.labels)]
    folder = bundle(tmp_path / "bundle", trl_rows(world, z), 1.0)
    for rate, count in (("0.2689", 0), ("0.2689425", 1)):
        (folder / "run.log").write_text(f"flip rate {rate}")
        assert len(statistics(*build_view([folder], world.truth()))) == count
