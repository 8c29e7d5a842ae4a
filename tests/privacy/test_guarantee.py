"""What a release states: the guarantee and its mark, and why nothing is left."""

from __future__ import annotations

import math

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.guarantee import (
    RANDOMISED_BY,
    DropCounts,
    claim_of,
    dropped_text,
    guarantee,
    nothing_left,
    stated,
    status_of,
    who_is_trusted,
)
from private_rlhf.privacy.keys import PrivacyKey, insecure_seed_key
from private_rlhf.privacy.mechanism import PublicLabels, RandomizedResponse, make_mechanism

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


def test_who_must_be_trusted() -> None:
    """With true labels, in every mode."""
    assert who_is_trusted(guarantee(SMALL, KEY)).startswith("whoever holds the raw labels or the key, until")
    assert "the page and the browser" in who_is_trusted(stated(SMALL, "local", "page"))
    for seen in ("command", "terminal"):
        assert "this process saw the true labels" in who_is_trusted(stated(SMALL, "local", seen))
    for public in (guarantee(PublicLabels(), None), guarantee(SMALL, insecure_seed_key(1))):
        assert who_is_trusted(public).startswith("everybody who sees the release")


def test_what_was_not_seen_is_somebody_s_word() -> None:
    """Nobody is said to be trusted with nothing, and no file or unsigned bundle is believed without saying so."""
    for by in (None, *RANDOMISED_BY):
        assert "nobody" not in who_is_trusted(stated(SMALL, "local", by))
        assert "unsigned manifest; not verified" in who_is_trusted(stated(SMALL, "local", by, unsigned=True))
    assert [by for by in (None, *RANDOMISED_BY) if claim_of(stated(SMALL, "local", by))] == [None, "files"]
    assert "whoever wrote answers.jsonl; not verified here" in who_is_trusted(stated(SMALL, "local", "files"))
    assert claim_of(guarantee(SMALL, KEY)) is None
    assert "unsigned manifest" in who_is_trusted(stated(SMALL, "keyed", unsigned=True))


def test_a_noisy_sum_of_an_earlier_version_is_refused() -> None:
    """Its ε holds up to a δ, and no label of it was released: nothing here says so."""
    summed = guarantee(SMALL, KEY) | {"mechanism": "noisy sum", "keep_prob": 0.5, "flip_prob": 0.5, "delta": 1e-6}
    with pytest.raises(UserError, match="must be one that this program has, got noisy sum: release again"):
        status_of({"guarantee": summed})


def test_rows_left_out_are_counted_by_reason() -> None:
    counts = DropCounts(identical=100, duplicates=40, ties=6).as_dict()
    assert dropped_text(counts) == (
        "146 rows left out (100 for identical responses, 40 for a pair that an earlier row holds, 6 for a tie)"
    )
    assert dropped_text(DropCounts().as_dict()) == "no rows left out"
