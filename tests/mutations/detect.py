"""The attack suite and the twin run on the program of this checkout, which may be a mutant's copy.

python tests/mutations/detect.py attack SCENARIO | twins SCENARIO     one JSON line: {"caught": bool, "said": str}

Coins, keys and texts are the same in every call.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests/audit", "tests", "."):
    sys.path.insert(0, str(ROOT / folder))

from private_rlhf import runner  # noqa: E402
from private_rlhf.audit.mechanism_bound import Audit, audit_outcomes  # noqa: E402
from private_rlhf.audit.released import private_label  # noqa: E402
from private_rlhf.audit.suite import ATTACKS, Outcome, run_attacks  # noqa: E402
from private_rlhf.audit.twins import verify  # noqa: E402
from private_rlhf.core.errors import UserError  # noqa: E402
from private_rlhf.core.rundir import RunDir  # noqa: E402
from private_rlhf.core.user import another_user  # noqa: E402
from private_rlhf.data.curate import Request, privatize_source  # noqa: E402
from private_rlhf.data.layout import Options  # noqa: E402
from private_rlhf.data.release import read_release  # noqa: E402
from private_rlhf.privacy.counts import noisy_counts  # noqa: E402
from private_rlhf.privacy.keys import keygen  # noqa: E402
from private_rlhf.privacy.local import DrawStore  # noqa: E402
from private_rlhf.privacy.prf import Prf  # noqa: E402
from private_rlhf.recipe import Recipe  # noqa: E402
from private_rlhf.recipe.load import load_recipe  # noqa: E402
from worlds import World, make_world, write_jsonl  # noqa: E402

Found = tuple[bool, str]
OWN = ("data.public_labels=false", "evaluation_labels=private", "data.demonstrations=release", "data.prompts=release",
       "data.evaluation_prompts=evaluation", "data.accept_odd=true", "model.dtype=float32")  # fmt: skip
SHORT = ("sft.max_steps=2", "sft.batch_size=4", "sft.save_steps=2", "ppo.iterations=1", "ppo.reference_samples=2",
         "ppo.rollouts=4", "evaluate.gibbs_candidates=2", "evaluate.num_prompts=4",
         "evaluate.shown_samples=1")  # fmt: skip


# --- attacks ----------------------------------------------------------------------------------------------------------


def release(home: Path, data: Path, name: str, epsilon: float, options: Options | None = None) -> Path:
    """A release of `data` under the key of this home."""
    key = home / "owner.key"
    with another_user(home / "user"):  # a second home is a second holder: one user may not charge pairs under two keys
        if not key.exists():
            keygen(key)
        privatize_source(Request(str(data), home / name, epsilon, key, source="declared", options=options or Options()))
    return home / name


def judged(outcome: Outcome) -> Found:
    """Whether there is a leak, and what was accused first."""
    accused = sorted((row for row in outcome.attacks if row.leak), key=lambda row: row.p_value)
    if accused:
        row = accused[0]
        return True, f"{row.attack}, {row.variant}: {row.correct} of {row.n} right"
    if outcome.findings:
        return True, f"{outcome.findings[0].attack}, {outcome.findings[0].where}: {outcome.findings[0].what}"
    bound = outcome.epsilon_low or 0.0
    return outcome.leak, f"{outcome.events} events, ε ≥ {bound:.2f} proved"


def audited(audit: Audit) -> Found:
    """The same of an audit."""
    return audit.caught, f"audit: ε ≥ {audit.epsilon_low:.2f} proved, {audit.claim:g} claimed"


def in_turn(outcomes: Iterator[Found]) -> Found:
    """The first leak, or what was said last."""
    said: Found = (False, "")
    for said in outcomes:
        if said[0]:
            break
    return said


def attack_release(home: Path) -> Found:
    """4,000 canaries, at ε 0.5 and then at 2 as well; the raw file has empty, equal and contradicting rows too."""
    world = make_world(4000, seed=31)
    data = write_jsonl(home / "raw.jsonl", with_odd_rows(raw_rows(world)))
    first = release(home, data, "low", 0.5)
    return in_turn(judged(run_attacks(roots, world.truth(), attacks=ATTACKS)) for roots in
                   ([first], [first, release(home, data, "high", 2.0)]))  # fmt: skip


def attack_precise(home: Path) -> Found:
    """60,000 canaries at ε = 4, attacks on the labels alone: one step of 1/2^8 shows where few labels are turned."""
    world = make_world(60_000, seed=32)
    done = release(home, write_jsonl(home / "raw.jsonl", raw_rows(world)), "release", 4.0)
    return judged(run_attacks([done], world.truth(), attacks=(private_label,)))


def attack_people(home: Path) -> Found:
    """Two labels of each of 3,000 pairs: by two labellers, then as two events of one. Attacked, and audited: where one
    of the two labels changes, how often the released ones agree."""

    def found(column: str) -> Iterator[Found]:
        world = make_world(3000, seed=33, copies=2)
        rows = [row | {"who": "ann", "event": "1"} | {column: f"{place % 2}"}
                for place, row in enumerate(raw_rows(world))]  # fmt: skip
        data = write_jsonl(home / f"{column}.jsonl", rows)
        done = release(home / column, data, "release", 1.0, Options("who", "event"))
        yield judged(run_attacks([done], world.truth()))
        true, released = both_labels(world), both_released(done)
        alike: dict[bool, list[object]] = {True: [], False: []}
        for prompt, (one, other) in true.items():
            alike[one == other].append(len(set(released[prompt])) == 1)
        yield audited(audit_outcomes(alike[True], alike[False], 1.0))

    for column in ("who", "event"):
        (home / column).mkdir()
    return in_turn(each for column in ("who", "event") for each in found(column))


def both_labels(world: World) -> dict[str, list[int]]:
    """By prompt, whether the lower text is preferred in each of its rows."""
    labels: dict[str, list[int]] = {}
    for (prompt, a, b), label in zip(world.pairs, world.labels, strict=True):
        labels.setdefault(prompt, []).append(label if a < b else -label)
    return labels


def both_released(root: Path) -> dict[str, list[int]]:
    """The same of a release."""
    labels: dict[str, list[int]] = {}
    for row in read_release(root):
        labels.setdefault(str(row.prompt), []).append(1 if str(row.chosen) < str(row.rejected) else -1)
    return labels


def attack_copies(home: Path) -> Found:
    """Each of 8,000 pairs comes twice as one event: the first label counts, so the second is to cost nothing."""
    world = make_world(8000, seed=38, copies=2)
    done = release(home, write_jsonl(home / "raw.jsonl", raw_rows(world)), "release", 2.0)
    released = both_released(done)
    outcomes: dict[int, list[object]] = {-1: [], 1: []}
    for prompt, (first, second) in both_labels(world).items():
        if first < 0:
            outcomes[second].append(tuple(released[prompt]))
    return audited(audit_outcomes(outcomes[1], outcomes[-1], 0.0))


def attack_corrected(home: Path) -> Found:
    """Every one of 2,000 labels is corrected: without a word, which must be refused or else cost nothing more; then by
    the rules, at the sum of both ε."""

    def both(name: str, column: str | None) -> tuple[Path, Path]:
        world = make_world(2000, seed=34)
        (home / name).mkdir()
        first = release(home / name, write_jsonl(home / name / "raw.jsonl", raw_rows(world)), "first", 0.5)
        ids = {row.prompt: row.record_id for row in read_release(first)}
        rows = [row | {"event": "corrected", "corrects": ids[row["prompt"]]} for row in raw_rows(turned(world))]
        data = write_jsonl(home / name / "corrected.jsonl", rows)
        options = Options(event_column="event", corrects_column=column) if column else Options()
        return first, release(home / name, data, "second", 0.5, options)

    def found(name: str, column: str | None, claim: float) -> Found:
        try:
            roots = both(name, column)
        except UserError as error:
            return False, f"refused: {error}"
        truth = signs_of(make_world(2000, seed=34))
        return audited(audit_joint(roots, truth, claim))

    return in_turn(found(*given) for given in (("silently", None, 0.5), ("named", "corrects", 1.0)))


def attack_renamed(home: Path) -> Found:
    """The same labels again under other event names: refused, or else covered by one ε."""
    world = make_world(6000, seed=35)
    first = release(home, write_jsonl(home / "raw.jsonl", raw_rows(world)), "first", 0.5)
    rows = [row | {"event": "again"} for row in raw_rows(world)]
    try:
        again = release(home, write_jsonl(home / "again.jsonl", rows), "second", 0.5, Options(event_column="event"))
    except UserError as error:
        return False, f"refused: {error}"
    return audited(audit_joint((first, again), signs_of(world), 0.5))


def attack_counts(home: Path) -> Found:
    """Two counts of the same events that differ by one label, asked under 20,000 keys."""
    names, epsilon = {"one": bytes(32), "two": bytes(31) + b"1"}, 1.0

    def answers(counts: Mapping[str, int], first: int) -> list[object]:
        keys = (Prf(number.to_bytes(32, "big")) for number in range(first, first + 20_000))
        found = (noisy_counts(prf, names, counts, epsilon)["counts"] for prf in keys)
        return [(count["one"], count["two"]) for count in found]

    plus, minus = answers({"one": 10, "two": 10}, 0), answers({"one": 11, "two": 11}, 20_000)
    return audited(audit_outcomes([_clipped(pair) for pair in plus], [_clipped(pair) for pair in minus], epsilon))


def _clipped(pair: Any) -> tuple[int, ...]:
    return tuple(min(15, max(6, count)) for count in pair)


def attack_local(home: Path) -> Found:
    """Each of 8,000 events is sent to the local filter twice."""
    store = DrawStore(home / "draws.db", (-1, 1))
    outcomes: dict[int, list[object]] = {0: [], 1: []}
    for number in range(8000):
        event = [(f"event {number}", number % 2)]
        outcomes[number % 2].append((*store.answer(event, 0.5), *store.answer(event, 0.5)))
    store.close()
    return audited(audit_outcomes(outcomes[1], outcomes[0], 0.5))


def attack_stage(home: Path) -> Found:
    """2,000 canaries through the privatise stage of a recipe, evaluation pairs included."""
    return attack_run(home, 2000, "privatize")


def attack_run(home: Path, count: int = 600, *stages: str) -> Found:
    """600 canaries through a whole run of the tiny recipe, shortened."""
    world = make_world(count, seed=36)
    data = write_jsonl(home / "raw.jsonl", raw_rows(world))
    run = RunDir(home / "run")
    stages_of(*stages)(recipe_of(home, data), run)
    return judged(run_attacks([run.root], world.truth()))


def raw_rows(world: World) -> list[dict[str, Any]]:
    """The rows of a raw file."""
    names = ("prompt", "chosen", "rejected")
    return [dict(zip(names, world.preferred(number), strict=True)) for number in range(len(world.pairs))]


def with_odd_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With rows that are dropped: an empty response, two equal ones, copies of other rows that contradict them."""
    blank = [{"prompt": f"Odd {i}?", ("chosen", "rejected")[i % 2]: " ", ("rejected", "chosen")[i % 2]: "text"}
             for i in range(20)]  # fmt: skip
    equal = [{"prompt": f"Equal {i}?", "chosen": "text", "rejected": "text"} for i in range(5)]
    copies = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:30]]
    return [*rows, *blank, *equal, *copies]


