"""Every leak is found in a bundle made that way, by the attack meant for it; a sound bundle passes all attacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit.worlds import facts_of, make_world, sound
from private_rlhf.audit.files import texts_in_files
from private_rlhf.audit.released import (
    column_order,
    copies,
    extra_columns,
    file_of_row,
    private_label,
    public_signs,
    row_order,
    several_releases,
    sorted_rows,
)
from private_rlhf.audit.seeds import ids, recomputation
from private_rlhf.audit.suite import ATTACKS, SPECS, Attack, run_attacks
from support.leaky import LEAKS, Generator, the_reference_way

CASES = [(leak, attack, made) for leak, attack, generators in LEAKS.values() for made in generators]
NEEDED: dict[str, tuple[Attack, ...]] = {
    "column order": (column_order,),
    "recomputation": (recomputation,),
    "texts in files": (texts_in_files,),
    "several releases": (several_releases,),
    "ids": (ids,),
    "statistics": (),
    "copies": (copies,),
    "extra columns": (extra_columns,),
    "row order": (row_order, sorted_rows),
    "files and sizes": (file_of_row,),
    "digests": (),
    "private label": (private_label,),
    "public signs": (public_signs,),
}


@pytest.mark.parametrize(("leak", "attack", "made"), CASES, ids=[case[2].__name__ for case in CASES])
def test_the_leak_is_found(tmp_path: Path, leak: int, attack: str, made: Generator) -> None:
    world = make_world(600, copies=2 if attack == "copies" else 1)
    folder = made(world, tmp_path / "bundle")
    outcome = run_attacks([folder], world.truth(facts_of(folder)), attacks=NEEDED[attack])
    assert outcome.leak
    accused = {verdict.attack for verdict in outcome.attacks if verdict.leak} | {row.attack for row in outcome.findings}
    assert attack in accused
    assert leak in SPECS[attack].leaks or made.__name__ == "raw_copy"
    assert outcome.as_dict()["verdict"] == "leak"


def test_the_reference_way_fails_in_three_ways(tmp_path: Path) -> None:
    """Its flip count says no more than its columns do, and 0.1 + 0.5 beside 2 takes more events to show."""
    world = make_world(500, seed=6)
    outcome = run_attacks([the_reference_way(world, tmp_path / "bundle")], world.truth())
    accused = {verdict.attack for verdict in outcome.attacks if verdict.leak} | {row.attack for row in outcome.findings}
    assert {"column order", "recomputation", "ids"} <= accused


def test_a_sound_bundle_passes_every_attack(tmp_path: Path) -> None:
    """1 in 1,000 sound bundles would be accused; this one is the same in every run."""
    world = make_world(600)
    raw = world.write_raw(tmp_path / "bundle-raw.jsonl")
    folder = sound(world, tmp_path / "bundle", 0.5)
    outcome = run_attacks([folder], world.truth(facts_of(folder)))
    assert raw.is_file()
    assert not outcome.leak, [verdict for verdict in outcome.attacks if verdict.leak]
    assert outcome.events == 600
    assert {"private label", "column order", "recomputation", "row order"} <= {row.attack for row in outcome.attacks}


def test_every_attack_says_what_to_do() -> None:
    assert len(ATTACKS) == 14
    assert all(spec.remedy and spec.leaks for spec in SPECS.values())
    assert set().union(*(spec.leaks for spec in SPECS.values())) == set(range(1, 9))
