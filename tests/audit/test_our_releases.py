"""No attack beats alpha on this project's releases: canaries at several epsilons, in any order, from a copied key."""

from __future__ import annotations

import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from audit.worlds import make_world, write_jsonl
from private_rlhf.audit.canaries import Truth, plant, read_truth, truth_path
from private_rlhf.audit.released import column_order, copies, private_label, several_releases
from private_rlhf.audit.suite import ATTACKS, Attack, run_attacks
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.data.layout import read_preferences
from private_rlhf.privacy.keys import keygen
from support.other_machines import copy_key, move_to
from support.pipeline_runs import clean_environment

EPSILONS = (0.1, 0.5, 1.0, 2.0)


def command(data: Path, output: Path, epsilon: float, key: Path) -> list[str]:
    """The arguments of `private-rlhf` for a release."""
    given = {"--data": data, "--output": output, "--epsilon": epsilon, "--key": key}
    return ["privatize", *(str(part) for option in given.items() for part in option)]


def kill_a_release(arguments: list[str]) -> None:
    """Starts the release in a process of its own and kills it on the way (or lets it finish, if it is that quick)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "private_rlhf.cli", *arguments],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(timeout=random.Random().uniform(2, 8))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def release_canaries(folder: Path, count: int, killed: bool = False) -> tuple[list[Path], Truth]:
    """`count` canaries planted into as many rows, released at every epsilon in a random order, one from a copied key,
    the third after a kill.
    """
    folder.mkdir()
    make_world(count, seed=5).write_raw(folder / "source.jsonl")
    key = keygen(folder / "owner.key")
    truth = truth_path(key)
    assert plant(str(folder / "source.jsonl"), folder / "planted.jsonl", truth, count) == count
    released = []
    for epsilon in random.Random(58).sample(EPSILONS, len(EPSILONS)):
        used = key
        if epsilon == 0.5:
            used = folder / "copied" / "copy.key"
            used.parent.mkdir()
            copy_key(key, used)
        move_to(used.parent)
        released.append(folder / f"release-{epsilon}")
        if killed and len(released) == 3:
            kill_a_release(command(folder / "planted.jsonl", released[-1], epsilon, used))
        assert main(command(folder / "planted.jsonl", released[-1], epsilon, used)) == 0
    return released, read_truth(truth)


def judge(folder: Path, count: int, attacks: tuple[Attack, ...] = ATTACKS, killed: bool = False) -> None:
    released, truth = release_canaries(folder / "home", count, killed)
    outcome = run_attacks(released, truth, attacks=attacks)
    assert outcome.events == count
    assert not outcome.leak, [verdict for verdict in outcome.attacks if verdict.leak] + outcome.findings
    assert outcome.alpha == pytest.approx(0.8808, abs=1e-4)
    names = {verdict.attack for verdict in outcome.attacks if verdict.n}
    assert {"private label", "column order", "several releases"} <= names
    best = next(row for row in outcome.attacks if row.attack == "private label" and "2.0" in row.variant)
    assert best.rate == pytest.approx(outcome.alpha, abs=5 * (0.105 / count) ** 0.5)


def test_no_attack_beats_alpha_on_a_small_set(tmp_path: Path) -> None:
    """All attacks; 1 sound run in 1,000 would fail."""
    judge(tmp_path, 1500)


@pytest.mark.thorough
def test_no_attack_on_the_labels_beats_alpha(tmp_path: Path) -> None:
    """20,000 canaries, the attacks on the released labels; 1 sound run in 1,000 would fail."""
    judge(tmp_path, 20_000, (private_label, column_order, several_releases))


@pytest.mark.slow
def test_no_attack_beats_alpha_on_200_000_canaries(tmp_path: Path) -> None:
    judge(tmp_path, 200_000, killed=True)


def test_two_labelers_of_one_pair_share_no_flip(tmp_path: Path) -> None:
    """Copies of a pair with a labeler each: z1 z2 = y1 y2 with probability alpha^2 + (1 - alpha)^2."""
    world = make_world(1000, seed=12, copies=2)
    rows = []
    for number in range(len(world.pairs)):
        prompt, chosen, rejected = world.preferred(number)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "who": f"labeler {number % 2}"})
    key, release = keygen(tmp_path / "owner.key"), tmp_path / "release"
    arguments = command(write_jsonl(tmp_path / "raw.jsonl", rows), release, 1.0, key)
    assert main([*arguments, "--labeler-column", "who"]) == 0
    outcome = run_attacks([release], world.truth(), attacks=(copies,))
    (verdict,) = outcome.attacks
    assert not outcome.leak
    assert verdict.n == 1000
    assert verdict.rate == pytest.approx(0.6068, abs=0.08)  # 5 standard errors


def test_planting_replaces_the_chosen_labels_alone(tmp_path: Path) -> None:
    world = make_world(300, seed=9)
    source = world.write_raw(tmp_path / "source.jsonl")
    truth_file, planted = tmp_path / "truth.jsonl", tmp_path / "planted.jsonl"
    assert plant(str(source), planted, truth_file, 100, coin=lambda: -1) == 100
    truth = read_truth(truth_file)
    assert truth.coins
    assert set(truth.labels.values()) == {(-1,)}  # the coin decides, not the data
    assert len(truth.labels) == 100
    before, after = list(read_preferences(source)), list(read_preferences(planted))
    assert [{row.prompt, row.chosen, row.rejected} for row in before] == [
        {row.prompt, row.chosen, row.rejected} for row in after
    ]
    changed = sum(one.chosen != two.chosen for one, two in zip(before, after, strict=True))
    assert 25 <= changed <= 75  # 100 coins; outside with probability below 1e-6
    for path in (truth_file, planted):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_truth(truth_file, 10).labels) == 10


def test_planting_leaves_pairs_with_copies_alone(tmp_path: Path) -> None:
    world = make_world(50, copies=2)
    source = world.write_raw(tmp_path / "source.jsonl")
    with pytest.raises(UserError, match="has 0 pairs that occur once"):
        plant(str(source), tmp_path / "planted.jsonl", tmp_path / "truth.jsonl", 1)
    assert not (tmp_path / "planted.jsonl").exists()


def test_planting_never_overwrites(tmp_path: Path) -> None:
    source = make_world(5).write_raw(tmp_path / "source.jsonl")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        plant(str(source), source, tmp_path / "truth.jsonl", 1)
