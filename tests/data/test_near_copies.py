"""Answers that were edited, cut or put together before they became demonstrations, and what is no sign of that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from private_rlhf.data.near_copies import SHINGLE, Shingler
from private_rlhf.data.overlap import Pair
from support.overlap_looks import look, prose

PHRASE = "As an assistant I have to say that it depends on what you would like to do about it in the end, if at all."


PAIRS = [Pair(f"Tell me about {prose(f'p{i}', 5)}.", prose(f"a{i}"), prose(f"b{i}")) for i in range(40)]


def every(step: int) -> Callable[[str], str]:
    return lambda text: " ".join("other" if i % step == step - 1 else word for i, word in enumerate(text.split()))


EDITS: dict[str, Callable[[str], str]] = {
    "every 12th word is another": every(12),
    "the first two thirds": lambda text: text[: 2 * len(text) // 3],
    "the last half": lambda text: text[len(text) // 2 :],
    "an opening and a close": lambda text: f"Sure, here is what I think. {text} I hope that this helps you!",
    "upper case and bullet points": lambda text: "\n- ".join(text.upper().split()),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("prompt", ["its own", "another"])
def test_most_edited_answers_are_one_sided(edit: str, prompt: str) -> None:
    """Shingles are a sample: a pair may be missed, a file of them is not."""
    def rows(which: int) -> list[tuple[str, str | None]]:
        return [(pair[0] if prompt == "its own" else "Go on.", EDITS[edit](pair[which])) for pair in PAIRS[:20]]

    assert look(PAIRS, rows(1)).one_sided >= 14
    assert look(PAIRS, rows(1) + rows(2)).one_sided <= 1


def test_both_in_one_text_tell_by_their_order() -> None:
    first = [("Compare.", f"{pair.first} Or rather: {pair.second}") for pair in PAIRS[:20]]
    turned = [("Compare.", f"{pair.second} Or rather: {pair.first}") for pair in PAIRS[:20]]
    assert look(PAIRS, first).one_sided == look(PAIRS, turned).one_sided == 20
    assert look(PAIRS, first + turned).one_sided == 0


def test_an_answer_that_is_pasted_into_a_prompt_counts_and_a_pair_s_own_prompt_does_not() -> None:
    pasted = f"Here is a text: {PAIRS[0].first} What do you think of it?"
    assert look(PAIRS, [(pasted, None)]).one_sided == 1
    assert look([*PAIRS, Pair(pasted, "Well written.", "Badly written.")], [(pasted, None)]).one_sided == 0


def test_what_an_answer_takes_from_its_prompt_is_no_sign() -> None:
    """"Rewrite this": one response repeats the prompt, the other refuses."""
    text = prose("text")
    pairs = [Pair(f"Rewrite: {text}", f"{text} Done.", PHRASE)]
    assert look(pairs, [(f"Shorten this: {text}", "No.")]).one_sided == 0


def test_passages_that_many_answers_share_are_no_sign() -> None:
    pairs = [Pair(pair.prompt, f"{PHRASE} {prose(f'c{i}', 5)}", pair.second) for i, pair in enumerate(PAIRS)]
    assert look(pairs, [("Anything.", PHRASE)]).one_sided == 0


def test_other_texts_pass() -> None:
    assert look(PAIRS, [(f"q{i}", prose(f"other {i}")) for i in range(400)]).one_sided == 0


def test_shingles_of_a_passage_are_the_same_wherever_it_stands() -> None:
    """And one in 16 is kept: 20,000 places, within five standard deviations."""
    shingler, passage = Shingler(), prose("passage", 4000)
    alone = shingler.of([passage])
    inside = shingler.of(["x" * 1000, "before" + passage + "behind"])
    assert len(alone) > 0
    assert set(alone) <= set(inside)
    places = len(passage) - SHINGLE + 1
    assert abs(len(alone) - places / 16) < 5 * (places / 16 * 15 / 16) ** 0.5
    assert len(np.intersect1d(alone, Shingler().of([passage]))) == 0  # another secret
    assert len(shingler.of(["short", ""])) == 0
