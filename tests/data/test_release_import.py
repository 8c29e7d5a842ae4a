"""A released bundle as preferences: which rows go where, what is kept of it, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.overlap import protected_pairs
from private_rlhf.data.release import Release, read_release
from private_rlhf.data.release_import import (
    divide,
    import_bundle,
    names_bundle,
    open_bundle,
)
from private_rlhf.privacy.keys import keygen
from private_rlhf.recipe import DataConfig, PrivatizeConfig
from support.recipes import recipe_of

pytestmark = pytest.mark.usefixtures("quick_disk")


Sections = tuple[DataConfig, PrivatizeConfig, str]


def released(folder: Path, rows: int, events: int = 1) -> Release:
    """A bundle of `rows` pairs with `events` labels each."""
    lines = [
        json.dumps({"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}", "event": f"{i}/{event}"})
        for i in range(rows)
        for event in range(events)
    ]
    (folder / "raw.jsonl").write_text("\n".join(lines) + "\n")
    key = keygen(folder / "owner.key")
    options = Options(event_column="event")
    privatize_source(Request(str(folder / "raw.jsonl"), folder / "bundle", 1.0, key, options=options))
    return read_release(folder / "bundle")


def recipe(source: Path, epsilon: Any = 1.0, labels: str = "private", public: bool = False) -> Sections:
    privatize = {"epsilon": epsilon, "key_file": "none.key"}
    privatize |= {"count_epsilon": 0.1} if labels == "laplace" else {}
    data = {"preferences": str(source), "public_labels": public}
    recipe = recipe_of(evaluation_labels=labels, privatize=privatize, data=data)
    return recipe.data, recipe.privatize, recipe.evaluation_labels


@pytest.mark.parametrize(("rows", "events", "limit"), [(2, 1, None), (57, 1, None), (57, 1, 20), (30, 3, None)])
def test_the_last_tenth_is_held_out_and_no_pair_is_on_both_sides(
    tmp_path: Path, rows: int, events: int, limit: int | None
) -> None:
    bundle = released(tmp_path, rows, events)
    taken, held_out = divide(bundle, limit, tmp_path / "train", tmp_path / "test")
    train, test = read_release(tmp_path / "train"), read_release(tmp_path / "test")
    assert (len(train), len(test)) == (taken, held_out)
    assert held_out >= max(1, round(0.1 * len(bundle)))
    if limit is None:
        assert train.rows + test.rows == bundle.rows
    else:
        assert train.rows == bundle.rows[:limit]
        assert test.rows == bundle.rows[-held_out:]
    assert not {row.record_id for row in train} & {row.record_id for row in test}
    assert train.manifest.guarantee == test.manifest.guarantee == bundle.manifest.guarantee
    assert train.manifest.format == bundle.manifest.format


def test_many_rows_keep_the_layout_of_ranges_of_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = released(tmp_path, 40)
    for module in ("release_import", "release"):
        monkeypatch.setattr(f"private_rlhf.data.{module}.ROWS_PER_SHARD", 10)
    divide(bundle, None, tmp_path / "train", tmp_path / "test")
    train = read_release(tmp_path / "train")
    assert len(list((tmp_path / "train").glob("part-*.parquet"))) == 1 << train.manifest.shard_bits == 4
    assert train.rows == bundle.rows[:36]


def test_taking_over_twice_leaves_the_same_and_nothing_else(tmp_path: Path) -> None:
    bundle = released(tmp_path, 20)
    assert names_bundle(str(bundle.directory))
    assert not names_bundle(str(tmp_path))
    given, folder = recipe(bundle.directory), tmp_path / "stage"
    report = import_bundle(*given, folder)
    assert (report["events"], report["evaluation_events"], report["ledger"], report["mark"]) == (18, 2, None, None)
    assert import_bundle(*given, folder) == report
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation", "release"]


def test_raw_data_may_have_a_manifest_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "_manifest").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert not names_bundle(str(tmp_path))


def test_what_is_refused(tmp_path: Path) -> None:
    source = released(tmp_path, 20).directory
    with pytest.raises(UserError, match=r"released at ε = 1 and the recipe says 2: set privatize\.epsilon=1"):
        open_bundle(*recipe(source, epsilon=2.0))
    with pytest.raises(UserError, match="holds no true labels for evaluation_labels: public; set evaluation_labels="):
        open_bundle(*recipe(source, labels="public", public=True))
    with pytest.raises(UserError, match="holds no true labels for evaluation_labels: laplace"):
        open_bundle(*recipe(source, labels="laplace"))
    with pytest.raises(UserError, match=r"the recipe says inf"):
        open_bundle(*recipe(source, epsilon=math.inf, public=True))
    (source / "_manifest").write_text("{}")
    with pytest.raises(UserError, match="schema version"):
        open_bundle(*recipe(source))


def test_the_overlap_guard_reads_a_bundle_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(tmp_path, 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(list(protected_pairs(DataConfig(preferences="~/bundle"), tmp_path, raw=True))) == 3


def test_one_pair_is_too_few(tmp_path: Path) -> None:
    bundle = released(tmp_path, 1, events=4)
    with pytest.raises(UserError, match="one pair is too few"):
        import_bundle(*recipe(bundle.directory), tmp_path / "stage")
    assert not list((tmp_path / "stage").glob("*/"))
