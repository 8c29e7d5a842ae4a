"""Passes of the variance loss over stored answers, with the policy, the optimiser and the reader of a `PpoTrainer`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from private_rlhf.data.render import Prompt
from private_rlhf.lm.generate import sample_key
from private_rlhf.lm.numerics import precision
from private_rlhf.recipe import GvpoConfig
from private_rlhf.rl.nonfinite import step_error
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.regression import importance_weights, variance_loss
from private_rlhf.rl.replay import Answers
from private_rlhf.rl.rollout import Rollout

Groups = list[list[int]]
"""Rows of the answers of an optimiser step, group by group."""


def group_steps(prompts: Sequence[list[int]], size: int, groups_per_step: int, passes: int, seed: int) -> list[Groups]:
    """The groups of each optimiser step: a function of its arguments.

    In every pass the answers to each prompt are shuffled and cut into groups of `size`, the last one shorter. An answer
    without another to its prompt is left out: it has no gradient.

    Args:
        prompts: token ids of each answer's prompt; equal ones that stand apart, as those of two rounds, are as two.
        size: answers in a group.
        groups_per_step: groups that share a step; the last step of a pass may have fewer.
        passes: over all answers.
        seed: of the order.
    """
    by_prompt = [[row for row, _ in rows] for _, rows in groupby(enumerate(prompts), key=lambda pair: pair[1])]
    steps: list[Groups] = []
    for number in range(passes):
        generator = torch.Generator().manual_seed(sample_key(seed, "pass", number))
        groups = []
        for rows in by_prompt:
            order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
            groups += [part for start in range(0, len(order), size) if len(part := order[start : start + size]) > 1]
        mixed = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        steps += [mixed[start : start + groups_per_step] for start in range(0, len(mixed), groups_per_step)]
    return steps


class AnswerLearner:
    """Improves the policy of `trainer` on answers that were drawn by whichever policy.

    Args:
        trainer: prepared; its value head does not change.
        settings: section gvpo.
        kl_coef: coefficient of KL(π‖π_ref).
    """

    def __init__(self, trainer: PpoTrainer, settings: GvpoConfig, kl_coef: float) -> None:
        self.trainer, self.settings, self.kl_coef = trainer, settings, kl_coef

    def steps(self, answers: Answers, number: int) -> list[Groups]:
        """The optimiser steps of round `number`, and what they start from; empty where no prompt has two answers."""
        settings, trainer = self.settings, self.trainer
        again = answers if settings.passes > 1 else answers.take([])  # for one pass it costs more than it saves
        with precision(trainer.accelerator):
            trainer.reader.remember(again.prompts, again.responses, self._size)
        groups = settings.batch_size // settings.samples_per_prompt
        seed = sample_key(trainer.seed, "regression", number)
        return group_steps(answers.prompts, settings.samples_per_prompt, groups, settings.passes, seed)

    def learn(self, answers: Answers, number: int) -> dict[str, float]:
        """All steps of a round of its own, with moments of their own; means over them of what `step` returns."""
        moments, steps = self.trainer.optimizer.state, self.steps(answers, number)
        moments.clear()  # PPO's gradients are of another size: its moments would set the length of these steps
        rows = [self.step(answers, groups, number, done / len(steps)) for done, groups in enumerate(steps)]
        moments.clear()  # and these ones that of PPO's steps
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}

    def step(self, answers: Answers, groups: Groups, number: int, done: float) -> dict[str, float]:
        """One optimiser step; every process takes its share of the groups.

        Args:
            answers: all that are stored, with scores and log-probabilities.
            groups: of this step.
            number: of the round, from which the age of answers is counted.
            done: share of all steps that were made, in [0, 1): the rate falls to 0.

        Returns:
            `policy_loss`, half the variance of r̂ − kl_coef·log(π/π_ref) over kl_coef, and the gradient norms.

        Raises:
            NonFiniteError: loss or gradient is NaN or infinite; the step was not made.
        """
        trainer, count = self.trainer, sum(map(len, groups))
        for group, rate in zip(trainer.optimizer.param_groups, (self.settings.learning_rate, 0.0), strict=True):
            group["lr"] = rate * (1 - done)

        def mean_loss(share: Groups) -> tuple[torch.Tensor, torch.Tensor]:
            loss = self._loss(answers, share, number) / count
            return loss, loss.detach()

        total = trainer.backward(self._shares(groups), mean_loss)
        metrics = {"policy_loss": float(trainer.accelerator.reduce(total, "sum")), **trainer.clip()}
        bad = next((name for name, value in metrics.items() if not math.isfinite(value)), None)
        if bad is not None:
            trainer.optimizer.zero_grad()
            rows = [row for group in groups for row in group]
            facts = [{"row": row, "prompt_ids": answers.prompts[row], "response_ids": answers.responses[row],
                      "scores": float(answers.score[row])} for row in rows]  # fmt: skip
            raise step_error(bad, metrics[bad], number, facts, None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return metrics

    @property
    def _size(self) -> int:
        """Answers in a micro-batch."""
        share = math.ceil(self.settings.batch_size / self.trainer.accelerator.num_processes)
        return max(self.settings.samples_per_prompt, min(self.settings.micro_batch_size or share, share))

    def _shares(self, groups: Groups) -> list[Groups]:
        """This process's groups in micro-batches; as many on every process, some of them empty."""
        process, processes = self.trainer.accelerator.process_index, self.trainer.accelerator.num_processes
        width = self._size // self.settings.samples_per_prompt
        most = math.ceil(math.ceil(len(groups) / processes) / width)
        mine = groups[process::processes]
        return [mine[number * width : (number + 1) * width] for number in range(most)]

    def _loss(self, answers: Answers, groups: Groups, number: int) -> torch.Tensor:
        """kl_coef times the variance loss, summed over a micro-batch; 0 of an empty one."""
        trainer, settings = self.trainer, self.settings
        device, rows = trainer.accelerator.device, [row for group in groups for row in group]
        batch = trainer.reader.batch([answers.prompts[i] for i in rows], [answers.responses[i] for i in rows], rows)
        # Before the forward pass: what is sent to a GPU waits for all that it was given before.
        columns = (answers.score, answers.reference_logprob, answers.logprob, number - answers.iteration)
        score, reference, drawn, ages = torch.stack([column[rows] for column in columns]).to(device)
        places = torch.tensor([place for place, group in enumerate(groups) for _ in group], device=device)
        with precision(trainer.accelerator):
            tokens, values, _ = trainer.model(batch, trainer.config.temperature)
        unused = 0.0 * values.sum()  # the value head takes part, as wrappers of several processes ask
        if not rows:
            return unused + 0.0 * tokens.sum()
        logprobs = tokens.sum(dim=1)
        weights = importance_weights(logprobs, drawn, ages, settings.max_age, settings.importance_clip)
        loss = variance_loss(logprobs - reference, score, self.kl_coef, places, weights, settings.huber_delta)
        return self.kl_coef * loss + unused


