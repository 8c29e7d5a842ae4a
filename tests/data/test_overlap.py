"""The guard against demonstrations and prompts that repeat one side of protected pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.overlap import PAIRS_PER_LOOK, Digests, Pair, check_overlap
from private_rlhf.embedded import task
from private_rlhf.privacy.records import Text
from private_rlhf.recipe import OF_RELEASE, Recipe
from private_rlhf.stages.declarations import STAGES, stage_of
from support.overlap_looks import look, prose
from support.recipes import recipe_of

PAIRS = [Pair(f"Say {i}.", f"yes {i}", f"no {i}") for i in range(40)]


def check_stages(given: Recipe, run: RunDir, stages: Collection[str]) -> None:
    """As the runner does."""
    read = STAGES if "privatize" in stages else [stage_of(name) for name in stages]
    keys = dict.fromkeys(key for stage in read for key in stage.texts)
    check_overlap(given.data, run.released, keys, "privatize" in stages)


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


# --- one-sided or not -------------------------------------------------------------------------------------------------


def test_chosen_answers_are_one_sided_and_so_are_rejected_ones() -> None:
    assert look(PAIRS, [(pair.prompt, pair.first) for pair in PAIRS]) == (40, 40)
    assert look(PAIRS, [(pair.prompt, pair.second) for pair in PAIRS[:7]]) == (40, 7)


def test_both_answers_or_none_are_two_sided() -> None:
    both = [(pair.prompt, response) for pair in PAIRS[:9] for response in pair[1:]]
    assert look(PAIRS, both) == (40, 0)
    assert look(PAIRS, both + both[::2]) == (40, 9)  # one side twice
    assert look(PAIRS, [(pair.prompt, "another answer") for pair in PAIRS]) == (40, 0)
    assert look(PAIRS, [("another prompt", pair.first) for pair in PAIRS]) == (40, 0)
    assert look(PAIRS, []) == (40, 0)
    assert look([], both) == (0, 0)


LONG = [
    Pair(
        f"Say {i}.",
        f"The answer number {i} is, all in all, that you should go out more.",
        f"{i}, I would rather stay at home, read, and think it over twice.",
    )
    for i in range(40)
]
DISGUISES: dict[str, Callable[[str, str], tuple[Text, Text]]] = {
    "as it is": lambda prompt, answer: (prompt, answer),
    "messages": lambda prompt, answer: (
        [{"role": "user", "content": prompt}],
        [{"role": "assistant", "content": answer}],
    ),
    "end of text": lambda prompt, answer: (prompt, answer + "<|endoftext|>"),
    "end of sequence": lambda prompt, answer: (prompt, answer + "</s>"),
    "ChatML": lambda prompt, answer: (f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", answer),
    "Llama 3": lambda prompt, answer: (
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>", answer + "<|eot_id|>"
    ),
    "Gemma": lambda prompt, answer: (f"<start_of_turn>user\n{prompt}<end_of_turn>\n<start_of_turn>model\n", answer),
    "Alpaca": lambda prompt, answer: (f"### Instruction:\n{prompt}\n\n### Response:\n", answer),
    "Llama 2": lambda prompt, answer: (f"<s>[INST] {prompt} [/INST]", answer + " </s>"),
    "lower case": lambda prompt, answer: (prompt.lower(), answer.lower()),
    "zero-width": lambda prompt, answer: (prompt, answer[:4] + "\u200b" + answer[4:]),
    "full stop": lambda prompt, answer: (prompt, answer + "."),
    "full-width": lambda prompt, answer: (prompt, answer.replace("a", "\uff41")),
    "another prompt": lambda prompt, answer: ("Continue.", answer),
    "another system prompt": lambda prompt, answer: (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}],
        [{"role": "assistant", "content": answer}],
    ),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_no_usual_form_is_a_disguise(disguise: str) -> None:
    """The review's D5: ten of thirteen forms passed, five of them byte-exact answers."""
    dress = DISGUISES[disguise]
    assert look(LONG, [dress(pair.prompt, pair.first) for pair in LONG[:30]]) == (40, 30)
    both = [dress(pair.prompt, response) for pair in LONG[:30] for response in pair[1:]]
    assert look(LONG, both) == (40, 0)


