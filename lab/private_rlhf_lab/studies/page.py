"""One Markdown page of all full results, with their figures and a CSV file of claims for each study beside it."""

from __future__ import annotations

import csv
import io
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
    """Write `page` from RESULTS/NAME of each study, and figures and claims to a folder of the page's name beside it.

    UserError if no full result lies there.
    """
    claims = {name: _claims(results / name) for name in TITLES if (results / name / "claims.json").is_file()}
    if not claims:
        raise UserError(f"no results of a full run in {results}")
    folder = page.with_suffix("")
    with atomic.new_folder(folder) as new:
        for name, each in claims.items():
            (new / f"{name}.csv").write_text(_table(each), encoding="utf-8")
            for drawing in sorted((results / name).glob("*.png")):
                shutil.copyfile(drawing, new / f"{name}-{drawing.name}")
    parts = [_opening(claims), *(_section(name, each, results / name, folder.name) for name, each in claims.items())]
    atomic.write_text(page, "\n".join(parts))


def _claims(folder: Path) -> list[Claim]:
    return [Claim(**_numbers(row)) for row in json.loads((folder / "claims.json").read_text(encoding="utf-8"))]


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    pair = {name: tuple(map(float, row[name])) if row[name] else None for name in ("interval", "joint")}
    return {**row, **pair, "measured": float(row["measured"])}


def _table(claims: Sequence[Claim]) -> str:
    """CSV with a row for each claim."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["claim", "kind", "source", "the paper, or criterion", "measured", "verdict"])
    rows.writerows([each.claim, each.kind, each.source, each.paper or each.criterion, figure_of(each), each.verdict]
                   for each in claims)  # fmt: skip
    return text.getvalue()


def _opening(claims: Mapping[str, Sequence[Claim]]) -> str:
    every = [claim for each in claims.values() for claim in each]
    number = Counter((claim.kind, claim.verdict) for claim in every)
    kinds = [kind for kind in get_args(Kind) if any((kind, verdict) in number for verdict in get_args(Verdict))]
    rows = [f"| {kind} | " + " | ".join(str(number[kind, verdict]) for verdict in get_args(Verdict)) + " |"
            for kind in kinds]  # fmt: skip
    statements = sum(number["statement", verdict] for verdict in get_args(Verdict))
    corrected = sum(number["corrected", verdict] for verdict in get_args(Verdict))
    return "\n".join([
        "# What the papers claim, and what we measured", "",
        f"**{number['statement', 'holds']} of the papers' {statements} statements hold, "
        f"{number['statement', 'refuted']}"
        f" are refuted; {number['corrected', 'holds']} of {corrected} corrected ones hold.**",
        "Every claim is a number with a criterion; the verdict follows from both. A random number carries an interval;",
        "the one shown decides, and is wide enough for all claims of its study together (Bonferroni, 95 %).", "",
        "| whose sentence | holds | refuted | undecided |", "|---|---|---|---|", *rows, "",
        "*statement*: the paper's. *reading*: one way to read it. *assumption*: what its theorem needs.",
        "*critique*: an error the paper found in others (refuted: the paper is right). *corrected*: the statement as",
        "repaired here. *ours*: of this project. *control*: a known result, to test the experiment.", "",
        f"Written by `{COMMAND} all --page docs/results/validation.md`; edit the studies, not this page.", "",
    ])  # fmt: skip


def _section(name: str, claims: Sequence[Claim], folder: Path, beside: str) -> str:
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    refuted = [claim for claim in claims if claim.kind == "statement" and claim.verdict == "refuted"]
    listed = [f"- {claim.claim} ({claim.source}): {figure_of(claim)}; {claim.paper or claim.criterion}"
              for claim in refuted]  # fmt: skip
    drawings = [f"![{each.stem}]({beside}/{name}-{each.name})" for each in sorted(folder.glob("*.png"))]
    return "\n".join([
        f"## {TITLES[name]}", "",
        f"{len(claims)} claims, {counted(claims)}: [all of them]({beside}/{name}.csv).", "",
        *(["Statements of the paper that are refuted, each with what was measured and what it claims:", "", *listed, ""]
          if listed else []),
        *drawings, "",
        f"`{COMMAND} {name}`, {run['date']}, {run['seconds']:.0f} s.", "",
    ])  # fmt: skip
