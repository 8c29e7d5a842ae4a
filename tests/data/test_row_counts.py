"""Fewer rows than a batch are found before anything runs, wherever the rows are known; and never where they suffice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World, check_rows
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import import_bundle
from private_rlhf.embedded import task
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import RawPair
from private_rlhf.recipe import Recipe
from private_rlhf.stages import privatize
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import stage_of
from private_rlhf.stages.reward import split
from support.plain_release import release_pairs
from support.recipes import recipe_of


def rows_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(count)]


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(tmp_path: Path, aligner: str = "ppo", reward: str = "head", batch: int = 16, **data: Any) -> Recipe:
    size = {"batch_size": batch}
    key = {"epsilon": 1.0, "key_file": str(tmp_path / "owner.key")}
    sections = {"sft": size, "dpo": size, "reward": size | {"mode": reward}}
    return recipe_of(aligner=aligner, data={"preferences": "embedded", **data}, privatize=key, **sections)


def refused(given: Recipe, run: RunDir, *stages: str) -> str | None:
    try:
        for name in stages[stages[0] == "privatize" :]:
            stage_of(name).check_rows(given, run, "privatize" in stages)
    except UserError as error:
        return str(error)
    return None


def few(count: int, section: str, batch: int = 16) -> str:
    return (
        f"there are {count} texts or pairs to learn from, fewer than {section}.batch_size {batch}: lower it, or bring "
        "more data"
    )


@pytest.mark.parametrize("form", ["file", "release"])
def test_one_prompt_is_refused_before_anything_runs(tmp_path: Path, form: str) -> None:
    """The reward's folds are by prompt; a second prompt, wherever it stands, is enough."""
    for prompts, message in ((["one"] * 40, "all pairs have one prompt"), ([*["one"] * 40, "two"], None)):
        home = tmp_path / str(len(prompts))
        home.mkdir()
        source = home / "raw.jsonl"
        rows = ({"prompt": text, "chosen": f"yes {i}", "rejected": f"{len(prompts)}"} for i, text in enumerate(prompts))
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if form == "release":
            privatize_source(Request(str(source), home / "out", 1.0, keygen(home / "k")))
            source = home / "out"
        given = recipe(home, preferences=str(source))
        line = refused(given, RunDir(home / "run"), "privatize", "reward")
        assert (line is None) if message is None else (line is not None and line.startswith(message))


def test_the_line() -> None:
    check_rows(8, "sft", 8)
    with pytest.raises(UserError, match=few(5, "sft", 8)):
        check_rows(5, "sft", 8)


def test_embedded_data(tmp_path: Path) -> None:
    run, shown = RunDir(tmp_path / "run"), len(task.load_demonstrations())
    assert refused(recipe(tmp_path, batch=shown), run, "privatize", "sft") is None
    assert refused(recipe(tmp_path, batch=shown + 1), run, "sft") == few(shown, "sft", shown + 1)
    for limit, said in ((15, few(15, "dpo")), (16, None)):
        given = recipe(tmp_path, "dpo", limit=limit)
        assert refused(given, run, "privatize", "dpo") == said
    for limit, said in ((17, few(15, "reward")), (18, None)):  # a tenth is held out
        assert refused(recipe(tmp_path, reward="lora", limit=limit), run, "privatize", "sft", "reward") == said
    assert refused(recipe(tmp_path, limit=3), run, "privatize", "reward", "ppo") is None  # a head has no batches


def test_demonstrations_of_a_file(tmp_path: Path) -> None:
    for count, said in ((15, few(15, "sft")), (16, None)):
        rows = [{"prompt": f"Say {i}.", "response": "ok"} for i in range(count)]
        given = recipe(tmp_path, demonstrations=write(tmp_path / "shown.jsonl", rows))
        assert refused(given, RunDir(tmp_path / "run"), "sft") == said


@pytest.mark.parametrize("folder", [False, True])
def test_a_file_of_preferences_and_a_folder(tmp_path: Path, folder: bool) -> None:
    """Of one file a tenth is held out; a folder brings its evaluation rows, which nobody learns from."""
    where = tmp_path / "prefs"
    where.mkdir()
    source = str(where) if folder else str(where / "train.jsonl")
    write(where / "eval.jsonl", rows_of(50))
    for count, said in ((16, None if folder else few(14, "dpo")), (15, few(15 if folder else 13, "dpo")), (18, None)):
        write(where / "train.jsonl", [*rows_of(count), *rows_of(5)])  # five are written twice, and count once
        given = recipe(tmp_path, "dpo", preferences=source)
        assert refused(given, RunDir(tmp_path / "run"), "privatize", "dpo") == said


def test_demonstrations_of_the_release_count_its_pairs(tmp_path: Path) -> None:
    source = write(tmp_path / "prefs.jsonl", rows_of(12))
    for name, said in (("release", few(11, "sft")), ("release_preferred", few(11, "sft")), ("release_both", None)):
        given = recipe(tmp_path, preferences=source, demonstrations=name)
        assert refused(given, RunDir(tmp_path / "run"), "privatize", "sft") == said


def test_what_cannot_be_known_is_left_to_the_stage(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert refused(recipe(tmp_path, "dpo", preferences="owner/dataset"), run, "privatize", "dpo") is None
    copies = write(tmp_path / "copies.jsonl", rows_of(3) * 60)
    assert refused(recipe(tmp_path, "dpo", preferences=copies), run, "privatize", "dpo") is None


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("count", [13, 17, 18, 19, 30, 400])
def test_the_count_before_is_the_count_after(tmp_path: Path, count: int) -> None:
    """Of raw preferences and of a bundle: what is said before the privatize stage is what the stages find after it."""
    keygen(tmp_path / "owner.key")
    raw, bundle = write(tmp_path / "prefs.jsonl", rows_of(count)), tmp_path / "bundle"
    pairs = [RawPair(f"Say {i}.", f"yes {i}", f"no {i}", None) for i in range(count)]
    release_pairs(pairs, bundle, RandomizedResponse(1.0), load_key(tmp_path / "owner.key"))
    run = RunDir(tmp_path / "run")
    for source in (raw, str(bundle)):
        for limit in (None, 17):
            given = recipe(tmp_path, "dpo", "full", preferences=source, limit=limit)
            before = [refused(given, run, "privatize", stage) for stage in ("sft", "reward", "dpo")]
            context = StageContext(given, run, World(rank=0, size=1), "privatize")
            shutil.rmtree(context.folder, ignore_errors=True)
            if source == str(bundle):
                import_bundle(given.data, given.privatize, given.evaluation_labels, context.folder)
            else:
                privatize.run(context)
            ids = [row.record_id for row in read_release(run.released / "release")]
            learnt = {"sft": len(ids), "reward": len(split(ids, 0.1, 0)[0]), "dpo": len(ids)}
            after = [few(rows, name) if rows < 16 else None for name, rows in learnt.items()]
            assert before == after == [refused(given, run, stage) for stage in learnt]
