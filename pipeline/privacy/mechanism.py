r"""Randomised response on preference labels, as one Markov chain over all epsilon (PPKL Eq. 7).

The released label z(epsilon) is a pure function of (key, event, label, epsilon). With N = 2^128 and the integer
threshold T = floor(tanh(epsilon/2) N), the key and the event fix a random set of *visited levels* in {0, ..., N-1}:
level k with probability 1/(k+1), independently of all others, and a fair coin beside each. z(epsilon) is the coin of
the lowest visited level >= T, or the label if there is none: P(z = y) = (N + T)/(2N) <= e^eps/(1 + e^eps), an identity
of integers.

In falling T the label meets fresh coins, so all releases of an event are a Markov chain and cost the largest epsilon
together, in whatever order they come. Levels are drawn by *octaves* [2^m, 2^(m+1)): a fair bit says whether one is
visited, its lowest visit has a coin of its own, and only the octave of T is walked. Distinct events have distinct
inputs of the PRF. Proofs: docs/explanation/assurance.md, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise, check_epsilon, check_label, is_public, keep_threshold
from private_rlhf.privacy.prf import Prf

OCTAVES = 128
DOMAIN, WALK_DOMAIN = b"label event/v2", b"octave walk/v2"  # of the PRF
UNIT = "one labelling event: one answer of one labeller to one unordered pair of responses"
NEIGHBOURING = "label vectors that differ in the label of one event; prompts, responses and events are the same"
STATEMENT = (
    "P[A(out) = 1] <= e^epsilon P[A(out') = 1] + (1 + e^epsilon) Adv_PRF for every efficient adversary A who sees"
    " everything released and knows the prompts, the responses and the code, but not the key"
)
RESPONSE, PUBLIC_NAME = "randomized response", "none"
LEVELLED = "randomized response, each event at a level of its own"
NAMES = (RESPONSE, LEVELLED, PUBLIC_NAME)
"""Of all mechanisms, as manifests state them."""
OF_LEVELS = "epsilon is the level of the event, which is released too and must not depend on its label"
MOST_LEVELS = 16


def walk_counter(octave: int, counter: int) -> bytes:
    """Suffix of the root in the input of an octave's walk: 8 bytes."""
    return octave.to_bytes(4, "big") + counter.to_bytes(4, "big")


