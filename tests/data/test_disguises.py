"""Nineteen disguises of preferred answers, long and short: which the overlap guard refuses, and which it cannot."""

from __future__ import annotations

import base64
import codecs
import json
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from private_rlhf.data.contained_answers import LEAST_LETTERS, MOST_ROWS
from private_rlhf.data.overlap import Pair
from private_rlhf.privacy.records import Text
from support.overlap_looks import look, prose

LENGTHS = {"long": 24, "short": 5}
Row = tuple[Text, Text | None]


class Case(NamedTuple):
    """A pair as a label has it."""

    prompt: str
    chosen: str
    rejected: str


def sentence(seed: str, words: int) -> str:
    return prose(seed, words).capitalize() + "."


def cases(words: int) -> list[Case]:
    """40 with coin labels; the second of the two texts is a word longer."""
    coin, made = random.Random(5), []
    for i in range(40):
        texts = [sentence(f"{side}{i}", words + side) for side in (0, 1)]
        coin.shuffle(texts)
        made.append(Case(f"What do you think about {sentence(f'p{i}', 4)}", *texts))
    return made


def pairs_of(rows: list[Case]) -> list[Pair]:
    return [Pair(row.prompt, *sorted((row.chosen, row.rejected))) for row in rows]


def answer(change: Callable[[str], str]) -> Callable[[Case], Row]:
    return lambda row: (row.prompt, change(row.chosen))


CYRILLIC = str.maketrans("aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ")
ENTITIES = {"e": "&#101;", "a": "&#x61;", "o": "&#111;"}
DISGUISES: dict[str, tuple[Callable[[Case], Row], bool, bool]] = {
    # name: how the row is made, whether a file of long ones is refused, whether one of short ones is
    "upper case": (answer(str.upper), True, True),
    "zero-width characters": (answer("\u200b".join), True, True),
    "full-width letters": (answer(lambda text: text.translate({ord("a"): "\uff41", ord("e"): "\uff45"})), True, True),
    "a comma after each word": (answer(lambda text: text.replace(" ", ", ")), True, True),
    "messages": (lambda row: (chat("user", row.prompt), chat("assistant", row.chosen)), True, True),
    "look-alike letters": (answer(lambda text: text.translate(CYRILLIC)), True, True),
    "HTML entities": (answer(lambda text: "".join(ENTITIES.get(letter, letter) for letter in text)), True, True),
    "a digit after each word": (answer(lambda text: " ".join(f"{word} 7" for word in text.split())), True, True),
    "a prefix": (answer(lambda text: f"Sure! Here is my answer: {text}"), True, True),
    "a suffix": (answer(lambda text: f"{text} I hope that this helps you."), True, True),
    "JSON": (answer(lambda text: json.dumps({"reply": text, "score": 1})), True, True),
    "bad and good": (lambda row: (row.prompt, f"bad: {row.rejected} good: {row.chosen}"), True, True),
    "the answer in the prompt": (lambda row: (f"{row.prompt} Say: {row.chosen}", "As you wish."), True, True),
    "another prompt": (lambda row: ("Continue.", row.chosen), True, False),
    "words reversed": (answer(lambda text: " ".join(reversed(text.split()))), False, False),
    "every third word dropped": (
        answer(lambda text: " ".join(word for i, word in enumerate(text.split()) if i % 3 < 2)), False, False
    ),
    "base64": (answer(lambda text: base64.b64encode(text.encode()).decode()), False, False),
    "rot13": (answer(lambda text: codecs.encode(text, "rot13")), False, False),
    "prompts whose chosen answer is longer": (lambda row: (row.prompt, None), False, False),
}  # fmt: skip
TWICE = ("bad and good", "prompts whose chosen answer is longer")  # these show both sides, or neither


def chat(role: str, content: str) -> Text:
    return [{"role": role, "content": content}]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_which_disguises_are_refused(disguise: str, length: str) -> None:
    """What is not refused is open, and stands in SHARP_EDGES; both sides in one dress are never refused."""
    dress, *refused = DISGUISES[disguise]
    every = cases(LENGTHS[length])
    shown = every[:30]
    if disguise.startswith("prompts"):
        shown = [row for row in every if len(row.chosen.split()) > len(row.rejected.split())]
    found = look(pairs_of(every), [dress(row) for row in shown]).one_sided
    assert (found > 0) == refused[length == "short"], found
    turned = [Case(row.prompt, row.rejected, row.chosen) for row in shown]
    assert look(pairs_of(every), [dress(row) for row in (*shown, *turned)]).one_sided == 0


def test_the_nineteen() -> None:
    assert len(DISGUISES) == 19
    assert [sum(entry[1 + short] for entry in DISGUISES.values()) for short in (0, 1)] == [14, 13]


# --- what the search for short answers leaves alone -------------------------------------------------------------------

PROMPT, SHORT, OTHER = "What is the colour of the sea in June?", "It is green as glass.", "Mostly a deep dark blue."
PAIR = Pair(PROMPT, SHORT, OTHER)


def test_an_answer_inside_a_row_with_its_prompt_is_one_sided() -> None:
    assert look([PAIR], [(PROMPT, f"I would say: {SHORT} So it is.")]).one_sided == 1
    assert look([PAIR], [(f"{PROMPT} I think: {OTHER}", None)]).one_sided == 1
    assert look([PAIR], [(PROMPT, f"I would say: {text} So it is.") for text in (SHORT, OTHER)]).one_sided == 0
    assert look([PAIR], [("And what colour?", f"I would say: {SHORT} So it is.")]).one_sided == 0


@pytest.mark.parametrize(
    "pair",
    [
        Pair(PROMPT, "It is green.", "No."),  # too short to tell: anybody says so
        Pair(PROMPT, SHORT, f"{SHORT} I am sure of that."),  # whoever says the one says the other
        Pair(f"Repeat: {SHORT}", SHORT, OTHER),  # taken from the prompt
    ],
)
def test_texts_that_anybody_may_give_are_no_sign(pair: Pair) -> None:
    assert len("itisgreen") < LEAST_LETTERS
    assert look([pair], [(pair.prompt, f"Well. {pair.first} That is all that there is to say.")]).one_sided == 0


def test_a_pair_s_own_prompt_is_public_whatever_it_holds() -> None:
    later = f"{PROMPT} Somebody says: {SHORT}"
    assert look([PAIR, Pair(later, "True.", "False.")], [(later, None)]).one_sided == 0
    assert look([PAIR], [(later, None)]).one_sided == 1


def test_digits_alone_are_no_sign_where_several_pairs_share_the_letters() -> None:
    no = "I never learnt to add up, sorry."
    sums = [Pair(f"How much is {i} and {i}, please?", f"That makes {2 * i}, I think.", no) for i in range(2, 6)]
    assert look(sums, [("How much is 31 and 31, please?", "That makes 62, I think.")]).one_sided == 0


def test_the_search_is_bounded() -> None:
    """One prompt for all pairs and rows costs no square of them."""
    rows: list[Row] = [(PROMPT, sentence(str(i), 6)) for i in range(MOST_ROWS)]
    assert look([PAIR], [*rows, (PROMPT, f"Sure. {SHORT}")]).one_sided == 0
    assert look([PAIR], [*rows[1:], (PROMPT, f"Sure. {SHORT}")]).one_sided == 1