def turned(world: World) -> World:
    """With every label the other one."""
    return World(world.pairs, [-label for label in world.labels])


def signs_of(world: World) -> dict[str, int]:
    """By prompt, whether the lower text is preferred."""
    return {prompt: label if a < b else -label for (prompt, a, b), label in zip(world.pairs, world.labels, strict=True)}


def audit_joint(roots: Sequence[Path], truth: Mapping[str, int], claim: float) -> Audit:
    """Of the joint outcomes of several releases of the same records."""
    released: dict[str, list[int]] = {}
    for root in roots:
        for row in read_release(root):
            released.setdefault(str(row.prompt), []).append(1 if str(row.chosen) < str(row.rejected) else -1)
    outcomes: dict[int, list[object]] = {-1: [], 1: []}
    for prompt, signs in released.items():
        outcomes[truth[prompt]].append(tuple(signs))
    return audit_outcomes(outcomes[1], outcomes[-1], claim)


# --- twins ------------------------------------------------------------------------------------------------------------


def recipe_of(home: Path, data: Path, *overrides: str) -> Recipe:
    """The tiny recipe on own data, shortened."""
    own = (f"data.preferences={data}", f"model.cache_dir={home / 'cache'}", f"privatize.key_file={home / 'owner.key'}")
    return load_recipe(Recipe, ROOT / "configs" / "tiny.yaml",
                       [*OWN, *SHORT, *own, "privatize.epsilon=0.5", "data.limit=2500", *overrides])  # fmt: skip


