"""Every mutant against every detector, and the page that says what caught what.

python tests/mutations/matrix.py [NAME …] [--results FILE]    resumes: a mutant whose edits, tests and scenarios are in
                                                              the results as they are now is not run again
python tests/mutations/matrix.py --write                      the page alone, from the results
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.in_bundles import BESIDE, ORDER
from mutations.in_containers import CONTAINERS
from mutations.in_labels import LAW
from mutations.in_runs import RUNS
from mutations.mutant import ROOT, Mutant, plant, run_in

MUTANTS: tuple[Mutant, ...] = (*ORDER, *LAW, *BESIDE, *CONTAINERS, *RUNS)
RESULTS = ROOT / "tests" / "mutations" / "results.jsonl"
PAGE = ROOT / "docs" / "results" / "mutations.md"
TABLE = PAGE.parent / "data" / "mutations.csv"
ARCHITECTURE = ("tests/architecture/test_label_reach.py", "tests/architecture/test_raw_labels.py")
VERIFY = "verify-release"
DETECTORS = ("attack", "twins", VERIFY, "tests", "architecture")
WHAT = {
    "attack": "`private-rlhf attack` on planted canaries, or the audit of what a mechanism answers",
    "twins": "`private-rlhf verify-run`, two runs on coin labels that differ wherever the released bits allow",
    VERIFY: "`private-rlhf verify-release --as-published` of the sound program refuses the release",
    "tests": "the named tests of the default suite fail",
    "architecture": "tests that read from the sources who can reach a label fail",
}
DEFAULT = ("tests", "architecture")  # checks of the default suite
SOUND = "the program as it is"


@dataclass(frozen=True)
class Result:
    """By detector: True for caught, False for missed, None where it does not apply; and what it said."""

    caught: dict[str, bool | None]
    said: dict[str, str]


def enough(caught: dict[str, bool | None]) -> bool:
    """What is asked of every mutant: two detectors, one of them a check of the default suite."""
    return sum(map(bool, caught.values())) >= 2 and any(caught[name] for name in DEFAULT)


def run_mutant(mutant: Mutant | None, sound: Sequence[Mutant] = MUTANTS) -> Result:
    """All detectors that apply, each in processes of its own, on a copy of the checkout. None: the program as it is, on
    everything that the mutants `sound` are shown."""
    shown = [mutant] if mutant else sound
    caught: dict[str, bool | None] = dict.fromkeys(DETECTORS)
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = plant(mutant, Path(name) / "checkout")
        scenarios = {
            "attack": dict.fromkeys(scenario for one in shown for scenario in one.attacks),
            "twins": dict.fromkeys(one.twins for one in shown if one.twins is not None),
        }
        for kind, tried in scenarios.items():
            for scenario in tried:
                answer = detect(copy, kind, scenario)
                caught[kind] = bool(caught[kind]) or answer["caught"]
                said[kind] = answer["said"]
        if "release" in scenarios["attack"]:
            caught[VERIFY], said[VERIFY] = refused(copy)
        for kind, tests in (("tests", [test for one in shown for test in one.tests]), ("architecture", ARCHITECTURE)):
            if tests:
                caught[kind], said[kind] = failing(copy, list(dict.fromkeys(tests)))
    return Result(caught, said)


def detect(copy: Path, kind: str, scenario: str) -> dict[str, Any]:
    """The answer of `detect` in the copy, or of `levels` for its scenario."""
    done = run_in(copy, str(copy / "tests" / "mutations" / _script(scenario)), kind, scenario)
    if done.returncode:
        raise RuntimeError(f"{kind} {scenario}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _script(scenario: str) -> str:
    return "levels.py" if scenario == "levels" else "detect.py"


def refused(copy: Path) -> tuple[bool, str]:
    """Whether this checkout's `verify-release --as-published` refuses a release that the copy makes, and its words."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        made = run_in(copy, str(copy / "tests" / "mutations" / "release.py"), name)
        if made.returncode:
            raise RuntimeError(f"no release: {made.stderr[-2000:]}")
        bundle = str(Path(name) / "release")
        done = run_in(ROOT, "-m", "private_rlhf.cli", "verify-release", "--as-published", bundle)
        if done.returncode not in (0, 2):
            raise RuntimeError(f"verify-release: {done.stderr[-2000:]}")
        return done.returncode == 2, done.stderr.replace(name, "…").strip() or "verified"


