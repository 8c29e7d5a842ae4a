"""Real pairs of answers with labels of a known truth: what the recipe `hh_truth` reads.

    python -m private_rlhf_lab.benches.human_labels --output FOLDER [--seed 0]
    private-rlhf run --config configs/hh_truth.yaml --data FOLDER

`PRIVATE_RLHF_TEST_DATA` names the folder that holds hh_helpful/. Every pair of its train.jsonl and eval.jsonl is
written with the answer that `hh_truth` prefers, by Bradley–Terry with the seed, as chosen. Minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic

from private_rlhf_lab.benches.human_features import data_folder
from private_rlhf_lab.benches.text_lengths import read_pairs
from private_rlhf_lab.truths.human_truth import HumanTruth


def relabelled(rows: Sequence[dict[str, Any]], truth: HumanTruth, seed: int) -> list[dict[str, str]]:
    """The rows with chosen and rejected as r* has it; people's own choice does not enter: sides go by their text."""
    sides = [sorted((row["chosen"], row["rejected"])) for row in rows]
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    reward = truth.rewards(prompts, [text for each in sides for text in each])
    draws = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first = draws < torch.sigmoid(reward[0::2] - reward[1::2])
    return [
        {"prompt": row["prompt"], "chosen": each[not kept], "rejected": each[kept]}
        for row, each, kept in zip(rows, sides, first.tolist(), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    truth = HumanTruth()
    options.output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        rows = relabelled(read_pairs(data_folder(), split), truth, options.seed)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        atomic.write_text(options.output / f"{split}.jsonl", text)


if __name__ == "__main__":
    main()
