"""One of two processes that learn by PPO under bf16 autocast, with whole and with split weights: says how far π is from
π_ref in the first two iterations.

Usage: numeric_context_worker FOLDER RANK
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from private_rlhf.core.world import World
from private_rlhf.lm.distributed import make_accelerator

from support.ppo_problem import make_problem
from support.sharded_ppo_worker import SETTINGS, with_references
from support.two_processes import FSDP, gloo_pair


def work(rank: int, lora: bool) -> dict[str, Any]:
    """The largest |log π − log π_ref| of a token before and after one update, and the dtypes that came out."""
    problem = with_references(make_problem())
    trainer = problem.trainer(lora, accelerator=lambda: make_accelerator(World(rank, 2)), **SETTINGS)
    seen = set()
    for name, module in (
        ("policy", trainer.bare.get_base_model().get_output_embeddings()),
        ("value", trainer.bare.value_head),
    ):
        module.register_forward_hook(lambda _, __, output, name=name: seen.add(f"{name} {output.dtype}"))
    first, _ = trainer.collect(0)
    trainer.update(first, 0)
    second, _ = trainer.collect(1)
    ratios = [float(each.log_ratio.abs().max()) for each in (first, second)]
    return {"first": ratios[0], "second": ratios[1], "contexts": sorted(seen)}


def main(folder: Path, rank: int) -> None:
    with gloo_pair(folder, rank, ACCELERATE_MIXED_PRECISION="bf16"):
        said = {f"ddp {name}": work(rank, name == "lora") for name in ("lora", "full")}
        os.environ.update(FSDP)
        said |= {f"fsdp2 {name}": work(rank, name == "lora") for name in ("lora", "full")}
        (folder / f"kl-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
