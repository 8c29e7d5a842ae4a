"""The catalogue of bad inputs as a table: `python tests/cli/bad_inputs/table.py [--all] [--show] [--write PAGE]`.

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

from cli.bad_inputs import asking, bundles, commands, ledgers, messages, plans, raw_data, recipes
from cli.bad_inputs.sandbox import KINDS, MEMORY_MIB, SECONDS, SOUND, Outcome, Row, Sandbox

GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "commands": commands.rows,
    "raw data": raw_data.rows,
    "bundles": bundles.rows,
    "recipes": recipes.rows,
    "plans": plans.rows,
    "ledgers": ledgers.rows,
    "asking": asking.rows,
    "messages": messages.rows,
}


def outcomes(sandbox: Sandbox, group: str, slow: bool = False) -> list[Outcome]:
    """What came of a group's rows; those marked slow where asked for."""
    return [sandbox.run(row) for row in GROUPS[group]() if slow or not row.slow]


PAGE = """\
# Bad inputs

**Of {every:,} bad inputs, {defects:,} end in a traceback, a hang, too much memory, silent damage or a wrong answer.**
The others are refused in one line, are legal, or get a verdict. The inputs are commands that read options, files and
folders that are odd, damaged or hostile.

| inputs | number | refused | accepted | verdict | traceback | hang | memory | silent damage | wrong answer |
|---|---|---|---|---|---|---|---|---|---|
{rows}

Each command runs in a folder with a key, its ledger, a release and a recipe. It must end within {seconds:.0f} seconds
and {memory} MiB, with exit code 2, one line, and every byte, mode and link around it as before.

*Accepted* are the odd inputs that are legal; a *verdict* is exit code 1 with its reason. The recipes are mostly one key
each with a value of another type or out of its range, made from the schema.

Made by `.venv/bin/python tests/cli/bad_inputs/table.py --all --write docs/results/bad_inputs.md`.
"""


def page(found: dict[str, list[Outcome]]) -> str:
    """Counts by class, in Markdown."""
    every = {**found, "**all**": [each for some in found.values() for each in some]}
    rows = []
    for group, some in every.items():
        counts = Counter(each.kind for each in some)
        rows.append(f"| {group} | {len(some):,} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + " |")
    defects = sum(each.kind not in SOUND for each in every["**all**"])
    return PAGE.format(rows="\n".join(rows), every=len(every["**all**"]), defects=defects, seconds=SECONDS,
                       memory=MEMORY_MIB)  # fmt: skip


def main() -> int:
    """Prints the table; exit code 1 if there is a defect."""
    parser = argparse.ArgumentParser(description="The table of bad inputs.")
    parser.add_argument("--all", action="store_true", help="slow rows too")
    parser.add_argument("--show", action="store_true", help="every row with what was said")
    parser.add_argument("--group", choices=GROUPS, action="append")
    parser.add_argument("--write", type=Path, help="the page of the documentation")
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
    if given.write:
        given.write.write_text(page(found), encoding="utf-8")
    counts = Counter(each.kind for each in every)
    print(f"\n{len(every)} inputs, at most {max(each.seconds for each in every):.1f} s each")
    for kind in KINDS:
        print(f"{kind:<18} {counts[kind]:>5}")
    return 1 if any(each.kind not in SOUND for each in every) else 0


if __name__ == "__main__":
    sys.exit(main())
