"""The import name of a copy of the checkout: a folder `private_rlhf` of links into it."""

from __future__ import annotations

from pathlib import Path


def link_package(checkout: Path, folder: Path) -> Path:
    """Make `folder/private_rlhf` name the checkout's two package folders; returns `folder`, for PYTHONPATH."""
    package = folder / "private_rlhf"
    package.mkdir(parents=True)
    for path in (*(checkout / "pipeline").iterdir(), checkout / "reward_models"):
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    return folder
