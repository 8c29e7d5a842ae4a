"""What a release states: the guarantee and its mark, and why nothing is left."""

from __future__ import annotations

import math

import pytest

from pipeline.core.errors import UserError
from pipeline.privacy.guarantee import DropCounts, guarantee, nothing_left
from pipeline.privacy.keys import PrivacyKey, insecure_seed_key
from pipeline.privacy.mechanism import RandomizedResponse, make_mechanism

KEY = PrivacyKey(bytes(range(32)))
SMALL = RandomizedResponse(0.5)


def test_nothing_left_says_why() -> None:
    said = str(nothing_left("d.jsonl", DropCounts(identical=1, empty=2)))
    assert said.startswith("d.jsonl: no rows are left; 1 had identical responses and 2 an empty prompt")


def test_a_private_mechanism_needs_a_key() -> None:
    with pytest.raises(UserError, match="needs a key; make one with `private-rlhf keygen"):
        guarantee(SMALL, None)


def test_marks() -> None:
    assert guarantee(SMALL, KEY)["mark"] is None
    assert guarantee(SMALL, KEY)["key_mode"] == "keyed"
    seeded = guarantee(SMALL, insecure_seed_key(1))
    assert (seeded["mark"], seeded["key_mode"]) == ("NOT PRIVATE", "insecure_seed")
    public = guarantee(make_mechanism(math.inf, public=True), None)
    assert (public["mark"], public["key_mode"], public["epsilon"]) == ("NOT PRIVATE", "none", None)
