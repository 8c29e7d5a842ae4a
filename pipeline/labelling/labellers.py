"""Labellers: one interface for whoever answers questions. Each answer is randomised before it is stored.

A labeller keeps what it was asked and answered in a folder of its own: one that is killed and made again there has the
same answers, asks nothing twice and draws nothing twice. A pair that comes again under another id has its answer.
Answers are private labels z: 1 for response_a, -1 for response_b, None for a skip (which is public).
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

from private_rlhf.core.atomic import sweep_temporaries, write_json
from private_rlhf.core.documents import DocumentError, read_json
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.noise import LEVELS, check_epsilon, check_label, keep_threshold
from private_rlhf.labelling.questions import (
    Question,
    add_answer,
    answers_of_pairs,
    line,
    parse_row,
    read_answers,
    read_questions,
    unasked,
    write_answers,
    write_questions,
)
from private_rlhf.privacy.guarantee import RandomisedBy
from private_rlhf.privacy.keys import Lock, make_private_folder
from private_rlhf.privacy.labelers import total_epsilon
from private_rlhf.privacy.local import DrawStore
from private_rlhf.privacy.mechanism import LevelledResponse, RandomizedResponse
from private_rlhf.privacy.records import Text

AnyEpsilon = float | Sequence[float]  # of all answers, or of which each person chooses one
Margin = Callable[[Question], float]
"""r*(response_a) - r*(response_b) of a known truth, finite."""


class Labeller(Protocol):
    """Answers questions, sooner or later. epsilon: of each answer, at most; mechanism: that each went through."""

    epsilon: float
    mechanism: RandomizedResponse | LevelledResponse

    @property
    def randomised_by(self) -> RandomisedBy | None:
        """The place where true answers became private labels; None: by a seed, so nothing is private."""

    def ask(self, questions: Sequence[Question]) -> None:
        """Puts the questions, durably; those with known ids are not put again. UserError: a known id with other texts,
        or nobody can answer."""

    def answers(self) -> dict[str, int | None]:
        """The private labels by question id, so far."""

    def answer_counts(self) -> dict[str, dict[float, int]]:
        """Numbers of private answers by ε, of each person who gave one; empty where persons are not known."""
        return {}

    def epsilons(self) -> dict[str, float]:
        """The ε of answers by question id, where each has one of its own; empty where all have `epsilon`."""
        return {}


class _Folder(Labeller):
    """Questions in a folder, which two labellers share only on the same terms."""

    def __init__(self, folder: Path, epsilon: AnyEpsilon) -> None:
        self.folder, self.mechanism = folder, mechanism_at(epsilon)
        self.epsilon, levels = self.mechanism.epsilon, [level.epsilon for level in self.mechanism.levels]
        folder.mkdir(parents=True, exist_ok=True)
        terms = {"kind": type(self).__name__, "epsilon": levels if len(levels) > 1 else self.epsilon}
        _same_terms(folder / "labeller.json", terms | self.terms())
        path = folder / "questions.jsonl"
        self._asked = {each.id: each for each in (read_questions(path) if path.exists() else ())}

    def terms(self) -> dict[str, object]:
        """Further settings that two starts in one folder must share."""
        return {}


class _Kept(_Folder):
    """Questions and answers in an owner-only folder. What a kill left unanswered is answered at the next `ask`."""

    randomised_by: RandomisedBy | None = None

    def __init__(self, folder: Path, epsilon: AnyEpsilon) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder)
        super().__init__(folder, epsilon)
        self._answers = read_answers(folder / "answers.jsonl", self._asked, whole=True)

    def ask(self, questions: Sequence[Question]) -> None:
        """`Labeller.ask`. UserError while another run asks in the folder: it would draw for the same pairs."""
        lock = Lock(self.folder)
        if not lock.acquire(0.0):
            raise UserError(f"{self.folder}: is in use by another run that asks there; wait for it")
        try:
            self._ask(questions)
        finally:
            lock.release()

    def _ask(self, questions: Sequence[Question]) -> None:
        path = self.folder / "questions.jsonl"
        self._asked |= {each.id: each for each in (read_questions(path) if path.exists() else ())}
        if new := unasked(questions, self._asked):
            questions_so_far = self._asked | {each.id: each for each in new}
            self.check(questions_so_far)
            write_questions(path, questions_so_far.values(), 0o600)
            self._asked = questions_so_far
        path = self.folder / "answers.jsonl"
        self._answers = read_answers(path, self._asked, whole=True)  # also of another run, since this one began
        write_answers(path, self._answers)  # without half a line that a kill left
        known = self.answers()
        waiting = {each.record: each for each in self._asked.values() if each.id not in known}
        if waiting:
            with path.open("a", encoding="utf-8") as file:
                for id, label in self.answer(list(waiting.values())):
                    file.write(line({"id": id, "label": label}))
                    file.flush()
                    self._answers[id] = label
                os.fsync(file.fileno())

    def check(self, asked: Mapping[str, Question]) -> None:
        """Refuse with a UserError questions that cannot all be answered; here each of them can."""

    def answer(self, waiting: Sequence[Question]) -> Iterator[tuple[str, int | None]]:
        """(id, private label) of each."""
        raise NotImplementedError

    def answers(self) -> dict[str, int | None]:
        """`Labeller.answers`."""
        open_ones = [each for id, each in self._asked.items() if id not in self._answers]
        again = answers_of_pairs(open_ones, self._asked.values(), self._answers) if open_ones else {}
        return self._answers | again


def _same_terms(path: Path, terms: dict[str, object]) -> None:
    """UserError where a folder was begun on other terms. Removes what a killed labeller left half written there."""
    for name in (path.name, "questions.jsonl", "answers.jsonl", CHOSEN):
        sweep_temporaries(path.parent, name)
    try:
        before = {"kind": FileDrop.__name__} | read_json(path)  # one by hand states ε only
    except FileNotFoundError:
        write_json(path, terms, 0o600)
        return
    except (OSError, DocumentError, TypeError):
        before = None
    if before != terms:
        raise UserError(f"{path.parent}: was begun on other terms than {terms}; keep those, or choose another folder")


# --- a known truth ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coin:
    """Uniform numbers that a seed and a question's id fix: a killed run finds the same ones. For synthetic truths."""

    seed: int
    id: str

    def bits(self, count: int, what: str) -> int:
        """A whole number below 2^count, count <= 256."""
        digest = sha256(f"{self.seed}\0{what}\0{self.id}".encode()).digest()
        return int.from_bytes(digest, "big") >> (256 - count)

    def below(self, share: float, what: str) -> bool:
        """True with this probability."""
        return self.bits(53, what) < share * 2**53

    def randomised(self, share: float, epsilon: float) -> int:
        """A label that is 1 with this probability, or -1, through randomised response with the mechanism's integers."""
        label = 1 if self.below(share, "label") else -1
        return label if self.bits(129, "flip") < LEVELS + keep_threshold(epsilon) else -label


