"""Checkpoints: both ways of reloading, required metadata, atomic writing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.core.noise import PUBLIC
from private_rlhf.lm.numerics import affordable
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.checkpoint import (
    BONUS_FILE,
    METADATA_FILE,
    load_reward_checkpoint,
    read_metadata,
    save_reward_checkpoint,
)
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from private_rlhf.reward_models.uncertainty import FisherBonus
from safetensors.torch import load_file
from support.reward_checkpoints import BOUND, features, fisher_bonus, metadata, raw_scores
from transformers import AutoModelForSequenceClassification, PreTrainedModel

METADATA = metadata(data={"release": "abc"})


def make(path: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, FisherBonus]:
    model = build_reward_backbone(path, 2, dtype)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
    set_score_weight(model, weight)
    return model, fisher_bonus(weight)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 64, (6, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(10) < torch.tensor([[10], [4], [7], [1], [9], [10]])).long()
    return ids * mask, mask


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_of_reloading_give_the_same_raw_score(
    tiny_causal_lm: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model, bonus = make(tiny_causal_lm, dtype)
    ids, mask = batch()
    texts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    expected = raw_scores(RewardModel(model), texts)
    save_reward_checkpoint(tmp_path / "rm", model, METADATA, bonus=bonus)

    ours = load_reward_checkpoint(tmp_path / "rm", dtype=dtype)
    assert ours.metadata == METADATA
    assert ours.model.reward_bound == BOUND
    assert torch.equal(raw_scores(ours.model, texts), expected)
    assert torch.equal(ours.model.weight, model.score.weight[0])
    assert ours.model.model.dtype == dtype
    assert load_reward_checkpoint(tmp_path / "rm").model.model.dtype == affordable(dtype, "cpu")

    # Plain transformers in the saved dtype: exact in float32; in bfloat16 the head and its output are rounded, to
    # 2^-9 of terms whose sum of squares is of the order of |u|.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    logits = plain(ids, attention_mask=mask).logits[:, 0].float()
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    # Widened to float32 by plain transformers and by us: the same again.
    wide = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    ours_wide = load_reward_checkpoint(tmp_path / "rm", dtype=torch.float32).model
    wide_logits = wide(ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(raw_scores(ours_wide, texts), wide_logits, rtol=1e-5, atol=1e-5)


def test_the_folder_is_ordinary_and_complete(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, bonus = make(tiny_causal_lm)
    save_reward_checkpoint(tmp_path / "deep" / "rm", model, METADATA, bonus=bonus)
    assert {file.name for file in (tmp_path / "deep" / "rm").iterdir()} == {
        "config.json",
        "model.safetensors",
        METADATA_FILE,
        BONUS_FILE,
    }
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["rm"]
    record = json.loads((tmp_path / "deep" / "rm" / METADATA_FILE).read_text())
    assert record["epsilon"] == 2.0
    assert record["keep_prob"] == pytest.approx(math.exp(2) / (1 + math.exp(2)))
    assert set(load_file(tmp_path / "deep" / "rm" / BONUS_FILE)) == {"weight", "basis", "information"}


def test_infinite_epsilon_is_null_and_must_be_public(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, _ = make(tiny_causal_lm)
    public = replace(METADATA, noise=PUBLIC, public=True, kappa=None)
    save_reward_checkpoint(tmp_path / "rm", model, public)
    record = json.loads((tmp_path / "rm" / METADATA_FILE).read_text())
    assert record["epsilon"] is None
    assert record["keep_prob"] == 1.0
    assert read_metadata(tmp_path / "rm") == public
    with pytest.raises(ValueError, match="must be public"):
        replace(METADATA, noise=PUBLIC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "2"}, "epsilon must be a finite number"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"epsilon": None}, "does not belong to epsilon None"),
        ({"epsilon": None, "keep_prob": 1.0}, "epsilon is infinite but public is false"),
        ({"keep_prob": 0.9}, "keep_prob 0.9 does not belong to epsilon 2.0"),
        ({"loss": "bt"}, "loss must be one of"),
        ({"reward_bound": 0}, "reward_bound must be"),
        ({"mode": "best"}, "mode must be one of head, lora, full"),
        ({"n_pairs": 0}, "n_pairs must be a positive integer"),
        ({"public": "no"}, "public must be true or false"),
        ({"ridge": -1}, "ridge must be"),
        ({"format_version": 2}, "format_version is 2"),
        ({"surprise": 1}, "unknown surprise"),
        ({"public": ...}, "missing public"),
        ({"epsilon": ...}, "missing epsilon"),
    ],
)
def test_invalid_metadata_is_refused(
    tiny_causal_lm: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    record: dict[str, Any] = METADATA.to_json() | change
    record = {name: value for name, value in record.items() if value is not ...}
    (tmp_path / METADATA_FILE).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message) as error:
        load_reward_checkpoint(tmp_path)
    assert METADATA_FILE in str(error.value)
    with pytest.raises(ValueError, match=message):
        load_reward_checkpoint(tmp_path, declared_public=True)


def test_missing_metadata_is_refused_unless_declared_public(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, _ = make(tiny_causal_lm)
    model.save_pretrained(tmp_path / "external")
    with pytest.raises(ValueError, match=r"has no reward_metadata.json.*declare the model public"):
        load_reward_checkpoint(tmp_path / "external")
    loaded = load_reward_checkpoint(tmp_path / "external", declared_public=True)
    assert (loaded.metadata.mode, loaded.metadata.base_model, loaded.metadata.num_layers) == ("external", "external", 2)
    assert loaded.model.reward_bound is None
    (tmp_path / "external" / METADATA_FILE).write_text("{")
    with pytest.raises(ValueError, match="is not valid"):
        load_reward_checkpoint(tmp_path / "external")
    with pytest.raises(ValueError, match="must be a folder"):
        load_reward_checkpoint(tmp_path / "nothing")


def test_a_damaged_or_orphaned_bonus_is_refused(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, bonus = make(tiny_causal_lm)
    save_reward_checkpoint(tmp_path / "rm", model, METADATA, bonus=bonus)
    file = tmp_path / "rm" / BONUS_FILE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"bonus.safetensors is not valid"):
        load_reward_checkpoint(tmp_path / "rm")


class BreaksWhileSaving:
    def save_pretrained(self, folder: str) -> None:
        raise OSError(28, "No space left on device")


def test_a_failed_write_leaves_the_last_good_checkpoint(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, bonus = make(tiny_causal_lm)
    save_reward_checkpoint(tmp_path / "rm", model, METADATA, bonus=bonus)
    with pytest.raises(OSError, match="No space left"):
        save_reward_checkpoint(
            tmp_path / "rm", model, replace(METADATA, kappa=None), tokenizer=BreaksWhileSaving(), overwrite=True
        )
    assert [file.name for file in tmp_path.iterdir()] == ["rm"]
    assert load_reward_checkpoint(tmp_path / "rm").metadata == METADATA


def test_overwriting_is_asked_for(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, bonus = make(tiny_causal_lm)
    save_reward_checkpoint(tmp_path / "rm", model, METADATA, bonus=bonus)
    with pytest.raises(ValueError, match="overwrite=True"):
        save_reward_checkpoint(tmp_path / "rm", model, METADATA)
    save_reward_checkpoint(tmp_path / "rm", model, replace(METADATA, n_pairs=51, kappa=None), overwrite=True)
    assert read_metadata(tmp_path / "rm").n_pairs == 51
    assert load_reward_checkpoint(tmp_path / "rm").bonus is None
    assert [file.name for file in tmp_path.iterdir()] == ["rm"]


def test_inconsistent_parts_are_refused(tiny_causal_lm: Path, tmp_path: Path) -> None:
    model, bonus = make(tiny_causal_lm)
    with pytest.raises(ValueError, match="must be the bonus's"):
        save_reward_checkpoint(tmp_path / "rm", model, replace(METADATA, kappa=1.0), bonus=bonus)
    set_score_weight(model, torch.ones(32))
    with pytest.raises(ValueError, match="must belong to the score weight"):
        save_reward_checkpoint(tmp_path / "rm", model, METADATA, bonus=bonus)
    set_score_weight(model, torch.full((32,), math.nan))
    with pytest.raises(ValueError, match="score layer must be finite"):
        save_reward_checkpoint(tmp_path / "rm", model, METADATA)
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_a_head_of_two_outputs_comes_back_and_is_refused_where_nobody_says_what_it_reads(
    tiny_causal_lm: Path, tmp_path: Path
) -> None:
    model = build_reward_backbone(tiny_causal_lm, 2, token_sum=True)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0))
    set_score_weight(model, weight)
    save_reward_checkpoint(tmp_path / "rm", model, METADATA)
    again = load_reward_checkpoint(tmp_path / "rm").model
    assert torch.equal(again.weight, weight)
    ids, _ = batch()
    assert torch.equal(raw_scores(again, ids.tolist()), raw_scores(RewardModel(model), ids.tolist()))
    # Plain transformers reads both outputs at the last token.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    last = features(again, ids[:1].tolist())[:, :32]
    torch.testing.assert_close(plain(ids[:1]).logits, last @ weight.reshape(2, 32).T)
    (tmp_path / "rm" / METADATA_FILE).unlink()
    with pytest.raises(ValueError, match="num_labels must be 1, got 2"):
        load_reward_checkpoint(tmp_path / "rm", declared_public=True)
