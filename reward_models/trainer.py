"""Reward training with LoRA or all weights: TRL's RewardTrainer with a private loss on the bounded margin.

Rows are TRL's. `chosen` is the response that the *private* label prefers, so z = +1 throughout and the loss is
ℓ(r(u_chosen) − r(u_rejected), +1; ε).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import PeftModel, get_peft_model
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise, known_noise
from private_rlhf.lm.kernels.linear_layers import speed_up
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import make_rows, shared_length, sharing_of
from private_rlhf.reward_models.losses import SMOOTHING_REFUSED, bounded_reward, check_reward_bound, get_loss
from private_rlhf.reward_models.model import check_pad_token, score_layer
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

POOL = 50
TOKENISED = ({"chosen_ids", "rejected_ids"}, {"chosen_input_ids", "rejected_input_ids"})
"""Columns of token ids that TRL takes, now and in earlier versions."""


def row_length(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """Tokens of a pair that are computed: what both texts begin with counts once."""
    return len(chosen) + len(rejected) - shared_length(chosen, rejected)


LEVEL = "level"
"""The column with the number of each label's level."""


def with_levels(rows: list[dict[str, Any]], noise: LabelNoise | LevelledNoise) -> list[dict[str, Any]]:
    """The rows of a data set, with the number of the level of each label where each has its own ε."""
    if not isinstance(noise, LevelledNoise):
        return rows
    return [{**row, LEVEL: level} for row, level in zip(rows, noise.level.tolist(), strict=True)]


def batch_noise(noise: LabelNoise | LevelledNoise, inputs: dict[str, Any]) -> LabelNoise | LevelledNoise:
    """The noise of a batch's labels, whose levels it no longer holds afterwards."""
    level = inputs.pop(LEVEL, None)
    if isinstance(noise, LabelNoise):
        return noise
    if level is None:
        raise ValueError(f"the rows must hold the {LEVEL} of each label, since each has an ε of its own")
    return LevelledNoise(noise.levels, level.cpu().numpy())


class PairCollator(DataCollatorForPreference):
    """TRL's collator with a check: transformers pools "the last id that is not pad", so no sequence may end in pad."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        for example in examples:
            for column in ("chosen_ids", "rejected_ids"):
                ids = example[column]
                if len(ids) == 0 or ids[-1] == self.pad_token_id:
                    problem = "is empty" if len(ids) == 0 else f"ends in the pad token {self.pad_token_id}"
                    raise ValueError(f"{column} of a row {problem}: end rendered texts in another token")
        batch: dict[str, Any] = super().torch_call(examples)
        if LEVEL in examples[0]:
            batch[LEVEL] = torch.tensor([example[LEVEL] for example in examples])
        return batch


class PairLengthSampler(Sampler[int]):
    """The order of an epoch, a function of `seed` and the epoch: pools of `POOL` random global batches, sorted by
    length within, batches then shuffled; a last, incomplete batch stays last. `lengths` (n,) in tokens of what is
    padded."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        whole = len(order) // self.batch_size * self.batch_size
        batches = [
            batch
            for pool in order[:whole].split(self.batch_size * POOL)
            for batch in pool[self.lengths[pool].argsort(stable=True)].split(self.batch_size)
        ]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield from batches[number].tolist()
        yield from order[whole:].tolist()


