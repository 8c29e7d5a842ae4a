"""A reward model from elsewhere: what is accepted, what the run says about it, and every refusal."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data.render import make_renderer
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.report.run_card import external_reward
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.checkpoint import METADATA_FILE, load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.external import use_external
from private_rlhf.reward_models.model import set_score_weight
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.stages import on_prompts
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import preflight
from support.outside import run_outside
from support.recipes import recipe_of
from support.reward_checkpoints import fisher_bonus, metadata, rewards


def place(given: Recipe, target: Path) -> dict[str, Any]:
    """As the stage does."""
    assert given.reward.external is not None
    return use_external(given.reward.external, given.reward.kappa, given.model, target, True, given.name)


def recipe(path: Path, public: bool | None = None, kappa: float = 0.0) -> Recipe:
    external: dict[str, Any] = {"path": str(path)} | ({} if public is None else {"public": public})
    return recipe_of(reward={"external": external, "kappa": kappa})


def save(model_path: Path, target: Path, *, private: bool, bonus: bool = True) -> Path:
    """A checkpoint of this package on top of a causal LM."""
    model = build_reward_backbone(model_path, pad_token_id=load_tokenizer(model_path).pad_token_id)
    weight = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    set_score_weight(model, weight)
    noise = LabelNoise.of(2.0) if private else PUBLIC
    stated = metadata(noise=noise, public=not private, kappa=0.5 if bonus else None)
    statistics = fisher_bonus(weight) if bonus else None
    save_reward_checkpoint(target, model, stated, bonus=statistics, tokenizer=load_tokenizer(model_path))
    return target


@pytest.fixture(scope="module")
def others(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as other tools save one: no metadata."""
    folder = save(checkpoint, tmp_path_factory.mktemp("rm") / "their-model", private=False, bonus=False)
    (folder / METADATA_FILE).unlink()
    return folder


def test_without_metadata_it_needs_the_declaration_before_anything_runs(others: Path, tmp_path: Path) -> None:
    message = r"their-model has no reward_metadata\.json, so it is unknown .* set reward\.external\.public=true if they"
    for public in (None, False):
        with pytest.raises(UserError, match=message):
            preflight(recipe(others, public), ["reward"], World(0, 1))
        with pytest.raises(UserError, match=message):
            place(recipe(others, public), tmp_path)
    preflight(recipe(others, True), ["reward"], World(0, 1))
    assert list(tmp_path.iterdir()) == []


def test_declared_public_it_becomes_a_checkpoint_of_the_run_and_the_card_lists_it(others: Path, tmp_path: Path) -> None:
    report = place(recipe(others, True), tmp_path)
    assert report["losses"] == []
    loaded, source = load_reward_checkpoint(tmp_path / "model"), load_reward_checkpoint(others, declared_public=True)
    stated = loaded.metadata
    assert stated is not None
    assert (stated.mode, stated.public, stated.loss, stated.n_pairs) == ("external", True, None, None)
    assert stated.noise == PUBLIC
    assert loaded.bonus is None
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = rewards(source.model, ids.tolist())
        assert torch.equal(rewards(loaded.model, ids.tolist()), expected)
    fit = json.loads((tmp_path / "fit.json").read_text())
    assert (fit["mode"], fit["source"], fit["fitted_by"], fit["epsilon"]) == ("external", "their-model", "others", None)
    said = external_reward(fit)
    assert said == "their-model, from outside this pipeline; the holder of the run declares its labels public"
    assert external_reward({"mode": "head"}) is None
    assert str(others.parent) not in (tmp_path / "model" / METADATA_FILE).read_text()


