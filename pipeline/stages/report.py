"""Report: one self-contained page, a text version and the privacy card, from what the other stages released.

Reads only released JSON (`pipeline.report.inputs`); writes `report/report.html`, `report.md`, `card.json`, `card.md`.
The main process works, the others wait.
"""

from __future__ import annotations

from typing import Any

from pipeline.core import atomic
from pipeline.core.stage import StageContext
from pipeline.privacy.card import render_markdown as render_card
from pipeline.report.card import run_card
from pipeline.report.inputs import read_run
from pipeline.report.render import render_html, render_markdown
from pipeline.report.sections import headline
from pipeline.report.status import privacy_status


def run(context: StageContext) -> dict[str, Any]:
    """Writes the report of the run; see the module's docstring."""
    if not context.world.main:
        return {}
    facts = read_run(context.run, context.stages)
    status = privacy_status(facts)
    card = run_card(facts, status)
    page = render_html(facts, status, card)
    folder = context.folder
    atomic.write_json(folder / "card.json", card)
    atomic.write_text(folder / "card.md", render_card(card))
    atomic.write_text(folder / "report.md", render_markdown(facts, status, card))
    atomic.write_text(folder / "report.html", page)
    return {"summary": f"report/report.html: {headline(facts, status)}", "private": status.private}


if __name__ == "__main__":
    from pipeline.stages.entry import main_for

    main_for("report")
