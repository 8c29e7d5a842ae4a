"""One of two gloo processes that make the same checkpoints in empty caches, and one that cannot be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.lm.base_models import base_checkpoint, is_whole, make_once
from private_rlhf.recipe import ModelConfig

from support.two_processes import gloo_pair


def refuse(folder: Path) -> None:
    raise UserError("there is no wheel")


def main(folder: Path, rank: int, rounds: int) -> None:
    """Writes which of the folders this process found whole, and the error it met."""
    with gloo_pair(folder, rank, MASTER_ADDR="localhost", MASTER_PORT="0"):
        places = [folder / f"cache {number}" for number in range(rounds)]
        made = [base_checkpoint(ModelConfig(source="tiny", cache_dir=place)) for place in places]
        whole = [is_whole(Path(each)) for each in made]
        try:
            make_once(folder / "never", refuse)
        except UserError as error:
            said = str(error)
        (folder / f"{rank}.json").write_text(json.dumps([whole, said]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), 5)
