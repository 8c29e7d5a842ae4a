"""Makes the embedded data: `python -m pipeline.embedded.make --output DIR [--seed 0] [--limit N]`.

Three steps, none of which knows the ground truth, so that the text carries no label:

1. Demonstrations: the model as shipped answers the training prompts under a system message that asks for one plain
   sentence, at a low temperature; answers are kept by form alone (`is_demonstration`).
2. A short imitation run on the demonstrations (LoRA, merged) gives a policy like the one the `sft` stage makes.
3. That policy answers every prompt at temperature 1, without a system message; answers to one prompt are paired.

Writes, as Parquet (zstd): `demonstrations` (prompt, response), `pairs` and `eval_pairs` (prompt, response_a,
response_b; no labels: they are drawn at run time by `task.draw_labels`), `train_prompts` and `eval_prompts` (prompt).
Takes some 20 minutes on a CPU. The same seed, library versions and thread count give the same files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.embedded.topics import Split, prompts, topic_of
from pipeline.lm.smollm2 import smollm2_checkpoint

MAX_NEW_TOKENS = 32
DEMONSTRATION_SYSTEM = "You answer in one short, plain sentence."
DEMONSTRATION_TEMPERATURE = 0.6
DEMONSTRATIONS_PER_PROMPT = 3  # at most
DRAWS_PER_PROMPT = {"demonstrations": 10, "train": 30, "eval": 4}
BATCH = 192


@dataclass(frozen=True)
class Completion:
    """One sampled answer; `finished`: the model ended it with its end of turn within MAX_NEW_TOKENS."""

    prompt: str
    response: str
    finished: bool


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """One token per row of `logits` (rows, vocabulary) from softmax(logits / temperature), by inverting the CDF.

    One uniform per row instead of `torch.multinomial`'s one exponential per vocabulary entry, which is a third of the
    time of generation on a CPU at this model's size.
    """
    cumulative = torch.softmax(logits.float() / temperature, dim=-1).cumsum(dim=-1)
    uniform = torch.rand(len(logits), 1, generator=generator) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, uniform, right=True).clamp(max=logits.shape[-1] - 1).squeeze(1)


def render(prompt: str, system: str | None = None) -> str:
    """ChatML up to the start of the answer; without a system message, 22 tokens shorter than the default one."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def is_demonstration(completion: Completion) -> bool:
    """A finished, one-line answer of 6 to 20 words that names its topic, repeats little and is no refusal."""
    text = completion.response
    words = text.lower().split()
    return (
        completion.finished
        and 6 <= len(words) <= 20
        and text.endswith((".", "!"))
        and "\n" not in text
        and text.isascii()
        and text[0].isupper()
        and len(set(words)) >= 0.75 * len(words)
        and topic_of(completion.prompt).split()[-1].lower() in text.lower()
        and not any(phrase in text for phrase in ("I'm sorry", "AI ", "assist", "Sterili", "sentence"))
    )


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[str],
    draws: int,
    *,
    seed: int,
    temperature: float = 1.0,
    system: str | None = None,
    title: str = "sample",
) -> list[Completion]:
    """`draws` completions of each prompt in `asked`, prompt by prompt, at `temperature` (no top-k, no top-p)."""
    generator = torch.Generator().manual_seed(seed)
    done: list[Completion] = []
    per_batch = max(BATCH // draws, 1)
    for start in tqdm(range(0, len(asked), per_batch), desc=title, unit="batch"):
        part = asked[start : start + per_batch]
        inputs = tokenizer([render(p, system) for p in part], return_tensors="pt", padding=True)
        new = _generate(model, tokenizer, inputs, draws, temperature, generator)
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        finished = (new == tokenizer.eos_token_id).any(dim=1).tolist()
        repeated = [p for p in part for _ in range(draws)]
        done += [Completion(p, t.strip(), f) for p, t, f in zip(repeated, texts, finished, strict=True)]
    return done


@torch.inference_mode()
def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, torch.Tensor],
    draws: int,
    temperature: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """New tokens (prompts·draws, MAX_NEW_TOKENS), pad after the end of turn. A prompt is read once for all its draws,
    and rows that have ended leave the batch; together that halves the time of `model.generate`."""
    mask = inputs["attention_mask"]
    position = mask.sum(dim=1) - 1
    output = model(
        inputs["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), logits_to_keep=1
    )
    cache = output.past_key_values
    cache.batch_repeat_interleave(draws)
    logits = output.logits[:, -1].repeat_interleave(draws, dim=0)
    mask, position = mask.repeat_interleave(draws, dim=0), position.repeat_interleave(draws)
    new = torch.full((len(logits), MAX_NEW_TOKENS), int(tokenizer.pad_token_id))
    rows = torch.arange(len(logits))  # the row of `new` that each row of the batch writes to
    alive = torch.ones(len(logits), dtype=torch.bool)
    for step in range(MAX_NEW_TOKENS):
        token = draw(logits, temperature, generator)
        new[rows[alive], step] = token[alive]
        alive &= token != tokenizer.eos_token_id
        if not alive.any() or step == MAX_NEW_TOKENS - 1:
            break
        if alive.float().mean() < 0.85:  # dropping rows copies the cache: worth it for a few at once
            cache.batch_select_indices(alive.nonzero().squeeze(1))
            rows, token, mask, position = rows[alive], token[alive], mask[alive], position[alive]
            alive = torch.ones(len(rows), dtype=torch.bool)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        position = position + 1
        logits = model(
            token[:, None], attention_mask=mask, position_ids=position[:, None], past_key_values=cache
        ).logits[:, -1]
    return new


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Completion],
    *,
    seed: int,
    epochs: int = 2,
    learning_rate: float = 3e-4,
    batch: int = 16,
) -> PreTrainedModel:
    """Fine-tune `model` on the answers and their end of turn: LoRA in fp32, merged before it returns."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned = get_peft_model(model, lora)
    trainable = [p for p in tuned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    order = random.Random(seed)
    rows = list(demonstrations)
    steps = epochs * (len(rows) // batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    progress = tqdm(total=steps, desc="imitate", unit="step")
    tuned.train()
    for _ in range(epochs):
        order.shuffle(rows)
        for start in range(0, len(rows) - batch + 1, batch):
            loss = _imitation_loss(tuned, tokenizer, rows[start : start + batch])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    progress.close()
    return cast(PreTrainedModel, tuned.eval().merge_and_unload())


def _imitation_loss(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Completion]
) -> torch.Tensor:
    """Mean negative log-likelihood per answer token of a batch, in nats."""
    asked = [tokenizer(render(r.prompt))["input_ids"] for r in rows]
    answer = [tokenizer(r.response)["input_ids"] + [tokenizer.eos_token_id] for r in rows]
    width = max(len(a) + len(b) for a, b in zip(asked, answer, strict=True))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for i, (a, b) in enumerate(zip(asked, answer, strict=True)):
        ids[i, : len(a) + len(b)] = torch.tensor(a + b)
        mask[i, : len(a) + len(b)] = 1
        labels[i, len(a) : len(a) + len(b)] = torch.tensor(b)
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return loss


def pair_up(completions: Sequence[Completion]) -> list[dict[str, str]]:
    """Neighbouring answers to the same prompt, each answer used once; a pair of two equal answers is dropped."""
    by_prompt: dict[str, list[str]] = {}
    for completion in completions:
        by_prompt.setdefault(completion.prompt, []).append(completion.response)
    return [
        {"prompt": prompt, "response_a": a, "response_b": b}
        for prompt, responses in by_prompt.items()
        for a, b in zip(responses[::2], responses[1::2], strict=False)
        if a != b
    ]


def make(output: Path, *, seed: int, limit: int | None, cache_dir: Path) -> None:
    """Write the five files into `output`; `limit` keeps the first prompts of each split only (for trials)."""
    folder = smollm2_checkpoint(cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    splits: tuple[Split, Split] = ("train", "eval")
    asked = {split: prompts(split)[:limit] for split in splits}

    drafts = sample(
        model,
        tokenizer,
        asked["train"],
        DRAWS_PER_PROMPT["demonstrations"],
        seed=seed,
        temperature=DEMONSTRATION_TEMPERATURE,
        system=DEMONSTRATION_SYSTEM,
        title="demonstrations",
    )
    demonstrations = _select(drafts)
    policy = imitate(model, tokenizer, demonstrations, seed=seed)

    output.mkdir(parents=True, exist_ok=True)
    _write(output / "demonstrations.parquet", [{"prompt": d.prompt, "response": d.response} for d in demonstrations])
    for index, split in enumerate(splits, start=1):
        name = "pairs" if split == "train" else "eval_pairs"
        _write(output / f"{split}_prompts.parquet", [{"prompt": p} for p in asked[split]])
        answers = sample(policy, tokenizer, asked[split], DRAWS_PER_PROMPT[split], seed=seed + index, title=name)
        share = sum(a.finished for a in answers) / len(answers)
        print(f"{name}: {len(answers)} answers, {share:.1%} ended by themselves")
        _write(output / f"{name}.parquet", pair_up(answers))


def _select(drafts: Sequence[Completion]) -> list[Completion]:
    """The first different answers to each prompt that pass `is_demonstration`, DEMONSTRATIONS_PER_PROMPT at most."""
    kept: dict[str, dict[str, Completion]] = {}
    for draft in drafts:
        if is_demonstration(draft):
            chosen = kept.setdefault(draft.prompt, {})
            if len(chosen) < DEMONSTRATIONS_PER_PROMPT:
                chosen.setdefault(draft.response, draft)
    return [completion for chosen in kept.values() for completion in chosen.values()]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist(rows), partial, compression="zstd", compression_level=19)
    partial.replace(path)
    print(f"{path.name}: {len(rows)} rows, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded preference data with SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, required=True, help="folder the Parquet files are written to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="use the first N prompts of each split only")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="folder for the converted checkpoint")
    arguments = parser.parse_args()
    make(arguments.output, seed=arguments.seed, limit=arguments.limit, cache_dir=arguments.cache)


if __name__ == "__main__":
    main()