def _logistic(margin: float) -> float:
    """Bradley–Terry: the probability that response_a is preferred."""
    return 1 / (1 + math.exp(-margin)) if margin > 0 else 1 - 1 / (1 + math.exp(margin))


class Simulated(_Kept):
    """The truth of a synthetic task: y ~ Bradley–Terry of the margin, then randomised response. NOT PRIVATE: the seed
    undoes the flips."""

    def __init__(self, folder: Path, epsilon: float, margin: Margin, seed: int = 0) -> None:
        self.margin, self.seed = margin, seed
        super().__init__(folder, epsilon)

    def terms(self) -> dict[str, object]:
        """The seed."""
        return {"seed": self.seed}

    def answer(self, waiting: Sequence[Question]) -> Iterator[tuple[str, int | None]]:
        """At once."""
        for each in waiting:
            coin = _Coin(self.seed, each.id)
            yield each.id, coin.randomised(_logistic(self.margin(each)), self.epsilon)


class Crowd(Simulated):
    """Simulated persons, of whom each answers at most `most` questions.

    The i-th question goes to person i mod persons. temperature: noise of each person, > 0; the margin is divided by it
    (one number for all, or one a person). laziness: share of answers in [0, 1] that are fair coins. UserError when more
    is asked than the persons may answer.
    """

    def __init__(
        self, folder: Path, epsilon: float, margin: Margin, persons: int, most: int, seed: int = 0,
        temperature: float | Sequence[float] = 1.0, laziness: float = 0.0,
    ) -> None:  # fmt: skip
        noise = tuple(temperature) if isinstance(temperature, Sequence) else (float(temperature),) * persons
        if persons < 1 or most < 1 or len(noise) != persons or min(noise) <= 0 or not 0 <= laziness <= 1:
            raise UserError("a crowd has persons >= 1, most >= 1, temperature > 0 for each, and laziness in [0, 1]")
        self.persons, self.most, self.noise, self.laziness = persons, most, noise, laziness
        super().__init__(folder, epsilon, margin, seed)

    def terms(self) -> dict[str, object]:
        """Everything but the truth."""
        crowd = {"persons": self.persons, "most": self.most, "noise": list(self.noise), "laziness": self.laziness}
        return super().terms() | crowd

    def check(self, asked: Mapping[str, Question]) -> None:
        """The budgets."""
        if len(asked) > self.persons * self.most:
            raise UserError(f"{len(asked)} questions are too many for {self.persons} persons at {self.most}: ask fewer")

    def answer(self, waiting: Sequence[Question]) -> Iterator[tuple[str, int | None]]:
        """At once."""
        person = dict(self._persons())
        for each in waiting:
            coin = _Coin(self.seed, each.id)
            lazy = coin.below(self.laziness, "lazy")
            share = 0.5 if lazy else _logistic(self.margin(each) / self.noise[person[each.id]])
            yield each.id, coin.randomised(share, self.epsilon)

    def answer_counts(self) -> dict[str, dict[float, int]]:
        """`Labeller.answer_counts`."""
        counts = Counter(f"person {person}" for id, person in self._persons() if id in self._answers)
        return {person: {self.epsilon: count} for person, count in counts.items()}

    def _persons(self) -> Iterator[tuple[str, int]]:
        return ((id, place % self.persons) for place, id in enumerate(self._asked))


