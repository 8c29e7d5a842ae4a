"""Features do not depend on batches or order, and finished parts are read instead of computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_rlhf.lm import features
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.rows import Rows, make_rows
from safetensors.torch import save_file

CPU = torch.device("cpu")


class Counting:
    """φ = (Σ ids, length, last id), read off the rows; counts the texts it saw."""

    def __init__(self) -> None:
        self.seen = 0
        self.sharing = None

    def row_features(self, rows: Rows) -> torch.Tensor:
        self.seen += len(rows.paths)
        ids = rows.input_ids.flatten()
        texts = [ids[path] for path in rows.paths]
        return torch.stack([torch.stack([text.sum(), torch.tensor(len(text)), text[-1]]) for text in texts]).double()


def texts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]


def expected(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[sum(row), len(row), row[-1]] for row in rows], dtype=torch.float32)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_features_come_in_the_order_of_the_texts(batch_size: int) -> None:
    rows = texts(50)
    found = extract_features(Counting(), rows, pad_token_id=0, batch_size=batch_size, device=CPU)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected(rows))
    backwards = extract_features(Counting(), rows[::-1], pad_token_id=0, batch_size=batch_size, device=CPU)
    assert torch.equal(backwards, found.flip(0))


def test_finished_parts_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PART", 20)
    rows, keep = texts(50), tmp_path / "keep"
    whole = extract_features(Counting(), rows, pad_token_id=0, batch_size=8, device=CPU, keep=keep)
    assert torch.equal(whole, expected(rows))
    assert sorted(path.name for path in keep.iterdir()) == [f"features-0000{i}.safetensors" for i in range(3)]
    (keep / "features-00001.safetensors").unlink()
    (keep / "features-00001.tmp").write_bytes(b"half")  # a kill while writing
    again = Counting()
    assert torch.equal(extract_features(again, rows, pad_token_id=0, batch_size=8, device=CPU, keep=keep), whole)
    assert again.seen == 24  # whole batches
    none = Counting()
    assert torch.equal(extract_features(none, rows, pad_token_id=0, batch_size=8, device=CPU, keep=keep), whole)
    assert none.seen == 0


def test_parts_of_other_batches_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches depend on kernels and device; an earlier program kept no row numbers."""
    monkeypatch.setattr(features, "PART", 20)
    rows = texts(50)
    for batch_size in (8, 7):
        again = extract_features(Counting(), rows, pad_token_id=0, batch_size=batch_size, device=CPU, keep=tmp_path)
        assert torch.equal(again, expected(rows))
    save_file({"features": torch.zeros(21, 3)}, tmp_path / "features-00001.safetensors")
    last = Counting()
    assert torch.equal(
        extract_features(last, rows, pad_token_id=0, batch_size=7, device=CPU, keep=tmp_path), expected(rows)
    )
    assert last.seen == 21


@torch.no_grad()
def test_a_real_backbone_gives_each_text_its_features_alone(checkpoint: Path) -> None:
    from private_rlhf.reward_models.backbone import build_reward_backbone
    from private_rlhf.reward_models.model import RewardModel

    model = RewardModel(build_reward_backbone(checkpoint), reward_bound=8.0)
    rows = [[row_id % 500 for row_id in row] for row in texts(12)]
    together = extract_features(model, rows, pad_token_id=0, batch_size=5, device=CPU)
    assert extract_features(model, [], pad_token_id=0, batch_size=5, device=CPU).shape == (0, together.shape[1])
    for row, found in zip(rows, together, strict=True):
        single = model.row_features(make_rows([row], 0, CPU))[0]
        torch.testing.assert_close(found, single, atol=1e-5, rtol=1e-5)
