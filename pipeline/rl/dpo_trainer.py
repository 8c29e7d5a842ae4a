"""DPO on privatised pairs with TRL: the baseline that needs no reward model.

DPO's implicit margin of a pair is kl_coef·[log π/π_ref(chosen) − log π/π_ref(rejected)], so every loss of a reward
margin is a loss of DPO: the private likelihood (PPKL Eq. 8-9), the debiased loss (rDPO, Chowdhury et al. 2024; TRL's
`robust`) and the uncorrected one (TRL's `sigmoid`). `chosen` is the response that the *private* label prefers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from datasets import Dataset
from peft import PeftModel
from private_rlhf.core.noise import PUBLIC, LabelNoise
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise, known_noise
from private_rlhf.lm.hf_trainer import leave_out_router_loss
from private_rlhf.lm.logprobs import TokenBatch, take_batches, token_batch
from private_rlhf.lm.rows import Sharing, sharing_of
from private_rlhf.reward_models.losses import get_loss
from private_rlhf.reward_models.trainer import LEVEL, batch_noise, with_levels
from torch import Tensor
from trl import DPOTrainer


class PrivateDpoTrainer(DPOTrainer):
    """`DPOTrainer` on rendered token ids (`prompt_ids`, `chosen_ids`, `rejected_ids`).

    loss: a name of `reward_models.losses`, for labels with that noise. Logged beside it: the mean margin and how often
    the margin agrees with the private label. π_ref of a PEFT model is the model with its adapter off.
    """

    _tag_names = ["trl", "dpo", "private-rlhf"]  # noqa: RUF012 - as in the parent class

    def __init__(self, *args: Any, loss: str, noise: AnyNoise, **kwargs: Any) -> None:
        self.noise, self.loss = known_noise(noise, allow_zero=False), get_loss(loss)
        super().__init__(*args, **kwargs)
        if isinstance(self.noise, LevelledNoise):
            self.data_collator = _LevelCollator(self.data_collator)
        leave_out_router_loss(self)
        if isinstance(self.model, PeftModel) and "ref" in self.model.peft_config:
            self.model.delete_adapter("ref")  # TRL's copy of the adapter as it came
        models = (self.model, self.ref_model)
        self._sharing = sharing_of(*(model for model in models if model is not None))
        for model in models:
            if model is not None:
                take_batches(model)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """TRL would tokenise text its own way; here training and sampling share one renderer."""
        if missing := {"prompt_ids", "chosen_ids", "rejected_ids"} - set(dataset.column_names):
            raise ValueError(f"the {dataset_name} dataset has no {', '.join(sorted(missing))}; pass rendered token ids")
        return dataset

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False) -> Any:
        """Mean loss of the batch; inputs hold 2B sequences, the chosen ones first."""
        if return_outputs:
            raise ValueError("return_outputs must be false, as the loss has no outputs: evaluate with stage evaluate")
        tokenizer: Any = self.processing_class
        noise = batch_noise(self.noise, inputs)
        batch = _pairs(inputs, tokenizer.pad_token_id, self._sharing)
        chosen, rejected = _summed(model(token_batch=batch), batch)
        reference_chosen, reference_rejected = self._reference_logprobs(inputs, batch)
        margin = self.beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        mode = "train" if model.training else "eval"
        gathered = self.accelerator.gather(margin.detach())
        self._metrics[mode]["rewards/margins"].append(gathered.mean().item())
        self._metrics[mode]["rewards/accuracies"].append((gathered > 0).float().mean().item())
        return self.loss.value(margin, torch.ones_like(margin), noise).mean()

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: Any = self._signature_columns
        if LEVEL not in known:
            known.append(LEVEL)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Tensor]) -> Any:
        """As TRL's, for `precompute_ref_log_probs`; ids below 0 (`Renderer.learnt_ids`) are read and not counted."""
        ids = inputs["input_ids"]
        counted = inputs["completion_mask"].masked_fill(ids < 0, 0)
        given = {**inputs, "input_ids": torch.where(ids < 0, ~ids, ids), "completion_mask": counted}
        return super().compute_ref_log_probs(model, given)

    @torch.no_grad()
    def _reference_logprobs(self, inputs: dict[str, Tensor], batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(B,) each: log-probabilities of the chosen and the rejected responses under π_ref."""
        if self.precompute_ref_logps:
            return inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        policy, reference = cast(Any, self.model), cast(Any, self.ref_model)
        if reference is not None:
            logprobs = reference(token_batch=batch)
        else:
            with self.accelerator.unwrap_model(policy).disable_adapter():
                logprobs = policy(token_batch=batch)
        return _summed(logprobs, batch)


class _LevelCollator:
    """A collator that keeps the levels of the labels as well."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.collate(examples)
        return {**batch, LEVEL: torch.tensor([example[LEVEL] for example in examples])}


def _summed(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """log π of response tokens (N,) -> of the chosen and of the rejected responses, (B,) each."""
    chosen, rejected = batch.spread(logprobs).sum(dim=1).view(-1, 2).unbind(dim=1)
    return chosen, rejected


def _pairs(inputs: dict[str, Tensor], pad_token_id: int, sharing: Sharing | None) -> TokenBatch:
    """TRL's batch of B chosen and then B rejected sequences, as pairs next to each other that may share prompts."""
    device = inputs["input_ids"].device
    ids, response = inputs["input_ids"].cpu(), inputs["completion_mask"].cpu().bool()
    prompt = inputs["attention_mask"].cpu().bool() & ~response
    half = len(ids) // 2
    order = [row for pair in range(half) for row in (pair, half + pair)]
    prompts, responses = ([ids[row, mask[row]].tolist() for row in order] for mask in (prompt, response))
    return token_batch(prompts, responses, pad_token_id, device, sharing=sharing)


def pair_dataset(
    rows: list[tuple[list[int], list[int], list[int]]], noise: LabelNoise | LevelledNoise = PUBLIC
) -> Dataset:
    """A dataset of (prompt, chosen, rejected) token ids, with the levels of the labels where each has its own ε."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Dataset.from_list(with_levels([dict(zip(names, row, strict=True)) for row in rows], noise))
