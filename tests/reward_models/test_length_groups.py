"""Length-grouped batches: every pair once, less padding, the same batches however they are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.reward_models.trainer import PairLengthSampler, row_length
from support.reward_trainers import make_rows, make_trainer, step_losses

SETTINGS = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}


@given(lengths=st.lists(st.integers(1, 500), max_size=70), batch=st.integers(1, 9), epoch=st.integers(0, 3))
def test_an_epoch_visits_every_pair_once(lengths: list[int], batch: int, epoch: int) -> None:
    sampler = PairLengthSampler(lengths, batch, seed=0)
    sampler.set_epoch(epoch)
    assert sorted(sampler) == list(range(len(lengths)))
    assert len(sampler) == len(lengths)


def test_batches_hold_similar_lengths_in_random_order() -> None:
    lengths = torch.randint(1, 500, (2000,), generator=torch.Generator().manual_seed(0))
    sampler = PairLengthSampler(lengths.tolist(), 10, seed=0)
    batches = lengths[torch.tensor(list(sampler))].reshape(-1, 10)
    padding = float(1 - lengths.sum() / (batches.amax(1).sum() * 10))
    plain = lengths[torch.randperm(2000, generator=torch.Generator().manual_seed(1))].reshape(-1, 10)
    assert padding < 0.05
    assert float(1 - lengths.sum() / (plain.amax(1).sum() * 10)) > 0.4
    # No curriculum: the order of the batches says nothing about their lengths. |r| > 0.25 in 200 batches has
    # probability below 1e-3 for a random order.
    means = batches.float().mean(1)
    assert abs(float(torch.corrcoef(torch.stack([means, torch.arange(200.0)]))[0, 1])) < 0.25


def test_epochs_and_seeds_differ_and_repeat() -> None:
    lengths = list(range(1, 41))

    def order(seed: int, epoch: int) -> list[int]:
        sampler = PairLengthSampler(lengths, 4, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("share", [False, True])
def test_the_trainer_groups_by_what_is_padded(tiny_causal_lm: Path, tmp_path: Path, share: bool) -> None:
    rows = make_rows(32).map(lambda row: {name: [5] * 8 + ids for name, ids in row.items()})
    changes = {"train_dataset": rows, "max_steps": 4, "share_prompts": share}
    trainer = make_trainer(tiny_causal_lm, tmp_path, **changes, **SETTINGS)
    sampler = trainer._get_train_sampler()
    assert isinstance(sampler, PairLengthSampler)
    length = row_length if share else lambda *pair: max(map(len, pair))
    expected = [length(row["chosen_ids"], row["rejected_ids"]) for row in rows]
    assert sampler.lengths.tolist() == expected
    assert sampler.batch_size == 8
    widths = []
    for batch in trainer.get_train_dataloader():
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        texts = [ids[real].tolist() for ids, real in rows]
        widths.append(max(length(*pair) for pair in zip(texts[:8], texts[8:], strict=True)))
    assert sorted(widths) == torch.tensor(expected).sort().values[7::8].tolist()


def test_micro_batches_do_not_change_the_batch(tiny_causal_lm: Path, tmp_path: Path) -> None:
    losses = []
    for size, accumulation in ((8, 1), (2, 4)):
        trainer = make_trainer(
            tiny_causal_lm,
            tmp_path,
            train_dataset=make_rows(32),
            max_steps=3,
            optim="sgd",
            **SETTINGS,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        losses.append(step_losses(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
