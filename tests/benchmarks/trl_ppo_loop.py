"""TRL 1.10's experimental PPO as a loop of `ppo_peers.py`: `ENV_PYTHON trl_ppo_loop.py SETTINGS.json`.

Runs in an environment of its own, where the project need not be installed. TRL's `train` is one long loop; it is held
at each iteration's generation until it is told to go on, and told apart by the first permutation of the update and by
the end of the step. Its own choices stay: a second whole model as value net that is trained too, log-probabilities from
the sampler's logits, the fused AdamW of transformers, no clipping of gradients, entropy logged and not trained.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peer_processes import peak_rss_mib, say, wait_for_turn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Phases(TrainerCallback):
    """Holds TRL's loop until its turn and notes when its phases end."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.started = self.generated = self.scored = 0.0
        self.tokens = 0
        self.sample, self.permutation = ppo_trainer.batch_generation, np.random.permutation
        ppo_trainer.batch_generation, np.random.permutation = self._generate, self._permute

    def _generate(self, model: Any, queries: torch.Tensor, *rest: Any) -> Any:
        if not wait_for_turn():
            sys.exit(0)
        self.started, self.scored = time.monotonic(), 0.0
        result = self.sample(model, queries, *rest)
        self.generated = time.monotonic()
        ended = result[0][:, queries.shape[1] :] == self.eos_token_id
        self.tokens = int(((ended.long().cumsum(dim=1) - ended.long()) == 0).sum())
        return result

    def _permute(self, *arguments: Any) -> Any:
        self.scored = self.scored or time.monotonic()
        return self.permutation(*arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = {
            "generate": self.generated - self.started,
            "score": self.scored - self.generated,
            "update": time.monotonic() - self.scored,
        }
        say({"seconds": seconds, "tokens": self.tokens, "peak_rss_mib": peak_rss_mib()})


def sequence_model(settings: dict[str, Any], pad_token_id: int) -> Any:
    """A sequence-classification model of the policy's size."""
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["path"], dtype=DTYPES[settings["dtype"]], num_labels=1
    )
    model.config.pad_token_id = pad_token_id
    return model


def main() -> None:
    """Build TRL's trainer and let it run."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(settings["path"], padding_side="left")
    dtype, count = DTYPES[settings["dtype"]], len(settings["prompt_ids"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(settings["path"], dtype=dtype) for _ in range(2))
    rows = Dataset.from_dict({"input_ids": settings["prompt_ids"]})
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            PPOConfig(
                output_dir=folder,
                per_device_train_batch_size=count,
                num_mini_batches=count // settings["minibatch"],
                num_ppo_epochs=settings["epochs"],
                total_episodes=count * 10_000,
                local_rollout_forward_batch_size=count,
                response_length=settings["max_response"],
                temperature=1.0,
                stop_token="eos",
                learning_rate=1e-6,
                num_sample_generations=0,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=sequence_model(settings, tokenizer.pad_token_id),
            value_model=sequence_model(settings, tokenizer.pad_token_id),
            train_dataset=rows,
            eval_dataset=rows,
        )
        trainer.add_callback(Phases(tokenizer.eos_token_id))
        trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        say({"trainable": trained, "threads": torch.get_num_threads(), "torch": torch.__version__})
        trainer.train()


if __name__ == "__main__":
    main()
