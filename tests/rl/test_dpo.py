"""The private loss of DPO: its limits, its margin against naive sums, and what one step of it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.recipe import LoraSettings, ModelConfig
from private_rlhf.reward_models.losses import debiased_loss, private_likelihood_loss, uncorrected_loss
from private_rlhf.rl.dpo_trainer import PrivateDpoTrainer, _pairs, pair_dataset
from trl import DPOConfig

BETA = 0.3
PAIRS = [([1, 5, 9], [7, 8, 2], [6, 2]), ([1, 4], [9, 2], [5, 6, 7, 8, 2]), ([3], [4, 4, 2], [5, 2])]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(base_checkpoint(ModelConfig(source="tiny", cache_dir=tmp_path_factory.mktemp("cache"))))


def trainer(
    base: Path,
    folder: Path,
    *,
    epsilon: float,
    loss: str = "private_likelihood",
    lora: bool = True,
    noise: float = 0.05,
    **arguments: Any,
) -> Any:
    model = load_causal_lm(base, "float32")
    settings = LoraSettings(rank=4)
    policy = add_lora(model, settings, seed=0) if lora else model
    reference = None if lora else load_causal_lm(base, "float32")
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():  # away from π_ref, where every margin is 0
        if parameter.requires_grad and ("lora_B" in name or not lora):
            parameter.data += noise * torch.randn_like(parameter)
    return PrivateDpoTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(folder),
            beta=BETA,
            max_length=None,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=3,
            report_to="none",
            **arguments,
        ),
        loss=loss,
        noise=epsilon,
        train_dataset=pair_dataset(PAIRS),
        processing_class=load_tokenizer(base),
    )


def loss_of(made: Any) -> torch.Tensor:
    batch = next(iter(made.get_train_dataloader()))
    value: torch.Tensor = made._compute_loss(made.model, batch, return_outputs=False)
    return value


def naive_margins(made: Any) -> torch.Tensor:
    """β-scaled log-ratio differences, one sequence at a time; in no order of their own."""

    def total(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + response])
        logits = model(input_ids=ids).logits[0].float().log_softmax(-1)
        return torch.stack([logits[len(prompt) - 1 + t, token] for t, token in enumerate(response)]).sum()

    margins = []
    for prompt, chosen, rejected in PAIRS:
        policy = total(made.model, prompt, chosen) - total(made.model, prompt, rejected)
        if made.ref_model is None:
            with made.model.disable_adapter():
                reference = total(made.model, prompt, chosen) - total(made.model, prompt, rejected)
        else:
            reference = total(made.ref_model, prompt, chosen) - total(made.ref_model, prompt, rejected)
        margins.append(BETA * (policy - reference))
    return torch.stack(margins)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, math.inf])
def test_the_loss_is_the_private_likelihood_of_dpo_margins(
    base: Path, tmp_path: Path, lora: bool, epsilon: float
) -> None:
    made = trainer(base, tmp_path, epsilon=epsilon, lora=lora)
    margins = naive_margins(made)
    assert float(margins.detach().abs().min()) > 1e-4
    expected = private_likelihood_loss(margins, torch.ones(3), epsilon).mean().detach()
    assert float(loss_of(made).detach()) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "epsilon", "theirs"),
    [
        ("private_likelihood", math.inf, {"loss_type": ["sigmoid"]}),
        ("uncorrected", 1.0, {"loss_type": ["sigmoid"]}),
        ("debiased", 1.0, {"loss_type": ["robust"], "label_smoothing": 1.0 / (1.0 + math.e)}),
    ],
)
def test_value_and_gradient_are_those_of_trl_s_loss(
    base: Path, tmp_path: Path, loss: str, epsilon: float, theirs: dict[str, Any]
) -> None:
    found = []
    for own in (True, False):
        made = trainer(base, tmp_path, epsilon=epsilon, loss=loss, **theirs)
        batch = next(iter(made.get_train_dataloader()))
        compute = made._compute_loss if own else super(PrivateDpoTrainer, made)._compute_loss
        value = compute(made.model, batch, return_outputs=False)
        value.backward()
        gradients = [own.grad for own in made.model.parameters() if own.grad is not None]
        assert any(bool(own.any()) for own in gradients)
        found.append((float(value.detach()), gradients))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for first, second in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("loss", "value"), [("debiased", debiased_loss), ("uncorrected", uncorrected_loss)])
def test_the_other_losses_are_theirs_on_dpo_margins(base: Path, tmp_path: Path, loss: str, value: Any) -> None:
    made = trainer(base, tmp_path, epsilon=1.0, loss=loss)
    expected = value(naive_margins(made), torch.ones(3), 1.0).mean().detach()
    assert float(loss_of(made).detach()) == pytest.approx(float(expected), abs=1e-5)


def test_a_smaller_epsilon_gives_smaller_gradients(base: Path, tmp_path: Path) -> None:
    norms = []
    for epsilon in (0.1, 1.0, math.inf):
        made = trainer(base, tmp_path, epsilon=epsilon)
        loss_of(made).backward()
        norms.append(sum(float(p.grad.square().sum()) for p in made.model.parameters() if p.grad is not None))
    assert 0 < norms[0] < norms[1] < norms[2]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_under_autocast_the_margins_are_exactly_0_before_anything_is_learnt(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as the launch files for GPUs say it
    how: dict[str, Any] = {"logging_steps": 1, "max_steps": 2, "save_strategy": "no", "learning_rate": 1e-2}
    made = trainer(base, tmp_path, epsilon=1.0, lora=lora, noise=0.0, **how)
    assert made.accelerator.mixed_precision == "bf16"
    made.train()
    assert not torch.is_autocast_enabled("cpu")  # it once went on for the rest of the process
    margins = [entry["rewards/margins"] for entry in made.state.log_history if "rewards/margins" in entry]
    assert margins[0] == 0.0
    assert abs(margins[1]) > 0.1


def test_text_columns_are_refused(base: Path, tmp_path: Path) -> None:
    made = trainer(base, tmp_path, epsilon=1.0)
    with pytest.raises(ValueError, match="no chosen_ids, prompt_ids, rejected_ids"):
        made._prepare_dataset(
            made.train_dataset.rename_columns(
                {"prompt_ids": "prompt", "chosen_ids": "chosen", "rejected_ids": "rejected"}
            ),
            None,
            made.args,
            "train",
        )


def test_tokens_between_turns_are_read_and_not_counted(base: Path, tmp_path: Path) -> None:
    """Their own log-probabilities are in no sum of the policy, nor of π_ref, computed before or beside it."""
    made = trainer(base, tmp_path, epsilon=1.0)
    signed = pair_dataset([([1, 5, 9], [7, ~8, ~3, 2], [6, 2])] * 3)
    batch = made.data_collator([signed[i] for i in range(3)])
    ids = torch.tensor([[1, 5, 9, 7, 8, 3, 2]])
    with torch.no_grad(), made.model.disable_adapter():
        logits = made.model(input_ids=ids).logits[0].float().log_softmax(-1)
    expected = logits[2, 7] + logits[5, 2]
    beside, _ = made._reference_logprobs(batch, _pairs(batch, 0, made._sharing))
    before, _ = made.compute_ref_log_probs(made.model, batch)
    torch.testing.assert_close(beside[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(before[0], expected, rtol=1e-4, atol=1e-4)
