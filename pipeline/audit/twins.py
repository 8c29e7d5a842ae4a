"""Twin runs: a check that whatever a run writes depends on a label only through its released bit.

Two copies of the preferences, A and B, carry labels of fair coins. Where the mechanism, under a throw-away key,
releases a coin of its own without a look at the label, A and B carry opposite labels; elsewhere the same one. So both
twins have the same released bits everywhere, and other labels wherever that is possible. The recipe runs on each, from
the same state, under the same paths. A sound run writes the same bytes twice, times and memory apart (`twin_files`):
any path from a label to a file shows, whoever took it, and no statistics are needed.

A recipe that asks (`online`) has no preferences. A program of fair coins answers in A, and of the opposite ones in B;
B's store of draws is a copy of A's, and an event that was drawn keeps its draw, whatever the answer is now.

The order of chosen and rejected in the owner's files is forgotten before anything else is looked at: no true label is
in either twin. The throw-away key has a state and a user's folder of its own, so no ledger of the owner's is touched.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from private_rlhf.audit.twin_files import Comparison, Passages, compare_folders
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.user import another_user
from private_rlhf.core.world import barrier, join_world
from private_rlhf.data.curate import response
from private_rlhf.data.declared_columns import PAIR
from private_rlhf.data.layout import Layout
from private_rlhf.data.raw_source import RawSource
from private_rlhf.data.release_import import names_bundle
from private_rlhf.data.sources import Row, run_splits
from private_rlhf.labelling.questions import read_rows
from private_rlhf.privacy.batches import apply_coins, canonicalize, event_tags
from private_rlhf.privacy.keys import PrivacyKey, keygen, load_key, make_private_folder
from private_rlhf.privacy.mechanism import LevelledResponse, RandomizedResponse
from private_rlhf.privacy.prf import Prf
from private_rlhf.recipe import Recipe
from private_rlhf.report.pages import time_passages
from private_rlhf.report.run_facts import read_run

TWINS = ("A", "B")
BATCH_ROWS = 1024
_COIN = b"twin coin"

Execute = Callable[[Recipe, RunDir], None]


@dataclass(frozen=True)
class Verdict:
    """turned: labels that differ between the twins, of all `labels`."""

    labels: int
    turned: int
    comparison: Comparison

    def __str__(self) -> str:
        """One line."""
        files = self.comparison
        start = f"{self.turned} of {self.labels} labels turned: {files.compared} files compared, "
        if files.leaks:
            return f"{start}a label reaches {len(files.leaks)} of them: {'; '.join(files.leaks[:3])}"
        same, fields = files.compared - len(files.differing), ", ".join(files.fields) or "none"
        return f"{start}{same} identical, {len(files.differing)} differ only in the declared fields ({fields})"


def check_twins(recipe: Recipe, folder: Path) -> None:
    """Reject recipes for which twin runs would prove nothing. Raises: UserError."""
    recipe.data.check_preferences()
    if not recipe.private:
        raise UserError("verify-run needs labels under a key: a finite privatize.epsilon and no insecure_seed")
    if (recipe.data.public_labels and recipe.online is None) or recipe.evaluation_labels != "private":
        raise UserError(
            "verify-run is for data.public_labels=false and evaluation_labels=private: labels that are read raw, and"
            " noisy counts of them, may differ between twins"
        )
    if recipe.online is not None and recipe.online.after is not None:
        raise UserError("online.after must be null for verify-run, which asks anew: verify the first run's recipe")
    if names_bundle(recipe.data.preferences):
        raise UserError(f"{recipe.data.preferences}: is a released bundle and holds no labels to turn; give raw ones")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: is left from an earlier verify-run; look at it if you need to, then remove it")


def verify(recipe: Recipe, folder: Path, execute: Execute, stages: Sequence[str], keep: bool = False) -> Verdict | None:
    """Make the twins in `folder` (0700, new, removed at the end unless `keep`), run both and compare them.

    execute: runs a recipe in a run directory. stages: names of all stages that exist. Returns None on processes other
    than the main one. UserError: `check_twins`, an unreadable source, or labels that cannot be turned.
    """
    world = join_world()
    barrier(world)
    check_twins(recipe, folder)
    barrier(world)
    try:
        here, labels, turned = folder / "twin", 0, 0
        asks, homes = recipe.online is not None, (folder / TWINS[0], folder / TWINS[1])
        if world.main and asks:
            make_answerers(homes)
        elif world.main:
            labels, turned = make_twins(recipe, folder)
        recipe = answered_twin(recipe, here) if asks else twin_recipe(recipe, here)
        silent = replace(recipe.ppo, report_to=[], report_samples=False)  # trackers keep times
        recipe = replace(recipe, reward=replace(recipe.reward, accept_coin=True), ppo=silent)  # their labels are coins
        barrier(world)
        from private_rlhf.lm.base_models import base_checkpoint  # slow: wrong input is refused first

        base_checkpoint(recipe.model)  # before the first twin, or the second would find what the first made
        for name in TWINS:
            if world.main:
                (folder / name).rename(here)
            barrier(world)
            with another_user(here / "user"):
                execute(recipe, RunDir(here / "run"))
            barrier(world)
            if world.main:
                here.rename(folder / name)
                if asks and name == TWINS[0]:
                    labels = turned = carry_draws(*homes)
        if not world.main:
            return None
        found = compare_folders(homes[0] / "run", homes[1] / "run", stages, _passages(recipe, stages))
        return Verdict(labels, turned, found)
    finally:
        if world.main and not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _passages(recipe: Recipe, stages: Sequence[str]) -> Passages:
    """Passages about time and memory in the report of a finished run of the recipe."""
    absent = {"report", *recipe.absent_stages}  # it does not know its own time when it writes
    names = [name for name in stages if name not in absent]

    def passages(root: Path) -> dict[str, tuple[str, ...]]:
        run = RunDir(root)
        return time_passages(read_run(run, names)) if (run.stage("report") / "report.html").is_file() else {}

    return passages


def twin_recipe(recipe: Recipe, here: Path) -> Recipe:
    """The recipe on the data and under the key of the twin that lies in `here`."""
    place = str(here / Path(_file_names(recipe)[0]).parts[0])
    data = replace(recipe.data, preferences=place, format=None, label_column=None, labels=None, split=None)
    privatize = replace(recipe.privatize, key_file=here / "owner.key", corrects_column=None, add_up_renamed=False)
    privatize = replace(privatize, budget=None, budget_per="event")
    return replace(recipe, data=data, privatize=privatize)


# --- the data ---------------------------------------------------------------------------------------------------------


def make_twins(recipe: Recipe, folder: Path) -> tuple[int, int]:
    """Write A and B: the preferences that the recipe names, with coins for labels, a key, and the state of a new
    ledger. Returns (labels, of those turned). Memory: 100 bytes a row. UserError: an unreadable source, or no label
    that can be turned."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_private_folder(folder)
    homes = [folder / name for name in TWINS]
    make_private_folder(homes[0])
    key = load_key(keygen(homes[0] / "owner.key"))
    shutil.copytree(homes[0], homes[1])  # the same key, and no ledger yet
    coins = Prf(secrets.token_bytes(32))
    labels = turned = 0
    # under the twin's key: a ledger of earlier versions may tell names apart that its new one takes for one
    settings = replace(recipe.privatize, corrects_column=None, key_file=homes[0] / "owner.key")
    intakes = RawSource(recipe.data, settings, folder).open_sources()
    mechanism = response(recipe.privatize.epsilon, intakes[0].layout.options)
    for name, intake in zip(_file_names(recipe), intakes, strict=True):
        layout, plain, seen = intake.layout, intake.layout.plain, set[bytes]()
        columns = plain.wanted
        with ExitStack() as stack:
            for home in homes:
                (home / name).parent.mkdir(mode=0o700, exist_ok=True)
            files = [stack.enter_context((home / name).open("x", encoding="utf-8")) for home in homes]
            for part in intake.parts:
                where = f"{part.name}, {part.unit}"
                rows = ((number, pair) for number, pair, _ in layout.judged_rows(part.rows(layout.wanted), where))
                while some := list(islice(rows, BATCH_ROWS)):
                    signs, first = _labels(some, plain, where, key, mechanism, coins, seen)
                    labels, turned = labels + int(first.sum()), turned + int((signs[:, 0] != signs[:, 1])[first].sum())
                    for (_, row), pair in zip(some, signs, strict=True):
                        stripped = {column: row[column] for column in columns if column in row}  # others may tell
                        for file, sign in zip(files, pair, strict=True):
                            file.write(json.dumps(_ordered(stripped, sign), ensure_ascii=False) + "\n")
    if not turned:
        raise UserError("verify-run: at this epsilon no label could be turned, so twins show nothing; lower it")
    return labels, turned


