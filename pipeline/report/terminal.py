"""The results of a finished run on the terminal: the tables of report.md and a few answers before and after."""

from __future__ import annotations

import json

from private_rlhf.core.errors import printable
from private_rlhf.core.rundir import RunDir
from private_rlhf.report.sections import label_of
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

SHOWN = 3
CARD = "## Privacy card"


def show_results(run: RunDir, console: Console | None = None) -> None:
    """Prints the results of a finished run; nothing for a run without a report. The card itself stays in the report."""
    page = run.stage("report") / "report.md"
    if not page.is_file():
        return
    console = console or Console()
    console.print(Markdown(printable(page.read_text(encoding="utf-8").partition(CARD)[0])))
    samples = run.stage("evaluate") / "samples.json"
    if samples.is_file():
        metrics = run.root / "metrics.json"
        methods = json.loads(metrics.read_text(encoding="utf-8")) if metrics.is_file() else {}
        for sample in json.loads(samples.read_text(encoding="utf-8"))[:SHOWN]:
            console.print(Text(printable(f"\n> {sample['prompt']}"), style="bold"))
            for method, answer in sample.items():
                if method != "prompt":
                    label, answered = label_of(method, methods.get(method)), " ".join(answer["text"].split())
                    console.print(Text(printable(f"  {label}: {answered}")))
    console.print(
        f"\nreport: {run.stage('report') / 'report.html'}\nmetrics: {run.root / 'metrics.json'}", highlight=False
    )
