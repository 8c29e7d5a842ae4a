"""RLOO and GRPO on r̂ with TRL's trainers: several responses to a prompt are each other's baseline, no value model.

What TRL 1.16 makes of J = E[r̂] − kl_coef·KL(π‖π_ref), with the arguments of `trl_arguments`:

RLOO: the reward of a whole response is R = r̂ − kl_coef·log(π/π_ref) and its advantage R less the mean R of the other
responses to its prompt. On the responses that π has just sampled the gradient is that of J, without bias.

GRPO: the advantage is r̂ less the mean over all G responses to the prompt, itself included, which shrinks the reward's
gradient by (G − 1)/G; the reward is weighted by G/(G − 1) to undo that. KL is a term of the loss: per token
w·(π_ref/π − log(π_ref/π) − 1) with w = π/π_old, whose gradient is that of KL(π‖π_ref) at the token, given what stands
before it. That one token changes the KL of those after it is not seen. So this is not J: the optimum is
π(a|s) ∝ π_ref(a|s)·exp(E[r̂|s, a]/kl_coef) at each token, where the Gibbs policy has E[r̂ − kl_coef·(KL to come)|s, a].
Both agree for one token; tests/rl/test_group.py computes what GRPO's optimum is worth on the enumerable problem.
`dr_grpo` divides the sum over tokens by the cap on responses, a constant, so nothing depends on a response's length.

In both a second step on the same responses is clipped at 1 ± clip_range of π/π_old, of a response (RLOO) or of a token
(GRPO), as PPO's is; whatever was cut at the cap counts like a finished response, less `ppo.missing_eos_penalty`.
Log-probabilities are at the temperature of sampling, dropout is off, and π_ref is the model with its adapter off, or
sft/model in full fine-tuning.

Own code replaces two steps of TRL's: prompts are rendered by the pipeline's renderer, and responses are sampled with
noise keyed by step and place, so that neither a restart nor the number of processes changes them. TRL shuffles each
process's share of an iteration before it cuts it into batches, so with several steps per iteration the losses depend on
the number of processes after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from private_rlhf.data.render import Prompt, Renderer, prompt_key
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.distributed import keep_gathered
from private_rlhf.lm.drawing import Engine, TransformersEngine
from private_rlhf.lm.generate import Sampling, sample_key
from private_rlhf.lm.models import end_ids
from private_rlhf.recipe import GroupConfig, PpoConfig
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.rl.replay import REFERENCE, Answers, Replay
from private_rlhf.rl.rollout import prompt_index
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

ENGINE = "engine/"
"""Prefix of the facts of an engine's proof in TRL's log."""
LOGGED = ("reward", "bonus", "score", "score_over_reference", "true_reward", "finished")
"""The reward function's report on an iteration's responses, by the names of PPO's history."""


@dataclass(frozen=True)
class Task:
    """The prompts, the sampling and the scoring.

    Attributes:
        scorer: gives r̄ and Γ.
        renderer: the policy's.
        prompts: training prompts; the dataset holds their places.
        sampling: temperature, top_p and the cap.
        batch_size: responses decoded together.
        reference_samples: K completions of π_ref per prompt that centre Γ.
        missing_eos_penalty: subtracted from r̂ when a response is cut at the cap.
        seed: of the sampling noise.
        has_truth: the true reward is a known function, and reported.
        replay: keeps what is drawn.
        gather_once: split weights stay whole while responses are drawn.
    """

    scorer: RewardScorer
    renderer: Renderer
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int
    reference_samples: int
    missing_eos_penalty: float
    seed: int
    has_truth: bool
    replay: Replay | None = None
    gather_once: bool = True


