"""The card of a model: its head, and a quick start that runs where this package is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.model_card import (
    Provenance,
    Rendering,
    base_model,
    policy_text,
    read_rendering,
    write_beside,
    write_results,
)
from private_rlhf.recipe import Recipe
from support.recipes import recipe_of
from transformers import GenerationConfig, GenerationMixin


def recipe(source: str = "tiny", **data: object) -> Recipe:
    return recipe_of(name="one", model={"source": source}, data=data)


def head_of(folder: Path) -> dict[str, object]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    head: dict[str, object] = yaml.safe_load(text.split("---\n")[1])
    return head


def write_card(folder: Path, measured: bool = False, **changes: Any) -> str:
    renderer, run = Renderer(None, 10, 7, "", {"think": False}), recipe(**changes)
    text = policy_text("3 texts", renderer, run.ppo, measured=measured)
    write_beside(folder, Provenance("sft", run.name, run.model, run.data, run.override), renderer, None, text)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_head_is_one_that_hubs_read(tmp_path: Path) -> None:
    card = write_card(tmp_path, demonstrations="owner/texts")
    assert head_of(tmp_path) == {
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["owner/texts"],
        "tags": ["private-rlhf", "rlhf", "sft"],
    }
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "transformers"
    assert "The licence of the base model is not known" in card
    assert "Base model: tiny. Trained on 3 texts." in card


@pytest.mark.parametrize(
    ("card", "licence"),
    [("---\nlicense: gemma\n---\nx", "gemma"), ("---\nlicense: [\n---\n", None), ("no head", None), (None, None),
     ("---\nlicense: unknown\n---\n", None), ("---\nlicense: 'a\n\n# b'\n---\n", None)],
)  # fmt: skip
def test_the_licence_is_that_of_the_base_folder_s_card(tmp_path: Path, card: str | None, licence: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    (tmp_path / "config.json").write_text('{"_name_or_path": "owner/base"}')
    assert base_model(recipe(source=str(tmp_path)).model) == ("owner/base", licence)


def test_the_parent_of_a_base_folder_is_not_its_name(tmp_path: Path) -> None:
    """A README states the base of the folder's model, from which another was trained."""
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: owner/parent\n---\n")
    assert base_model(recipe(source=str(tmp_path)).model) == (None, "mit")


def test_names_of_the_base_are_shown_as_they_are_and_no_path_is(tmp_path: Path) -> None:
    folder = tmp_path / "a <b> folder"
    folder.mkdir()
    card = write_card(tmp_path, source=str(folder))
    assert "Base model: a &lt;b&gt; folder." in card
    assert str(tmp_path) not in card


def test_results_come_into_the_section_that_waits_for_them(tmp_path: Path) -> None:
    before = write_card(tmp_path, measured=True)
    write_results(tmp_path, ["one", "two"])
    after = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert after == before.replace("None yet: stage evaluate writes them here.", "- one\n- two")
    write_results(tmp_path, ["three"])  # of an evaluation that ran again
    assert after.replace("- one\n- two", "- three") == (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_card_of_an_earlier_version_stays_as_it_is(tmp_path: Path) -> None:
    write_results(tmp_path, ["one"])
    assert not (tmp_path / "README.md").exists()
    (tmp_path / "README.md").write_text("# a run, stage ppo\n\n## Privacy card\n")
    write_results(tmp_path, ["one"])
    assert (tmp_path / "README.md").read_text() == "# a run, stage ppo\n\n## Privacy card\n"


def test_the_rendering_survives(tmp_path: Path) -> None:
    assert read_rendering(tmp_path) == Rendering()
    assert "No preference label was read" in write_card(tmp_path)
    assert read_rendering(tmp_path) == Rendering("", 7, {"think": False})


@pytest.mark.parametrize(("temperature", "top_p", "warpers"), [(1, 1, []), (2, 0.9, [2.0, 0.9])])
def test_the_quick_start_samples_as_the_run_did_whatever_the_base_s_generation_config_says(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    top_p: float,
    warpers: list[float],
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = GenerationConfig.from_pretrained(folder)
    config.update(do_sample=True, temperature=0.1, top_p=0.8, top_k=20, repetition_penalty=1.5)
    config.save_pretrained(folder)
    used: list[float] = []

    def sample(self: Any, input_ids: torch.Tensor, logits_processor: Any, **how: Any) -> torch.Tensor:
        used.extend(getattr(each, "temperature", None) or getattr(each, "top_p", None) for each in logits_processor)
        return input_ids

    monkeypatch.setattr(GenerationMixin, "_sample", sample)
    monkeypatch.chdir(folder)
    ppo = recipe_of(ppo={"temperature": temperature, "top_p": top_p}, evaluate={"gibbs_candidates": 0}).ppo
    exec(policy_text("texts", Renderer(None, 10, 7, "", {}), ppo).quick_start, {})
    assert used == warpers


def test_an_overruled_guard_is_on_the_card(tmp_path: Path) -> None:
    assert "**NOT PRIVATE**" in write_card(tmp_path, allow_label_overlap=True)


@pytest.mark.parametrize("content", ["", "[1]", '{"cap": 3}'])
def test_a_damaged_rendering_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rendering.json").write_text(content)
    with pytest.raises(UserError, match=r"rendering\.json must be a JSON object of system_prompt"):
        read_rendering(tmp_path)
