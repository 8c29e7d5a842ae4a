"""Questions, answers and who gives them: strict files, answers that a kill does not change, flips at the due rate."""

from __future__ import annotations

import io
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.labelling.labellers import Command, Crowd, FileDrop, Labeller, Simulated, Terminal, answers_within
from private_rlhf.labelling.questions import (
    Question,
    make_question,
    read_answers,
    read_questions,
    write_answers,
    write_questions,
)
from private_rlhf.privacy.keys import Lock
from private_rlhf.privacy.local import DrawStore
from scipy.stats import binom

QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(40)]


def inside(found: int, of: int, share: float) -> bool:
    """Whether a count lies in its exact two-sided binomial interval of 1 - 10^-6."""
    low, high = binom.ppf([5e-7, 1 - 5e-7], of, share)
    return bool(low <= found <= high)


def test_the_order_of_a_pair_depends_on_its_texts_alone() -> None:
    assert make_question("q", "p", "x", "y") == make_question("q", "p", "y", "x")
    first = [make_question("q", "p", f"a{i}", f"b{i}").response_a.startswith("a") for i in range(400)]
    assert inside(sum(first), 400, 0.5)


def test_questions_come_back_as_they_were_written(tmp_path: Path) -> None:
    turns = make_question("m", [{"role": "user", "content": "hi\n"}], [{"role": "assistant", "content": "é"}],
                          [{"role": "assistant", "content": "b"}])
    write_questions(tmp_path / "q.jsonl", [*QUESTIONS, turns])
    assert read_questions(tmp_path / "q.jsonl") == [*QUESTIONS, turns]


