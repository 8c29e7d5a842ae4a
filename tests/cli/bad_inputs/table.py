"""The catalogue of bad inputs as a table: `python tests/cli/bad_inputs/table.py [--all] [--show]`.

Counts by class: refused, accepted legally, tracebacks, hangs, silent damage, and so on; what is no sound outcome is
listed. The default suite asks the same (`tests/cli/test_catalogue.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli.bad_inputs import bundles, commands, ledgers, plans, raw_data, recipes
from cli.bad_inputs.sandbox import KINDS, SOUND, Outcome, Row, Sandbox

GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "commands": commands.rows,
    "raw data": raw_data.rows,
    "bundles": bundles.rows,
    "recipes": recipes.rows,
    "plans": plans.rows,
    "ledgers": ledgers.rows,
}


def outcomes(sandbox: Sandbox, group: str, slow: bool = False) -> list[Outcome]:
    """What came of a group's rows; those marked slow where asked for."""
    return [sandbox.run(row) for row in GROUPS[group]() if slow or not row.slow]


def main() -> int:
    """Prints the table; exit code 1 if there is a defect."""
    parser = argparse.ArgumentParser(description="The table of bad inputs.")
    parser.add_argument("--all", action="store_true", help="slow rows too")
    parser.add_argument("--show", action="store_true", help="every row with what was said")
    parser.add_argument("--group", choices=GROUPS, action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder) / "box")
        sandbox.fill()
        found: dict[str, list[Outcome]] = {}
        for group in given.group or GROUPS:
            began = time.monotonic()
            found[group] = outcomes(sandbox, group, given.all)
            print(f"{group:<10} {len(found[group]):>5} inputs  {time.monotonic() - began:6.1f} s", flush=True)
    every = [each for some in found.values() for each in some]
    for each in every:
        if given.show or each.kind not in SOUND:
            print(f"  {each.kind}: {each.row.name!r}: {each.said!r}")
    counts = Counter(each.kind for each in every)
    print(f"\n{len(every)} inputs, at most {max(each.seconds for each in every):.1f} s each")
    for kind in KINDS:
        print(f"{kind:<18} {counts[kind]:>5}")
    return 1 if any(each.kind not in SOUND for each in every) else 0


if __name__ == "__main__":
    sys.exit(main())
