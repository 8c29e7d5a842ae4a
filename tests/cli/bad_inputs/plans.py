"""Recipes that are well formed and cannot be run: refused by a plan (`run --dry-run`), which changes nothing."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cli.bad_inputs.sandbox import ROWS, Row, lines

PLAN = ["run", "--config=tiny.yaml", "--dry-run", "--run-dir=r"]
OWN = ["data.preferences=good.jsonl", "data.public_labels=false", "evaluation_labels=private", "data.limit=null", "sft.batch_size=1"]


def rows() -> Iterator[Row]:
    """All of this module."""
    yield Row("plan: as it should be", PLAN, code=0)
    yield Row("plan: on own data", [*PLAN, *OWN], code=0)
    yield from setting_rows()
    yield from trainer_rows()
    yield from input_rows()
    yield from run_directory_rows()


def setting_rows() -> Iterator[Row]:
    """Settings that fit no data, no model, no machine."""
    settings = [
        ["model.source=./nowhere"], ["model.source=/"], ["model.source="], ["model.source=release"], ["model.source=a/b/c"], ["model.source=nowhere"], [f"model.source={'x' * 5000}"],
        ['model.source="a\\0b"'], ["model.max_prompt_tokens=500", "model.max_response_tokens=100"], ["model.max_response_tokens=1000000000000"], ["model.revision=main", "model.source=tiny"],
        ["sft.batch_size=600"], ["sft.micro_batch_size=3"], ["sft.batch_size=1000000000000"], ["reward.trainer_args.weight_decay=0.1"], ["reward.mode=lora", "reward.batch_size=100000"],
        ["reward.external.path=nowhere"], ["reward.external.path=release"], ["reward.external={path: release, public: true}"], ["ppo.extra_rewards=[{path: nowhere}]"], ["ppo.extra_rewards=[{path: release, public: true}]"],
        ["ppo.extra_rewards=[{callable: 'nowhere:f'}]"], ["ppo.extra_rewards=[{callable: 'json:f'}]"], ["ppo.extra_rewards=[{callable: 'json.nowhere:f'}]"], ["ppo.extra_rewards=[{callable: 'private_rlhf.cli:main'}]"],
        ["evaluate.judge.path=nowhere"], ["evaluate.judge={path: release, public: true}"], ["aligner=dpo", "dpo.batch_size=100000"], ["aligner=rloo", "rloo.micro_batch_size=3"],
        ["aligner=grpo", "grpo.trainer_args.nonsense=1"], ["privatize.key_file=."], ["privatize.key_file=good.jsonl"], ["privatize.key_file=r/k.key"], ["privatize.key_file=/dev/null"],
        ["privatize.budget=0.1"], ["evaluation_labels=private", "privatize.key_file=copy.key"],
    ]  # fmt: skip
    for words in settings:
        yield Row(f"plan: {' '.join(words)[:60]}", [*PLAN, *words], make=lambda: shutil.copy2("owner.key", "copy.key"))


def trainer_rows() -> Iterator[Row]:
    """`trainer_args` of every trainer: unknown, the stage's own, the launcher's, and what would publish the run."""
    wrong: dict[str, Any] = {
        "weight_decya": 0.1, "learning_rate": 1, "max_steps": 3, "output_dir": "/tmp/x", "seed": 1, "save_strategy": "no", "push_to_hub": True, "hub_token": "x", "hub_model_id": "a/b",
        "report_to": "wandb", "trackio_space_id": "a/b", "deepspeed": "x.json", "fsdp": "full_shard", "optim": "nonsense", "lr_scheduler_type": "nonsense", "logging_strategy": "nonsense",
    }  # fmt: skip
    sections = {"sft": [], "reward": ["reward.mode=lora"], "dpo": ["aligner=dpo"], "rloo": ["aligner=rloo"], "grpo": ["aligner=grpo"]}
    for section, more in sections.items():
        for name, value in wrong.items():
            yield Row(f"plan: {section}.trainer_args.{name}", [*PLAN, *more, f"{section}.trainer_args.{name}={json.dumps(value)}"], says=f"{section}.trainer_args",
                      slow=section not in ("sft", "grpo"))


def input_rows() -> Iterator[Row]:
    """Texts that are read by path."""
    chosen = [{"prompt": row["prompt"], "response": row["chosen"]} for row in ROWS]
    files: dict[str, Callable[[], Any]] = {
        "missing": lambda: None, "empty": lambda: Path("x.jsonl").write_text(""), "no JSON": lambda: Path("x.jsonl").write_text("{\n"), "preferences": lambda: lines("x.jsonl", ROWS),
        "a list": lambda: Path("x.jsonl").write_text("[]\n"), "numbers": lambda: lines("x.jsonl", [{"prompt": 1, "response": 2}]), "not UTF-8": lambda: Path("x.jsonl").write_bytes(b'{"prompt": "\xff"}\n'),
        "deep": lambda: Path("x.jsonl").write_text("[" * 100_000), "an endless line": lambda: Path("x.jsonl").write_bytes(b'{"prompt": "' + b"x" * (17 << 20)), "a folder": lambda: Path("x.jsonl").mkdir(),
        "a pipe": lambda: os.mkfifo("x.jsonl"), "a loop": lambda: os.symlink("x.jsonl", "x.jsonl"), "other columns": lambda: lines("x.jsonl", [{"question": "a", "answer": "b"}]),
        "messages that are none": lambda: lines("x.jsonl", [{"messages": [1]}]), "half a character": lambda: Path("x.jsonl").write_text('{"prompt": "\\ud800", "response": "x"}\n'),
    }  # fmt: skip
    legal = {("prompts", "preferences"), ("evaluation_prompts", "preferences")}
    for name, make in files.items():
        for key in ("demonstrations", "prompts", "evaluation_prompts"):
            if (key, name) not in legal:
                yield Row(f"plan: data.{key}: {name}", [*PLAN, f"data.{key}=x.jsonl"], make=make)
        if name != "preferences":
            yield Row(f"plan: data.preferences: {name}", [*PLAN, *OWN[1:], "data.preferences=x.jsonl"], make=make)
    yield Row("plan: chosen answers as demonstrations", [*PLAN, *OWN, "data.demonstrations=x.jsonl"], make=lambda: lines("x.jsonl", chosen))
    for place in ("", ".", "/dev/zero", "x" * 5000, "owner.key"):
        yield Row(f"plan: data.demonstrations={place[:9]}", [*PLAN, f"data.demonstrations='{place}'"])


def run_directory_rows() -> Iterator[Row]:
    """Run directories of something else, or damaged."""
    stage = Path("r/sft")

    def made(name: str, content: bytes) -> None:
        stage.mkdir(parents=True)
        Path("r/recipe.yaml").write_text("name: tiny\n")
        Path("r", name).write_bytes(content)

    texts = {"empty": b"", "cut short": b"{", "a list": b"[]", "null": b"null", "a number": b"3", "not UTF-8": b"\xff", "deep": b"[" * 100_000, "a key twice": b'{"stage": 1, "stage": 2}', "NUL": b"\0"}
    for name, text in texts.items():
        yield Row(f"plan: a stage's manifest that is {name}", PLAN, make=lambda t=text: made("sft/manifest.json", t))
        yield Row(f"plan: a run's recipe that is {name}", PLAN, make=lambda t=text: made("recipe.yaml", t))
    yield Row("plan: another recipe's run", PLAN, make=lambda: made("recipe.yaml", b"name: other\n"))
    yield Row("plan: a folder of something else", PLAN, make=lambda: (Path("r").mkdir(), Path("r/letter.txt").write_text("x")))
    yield Row("plan: an alias bomb for a recipe", PLAN, make=lambda: made("recipe.yaml", b"a: &a [x]\nb: [*a, *a]\nname: &n [*n]\n"))
