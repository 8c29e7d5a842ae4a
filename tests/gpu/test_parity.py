"""The GPU's numbers beside the CPU's, both in float32. Tolerances are some ten times what reordered sums may move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from gpu.machine import make_trainer, renderer_of, some_pairs
from peer_ppo_loops import reward_checkpoint
from private_rlhf.lm import generate
from private_rlhf.lm.hf_trainer import RowSftTrainer
from private_rlhf.lm.logprobs import PolicyWithValue, token_batch
from private_rlhf.lm.models import add_lora, load_causal_lm
from private_rlhf.lm.rows import sharing_of
from private_rlhf.recipe import LoraSettings
from private_rlhf.reward_models.checkpoint import load_reward_checkpoint, save_reward_checkpoint
from private_rlhf.reward_models.model import probe_scores, score_layer
from private_rlhf.rl.rollout import Rollout
from support.reward_checkpoints import metadata
from torch import Tensor
from trl import SFTConfig

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
NATS = 5e-4
"""Of a token's log-probability or entropy, and of a value or reward."""
GRADIENT = 1e-3
"""Of the whole gradient's length."""
LOSS = 1e-3
"""Of a loss, absolute or relative, whichever allows more."""


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Float32 products in full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def learned(path: Path) -> PolicyWithValue:
    """A policy whose adapter and value head are no longer 0."""
    base = load_causal_lm(path, "float32")
    model = PolicyWithValue(add_lora(base, LoraSettings(rank=4), 0), base.config.hidden_size).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name == "value_head.weight":
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def read(path: Path, device: torch.device, shared: bool) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities, values and entropies of responses, and the gradient of all of them together."""
    model, renderer = learned(path).to(device), renderer_of(path)
    sharing = sharing_of(model.policy) if shared else None
    prompts, responses = some_pairs(renderer)
    pad = renderer.tokenizer.pad_token_id
    terms = model(token_batch(prompts, responses, pad, device, sharing=sharing), 0.7, entropy=True)
    sum(term.mean() for term in terms).backward()
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return [term.detach().cpu() for term in terms], torch.cat(gradients).cpu()


@pytest.mark.parametrize("shared", [True, False], ids=["shared rows", "rows of their own"])
def test_log_probabilities_and_their_gradient(checkpoint_path: Path, device: torch.device, shared: bool) -> None:
    (ours, gradient), (expected, wanted) = read(checkpoint_path, device, shared), read(checkpoint_path, CPU, shared)
    for term, exact in zip(ours, expected, strict=True):
        torch.testing.assert_close(term, exact, atol=NATS, rtol=0)
    assert (gradient - wanted).norm() <= GRADIENT * wanted.norm()


def logprobs_of_steps(steps: generate.Steps, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """(T, B, V): what a batch gives to the next token, step by step, with `tokens` (B, T) in place of draws."""
    seen: list[Tensor] = []

    def keep(logits: Tensor, uniform: Tensor, sampling: generate.Sampling) -> Tensor:
        seen[:] = [logits]  # of a recorded step: the memory that each replay fills anew
        return logits.argmax(dim=-1)

    monkeypatch.setattr(generate, "draw", keep)
    rows = []
    for column in tokens.unbind(dim=1):
        steps.take(column, torch.zeros(len(column), device=column.device))
        rows.append(seen[0].log_softmax(dim=-1).cpu())
    return torch.stack(rows)


@torch.no_grad()
def test_replayed_steps_read_what_plain_ones_read(
    checkpoint_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of all next tokens, 24 steps long; half of the rows leave on the way."""
    model, renderer = learned(checkpoint_path).to(device), renderer_of(checkpoint_path)
    assert generate.replays(model) == (device.type == "cuda")
    if device.type == "cpu":
        monkeypatch.setattr(generate, "recorded", lambda step: step)
    prompts, _ = some_pairs(renderer)
    tokens = torch.randint(2, 100, (len(prompts), 24), generator=torch.Generator().manual_seed(0)).to(device)
    left = torch.arange(0, len(prompts), 2, device=device)
    read = []
    for kind in (generate.ReplayedSteps, generate.Steps):
        _, cache, mask = generate._read_prompts(model, prompts, renderer.tokenizer.pad_token_id, 24)
        steps = kind(model, cache, mask, generate.Sampling(24))
        before = logprobs_of_steps(steps, tokens[:, :12], monkeypatch)
        steps.keep(left)
        read.append((before, logprobs_of_steps(steps, tokens[left, 12:], monkeypatch)))
    for ours, expected in zip(*read, strict=True):
        torch.testing.assert_close(ours, expected, atol=NATS, rtol=0)


