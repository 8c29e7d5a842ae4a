"""No attack beats its bound: 200,000 canaries at four ε under three keys, and how small a leak they would have shown.

python tests/mutations/canaries.py --work FOLDER [--count N]    resumes: one line of JSON for each key and ε
python tests/mutations/canaries.py --write                      the page alone, from the results

Labels are coins of the operating system; each key has its own. FOLDER holds true labels of nobody and may be removed
afterwards. Every key is released at the four ε in an order of its own.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "."):
    sys.path.insert(0, str(ROOT / folder))

from audit.worlds import make_world  # noqa: E402
from private_rlhf.audit.canaries import plant, read_truth, truth_path  # noqa: E402
from private_rlhf.audit.judge import FAMILY_WISE  # noqa: E402
from private_rlhf.audit.released import column_order, private_label, several_releases  # noqa: E402
from private_rlhf.audit.suite import ATTACKS, run_attacks  # noqa: E402
from private_rlhf.data.curate import Request, privatize_source  # noqa: E402
from private_rlhf.privacy.keys import keygen  # noqa: E402

COUNT = 200_000
EPSILONS = (0.1, 0.5, 1.0, 2.0)
KEYS = (1, 2, 3)
RESULTS = ROOT / "tests" / "mutations" / "canaries.jsonl"
PAGE = ROOT / "docs" / "results" / "attacks.md"
TABLE = PAGE.parent / "data" / "attacks.csv"
ALL = "all four"
ON_LABELS = (private_label, column_order, several_releases)


def releases(home: Path, count: int, number: int) -> dict[float, Path]:
    """The releases of a key, made where they are missing, by ε."""
    home.mkdir(parents=True, exist_ok=True)
    key, planted = home / "owner.key", home / "planted.jsonl"
    if not planted.exists():
        make_world(count, seed=number).write_raw(home / "source.jsonl")
        keygen(key)
        plant(str(home / "source.jsonl"), planted, truth_path(key), count)
    found = {epsilon: home / f"release-{epsilon}" for epsilon in EPSILONS}
    for epsilon, folder in random.Random(number).sample(list(found.items()), len(found)):
        if not folder.exists():
            privatize_source(Request(str(planted), folder, epsilon, key))
    return found


def judge(roots: Sequence[Path], key: Path, number: int, epsilon: float | str) -> dict[str, Any]:
    """What all attacks say of some releases of one key."""
    started = time.monotonic()
    outcome = run_attacks(roots, read_truth(truth_path(key)), attacks=ATTACKS if len(roots) == 1 else ON_LABELS)
    worst = min((row for row in outcome.attacks if row.n), key=lambda row: (row.p_value, -row.n))
    return {
        "key": number,
        "epsilon": epsilon,
        "events": outcome.events,
        "alpha": outcome.alpha,
        "epsilon_lower_bound": outcome.epsilon_low,
        "guesses": len(outcome.attacks),
        "worst": {"attack": worst.attack, "variant": worst.variant, "n": worst.n, "rate": worst.rate,
                  "p": worst.p_value, "p_adjusted": worst.adjusted},
        "excess_found": outcome.power_excess,
        "untried": outcome.untried,
        "leak": outcome.leak,
        "seconds": round(time.monotonic() - started),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }  # fmt: skip


def read_results() -> list[dict[str, Any]]:
    """The lines so far."""
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The finding, and the worst of the keys at each ε, as Markdown."""
    events, keys = rows[0]["events"], len({row["key"] for row in rows})
    leaks = sum(row["leak"] for row in rows)
    lines = [
        "# Attacks on 200,000 canaries",
        "",
        f"**{leaks or 'None'} of {len(rows)} attacked sets of releases leaks beyond the ε that it states.** A sound",
        f"program fails one of them with probability {len(rows) * FAMILY_WISE:.1%} at most.",
        "",
        "| ε | bound | guesses | smallest p | after Holm | would have been found |",
        "|---|---|---|---|---|---|",
    ]
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
        group = [row for row in rows if row["epsilon"] == epsilon]
        cells = (epsilon, f"{max(row['epsilon_lower_bound'] for row in group):.3f}",
                 max(row["guesses"] for row in group), f"{min(row['worst']['p'] for row in group):.2g}",
                 f"{min(row['worst']['p_adjusted'] for row in group):.2g}",
                 f"{max(row['excess_found'] for row in group):.4f}")  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    seconds, memory = max(row["seconds"] for row in rows), max(row["peak_gb"] for row in rows)
    return "\n".join([
        *lines, "",
        f"The worst of {keys} keys. *Bound*: the largest ε that any attack proves (99.9 % confidence, over all",
        "guesses of the release together); a sound release stays below the ε that it states, and four of one key below",
        "the largest of theirs. *Would have been found*: a guess that is right this much more often than chance would",
        "have been reported 9 times in 10.",
        "",
        f"{events:,} pairs whose labels are fair coins are released at four ε under each key, and attacked with",
        "everything that `private-rlhf attack` knows; the four of a key together with the attacks on the labels. The",
        f"slowest set took {seconds} s, the largest {memory:g} GB. [Every key and ε, with the worst",
        "attack](data/attacks.csv).",
        "",
        "Made by `python tests/mutations/canaries.py --work FOLDER`.",
    ]) + "\n"  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Every key and ε as CSV."""
    text = io.StringIO()
    cells = csv.writer(text, lineterminator="\n")
    cells.writerow(["key", "ε", "bound", "α", "guesses", "worst attack", "its rate", "n", "p", "after Holm", "found",
                    "leak"])  # fmt: skip
    for row in rows:
        worst = row["worst"]
        cells.writerow([row["key"], row["epsilon"], row["epsilon_lower_bound"], row["alpha"], row["guesses"],
                        worst["attack"], worst["rate"], worst["n"], worst["p"], worst["p_adjusted"],
                        row["excess_found"], row["leak"]])  # fmt: skip
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is not there yet; 1 if any row is a leak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    rows = read_results()
    if not given.write:
        if given.work is None:
            parser.error("--work FOLDER: where the canaries are to lie")
        for number in KEYS:
            home = given.work / f"key-{number}"
            wanted = [epsilon for epsilon in (*EPSILONS, ALL)
                      if not any((row["key"], row["epsilon"]) == (number, epsilon) for row in rows)]  # fmt: skip
            found = releases(home, given.count, number) if wanted else {}
            for epsilon in wanted:
                roots = list(found.values()) if epsilon == ALL else [found[float(epsilon)]]
                row = judge(roots, home / "owner.key", number, epsilon)
                print(json.dumps(row), flush=True)
                rows.append(row)
                RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(rows), "utf-8")
    TABLE.write_text(table(rows), "utf-8")
    return int(any(row["leak"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