@pytest.mark.parametrize("disguise", DISGUISES)
def test_no_usual_form_is_a_disguise_of_pairs_that_several_people_labelled(disguise: str) -> None:
    """Nor of rankings, which hold each response in several pairs."""
    dress = DISGUISES[disguise]
    assert look([*LONG, *LONG, *LONG], [dress(pair.prompt, pair.first) for pair in LONG[:30]]) == (120, 90)
    answers = {prompt: [prose(f"{prompt} {k}", 20) for k in range(4)] for prompt in ("Say it.", "Tell me.")}
    ranked = [Pair(prompt, *two) for prompt, four in answers.items() for two in combinations(four, 2)]
    assert look(ranked, [dress(prompt, four[0]) for prompt, four in answers.items()]) == (12, 6)
    assert look(ranked, [dress(prompt, answer) for prompt, four in answers.items() for answer in four]) == (12, 0)


def test_a_phrase_that_many_answers_share_is_no_sign() -> None:
    """A refusal that several pairs hold, found under prompts of its own."""
    phrase = "I am sorry, but that is something that I cannot help you with today."
    pairs = [*LONG[:5], *(Pair(f"Do {i}.", phrase, LONG[i].second) for i in range(5))]
    assert look(pairs, [("Something else entirely.", phrase)]) == (10, 0)
    assert look(pairs, [("Do 1.", phrase)]).one_sided == 1


def test_a_text_without_letters_is_compared_as_it_is() -> None:
    pairs = [Pair("Smile.", ":-)", ":-("), Pair("Frown.", ":-(", ":-)")]
    assert look(pairs, [("Smile.", ":-)")]) == (2, 1)


def test_responses_of_several_pairs_may_be_written_out_for_each() -> None:
    """Three answers to one prompt, three pairs: once each, or once per pair, but not once per won pair."""
    pairs = [Pair("p", "a", "b"), Pair("p", "a", "c"), Pair("p", "b", "c"), Pair("p", "a", "d")]
    assert look(pairs, [("p", answer) for answer in "abcd"]).one_sided == 0
    assert look(pairs, [("p", answer) for pair in pairs for answer in pair[1:]]).one_sided == 0
    assert look(pairs, [("p", pair.first) for pair in pairs]).one_sided == 4
    assert look(pairs, [("p", "a")]).one_sided == 3


