"""Private RLHF in one file: labels through randomised response, r̂ by their likelihood, PPO, and the Gibbs yardstick.

This is PPKL's Algorithm 1 on a tiny random model, from top to bottom in plain torch. Of private_rlhf it uses the
randomiser, the private loss and sampling with keyed noise. `PpoTrainer` gives the same numbers on the same model, seed
and settings; it adds adapters, several processes, resume and rewards of other kinds.

Run: python docs/examples/private_ppo_loop.py     (a CPU, half a minute)
Shapes: B responses of at most C tokens, n pairs, d features.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf import LabelNoise, PpoConfig, Sampling, gibbs_weights, private_likelihood_loss, privatize

from private_rlhf import sample_key, sample_responses  # isort: skip
from private_rlhf.lm.base_models import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

EPSILON, KAPPA, RIDGE, CAP = 3.0, 0.5, 5.0, 4  # CAP: tokens of a response
TOPICS = "apples bread cats dogs eggs fish grapes hats ice jam kites lamps maps nuts oats pears"
PROMPTS = [f"Tell me about {topic}." for topic in TOPICS.split()]
SETTINGS = PpoConfig(
    iterations=60, rollouts=len(PROMPTS), ppo_epochs=2, minibatch_size=8, lora=None, baseline=False, entropy_coef=0.0,
    kl_coef=0.3, learning_rate=1e-3, value_learning_rate=1e-2,
)  # fmt: skip


def true_reward(text: str) -> float:
    """r*, which the learner never sees: nats for the share of letters."""
    return 4.0 * sum(each.isascii() and each.isalpha() for each in text) / max(1, len(text))


# --- the policy -------------------------------------------------------------------------------------------------------

def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt in the chat template."""
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def sample(model: Any, tokenizer: Any, prompts: Sequence[str], keys: Sequence[int]) -> list[list[int]]:
    """One response to each prompt as token ids; the noise is a function of the key."""
    return sample_responses(
        model, [prompt_ids(tokenizer, prompt) for prompt in prompts], keys, Sampling(CAP),
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, batch_size=128,
    )  # fmt: skip


def texts_of(tokenizer: Any, responses: Sequence[list[int]]) -> list[str]:
    """Responses as text."""
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in responses]


