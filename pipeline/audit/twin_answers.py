"""Twins of a recipe that asks (section `online`): a program of fair coins answers in A, and of the opposite ones in B.

A's answers are randomised before they are stored, as always, by the operating system. B's store of draws is a copy of
A's: an event that was drawn keeps its draw, whatever the answer is now. So both twins have the same released bits, and
every true answer differs.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.labelling.questions import read_rows
from private_rlhf.privacy.keys import make_private_folder
from private_rlhf.recipe import Recipe

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
    """The recipe with the program of the twin in `here` as its labeller."""
    assert recipe.online is not None
    command = shlex.join([sys.executable, str(here / "answer.py")])
    own = replace(recipe.online, labeller="command", folder=here / "labeller", command=command, crowd=None)
    return replace(recipe, online=own, data=replace(recipe.data, public_labels=False))


def carry_draws(home: Path, other: Path) -> int:
    """Gives the twin in `other` the draws of the one in `home`, which has run; returns how many answers it got."""
    make_private_folder(other / "labeller")
    shutil.copy2(home / "labeller" / "draws.db", other / "labeller" / "draws.db")
    answers = sum(1 for _ in read_rows(home / "labeller" / "answers.jsonl"))
    if not answers:
        raise UserError("verify-run: no question was asked, so twins show nothing")
    return answers