ANSWERS = st.sampled_from("abcde")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pq"), ANSWERS, ANSWERS).filter(lambda row: row[1] != row[2]), max_size=12),
    st.lists(st.tuples(st.sampled_from("pq"), ANSWERS), max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_count_is_the_naive_one_and_symmetric(
    rows: list[tuple[str, str, str]], shown: list[tuple[str, str]], swaps: list[bool]
) -> None:
    pairs = [Pair(*row) for row in rows]
    found, held = Counter(shown), Counter((p, r) for p, a, b in pairs for r in (a, b))
    naive = 0
    for p, a, b in pairs:
        one, other = found[p, a], found[p, b]
        naive += one != other and one * held[p, b] != other * held[p, a]
    assert look(pairs, shown) == (len(pairs), naive)
    swapped = [Pair(p, b, a) if swap else Pair(p, a, b) for (p, a, b), swap in zip(pairs, swaps, strict=False)]
    assert look(swapped, shown) == (len(pairs), naive)


def test_more_than_one_look() -> None:
    pairs = [Pair(str(i), "a", "b") for i in range(PAIRS_PER_LOOK + 5)]
    assert look(pairs, [(str(i), "a") for i in range(PAIRS_PER_LOOK - 3, PAIRS_PER_LOOK + 3)]) == (len(pairs), 6)


# --- one conversation in several forms --------------------------------------------------------------------------------

QUESTION, ANSWER, OTHER = "Name a\ncolour.", "Blue, like the sea on a calm morning in June.", "No."
FORMS: dict[str, Pair] = {
    "text": Pair(QUESTION, ANSWER, OTHER),
    "messages": Pair(chat(QUESTION), chat("", ANSWER)[1:], chat("", OTHER)[1:]),
    "dialogue": Pair(f"\n\nHuman: {QUESTION}\n\nAssistant:", f" {ANSWER}", f" {OTHER}"),
    "common prefix": Pair("", f"{QUESTION} {ANSWER}", f"{QUESTION} {OTHER}"),
}


@pytest.mark.parametrize("shown", FORMS)
@pytest.mark.parametrize("given", FORMS)
def test_the_form_does_not_matter(given: str, shown: str) -> None:
    """The split between prompt and response, white space, and turn marks are no disguise."""
    example = FORMS[shown]
    assert look([FORMS[given]], [(example.prompt, example.first)]) == (1, 1)
    assert look([FORMS[given]], [(example.prompt, response) for response in example[1:]]) == (1, 0)


def test_another_history_is_no_disguise_unless_the_answer_says_little() -> None:
    pair = Pair(chat("Hi.", "Hello!", QUESTION), chat("", ANSWER)[1:], chat("", OTHER)[1:])
    assert look([pair], [(QUESTION, ANSWER)]) == (1, 1)
    assert look([pair], [([{"role": "system", "content": "Be kind."}, *chat(QUESTION)], ANSWER)]) == (1, 1)
    assert look([pair], [(QUESTION, OTHER)]) == (1, 0)  # "No." after that question may be anybody's
    assert look([pair], [("Something else?", ANSWER)]) == (1, 0)


def test_answers_in_a_history_count() -> None:
    """Later turns of a conversation continue the answer that was preferred."""
    pair = Pair(chat(QUESTION), chat("", ANSWER)[1:], chat("", OTHER)[1:])
    later = chat(QUESTION, ANSWER, "And another?")
    assert look([pair], [(later, None)]) == (1, 1)
    assert look([pair], [(later, "Green.")]) == (1, 1)
    marked = f"\n\nHuman: {QUESTION}\n\nAssistant: {ANSWER}\n\nHuman: More?\n\nAssistant:"
    assert look([pair], [(marked, None)]) == (1, 1)
    assert look([pair], [(chat(QUESTION, ANSWER), None)]) == (1, 1)
    assert look([pair], [(f"{QUESTION} {ANSWER}", None)]) == (1, 1)
    assert look([pair], [(chat(QUESTION), None)]) == (1, 0)
    both = [(chat(QUESTION, answer, "And another?"), None) for answer in (ANSWER, OTHER)]
    assert look([pair], both) == (1, 0)


def test_the_history_of_a_pair_s_own_prompt_is_public_already() -> None:
    later = chat(QUESTION, ANSWER, "And another?")
    pairs = [Pair(chat(QUESTION), chat("", ANSWER)[1:], chat("", OTHER)[1:]), Pair(later, "Green.", "Red.")]
    assert look(pairs, [(later, None)]) == (2, 0)
    assert look(pairs, [(later, "Black.")]) == (2, 0)
    assert look(pairs, [(later, "Green.")]) == (2, 1)  # the answer itself is not
    assert look(pairs, [(later, None), (chat(QUESTION, ANSWER, "Other?"), None)]) == (2, 1)


def test_the_key_is_new_every_time() -> None:
    assert not set(Digests().of_pairs(LONG).digests.ravel()) & set(Digests().of_pairs(LONG).digests.ravel())


# --- recipes ----------------------------------------------------------------------------------------------------------


def recipe(**data: Any) -> Recipe:
    return recipe_of(data={"preferences": "embedded", **data})


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def raw(tmp_path: Path) -> str:
    """Preferences of alternating labels."""
    rows = [{"prompt": p, "chosen": (a, b)[i % 2], "rejected": (b, a)[i % 2]} for i, (p, a, b) in enumerate(PAIRS)]
    return write(tmp_path / "raw.jsonl", rows)


@pytest.fixture
def chosen(tmp_path: Path) -> str:
    """Demonstrations that are the preferred answers of `raw`."""
    rows = [{"prompt": p, "response": (a, b)[i % 2]} for i, (p, a, b) in enumerate(PAIRS)]
    return write(tmp_path / "demos.jsonl", rows)


def test_a_recipe_that_imitates_chosen_answers_is_refused(tmp_path: Path, raw: str, chosen: str) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(UserError) as refused:
        check_stages(recipe(preferences=raw, demonstrations=chosen), run, ("privatize", "sft"))
    said = str(refused.value)
    assert said.startswith(f"data.demonstrations {chosen}: repeats one response, and not equally the other, of 40 of")
    assert "leave those rows out, give both responses of each pair, use data.demonstrations: release" in said
    assert "data.allow_label_overlap: true, which marks the run NOT PRIVATE" in said
    assert not any(text in said for pair in PAIRS for text in pair)
    for part in ("privatize", "sft"):
        with pytest.raises(UserError, match="of 40 of 40 pairs"):
            check_stages(recipe(preferences=raw, demonstrations=chosen), run, (part,))
    check_stages(recipe(preferences=raw, demonstrations=chosen), run, ("reward", "ppo"))  # read no demonstrations


def test_what_a_refusal_says_does_not_depend_on_labels(tmp_path: Path, raw: str, chosen: str) -> None:
    said = []
    rows = [json.loads(line) for line in Path(raw).read_text().splitlines()]
    for swap in (lambda i: False, lambda i: i % 3 == 0):
        swapped = [
            row | {"chosen": row["rejected"], "rejected": row["chosen"]} if swap(i) else row
            for i, row in enumerate(rows)
        ]
        write(Path(raw), swapped)
        with pytest.raises(UserError) as refused:
            check_stages(recipe(preferences=raw, demonstrations=chosen), RunDir(tmp_path / "run"), ("sft",))
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("key", ["prompts", "evaluation_prompts"])
def test_prompts_that_continue_an_answer_are_refused(tmp_path: Path, raw: str, key: str) -> None:
    rows = [{"prompt": chat(pair.prompt, pair.first, "Why?")} for pair in PAIRS[:3]]
    given = recipe(preferences=raw, **{key: write(tmp_path / "prompts.jsonl", rows)})
    with pytest.raises(UserError, match=rf"data\.{key} .*of 3 of 40 pairs.*use data\.{key}: (release|evaluation)"):
        check_stages(given, RunDir(tmp_path / "run"), ("ppo", "evaluate"))
    for stage in ("rloo", "grpo", "gvpo") if key == "prompts" else ():
        with pytest.raises(UserError, match=rf"data\.{key} .*of 3 of 40 pairs"):
            check_stages(given, RunDir(tmp_path / "run"), (stage,))


def test_public_labels_and_the_override_are_let_pass(tmp_path: Path, raw: str, chosen: str) -> None:
    run = RunDir(tmp_path / "run")
    for extra in ({"public_labels": True}, {"allow_label_overlap": True}):
        given = recipe(preferences=raw, demonstrations=chosen, **extra)
        check_stages(given, run, ("privatize", "sft"))
        assert (given.override is not None) == ("allow_label_overlap" in extra)


def test_folders_are_read_with_both_splits(tmp_path: Path, chosen: str) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    write(folder / "train.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    write(folder / "eval.jsonl", [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in PAIRS[:5]])
    with pytest.raises(UserError, match="of 5 of 6 pairs"):
        check_stages(recipe(preferences=str(folder), demonstrations=chosen), RunDir(tmp_path / "run"), ("sft",))


def test_without_the_raw_file_the_release_is_asked(tmp_path: Path, raw: str, chosen: str) -> None:
    """On a machine that has the released pairs alone, a later stage is guarded all the same."""
    from private_rlhf.core.world import World
    from private_rlhf.privacy.keys import keygen
    from private_rlhf.stages import privatize
    from private_rlhf.stages.context import StageContext

    keygen(tmp_path / "owner.key")
    privatize_section = {"epsilon": 1.0, "key_file": str(tmp_path / "owner.key")}
    given = recipe_of(privatize=privatize_section, data={"preferences": raw, "demonstrations": chosen})
    run = RunDir(tmp_path / "run")
    privatize.run(StageContext(given, run, World(rank=0, size=1), "privatize"))
    Path(raw).unlink()
    with pytest.raises(UserError, match="of 40 of 40 pairs"):
        check_stages(given, run, ("sft",))


def test_embedded_demonstrations_are_no_suspicion(tmp_path: Path) -> None:
    """They depend on no label, and so they pass by name; that they could pass by their text too is luck not needed."""
    check_stages(recipe(), RunDir(tmp_path / "run"), ("privatize", "sft", "ppo", "evaluate"))
    rows = [{"prompt": p, "response": a} for p, a, _ in task.load_pairs("train")[:30]]
    given = recipe(demonstrations=write(tmp_path / "demos.jsonl", rows))
    with pytest.raises(UserError, match=r"of \d+ of \d+ pairs in data\.preferences"):
        check_stages(given, RunDir(tmp_path / "run"), ("sft",))


@pytest.mark.parametrize("source", OF_RELEASE)
def test_answers_of_a_release_pass(tmp_path: Path, raw: str, source: str) -> None:
    given = recipe(preferences=raw, demonstrations=source)
    check_stages(given, RunDir(tmp_path / "run"), ("privatize", "sft"))
    assert given.override is None


def test_a_name_of_another_key_is_a_file(tmp_path: Path, raw: str) -> None:
    for key, name in (("prompts", "release_both"), ("demonstrations", "evaluation"), ("evaluation_prompts", "release")):
        with pytest.raises(UserError, match=rf"^{name}: "):
            check_stages(recipe(preferences=raw, **{key: name}), RunDir(tmp_path / "run"), ("privatize",))
