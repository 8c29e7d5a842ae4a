"""The labelling page's store: what is asked, by whom it is answered, and the private labels z that came in.

One SQLite file in an owner-only folder, with a write-ahead log and `synchronous=FULL`: what the server has confirmed is
on the disk, whatever is killed. Several processes may use it at once (the server, an online run, `label export`).

A person is asked a pair once, whatever ids it has, and however they were invited: a second draw would cost another ε.
Several people may answer one pair, under ids of its own for each.

Where the terms are several levels of ε, each person chooses one before the first question. A question costs its person
the level that was chosen when it was handed out, whatever is chosen later: so no level can depend on its answer. The
questions that were put first, the most informative of a round, go to people of the largest ε.

It never sees a label: z was drawn in the page. Links and secrets are kept as SHA-256. Of times it keeps the number of
answers a day; rows stand in the order of random names, not of arrival (which the write-ahead log tells, for a while).
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from private_rlhf.core.errors import UserError, is_name, one_line
from private_rlhf.labelling.labellers import answers_within, mechanism_at
from private_rlhf.labelling.questions import Question, unasked
from private_rlhf.privacy.guarantee import RandomisedBy
from private_rlhf.privacy.keys import make_private_folder
from private_rlhf.privacy.records import fold_name

FILE = "answers.db"
AHEAD = 5
"""Questions that a person holds unanswered: they are nobody else's until the person is removed."""
EVENT_BYTES, TOKEN_BYTES = 16, 32
SKIPPED = 0  # as an answer in the file; 1 and -1 are z
_FORMAT = 1
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE people (name TEXT PRIMARY KEY, link BLOB UNIQUE, secret BLOB UNIQUE) WITHOUT ROWID;
CREATE TABLE events (
    event TEXT PRIMARY KEY, place INTEGER NOT NULL UNIQUE, id TEXT NOT NULL UNIQUE, question TEXT NOT NULL,
    person TEXT REFERENCES people,
    answer INTEGER CHECK (answer IS NULL OR answer IN (1, -1, 0) AND person IS NOT NULL)
) WITHOUT ROWID;
CREATE INDEX of_person ON events (person, place);
"""
_PAIRS = """
ALTER TABLE events ADD COLUMN record TEXT;
CREATE TABLE asked (person TEXT, record TEXT, PRIMARY KEY (person, record)) WITHOUT ROWID;
"""  # apart from the rest, so that a store that began without them gets them when it is opened
_LEVELS = """
ALTER TABLE people ADD COLUMN level REAL;
ALTER TABLE asked ADD COLUMN level REAL;
"""  # of a store of several levels; one of one ε has the columns that it always had
_NEXT = (
    "SELECT event, record FROM events WHERE person IS NULL AND NOT EXISTS"
    " (SELECT 1 FROM asked WHERE asked.person = ? AND asked.record = events.record) ORDER BY place LIMIT ?"
)
_DRAWS = (
    "SELECT level, COUNT(*) FROM (SELECT {level} AS level FROM events JOIN asked USING (person, record) WHERE person"
    " = ?1 AND answer IS NOT 0 UNION ALL SELECT {level} FROM asked WHERE person = ?1 AND record NOT IN"
    " (SELECT record FROM events WHERE person = ?1)) GROUP BY level"
)
_OPEN = (
    "SELECT event, question, {level} FROM events JOIN asked USING (person, record) WHERE person = ? AND answer IS NULL"
    " ORDER BY place"
)
_COUNTS = (
    "SELECT person, {level} AS level, COUNT(*) FROM events JOIN asked USING (person, record) WHERE answer IN (1, -1)"
    " GROUP BY person, level"
)

_DAY = "INSERT INTO facts VALUES ('answers ' || date('now'), 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
_SHARED = (
    "WITH given AS (SELECT record, answer, {level} AS level, json_extract(question, '$.response_a') AS first,"
    " ROW_NUMBER() OVER (PARTITION BY record ORDER BY event) AS turn FROM events JOIN asked USING (person, record)"
    " WHERE answer IN (1, -1)) SELECT MIN(one.level, other.level), MAX(one.level, other.level), COUNT(*),"
    " SUM((one.answer = other.answer) = (one.first = other.first)) FROM given AS one JOIN given AS other USING (record)"
    " WHERE one.turn = 1 AND other.turn = 2 GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 1"
)


@dataclass(frozen=True)
class Person:
    """One labelling person. given, skipped, held: numbers of questions answered, passed over in public, and waiting."""

    name: str
    given: int
    skipped: int
    held: int


class AnswerConflict(Exception):
    """The event has another answer already, which stays."""


class NotAsked(Exception):
    """The event is none of this person's."""