def failing(copy: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether some of these tests fail in the copy, and which did first. RuntimeError if pytest could not run them."""
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0", "-x", "-q")
    done = run_in(copy, "-m", "pytest", "-m", "not slow", *options, *tests)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 1, failed[0] if failed else ""


# --- results, and the page --------------------------------------------------------------------------------------------


def version(mutant: Mutant | None) -> str:
    """Of the mutant and of the scenarios, so that a result of before is not taken for one of now. The program itself
    goes on: `pytest -m slow tests/mutations` asks whether the matrix still holds."""
    shown = [*mutant.attacks, *filter(None, [mutant.twins])] if mutant else ["levels"]
    files = dict.fromkeys(["detect.py", *map(_script, shown)])
    scenarios = "".join((ROOT / "tests" / "mutations" / name).read_text(encoding="utf-8") for name in files)
    return hashlib.sha256((repr(mutant or MUTANTS) + scenarios).encode()).hexdigest()[:16]


def read_results(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By name, the last line of each."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["name"]: row for row in rows}


def write_page(results: dict[str, dict[str, Any]]) -> None:
    """Write the page, and the matrix beside it."""
    TABLE.parent.mkdir(exist_ok=True, parents=True)
    PAGE.write_text(page(results), encoding="utf-8")
    TABLE.write_text(table(results), encoding="utf-8")


def page(results: dict[str, dict[str, Any]]) -> str:
    """The finding, and each detector's share, as Markdown."""
    rows = [results[mutant.name]["caught"] for mutant in MUTANTS]
    return "\n".join([
        "# Planted leaks and what finds them",
        "",
        f"**Each of {len(MUTANTS)} planted leaks is caught by two detectors or more.** One of the two (tests or",
        "architecture) is part of the default suite. The program as it is trips none of them.",
        "",
        "| detector | what it is | caught, of those where it applies |",
        "|---|---|---|",
        *(f"| {name} | {WHAT[name]} | {_share([row[name] for row in rows])} |" for name in DETECTORS),
        "",
        "- Twins say nothing of a mechanism that is wrong in both of them in the same way, nor of noisy counts, local",
        "  mode, and releases of labels that were corrected or renamed.",
        "- Attacks see what is released, and not what lies beside it.",
        "",
        "Each leak is planted into a copy of the program (`tests/mutations/`). [Every leak, which detectors caught it,",
        "and what they printed](data/mutations.csv). Made by `python tests/mutations/matrix.py`;",
        "`pytest -m slow tests/mutations` runs it all again.",
    ]) + "\n"  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """The matrix as CSV: for each leak, what is planted, the detectors' verdicts, and what they printed."""
    words = {True: "caught", False: "missed", None: "–"}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["leak", "what is planted", *DETECTORS, "attack printed", "twins printed", f"{VERIFY} printed",
                   "test that failed first"])  # fmt: skip
    for name, planted in [*((mutant.name, mutant.said) for mutant in MUTANTS), (SOUND, "nothing")]:
        said = results[name]["said"]
        first = said.get("tests") or said.get("architecture") or "–"
        printed = [*(said.get(each, "–") for each in ("attack", "twins", VERIFY)), first.split("[")[0]]
        rows.writerow([name, planted, *(words[results[name]["caught"][each]] for each in DETECTORS), *printed])
    return text.getvalue()


def _share(found: Sequence[bool | None]) -> str:
    return f"{sum(map(bool, found))} of {sum(one is not None for one in found)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is not there yet, one line of JSON each, and writes the page when all is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    results = read_results(given.results)
    known: dict[str, Mutant | None] = {mutant.name: mutant for mutant in MUTANTS} | {SOUND: None}
    for name in [] if given.write else given.names or known:
        mutant = known[name]
        if not given.names and results.get(name, {}).get("version") == version(mutant):
            continue
        result = run_mutant(mutant)
        row = {"name": name, "version": version(mutant), "caught": result.caught, "said": result.said}
        print(name, result.caught, "" if mutant is None or enough(result.caught) else "NOT ENOUGH", flush=True)
        results[name] = row
        ordered = [results[one] for one in known if one in results]
        given.results.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered), "utf-8")
    if known.keys() <= results.keys():
        write_page({name: results[name] for name in known})
    return 0


if __name__ == "__main__":
    sys.exit(main())