GOOD = {"id": "a", "prompt": "p", "response_a": "x", "response_b": "y"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD), "line 2: its id was there before"),
        (json.dumps(GOOD | {"label": 1}), "must have the fields"),
        (json.dumps(GOOD | {"response_b": "x"}), "the same"),
        (json.dumps(GOOD | {"prompt": " "}), "empty"),
        (json.dumps(GOOD | {"prompt": [{"role": "user", "content": "p"}]}), "not all text"),
        (json.dumps(GOOD | {"prompt": 3}), "neither text nor"),
        (json.dumps(GOOD | {"id": 3}), "has an id"),
        (json.dumps(GOOD | {"id": "\x1b[2J"}), "has an id"),
        (json.dumps(GOOD)[:-1] + ', "id": "b"}', "twice"),
        (json.dumps(GOOD | {"prompt": "\ud800"}), "half a character"),
        ("[1]", "must be a JSON object"),
        ("x" * ((1 << 20) + 1), "over 1 MiB"),
    ],
)
def test_a_file_of_questions_is_read_strictly(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "q").write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read_questions(tmp_path / "q")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "q0", "label": 2}', "must be 1, -1 or null"),
        ('{"id": "q0", "label": true}', "must be 1, -1 or null"),
        ('{"id": "q0", "label": 1.0}', "must be 1, -1 or null"),
        ('{"id": "zz", "label": 1}', "not asked"),
        ('{"id": "q0", "label": 1}\n{"id": "q0", "label": -1}', "a second time"),
        ('{"id": "q0", "label": 1, "at": 3}', "must be an answer"),
    ],
)
def test_a_file_of_answers_is_read_strictly(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(UserError, match=said):
        read_answers(tmp_path / "a", {"q0"})


def margin(question: Question) -> float:
    """`yes` is better by 1."""
    return 1.0 if str(question.response_a).startswith("yes") else -1.0


def test_a_simulated_labeller_that_was_killed_has_the_same_answers(tmp_path: Path) -> None:
    whole: Labeller = Simulated(tmp_path / "whole", 1.0, margin, seed=3)
    whole.ask(QUESTIONS)
    half = Simulated(tmp_path / "half", 1.0, margin, seed=3)
    half.ask(QUESTIONS[:25])
    with (tmp_path / "half" / "answers.jsonl").open("rb+") as file:
        file.truncate(len(file.read()) - 9)  # in the middle of a line
    again = Simulated(tmp_path / "half", 1.0, margin, seed=3)
    assert len(again.answers()) == 24
    again.ask(QUESTIONS)
    again.ask(QUESTIONS)
    assert again.answers() == whole.answers() != {}
    with pytest.raises(UserError, match="other terms"):
        Simulated(tmp_path / "half", 2.0, margin, seed=3)


def test_simulated_answers_have_the_due_rates(tmp_path: Path) -> None:
    many = [make_question(f"q{i}", "p", f"yes {i}", f"no {i}") for i in range(4000)]
    labeller = Simulated(tmp_path / "s", 1.0, lambda q: 100 * margin(q))
    labeller.ask(many)
    kept = sum(labeller.answers()[each.id] == margin(each) for each in many)
    assert inside(kept, 4000, LabelNoise.of(1.0).keep_prob)


def test_a_crowd_has_budgets_noise_and_laziness(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "c", 30.0, lambda q: 50 * margin(q), persons=4, most=10, laziness=0.5, temperature=0.1)
    crowd.ask(QUESTIONS[:38])
    assert sorted(each[30.0] for each in crowd.answer_counts().values()) == [9, 9, 10, 10]
    right = sum(label == margin(each) for each, label in zip(QUESTIONS, crowd.answers().values(), strict=False))
    assert inside(right, 38, 0.75)
    with pytest.raises(UserError, match="too many"):
        crowd.ask([*QUESTIONS[38:], make_question("more", "p", "x", "y")])
    assert len(crowd.answers()) == 38


def test_a_file_drop_gives_and_takes(tmp_path: Path) -> None:
    drop = FileDrop(tmp_path / "d", 1.0)
    drop.ask(QUESTIONS[:2])
    drop.ask(QUESTIONS[1:3])
    assert drop.answers() == {}
    assert read_questions(tmp_path / "d" / "questions.jsonl") == QUESTIONS[:3]
    (tmp_path / "d" / "answers.jsonl").write_text('{"id": "q1", "label": -1}\n{"id": "q0", "label": null}\n')
    assert FileDrop(tmp_path / "d", 1.0).answers() == {"q1": -1, "q0": None}
    with pytest.raises(UserError, match="other texts"):
        drop.ask([make_question("q1", "p", "another", "text")])


THIRTY = [make_question(f"again {i}", "p", *("xy" if i % 2 else "yx")) for i in range(30)]
TURNED = Question("turned", "p", THIRTY[0].response_b, THIRTY[0].response_a)


def test_a_pair_under_thirty_ids_is_put_once_in_a_file_drop(tmp_path: Path) -> None:
    for number in range(2):  # also by a process that is started again
        drop = FileDrop(tmp_path / "d", 1.0)
        drop.ask([*THIRTY, TURNED])
        assert read_questions(tmp_path / "d" / "questions.jsonl") == THIRTY[:1]
        assert len(drop.answers()) == (31 if number else 0)
        (tmp_path / "d" / "answers.jsonl").write_text('{"id": "again 0", "label": -1}\n')
    assert {drop.answers()[each.id] for each in THIRTY} == {-1}
    assert drop.answers()["turned"] == 1


def test_a_pair_under_thirty_ids_is_drawn_once(tmp_path: Path) -> None:
    """Fair coins answer at random; thirty draws would agree once in 2^29."""
    program = PROGRAM.replace("1})", "__import__('random').choice((1, -1))})")
    for ids in (THIRTY[:10], THIRTY, [*THIRTY, TURNED]):
        labeller = Command(tmp_path / "c", 1.0, [sys.executable, "-c", program])
        labeller.ask(ids)
    answers = labeller.answers()
    assert len({answers[each.id] for each in THIRTY}) == 1
    assert answers["turned"] == -answers["again 0"]  # type: ignore[operator]
    assert len((tmp_path / "c" / "answers.jsonl").read_text().splitlines()) == 1


def test_answers_of_a_file_are_known_by_the_record_of_label_filter(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    drop = FileDrop(folder, 1.0)
    drop.ask(QUESTIONS)
    assert drop.randomised_by == "files"
    draws = DrawStore(folder / "draws.db", (-1, 1))
    labels = {each.id: (-1, 1)[draws.answer([(each.id, 1)], 1.0)[0] or 0] for each in QUESTIONS[:9]}
    labels["q9"] = None
    write_answers(folder / "answers.jsonl", labels)
    assert drop.randomised_by == "label-filter"
    assert drop.answers() == labels
    for id, label, epsilon in (("q0", -int(labels["q0"] or 1), 1.0), ("q20", 1, 1.0), ("q0", labels["q0"], 2.0)):
        write_answers(folder / "answers.jsonl", labels | {id: label})
        drop.epsilon = epsilon
        with pytest.raises(UserError, match=r"must be the draw of draws\.db") as error:
            drop.answers()
        assert "label\":" not in str(error.value)


PROGRAM = """
import json, sys
for number, line in enumerate(sys.stdin):
    print(json.dumps({"id": json.loads(line)["id"], "label": None if number == 3 else 1}))
"""


def test_a_command_s_answers_are_randomised_before_they_are_stored(tmp_path: Path) -> None:
    many = [make_question(f"q{i}", "p", f"yes {i}", f"no {i}") for i in range(600)]
    labeller = Command(tmp_path / "c", 1.0, [sys.executable, "-c", PROGRAM])
    labeller.ask(many)
    answers = labeller.answers()
    assert answers["q3"] is None
    assert inside(sum(label == 1 for label in answers.values()), 599, LabelNoise.of(1.0).keep_prob)
    (tmp_path / "c" / "answers.jsonl").unlink()  # a kill after the draws: the same draws again
    again = Command(tmp_path / "c", 1.0, [sys.executable, "-c", PROGRAM])
    again.ask(many)
    assert again.answers() == answers


def test_two_runs_in_one_folder_draw_once_for_a_pair(tmp_path: Path) -> None:
    """They began side by side and name the pair each in its own way: two draws would be one at 2 epsilon."""
    program = [sys.executable, "-c", PROGRAM]
    one, other = (Command(tmp_path / "c", 1e-9, program) for _ in range(2))
    pairs = [("p", f"yes {i}", f"no {i}") for i in range(3, 63)]
    one.ask([make_question(f"one {i}", *pair) for i, pair in enumerate(pairs)])
    other.ask([make_question(f"other {i}", *pair) for i, pair in enumerate(pairs)])
    first, second = one.answers(), other.answers()
    assert [second[f"other {i}"] for i in range(60)] == [first[f"one {i}"] for i in range(60)]
    lock = Lock(tmp_path / "c")
    assert lock.acquire(0.0)
    with pytest.raises(UserError, match="is in use by another run that asks there; wait for it"):
        one.ask(QUESTIONS[:1])
    lock.release()


SORTING = """
import json, sys
asked = [json.loads(line)["id"] for line in sys.stdin]
for label in (1, -1):
    for id in asked:
        if (1 if int(id[1:]) % 3 else -1) == label:
            print(json.dumps({"id": id, "label": label}))
"""


def test_the_order_of_a_command_s_answers_is_not_stored(tmp_path: Path) -> None:
    """A program may answer what it prefers first: the file of draws would tell true labels by its order."""
    many = [make_question(f"q{i}", "p", f"yes {i}", f"no {i}") for i in range(30)]
    labeller = Command(tmp_path / "c", 1.0, [sys.executable, "-c", SORTING])
    labeller.ask(many)
    stored = [json.loads(line)["id"] for line in (tmp_path / "c" / "answers.jsonl").read_text().splitlines()]
    assert stored == list(labeller.answers()) == [each.id for each in many]


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise SystemExit(3)", "code 3"), ("print('{}')", "answer 1: must be an"), ("print('x')", "not valid JSON")],
)
def test_a_command_that_fails_stores_nothing(tmp_path: Path, program: str, said: str) -> None:
    labeller = Command(tmp_path / "c", 1.0, [sys.executable, "-c", program])
    with pytest.raises(UserError, match=said):
        labeller.ask(QUESTIONS[:2])
    assert labeller.answers() == {}


def test_a_terminal_shows_what_it_is_given_and_obeys_none_of_it(tmp_path: Path) -> None:
    asked = [make_question("q", "evil \x1b[2J", "x", "y"), *QUESTIONS[:2]]
    out = io.StringIO()
    labeller = Terminal(tmp_path / "t", 40.0, io.StringIO("what\n1\ns\n"), out)
    labeller.ask(asked)
    assert "\x1b" not in out.getvalue()
    assert "\\x1b[2J" in out.getvalue()
    assert out.getvalue().startswith("\nOf 100 answers more than 99 stay true; the others are turned round before")
    shown = out.getvalue().split("[1] ")[1].splitlines()[0]
    assert labeller.answers() == {"q": 1 if shown == asked[0].response_a else -1, "q0": None}


def test_a_person_at_a_terminal_chooses_an_epsilon_before_the_first_question(tmp_path: Path) -> None:
    """It stands on the disk before a text is shown; whoever comes back finds it there, and chooses for others."""
    folder, asked = tmp_path / "t", QUESTIONS[:4]
    with pytest.raises(UserError, match="2 to 16"):
        Terminal(tmp_path / "none", [1.0])

    class Screen(io.StringIO):
        def write(self, text: str, /) -> int:
            if "prompt" in text:
                assert set(json.loads((folder / "levels.json").read_text()).values()) <= {40.0, 80.0}
            return super().write(text)

    out = Screen()
    labeller = Terminal(folder, [80.0, 40.0], io.StringIO("3\n1\n1\n"), out)
    labeller.ask(asked[:2])
    assert out.getvalue().index("Which?") < out.getvalue().index("prompt")
    assert labeller.answers().keys() == {"q0"}
    with pytest.raises(UserError, match="other terms"):
        Terminal(folder, 80.0)
    again = Terminal(folder, [40.0, 80.0], io.StringIO("1\n2\ns\n1\n"), Screen())
    again.ask(asked[:2])  # its level was chosen: the 1 is an answer
    assert again.answers().keys() == {"q0", "q1"}
    again.ask([*asked, Question("turned", asked[2].prompt, asked[2].response_b, asked[2].response_a)])
    assert again.epsilons() == {"q0": 40.0, "q1": 40.0, "q2": 80.0, "q3": 80.0, "turned": 80.0}
    with closing(DrawStore(folder / "draws.db", (1, -1))) as draws:
        stored = draws._base.execute("SELECT epsilon FROM draws ORDER BY epsilon").fetchall()
    answered = sorted(id for id, label in again.answers().items() if label and id != "turned")
    assert stored == [(again.epsilons()[id],) for id in answered]


def test_a_budget_holds_as_many_answers_as_it_says() -> None:
    assert [answers_within(*pair) for pair in ((0.3, 0.1), (2.0, 2.18), (1.0, 0.1), (5, 1.5))] == [3, 0, 10, 3]
