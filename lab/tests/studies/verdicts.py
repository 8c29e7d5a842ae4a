"""Every error of `in_validation` against the verdicts of the study concerned, quick mode.

python lab/tests/studies/verdicts.py [PART …]    prints a line an error; resumes: what is in the results, for the error
                                                  and the sources of the study as they are now, is not run again; then
                                                  writes docs/results/verdicts.md
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

from in_validation import PARTS, Part  # noqa: E402
from mutations.mutant import Mutant, plant, run_in  # noqa: E402

RESULTS = Path(__file__).with_suffix(".jsonl")
PAGE = ROOT / "docs" / "results" / "verdicts.md"
TABLE = PAGE.parent / "data" / "verdicts.csv"
WITHIN_SLACK = ("O11",)  # no error: a bound that is far from tight may be that much larger
UNSEEN: tuple[str, ...] = ()
_PROGRAM = (
    "import importlib, json, sys\n"
    "sys.path.insert(0, 'lab')\n"
    "from private_rlhf.validation.lab import _stretched\n"
    "study = vars(importlib.import_module(f'private_rlhf_lab.studies.{sys.argv[1]}.run'))\n"
    "claims = [_stretched(one, 100) if one.interval else one for one in eval(sys.argv[2], study)]\n"
    "print(json.dumps([(f'{one.claim} [{one.source}]', one.verdict, one.measured) for one in claims]))\n"
)

Row = Mapping[str, Any]


def judged(mutant: Mutant | None, part: Part) -> Row:
    """The refuted claims with what was measured, in a copy of the checkout; crash: the last line if it did.

    Intervals are stretched for 100 claims, more than a study has: what is refuted here is in the whole study too.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        done = run_in(plant(mutant, Path(folder) / "checkout", also=("lab",)), "-c", _PROGRAM, part.study, part.claims)
    if done.returncode:
        return {"refuted": {}, "crash": done.stderr.strip().splitlines()[-1]}
    claims = json.loads(done.stdout.splitlines()[-1])
    return {"refuted": {claim: str(measured) for claim, verdict, measured in claims if verdict == "refuted"}}


def flipped(row: Row, sound: Row) -> dict[str, str]:
    """Claims that are refuted under the error and not without it."""
    return {claim: measured for claim, measured in row["refuted"].items() if claim not in sound["refuted"]}


def name_of(mutant: Mutant | None, part: Part) -> str:
    """In the results."""
    return mutant.name if mutant else f"sound: {part.name}"


def version(mutant: Mutant | None, part: Part) -> str:
    """Of the error. The program goes on: `pytest -m slow lab/tests/studies` asks whether the verdicts still do."""
    return hashlib.sha256((repr(mutant) + part.claims + _PROGRAM).encode()).hexdigest()[:16]


def sources(part: Part) -> str:
    """Of what the study is made of: its own files, those that all studies share, the accountants."""
    folders = [ROOT / "pipeline" / each for each in ("accounting", "validation")]
    folders += [ROOT / "lab" / "private_rlhf_lab" / each for each in ("accounting", f"studies/{part.study}")]
    files = sorted(path for folder in folders for path in folder.glob("*.py"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def is_current(row: Row, mutant: Mutant | None, part: Part) -> bool:
    """Whether a row of the results is of this error and these sources."""
    return bool(row.get("version") == version(mutant, part) and row.get("sources") == sources(part))


def read_results() -> dict[str, Row]:
    """By name."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def page(results: Mapping[str, Row]) -> str:
    """The finding, and the errors of each study that are caught, as Markdown."""
    caught = {each.name: bool(flipped(results[each.name], results[name_of(None, part)]))
              for part in PARTS for each in part.errors}  # fmt: skip
    studies: dict[str, list[str]] = {}
    for part in PARTS:
        studies.setdefault(part.name.split(",")[0], []).extend(
            each.name for each in part.errors if each.name not in WITHIN_SLACK
        )
    real = [name for names in studies.values() for name in names]
    return "\n".join([
        "# Errors planted into accountants and experiments",
        "",
        f"**The studies' own claims catch {sum(caught[name] for name in real)} of {len(real)} planted errors.** "
        f"{', '.join(WITHIN_SLACK)} is not an error: the bound has that"
        f"{chr(10)}much slack." + (f" Unseen: {', '.join(UNSEEN)}." if UNSEEN else ""),
        "",
        "| study | errors planted | caught |",
        "|---|---|---|",
        *(f"| {name} | {len(names)} | {sum(caught[each] for each in names)} |" for name, names in studies.items()),
        "",
        "Each error is planted into a copy of the program. Then the claims of the study that it concerns are",
        "decided anew, as `python -m private_rlhf_lab.studies STUDY --quick` does. An error is caught if a claim is",
        "refuted that is not refuted without it. Unit tests are not counted. [Every error, and the claims that it",
        "refutes](data/verdicts.csv).",
        "",
        "Made by `python lab/tests/studies/verdicts.py`, which resumes: it measures again the rows of studies whose",
        "sources have changed since the date of the row.",
    ]) + "\n"  # fmt: skip


def table(results: Mapping[str, Row]) -> str:
    """A row for each error as CSV. A star at the date: measured before rows named their sources, and so due again."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["error", "what is planted", "claims", "date", "newly refuted", "the first of them: measured"])
    for part in PARTS:
        for each in part.errors:
            row = results[each.name]
            refuted = flipped(row, results[name_of(None, part)])
            first = next((f"{claim}: {_short(measured)}" for claim, measured in refuted.items()), "–")
            crash = row.get("crash")
            rows.writerow([each.name, each.said, part.name, row["date"] + ("" if row["sources"] else "*"), len(refuted),
                           f"crash: {crash}" if crash else first])  # fmt: skip
    return text.getvalue()


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _short(measured: str) -> str:
    value = float(measured)
    return f"{value:.4g}" if math.isfinite(value) else measured


def main(chosen: Sequence[str]) -> int:
    """Runs what is not there yet of the parts named, or of all, and writes the page. 1 if an error goes unseen."""
    results, unseen = read_results(), 0
    order = [name_of(each, part) for part in PARTS for each in (None, *part.errors)]
    for part in (part for part in PARTS if not chosen or part.name in chosen):
        for mutant in (None, *part.errors):
            name = name_of(mutant, part)
            if not is_current(results.get(name, {}), mutant, part):
                made = {"version": version(mutant, part), "sources": sources(part), "date": _today()}
                results[name] = {"name": name, **made, **judged(mutant, part)}
                if mutant is None and "crash" in results[name]:
                    raise RuntimeError(f"{part.name} fails without an error: {results[name]['crash']}")
                rows = [json.dumps(results[each], ensure_ascii=False) + "\n" for each in order if each in results]
                RESULTS.write_text("".join(rows), encoding="utf-8")
            found = flipped(results[name], results[name_of(None, part)])
            unseen += mutant is not None and not found and name not in (*WITHIN_SLACK, *UNSEEN)
            said = results[name].get("crash") or next(iter(found), "")
            print(f"{name:8} {len(found):3} newly refuted", said, flush=True)
    if set(order) <= results.keys():
        PAGE.write_text(page(results), encoding="utf-8")
        TABLE.write_text(table(results), encoding="utf-8")
    return int(unseen > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
