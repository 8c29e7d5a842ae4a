"""Runs on brought preferences: real HH-RLHF rows, and Anthropic's raw dialogue format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from support.pipeline_runs import ROOT, Workspace, read_json, tree
from support.preference_files import write_jsonl

SMALL = (
    "model.too_long=drop",
    "sft.max_steps=2",
    "ppo.iterations=2",
    "ppo.reference_samples=2",
    "evaluate.num_prompts=8",
    "evaluate.gibbs_candidates=2",
)
PUBLIC = ("evaluation_labels=public", "data.public_labels=true")  # true labels, so figures are exact


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ ' ' + m['name'] if m['name'] else '' }}\n"
    "{{ '[' + m['thinking'] + ']' if m['thinking'] else '' }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}({{ call['function'] | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = "model.max_prompt_tokens=400"


def tool_row(number: int) -> dict[str, Any]:
    """A pair that differs in the argument of its tool call, or in what the assistant thinks."""

    def answer(argument: str, thinking: str) -> list[dict[str, Any]]:
        function = {"name": "degrees", "arguments": {"of": argument}}
        call = {"id": "1", "type": "function", "function": function}
        asked = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": thinking}
        result = {"role": "tool", "content": "40", "tool_call_id": "1"}
        return [asked, result, {"role": "assistant", "content": "It is warm."}]

    tool = {"type": "function", "function": {"name": "degrees", "parameters": {"type": "object"}}}
    turn = {"role": "user", "content": f"How warm is cup {number}?", "name": "Ann"}
    both = (answer("tea", "hm"), answer("rum", "hm") if number % 2 else answer("tea", "well"))
    return {"tools": [tool], "prompt": [turn], "chosen": both[0], "rejected": both[1]}


def write_dialogues(folder: Path) -> None:
    """Anthropic's files: whole dialogues in `chosen` and `rejected`, two turns, the prompt their common prefix."""
    folder.mkdir()
    for split, first, count in (("train", 0, 40), ("test", 40, 12)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for i in range(first, first + count):
                prompt = f"\n\nHuman: Name {i}.\n\nAssistant: Which?\n\nHuman: Any.\n\nAssistant:"
                row = {"chosen": f"{prompt} Surely {i}, gladly.", "rejected": f"{prompt} No {i}."}
                file.write(json.dumps(row) + "\n")


def test_stages_learn_from_at_most_as_many_as_the_recipe_says(tmp_path: Path) -> None:
    """The held-out pairs count, the line of each stage says of how many, and what is more than there is takes all."""
    few = ("sft.max_demonstrations=24", "sft.max_steps=-1", "reward.max_pairs=40", "dpo.max_pairs=16", "aligner=dpo")
    done = Workspace(tmp_path).run_here(tmp_path / "run", *few, "data.limit=60", *SMALL[2:])
    assert "24 of 534 demonstrations (embedded), 3 steps" in done.stderr
    assert "fit of 36 pairs and 4 held out, of 60 (reward.max_pairs)" in done.stderr
    assert "16 of 60 pairs" in done.stderr
    facts = [read_json(tmp_path / "run" / stage / "manifest.json")["report"] for stage in ("sft", "reward", "dpo")]
    assert [facts[0]["demonstrations"], facts[1]["num_pairs"], facts[2]["pairs"]] == [24, 36, 16]
    assert [each["texts"][0]["too_long"] for each in facts] == [0, 0, 0]
    more = ("reward.max_pairs=1000", "data.limit=60", "sft.max_demonstrations=24", "sft.max_steps=-1")
    done = Workspace(tmp_path).run_here(tmp_path / "all", "--only", "privatize", *more)
    for stage in ("sft", "reward"):
        done = Workspace(tmp_path).run_here(tmp_path / "all", "--only", stage, *more)
    assert "fit of 54 pairs by" in done.stderr


def check(run: Path, train_rows: int) -> Any:
    """What such a run reports; returns its metrics."""
    metrics = read_json(run / "metrics.json")
    for method in ("sft", "private"):
        rate = metrics[method]["likelihood_win_rate"]
        assert rate["ci_low"] <= rate["value"] <= rate["ci_high"]
        assert rate["n"] > 0
        assert metrics[method]["true_reward"] is None
    assert metrics["private"]["generation_win_rate_rm"]["n"] > 0
    assert read_json(run / "privatize" / "manifest.json")["report"]["events"] == train_rows
    return metrics


def test_tool_calls_go_through_every_stage(workspace: Workspace, checkpoint: Path, tmp_path: Path) -> None:
    """Rendered by the chat template, trained on, scored, sampled after and shown."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [tool_row(number) for number in range(40)]
    run, data = tmp_path / "run", write_jsonl(tmp_path, rows)
    keys = "data.message_keys=[tool_calls, tools, name, thinking]"
    workspace.run_here(run, "--data", str(data), f"model.source={model}", keys, *SMALL, LONG)
    metrics = check(run, 36)
    assert metrics["private"]["kl"] is not None
    shown = json.dumps(read_json(run / "evaluate" / "pairs.json"))
    assert '"function": {"name": "degrees"' in shown.replace('\\"', '"') or "degrees" in shown
    (texts,) = (each for each in read_json(run / "reward" / "manifest.json")["report"]["texts"][:1])
    assert texts["too_long"] == 0
    plain = ("--data", str(data), f"model.source={checkpoint}", keys)
    with pytest.raises(AssertionError, match="template of this model drops 'name' of a message"):
        workspace.run_here(tmp_path / "plain", *plain, *SMALL)
    assert not (tmp_path / "plain" / "privatize").exists()


def test_anthropic_dialogues(workspace: Workspace, tmp_path: Path) -> None:
    write_dialogues(tmp_path / "hh")
    run = tmp_path / "run"
    workspace.run(run, "--data", str(tmp_path / "hh"), *SMALL, *PUBLIC)
    metrics = check(run, 40)
    assert read_json(run / "sft" / "manifest.json")["report"]["source"] == "release"  # nothing of the embedded task
    prompts = [sample["prompt"] for sample in read_json(run / "evaluate" / "pairs.json")["pairs"]]
    assert prompts
    assert all("Which?" in json.dumps(prompt) for prompt in prompts)
    assert metrics["longer_answer_baseline"]["value"] == 1.0  # the longer answer is the chosen one in every row
    manifest = read_json(run / "privatize" / "release" / "_manifest")
    assert "conversational" in json.dumps(manifest)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]  # where the raw labels lie
    assert not [path for path in files if str(workspace.root).encode() in path.read_bytes()]  # and the key


def test_real_hh_rlhf_rows(workspace: Workspace, hh_helpful: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = ("data.limit=120", "evaluate.max_pairs=1000", "model.max_prompt_tokens=500")
    workspace.run(run, "--data", str(hh_helpful), *SMALL, *PUBLIC, *rows)
    metrics = check(run, 120)
    fit = read_json(run / "reward" / "fit.json")  # texts over the 512 tokens of this model are left out and counted
    assert fit["dropped_too_long"] > 0
    baseline = metrics["longer_answer_baseline"]
    assert 700 < baseline["n"] < 900, "59 of the 1,000 pairs come again on a prompt"
    assert baseline["value"] == pytest.approx(0.591, abs=0.01)


def test_a_released_bundle_needs_neither_key_nor_true_labels(workspace: Workspace, tmp_path: Path) -> None:
    """One party privatises, another one trains on what it was given."""
    rows = [{"prompt": f"Say {i}.", "chosen": f"Surely {i}, gladly.", "rejected": f"No {i}."} for i in range(60)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle, key = tmp_path / "bundle", str(tmp_path / "holder.key")
    assert main(["keygen", "--output", key]) == 0
    given = ["--data", str(tmp_path / "raw.jsonl"), "--output", str(bundle), "--epsilon", "1.0", "--key", key]
    assert main(["privatize", *given]) == 0
    before = tree(bundle)
    run, own = tmp_path / "run", ("privatize.key_file=none.key", "privatize.epsilon=1.0")
    workspace.run(run, "--data", str(bundle), *SMALL, *own)
    check(run, 54)
    card = read_json(run / "report" / "card.json")
    assert (card["mark"], card["epsilon_per_event"], card["releases"]) == (None, 1.0, [])
    assert "ledger is with the holder" in card["facts"]["labels_from"]
    assert tree(bundle) == before
    assert not (workspace.root / "none.key").exists()
    again = workspace.run(run, "--data", str(bundle), *SMALL, *own)
    assert again.stderr.count("up to date") == 6


def test_the_recipe_for_own_data_declares_nothing_public() -> None:
    """It is what users copy."""
    recipe = load_recipe(Recipe, ROOT / "configs" / "own_data.yaml")
    assert (recipe.data.public_labels, recipe.data.allow_label_overlap) == (False, False)
    assert (recipe.evaluation_labels, recipe.private, recipe.privatize.key_file) == ("private", True, None)
    assert "own_data.yaml" in (ROOT / "README.md").read_text() + (ROOT / "docs/how-to/own-data.md").read_text()