class _FollowEpoch(TrainerCallback):
    """Set the sampler's epoch: accelerate's loaders do not where several processes resume within an epoch."""

    def __init__(self, sampler: PairLengthSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.sampler.set_epoch(int((state.epoch or 0.0) + 1e-6))


class PrivateRewardTrainer(RewardTrainer):
    """`RewardTrainer` plus `noise` (of the labels, or their ε), `loss` (a name of `losses`) and `reward_bound` B (None:
    unbounded). At ε = ∞, without a bound, it computes what TRL's computes.

    The rest is TRL's: `model` (a sequence classifier with one output), `args` (on a CPU with use_cpu=True, bf16=False,
    gradient_checkpointing=False), datasets without a `margin` column, `peft_config` (with modules_to_save=["score"]).
    Rows of token ids must not be over `max_length`. n processes with batch b equal one with batch n·b.

    Logged as well: `private_accuracy`, the share of released labels that the margin agrees with, and
    `debiased_accuracy`, an unclipped estimate of that of true labels. `train_sampling_strategy="group_by_length"` needs
    `remove_unused_columns=False`. Texts share rows (`private_rlhf.lm.rows`) unless `share_prompts=False`.
    """

    _tag_names = ["trl", "reward-trainer", "private-rlhf"]  # noqa: RUF012 - as in the parent class

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: RewardConfig,
        *,
        noise: AnyNoise,
        loss: str = "private_likelihood",
        reward_bound: float | None = None,
        share_prompts: bool = True,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset] | None = None,
        processing_class: Any,
        **kwargs: Any,
    ) -> None:
        self.noise = known_noise(noise, allow_zero=False)
        self.preference_loss = get_loss(loss)
        self.reward_bound = check_reward_bound(reward_bound)
        self._centring = args.center_rewards_coefficient
        if args.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor must be 0: {SMOOTHING_REFUSED}")
        pad, theirs = check_pad_token(model.config), processing_class.pad_token_id
        if theirs != pad:
            raise ValueError(f"pad_token_id of the tokenizer must be {pad}, that of the model, got {theirs}")
        whole_calls = args.n_gpu <= 1 and not args.torch_compile
        self._sharing = sharing_of(model) if share_prompts and whole_calls else None
        kwargs.setdefault("data_collator", PairCollator(pad_token_id=pad))
        exact: dict[str, Tensor] = {}
        if getattr(model, "is_loaded_in_4bit", False):
            # TRL rounds what is trained on a 4-bit model to bfloat16: small steps are lost, and digits of a warm head.
            if (peft_config := kwargs.pop("peft_config", None)) is not None:
                model = cast(PeftModel, get_peft_model(cast(PreTrainedModel, model), peft_config))
            exact = {name: value.data.clone() for name, value in model.named_parameters() if value.requires_grad}
        kwargs |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        super().__init__(model=model, args=args, **kwargs)
        for name, value in model.named_parameters():
            if name in exact:
                value.data = exact[name]
        speed_up(self.model)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: RewardConfig, dataset_name: str) -> Any:
        columns, data = set(dataset.column_names or next(iter(dataset), ())), f"the {dataset_name} dataset"
        is_tokenised = any(names <= columns for names in TOKENISED)
        if not is_tokenised and (missing := {"chosen", "rejected"} - columns):
            names = ", ".join(sorted(missing))
            raise ValueError(f"{data} has no {names}: pass preferences, or token ids as chosen_ids and rejected_ids")
        if "margin" in columns:
            raise ValueError(f"{data} has a margin column, which no private loss uses: drop it")
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        dropped = len(dataset) - len(prepared) if isinstance(dataset, Dataset) else 0
        if dropped and (is_tokenised or not len(prepared)):
            raise ValueError(
                f"{dropped} rows of {data} are longer than max_length {args.max_length} and would be dropped: render "
                "shorter texts or raise max_length"
            )
        return prepared

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int] | None:
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(rows, Dataset):
            return super()._get_train_sampler(train_dataset)
        pairs = zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)
        lengths = [row_length(*pair) if self._sharing else max(map(len, pair)) for pair in pairs]
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.num_processes
        sampler = PairLengthSampler(lengths, size, seed)
        self.add_callback(_FollowEpoch(sampler))
        return sampler

    @torch.no_grad()
    def pair_losses(self, rows: Dataset) -> Tensor:
        """Private negative log-likelihood (the uncorrected baseline: its own loss) of each row (n,) float64, nats.

        Without dropout, in the model's training precision; every process computes its share and gets all of them. The
        shares are of one size, some rows being computed twice: a pass through split weights needs all processes.
        """
        judge = get_loss("uncorrected" if self.preference_loss.name == "uncorrected" else "private_likelihood")
        size, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = [(rank + step) % len(rows) for step in range(0, len(rows), size)]
        model: Any = self.model
        training, losses = model.training, []
        model.eval()
        for start in range(0, len(share), self.args.per_device_eval_batch_size):
            part = share[start : start + self.args.per_device_eval_batch_size]
            inputs = self._prepare_inputs(self.data_collator([rows[index] for index in part]))
            noise = batch_noise(self.noise, inputs)
            margin = self._margin(self._raw_scores(model, inputs)[0])
            losses += judge.value(margin, torch.ones_like(margin), noise).tolist()
        model.train(training)
        gathered = dict(gather_object(list(zip(share, losses, strict=True))))
        return torch.tensor([gathered[index] for index in range(len(rows))], dtype=torch.float64)

    def _margin(self, raw: Tensor) -> Tensor:
        """Δ (B,) of u (2, B)."""
        return bounded_reward(raw[0], self.reward_bound) - bounded_reward(raw[1], self.reward_bound)

    def _raw_scores(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """u (2, B) float32 of chosen and rejected texts, and the model's output with logits (2B, 1), chosen first."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self._sharing is None:
            outputs = model(**inputs, use_cache=False)
            return outputs.logits.squeeze(-1).float().view(2, -1), outputs
        texts = [row[real.bool()].tolist() for row, real in zip(ids.cpu(), mask.cpu(), strict=True)]
        plain: Any = unwrap(cast(nn.Module, self.model))
        rows = make_rows(texts, plain.config.get_text_config().pad_token_id, ids.device, self._sharing)
        scored: list[Tensor] = []  # scores of every token; transformers returns those of one token a row
        handle = score_layer(plain).register_forward_hook(lambda _, __, output: scored.append(output))
        try:
            places: dict[str, Any] = {"input_ids": rows.input_ids, "position_ids": rows.position_ids}
            outputs = model(**places, attention_mask=rows.attention(plain.dtype), use_cache=False)
        finally:
            handle.remove()
        scores = scored[0].flatten()[rows.last].float()
        outputs.logits = scores[:, None]
        return scores.view(2, -1), outputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean private loss of the batch, as `PairCollator` makes it."""
        mode = "train" if model.training else "eval"
        noise = batch_noise(self.noise, inputs)
        raw, outputs = self._raw_scores(model, inputs)
        margin = self._margin(raw)
        loss = self.preference_loss.value(margin, torch.ones_like(margin), noise).mean()
        if self._centring is not None:
            loss = loss + self._centring * (raw[0] + raw[1]).square().mean()
        self._record(mode, inputs["attention_mask"], raw.detach(), margin.detach(), noise)
        return (loss, outputs) if return_outputs else loss

    def _record(
        self, mode: str, attention_mask: Tensor, raw: Tensor, margin: Tensor, noise: LabelNoise | LevelledNoise
    ) -> None:
        """Append this batch's metrics; raw (2, B), margin (B,). One gather for all of them."""
        gathered = self.accelerator.gather_for_metrics(torch.cat([raw, margin[None]]).T.contiguous())
        rewards = bounded_reward(gathered[:, :2], self.reward_bound)
        margins = gathered[:, 2]
        # A tie carries no preference: it counts half.
        accuracy = float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())
        # One process holds all labels where each has an ε of its own: nothing was gathered.
        agrees = ((margin > 0).double() + 0.5 * (margin == 0).double()).cpu().numpy()
        debiased = noise.debias_share(accuracy) if isinstance(noise, LabelNoise) else noise.share(agrees).value
        if mode == "train":
            self._total_train_tokens += int(self.accelerator.gather(attention_mask.sum()).sum()) // self._tp_size
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        for name, value in (
            ("min_reward", rewards.min()), ("mean_reward", rewards.mean()), ("max_reward", rewards.max()),
            ("margin", margins.mean()), ("private_accuracy", accuracy),
            ("debiased_accuracy", debiased),
        ):  # fmt: skip
            metrics[name].append(float(value))
