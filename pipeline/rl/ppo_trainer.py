"""KL-regularised PPO on accelerate: collect responses of π, score them, improve π; repeat.

Every process samples and scores its share of an iteration's responses; the small results are gathered, so that
advantages, whitening and minibatches are those of the whole batch and do not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.data.render import Prompt, Renderer, prompt_key
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.distributed import as_number, is_sharded, keep_gathered, prepare
from private_rlhf.lm.drawing import Engine, TransformersEngine
from private_rlhf.lm.generate import Sampling, sample_key
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.models import add_lora, end_ids, recompute_layers
from private_rlhf.lm.numerics import precision
from private_rlhf.recipe import PpoConfig
from private_rlhf.reward_models.external import ExtraReward
from private_rlhf.reward_models.scorer import RewardScorer, Scores
from private_rlhf.rl.nonfinite import NonFiniteError, nonfinite_gradient, step_error
from private_rlhf.rl.ppo_losses import KlController, clipped_policy_loss, clipped_value_loss
from private_rlhf.rl.reader import Evaluated, PolicyReader
from private_rlhf.rl.reward_function import FunctionScorer, RewardFunction
from private_rlhf.rl.rollout import (
    Rollout,
    Targets,
    join_responses,
    learning_targets,
    minibatch_order,
    prompt_index,
    shares,
)

T = TypeVar("T")

LOSSES = ("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")
"""Metrics of a step, in the order of `PpoTrainer._loss`; means over tokens."""

OF_A_RUN = ("extra_rewards", "max_prompts", "polish", "quantize", "report_to", "sample_every", "warm_start")
"""Settings that a stage reads, and not the trainer: `PpoTrainer.from_policy` refuses them."""

EVALUATED = 4
"""Default micro-batches that are evaluated together, without a backward pass; one where the recipe sets their size."""


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
        extra_rewards: whose weighted sum is added to r̂.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PolicyWithValue,
        reference: Any | None,
        scorer: RewardScorer | FunctionScorer,
        renderer: Renderer,
        prompts: Sequence[Prompt],
        config: PpoConfig,
        seed: int,
        extra_rewards: Sequence[ExtraReward] = (),
    ) -> None:
        self.accelerator, self.config, self.seed = accelerator, config, seed
        self.scorer, self.renderer, self.prompts = scorer, renderer, prompts
        self.extra_rewards = tuple(extra_rewards)
        optimizer = make_optimizer(model, config)
        self.model, self.optimizer = prepare(accelerator, model, optimizer)
        self.together = is_sharded(self.model)  # each forward pass needs every process
        tokenizer = renderer.tokenizer
        self.ends = end_ids(self.bare, tokenizer)
        self.reader = PolicyReader(accelerator, self.model, reference, tokenizer, config.temperature, self.together)
        self.controller = KlController(
            config.kl_coef, config.kl_target, config.kl_horizon, config.kl_coef_min, config.kl_coef_max
        )
        self.sampling = Sampling(renderer.max_response_tokens, config.temperature, config.top_p)
        self.engine: Engine = TransformersEngine(accelerator, tokenizer, config.generate_batch_size)
        self.proofs: dict[str, dict[str, float]] = {}  # of this iteration, of an engine's draws of policy and reference
        self.completions: Mapping[tuple[int, ...], list[list[int]]] = {}  # draws of π_ref that need not be made again
        self.new_references: tuple[list[list[int]], list[list[int]]] | None = None  # prompts, responses of this process
        self.warm_start: Callable[[Rollout], dict[str, float]] | None = None  # learns from the first iteration

    @classmethod
    def from_policy(
        cls,
        policy: Any,
        tokenizer: Any,
        reward: RewardFunction | RewardScorer,
        prompts: Sequence[Prompt],
        settings: PpoConfig,
        *,
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 128,
        seed: int = 0,
        accelerator: Accelerator | None = None,
    ) -> PpoTrainer:
        """A trainer for a policy and a reward of yours, without a recipe or a run directory.

        π_ref is the policy as it is passed, a frozen copy in full fine-tuning; of a PEFT model it is the base.

        Args:
            policy: causal LM, float32 in full fine-tuning; or a PEFT model, whose adapter is then trained.
            tokenizer: has a chat template, an end-of-turn token and another padding token.
            reward: function(prompts, response texts) -> one finite number per response; or a reward model's scorer.
            prompts: texts or lists of messages.
            settings: `lora` is the adapter that a plain policy gets; None trains all weights. `OF_A_RUN` are left out.
            max_prompt_tokens, max_response_tokens: a longer prompt is refused, a longer response is cut.
            seed: of prompts, sampling noise, minibatches and adapter.
            accelerator: default `Accelerator()`.

        Raises:
            UserError: an argument is not as above, or the policy has no modules of the adapter's names. While training:
                a prompt is too long, or the reward is not one finite number per response.
        """
        _check_arguments(policy, tokenizer, reward, prompts, settings, max_response_tokens)
        accelerator = accelerator or Accelerator()
        if (steps := accelerator.gradient_accumulation_steps) != 1:  # it would divide the gradients that are clipped
            raise UserError(f"accelerator must accumulate 1 step, got {steps}: set settings.micro_batch_size")
        if settings.reference_rollouts:  # of one prompt there are K completions, however often it comes
            prompts = list({prompt_key(prompt): prompt for prompt in prompts}.values())
        reference = None
        base: Any = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        hidden_size = base.config.hidden_size
        if not isinstance(policy, PeftModel):
            if settings.lora is not None:
                policy = add_lora(policy, settings.lora, seed)
            else:
                reference = copy.deepcopy(policy).eval().requires_grad_(False)
                policy.requires_grad_(True)
        if settings.gradient_checkpointing:
            recompute_layers(policy)
        baseline = settings.baseline
        scorer: Any = FunctionScorer(reward, baseline) if callable(reward) else reward
        if not callable(reward):
            scorer = replace(reward, use_baseline=baseline, references={})  # those of another π_ref are not this one's
        model = PolicyWithValue(policy, hidden_size).eval()
        renderer = Renderer(tokenizer, max_prompt_tokens, max_response_tokens)
        return cls(accelerator, model, reference, scorer, renderer, prompts, settings, seed)

    @property
    def bare(self) -> Any:
        """Policy and value head without DDP, which would wait for the other processes."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def policy(self) -> Any:
        """The bare causal LM (or PEFT model)."""
        return self.bare.policy

    # --- iterations ---------------------------------------------------------------------------------------------------

    def train(self) -> list[dict[str, Any]]:
        """Run all iterations and return the history, one entry per iteration. Errors: see `improve`."""
        return [self.improve(iteration)[1] for iteration in range(self.config.iterations)]

    def improve(self, iteration: int, has_truth: bool = False) -> tuple[Rollout, dict[str, Any]]:
        """Collect the responses of one iteration and learn from them; returns them and the entry of the history.

        Raises:
            RunStopped: the policy has run away from π_ref.
            NonFiniteError: nothing can be learnt from the numbers of this iteration.
        """
        self.proofs = {}
        rollout, seconds = self.collect(iteration)
        kl = float(rollout.kl.mean())
        if kl > self.config.max_kl:  # learning from it would only go further
            raise RunStopped(
                f"KL per response is {kl:.1f} nats at iteration {iteration}, over ppo.max_kl = {self.config.max_kl:g}: "
                "lower ppo.learning_rate or raise ppo.kl_coef"
            )
        started, kl_coef = time.monotonic(), self.controller.value
        warm = self.warm_start if iteration == 0 else None
        losses = self.update(rollout, iteration) if warm is None else dict.fromkeys(LOSSES, 0.0) | warm(rollout)
        seconds["update"] = time.monotonic() - started
        return rollout, {
            "iteration": iteration,
            "rollouts": len(rollout.responses),
            **self.describe(rollout, has_truth),
            "kl_coef": kl_coef,
            **losses,
            **({"engine": dict(self.proofs)} if self.proofs else {}),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "tokens_per_second": round(float(rollout.mask.sum()) / max(sum(seconds.values()), 1e-9), 1),
        }

    def describe(self, rollout: Rollout, has_truth: bool = False) -> dict[str, Any]:
        """Means over the responses of an iteration; the true reward only for the embedded task, where it is known.

        PPO learns from `score`; `score_over_reference` is r̂ without extra rewards, less the baseline.
        """
        truth = None
        if has_truth:
            texts = self._texts(rollout.responses)
            truth = sum(true_reward("", text) for text in texts) / len(texts)  # it reads nothing but the response
        means = {reward.name: float(rollout.extra[:, k].mean()) for k, reward in enumerate(self.extra_rewards)}
        return {
            "reward": float(rollout.reward.mean()),
            "bonus": float(rollout.bonus.mean()),
            **({"extra_rewards": means} if means else {}),
            "score": float(rollout.scores.mean()),
            "score_over_reference": float((rollout.scores - rollout.weighted_extra - rollout.baseline).mean()),
            "true_reward": truth,
            "kl": float(rollout.kl.mean()),
            "response_tokens": float(rollout.mask.sum(dim=1).mean()),
            "finished": float(rollout.finished.float().mean()),
        }

    # --- collecting ---------------------------------------------------------------------------------------------------

    def collect(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """Samples and scores one iteration's responses; identical on every process. Also the seconds it took.

        Raises:
            NonFiniteError: a score, a log-probability or a value is NaN or infinite.
        """
        try:
            if self.learns_references(iteration):
                return self.draw_references(self.prompts)
            keys = [sample_key(self.seed, "rollout", iteration, row) for row in range(self.config.rollouts)]
            return self.draw([self.prompt_of(iteration, row) for row in range(self.config.rollouts)], keys)
        except NonFiniteError as error:
            self._locate(error, iteration)
            raise

    def draw(
        self, prompts: Sequence[Prompt], keys: Sequence[int], keep: bool = True
    ) -> tuple[Rollout, dict[str, float]]:
        """One response of π to each prompt with noise of these keys, scored and read; see `collect`.

        keep: as of `PolicyReader.read`.
        """
        started = time.monotonic()
        mine = list(range(len(prompts)))[self.accelerator.process_index :: self.accelerator.num_processes]
        picked = [prompts[i] for i in mine]
        ids = [self.renderer.prompt_ids(prompt) for prompt in picked]
        with keep_gathered(self.accelerator, self.model, self.config.gather_once):
            self._add_references(prompts)
            self.engine.publish(self.policy)
            responses, logprobs = self.engine.sample(self.bare, ids, [keys[i] for i in mine], self.sampling)
            generated = time.monotonic()
            rollout = self._measure(mine, picked, ids, responses, keep)
            if logprobs is not None:
                lengths = [len(response) for response in responses]
                read = [rollout.logprobs[row, :length].tolist() for row, length in zip(mine, lengths, strict=True)]
                self.proofs["policy"] = self.engine.prove(ids, responses, logprobs, read)
        return rollout, {"generate": generated - started, "score": time.monotonic() - generated}

    def measure(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> Rollout:
        """Responses that others have drawn, scored and read under π, which must be π_ref still; every process is given
        all of them.
        """
        mine = list(range(len(prompts)))[self.accelerator.process_index :: self.accelerator.num_processes]
        picked, rows = [prompts[i] for i in mine], [responses[i] for i in mine]
        self._add_references(prompts)
        ids = [self.renderer.prompt_ids(prompt) for prompt in picked]
        return self._measure(mine, picked, ids, rows, keep=False, at_reference=True)

    def _measure(
        self,
        indices: Sequence[int],
        prompts: Sequence[Prompt],
        ids: Sequence[list[int]],
        responses: Sequence[list[int]],
        keep: bool,
        at_reference: bool = False,
    ) -> Rollout:
        scores, extra = self.scorer.score(prompts, self._texts(responses)), self._extra(prompts, responses)
        read = self._read(ids, responses, at_reference, keep)
        return self._gather(indices, ids, responses, read, scores, extra)

    def learns_references(self, iteration: int) -> bool:
        """True if the responses of this iteration are the reference completions of every prompt."""
        return iteration == 0 and (self.config.reference_rollouts or self.config.warm_start is not None)

    def prompt_of(self, iteration: int, row: int) -> Prompt:
        """The prompt that response `row` of an iteration's rollout answers."""
        if self.learns_references(iteration):
            return self.prompts[row // self.config.reference_samples]
        number = iteration * self.config.rollouts + row  # counted over all iterations
        return self.prompts[prompt_index(number // self.config.samples_per_prompt, len(self.prompts), self.seed)]

    def draw_references(self, everyone: Sequence[Prompt]) -> tuple[Rollout, dict[str, float]]:
        """The K completions of π_ref for each of these prompts, which have none yet, as rollouts.

        π must be π_ref still: they are on-policy then.
        """
        started = time.monotonic()
        count = self.config.reference_samples
        mine = list(range(len(everyone)))[self.accelerator.process_index :: self.accelerator.num_processes]
        with keep_gathered(self.accelerator, self.model, self.config.gather_once):
            responses, features = self._add_references(everyone)
            generated = time.monotonic()
            picked = [everyone[i] for i in mine for _ in range(count)]
            prompts = [self.renderer.prompt_ids(prompt) for prompt in picked]
            scores = self.scorer.score_features(picked, features)
            evaluated = self._read(prompts, responses, at_reference=True)
            indices = [i * count + k for i in mine for k in range(count)]
            rollout = self._gather(indices, prompts, responses, evaluated, scores, self._extra(picked, responses))
        return rollout, {"generate": generated - started, "score": time.monotonic() - generated}

    def _gather(
        self,
        indices: Sequence[int],
        prompts: Sequence[list[int]],
        responses: Sequence[list[int]],
        evaluated: Evaluated,
        scores: Scores,
        extra: torch.Tensor,
    ) -> Rollout:
        """One rollout of what all processes sampled, in the order of `indices`."""
        numbers = [column.tolist() for column in (scores.reward, scores.bonus, scores.baseline, extra)]
        mine = dict(zip(indices, zip(prompts, responses, *evaluated, *numbers, strict=True), strict=True))
        rows = [row for _, row in sorted(gather_object(list(mine.items())), key=lambda item: item[0])]
        weights = [reward.weight for reward in self.extra_rewards]
        return join_responses(rows, self.ends, self.config.missing_eos_penalty, self.accelerator.device, weights)

    def _texts(self, responses: Sequence[list[int]]) -> list[str]:
        return [self.renderer.text(row) for row in responses]

    def _extra(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> torch.Tensor:
        """(B, K) float32: the extra rewards of each response, before their weights."""
        texts = self._texts(responses)
        columns = [reward.score(prompts, texts) for reward in self.extra_rewards]
        return torch.stack(columns, dim=1) if columns else torch.zeros(len(texts), 0)

    def _add_references(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], torch.Tensor]:
        """Draws K completions of π_ref for each prompt that is new, for baseline and Γ; a function of the prompt.

        Every process is given the same prompts, draws for its share of the new ones, and learns what the others drew.
        Returns its own completions, K of each of its prompts in turn, and their features (·, d).
        """
        new = list({repr(p): p for p in prompts if not self.scorer.has_reference(p)}.values())
        if not new:
            return [], torch.empty(0)
        count, known = self.config.reference_samples, set(self.scorer.references)
        mine = new[self.accelerator.process_index :: self.accelerator.num_processes]
        repeated = [prompt for prompt in mine for _ in range(count)]
        keys = [sample_key(self.seed, "reference", prompt_key(prompt), k) for prompt in mine for k in range(count)]
        ids = [self.renderer.prompt_ids(prompt) for prompt in repeated]
        stored = [self.completions.get(tuple(each), []) for each in ids]
        new_places = [place for place, rows in enumerate(stored) if len(rows) != count]
        label = "reference completions" if self.accelerator.is_main_process else None
        once = self.config.gather_once and self.reader.reference is not None  # else its weights are the policy's
        with self.reader.reference_model() as model, keep_gathered(self.accelerator, model, once):
            inputs = [ids[i] for i in new_places], [keys[i] for i in new_places]
            answers, logprobs = self.engine.sample(model, *inputs, self.sampling, True, label)
        if logprobs is not None:
            self.proofs["reference"] = self.engine.prove(inputs[0], answers, logprobs, at_reference=True)
        new_rows = iter(answers)
        rows = [stored[i][i % count] if len(stored[i]) == count else next(new_rows) for i in range(len(ids))]
        scored = mine or self.scorer.together
        features = self.scorer.features(repeated, self._texts(rows)) if scored else torch.empty(0)
        for index, prompt in enumerate(mine):
            self.scorer.add_reference(prompt, features[index * count : (index + 1) * count])
        self.new_references = ids, rows
        drawn = {prompt: kept for prompt, kept in self.scorer.references.items() if prompt not in known}
        for others in gather_object([drawn]):
            self.scorer.references.update(others)
        return rows, features

    def _read(
        self,
        prompts: Sequence[list[int]],
        responses: Sequence[list[int]],
        at_reference: bool = False,
        keep: bool = True,
    ) -> Evaluated:
        size = self._micro_batch_size() * (1 if self.config.micro_batch_size else EVALUATED)
        with precision(self.accelerator):
            return self.reader.read(prompts, responses, size, at_reference, keep)

    # --- improving ----------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """PPO epochs over one iteration's responses; returns means over all of its minibatches.

        Raises:
            NonFiniteError: a loss or a gradient of a minibatch is NaN or infinite; its step was not made.
        """
        config = self.config
        targets = learning_targets(
            rollout,
            kl_coef=self.controller.value,
            estimator=config.kl_estimator,
            gamma=config.gamma,
            lam=config.lam,
            whiten_advantages=config.whiten_advantages,
        )
        set_rates(self.optimizer, config, iteration)
        totals: dict[str, float] = {}
        steps = 0
        for epoch in range(config.ppo_epochs):
            seed = sample_key(self.seed, "minibatches", iteration, epoch)
            for number, picked in enumerate(minibatch_order(rollout.prompts, config.minibatch_size, seed)):
                try:
                    metrics = self._step(rollout, targets, picked, iteration)
                except NonFiniteError as error:
                    self._locate(error, iteration, epoch=epoch, minibatch=number)
                    raise
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
                steps += 1
        self.controller.update(float(rollout.kl.mean()), len(rollout.prompts))
        return {name: value / steps for name, value in totals.items()}

    def _step(self, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int) -> dict[str, float]:
        """One optimiser step on the responses `picked`; every process takes its share of them."""
        tokens = rollout.mask[list(picked)].sum()
        sums = self._backward(rollout, targets, picked, iteration)
        norms = self.clip()
        means = (self.accelerator.reduce(sums, "sum") / tokens).tolist()
        metrics = {**dict(zip(LOSSES, means, strict=True)), **norms}
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]  # the same on every process
        if bad:
            raise self._nonfinite_step(bad[0], metrics[bad[0]], rollout, targets, picked, iteration)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics

    def clip(self) -> dict[str, float]:
        """Clips the gradients of policy and value head apart, and returns their norms before: the head's are often ten
        times as large, and clipped together they would shrink the policy's steps.
        """
        limit, groups = self.config.max_grad_norm, self.optimizer.param_groups
        norms = [as_number(self.accelerator.clip_grad_norm_(group["params"], limit)) for group in groups]
        return dict(zip(("grad_norm", "value_grad_norm"), norms, strict=True))

    def _backward(self, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int) -> torch.Tensor:
        """Adds the gradients of this process's share, in micro-batches; returns the sums that are logged, (5,)."""
        tokens = rollout.mask[list(picked)].sum()
        mine = self._shares(rollout, picked, self._micro_batch_size())

        def mean_loss(share: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            loss, parts = self._loss(rollout, targets, share, iteration)
            return loss / tokens, parts

        return self.backward(mine, mean_loss)

    def backward(self, shares: Sequence[T], loss_of: Callable[[T], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Adds the gradients of this process's micro-batches, as many as every other process has.

        loss_of: of a micro-batch, its part of the loss of all processes together, and numbers. Returns their sums.
        """
        sums = torch.zeros((), device=self.accelerator.device)
        for number, share in enumerate(shares):
            last = number == len(shares) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, parts = loss_of(share)
                # Processes average their gradients; times their number, the sum over all of them remains.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            sums = sums + parts
        return sums

    def _shares(self, rollout: Rollout, picked: Sequence[int], size: int) -> list[list[int]]:
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        return shares(rollout, picked, size, process, processes, self.reader.sharing)

    def _nonfinite_step(
        self, bad: str, value: float, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int
    ) -> NonFiniteError:
        """The error for a step whose metric `bad` is not finite, with the losses of its rows; on every process.

        The weights are those before the step, so that what is computed again is the same.
        """
        rows = []
        with torch.no_grad():
            for share in self._shares(rollout, picked, 1):
                parts = self._loss(rollout, targets, share, iteration)[1]
                for row in share:
                    means = (parts / rollout.mask[row].sum()).tolist()
                    rows.append({**rollout.row_facts(row), **dict(zip(LOSSES, means, strict=True))})
        rows = sorted(gather_object(rows), key=lambda row: row["row"])
        gradient = None
        if bad not in LOSSES:  # clipping has spread it over every gradient
            self.optimizer.zero_grad()
            self._backward(rollout, targets, picked, iteration)
            found = gather_object([nonfinite_gradient(self.bare)])  # of split weights each process sees its part
            gradient = next((each for each in found if each is not None), None)
        self.optimizer.zero_grad()
        return step_error(bad, value, iteration, rows, gradient)

    def _locate(self, error: NonFiniteError, iteration: int, **where: int) -> None:
        """Adds to the dump where it happened and what was said there."""
        error.facts = {"iteration": iteration, **where, **error.facts}
        for row in error.rows:
            row["prompt"] = self.prompt_of(iteration, row["row"])
            row["response"] = self.renderer.text(row["response_ids"])

    def _loss(
        self, rollout: Rollout, targets: Targets, picked: Sequence[int], iteration: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of one micro-batch and the sums that are logged; 0 of an empty one."""
        config, rows = self.config, list(picked)
        batch = self.reader.batch([rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows], rows)
        width, places = batch.response_ids.shape[1], torch.tensor(rows, dtype=torch.long, device=rollout.mask.device)
        mask = rollout.mask[places, :width]
        with precision(self.accelerator):
            logprobs, values, entropy = self.model(batch, config.temperature, entropy=config.entropy_coef > 0)
        if not rows:
            return 0.0 * (logprobs + values).sum(), torch.zeros(len(LOSSES), device=self.accelerator.device)
        policy = clipped_policy_loss(
            logprobs, rollout.logprobs[places, :width], targets.advantages[places, :width], mask, config.clip_range
        )
        value = clipped_value_loss(
            values, rollout.values[places, :width], targets.returns[places, :width], mask, config.value_clip_range
        )
        bonus = (entropy * mask).sum() if entropy is not None else torch.zeros_like(value)
        active = 0.0 if iteration < config.warmup_iterations else 1.0
        loss = active * (policy.loss - config.entropy_coef * bonus) + config.value_coef * value
        parts = torch.stack([policy.loss.detach(), value.detach(), bonus.detach(), policy.clipped, policy.approx_kl])
        return loss, parts

    def _micro_batch_size(self) -> int:
        share = math.ceil(self.config.minibatch_size / self.accelerator.num_processes)
        return min(self.config.micro_batch_size or share, share)


def make_optimizer(model: PolicyWithValue, config: PpoConfig) -> torch.optim.Optimizer:
    """The recipe's optimiser over the trainable tensors, the value head with its own learning rate; no weight decay.

    Adam's ε is 1e-8: PPO code's 1e-5 is as large as a policy's gradients can be, and would shorten its steps. The 8-bit
    ones keep the moments of tensors of 4096 numbers and more in 8 bits.
    """
    groups: list[dict[str, Any]] = [
        {"params": [each for each in model.policy.parameters() if each.requires_grad], "lr": config.learning_rate},
        {"params": list(model.value_head.parameters()), "lr": config.value_learning_rate},
    ]
    if config.optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

        kind = AdamW8bit if config.optimizer == "adamw_8bit" else PagedAdamW8bit
        return kind(groups, weight_decay=0.0)
    if config.optimizer == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups, scale_parameter=False, relative_step=False)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups)
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, config: PpoConfig, iteration: int) -> None:
    """Sets the learning rates of an iteration; a pure function of it, so that resuming needs no state."""
    scale = 1.0 - iteration / config.iterations if config.lr_schedule == "linear" else 1.0
    for group, rate in zip(optimizer.param_groups, (config.learning_rate, config.value_learning_rate), strict=True):
        group["lr"] = rate * scale


def _check_arguments(
    policy: Any, tokenizer: Any, reward: Any, prompts: Sequence[Any], settings: PpoConfig, most_tokens: int
) -> None:
    """Refuse with a UserError what `PpoTrainer.from_policy` cannot train with, or would ignore."""
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if not several or not prompts or not all(map(_is_prompt, prompts)):
        raise UserError("prompts must be one or more texts or lists of messages (role, content): give a list of them")
    if not callable(reward) and not isinstance(reward, RewardScorer):
        kind = type(reward).__name__
        raise UserError(f"reward must be a function of prompts and responses, or a RewardScorer, got {kind}: give one")
    if tokenizer.chat_template is None or None in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        names = "chat_template, eos_token or pad_token"
        raise UserError(f"tokenizer must have a chat template, an end of turn and a padding token: set {names}")
    if most_tokens < 1:
        raise UserError(f"max_response_tokens must be at least 1, got {most_tokens}: raise it")
    if ignored := [name for name in OF_A_RUN if getattr(settings, name)]:
        raise UserError(f"settings.{ignored[0]} must be left out: only the stages of a recipe read it")
    if settings.reference_rollouts and not settings.baseline and (callable(reward) or not reward.use_bonus):
        raise UserError("settings.baseline must be true with reference_rollouts, or nothing is drawn: set it")
    if isinstance(policy, PeftModel):
        if not any(parameter.requires_grad for parameter in policy.parameters()):
            raise UserError("policy must have an adapter that learns, got a frozen one: load it with is_trainable=True")
        learnt = any(each.any() for name, each in policy.named_parameters() if "lora_B" in name)
        if learnt and settings.reference_rollouts:  # draws of π_ref would be read as draws of π
            raise UserError("settings.reference_rollouts must be false for an adapter that has learnt: set it")
    elif settings.lora is None and policy.dtype != torch.float32:
        raise UserError(f"policy must be float32 where settings.lora is None, got {policy.dtype}: call policy.float()")


def _is_prompt(prompt: Any) -> bool:
    messages = [] if isinstance(prompt, str) or not isinstance(prompt, Sequence) else prompt
    well_formed = all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages)
    return isinstance(prompt, str) or (len(messages) > 0 and well_formed)
