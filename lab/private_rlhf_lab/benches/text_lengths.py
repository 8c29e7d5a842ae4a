"""How much of a preference file stages read: responses and pairs over a cap, or over the limit of a text.

    python -m private_rlhf_lab.benches.text_lengths FOLDER [--cap 64] [--limit 1024]

FOLDER holds train and eval files (.jsonl or .jsonl.gz) in any preference format. Its labels must be public:
the share of pairs whose longer response was chosen is printed. Tokens are SmolLM2's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.render import Renderer, plain_text
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.smollm2 import smollm2_checkpoint


def main() -> None:
    """Prints shares of what a cap would cut and of what the limit leaves out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cap", type=int, default=64, help="tokens of a response, end of turn included")
    parser.add_argument("--limit", type=int, default=1024, help="tokens of a prompt with its response")
    given = parser.parse_args()
    rows = [row for name in ("train", "eval") for row in read_pairs(given.folder, name)]
    with tempfile.TemporaryDirectory() as cache:
        renderer = Renderer(load_tokenizer(smollm2_checkpoint(Path(cache))), 10**9, 10**9, system_prompt="")
        prompts = np.array([len(renderer.prompt_ids(row["prompt"])) for row in rows])
        sizes = np.array([[len(renderer.response_ids(row[side])) for side in ("chosen", "rejected")] for row in rows])
    over, whole = sizes > given.cap, (prompts[:, None] + sizes).max(axis=1)
    cut = np.minimum(sizes, given.cap)
    print(f"{len(rows)} pairs; over {given.cap} tokens: {over.mean():.1%} of responses, ", end="")
    print(f"{over.any(axis=1).mean():.1%} of pairs")
    print(f"tokens of responses that a cap would keep: {cut.sum() / sizes.sum():.1%}")
    for name, each in (("uncut", sizes), ("cut", cut)):
        print(f"{name}: the chosen response is longer in {(each[:, 0] > each[:, 1]).mean():.3f} of pairs, ", end="")
        print(f"as long in {(each[:, 0] == each[:, 1]).mean():.3f}")
    print(f"longest prompt with a response: 99 % under {np.quantile(whole, 0.99):.0f}, all under {whole.max()} tokens")
    print(f"pairs that the limit of {given.limit} leaves out: {(whole > given.limit).mean():.2%}")


def read_pairs(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of `name`.jsonl, or of its gzip: prompt (a text, or the messages of a conversation), chosen and rejected
    (texts). Raises: UserError: neither is there, or its rows are no preferences."""
    plain = folder / f"{name}.jsonl"
    return [
        {"prompt": pair.prompt, "chosen": plain_text(pair.chosen), "rejected": plain_text(pair.rejected)}
        for pair in read_preferences(plain if plain.is_file() else Path(f"{plain}.gz"))
    ]


if __name__ == "__main__":
    main()
