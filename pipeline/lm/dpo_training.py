"""DPO on privatised pairs with TRL: the baseline that needs no reward model.

DPO's implicit margin of a pair is kl_coef·[log π/π_ref(chosen) − log π/π_ref(rejected)], so every loss of a reward
margin is a loss of DPO. `chosen` is the response that the *private* label prefers. TRL has the uncorrected loss
(`sigmoid`) and the debiased one (`robust` with label_smoothing = 1 − α, Chowdhury et al. 2024); the private likelihood
(PPKL Eq. 8-9) on that margin is added here.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from trl import DPOTrainer

from reward_models.losses import check_epsilon, keep_prob, private_likelihood_loss


def trl_loss(name: str, epsilon: float) -> dict[str, Any]:
    """TRL's arguments of a loss on labels with ε: `private_likelihood`, `debiased` or `uncorrected`.

    The private likelihood is no loss of TRL's: `PrivateDpoTrainer` computes it, and `sigmoid` is its limit at ε = ∞.
    """
    if name == "debiased":
        return {"loss_type": ["robust"], "label_smoothing": 1.0 - keep_prob(epsilon)}
    return {"loss_type": ["sigmoid"], "label_smoothing": 0.0}


class PrivateDpoTrainer(DPOTrainer):
    """`DPOTrainer` on rendered token ids (`prompt_ids`, `chosen_ids`, `rejected_ids`).

    With `epsilon` the loss is the private likelihood of labels with that ε (in (0, ∞]); with None it is TRL's own.
    Logged beside it: the mean margin and how often the margin agrees with the private label. π_ref of a PEFT model is
    the model with its adapter off.
    """

    _tag_names = ["trl", "dpo", "private-rlhf"]  # noqa: RUF012 - as in the parent class

    def __init__(self, *args: Any, epsilon: float | None, **kwargs: Any) -> None:
        self.epsilon = None if epsilon is None else check_epsilon(epsilon, allow_zero=False)
        super().__init__(*args, **kwargs)
        if isinstance(self.model, PeftModel) and "ref" in self.model.peft_config:
            self.model.delete_adapter("ref")  # TRL's copy of the adapter as it came

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """TRL would tokenise text its own way; here training and sampling share one renderer."""
        if missing := {"prompt_ids", "chosen_ids", "rejected_ids"} - set(dataset.column_names):
            raise ValueError(f"the {dataset_name} dataset has no {', '.join(sorted(missing))}; pass rendered token ids")
        return dataset

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False) -> Any:
        """Mean loss of the batch; inputs hold 2B sequences, the chosen ones first."""
        if self.epsilon is None:
            return super()._compute_loss(model, inputs, return_outputs)
        if return_outputs:
            raise ValueError("the private likelihood of DPO returns no outputs: evaluate with the stage")
        chosen, rejected = _logprobs(model, inputs).chunk(2)
        reference = self.model if self.ref_model is None else self.ref_model
        with torch.no_grad():
            reference_chosen, reference_rejected = self.compute_ref_log_probs(reference, inputs)
        margin = self.beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        mode = "train" if model.training else "eval"
        gathered = self.accelerator.gather(margin.detach())
        self._metrics[mode]["rewards/margins"].append(gathered.mean().item())
        self._metrics[mode]["rewards/accuracies"].append((gathered > 0).float().mean().item())
        return private_likelihood_loss(margin, torch.ones_like(margin), self.epsilon).mean()


def _logprobs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(2B,) log-probability of each response under the model, nats."""
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    output = model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        labels=labels,
        use_cache=False,
        fused_lm_head=True,  # TRL's patched forward: per-token log-probabilities, 0 where the label is −100
    )
    return output.log_probs[:, -(labels.shape[1] - 1) :].sum(dim=1)


def pair_dataset(rows: list[tuple[list[int], list[int], list[int]]]) -> Dataset:
    """A dataset of (prompt, chosen, rejected) token ids."""
    return Dataset.from_list(
        [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} for prompt, chosen, rejected in rows]
    )
