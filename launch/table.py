"""Prints one row per run and method from `metrics.json`: python launch/table.py RUN_DIR …

Columns: epsilon (null is ∞), the generation win rate against π_ref by the true reward, the KL from π_ref in nats per
response, the true reward and J, each with its 95 % interval where the file has one; `-` where a run has no such number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADER = ("run", "method", "epsilon", "win rate (truth)", "KL", "true reward", "J")
PLAIN = ("kl", "true_reward", "objective")


def share(value: Any) -> str:
    """A `{"value", "ci_low", "ci_high", "n"}` object as text."""
    if not isinstance(value, dict):
        return "-"
    return f"{value['value']:.3f} [{value['ci_low']:.3f}, {value['ci_high']:.3f}] n={value['n']}"


def number(method: dict[str, Any], key: str) -> str:
    """A plain number with its interval, kept under `KEY_ci` as a pair."""
    value, interval = method.get(key), method.get(f"{key}_ci")
    if value is None:
        return "-"
    if isinstance(interval, dict):
        interval = (interval["ci_low"], interval["ci_high"])
    return f"{value:.3f}" if interval is None else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def rows_of(run_dir: Path) -> list[tuple[str, ...]]:
    """One row for each method of a run."""
    metrics = json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))
    rows = []
    for name, method in metrics.items():
        if not isinstance(method, dict) or not {"generation_win_rate_truth", "kl"} & set(method):
            continue
        epsilon = "∞" if method.get("epsilon") is None else f"{method['epsilon']:g}"
        cells = (share(method.get("generation_win_rate_truth")), *(number(method, key) for key in PLAIN))
        rows.append((run_dir.name, name, epsilon, *cells))
    return rows


def render(rows: list[tuple[str, ...]]) -> str:
    """The rows under their header, columns aligned."""
    table = [HEADER, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with one line when a run has no results."""
    if not arguments:
        print("usage: python launch/table.py RUN_DIR …", file=sys.stderr)
        return 2
    missing = [name for name in arguments if not (Path(name) / "metrics.json").is_file()]
    if missing:
        print(f"table: {missing[0]} has no metrics.json: run its evaluate stage first", file=sys.stderr)
        return 2
    print(render([row for name in arguments for row in rows_of(Path(name))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
