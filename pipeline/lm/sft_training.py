"""SFT on rendered token ids with TRL, through the same rows and log-probabilities as every other stage."""

from __future__ import annotations

from typing import Any

import torch
from private_rlhf.lm.kernels import plain
from private_rlhf.lm.logprobs import take_batches, token_batch
from private_rlhf.lm.rows import sharing_of
from torch import Tensor
from trl import SFTTrainer


def leave_out_router_loss(trainer: Any) -> None:
    """Trains on the trainer's own loss alone, unless `router_aux_loss_coef` asks for a router loss.

    TRL adds the load-balancing loss of experts with the coefficient of the model's config, for an adapter too.
    """
    if not trainer.args.router_aux_loss_coef:
        trainer.aux_loss_enabled = False
        config = trainer.model.config.get_text_config()
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False


class RowSftTrainer(SFTTrainer):
    """`SFTTrainer` on `input_ids` with `labels` of −100 at prompts. The loss: −log π of response tokens, their mean.

    TRL's loss scores every position on a CPU, and every prompt anew. Here logits are those of response tokens alone,
    and texts share what they begin with. `PRIVATE_RLHF_KERNELS=plain` leaves the loss to TRL, and so does
    a router loss that is asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        leave_out_router_loss(self)
        self._sharing = sharing_of(self.model)
        if not plain():
            take_batches(self.model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Summed over the batch and divided by the response tokens of all processes and accumulation steps."""
        if plain() or return_outputs or self.aux_loss_enabled:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        tokenizer: Any = self.processing_class
        device, labels = inputs["input_ids"].device, inputs["labels"].cpu()
        ids, real, learnt = inputs["input_ids"].cpu(), inputs["attention_mask"].cpu().bool(), labels != -100
        begun = learnt.cumsum(dim=1) > 0
        prompts = [row[own].tolist() for row, own in zip(ids, real & ~begun, strict=True)]
        signed = torch.where(learnt, ids, ~ids)  # tokens between the turns of a response are not learnt
        responses = [row[own].tolist() for row, own in zip(signed, real & begun, strict=True)]
        batch = token_batch(prompts, responses, tokenizer.pad_token_id, device, sharing=self._sharing)
        count = learnt.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -model(token_batch=batch).sum() / count
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return loss
