"""What people teach a small backbone: features at every depth, the choice by privatised labels, and the tables."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.rows import make_rows
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.model import RewardModel
from private_rlhf_lab.benches import human_pool, human_reward
from private_rlhf_lab.benches.epsilon_tables import name_of
from private_rlhf_lab.benches.human_features import Pairs, kept_features, load_pairs, text_features
from private_rlhf_lab.benches.human_labels import relabelled
from private_rlhf_lab.benches.human_reward import Bed, Setting, accuracy, beyond, fit, hits, lines_of, private_labels
from private_rlhf_lab.benches.make_human_truth import calibrated
from safetensors.torch import save_file

PAIRS = 400


def test_features_are_those_of_the_truncated_backbone(tmp_path: Path) -> None:
    """At every depth the last token is what `reward.num_layers` reads, whatever shares its row."""
    home = tiny_checkpoint(tmp_path / "tiny", ["the quick brown fox"])
    prompts, answers = [[5, 6, 7], [5, 6, 7], [9, 8, 7, 6, 5, 4]], [[11, 12, 13, 2], [14, 2], [15, 16, 17, 18, 19, 2]]
    found = text_features(build_reward_backbone(home), prompts, answers, layers=(0, 1, 2)).float()
    for layer in (1, 2):
        cut = RewardModel(build_reward_backbone(home, layer))
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ends = range(len(prompt) + 1, len(prompt) + len(answer) + 1)
            texts = [make_rows([[*prompt, *answer][:end]], 0, torch.device("cpu")) for end in ends]
            states = torch.cat(list(map(cut.row_features, texts))).detach()
            torch.testing.assert_close(found[row, layer], torch.stack([states[-1], states.mean(0)]), atol=2e-3, rtol=0)


def bed_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Bed, list[str], torch.Tensor]:
    """Feature set `good` carries people's taste, `bad` nothing; half of the pairs are of like length."""
    names = {"good": ((10,), (0,)), "bad": ((0,), (1,)), "last of 10": ((10,), (0,))}
    monkeypatch.setattr(human_reward, "SETS", names)
    monkeypatch.setattr(human_reward, "COMPONENTS", (4,))
    generator = torch.Generator().manual_seed(seed)
    features, lengths = {}, {}
    for split in ("train", "eval"):
        taste = torch.randn(PAIRS, 4, generator=generator)
        taste[:, 0] += 1.0
        noise = torch.randn(2 * PAIRS, 4, generator=generator)
        good = 0.3 * noise + torch.stack([taste, -taste], dim=1).flatten(0, 1)
        features[split] = {"good": good, "bad": noise, "last of 10": noise, human_reward.MINILM: noise}
        lengths[split] = torch.tensor([60, 60, 90, 30]).repeat(PAIRS // 2)
    return (
        Bed(features, lengths, f"bed {seed}"),
        [f"prompt {number}" for number in range(PAIRS)],
        features["eval"]["good"],
    )


def test_privatised_labels_choose_the_features_that_know(monkeypatch: pytest.MonkeyPatch) -> None:
    bed, prompts, good = bed_of(0, monkeypatch)
    for epsilon in (math.inf, 2.0):
        row = fit(bed, prompts, epsilon, seed=3)
        assert row["arms"]["chosen"]["setting"].startswith("good; 4 directions")
        assert hits(np.array(row["arms"]["chosen"]["margin"])).mean() > 0.75
        assert abs(hits(np.array(row["arms"]["recipe"]["margin"])).mean() - 0.5) < 0.1
        assert row == fit(bed, prompts, epsilon, seed=3)
    assert len(good) == 2 * PAIRS


def test_fits_of_other_pairs_are_refused_and_a_cut_row_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fits.jsonl"
    beds = [Bed({"train": {}, "eval": {}}, {}, name) for name in ("one", "other")]
    made: list[tuple[float, int]] = []

    def counted(bed: Bed, prompts: Sequence[str], epsilon: float, seed: int) -> dict[str, Any]:
        made.append((epsilon, seed))
        return {"epsilon": name_of(epsilon), "seed": seed}

    monkeypatch.setattr(human_reward, "fit", counted)
    rows = human_reward.fits(beds[0], [], path, 2)
    assert len(made) == len(rows) == 7
    path.write_text(path.read_text()[:-5])  # a kill within the last row
    again = human_reward.fits(beds[0], [], path, 2)
    assert sorted(map(str, again)) == sorted(map(str, rows))
    assert made[7:] == [made[6]]
    with pytest.raises(UserError, match=r"fits\.jsonl holds rows measured on other data or settings"):
        human_reward.fits(beds[1], [], path, 2)


def test_features_of_other_texts_are_made_anew(tmp_path: Path) -> None:
    path, one, other = tmp_path / "part.safetensors", [("p", "a")], [("p", "b")]
    assert kept_features(path, one, lambda: torch.ones(1)).tolist() == [1.0]
    assert kept_features(path, one, lambda: torch.zeros(1)).tolist() == [1.0]
    assert kept_features(path, other, lambda: torch.zeros(1)).tolist() == [0.0]
    save_file({"features": torch.ones(1)}, path)  # of before files said of which texts
    assert kept_features(path, other, lambda: torch.zeros(1)).tolist() == [0.0]


def test_length_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer wins in every pair of unlike length: the covariate takes it up, and what is left ignores length."""
    bed, prompts, _ = bed_of(1, monkeypatch)
    arms = fit(bed, prompts, math.inf, seed=0)["arms"]
    assert arms["chosen"]["setting"].endswith("length")
    unlike = bed.log_ratio.numpy() > human_reward.LIKE
    whole, less = (np.array(arms[name]["margin"]) for name in ("chosen", "without length"))
    assert (whole - less)[unlike].min() > 1.0
    np.testing.assert_allclose((whole - less)[~unlike], 0.0, atol=1e-4)


def test_the_covariate_of_length_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the ridge's prior length moves margins as much as all directions together; each of those has size 1."""
    bed, _, _ = bed_of(2, monkeypatch)
    x = bed.coordinates(Setting("good", 4, length=True), "train")
    difference = x[0::2] - x[1::2]
    assert x.shape[1] == 4  # of four directions one is that of the mean feature, which no pair informs
    assert float(difference[:, :-1].square().mean()) == pytest.approx(1.0)
    assert float(difference[:, -1].std()) == pytest.approx(math.sqrt(3))


def test_flips_are_as_many_as_randomised_response_makes() -> None:
    assert private_labels(7, math.inf, 0).tolist() == [1.0] * 7
    kept = (private_labels(4000, 1.0, 5) > 0).double().mean()
    assert abs(float(kept) - math.e / (1 + math.e)) < 0.025
    assert not torch.equal(private_labels(100, 1.0, 0), private_labels(100, 1.0, 1))


def test_shares_and_their_intervals() -> None:
    assert hits(np.array([2.0, 0.0, -1.0])).tolist() == [1.0, 0.5, 0.0]
    own = hits(np.array([1.0] * 6 + [-1.0] * 4))
    assert accuracy(own[None]) == "0.600 [0.313, 0.832]"
    assert accuracy(np.stack([own, own])).startswith("0.600 ± 0.000 [")
    assert beyond(own[None], own - 0.25) == "+25.0 [+25.0, +25.0]"


def test_the_table_of_what_is_there() -> None:
    losses = {str(setting): 0.6 + 0.01 * number for number, setting in enumerate(human_reward.settings())}
    margins: dict[str, Any] = {"epsilon": "∞", "seed": 0, "arms": {}, "losses": losses}
    log_ratio = np.array([0.1, -0.1, 1.0, -1.0])
    for arm in human_reward.ARMS:
        margins["arms"][arm] = {"setting": "good", "scale": 1.2, "loss": 0.6, "margin": [1.0, 1.0, 1.0, -1.0]}
    text = "\n".join(lines_of([margins], log_ratio))
    assert "| the reward chosen | ∞ | 0.750 [0.301, 0.954] | +25.0 [+0.0, +75.0] | 1.000 [0.342, 1.000] |" in text
    assert "2 of 4 evaluation pairs are of like length" in text
    assert "| last of 5 | 0.6000 | 0.6100 |" in text


def test_a_scale_that_is_known_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    margin = torch.randn(20_000, generator=generator, dtype=torch.float64)
    first = torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.sigmoid(0.7 * margin)
    assert calibrated(torch.where(first, margin, -margin)) == pytest.approx(0.7, abs=0.05)


class Longer:
    """A truth that likes length, 1 logit a character."""

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> torch.Tensor:
        return torch.tensor([float(len(answer)) for answer in answers], dtype=torch.float64)


def test_labels_are_those_of_the_truth_and_of_nobody_else() -> None:
    """Bradley–Terry shares; swapping what people chose changes nothing."""
    rows = [{"prompt": "p", "chosen": f"{n:04}", "rejected": f"{n:04}+"} for n in range(2000)]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    found = relabelled(rows, Longer(), 0)  # type: ignore[arg-type]
    assert found == relabelled(swapped, Longer(), 0)  # type: ignore[arg-type]
    share = sum(len(row["chosen"]) == 5 for row in found) / len(found)
    assert abs(share - 1 / (1 + math.exp(-1))) < 0.03
    assert found != relabelled(rows, Longer(), 1)  # type: ignore[arg-type]


def test_held_out_prompts_are_asked_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Distinct, short enough, in an order that is not the file's, and none of them a training prompt."""
    known = [f"prompt number {number}" for number in range(30)]
    rows = {"train": [*known[:20], known[3]], "eval": [*known[15:], "long " * 200]}
    monkeypatch.setattr(
        human_pool, "load_pairs", lambda split, _: Pairs([{"prompt": prompt} for prompt in rows[split]], 0)
    )
    renderer = Renderer(load_tokenizer(tiny_checkpoint(tmp_path / "tiny", ["prompt number"])), 10**6, 64)
    asked, held_out = (human_pool.pick_prompts(renderer, split, 12) for split in ("train", "eval"))
    assert len(set(asked)) == 12
    assert set(asked) < set(known[:20])
    assert asked != sorted(asked)
    assert set(held_out) == set(known[20:])


def test_conversations_are_read_as_pairs_of_one_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's raw files: the shared turns are the prompt, the last answers the texts; no prompt, no pair."""
    turns = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: more\n\nAssistant:"
    texts = [(f"{turns} good", f"{turns} bad"), ("\n\nHuman: a", "\n\nHuman: b")]
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in texts]
    (tmp_path / "talks").mkdir()
    with gzip.open(tmp_path / "talks" / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("PRIVATE_RLHF_TEST_DATA", str(tmp_path))
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path / "tiny", ["good", "bad"]))
    renderer = Renderer(tokenizer, 512, 64, max_text_tokens=512)
    found = load_pairs("train", renderer, "talks")
    roles = ("user", "assistant", "user")
    prompt = [{"role": role, "content": text} for role, text in zip(roles, ("hi", "hello", "more"), strict=True)]
    assert found.rows == [{"prompt": prompt, "chosen": "good", "rejected": "bad"}]
    assert found.read == 2
    assert found.texts == [(prompt, "good"), (prompt, "bad")]
    with pytest.raises(UserError, match=r"eval\.jsonl\.gz"):
        load_pairs("eval", renderer, "talks")
