"""The files beside the weights of a released checkpoint: its card, and the settings that render its prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.model_card import RENDERING, CardText, Provenance, card_body, card_head
from private_rlhf.privacy.card import privacy_card, render_markdown
from private_rlhf.privacy.guarantee import NOT_PRIVATE

NO_LABEL = (
    "No preference label was read: which responses it was trained on does not depend on any. The prompts and responses"
    " themselves are not protected."
)


@dataclass(frozen=True)
class Rendering:
    """How a checkpoint of this pipeline expects its prompts: system message, cap on a response (tokens), and what its
    chat template is given.
    """

    system_prompt: str | None = None
    max_response_tokens: int = 64
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def write_beside(
    folder: Path,
    origin: Provenance,
    renderer: Renderer,
    manifest: Mapping[str, Any] | None,
    text: CardText,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes README.md and rendering.json into a checkpoint folder; call it on one process only.

    Args:
        folder: of the checkpoint.
        origin: stage, recipe, base model and data.
        renderer: that training used.
        manifest: of the release that was read (`ReleaseManifest.as_dict()`); None where no label was.
        text: how to use the model, and what it was trained on.
        facts: what else the privacy card says, by row.
    """
    private, lines = False, [f"# {origin.run}, stage {origin.stage}", "", card_body(origin.model, text)]
    if manifest is None:
        mark = [f"**{NOT_PRIVATE}**: {origin.override}.", ""] if origin.override else []
        lines += ["## Privacy card", "", *mark, NO_LABEL, ""]
    else:
        more: dict[str, Any] = {"overrides": [origin.override], "declared_public": origin.data.public_labels}
        more |= {"stage": origin.stage, "recipe": origin.run, **(facts or {})}
        card = privacy_card(manifest, **more)
        private = card["mark"] is None
        lines.append(render_markdown(card))
    head = card_head(origin, text, None if manifest is None else manifest.get("source"), private)
    atomic.write_text(folder / "README.md", head + "\n".join(lines))
    rendering = Rendering(renderer.system_prompt, renderer.max_response_tokens, dict(renderer.chat_template_kwargs))
    atomic.write_json(folder / RENDERING, asdict(rendering))


def read_rendering(folder: str | Path) -> Rendering:
    """The rendering of a checkpoint; the defaults for a folder or a hub id that states none. UserError if damaged."""
    path = Path(folder) / RENDERING
    if not path.is_file():
        return Rendering()
    try:
        return Rendering(**json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
        raise UserError(f"{path} is damaged: delete it, or save the checkpoint again") from None
