"""Models that learned the true labels of canaries are caught; models that learned the private ones are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from audit.worlds import World, bundle, flips, make_world, trl_rows
from private_rlhf.audit import files as trained_models
from private_rlhf.audit.suite import Outcome, run_attacks
from private_rlhf.audit.view import build_view
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.lm.rows import make_rows
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import RewardModel, set_score_weight

EPSILON = 0.1


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(150, seed=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    texts = [text for pair in world.pairs for text in pair]
    return tiny_checkpoint(tmp_path_factory.mktemp("base") / "model", texts)


def fitted_reward(base: Path, run: Path, world: World, labels: np.ndarray) -> None:
    """A reward model whose head is the least-squares fit of `labels` (of the view's order) on pair features."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = build_reward_backbone(base, pad_token_id=tokenizer.pad_token_id)
    view, _ = build_view([run], world.truth())
    renderer = trained_models.Renderer(tokenizer, trained_models.MOST_TOKENS, trained_models.MOST_TOKENS)
    rows = [
        (renderer.prompt_ids(prompt), renderer.response_ids(text))
        for prompt, *pair in zip(view.prompts, view.first, view.second, strict=True)
        for text in pair
    ]
    features = np.zeros((len(rows), model.config.hidden_size))
    with torch.no_grad():
        for number, (prompt, response) in enumerate(rows):
            text = make_rows([[*prompt, *response]], 0, torch.device("cpu"))
            features[number] = RewardModel(model).row_features(text)[0].numpy()
    weight = np.linalg.lstsq(features[0::2] - features[1::2], labels.astype(float), rcond=None)[0]
    set_score_weight(model, torch.tensor(weight, dtype=torch.float32))
    model.save_pretrained(run / "reward" / "model")
    tokenizer.save_pretrained(run / "reward" / "model")


def attacked(run: Path, world: World) -> Outcome:
    return run_attacks([run], world.truth(), attacks=(trained_models.checkpoints,))


def test_a_reward_model_of_true_labels_is_caught_and_one_of_private_labels_is_not(
    base: Path, tmp_path: Path, world: World
) -> None:
    """At epsilon 0.1 the private labels carry next to nothing. 1 sound run in 1,000 would fail."""
    bundle(tmp_path / "privatize" / "release", trl_rows(world, flips(world, EPSILON)), EPSILON)
    view, answers = build_view([tmp_path], world.truth())
    fitted_reward(base, tmp_path, world, answers.labels)
    outcome = attacked(tmp_path, world)
    assert outcome.leak
    assert any("reward/model: sign of the margin" in row.variant for row in outcome.attacks if row.leak)
    fitted_reward(base, tmp_path, world, view.own_z(view.tables[0]))
    outcome = attacked(tmp_path, world)
    assert outcome.attacks
    assert not outcome.leak


def test_language_models_are_asked_for_likelihoods_and_differences(base: Path, tmp_path: Path, world: World) -> None:
    bundle(tmp_path / "release", trl_rows(world, flips(world, EPSILON)), EPSILON)
    for name in ("sft", "ppo"):
        tiny_checkpoint(tmp_path / name, [text for pair in world.pairs for text in pair], seed=len(name) + ord(name[0]))
    outcome = attacked(tmp_path, world)
    variants = {row.variant.split(":")[0] for row in outcome.attacks if row.attack == "checkpoints"}
    assert variants == {"ppo", "sft", "sft against ppo"}
    assert all(row.n <= 150 for row in outcome.attacks if row.attack == "checkpoints")
    assert not outcome.leak


def test_the_likelihood_is_the_mean_over_the_response_s_tokens(base: Path) -> None:
    """Against one row at a time, without padding, token by token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    rows = [([5, 9, 12], [7, 30]), ([3], [40, 41, 42, 43]), ([8, 8], [50])]
    found = trained_models._log_likelihoods(model, rows)
    for (prompt, response), value in zip(rows, found, strict=True):
        with torch.no_grad():
            table = torch.log_softmax(model(input_ids=torch.tensor([prompt + response])).logits[0].float(), dim=-1)
        each = [float(table[len(prompt) + place - 1, token]) for place, token in enumerate(response)]
        assert value == pytest.approx(sum(each) / len(each), abs=1e-4)


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json", None])
def test_a_checkpoint_that_does_not_load_is_named(base: Path, tmp_path: Path, world: World, config: str | None) -> None:
    bundle(tmp_path / "release", trl_rows(world, flips(world, EPSILON)), EPSILON)
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / config).write_text((base / "config.json").read_text())
    (tmp_path / "model" / ("model.safetensors" if config else "model.gguf")).write_bytes(b"broken")
    for number, data in enumerate(("reference-00000-0-of-1", "features-00000", "trainable", "early_stopping")):
        (tmp_path / f"data{number}").mkdir()
        (tmp_path / f"data{number}" / f"{data}.safetensors").write_bytes(b"no weights of a whole model")
    outcome = attacked(tmp_path, world)
    assert not outcome.leak
    assert outcome.untried is not None
    assert "the checkpoint model (it does not load as a whole model)" in outcome.untried
    assert outcome.untried.count("checkpoint") == 1