class Coins:
    """The visited levels of one event and their coins, read from its PRF blocks (48 bytes each).

    The event's root is the block of its name: 16 bytes, bit m (of the big-endian number) says whether octave m is
    visited; 16 bytes, bit m is the coin of its lowest visit; 15 bytes that name the event in the owner's store; one
    byte whose lowest bit is the coin of level 0 (the next one blinds the label in that store). The walk of octave m
    takes the blocks of (root, m, j), j = 0, 1, ..., two tries a block: a 128-bit word (bytes 0-15, 16-31) and a coin
    (the lowest bit of byte 32, 33).
    """

    def __init__(self, prf: Prf, event: bytes) -> None:
        self._prf = prf
        self._root = root = prf.block(DOMAIN, event)
        self._visited = int.from_bytes(root[:16], "big")
        self._coins = int.from_bytes(root[16:32], "big")
        self._ground = root[47]

    def visited(self, octave: int) -> bool:
        """True if the octave holds a visited level."""
        return bool(self._visited >> octave & 1)

    def lowest(self, octave: int) -> int:
        """The coin, -1 or +1, of the octave's lowest visit; of level 0 for octave -1."""
        bit = self._ground if octave < 0 else self._coins >> octave
        return 2 * (bit & 1) - 1

    def walk(self, octave: int) -> Iterator[tuple[int, int]]:
        """(level, coin) of the visits in a visited octave, falling; ends with the first level below the octave."""
        bottom = 1 << octave
        bound = 0
        for counter in count():
            block = self._prf.block(WALK_DOMAIN, self._root + walk_counter(octave, counter))
            for start in (0, 16):
                word = int.from_bytes(block[start : start + 16], "big")
                coin = 2 * (block[32 + start // 16] & 1) - 1
                level = bottom | word & bottom - 1 if not bound else word & (1 << (bound - 1).bit_length()) - 1
                if bound and level >= bound:
                    continue
                yield level, coin
                if level < bottom:
                    return
                bound = level


def last_coin(label: int, threshold: int, coins: Coins, octaves: int = OCTAVES) -> int:
    """The coin of the lowest visited level >= threshold, or the label. `octaves` is smaller only in tests.

    UserError for another label than -1 and +1.
    """
    label = check_label(label)
    if threshold == 0:
        return coins.lowest(-1)
    base = threshold.bit_length() - 1
    if coins.visited(base):
        last = 0  # the coin of the lowest visit at or above the threshold so far
        for level, coin in coins.walk(base):
            if level < threshold:
                if last and level < 1 << base:
                    return coins.lowest(base)
                if last:
                    return last
                break
            last = coin
    for octave in range(base + 1, octaves):
        if coins.visited(octave):
            return coins.lowest(octave)
    return label


@dataclass(frozen=True)
class RandomizedResponse:
    """Keeps a label in {-1, +1} with probability `noise.keep_prob`, turns it round otherwise; carries its guarantee.

    epsilon: label-LDP parameter of one released label, finite and above 0 (UserError otherwise).
    """

    epsilon: float
    noise: LabelNoise = field(init=False, repr=False, compare=False)
    threshold: int = field(init=False, repr=False, compare=False)

    @property
    def levels(self) -> tuple[RandomizedResponse, ...]:
        """The mechanism of each level that an event may have: this one."""
        return (self,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        object.__setattr__(self, "noise", LabelNoise.of(self.epsilon))
        object.__setattr__(self, "threshold", keep_threshold(self.epsilon))

    def release(self, prf: Prf, event: bytes, label: int) -> int:
        """z in {-1, +1} for this event: a pure function of (key, event, label, epsilon). UserError: see `last_coin`."""
        return last_coin(label, self.threshold, Coins(prf, event))

    def guarantee(self) -> dict[str, Any]:
        """Statement of the mechanism for manifests and cards; JSON types only."""
        several = "all releases of one event under one key together cost the largest epsilon among them"
        return _statement(RESPONSE, self.noise, STATEMENT, several)


@dataclass(frozen=True)
class LevelledResponse:
    """Randomised response at an ε of its own for each event, one of `levels`: declared, two or more, rising.

    z of an event at its level is what `RandomizedResponse` at that ε releases of it, so that an event which comes again
    at another level costs the larger of the two. UserError for other levels.
    """

    levels: tuple[RandomizedResponse, ...]

    @classmethod
    def of(cls, levels: Sequence[float], name: str = "--epsilon-levels") -> LevelledResponse:
        """The mechanism for the levels' ε, in any order. UserError, which calls them `name`, for fewer than two."""
        rising = sorted({check_epsilon(level, name) for level in levels})
        if not 2 <= len(rising) == len(levels) <= MOST_LEVELS:
            raise UserError(f"{name} must be 2 to {MOST_LEVELS} different numbers, got {list(levels)}: for one ε,"
                            " give epsilon instead")  # fmt: skip
        return cls(tuple(map(RandomizedResponse, rising)))

    @property
    def epsilon(self) -> float:
        """The largest level, which holds for every event."""
        return self.levels[-1].epsilon

    @property
    def noise(self) -> LabelNoise:
        """The noise of the largest level."""
        return self.levels[-1].noise

    def guarantee(self) -> dict[str, Any]:
        """As `RandomizedResponse.guarantee`, with the levels."""
        several = "all releases of one event under one key together cost the largest epsilon among its levels in them"
        levels = [each.epsilon for each in self.levels]
        return _statement(LEVELLED, self.noise, f"{STATEMENT}; {OF_LEVELS}", several, levels=levels)


@dataclass(frozen=True)
class PublicLabels:
    """epsilon = infinity: labels that their holder declared public are released as they are. NOT PRIVATE."""

    noise: LabelNoise = field(default=PUBLIC, init=False)

    def guarantee(self) -> dict[str, Any]:
        """As `RandomizedResponse.guarantee`."""
        statement = "none: the labels were declared public and are released as they are"
        return _statement(PUBLIC_NAME, self.noise, statement, "no protection")


def _statement(mechanism: str, noise: LabelNoise, statement: str, several: str, **more: Any) -> dict[str, Any]:
    terms = {"mechanism": mechanism, **noise.as_json(), **more, "unit": UNIT, "neighbouring": NEIGHBOURING}
    return terms | {"statement": statement, "several_releases": several}


Mechanism = RandomizedResponse | LevelledResponse | PublicLabels


def make_mechanism(epsilon: float, public: bool = False) -> Mechanism:
    """The mechanism for `epsilon`; infinity needs labels that were declared public (UserError otherwise)."""
    if is_public(epsilon):
        if public:
            return PublicLabels()
        raise UserError(
            "epsilon: inf releases the true labels; declare the labels public if they are, or give a finite epsilon"
        )
    return RandomizedResponse(epsilon)