def _file_names(recipe: Recipe) -> tuple[str, ...]:
    """Of the twins' preferences, below their homes."""
    if len(run_splits(recipe.data.preferences, recipe.data.split)) == 1:
        return ("preferences.jsonl",)
    return ("preferences/train.jsonl", "preferences/eval.jsonl")


def _labels(
    rows: list[tuple[int, Row]],
    layout: Layout,
    where: str,
    key: PrivacyKey,
    mechanism: RandomizedResponse | LevelledResponse,
    coins: Prf,
    seen: set[bytes],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """The signs (n, 2) with which `_ordered` writes each row in A and in B, and which rows (n,) are the first of their
    event. The engine drops the others, so they are turned one and all. seen: the events of the source so far."""
    forgotten = [(number, _ordered(row, 1)) for number, row in rows]
    keys = canonicalize(layout.row_columns(forgotten, where), 0, key.prf).keys
    now = keys["label"].copy()  # that a row has when it is written with sign 1
    blocks = coins.blocks(_COIN, map(bytes, event_tags(keys)))
    one = np.where(np.frombuffer(blocks, np.uint8).reshape(len(keys), -1)[:, 0] & 1, 1, -1)
    keys["label"] = 0  # no label at all: what comes out all the same does not depend on it
    free = apply_coins(mechanism, key.prf, keys) != 0
    places = keys["position"].astype(np.int64)
    signs, first = np.tile(np.array([1, -1], np.int8), (len(rows), 1)), np.zeros(len(rows), bool)
    for place, tag in sorted(zip(places.tolist(), map(bytes, event_tags(keys)), strict=True)):
        first[place] = tag not in seen
        seen.add(tag)
    free |= ~first[places]
    signs[places] = np.stack([now * one, now * np.where(free, -one, one)], axis=1)
    return signs, first


def _ordered(row: Row, sign: int) -> Row:
    """The row with its responses in an order of their own (which was chosen is forgotten), or in the opposite one."""
    low, high = sorted((row.get(name) for name in PAIR), key=lambda text: json.dumps(text, default=str))
    return row | dict(zip(PAIR, (high, low) if sign < 0 else (low, high), strict=True))


PROGRAM = """\
import hashlib, json, sys
for question in map(json.loads, sys.stdin):
    coin = hashlib.sha256(b"{salt}" + question["id"].encode()).digest()[0] & 1
    print(json.dumps({{"id": question["id"], "label": {one} if coin else {other}}}))
"""


def make_answerers(homes: tuple[Path, Path]) -> None:
    """Writes both programs into new owner-only folders."""
    salt = secrets.token_hex(16)
    make_private_folder(homes[0].parent)
    for home, (one, other) in zip(homes, ((1, -1), (-1, 1)), strict=True):
        make_private_folder(home)
        (home / "answer.py").write_text(PROGRAM.format(salt=salt, one=one, other=other), encoding="utf-8")


def answered_twin(recipe: Recipe, here: Path) -> Recipe:
    """The recipe with the program of the twin in `here` as its labeller: it is nobody, and answers at one ε."""
    assert recipe.online is not None
    command = shlex.join([sys.executable, str(here / "answer.py")])
    online = replace(recipe.online, labeller="command", folder=here / "labeller", command=command, crowd=None)
    privatize = replace(recipe.privatize, person_budget=None, person_questions=None, epsilon_levels=None)
    return replace(recipe, online=online, privatize=privatize, data=replace(recipe.data, public_labels=False))


def carry_draws(home: Path, other: Path) -> int:
    """Gives the twin in `other` the draws of the one in `home`, which has run; returns how many answers it got."""
    make_private_folder(other / "labeller")
    shutil.copy2(home / "labeller" / "draws.db", other / "labeller" / "draws.db")
    answers = sum(1 for _ in read_rows(home / "labeller" / "answers.jsonl"))
    if not answers:
        raise UserError("verify-run: no question was asked, so twins show nothing")
    return answers