def sft_losses(path: Path, device: torch.device, folder: Path) -> list[float]:
    """Of three steps, the later two after what the first learnt."""
    renderer = renderer_of(path)
    rows = [{"input_ids": p + r, "labels": [-100] * len(p) + r} for p, r in zip(*some_pairs(renderer, 4), strict=True)]
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=3,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        disable_tqdm=True,
        seed=0,
    )
    policy = add_lora(load_causal_lm(path, "float32"), LoraSettings(rank=4), 0)
    trainer = RowSftTrainer(
        model=policy,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=renderer.tokenizer,
    )
    trainer.train()
    assert trainer.accelerator.device.type == device.type
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_losses(checkpoint_path: Path, device: torch.device, tmp_path: Path) -> None:
    ours, expected = (sft_losses(checkpoint_path, where, tmp_path) for where in (device, CPU))
    assert len(expected) == 3
    assert ours == pytest.approx(expected, abs=LOSS, rel=LOSS)


def moved(rollout: Rollout, device: torch.device) -> Rollout:
    """A rollout's tensors on another device."""
    values = {item.name: getattr(rollout, item.name) for item in fields(rollout)}
    return replace(rollout, **{name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)})


@pytest.mark.parametrize("last_layers", [None, 1], ids=["all layers", "the last layer"])
def test_scores_and_losses_of_ppo(checkpoint_path: Path, device: torch.device, last_layers: int | None) -> None:
    """One iteration's responses, sampled on the CPU, scored and learnt from on both; two epochs, so that the second
    tells what the first learnt.
    """
    lora = LoraSettings(rank=4, target_modules=["q_proj", "v_proj"], last_layers=last_layers)
    settings = {"lora": lora, "ppo_epochs": 2, "learning_rate": 1e-3, "entropy_coef": 0.01}
    there = make_trainer(checkpoint_path, CPU, "float32", **settings)
    rollout, _ = there.collect(0)
    expected = there.update(rollout, 0)

    here = make_trainer(checkpoint_path, device, "float32", **settings)
    evaluated = here.reader.read(rollout.prompts, rollout.responses, 8)
    for rows, exact in zip(evaluated, (rollout.logprobs, rollout.reference_logprobs, rollout.values), strict=True):
        flat = torch.tensor([value for row in rows for value in row])
        torch.testing.assert_close(flat, exact[rollout.mask.bool()], atol=NATS, rtol=0)

    here.scorer.references.update(there.scorer.references)
    prompts = [here.prompt_of(0, row) for row in range(len(rollout.responses))]
    scores = here.scorer.score(prompts, [here.renderer.text(row) for row in rollout.responses])
    for mine, exact in ((scores.reward, rollout.reward), (scores.bonus, rollout.bonus)):
        torch.testing.assert_close(mine, exact, atol=NATS, rtol=LOSS)

    found = here.update(moved(rollout, device), 0)
    assert here.accelerator.device.type == device.type
    assert found == pytest.approx(expected, abs=LOSS, rel=LOSS)


def test_a_bfloat16_reward_model_can_be_saved_from_the_gpu(
    checkpoint_path: Path, device: torch.device, tmp_path: Path
) -> None:
    """Both are compared on the CPU: a GPU's scores differ from its own by more than the check allows."""
    reward = reward_checkpoint({"path": checkpoint_path, "dtype": "bf16", "mc_dropout": False})
    model = reward.model.model.to(device)
    with torch.no_grad():
        score_layer(model).weight.mul_(20)  # the head of one seed on an H200 had scores up to 5
    save_reward_checkpoint(tmp_path / "model", model, metadata(kappa=None))
    saved = load_reward_checkpoint(tmp_path / "model", dtype=torch.bfloat16).model
    assert score_layer(model).weight.device.type == device.type  # it is back where it was
    assert torch.equal(probe_scores(saved.model.to(device)), probe_scores(model))