def stages_of(*names: str) -> Callable[[Recipe, RunDir], None]:
    """Runs these stages; all of them where none is named."""

    def execute(recipe: Recipe, run: RunDir) -> None:
        for selection in [runner.Selection(only=name) for name in names] or [runner.Selection()]:
            runner.execute(recipe, run, selection)

    return execute


def twins(home: Path, rows: int, *stages: str) -> Found:
    """Twins of a raw file with labellers, event names, and rows that are dropped."""
    places: dict[str, int] = {}  # copies of a row have one labeller and one event
    people = []
    for row in with_odd_rows(raw_rows(make_world(rows, seed=37))):
        place = places.setdefault(row["prompt"], len(places))
        people.append(row | {"who": f"person {place % 7}", "event": "" if place % 3 else f"{place}"})
    columns = ("privatize.labeler_column=who", "privatize.event_column=event")
    data = write_jsonl(home / "raw.jsonl", people)
    try:
        verdict = verify(recipe_of(home, data, *columns), home / "twins", stages_of(*stages), runner.NAMES)
    except UserError as error:
        return False, f"refused: {error}"
    assert verdict is not None
    return bool(verdict.comparison.leaks), str(verdict)


SCENARIOS: dict[str, dict[str, Callable[[Path], Found]]] = {
    "attack": {
        "release": attack_release,
        "precise": attack_precise,
        "people": attack_people,
        "copies": attack_copies,
        "corrected": attack_corrected,
        "renamed": attack_renamed,
        "counts": attack_counts,
        "local": attack_local,
        "stage": attack_stage,
        "run": attack_run,
    },
    "twins": {
        "release": lambda home: twins(home, 2600, "privatize"),
        "run": lambda home: twins(home, 120),
    },
}


@contextmanager
def everything_drawn_alike(home: Path) -> Iterator[None]:
    """Keys and coins are the same in every call, and nothing is the user's."""
    dice = random.Random("mutations")
    secrets.token_bytes = lambda nbytes=None: dice.randbytes(nbytes or 32)
    secrets.randbits = dice.getrandbits
    os.environ["XDG_STATE_HOME"] = str(home / "user")
    os.fsync = lambda fd: None  # nothing here has to outlive the machine
    yield


def main(kind: str, scenario: str) -> None:
    """Prints one JSON line."""
    with tempfile.TemporaryDirectory() as name, everything_drawn_alike(Path(name)):
        caught, said = SCENARIOS[kind][scenario](Path(name))
    print(json.dumps({"caught": caught, "said": " ".join(said.split()).replace(name, "…")}, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