class NotALevel(Exception):
    """The number is of none of the levels that people choose among."""


class AnswerStore:
    """A `Labeller` whose answers come from people at web pages, each drawn there at ε, or at the level of its person.

    epsilon: one, or the levels that people choose among. budget: ε of each person in total; a person is asked as many
    questions as it holds. None: no limit. UserError for a folder that was begun on other terms, or whose file is none
    of ours. levels: by rising ε; `epsilon` is the largest, and `most` the number of answers that a budget holds at it.
    """

    randomised_by: RandomisedBy = "page"

    def __init__(self, folder: Path, epsilon: float | Sequence[float], budget: float | None = None) -> None:
        self.mechanism = mechanism_at(epsilon)
        self.levels = tuple(level.epsilon for level in self.mechanism.levels)
        self.epsilon, self.budget = self.levels[-1], budget
        self.most = None if budget is None else answers_within(budget, self.epsilon)
        if self.most == 0:
            raise UserError(f"a budget of {budget:g} holds no answer at epsilon {self.epsilon:g}; raise the budget")
        self._folder, self._level = folder, "asked.level" if self.has_levels else "NULL"
        if folder.is_dir() and not (folder / FILE).exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: must be empty or a store of ours, and holds other things: name an empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder)
        self._lock = threading.Lock()
        with self._named_errors():
            self._base = sqlite3.connect(folder / FILE, timeout=60, isolation_level=None, check_same_thread=False)
            (folder / FILE).chmod(0o600)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = FULL")
        each = {"epsilon": self.levels if self.has_levels else self.epsilon, "budget_per_person": budget}
        terms = json.dumps({"format": _FORMAT} | each)
        with self._transaction() as base:
            new = not base.execute("SELECT 1 FROM sqlite_master").fetchone()
            if new:
                _run(base, _SCHEMA)
                base.execute("INSERT INTO facts VALUES ('terms', ?)", (terms,))
            if not base.execute("SELECT 1 FROM sqlite_master WHERE name = 'asked'").fetchone():
                _add_pairs(base)
            if new and self.has_levels:
                _run(base, _LEVELS)
            (before,) = base.execute("SELECT value FROM facts WHERE name = 'terms'").fetchone()
        if before != terms:
            raise UserError(f"{folder}: was begun on the terms {before}; keep those, or choose another --store")

    @classmethod
    def open(cls, folder: Path, epsilon: float | None = None) -> AnswerStore:
        """A store on the terms that it was begun on. UserError where there is none, or none with at most this ε."""
        if not (folder / FILE).is_file():
            raise UserError(f"{folder}: must be a store of a labelling page; `private-rlhf label serve` begins one")
        try:
            base = sqlite3.connect(folder / FILE, timeout=60)
            terms = json.loads(base.execute("SELECT value FROM facts WHERE name = 'terms'").fetchone()[0])
            base.close()
            largest = max(terms["epsilon"]) if isinstance(terms["epsilon"], list) else terms["epsilon"]
        except (sqlite3.Error, ValueError, TypeError):
            raise UserError(f"{folder / FILE}: must be a store of a labelling page; choose another --store") from None
        return cls(folder, terms["epsilon"] if epsilon in (None, largest) else epsilon, terms["budget_per_person"])

    def close(self) -> None:
        """Closes the file."""
        self._base.close()

    def _rows(self, query: str, *values: object) -> list[Any]:
        """All rows of a query's result."""
        with self._transaction() as base:
            return base.execute(query, values).fetchall()

    @property
    def has_levels(self) -> bool:
        """True where each person chooses a level."""
        return len(self.levels) > 1

    # --- the asker's side: `Labeller` ---

    def ask(self, questions: Sequence[Question]) -> None:
        """`Labeller.ask`; each question becomes an event with a random name of constant size."""
        with self._transaction() as base:
            known = {id: Question(**json.loads(text)) for id, text in base.execute("SELECT id, question FROM events")}
            rows = [
                (secrets.token_bytes(EVENT_BYTES).hex(), place, each.id, json.dumps(each.as_json()), each.record)
                for place, each in enumerate(unasked(questions, known), len(known))
            ]
            base.executemany("INSERT INTO events (event, place, id, question, record) VALUES (?, ?, ?, ?, ?)", rows)

    def answers(self) -> dict[str, int | None]:
        """`Labeller.answers`."""
        rows = self._rows("SELECT id, answer FROM events WHERE answer IS NOT NULL ORDER BY event")
        return {id: None if answer == SKIPPED else answer for id, answer in rows}

    def epsilons(self) -> dict[str, float]:
        """`Labeller.epsilons`, and those of questions that wait with somebody."""
        query = "SELECT id, level FROM events JOIN asked USING (person, record)"
        return dict(self._rows(query)) if self.has_levels else {}

    def answer_counts(self) -> dict[str, dict[float, int]]:
        """`Labeller.answer_counts`."""
        counts: dict[str, dict[float, int]] = {}
        for person, level, count in self._rows(_COUNTS.format(level=self._level)):
            counts.setdefault(person, {})[level or self.epsilon] = count
        return counts

    def days(self) -> list[tuple[str, int]]:
        """Numbers of answers by day (UTC), where there were some."""
        rows = self._rows("SELECT name, value FROM facts WHERE name LIKE 'answers %'")
        return [(name.removeprefix("answers "), int(count)) for name, count in rows]

    def agreement(self) -> tuple[float, float, int, int] | None:
        """(ε, other ε, pairs, those whose z agree) of two people each who answered one pair, at the commonest two ε."""
        return next(iter(self._rows(_SHARED.format(level=self._level if self.has_levels else self.epsilon))), None)

    def questions(self) -> list[Question]:
        """All that was asked, in the order of asking."""
        return [Question(**json.loads(text)) for (text,) in self._rows("SELECT question FROM events ORDER BY place")]

    def asked(self) -> int:
        """Number of questions."""
        return int(self._rows("SELECT COUNT(*) FROM events")[0][0])

    # --- the operator's side ---

    def keep_url(self, url: str) -> None:
        """Store the address under which people reach the server; links begin with it."""
        with self._transaction() as base:
            base.execute("INSERT OR REPLACE INTO facts VALUES ('url', ?)", (url,))

    def url(self) -> str | None:
        """The address that the latest server stored; None before the first one."""
        rows = self._rows("SELECT value FROM facts WHERE name = 'url'")
        return rows[0][0] if rows else None

    def add_person(self, name: str) -> str:
        """The token of a person's new link, of which only the SHA-256 is kept. The earlier link and its browser end;
        what they held goes to others, since that browser may have drawn already. UserError if it is not a name, or
        spells somebody's name in another way: a second person would be asked the same pairs, and draws add up."""
        if not is_name(name):
            raise UserError(f"{one_line(name)!r} must be a name: give one line of printable characters")
        names = [each.name for each in self.persons()]
        if name not in names and (same := [each for each in names if fold_name(each) == fold_name(name)]):
            raise UserError(f"{name!r} must differ from {same[0]!r} in more than its spelling: give another name")
        token = secrets.token_bytes(TOKEN_BYTES).hex()
        with self._transaction() as base:
            base.execute("INSERT INTO people (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
            base.execute("UPDATE people SET link = ?, secret = NULL WHERE name = ?", (_digest(token), name))
            _give_back(base, name)
        return token

    def remove_person(self, name: str) -> None:
        """Ends a person's link; the answers stay, what they left unanswered goes to others. UserError if unknown."""
        with self._transaction() as base:
            if not base.execute("UPDATE people SET link = NULL, secret = NULL WHERE name = ?", (name,)).rowcount:
                raise UserError(f"{one_line(name)!r}: nobody here has that name")
            _give_back(base, name)

    def persons(self) -> list[Person]:
        """Everybody by name."""
        counts = (
            "SELECT name, COUNT(NULLIF(answer, 0)), COUNT(CASE answer WHEN 0 THEN 1 END), COUNT(event) - COUNT(answer)"
            " FROM people LEFT JOIN events ON events.person = people.name GROUP BY name ORDER BY name"
        )
        return [Person(*row) for row in self._rows(counts)]

    # --- the page's side ---

    def claim(self, link: str, secret: str) -> bool:
        """A link opens once: from then on the secret that a browser chose stands for the person. Whether that is so
        now, also when the same browser asks again. So one browser draws a person's answers, and each of them once."""
        with self._transaction() as base:
            change = "UPDATE people SET secret = ? WHERE link = ? AND (secret IS NULL OR secret = ?)"
            return bool(base.execute(change, (_digest(secret), _digest(link), _digest(secret))).rowcount)

    def person_of(self, secret: str) -> str | None:
        """Name of the person with this secret; None if unknown."""
        with self._lock, self._named_errors():
            row = self._base.execute("SELECT name FROM people WHERE secret = ?", (_digest(secret),)).fetchone()
        return row[0] if row else None

    def choose_level(self, person: str, number: int) -> None:
        """Keeps a person's level, by its number, for the questions that are handed out from now on; those that the
        person has or answered keep theirs. Raises: NotALevel."""
        if not self.has_levels or number not in range(len(self.levels)):
            raise NotALevel
        with self._transaction() as base:
            base.execute("UPDATE people SET level = ? WHERE name = ?", (self.levels[number], person))

    def level_of(self, person: str) -> float | None:
        """The ε of the questions that the person gets next; None before a choice."""
        return self._rows("SELECT level FROM people WHERE name = ?", person)[0][0] if self.has_levels else self.epsilon

    def open_questions(self, person: str) -> list[tuple[str, Question, float]]:
        """(event, question, ε) of what the person has to answer: at most `AHEAD`, no more than the budget holds, and no
        pair that the person was asked before. What an earlier browser of the person held counts as answered. Nothing
        is handed out before the person has chosen a level. Those that stand first are left to people of a larger ε, as
        many as they may take now, while there are others."""
        epsilon = self.level_of(person)
        with self._transaction() as base:
            more = 0 if epsilon is None else self._places(base, person, epsilon)
            larger = "SELECT name, level FROM people WHERE level > ? AND COALESCE(link, secret) IS NOT NULL"
            people = base.execute(larger, (epsilon,)).fetchall() if more > 0 and self.has_levels else ()
            left = sum(max(0, self._places(base, *each)) for each in people)
            for _ in range(more):  # one by one: two ids of one pair may follow each other
                if not (free := base.execute(_NEXT, (person, left + 1)).fetchall()):
                    break
                event, record = free[-1]
                base.execute("UPDATE events SET person = ? WHERE event = ?", (person, event))
                asked = (person, record, epsilon)[: 2 + self.has_levels]
                base.execute(f"INSERT INTO asked VALUES ({', '.join('?' * len(asked))})", asked)
            rows = base.execute(_OPEN.format(level=self._level), (person,))
            return [(event, Question(**json.loads(text)), level or self.epsilon) for event, text, level in rows]

    def _places(self, base: sqlite3.Connection, person: str, epsilon: float) -> int:
        """Number of questions at ε that may be handed to a person beside those that wait with them."""
        held = "SELECT COUNT(*) FROM events WHERE person = ? AND answer IS NULL"
        places = AHEAD - int(base.execute(held, (person,)).fetchone()[0])
        draws = {each or epsilon: count for each, count in base.execute(_DRAWS.format(level=self._level), (person,))}
        return places if self.budget is None else min(places, answers_within(self.budget, epsilon, draws))

    def give(self, person: str, event: str, answer: int) -> None:
        """Keeps z = 1 or -1, or `SKIPPED`; on the disk when this returns. The same one again changes nothing.

        Raises: NotAsked, AnswerConflict.
        """
        with self._transaction() as base:
            row = base.execute("SELECT answer FROM events WHERE event = ? AND person = ?", (event, person)).fetchone()
            if row is None:
                raise NotAsked
            if row[0] is None:
                base.execute("UPDATE events SET answer = ? WHERE event = ?", (answer, event))
                base.execute(_DAY if answer != SKIPPED else "")
            elif row[0] != answer:
                raise AnswerConflict

    # --- the file ---

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._named_errors():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            finally:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        file = self._folder / FILE
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(f"{file}: cannot be used ({error}): fix that, nothing was changed") from None
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError:
            raise UserError(f"{file}: is damaged or not a store of ours; restore it from a backup") from None


def _add_pairs(base: sqlite3.Connection) -> None:
    """Names the pair of each event, and the people who were asked it, in a store that has neither yet."""
    _run(base, _PAIRS)
    for event, text in base.execute("SELECT event, question FROM events").fetchall():
        base.execute("UPDATE events SET record = ? WHERE event = ?", (Question(**json.loads(text)).record, event))
    base.execute("INSERT INTO asked SELECT DISTINCT person, record FROM events WHERE person IS NOT NULL")


def _run(base: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        base.execute(statement)


def _give_back(base: sqlite3.Connection, person: str) -> None:
    """Frees for others what the person holds unanswered; it stays among what the person was asked."""
    base.execute("UPDATE events SET person = NULL WHERE person = ? AND answer IS NULL", (person,))


def _digest(token: str) -> bytes:
    """A token is 256 random bits: one plain hash hides it."""
    return sha256(token.encode()).digest()
