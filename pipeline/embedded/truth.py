"""The embedded task's ground truth: a known reward, so that J, suboptimality and over-optimisation can be measured.

r*(prompt, response) = 4 · (1 + sentiment)/2 + 4 · brevity, in [0, 8], where

- sentiment in [-1, 1] is the compound score of VADER (Hutto and Gilbert 2014), in which a repeated sentiment word
  counts once: "great great great" is worth no more than "great";
- brevity in [0, 1] is 1 for a finished text of 5 to 10 distinct words, falls linearly to 0 at 2 and at 20 words, and is
  0 for a text that does not end in `.`, `!` or `?` (as a rule one that ran into the length cap).

A neutral sentence of ten words is worth 6, one of twenty words 2; a single pleasant word, or the same word many times,
at most 4. On the embedded pairs length explains about half of the variance of r* and sentiment a fifth: what annotators
who were asked for "one short sentence" might reward. The truth looks at the response alone, so a short sentence that
piles up pleasant words scores high: that is what over-optimisation looks like here, and what the KL term, distinct-n
and the printed samples are for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

TRUTH_RANGE = (0.0, 8.0)
_SHORTEST, _SHORT_ENOUGH, _LONG_ENOUGH, _LONGEST = 2, 5, 10, 20  # distinct words; the corners of the brevity term
_FINISHED = re.compile(r"[.!?][\"'”’)]*\s*$")
_EDGES = ".,;:!?\"'“”‘’()[]{}*_"


def true_reward(prompt: str, response: str) -> float:
    """r*(prompt, response) in [0, 8]. Pure, 0.1 ms. The prompt is part of the signature of every judge; unused here."""
    return TRUTH_RANGE[1] / 2.0 * ((1.0 + sentiment(response)) / 2.0 + brevity(response))


def sentiment(response: str) -> float:
    """VADER's compound score in [-1, 1] of the text without repetitions of its sentiment words; 0 if empty."""
    analyzer = _analyzer()
    seen: set[str] = set()
    kept = []
    for word in response.split():
        key = word.strip(_EDGES).lower()
        if key in seen and key in analyzer.lexicon:
            continue
        seen.add(key)
        kept.append(word)
    return float(analyzer.polarity_scores(" ".join(kept))["compound"])


def brevity(response: str) -> float:
    """Length term in [0, 1]: a trapezium in the number of distinct words, 0 for a text that does not end a sentence."""
    if not _FINISHED.search(response):
        return 0.0
    words = len({word.strip(_EDGES).lower() for word in response.split()} - {""})
    rise = (words - _SHORTEST) / (_SHORT_ENOUGH - _SHORTEST)
    fall = (_LONGEST - words) / (_LONGEST - _LONG_ENOUGH)
    return min(max(min(rise, fall), 0.0), 1.0)


@lru_cache(maxsize=1)
def _analyzer() -> SentimentIntensityAnalyzer:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()  # reads its lexicon from the package once, some 50 ms
