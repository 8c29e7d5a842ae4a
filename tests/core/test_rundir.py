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


def test_an_empty_or_absent_folder_may_become_a_run_directory(tmp_path: Path) -> None:
    """What else is there is refused: `cli/bad_inputs`."""
    RunDir(tmp_path).check("one")
    RunDir(tmp_path / "absent").check("one")
    assert not (tmp_path / "absent").exists()  # check looks, claim makes


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


def test_the_labels_of_a_run_are_those_of_its_recipe(tmp_path: Path) -> None:
    """A directory in which a recipe asked, and then reads a file, has both; the reward would learn from the former."""
    run = RunDir(tmp_path)
    for online, name in ((None, "privatize"), ({}, "online"), (None, "privatize")):
        claim(run, recipe(online=online, data={"public_labels": True}))
        (run.stage(name) / "release").mkdir(parents=True, exist_ok=True)
        assert run.released == run.stage(name)


def test_fingerprints_ignore_key_order_alone() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_peak_memory_is_in_mebibytes() -> None:
    assert 5 < peak_rss_mb() < 1e6