def read(model: Any, tokenizer: Any, prompts: Sequence[str], responses: Sequence[list[int]]) -> tuple[Tensor, ...]:
    """Log-probabilities (B, C) of response tokens, the states (B, C, d) that predict them, and the mask (B, C)."""
    first = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    rows = [torch.tensor(prompt + response) for prompt, response in zip(first, responses, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    lengths = torch.tensor([len(response) for response in responses])
    seen = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    output = model(input_ids=ids, attention_mask=seen.long(), output_hidden_states=True)
    steps = torch.arange(int(lengths.max()))
    mask = (steps < lengths[:, None]).float()
    before = torch.tensor([len(prompt) - 1 for prompt in first])[:, None] + steps  # the column that predicts a token
    before.clamp_max_(ids.shape[1] - 2)  # of padding: any column will do
    batch = torch.arange(len(rows))[:, None]
    logprobs = output.logits[batch, before].float().log_softmax(dim=-1)
    chosen = logprobs.gather(2, ids[batch, before + 1][..., None])[..., 0]
    return chosen * mask, output.hidden_states[-1][batch, before], mask


# --- step 1 to 3: private labels, r̄ and its uncertainty --------------------------------------------------------------

def collect_labels(reference: Any, tokenizer: Any, pairs: int) -> tuple[list[str], list[list[str]], list[int]]:
    """Prompts (n,), two answers of π_ref to each, and z: Bradley–Terry labels of r* after randomised response."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(pairs)]
    keys = [[sample_key(0, "pair", i, k) for i in range(pairs)] for k in range(2)]
    answers = [texts_of(tokenizer, sample(reference, tokenizer, prompts, each)) for each in keys]
    margin = torch.tensor([true_reward(one) - true_reward(other) for one, other in zip(*answers, strict=True)])
    chance = torch.rand(pairs, generator=torch.Generator().manual_seed(0))
    labels = torch.where(chance < torch.sigmoid(margin), 1, -1)
    return prompts, answers, privatize(labels.tolist(), epsilon=EPSILON)  # the labels end here


class PessimisticReward:
    """r̂ = r̄ − Γ, linear in frozen features of π_ref: r̄ = θ·φ and Γ = κ·√((φ − φ̄)ᵀH⁻¹(φ − φ̄))."""

    def __init__(self, reference: Any, tokenizer: Any, pairs: int = 1024) -> None:
        self.reference, self.tokenizer = reference, tokenizer
        prompts, answers, z = collect_labels(reference, tokenizer, pairs)
        one, other = (self.features(prompts, side) for side in answers)
        difference, label, noise = one - other, torch.tensor(z), LabelNoise.of(EPSILON)
        # The minimiser of Σ −log P̃(z) + λ/2·‖θ‖², where P̃(z) = α·σ(z·Δ) + (1 − α)·σ(−z·Δ).
        theta = torch.zeros(difference.shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = private_likelihood_loss(difference @ theta, label, noise).sum() + RIDGE / 2 * theta.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        self.theta = theta.detach()
        # H = Σ ω·δφ δφᵀ + λI with the Fisher information ω of a private label about its margin.
        preferred = torch.sigmoid(difference @ self.theta)
        chance = noise.keep_prob * preferred + noise.flip_prob * (1 - preferred)
        weight = (noise.factor * preferred * (1 - preferred)).square() / (chance * (1 - chance))
        information = (difference * weight[:, None]).T @ difference + RIDGE * torch.eye(len(self.theta)).double()
        self.inverse = torch.linalg.inv(information)
        both = torch.cat([one, other]).reshape(2, -1, len(PROMPTS), len(self.theta))
        self.centre = dict(zip(PROMPTS, both.mean(dim=(0, 1)), strict=True))  # φ̄: the mean under π_ref

    @torch.no_grad()
    def features(self, prompts: Sequence[str], texts: Sequence[str]) -> Tensor:
        """φ (B, d) float64: the mean state of π_ref over the answer."""
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        ids = [[*row, self.tokenizer.eos_token_id] for row in rows]
        _, states, mask = read(self.reference, self.tokenizer, prompts, ids)
        return ((states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)).double()

    def __call__(self, prompts: Sequence[str], texts: Sequence[str]) -> list[float]:
        """r̂ of each response."""
        features = self.features(prompts, texts)
        centred = features - torch.stack([self.centre[prompt] for prompt in prompts])
        gamma = KAPPA * ((centred @ self.inverse) * centred).sum(dim=1).clamp_min(0).sqrt()
        return list((features @ self.theta - gamma).tolist())


# --- step 4: the policy, by PPO ---------------------------------------------------------------------------------------

def advantages_of(scores: Tensor, log_ratio: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened GAE(λ) advantages and returns (B, C): −kl_coef·log π/π_ref a token, and r̂ on the last one."""
    rewards = -SETTINGS.kl_coef * log_ratio * mask
    rewards[torch.arange(len(scores)), mask.sum(dim=1).long() - 1] += scores
    advantages, following, next_value = torch.zeros_like(rewards), torch.zeros(len(scores)), torch.zeros(len(scores))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + SETTINGS.gamma * next_value - values[:, t]
        following = (delta + SETTINGS.gamma * SETTINGS.lam * following) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = following
    returns = (advantages + values) * mask
    mean = advantages.sum() / mask.sum()
    variance = ((advantages - mean).square() * mask).sum() / mask.sum()
    return (advantages - mean) * torch.rsqrt(variance + 1e-8) * mask, returns


def ppo(policy: Any, tokenizer: Any, reward: Any, seed: int = 0) -> list[dict[str, float]]:
    """Train the policy in place, all of its weights; returns an entry for each iteration."""
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    policy.eval().requires_grad_(True)
    head = torch.nn.Linear(policy.config.hidden_size, 1)  # the value of a state; it starts at 0
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    rates = ((policy, SETTINGS.learning_rate), (head, SETTINGS.value_learning_rate))
    groups = [{"params": list(each.parameters()), "lr": rate} for each, rate in rates]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    clip, value_clip, history = SETTINGS.clip_range, SETTINGS.value_clip_range, []
    for iteration in range(SETTINGS.iterations):
        # Sample and score: what is read here is π_old, which the updates below start from.
        prompts = [PROMPTS[i] for i in shuffled(len(PROMPTS), sample_key(seed, "prompts", iteration))]
        keys = [sample_key(seed, "rollout", iteration, i) for i in range(len(prompts))]
        responses = sample(policy, tokenizer, prompts, keys)
        with torch.no_grad():
            old, states, mask = read(policy, tokenizer, prompts, responses)
            values = head(states)[..., 0] * mask
            log_ratio = old - read(reference, tokenizer, prompts, responses)[0]
        scores = torch.tensor(reward(prompts, texts_of(tokenizer, responses)))
        advantages, returns = advantages_of(scores, log_ratio, values, mask)
        losses = []
        for epoch in range(SETTINGS.ppo_epochs):
            order = shuffled(len(prompts), sample_key(seed, "minibatches", iteration, epoch))
            for start in range(0, len(order), SETTINGS.minibatch_size):
                rows = order[start : start + SETTINGS.minibatch_size]
                new, states, present = read(policy, tokenizer, [prompts[i] for i in rows], [responses[i] for i in rows])
                width = present.shape[1]  # of the longest response of the minibatch
                part = [each[rows, :width] for each in (old, advantages, values, returns)]
                ratio = ((new - part[0]) * present).exp()
                gain = torch.minimum(ratio * part[1], ratio.clamp(1 - clip, 1 + clip) * part[1])
                policy_loss = -(gain * present).sum() / present.sum()
                value = head(states.detach())[..., 0]  # its errors do not reach the policy
                bounded = part[2] + (value - part[2]).clamp(-value_clip, value_clip)
                error = torch.maximum((value - part[3]).square(), (bounded - part[3]).square())
                value_loss = 0.5 * (error * present).sum() / present.sum()
                optimizer.zero_grad()
                (policy_loss + SETTINGS.value_coef * value_loss).backward()
                for group in groups:  # apart: the head's gradients are larger
                    torch.nn.utils.clip_grad_norm_(group["params"], SETTINGS.max_grad_norm)
                optimizer.step()
                losses.append([policy_loss.item(), value_loss.item()])
        means = [float(scores.mean()), float(log_ratio.sum(dim=1).mean()), *np.mean(losses, axis=0).tolist()]
        history.append(dict(zip(("reward", "kl", "policy_loss", "value_loss"), means, strict=True)))
    return history


def shuffled(count: int, key: int) -> list[int]:
    """The permutation of a key."""
    return list(torch.randperm(count, generator=torch.Generator().manual_seed(key)).tolist())


# --- the yardstick: J = E[r̂] − kl_coef·KL of π_ref, of the policy and of the Gibbs policy ----------------------------


@torch.no_grad()
def evaluate(policy: Any, reference: Any, tokenizer: Any, reward: Any, draws: int = 128) -> dict[str, float]:
    """J of all three, and r*. The Gibbs policy (PPKL Eq. 5), the exact optimum of J, resamples draws of π_ref."""
    prompts = [prompt for prompt in PROMPTS for _ in range(draws)]
    keys = [sample_key(1, "evaluate", i) for i in range(len(prompts))]
    drawn = [sample(model, tokenizer, prompts, keys) for model in (reference, policy)]
    texts = [texts_of(tokenizer, rows) for rows in drawn]
    scores = [np.array(reward(prompts, each)) for each in texts]
    ours, theirs = (read(model, tokenizer, prompts, drawn[1])[0].sum(dim=1) for model in (policy, reference))
    kl, candidates = float((ours - theirs).mean()), scores[0].reshape(len(PROMPTS), draws)
    weights = gibbs_weights(candidates, SETTINGS.kl_coef)
    gibbs = weights * (candidates - SETTINGS.kl_coef * np.log(np.maximum(draws * weights, 1e-300)))
    true = [sum(map(true_reward, each)) / len(each) for each in texts]
    objective = {"π_ref": scores[0].mean(), "policy": scores[1].mean() - SETTINGS.kl_coef * kl}
    objective["Gibbs policy"] = gibbs.sum(axis=1).mean()
    facts = {f"J of {name}": float(value) for name, value in objective.items()}
    return facts | {"KL of policy": kl, "r* of π_ref": true[0], "r* of policy": true[1]}


def load(folder: Path) -> tuple[Any, Any]:
    """A tiny random Llama and its tokenizer; any causal LM with a chat template will do."""
    path = tiny_checkpoint(folder / "tiny", PROMPTS)
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def main() -> None:
    """Print the training and what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        policy, tokenizer = load(Path(folder))
    reference = copy.deepcopy(policy).requires_grad_(False)
    reward = PessimisticReward(reference, tokenizer)
    for iteration, entry in enumerate(ppo(policy, tokenizer, reward)):
        print(f"{iteration:3}  " + "  ".join(f"{name} {value:7.3f}" for name, value in entry.items()))
    for name, value in evaluate(policy, reference, tokenizer, reward).items():
        print(f"{name:22} {value:7.3f}")


if __name__ == "__main__":
    main()
