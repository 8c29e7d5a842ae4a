"""Report: one self-contained page, a text version and the privacy card, from what the other stages released.

Reads only released JSON (`report.run_facts`); writes `report/report.html`, `report.md`, `card.json`, `card.md`.
The main process works, the others wait.
"""

from __future__ import annotations

from typing import Any

from private_rlhf.core import atomic
from private_rlhf.privacy.card import render_markdown as render_card
from private_rlhf.report.pages import render_html, render_markdown
from private_rlhf.report.run_card import privacy_status, run_card
from private_rlhf.report.run_facts import read_run
from private_rlhf.report.sections import headline
from private_rlhf.stages.context import StageContext


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
    atomic.write_page(folder / "card.md", render_card(card))
    atomic.write_page(folder / "report.md", render_markdown(facts, status, card))
    atomic.write_page(folder / "report.html", page)
    return {"summary": f"report/report.html: {headline(facts, status)}", "private": status.private}


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("report")
