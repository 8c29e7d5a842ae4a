"""The overlap guard on rows in memory, and texts for it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from private_rlhf.data.overlap import Digests, Overlap, Pair, Texts, overlaps
from private_rlhf.privacy.records import Text

_WORDS = [f"{a}{b}" for a in ("ba", "ke", "lo", "mu", "ri", "so", "ta") for b in ("n", "rd", "st", "mp", "ll", "ck")]


def look(pairs: Iterable[Pair], rows: Iterable[tuple[Text, Text | None]]) -> Overlap:
    """The overlap of the pairs with demonstrations (prompt, response) or prompts (prompt, None)."""
    digests = Digests()
    texts = Texts(digests)
    for row in rows:
        texts.add(*row)
    return overlaps([texts], pairs, digests)[0]


def prose(seed: str, words: int = 100) -> str:
    """Words that mean nothing."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(words))
