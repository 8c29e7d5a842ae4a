"""The PPO loops of `ppo_peers.py`, one a process: `python peer_ppo_loops.py LOOP SETTINGS.json` with LOOP one of
`reference` (the work of the published loop), `ours-full` and `ours-lora` (the project's trainer). With `--count` it
does one iteration and prints its tokens and the floating-point operations of its products and attentions.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import peer_inputs
import torch
from accelerate import Accelerator
from peer_processes import Measured, serve
from private_rlhf.lm.generate import pad_rows
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.models import add_lora, load_causal_lm
from private_rlhf.lm.numerics import fast_dtype
from private_rlhf.recipe import LoraSettings, PpoConfig
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.basis import identity_basis
from private_rlhf.reward_models.checkpoint import RewardCheckpoint
from private_rlhf.reward_models.linear import pair_problem
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.reward_models.uncertainty import FisherBonus
from private_rlhf.rl.ppo_trainer import PpoTrainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

CPU = torch.device("cpu")
BOUND = 8.0  # of rewards


class ReferenceLoop:
    """What the published loop computes, written anew: two copies of the weights, logits of whole sequences, values by
    a forward pass of their own, a reward model that reads the text again, default AdamW over all weights.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        path, dtype = settings["path"], peer_inputs.DTYPES[settings["dtype"]]
        self.settings = settings
        self.renderer = peer_inputs.renderer(path, settings["max_prompt"], settings["max_response"])
        self.tokenizer = self.renderer.tokenizer
        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.reference = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)
        self.reward = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)
        self.reward.eval().requires_grad_(False)
        self.reward.config.pad_token_id = self.tokenizer.pad_token_id
        width = self.policy.config.hidden_size
        self.reward.score.weight.data.copy_(peer_inputs.random_head(width)[None])
        self.value_head = nn.Linear(width, 1)
        self.optimizers = [
            torch.optim.AdamW(self.policy.parameters(), lr=1e-6),
            torch.optim.AdamW(self.value_head.parameters(), lr=5e-6),
        ]

    @property
    def trainable(self) -> int:
        """How many numbers are trained."""
        return peer_inputs.trainable(self.policy) + peer_inputs.trainable(self.value_head)

    def iterate(self, number: int) -> Measured:
        """Generate, score, update."""
        torch.manual_seed(number)
        started = time.monotonic()
        ids, mask, width = self.generate()
        generated = time.monotonic()
        targets = self.score(ids, mask, width)
        scored = time.monotonic()
        self.update(ids, mask, width, targets)
        seconds = {"generate": generated - started, "score": scored - generated, "update": time.monotonic() - scored}
        return {"seconds": seconds, "tokens": int(mask[:, width:].sum())}

    @torch.no_grad()
    def generate(self) -> tuple[Tensor, Tensor, int]:
        """(ids, mask), each (B, P + C), of prompts and responses in one batch, and P."""
        rows = [self.renderer.prompt_ids(prompt) for prompt in self.settings["prompts"]]
        ids, mask = pad_rows(rows, self.tokenizer.pad_token_id, CPU, left=True)
        whole = self.policy.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.settings["max_response"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=self.settings["top_p"],
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        ended = whole[:, ids.shape[1] :] == self.tokenizer.eos_token_id
        real = (ended.long().cumsum(dim=1) - ended.long()) == 0  # up to and with the first end of turn
        return whole, torch.cat([mask, real.long()], dim=1), ids.shape[1]

    def logprobs(self, model: Any, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """log π of the response tokens (B, C), and whole distributions (B, C, V), from logits of every position."""
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        distributions = torch.log_softmax(logits[:, width - 1 : -1], dim=-1)
        return distributions.gather(-1, ids[:, width:, None]).squeeze(-1), distributions

    def value(self, states: Tensor, mask: Tensor, width: int) -> Tensor:
        """One value a response (B,), from the last token's hidden state."""
        last = mask[:, width:].sum(dim=1).clamp_min(1) - 1 + width
        return self.value_head(states[torch.arange(len(states)), last].float()).squeeze(-1)

    @torch.no_grad()
    def rewards(self, ids: Tensor, mask: Tensor, width: int) -> Tensor:
        """(B,), of the text; with `mc_dropout` mean less spread of ten passes in training mode, as published."""
        rows = []
        for prompt, row, real in zip(self.settings["prompts"], ids[:, width:], mask[:, width:], strict=True):
            text = self.renderer.text(row[real.bool()].tolist())
            rows.append(self.renderer.prompt_ids(prompt) + self.renderer.response_ids(text))
        padded, attention = pad_rows(rows, self.tokenizer.pad_token_id, CPU)
        passes = 10 if self.settings["mc_dropout"] else 1
        self.reward.train(self.settings["mc_dropout"])
        scores = torch.stack(
            [
                self.reward(input_ids=padded, attention_mask=attention, use_cache=False).logits.squeeze(-1).float()
                for _ in range(passes)
            ]
        )
        return (scores.mean(dim=0) - scores.std(dim=0, correction=0)).clamp(-BOUND / 2, BOUND / 2)

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """log π (B, C), advantages (B,) and returns (B,)."""
        rewards = self.rewards(ids, mask, width)
        logprobs, _ = self.logprobs(self.policy, ids, mask, width)
        reference, _ = self.logprobs(self.reference, ids, mask, width)
        real = mask[:, width:]
        returns = rewards - 0.1 * ((logprobs - reference) * real).sum(dim=1) / real.sum(dim=1)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        output = self.policy(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        advantages = returns - self.value(output.hidden_states[-1], mask, width)
        return logprobs, (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns

    def update(self, ids: Tensor, mask: Tensor, width: int, targets: tuple[Tensor, Tensor, Tensor]) -> None:
        """The PPO epochs over minibatches, in one random order."""
        self.policy.train()
        order = torch.randperm(len(ids))
        for _ in range(self.settings["epochs"]):
            for picked in order.split(self.settings["minibatch"]):
                self.step(ids[picked], mask[picked], width, *(target[picked] for target in targets))
        self.policy.eval()

    def step(self, ids: Tensor, mask: Tensor, width: int, before: Tensor, advantages: Tensor, returns: Tensor) -> None:
        """One optimiser step with clipped ratios, a squared value error and the entropy over the whole vocabulary."""
        output = self.policy(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        distributions = torch.log_softmax(output.logits.float()[:, width - 1 : -1], dim=-1)
        logprobs = distributions.gather(-1, ids[:, width:, None]).squeeze(-1)
        real, advantage = mask[:, width:].float(), advantages[:, None]
        ratio = (logprobs - before).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value_error = (self.value(output.hidden_states[-1], mask, width) - returns).square().mean()
        entropy = -(distributions.exp() * distributions).sum(dim=-1)
        loss = -((clipped + 0.01 * entropy) * real).sum() / real.sum() + 0.5 * value_error
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for module in (self.policy, self.value_head):
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                raise FloatingPointError("a gradient is not finite")
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()


class OurLoop:
    """The project's trainer, put together as the stage does, with a reward model of the policy's size made here."""

    def __init__(self, settings: dict[str, Any], lora: bool) -> None:
        path, dtype = settings["path"], settings["dtype"]
        renderer = peer_inputs.renderer(path, settings["max_prompt"], settings["max_response"])
        config = PpoConfig(
            rollouts=len(settings["prompts"]),
            ppo_epochs=settings["epochs"],
            minibatch_size=settings["minibatch"],
            top_p=settings["top_p"],
            lora=LoraSettings() if lora else None,
        )
        base = load_causal_lm(path, peer_inputs.NAMES[dtype])
        reference = None if lora else load_causal_lm(path, peer_inputs.NAMES[dtype])
        policy = add_lora(base, config.lora, 0) if config.lora else base
        model = PolicyWithValue(policy, base.config.hidden_size).eval()
        self.trainable = peer_inputs.trainable(model)
        self.trainer = PpoTrainer(
            Accelerator(cpu=True),
            model,
            reference,
            RewardScorer(reward_checkpoint(settings), renderer, use_bonus=settings["mc_dropout"]),
            renderer,
            settings["prompts"],
            config,
            seed=0,
        )

    def iterate(self, number: int) -> Measured:
        """Generate, score, update."""
        rollout, seconds = self.trainer.collect(number)
        started = time.monotonic()
        self.trainer.update(rollout, number)
        seconds["update"] = time.monotonic() - started
        return {"seconds": seconds, "tokens": int(rollout.mask.sum())}


def reward_checkpoint(settings: dict[str, Any]) -> RewardCheckpoint:
    """A reward model with a random head; with `mc_dropout` also statistics of Γ, of random features."""
    model = build_reward_backbone(settings["path"], dtype=peer_inputs.DTYPES[settings["dtype"]])
    weight = peer_inputs.random_head(model.config.hidden_size)
    set_score_weight(model, weight)
    bonus = fisher_bonus(weight) if settings["mc_dropout"] else None
    return RewardCheckpoint(RewardModel(model.requires_grad_(False), reward_bound=BOUND), None, bonus)


def fisher_bonus(weight: Tensor) -> FisherBonus:
    """Γ of 256 pairs of random features."""
    basis, weight = identity_basis(len(weight)), weight.double()
    sides = torch.randn(2, 256, len(weight), generator=torch.Generator().manual_seed(1))
    problem = pair_problem(*sides, torch.ones(256), 2.0, basis, BOUND, "private_likelihood")
    return FisherBonus(weight, basis, problem.information(weight) + basis.matrix, BOUND)


class Operations(TorchDispatchMode):
    """Counts the floating-point operations of products, and of attentions as if nothing were masked."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func).partition(".")[2].partition(".")[0]
        if name in ("mm", "bmm"):
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif name in ("addmm", "baddbmm"):
            self.total += 2 * args[1].numel() * args[2].shape[-1]
        elif name == "_linear_pointwise":  # oneDNN's; a packed weight does not tell its shape
            self.total += 2 * found.numel() * args[0].shape[-1]
        elif name == "_scaled_dot_product_flash_attention_for_cpu":  # two products
            self.total += 4 * args[0].numel() * args[1].shape[-2]
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":  # five, one of them again
            self.total += 10 * args[1].numel() * args[2].shape[-2]
        elif ("linear" in name or "attention" in name) and name != "_reorder_linear_weight":
            raise RuntimeError(f"{func} has operations that are not counted here")
        return found


def counted(loop: Any) -> dict[str, int]:
    """Operations and tokens of the second iteration: references are drawn in the first."""
    loop.iterate(0)
    with Operations() as operations:
        tokens = loop.iterate(1)["tokens"]
    return {"operations": operations.total, "tokens": tokens}


def main() -> None:
    """Serve, or count, the loop that the command line names."""
    name, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    if name == "ours-lora":
        settings["dtype"] = {"float32": "fp32", "bfloat16": "bf16"}[fast_dtype("cpu")[0]]
    loop = ReferenceLoop(settings) if name == "reference" else OurLoop(settings, lora=name == "ours-lora")
    if "--count" in sys.argv:
        print(json.dumps(counted(loop)))
        return
    serve(loop.iterate, {"trainable": loop.trainable, "threads": torch.get_num_threads(), "torch": torch.__version__})


if __name__ == "__main__":
    main()
