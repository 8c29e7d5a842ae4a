"""KL-regularised PPO on accelerate (DESIGN 4.4): collect responses of π, score them, improve π; repeat.

Every process samples and scores its share of an iteration's responses; the small results are gathered, so that
advantages, whitening and minibatches are those of the whole batch and do not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from pipeline.core.recipe import PpoConfig
from pipeline.data.render import Prompt, Renderer
from pipeline.lm.generate import Sampling, sample_key, sample_responses
from pipeline.lm.logprobs import PolicyWithValue, TokenBatch, response_forward, token_batch, token_logprobs
from pipeline.rl.kl_control import KlController
from pipeline.rl.losses import clipped_policy_loss, clipped_value_loss
from pipeline.rl.rollout import Rollout, Targets, by_length, learning_targets, minibatch_order
from pipeline.rl.scoring import RewardScorer, Scores

Evaluated = tuple[list[list[float]], list[list[float]], list[list[float]]]
"""Per response and token: log-probabilities under π, under π_ref, and values."""


@dataclass
class ResponseRecord:
    """One response as the process that sampled it knows it; per-token lists have the response's length."""

    index: int
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reference_logprobs: list[float]
    values: list[float]
    reward: float
    bonus: float
    baseline: float


class PpoTrainer:
    """Holds the prepared policy, its optimiser, the scorer and the KL controller.

    Args:
        accelerator: prepared by the caller; gradients are averaged by it.
        model: policy with value head, not yet prepared.
        reference: a frozen π_ref for full fine-tuning; None under LoRA, where the adapter is switched off instead.
        scorer: gives r̄ and Γ.
        renderer: the policy's.
        prompts: training prompts.
        config: the recipe's `ppo` section.
        seed: of prompts, sampling noise and minibatches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PolicyWithValue,
        reference: Any | None,
        scorer: RewardScorer,
        renderer: Renderer,
        prompts: Sequence[Prompt],
        config: PpoConfig,
        seed: int,
    ) -> None:
        self.accelerator, self.config, self.seed = accelerator, config, seed
        self.scorer, self.renderer, self.prompts = scorer, renderer, prompts
        optimizer = make_optimizer(model, config)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.reference = reference.to(accelerator.device) if reference is not None else None
        self.controller = KlController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.sampling = Sampling(renderer.max_response_tokens, config.temperature, config.top_p)

    @property
    def policy(self) -> Any:
        """The bare causal LM (or PEFT model)."""
        return self.accelerator.unwrap_model(self.model).policy

    # --- collecting ---------------------------------------------------------------------------------------------------

    def collect(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """Samples and scores one iteration's responses; identical on every process. Also the seconds it took."""
        if iteration == 0 and self.config.reference_rollouts:
            return self._collect_references()
        started = time.monotonic()
        mine = list(range(self.config.rollouts))[self.accelerator.process_index :: self.accelerator.num_processes]
        picked = [self.prompts[self._prompt_of(iteration * self.config.rollouts + i)] for i in mine]
        prompts = [self.renderer.prompt_ids(prompt) for prompt in picked]
        self._add_references(picked)
        responses = self._sample(prompts, [sample_key(self.seed, "rollout", iteration, i) for i in mine])
        generated = time.monotonic()
        scores = self.scorer.score(picked, [self.renderer.text(row) for row in responses])
        rollout = self._gather(mine, prompts, responses, self._evaluate(prompts, responses), scores)
        return rollout, {"generate": generated - started, "score": time.monotonic() - generated}

    def _prompt_of(self, rollout: int) -> int:
        """Which prompt the rollout of this number, counted over all iterations, answers."""
        return prompt_index(rollout // self.config.samples_per_prompt, len(self.prompts), self.seed)

    def _collect_references(self) -> tuple[Rollout, dict[str, float]]:
        """The K completions of π_ref for every prompt as rollouts: π is π_ref still, so they are on-policy."""
        started = time.monotonic()
        count = self.config.reference_samples
        mine = list(range(len(self.prompts)))[self.accelerator.process_index :: self.accelerator.num_processes]
        responses, features = self._add_references([self.prompts[i] for i in mine])
        generated = time.monotonic()
        picked = [self.prompts[i] for i in mine for _ in range(count)]
        prompts = [self.renderer.prompt_ids(prompt) for prompt in picked]
        scores = self.scorer.score_features(picked, features)
        evaluated = self._evaluate(prompts, responses, at_reference=True)
        indices = [i * count + k for i in mine for k in range(count)]
        rollout = self._gather(indices, prompts, responses, evaluated, scores)
        for references in gather_object([self.scorer.references]):
            self.scorer.references.update(references)
        return rollout, {"generate": generated - started, "score": time.monotonic() - generated}

    def _gather(
        self,
        indices: Sequence[int],
        prompts: Sequence[list[int]],
        responses: Sequence[list[int]],
        evaluated: Evaluated,
        scores: Scores,
    ) -> Rollout:
        """One rollout of what all processes sampled, in the order of `indices`."""
        logprobs, reference_logprobs, values = evaluated
        records = [
            ResponseRecord(
                index,
                prompts[j],
                responses[j],
                logprobs[j],
                reference_logprobs[j],
                values[j],
                float(scores.reward[j]),
                float(scores.bonus[j]),
                float(scores.baseline[j]),
            )
            for j, index in enumerate(indices)
        ]
        return self._rollout(sorted(gather_object(records), key=lambda record: record.index))

    def _sample(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[list[int]]:
        tokenizer = self.renderer.tokenizer
        return sample_responses(
            self.policy,
            prompts,
            keys,
            self.sampling,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            batch_size=self.config.generate_batch_size,
        )

    def _add_references(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], torch.Tensor]:
        """Draws K completions of π_ref for each prompt that is new here, to centre Γ; a function of the prompt.

        Returns the completions, K of each new prompt in turn, and their features (·, d).
        """
        new = list({repr(p): p for p in prompts if not self.scorer.has_reference(p)}.values())
        if not new:
            return [], torch.empty(0)
        count, tokenizer = self.config.reference_samples, self.renderer.tokenizer
        repeated = [prompt for prompt in new for _ in range(count)]
        keys = [sample_key(self.seed, "reference", repr(prompt), k) for prompt in new for k in range(count)]
        with self._reference_model() as model:
            rows = sample_responses(
                model,
                [self.renderer.prompt_ids(prompt) for prompt in repeated],
                keys,
                Sampling(self.renderer.max_response_tokens),
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                batch_size=self.config.generate_batch_size,
                progress="reference completions" if self.accelerator.is_main_process else None,
            )
        features = self.scorer.features(repeated, [self.renderer.text(row) for row in rows])
        for index, prompt in enumerate(new):
            self.scorer.add_reference(prompt, features[index * count : (index + 1) * count])
        return rows, features

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[Any]:
        """π_ref: the frozen copy, or the policy's own weights with the adapter off."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.policy.disable_adapter():
                yield self.policy

    @torch.no_grad()
    def _evaluate(
        self, prompts: Sequence[list[int]], responses: Sequence[list[int]], at_reference: bool = False
    ) -> Evaluated:
        """Log-probabilities under π and π_ref and values, per response token, in micro-batches of similar length.

        at_reference: nothing was learnt yet, so that π is π_ref and one forward pass tells both.
        """
        order = by_length(prompts, responses, range(len(prompts)))
        found: dict[int, tuple[list[float], list[float], list[float]]] = {}
        size = self._micro_batch_size()
        model = self.accelerator.unwrap_model(self.model)
        for start in range(0, len(order), size):
            picked = order[start : start + size]
            batch = self._batch([prompts[i] for i in picked], [responses[i] for i in picked])
            logprobs, values, _ = model(batch, self.config.temperature)
            reference_logprobs = logprobs if at_reference else self._reference_logprobs(batch)
            for row, index in enumerate(picked):
                length = len(responses[index])
                found[index] = (
                    logprobs[row, :length].tolist(),
                    reference_logprobs[row, :length].tolist(),
                    values[row, :length].tolist(),
                )
        ordered = [found[index] for index in range(len(prompts))]
        return [item[0] for item in ordered], [item[1] for item in ordered], [item[2] for item in ordered]

    def _reference_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """(B, C) log-probabilities under π_ref."""
        with self._reference_model() as reference:
            logits, _ = response_forward(reference, batch)
        return token_logprobs(logits, batch.response_ids, self.config.temperature)

    def _rollout(self, records: Sequence[ResponseRecord]) -> Rollout:
        """The whole iteration as padded tensors on the CPU-or-device of this process."""
        device = self.accelerator.device
        eos = self.renderer.tokenizer.eos_token_id
        finished = torch.tensor([record.response[-1] == eos for record in records], device=device)
        reward = torch.tensor([record.reward for record in records], device=device)
        bonus = torch.tensor([record.bonus for record in records], device=device)
        baseline = torch.tensor([record.baseline for record in records], device=device)
        penalty = self.config.missing_eos_penalty * (~finished).float()
        return Rollout(
            prompts=[record.prompt for record in records],
            responses=[record.response for record in records],
            mask=padded([[1.0] * len(record.response) for record in records], device),
            finished=finished,
            logprobs=padded([record.logprobs for record in records], device),
            reference_logprobs=padded([record.reference_logprobs for record in records], device),
            values=padded([record.values for record in records], device),
            reward=reward,
            bonus=bonus,
            baseline=baseline,
            scores=reward - bonus - penalty,
        )

    # --- improving ----------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """PPO epochs over one iteration's responses; returns means over all of its minibatches."""
        config = self.config
        targets = learning_targets(
            rollout,
            kl_coef=self.controller.value,
            estimator=config.kl_estimator,
            gamma=config.gamma,
            lam=config.lam,
            whiten_advantages=config.whiten_advantages,
        )
        self._schedule(iteration)
        totals: dict[str, float] = {}
        steps = 0
        for epoch in range(config.ppo_epochs):
            seed = sample_key(self.seed, "minibatches", iteration, epoch)
            for picked in minibatch_order(rollout.prompts, config.minibatch_size, seed):
                for name, value in self._step(rollout, targets, picked, iteration).items():
                    totals[name] = totals.get(name, 0.0) + value
                steps += 1
        self.controller.update(float(rollout.kl.mean()), len(rollout.prompts))
        return {name: value / steps for name, value in totals.items()}

    def _schedule(self, iteration: int) -> None:
        """Sets the learning rates of this iteration; a pure function of it, so that resuming needs no state."""
        config = self.config
        scale = 1.0 - iteration / config.iterations if config.lr_schedule == "linear" else 1.0
        for group, rate in zip(
            self.optimizer.param_groups, (config.learning_rate, config.value_learning_rate), strict=True
        ):
            group["lr"] = rate * scale

    def _step(self, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int) -> dict[str, float]:
        """One optimiser step on the responses `picked`; every process takes its share of them."""
        tokens = rollout.mask[list(picked)].sum()
        mine = list(picked)[self.accelerator.process_index :: self.accelerator.num_processes]
        mine = by_length(rollout.prompts, rollout.responses, mine)
        size = self._micro_batch_size()
        shares = [mine[start : start + size] for start in range(0, len(mine), size)]
        sums = torch.zeros(5, device=self.accelerator.device)
        for number, share in enumerate(shares):
            last = number == len(shares) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, parts = self._loss(rollout, targets, share, iteration)
                # Processes average their gradients; times their number, the sum over all tokens remains.
                self.accelerator.backward(loss / tokens * self.accelerator.num_processes)
            sums += parts
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        if norm is not None and not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"gradient norm is {float(norm)} at iteration {iteration}: lower the learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        means = (self.accelerator.reduce(sums, "sum") / tokens).tolist()
        names = ("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")
        return {**dict(zip(names, means, strict=True)), "grad_norm": float(norm) if norm is not None else 0.0}

    def _loss(
        self, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of one micro-batch and the sums that are logged."""
        config, rows = self.config, list(picked)
        batch = self._batch([rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows])
        width = batch.response_ids.shape[1]
        mask = rollout.mask[rows, :width]
        logprobs, values, entropy = self.model(batch, config.temperature, entropy=config.entropy_coef > 0)
        policy = clipped_policy_loss(
            logprobs, rollout.logprobs[rows, :width], targets.advantages[rows, :width], mask, config.clip_range
        )
        value = clipped_value_loss(
            values, rollout.values[rows, :width], targets.returns[rows, :width], mask, config.value_clip_range
        )
        bonus = (entropy * mask).sum() if entropy is not None else torch.zeros_like(value)
        active = 0.0 if iteration < config.warmup_iterations else 1.0
        loss = active * (policy.loss - config.entropy_coef * bonus) + config.value_coef * value
        parts = torch.stack([policy.loss.detach(), value.detach(), bonus.detach(), policy.clipped, policy.approx_kl])
        return loss, parts

    def _batch(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> TokenBatch:
        return token_batch(prompts, responses, self.renderer.tokenizer.pad_token_id, self.accelerator.device)

    def _micro_batch_size(self) -> int:
        share = max(1, self.config.minibatch_size // self.accelerator.num_processes)
        return min(self.config.micro_batch_size or share, share)


def make_optimizer(model: PolicyWithValue, config: PpoConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable tensors, the value head with its own learning rate; ε = 1e-5 as PPO code uses."""
    policy = [parameter for parameter in model.policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": policy, "lr": config.learning_rate},
            {"params": list(model.value_head.parameters()), "lr": config.value_learning_rate},
        ],
        eps=1e-5,
        weight_decay=0.0,
        fused=True,
    )


def prompt_index(position: int, count: int, seed: int) -> int:
    """Which of `count` prompts is at `position` of an endless sequence of seeded permutations."""
    epoch, offset = divmod(position, count)
    generator = torch.Generator().manual_seed(sample_key(seed, "prompts", epoch))
    return int(torch.randperm(count, generator=generator)[offset])


def padded(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """(B, C) float32, rows padded with 0 on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float32, device=device)
