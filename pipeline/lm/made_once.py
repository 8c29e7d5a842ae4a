"""Checkpoints that many runs share, such as a converted base model: made by one process, whole when they are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from private_rlhf.core import atomic
from private_rlhf.core.errors import RunStopped
from private_rlhf.core.world import broadcast, join_world
from safetensors import SafetensorError, safe_open

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The checkpoint folder `target`; `make` fills a new folder where `target` is not whole.

    Every process of a world calls it. The main one makes, since `save_pretrained` writes nothing on the others, which
    wait. Worlds that start at once take turns by a lock beside `target`. A whole folder is never replaced: another run
    may be reading it.

    Raises:
        RunStopped: `make` left a folder that is not whole.
        Exception: any that `make` raises, on every process.
    """
    world, problem = join_world(), None
    if world.main:
        try:
            _make_in_turn(target, make)
        except Exception as error:  # the others would wait for this process
            problem = error
    problem = broadcast(problem, world)
    if problem is not None:
        raise problem
    return target


def _make_in_turn(target: Path, make: Callable[[Path], None]) -> None:
    if is_whole(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if is_whole(target):  # another run made it meanwhile
            return
        atomic.sweep_temporaries(target.parent)
        with atomic.new_folder(target) as temporary:
            make(temporary)
            if not is_whole(temporary):
                names = sorted(path.name for path in temporary.iterdir())
                raise RunStopped(f"{target} could not be made whole: {names}")


def is_whole(folder: Path) -> bool:
    """True if configuration, weights, tokenizer and chat template of a checkpoint can be read.

    Reads the header of the weights, which states the length of their file.
    """
    try:
        for name in JSON_FILES:
            json.loads((folder / name).read_bytes())
        with safe_open(folder / WEIGHTS, "np"):
            return (folder / TEMPLATE).stat().st_size > 0
    except (OSError, ValueError, SafetensorError):
        return False