def held_out_gains(
    trainer: PpoTrainer, prompts: Sequence[Prompt], samples: int, kl_coef: float, reference: Sequence[float]
) -> tuple[Rollout, list[float]]:
    """`samples` fresh answers to each prompt, and by prompt the mean of r̂ − kl_coef·log(π/π_ref) less `reference`.

    Their noise is the same every time, so that what one policy gains over another is known better than J itself.
    """
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    keys = [sample_key(trainer.seed, "held out", row) for row in range(len(repeated))]
    rollout, _ = trainer.draw(repeated, keys, keep=False)
    objective = (rollout.scores - kl_coef * rollout.kl).view(-1, samples).mean(dim=1).tolist()
    return rollout, [one - other for one, other in zip(objective, reference, strict=True)]


def best_step(gains: Sequence[Sequence[float]]) -> int:
    """The estimate to go back to, of one row of gains by prompt per estimate: the last, unless an earlier one's mean
    is higher by more than the standard error of their paired difference.
    """
    table = torch.tensor(gains, dtype=torch.float64)
    best = int(table.mean(dim=1).argmax())
    difference = table[best] - table[-1]
    error = difference.std() / math.sqrt(len(difference)) if len(difference) > 1 else torch.zeros(())
    return best if float(difference.mean()) > float(error) else len(gains) - 1


def split_prompts(prompts: Sequence[Prompt], held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """(to learn from, held out): `held_out` prompts at even distances are taken out, with every repetition of them."""
    places = {index * len(prompts) // held_out for index in range(min(held_out, len(prompts)))}
    apart = {repr(prompts[place]): prompts[place] for place in sorted(places)}
    return [prompt for prompt in prompts if repr(prompt) not in apart], list(apart.values())