# --- files, programs, terminals ---------------------------------------------------------------------------------------


class FileDrop(_Folder):
    """A folder: `questions.jsonl` goes out, `answers.jsonl` comes in, with labels that were randomised at ε where they
    were given. Nothing is drawn here, and nobody here knows who drew. Where the folder holds `draws.db`, the record of
    `private-rlhf label-filter`, every answer must be a draw of it."""

    def __init__(self, folder: Path, epsilon: float) -> None:
        super().__init__(folder, epsilon)
        self._again: dict[str, Question] = {}

    @property
    def randomised_by(self) -> RandomisedBy:
        """Known by the record of label-filter."""
        return "label-filter" if (self.folder / DRAWS).exists() else "files"

    def ask(self, questions: Sequence[Question]) -> None:
        """`Labeller.ask`; a pair that is in the file under another id is not put again."""
        pairs, before = {each.record for each in self._asked.values()}, len(self._asked)
        for each in unasked(questions, self._asked | self._again):
            (self._again if each.record in pairs else self._asked)[each.id] = each
            pairs.add(each.record)
        if len(self._asked) > before:
            write_questions(self.folder / "questions.jsonl", self._asked.values())

    def answers(self) -> dict[str, int | None]:
        """`Labeller.answers`; UserError for a file without answers, or an answer that label-filter did not draw."""
        answers = read_answers(self.folder / "answers.jsonl", self._asked)
        if self.randomised_by == "label-filter":
            check_draws(self.folder, answers, self.epsilon)
        return answers | answers_of_pairs(self._again.values(), self._asked.values(), answers)


