"""What π_ref imitates: no true label, and a released one where the recipe says so alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.rundir import RunDir
from private_rlhf.data import inputs
from private_rlhf.data.release import read_release
from private_rlhf.data.render import Demonstration
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import RawPair
from private_rlhf.recipe import OF_RELEASE, Recipe
from support.plain_release import release_pairs
from support.recipes import recipe_of

PAIRS = 400


def recipe(**data: Any) -> Recipe:
    return recipe_of(data=data)


def released(tmp_path: Path, world: int, source: str) -> list[Demonstration]:
    """What `source` takes of pairs that were labelled in favour of "yes" (world 0) or of "no" (1), under one key;
    the raw file is nowhere."""
    run, file = RunDir(tmp_path / f"run {world}"), tmp_path / "owner.key"
    key = load_key(file if file.exists() else keygen(file))
    pairs = [RawPair(f"Say {i}.", *(f"yes {i}", f"no {i}")[:: 1 - 2 * world], None) for i in range(PAIRS)]
    folder = run.stage("privatize") / "release"
    if not folder.exists():
        release_pairs(pairs, folder, RandomizedResponse(1.0), key)
    return inputs.demonstrations(recipe(demonstrations=source).data, run.released)


def test_demonstrations_of_a_release(tmp_path: Path) -> None:
    """One response of each pair, both, or the one that the released label prefers; the first two know no label."""
    one, both, preferred = ([released(tmp_path, world, source) for world in (0, 1)] for source in OF_RELEASE)
    assert one[0] == one[1]
    assert both[0] == both[1]
    assert [len(rows[0]) for rows in (one, both, preferred)] == [PAIRS, 2 * PAIRS, PAIRS]
    assert both[0][::2] == one[0]
    assert all({row.response.split()[0] for row in both[0][i : i + 2]} == {"yes", "no"} for i in range(0, 800, 2))
    picked = sum(str(row.response).startswith("yes") for row in one[0])
    assert 150 < picked < 250  # five standard deviations of a fair coin; the texts are fixed, so it never flickers


def test_preferred_demonstrations_follow_the_released_label_and_not_the_true_one(tmp_path: Path) -> None:
    rows = [released(tmp_path, world, "release_preferred") for world in (0, 1)]
    for world, found in enumerate(rows):
        bundle = read_release(RunDir(tmp_path / f"run {world}").released / "release")
        assert found == [(pair.prompt, pair.chosen) for pair in bundle]
        kept = sum(str(row.response).startswith(("yes", "no")[world]) for row in found)
        assert 0.6 * PAIRS < kept < 0.86 * PAIRS  # .731 in expectation, ± 5.8 deviations
    same = sum(one == other for one, other in zip(*rows, strict=True))
    assert 0.4 * PAIRS < same < 0.68 * PAIRS  # .538: the label was not looked at


@pytest.mark.parametrize("kind", ["demonstrations", "prompts", "evaluation_prompts"])
def test_the_order_of_a_file_tells_nothing(tmp_path: Path, kind: Any) -> None:
    """Both answers of each pair, the preferred one first: what is read, and its digest, is the same the other way."""
    rows = [{"prompt": f"Say {i}.", "response": answer} for i in range(30) for answer in (f"yes {i}", f"no {i}")]
    file = tmp_path / "rows.jsonl"
    named = recipe(**{kind: str(file)})

    def read() -> Any:
        if kind == "demonstrations":
            return inputs.demonstrations(named.data, tmp_path / "run")
        return inputs.named_prompts(named.data, kind, tmp_path / "run")

    seen = []
    for order in (rows, rows[::-1]):
        file.write_text("".join(json.dumps(row) + "\n" for row in order))
        seen.append((read(), inputs.input_digest(kind, named.data)))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == (60 if kind == "demonstrations" else 30)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert inputs.input_digest(kind, named.data) != seen[0][1] or kind != "demonstrations"
