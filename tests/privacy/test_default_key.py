"""Where a recipe's key is: one for the user by default, and never inside a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.data.raw_source import RawSource
from private_rlhf.privacy.keys import keygen
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from support.other_machines import move_to

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"


def recipe(key_file: Path | None = None) -> Recipe:
    return load_recipe(Recipe, TINY, [f"privatize.key_file={'null' if key_file is None else key_file}"])


def raw_source(recipe: Recipe, run: Path) -> RawSource:
    return RawSource(recipe.data, recipe.privatize, run)


def test_the_default_key_is_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_to(tmp_path)
    found = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.add(raw_source(recipe(), tmp_path / "run").owner_key().path)
        assert list(Path.cwd().iterdir()) == []
    assert found == {tmp_path / "user" / "private-rlhf" / "owner.key"}


@pytest.mark.parametrize("command", [["keygen"], ["ledger", "show"]])
def test_a_user_without_a_home_is_told_what_to_set(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container of an id that no passwd entry names."""
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("private-rlhf: HOME or XDG_STATE_HOME must name a folder for your keys")


def test_a_folder_s_own_default_of_before_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keygen(tmp_path / "keys" / "private-rlhf.key")
    with pytest.raises(UserError, match="was the default key of this folder, and another key would draw its labels"):
        raw_source(recipe(), tmp_path / "run").check_input("private")
    raw_source(recipe(Path("keys/private-rlhf.key")), tmp_path / "run").check_input("private")


@pytest.mark.parametrize("place", ["inside", "link inside", "link outside", "state through a linked folder"])
def test_no_key_or_state_in_the_run_directory_through_links_either(tmp_path: Path, place: str) -> None:
    run, keys = tmp_path / "run", tmp_path / "keys"
    run.mkdir()
    used = {"inside": run, "link outside": run / "own"}.get(place, keys) / "k.key"
    keygen(used)
    named = used
    if place == "link inside":
        (run / "k.key").symlink_to(used)
        named = run / "k.key"
    elif place == "link outside":
        (tmp_path / "k.key").symlink_to(used)
        named = tmp_path / "k.key"
    elif place == "state through a linked folder":
        (tmp_path / "linked").symlink_to(run)
        keygen(run / "other.key")
        named = tmp_path / "linked" / "other.key"
    with pytest.raises(UserError, match="is inside the run directory: keep the key elsewhere"):
        raw_source(recipe(named), run).check_input("private")
