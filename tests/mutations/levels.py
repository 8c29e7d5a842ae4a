"""Scenarios of releases in which each label has an ε of its own, as those of `detect.py`.

python tests/mutations/levels.py attack levels | twins levels     one JSON line: {"caught": bool, "said": str}
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import detect
from detect import Found, Options, Request, judged, make_world, raw_rows, recipe_of, run_attacks, stages_of, write_jsonl

LEVELS = (0.5, 1.0, 4.0)


def people(seed: int, count: int) -> list[dict[str, object]]:
    """Rows of five people, each with an ε of their own."""
    rows = raw_rows(make_world(count, seed=seed))
    return [row | {"who": f"person {place % 5}", "eps": LEVELS[place % 5 % 3]} for place, row in enumerate(rows)]


def attack(home: Path) -> Found:
    """4,000 canaries, whose holder says that every level was set before its label."""
    data, key = write_jsonl(home / "raw.jsonl", people(39, 4000)), home / "owner.key"
    options = Options(labeler_column="who", epsilon_column="eps", epsilon_levels=LEVELS)
    with detect.another_user(home / "user"):
        detect.keygen(key)
        request = Request(str(data), home / "out", None, key, source="declared", options=options, levels_before=True)
        detect.privatize_source(request)
    return judged(run_attacks([home / "out"], make_world(4000, seed=39).truth()))


def twins(home: Path) -> Found:
    """Twins of the privatise stage of such rows."""
    settings = ("labeler_column=who", "epsilon_column=eps", "epsilon_levels=[0.5,1,4]", "levels_before_labels=true")
    recipe = recipe_of(home, write_jsonl(home / "raw.jsonl", people(40, 2600)), "privatize.epsilon=4",
                       *(f"privatize.{each}" for each in settings))  # fmt: skip
    verdict = detect.verify(recipe, home / "twins", stages_of("privatize"), detect.runner.NAMES)
    assert verdict is not None
    return bool(verdict.comparison.leaks), str(verdict)


if __name__ == "__main__":
    detect.SCENARIOS = {"attack": {"levels": attack}, "twins": {"levels": twins}}
    detect.main(*sys.argv[1:])
