"""Report: one self-contained page, a text version and the privacy card, from what the other stages released.

Reads only released JSON (`report.run_facts`); writes `report/report.html`, `report.md`, `card.json`, `card.md`.
The trackers of ppo.report_to get the card, and the report, which shows texts, with ppo.report_samples.
The main process works, the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_rlhf.core import atomic
from private_rlhf.privacy.card import render_markdown as render_card
from private_rlhf.report.pages import render_html, render_markdown
from private_rlhf.report.run_card import privacy_status, run_card
from private_rlhf.report.run_facts import read_run
from private_rlhf.report.sections import headline
from private_rlhf.stages.context import StageContext

if TYPE_CHECKING:
    from accelerate import Accelerator


def run(context: StageContext) -> dict[str, Any]:
    """Writes the report of the run; see the module's docstring."""
    accelerator = accelerator_of_trackers(context)
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
    if accelerator is not None:
        names = ("card.json", "card.md", *(("report.html", "report.md") if context.recipe.ppo.report_samples else ()))
        track(context, accelerator, [folder / name for name in names])
    return {"summary": f"report/report.html: {headline(facts, status)}", "private": status.private}


def accelerator_of_trackers(context: StageContext) -> Accelerator | None:
    """The accelerator, made on every process, or None where nothing is tracked or nothing can be trained."""
    if not context.recipe.ppo.report_to or find_spec("accelerate") is None:
        return None
    from private_rlhf.lm.distributed import make_accelerator

    return make_accelerator(context.world)


def track(context: StageContext, accelerator: Accelerator, files: Sequence[Path]) -> None:
    """Hand the files to the trackers, as a run of their own beside those of the other stages."""
    from private_rlhf.rl import tracking

    recipe, logs = context.recipe, context.folder / "tracking"
    with tracking.run_trackers(accelerator, recipe.ppo.report_to, recipe.name, recipe.evaluate, logs, 0):
        tracking.hand_over(accelerator, files)


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("report")
