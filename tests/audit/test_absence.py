"""Canaries that a release leaves out: by their labels, which is a leak, or by anything else, which is none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from audit.worlds import World, make_world, sound
from private_rlhf.audit.canaries import frames_of, plant, read_truth, write_truth
from private_rlhf.audit.suite import NOT_EXAMINED, Outcome, run_attacks
from private_rlhf.cli import main
from private_rlhf.privacy.records import canonical_record


def without(world: World, drop: Callable[[str, str, str], bool], folder: Path) -> Outcome:
    """The attacks on a sound release of the rows (prompt, preferred, other) that are not dropped."""
    kept = [number for number in range(len(world.pairs)) if not drop(*world.preferred(number))]
    rest = World([world.pairs[number] for number in kept], [world.labels[number] for number in kept])
    return run_attacks([sound(rest, folder)], world.truth(), attacks=())


def is_response_a(prompt: str, chosen: str, other: str) -> bool:
    record = canonical_record(prompt, chosen, other)
    assert record is not None
    return record.label == 1


COIN = random.Random(4)
RULES: dict[str, Callable[[str, str, str], bool]] = {
    "the lower response": lambda prompt, chosen, other: chosen < other and COIN.random() < 0.1,
    "the lower response not": lambda prompt, chosen, other: chosen > other and COIN.random() < 0.1,
    "response_a": lambda *row: is_response_a(*row) and COIN.random() < 0.1,
    "the longer response": lambda prompt, chosen, other: len(chosen) > len(other) and COIN.random() < 0.1,
}


@pytest.mark.parametrize("rule", RULES)
def test_rows_dropped_by_their_labels_are_found(tmp_path: Path, rule: str) -> None:
    """A tenth of one label, some 40 of 800 rows, that is all of one side: p = 2^-40."""
    outcome = without(make_world(800, seed=6), RULES[rule], tmp_path / "bundle")
    found = [row for row in outcome.attacks if row.leak]
    assert {row.attack for row in found} == {"absence"}
    assert rule in min(found, key=lambda row: row.p_value).variant


def test_rows_dropped_by_their_texts_are_no_leak(tmp_path: Path) -> None:
    """Half of them; fixed seeds, and the false-alarm rate of the suite is 0.1 %."""
    outcome = without(make_world(800, seed=6), lambda prompt, *_: len(prompt) % 2 == 0, tmp_path / "bundle")
    rows = [row for row in outcome.attacks if row.attack == "absence"]
    assert len(rows) == 3
    assert not outcome.leak


def test_false_alarms_are_as_rare_as_the_p_value_says() -> None:
    """P(p <= 1/20) <= 1/20 for fair coins, in each of 400 worlds: at most 34 of them, or 1 time in 1,000."""
    from private_rlhf.audit.released import _verdicts

    small = 0
    for seed in range(400):
        truth = make_world(60, seed=seed).truth()
        small += next(_verdicts(Path("r"), list(truth.labels), truth)).p_value <= 0.05
    assert small <= 34


def test_nothing_missing_is_no_verdict(tmp_path: Path) -> None:
    outcome = without(make_world(100, seed=6), lambda *_: False, tmp_path / "bundle")
    assert not any(row.attack == "absence" for row in outcome.attacks)


def test_the_truth_file_keeps_the_frames_and_older_ones_have_none(tmp_path: Path) -> None:
    world = make_world(50, seed=7)
    world.write_raw(tmp_path / "raw.jsonl")
    plant(str(tmp_path / "raw.jsonl"), tmp_path / "planted.jsonl", tmp_path / "truth", 50)
    assert read_truth(tmp_path / "truth").frames == world.truth().frames
    lines = (tmp_path / "truth").read_text().splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    older = [json.dumps({"pair": row["pair"], "labels": row["labels"]}) for row in rows]
    (tmp_path / "truth").write_text("\n".join([lines[0], *older]) + "\n")
    assert set(read_truth(tmp_path / "truth").frames.values()) == {(0, 0)}


def test_frames_do_not_depend_on_the_order_of_the_responses() -> None:
    for prompt, a, b in make_world(20).pairs:
        assert frames_of(prompt, a, b) == frames_of(prompt, b, a)
        first, second = sorted((a, b))
        assert (frames_of(prompt, a, b)[0] == 1) == is_response_a(prompt, first, second)


def test_the_output_says_what_is_not_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = make_world(60)
    folder = sound(world, tmp_path / "bundle")
    write_truth(tmp_path / "truth", world.truth())
    main(["attack", str(folder), "--truth", str(tmp_path / "truth")])
    assert NOT_EXAMINED in capsys.readouterr().out
    main(["attack", str(folder), "--truth", str(tmp_path / "truth"), "--json"])
    assert json.loads(capsys.readouterr().out)["not_examined"] == NOT_EXAMINED
