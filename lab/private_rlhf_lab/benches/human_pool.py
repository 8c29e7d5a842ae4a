"""A pool of answers on human text with a known truth: real HH-RLHF prompts, draws of π_ref, their features, and r*.

    private-rlhf run --config configs/hh_rlhf_smollm2.yaml --data FOLDER --run-dir runs/hh --only privatize, then sft
    python -m private_rlhf_lab.benches.human_pool --policy runs/hh/sft/model --cache CACHE --output hh_pool.safetensors
    (resumable: texts and features are kept in CACHE by the policy's weights; 30 minutes on one core beside other work)

`PRIVATE_RLHF_TEST_DATA` names the folder that holds hh_helpful/. Prompts to ask about are the training pairs', held-out
ones the evaluation pairs', less those of the training file. --policy is a checkpoint folder, or `instruct`, the model
as shipped; it draws at temperature 1, at most 64 new tokens. r* is `hh_truth` (`private_rlhf_lab.truths`).

Writes safetensors as `league.pool.make_pool` does: train_features (M, N, d), train_truth (M, N), eval_features,
eval_truth, all float32; metadata says what they are. Features are the states of SmolLM2-135M-Instruct after layer 15 at
the last token and their mean over the answer, d = 1152: the best depth for people's own labels by cross-validation
(docs/results/human.md), chosen without r*.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from private_rlhf.core import atomic
from private_rlhf.data.render import Renderer
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.model_folders import weights_digest
from private_rlhf.lm.models import end_ids, load_causal_lm
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from safetensors.torch import save_file

from private_rlhf_lab.benches.human_features import LAYERS, backbone_features, load_pairs, renderer_of
from private_rlhf_lab.truths.human_truth import HumanTruth

LONGEST_PROMPT = 96
LAYER = 15
KL_COEFS = (0.05, 0.1, 0.2, 0.5)


def pick_prompts(renderer: Renderer, split: str, count: int) -> list[str]:
    """Distinct prompts of a split of at most `LONGEST_PROMPT` tokens, in an order of their own; disjoint splits."""
    taken = {row["prompt"] for row in load_pairs("train", renderer).rows} if split == "eval" else set()
    found = {row["prompt"] for row in load_pairs(split, renderer).rows} - taken
    ordered = sorted(found, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    return [prompt for prompt in ordered if renderer.prompt_size(prompt) <= LONGEST_PROMPT][:count]


def draw_texts(
    home: Path, dtype: str, renderer: Renderer, prompts: Sequence[str], count: int, split: str, seed: int, path: Path
) -> list[list[str]]:
    """`count` answers of the policy to each prompt, kept at `path`."""
    if path.is_file():
        kept: list[list[str]] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    policy = load_causal_lm(home, dtype)
    rows = sample_responses(
        policy,
        [renderer.prompt_ids(prompt) for prompt in prompts for _ in range(count)],
        [sample_key(seed, "human pool", split, i, k) for i in range(len(prompts)) for k in range(count)],
        Sampling(renderer.max_response_tokens),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(policy, renderer.tokenizer),
        batch_size=64,
        progress=f"answers to {split} prompts",
    )
    flat = [renderer.text(row) for row in rows]
    texts = [flat[start : start + count] for start in range(0, len(flat), count)]
    atomic.write_json(path, texts)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="instruct", help="checkpoint folder, or `instruct`")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs=4, default=[250, 24, 100, 32], metavar="N",
                        help="prompts and answers to each, training and held out")  # fmt: skip
    options = parser.parse_args()
    sizes = {"train": tuple(options.sizes[:2]), "eval": tuple(options.sizes[2:])}
    truth = HumanTruth()
    shipped = smollm2_checkpoint(options.cache / "smollm2")
    home = shipped if options.policy == "instruct" else Path(options.policy)
    renderer, drawing = renderer_of(shipped), renderer_of(home)
    own = hashlib.sha256(f"{weights_digest(home)} {options.seed} {options.dtype} {sizes}".encode()).hexdigest()[:8]
    tensors: dict[str, torch.Tensor] = {}
    for split, (count, answers) in sizes.items():
        prompts = pick_prompts(renderer, split, count)
        name = f"pool-{own}-{split}"
        kept = options.cache / f"{name}.json"
        texts = draw_texts(home, options.dtype, drawing, prompts, answers, split, options.seed, kept)
        pairs = [(prompt, text) for prompt, each in zip(prompts, texts, strict=True) for text in each]
        shape = (len(prompts), answers)
        states = backbone_features(options.cache, name, pairs, options.dtype)[:, LAYERS.index(LAYER)]
        tensors[f"{split}_features"] = states.float().reshape(*shape, -1)
        rewards = truth.rewards([prompt for prompt, _ in pairs], [text for _, text in pairs])
        tensors[f"{split}_truth"] = rewards.float().reshape(shape)
    facts = {"truth": "hh_truth", "policy": str(options.policy), "layer": str(LAYER), "pools": "last, mean"}
    with atomic.new_file(options.output) as temporary:
        save_file(tensors, temporary, facts)
    for split in sizes:
        spread = tensors[f"{split}_truth"].std(dim=1)
        print(f"{split}: r* within a prompt has standard deviation {float(spread.mean()):.2f} on average")
    truth_of = tensors["eval_truth"].double().numpy()
    for kl_coef in KL_COEFS:
        weights = gibbs_weights(truth_of, kl_coef)
        kl = float(kl_from_uniform(weights).mean())
        gain = float(((weights - 1 / weights.shape[1]) * truth_of).sum(axis=1).mean()) - kl_coef * kl
        print(f"held-out, kl_coef {kl_coef:g}: the Gibbs policy of r* gains {gain:+.2f} in J at a KL of {kl:.1f}")


if __name__ == "__main__":
    main()
