"""One Markdown page of all full results with their figures."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.validation.lab import Claim, Kind, Verdict, counted, figure_of

COMMAND = "python -m private_rlhf_lab.studies"
TITLES = {
    "offline": "Learning from privatised preferences, offline (PPKL)",
    "online": "Asking for preferences, online (POKL)",
    "kl_dp": "KL regularisation is differential privacy (KL-DP)",
    "dptd": "Private temporal differences (DPTD)",
    "private_rl": "Private RL with general function approximation (PRL)",
}


def write(results: Path, page: Path) -> None:
    """Writes `page` from RESULTS/NAME of each study, and its figures to a folder of the page's name beside it.

    UserError if no full result lies there.
    """
    found = {name: _claims(results / name) for name in TITLES if (results / name / "claims.json").is_file()}
    if not found:
        raise UserError(f"no results of a full run in {results}")
    figures = page.with_suffix("")
    with atomic.new_folder(figures) as new:
        for name in found:
            for drawing in sorted((results / name).glob("*.png")):
                shutil.copyfile(drawing, new / f"{name}-{drawing.name}")
    parts = [_opening(found), *(_section(name, claims, results / name, figures.name) for name, claims in found.items())]
    atomic.write_text(page, "\n".join(parts))


def _claims(folder: Path) -> list[Claim]:
    return [Claim(**_numbers(row)) for row in json.loads((folder / "claims.json").read_text(encoding="utf-8"))]


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    pair = {name: tuple(map(float, row[name])) if row[name] else None for name in ("interval", "joint")}
    return {**row, **pair, "measured": float(row["measured"])}


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _opening(found: Mapping[str, Sequence[Claim]]) -> str:
    every = [claim for claims in found.values() for claim in claims]
    rows = [
        _row(kind, *(str(number[verdict]) for verdict in get_args(Verdict)))
        for kind in get_args(Kind)
        if (number := Counter(claim.verdict for claim in every if claim.kind == kind))
    ]
    refuted = [claim for claim in every if claim.kind == "statement" and claim.verdict == "refuted"]
    listed = [
        _row(claim.claim, claim.source, claim.paper or claim.criterion, figure_of(claim)) for claim in refuted
    ]
    return "\n".join([
        "# What the papers claim, and what we measured", "",
        f"Written by `{COMMAND} all --page docs/results/validation.md`; edit the studies, not this page.",
        "Every claim is a number with a criterion; the verdict follows from both. A random number carries an interval;",
        "the one shown decides, and is wide enough for all claims of its study together (Bonferroni, 95 %).", "",
        "| whose sentence | holds | refuted | undecided |", "|---|---|---|---|", *rows, "",
        "*statement*: the paper's. *reading*: one way to read it. *assumption*: what its theorem needs.",
        "*critique*: an error the paper found in others (refuted: the paper is right). *corrected*: the statement as",
        "repaired here. *ours*: of this project. *control*: a known result, to test the experiment.", "",
        "## Statements of the papers that are refuted", "",
        "| statement | source | the paper, or criterion | measured |", "|---|---|---|---|", *listed, "",
    ])  # fmt: skip


def _section(name: str, claims: Sequence[Claim], folder: Path, figures: str) -> str:
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    rows = [
        _row(claim.claim, f"{claim.kind}: {claim.source}", claim.paper or claim.criterion, figure_of(claim),
             claim.verdict)
        for claim in claims
    ]
    drawings = [f"![{each.stem}]({figures}/{name}-{each.name})" for each in sorted(folder.glob("*.png"))]
    return "\n".join([
        f"## {TITLES[name]}", "",
        f"`{COMMAND} {name}`, {run['date']}, {run['seconds']:.0f} s: {len(claims)} claims, "
        f"{counted(claims)}.",
        "", *drawings, "", "<details><summary>All claims</summary>", "",
        "| claim | kind: source | the paper, or criterion | measured | verdict |", "|---|---|---|---|---|", *rows, "",
        "</details>", "",
    ])  # fmt: skip
