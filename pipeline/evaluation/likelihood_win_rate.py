"""The likelihood win rate (PPKL Table 1): how often a policy finds the chosen answer likelier per token.

A policy that merely drifts finds longer answers likelier than before, whatever its labels said, and people choose them
more often. On pairs of like length that is worth nothing; how often the longer one is found likelier reads no label.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.stats import Estimate, win_rate
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import Renderer, plain_text

LIKELIHOOD_TEXTS = 32
"""Texts per forward pass."""
LIKE_LENGTH = 0.2
"""|log ratio of characters| up to which two answers are of like length."""


def pair_rows(pairs: Sequence[ReleasedPair], renderer: Renderer) -> list[tuple[list[int], list[int]]]:
    """Token ids of chosen and rejected answers, interleaved: row 2i is chosen, 2i+1 rejected (`learnt_ids`)."""
    rows = []
    for pair in pairs:
        prompt = renderer.prompt_ids(pair.prompt)
        rows += [(prompt, renderer.learnt_ids(pair.chosen)), (prompt, renderer.learnt_ids(pair.rejected))]
    return rows


def likelihood_win_rate(logprobs: np.ndarray, noise: LabelNoise) -> Estimate:
    """Share of pairs whose chosen answer is likelier; interleaved (2n,) from `pair_rows`. Debiased for z."""
    return noise.debias(win_rate(logprobs[0::2], logprobs[1::2]))


def longer_answer_baseline(pairs: Sequence[ReleasedPair], noise: LabelNoise) -> Estimate:
    """Share of pairs whose chosen answer has more characters: the trivial rule to print beside any win rate.

    Equally long ones count half, as every tie does: no flip of the label changes that, so debiasing leaves it as it is.
    """
    longer = longer_answers(pairs)
    return noise.debias(win_rate(longer, np.zeros(len(pairs))))


def longer_answers(pairs: Sequence[ReleasedPair]) -> np.ndarray:
    """(n,) +1 where `chosen` has more characters, -1 where `rejected` has, 0 for equally many."""
    sizes = np.array([(len(plain_text(pair.chosen)), len(plain_text(pair.rejected))) for pair in pairs]).reshape(-1, 2)
    return np.sign(sizes[:, 0] - sizes[:, 1]).astype(np.int8)


def preferences(logprobs: np.ndarray) -> np.ndarray:
    """(n,) +1 where the policy finds `chosen` likelier, -1 where `rejected`, 0 for a tie; (2n,) as from `pair_rows`."""
    return np.sign(logprobs[0::2] - logprobs[1::2]).astype(np.int8)


def like_length(pairs: Sequence[ReleasedPair]) -> np.ndarray:
    """(n,) bool: both answers are of like length."""
    sizes = np.array([[max(len(plain_text(side)), 1) for side in (pair.chosen, pair.rejected)] for pair in pairs])
    return np.asarray(np.abs(np.log(sizes.reshape(-1, 2)) @ (1.0, -1.0)) <= LIKE_LENGTH)


def win_rate_at_like_length(logprobs: np.ndarray, pairs: Sequence[ReleasedPair], noise: LabelNoise) -> Estimate | None:
    """The likelihood win rate of the pairs of like length; (2n,) as from `pair_rows`. None where there are none."""
    like = like_length(pairs)
    return likelihood_win_rate(logprobs.reshape(-1, 2)[like].reshape(-1), noise) if like.any() else None


def prefers_longer(choices: np.ndarray, longer: np.ndarray) -> Estimate:
    """Share of pairs on which the longer answer is chosen, ½ for a tie of either; both (n,), as from `preferences` and
    `longer_answers`. Swapping both answers of a pair changes nothing: no label is read."""
    return win_rate(choices * longer, np.zeros(len(longer)))