def test_a_config_that_pads_with_its_end_of_sequence_takes_the_tokenizer_s_end_of_turn(
    others: Path, tmp_path: Path
) -> None:
    """As of base models, which were trained to chat under another token."""
    folder = shutil.copytree(others, tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": config["pad_token_id"]}))
    place(recipe(folder, True), tmp_path)
    saved, tokenizer = load_reward_checkpoint(tmp_path / "model").model.config, load_tokenizer(folder)
    assert (saved.pad_token_id, saved.eos_token_id) == (config["pad_token_id"], tokenizer.eos_token_id)


def test_a_checkpoint_of_this_package_keeps_its_own_epsilon(checkpoint: Path, tmp_path: Path) -> None:
    ours = save(checkpoint, tmp_path / "ours", private=True)
    run = tmp_path / "run"
    run.mkdir()
    place(recipe(ours, kappa=0.25), run)
    loaded = load_reward_checkpoint(run / "model")
    assert loaded.metadata is not None
    assert loaded.bonus is not None
    found = loaded.metadata
    assert (found.noise, found.public, found.reward_bound) == (LabelNoise.of(2.0), False, 4.0)
    assert loaded.bonus.kappa == loaded.metadata.kappa == 0.25
    fit = json.loads((run / "fit.json").read_text())
    assert external_reward(fit) == "ours, fitted by this package to labels released at ε = 2 in another ledger"
    place(recipe(ours, kappa=0.0), run)
    assert load_reward_checkpoint(run / "model").bonus is None


@pytest.mark.thorough
def test_what_is_released_has_a_card_with_its_name_and_what_is_known_of_it(
    checkpoint: Path, others: Path, tmp_path: Path
) -> None:
    """Of a model of others, and of a run of this package: licence and base of its own card, not those of this run."""
    (others / "README.md").write_text("---\nlicense: mit\nbase_model: owner/base\n---\n# theirs\n")
    ours = save(checkpoint, tmp_path / "first" / "reward" / "model", private=True)
    said = {
        others: "their-model, from outside this pipeline; the holder of the run declares its labels public",
        ours: "first/reward/model, fitted by this package to labels released at ε = 2 in another ledger",
    }
    folders, inside = [], []
    for number, (folder, sentence) in enumerate(said.items()):
        place(recipe(folder, public=folder == others or None), tmp_path / str(number))
        folders.append(tmp_path / str(number) / "model")
        card = (folders[-1] / "README.md").read_text(encoding="utf-8")
        head = yaml.safe_load(card.split("---\n")[1])
        theirs = {"license": "mit", "base_model": "owner/base"} if folder == others else {"license": "unknown"}
        assert head == theirs | {
            "library_name": "transformers",
            "pipeline_tag": "text-classification",
            "tags": ["private-rlhf", "rlhf", "reward-model"],
        }
        base = "owner/base" if folder == others else "not known"
        assert f"Base model: {base}. Trained on labels from outside this run ({sentence})." in card
        assert "None: this run held out no label to check it on. Compare scores of answers to one prompt only" in card
        privacy = card.partition("## Privacy card")[2]
        assert f"This model is {sentence}. No label of this run was read for it" in privacy
        assert "bonus.safetensors" not in card
        loaded = load_reward_checkpoint(folders[-1])
        scorer = RewardScorer(loaded, make_renderer(recipe(folder).model, load_tokenizer(folders[-1])), use_bonus=False)
        inside.append(scorer.score(["Name a river."] * 2, ["The Rhine is a lovely river.", "No."]).reward.tolist())
    for printed, expected in zip(run_outside(*folders), inside, strict=True):
        assert ast.literal_eval(printed) == pytest.approx(expected, abs=1e-5)


def test_a_policy_that_is_trained_on_it_names_it(
    others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given, facts = RunDir(tmp_path), recipe(others, True), []
    place(given, run.stage("reward"))
    release = SimpleNamespace(manifest=SimpleNamespace(as_dict=dict))
    monkeypatch.setattr(on_prompts, "read_release", lambda folder: release)
    monkeypatch.setattr(on_prompts, "write_beside", lambda *arguments: facts.append(arguments[-1]))
    renderer = make_renderer(given.model, load_tokenizer(others))
    on_prompts.write_results(StageContext(given, run, World(0, 1), "ppo"), renderer, [], 3)
    said = "their-model, from outside this pipeline; the holder of the run declares its labels public"
    assert facts == [{"external_reward_model": said}]
    (run.stage("reward") / "fit.json").write_text('{"mode": "head"}')
    on_prompts.write_results(StageContext(given, run, World(0, 1), "ppo"), renderer, [], 3)
    assert facts[1] == {}


def test_a_tokenizer_without_a_chat_template_is_refused_before_anything_runs(others: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(others, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="bare must have a chat template: save the one it was trained with"):
        preflight(recipe(bare, True), ["reward"], World(0, 1))


def test_refusals(checkpoint: Path, others: Path, tmp_path: Path) -> None:
    private = save(checkpoint, tmp_path / "private", private=True)
    for path, public, kappa, message in (
        (tmp_path / "absent", True, 0.0, r"reward\.external\.path must be a checkpoint folder, got .*absent"),
        (others, True, 1.0, r"has no bonus statistics for Γ: set reward\.kappa=0"),
        (private, True, 0.0, r"learned from private labels by its own metadata: remove reward\.external\.public"),
        (checkpoint, True, 0.0, r"must be a reward checkpoint, got .*\(.*\): give another"),  # a language model
    ):
        with pytest.raises(UserError, match=message):
            place(recipe(path, public, kappa), tmp_path / "out")
    (private / METADATA_FILE).write_text("{")
    with pytest.raises(UserError, match=r"must be a reward checkpoint, got .*\(.*reward_metadata\.json is not valid"):
        place(recipe(private), tmp_path / "out")
    assert not (tmp_path / "out").exists()