class _Drawn(_Kept):
    """True labels that come here are randomised by `DrawStore` before anything is stored: an event that is answered
    twice, because a kill came between, keeps its draw."""

    def __init__(self, folder: Path, epsilon: AnyEpsilon) -> None:
        super().__init__(folder, epsilon)
        self._draws = DrawStore(folder / DRAWS, (1, -1))

    def draw(self, labels: Mapping[str, int | None], at: float | None = None) -> Iterator[tuple[str, int | None]]:
        """(id, private label): all draws are on the disk before the first is given. at: their ε."""
        events = [(id, (1 - check_label(label)) // 2) for id, label in labels.items() if label is not None]
        places = dict(zip((id for id, _ in events), self._draws.answer(events, at or self.epsilon), strict=True))
        for id, label in labels.items():
            place = places.get(id)
            yield id, None if label is None or place is None else (1, -1)[place]


class Command(_Drawn):
    """A program: questions on its stdin, answers on its stdout, as lines of this room's two files.

    It gives *true* labels: the answer is raw between the program and us (both on this machine), and the program sees
    it. It is randomised here before anything is stored, in the order of the questions: the order of the answers is the
    program's own, and may tell them. A question that it leaves out is put again next time.
    """

    randomised_by = "command"

    def __init__(self, folder: Path, epsilon: float, command: str | Sequence[str], seconds: float = 3600.0) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        self.seconds = seconds
        super().__init__(folder, epsilon)

    def answer(self, waiting: Sequence[Question]) -> Iterator[tuple[str, int | None]]:
        """Runs the program once for all of them."""
        text = "".join(line(each.as_json()) for each in waiting).encode()
        name = self.command[0] if self.command else "the command"
        try:
            done = subprocess.run(self.command, input=text, stdout=subprocess.PIPE, timeout=self.seconds, check=True)
        except subprocess.CalledProcessError as error:
            raise UserError(f"{name}: ended with code {error.returncode}; nothing was stored: run it again") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{name}: took over {self.seconds:g} seconds; nothing was stored: run it again") from None
        except (OSError, IndexError) as error:
            raise UserError(f"{name}: cannot be started ({error}); give a program and its options") from None
        answers: dict[str, int | None] = {}
        asked = {each.id for each in waiting}
        for number, data in enumerate(filter(bytes.strip, done.stdout.split(b"\n")), 1):
            where = f"{name}, answer {number}"
            add_answer(answers, parse_row(data, where), asked, where)
        yield from self.draw({each.id: answers[each.id] for each in waiting if each.id in answers})


class Terminal(_Drawn):
    """A person at this terminal, who chooses one of several ε before the first of the questions that wait. Answers are
    shown in random order; what is typed is randomised before it is stored, and stays in the terminal's scrollback."""

    randomised_by = "terminal"

    def __init__(
        self, folder: Path, epsilon: AnyEpsilon, source: IO[str] | None = None, out: IO[str] | None = None
    ) -> None:
        super().__init__(folder, epsilon)
        self.source, self.out = source or sys.stdin, out or sys.stderr
        self._chosen: dict[str, float] = read_json(path) if (path := folder / CHOSEN).exists() else {}

    def epsilons(self) -> dict[str, float]:
        """`Labeller.epsilons`."""
        chosen = {self._asked[id].record: epsilon for id, epsilon in self._chosen.items()}
        return {id: chosen[each.record] for id, each in self._asked.items() if each.record in chosen}

    def answer(self, waiting: Sequence[Question]) -> Iterator[tuple[str, int | None]]:
        """One after another; stops at the end of the input."""
        levels = {str(number): level for number, level in enumerate(self.mechanism.levels, 1)}
        new = [each.id for each in waiting if each.id not in self._chosen and len(levels) > 1]
        if new:  # on the disk before a question is shown: no level can depend on its answer
            offers = [f"{number}: ε = {level.epsilon:g}, of 100 answers {level.noise.kept_of_100} stay true\n"
                      for number, level in levels.items()]  # fmt: skip
            if (typed := self._typed(f"\nYour ε for {len(new)} questions?\n{''.join(offers)}Which? ", levels)) is None:
                return
            self._chosen |= dict.fromkeys(new, levels[typed].epsilon)
            write_json(self.folder / CHOSEN, self._chosen, 0o600)
        if len(levels) == 1 and waiting:
            noise = levels["1"].noise
            rule = f"Of 100 answers {noise.kept_of_100} stay true; the others are turned round before they are stored"
            print_lines(f"\n{rule} (ε = {noise.epsilon:g}).", file=self.out)
        for number, each in enumerate(waiting, 1):
            turned = secrets.randbits(1)
            shown = (each.response_a, each.response_b)[:: -1 if turned else 1]
            print_lines(f"\n--- {number} of {len(waiting)}\n{plain(each.prompt)}", file=self.out)
            for name, text in zip("12", shown, strict=True):
                print_lines(f"\n[{name}] {plain(text)}", file=self.out)
            if (typed := self._typed("\nBetter: 1, 2, t (tie) or s (skip)? ", ("1", "2", "t", "s"))) is None:
                return
            choice = {"1": 1, "2": -1, "t": 1 - 2 * secrets.randbits(1), "s": None}[typed]
            label = choice if choice is None or not turned else -choice
            yield from self.draw({each.id: label}, self._chosen.get(each.id))

    def _typed(self, asked: str, choices: Collection[str]) -> str | None:
        while True:
            print_lines(asked, end="", file=self.out)
            text = self.source.readline()
            if not text or text.strip().lower() in choices:
                return text.strip().lower() or None


def plain(text: Text) -> str:
    """A text or its messages as lines."""
    turns = [text] if isinstance(text, str) else [f"{turn['role']}: {turn['content']}" for turn in text]
    return "\n".join(line for turn in turns for line in turn.splitlines())


def answers_within(budget: float, epsilon: float, draws: Mapping[float, int] = MappingProxyType({})) -> int:
    """Number of answers at ε that a person's budget holds beside `draws`, which are counted by ε. All are taken as they
    were written: .3 holds three answers at .1."""
    spent = sum(count * Fraction(repr(each)) for each, count in draws.items())
    left = Fraction(repr(check_epsilon(budget, "budget"))) - spent
    return max(0, int(left / Fraction(repr(check_epsilon(epsilon)))))


def mechanism_at(epsilon: AnyEpsilon) -> RandomizedResponse | LevelledResponse:
    """The mechanism at one ε, or at one of several that each person chooses among."""
    return LevelledResponse.of(epsilon) if isinstance(epsilon, Sequence) else RandomizedResponse(epsilon)


def busiest(labeller: Labeller) -> tuple[tuple[float, int], ...]:
    """(ε, answers) of the person who spent most, by rising ε; empty where persons are not known."""
    each = (tuple(sorted(draws.items())) for draws in labeller.answer_counts().values())
    return max(each, key=total_epsilon, default=())


DRAWS, CHOSEN = "draws.db", "levels.json"
LABELS = (-1, 1)  # as `label-filter` has them


class DrawRecord(DrawStore):
    """A store of draws that is read and draws nothing."""

    def recorded(self, event: str, epsilon: float) -> int | None:
        """The label that was drawn for an event at this epsilon; None where none was."""
        query = "SELECT draw FROM draws WHERE event = ? AND epsilon = ?"
        with self._named_errors():
            row = self._base.execute(query, (sha256(event.encode()).digest(), float(epsilon))).fetchone()
        return None if row is None else LABELS[row[0]]


def check_draws(folder: Path, answers: Mapping[str, int | None], epsilon: float) -> None:
    """UserError for an answer, other than a skip, that is not the draw of the folder's record; it names no label."""
    with closing(DrawRecord(folder / DRAWS, LABELS)) as record:
        for id, label in answers.items():
            if label is not None and record.recorded(id, epsilon) != label:
                rule = f"answer {id!r} must be the draw of {DRAWS} at epsilon {epsilon:g}, got another"
                raise UserError(f"{folder / 'answers.jsonl'}: {rule}: put there what `private-rlhf label-filter` gave")
