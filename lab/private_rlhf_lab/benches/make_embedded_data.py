"""Makes data as in `pipeline/embedded/`: `python -m private_rlhf_lab.benches.make_embedded_data --output DIR`.

Three steps, none of which knows the ground truth, so that the text carries no label:

1. Demonstrations: the model as shipped answers the training prompts under a system message that asks for one plain
   sentence, at a low temperature; answers are kept by form alone (`is_demonstration`).
2. Stage `sft` of the demo's recipe imitates them (in OUTPUT/run).
3. The policy that it makes answers every prompt at temperature 1, without a system message; answers to one prompt are
   paired.

Writes, as Parquet (zstd): `demonstrations` (prompt, response), `pairs` and `eval_pairs` (prompt, response_a,
response_b; no labels: they are drawn at run time by `task.draw_labels`), `train_prompts` and `eval_prompts` (prompt).
Takes some 20 minutes on a CPU. The shipped files have the same rules, but their samples and their imitation were made
before the pipeline had a sampler and an `sft` stage: the numbers of rows come out alike, the texts differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from private_rlhf.cli import main as private_rlhf
from private_rlhf.core.world import device_type
from private_rlhf.data.render import make_renderer
from private_rlhf.embedded.task import Split
from private_rlhf.evaluation.checkpoint_comparison import stored_dtype
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.models import end_ids, load_causal_lm, load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

from private_rlhf_lab.benches.embedded_topics import prompts, topic_of

RECIPE = Path("demo")
DEMONSTRATION_SYSTEM = "You answer in one short, plain sentence."
DEMONSTRATION_TEMPERATURE = 0.6
DEMONSTRATIONS_PER_PROMPT = 3  # at most
DRAWS_PER_PROMPT = {"demonstrations": 10, "train": 30, "eval": 4}
SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True)
class Completion:
    """One sampled answer; `finished`: the model ended its turn within the cap on a response."""

    prompt: str
    response: str
    finished: bool


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
    checkpoint: str, recipe: Recipe, asked: Sequence[str], draws: int, purpose: str, temperature: float = 1.0
) -> list[Completion]:
    """`draws` completions of each prompt, prompt by prompt, by the checkpoint's policy. purpose: part of noise keys."""
    renderer = make_renderer(recipe.model, load_tokenizer(checkpoint))
    model = load_causal_lm(checkpoint, stored_dtype(checkpoint, device_type()))
    ends = end_ids(model, renderer.tokenizer)
    repeated = [prompt for prompt in asked for _ in range(draws)]
    rows = sample_responses(
        model,
        [renderer.prompt_ids(prompt) for prompt in repeated],
        [sample_key(recipe.seed, purpose, index) for index in range(len(repeated))],
        Sampling(renderer.max_response_tokens, temperature),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=ends,
        batch_size=192,
        progress=purpose,
    )
    return [Completion(p, renderer.text(row), row[-1] in ends) for p, row in zip(repeated, rows, strict=True)]


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


def select(drafts: Sequence[Completion]) -> list[Completion]:
    """The first different answers to each prompt that pass `is_demonstration`, DEMONSTRATIONS_PER_PROMPT at most."""
    kept: dict[str, dict[str, Completion]] = {}
    for draft in drafts:
        if is_demonstration(draft):
            chosen = kept.setdefault(draft.prompt, {})
            if len(chosen) < DEMONSTRATIONS_PER_PROMPT:
                chosen.setdefault(draft.response, draft)
    return [completion for chosen in kept.values() for completion in chosen.values()]


def make(output: Path, overrides: Sequence[str], limit: int | None) -> None:
    """Writes the five files into `output`; `limit` keeps the first prompts of each split only (for trials)."""
    recipe = load_recipe(Recipe, RECIPE, overrides)
    plain = replace(recipe, model=replace(recipe.model, system_prompt=DEMONSTRATION_SYSTEM))
    asked = {split: prompts(split)[:limit] for split in SPLITS}
    drafts = sample(
        base_checkpoint(recipe.model), plain, asked["train"], DRAWS_PER_PROMPT["demonstrations"], "demonstrations",
        DEMONSTRATION_TEMPERATURE,
    )  # fmt: skip
    shown = [{"prompt": draft.prompt, "response": draft.response} for draft in select(drafts)]
    output.mkdir(parents=True, exist_ok=True)
    write(output / "demonstrations.parquet", shown)
    learnt = f"data.demonstrations={output / 'demonstrations.parquet'}"
    told = ["sft", "--config", str(RECIPE), "--run-dir", str(output / "run"), *overrides, learnt]
    if code := private_rlhf(told):
        raise SystemExit(code)
    policy = str(output / "run" / "sft" / "model")
    for split, name in zip(SPLITS, ("pairs", "eval_pairs"), strict=True):
        answers = sample(policy, recipe, asked[split], DRAWS_PER_PROMPT[split], name)
        write(output / f"{split}_prompts.parquet", [{"prompt": prompt} for prompt in asked[split]])
        write(output / f"{name}.parquet", pair_up(answers))
        print(f"{name}: {sum(answer.finished for answer in answers) / len(answers):.1%} of the answers ended")


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Rows as a Parquet file."""
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", compression_level=19)
    print(f"{path.name}: {len(rows)} rows, {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder the Parquet files are written to")
    parser.add_argument("--limit", type=int, default=None, help="use the first N prompts of each split only")
    parser.add_argument("overrides", nargs="*", help="of the demo's recipe, e.g. seed=1")
    arguments = parser.parse_args()
    make(arguments.output, arguments.overrides, arguments.limit)


if __name__ == "__main__":
    main()
