"""The run directory: who may use it, and when a stage counts as complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core import code
from private_rlhf.core.environment import LIBRARIES, environment, peak_rss_mb
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir, fingerprint
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.data_section import bare_name
from private_rlhf.recipe.load import load_recipe
from private_rlhf.recipe.recipe import shareable, shareable_yaml
from support.recipes import recipe_of


def recipe(name: str = "one", **sections: Any) -> Recipe:
    return recipe_of(name=name, **sections)


def claim(run: RunDir, recipe: Recipe) -> None:
    run.claim(recipe.name, shareable_yaml(recipe), environment())


def test_a_claim_saves_the_resolved_recipe_and_the_environment(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a" / "run")
    claim(run, recipe())
    assert load_recipe(Recipe, run.root / "recipe.yaml") == recipe()
    saved = json.loads((run.root / "environment.json").read_text())
    assert set(saved["versions"]) == set(LIBRARIES)
    assert saved["code_digest"] == code.digest_of(code.all_files())
    claim(run, recipe(seed=5))  # a changed recipe of the same name goes on in the same directory
    assert load_recipe(Recipe, run.root / "recipe.yaml").seed == 5


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("embedded", "embedded"),
        ("prefs.jsonl", "prefs.jsonl"),
        ("ward 3/prefs.jsonl", "prefs.jsonl"),
        ("ward/prefs.jsonl", "prefs.jsonl"),
        ("a/b/prefs", "prefs"),
        ("/home/vic/prefs", "prefs"),
        ("~/prefs", "prefs"),
        ("./prefs", "prefs"),
        ("../ward/prefs/", "prefs"),
        ("Anthropic/hh-rlhf", "Anthropic/hh-rlhf"),
    ],
)
def test_what_a_run_keeps_of_a_source_does_not_depend_on_what_is_there(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bare_name(source) == name
    if not Path(source).is_absolute() and "~" not in source and name == Path(source).name:
        Path(source).mkdir(parents=True)
        assert bare_name(source) == name


@pytest.mark.parametrize("cache", ["runs/cache", "elsewhere/cache", "/home/vic/cache"])
def test_what_a_run_keeps_of_the_cache_does_not_depend_on_what_is_there(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = recipe(model={"source": "tiny", "cache_dir": cache})
    before = shareable(given)
    (tmp_path / cache.removeprefix("/")).mkdir(parents=True)
    assert shareable(given) == before
    assert str(before.model.cache_dir) in ("runs/cache", "cache")


def test_a_folder_with_the_form_of_a_hub_id_keeps_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ward/prefs").mkdir(parents=True)
    assert bare_name("ward/prefs") == "prefs"


def test_another_recipe_s_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    claim(run, recipe())
    with pytest.raises(UserError, match="was made by recipe 'one', not 'two': choose another --run-dir"):
        claim(run, recipe("two"))
    assert load_recipe(Recipe, run.root / "recipe.yaml").name == "one"


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    full = tmp_path / "home"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for root in (full, file):
        with pytest.raises(UserError, match="is not a run directory and not empty: choose another --run-dir"):
            RunDir(root).check("one")
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    RunDir(empty).check("one")
    RunDir(tmp_path / "absent").check("one")
    assert not (tmp_path / "absent").exists()  # check looks, claim makes


def test_an_unwritable_directory_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        claim(RunDir(tmp_path / "file" / "run"), recipe())


def test_a_stage_is_complete_exactly_while_its_manifest_stands(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.manifest("sft") is None
    with pytest.raises(UserError, match=r"has not completed stage 'sft': run it first \(private-rlhf run --only sft\)"):
        run.require("sft")
    run.checkpoints("sft").mkdir(parents=True)
    (run.checkpoints("sft") / "state").write_text("x")
    run.complete("sft", {"stage": "sft"})
    assert run.require("sft") == {"stage": "sft"}
    assert not run.checkpoints("sft").exists()
    run.reopen("sft")
    assert run.manifest("sft") is None
    run.reopen("sft")


@pytest.mark.parametrize("content", [b'{"stage": "sf', b"", b"\xff\xfe"])
def test_a_damaged_manifest_is_named(content: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.stage("sft").mkdir()
    (run.stage("sft") / "manifest.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        run.manifest("sft")
    assert str(run.stage("sft") / "manifest.json") in str(caught.value)
    assert "delete the folder" in str(caught.value)


def test_fingerprints_ignore_key_order_alone() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_peak_memory_is_in_mebibytes() -> None:
    assert 5 < peak_rss_mb() < 1e6