class _OnPessimisticReward:
    """Sampling and scoring for both trainers, on `task`; the dataset's `prompt` is a place in `task.prompts`."""

    def __init__(self, *args: Any, task: Task, **kwargs: Any) -> None:
        self.task = task
        super().__init__(*args, reward_funcs=[self.pessimistic_reward], **kwargs)  # type: ignore[call-arg]
        model: Any = self.model  # type: ignore[attr-defined]
        if isinstance(model, PeftModel) and "ref" in model.peft_config:
            model.delete_adapter("ref")  # TRL's copy of the adapter as it came, which is none: B = 0
        self.ends = end_ids(model, task.renderer.tokenizer)
        how = task.renderer.tokenizer, task.batch_size
        self.engine: Engine = TransformersEngine(self.accelerator, *how)  # type: ignore[attr-defined]
        self.proof: dict[str, float] = {}  # of what an engine has drawn last

    def pessimistic_reward(
        self, prompts: list[int], completion_ids: list[list[int]], log_metric: Any, **_: Any
    ) -> list[float]:
        """r̂ = r̄ − Γ of each response, less the missing-EOS penalty; its parts go to TRL's log.

        Raises:
            FloatingPointError: a reward is not finite; TRL would leave that response out without a word.
        """
        task = self.task
        texts = [task.renderer.text(row) for row in completion_ids]
        scores = task.scorer.score([task.prompts[place] for place in prompts], texts)
        finished = torch.tensor([row[-1] in self.ends for row in completion_ids])
        penalised = scores.pessimistic - task.missing_eos_penalty * (~finished).float()
        if not torch.isfinite(penalised).all():
            raise FloatingPointError("the reward of a response is not finite: check the reward model")
        self._keep([task.prompts[place] for place in prompts], completion_ids, penalised.tolist())
        truth = torch.tensor([true_reward("", text) for text in texts]) if task.has_truth else None
        columns = (scores.reward, scores.bonus, penalised, penalised - scores.baseline, truth, finished)
        for name, column in zip(LOGGED, columns, strict=True):
            if column is not None:
                log_metric(f"pessimistic/{name}", float(column.float().mean()))
        for name, value in self.proof.items():
            log_metric(f"{ENGINE}{name}", value)
        return [float(value) for value in penalised]

    def draw_references(self) -> None:
        """K completions of π_ref for each training prompt centre Γ, the same ones as PPO's; each process draws a share.

        Call it before training, while the policy is π_ref.
        """
        task, accelerator = self.task, self.accelerator  # type: ignore[attr-defined]
        places = sorted(set(self.train_dataset["prompt"]))  # type: ignore[attr-defined]
        new = [task.prompts[place] for place in places if not task.scorer.has_reference(task.prompts[place])]
        if not new:
            return
        mine = new[accelerator.process_index :: accelerator.num_processes]
        count = task.reference_samples
        repeated = [prompt for prompt in mine for _ in range(count)]
        keys = [sample_key(task.seed, "reference", prompt_key(prompt), k) for prompt in mine for k in range(count)]
        ids = [task.renderer.prompt_ids(prompt) for prompt in repeated]
        label = "reference completions" if accelerator.is_main_process else None
        model = accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        rows = self.engine.draw(model, ids, keys, task.sampling, at_reference=True, progress=label)
        if task.replay is not None:
            task.replay.write(REFERENCE, 0, Answers.unscored(ids, rows, 0))
        if mine or task.scorer.together:
            features = task.scorer.features(repeated, [task.renderer.text(row) for row in rows])
            for index, prompt in enumerate(mine):
                task.scorer.add_reference(prompt, features[index * count : (index + 1) * count])
        for references in gather_object([task.scorer.references]):
            task.scorer.references.update(references)

    def _keep(self, prompts: Sequence[Prompt], responses: list[list[int]], scores: list[float]) -> None:
        """Adds this process's share of an iteration's responses to the replay."""
        task, step = self.task, self.state.global_step  # type: ignore[attr-defined]
        if task.replay is not None:
            ids = [task.renderer.prompt_ids(prompt) for prompt in prompts]
            task.replay.write(self._tag_names[1], step, Answers.unscored(ids, responses, step, scores))  # type: ignore[attr-defined]

    def _tokenize_prompts(self, prompts: list[int]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """TRL would apply the chat template its own way; here training and sampling share one renderer."""
        return [self.task.renderer.prompt_ids(self.task.prompts[place]) for place in prompts], None, {}

    def _respond(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """One response to each of this process's prompts."""
        first = self.accelerator.process_index * len(prompt_ids)  # type: ignore[attr-defined]
        step = self.state.global_step  # type: ignore[attr-defined]
        keys = [sample_key(self.task.seed, "rollout", step, first + row) for row in range(len(prompt_ids))]
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        self.engine.publish(model)
        with keep_gathered(self.accelerator, model, self.task.gather_once):  # type: ignore[attr-defined]
            responses, logprobs = self.engine.sample(model, prompt_ids, keys, self.task.sampling)
        if logprobs is not None:
            self.proof = self.engine.prove(prompt_ids, responses, logprobs)
        return responses


class PessimisticRloo(_OnPessimisticReward, RLOOTrainer):
    """TRL's RLOO on r̂."""

    _tag_names = ["trl", "rloo", "private-rlhf"]  # noqa: RUF012 - as in the parent class

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return self._respond(prompt_ids)


class PessimisticGrpo(_OnPessimisticReward, GRPOTrainer):
    """TRL's GRPO on r̂."""

    _tag_names = ["trl", "grpo", "private-rlhf"]  # noqa: RUF012 - as in the parent class

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return self._respond(prompt_ids), None


TRAINERS: dict[str, tuple[Any, Any]] = {"rloo": (PessimisticRloo, RLOOConfig), "grpo": (PessimisticGrpo, GRPOConfig)}


def trl_arguments(aligner: str, settings: GroupConfig, ppo: PpoConfig, max_response_tokens: int) -> dict[str, Any]:
    """TRL's arguments that make J the objective, as the module says.

    Args:
        aligner: `rloo` or `grpo`, whose section `settings` is.
        settings: may overrule kl_coef.
        ppo: kl_coef, temperature and top_p of the task.
        max_response_tokens: cap on a response.
    """
    count = settings.samples_per_prompt
    shared: dict[str, Any] = {
        "beta": ppo.kl_coef if settings.kl_coef is None else settings.kl_coef,
        "num_generations": count,
        "generation_batch_size": settings.rollouts,
        "num_iterations": settings.epochs,
        "epsilon": settings.clip_range,
        "temperature": ppo.temperature,
        "top_p": ppo.top_p,
        "max_completion_length": max_response_tokens,
        "shuffle_dataset": False,  # `prompt_dataset` has shuffled
        "disable_dropout": True,
        "mask_truncated_completions": False,
    }
    if aligner == "rloo":
        return shared | {"normalize_advantages": False}
    return shared | {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "reward_weights": [count / (count - 1)],
        "use_bias_correction_kl": True,
    }


def prompt_dataset(prompts: int, settings: GroupConfig, seed: int) -> Dataset:
    """The place of the prompt of every group of responses in the whole training, in PPO's order."""
    groups = settings.iterations * settings.rollouts // settings.samples_per_prompt
    return Dataset.from_dict({"prompt": [prompt_index(group, prompts, seed) for group in range(groups)]})


def history_of(state: TrainerState, rollouts: int, kl_coef: float) -> list[dict[str, Any]]:
    """One line per iteration as in PPO's history. `kl` is TRL's mean per token (RLOO: log(π/π_ref); GRPO: the
    estimate in its loss, of the iteration's first step) times the mean length, nats per response.
    """
    steps = [entry for entry in state.log_history if "loss" in entry]
    starts = [number for number, entry in enumerate(steps) if "pessimistic/score" in entry]
    history: list[dict[str, Any]] = []
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        first, own = steps[start], steps[start:end]
        proof = {name.removeprefix(ENGINE): value for name, value in first.items() if name.startswith(ENGINE)}
        tokens, seconds = first["completions/mean_length"], sum(entry["step_time"] for entry in own)
        history.append(
            {
                "iteration": len(history),
                "rollouts": rollouts,
                **{name: first.get(f"pessimistic/{name}") for name in LOGGED},
                "kl": first["kl"] * tokens,
                "response_tokens": tokens,
                "kl_coef": kl_coef,
                "policy_loss": sum(entry["loss"] for entry in own) / len(own),
                "grad_norm": sum(entry["grad_norm"] for entry in own) / len(own),
                "tokens_per_second": round(rollouts * tokens / max(seconds, 1e-9), 1),
                **({"engine": {"policy": proof}} if proof else {}),
            }
        )
    return history
