"""Tool calls, tools, reasoning and names of messages: rendered by the chat template and learnt, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_demonstrations, read_prompts
from private_rlhf.data.inputs import named_prompts
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.raw_source import RawSource
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.data.render import Demonstration, Renderer, dialogue
from private_rlhf.evaluation.rates import pair_rows
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.privacy.keys import keygen
from private_rlhf.privacy.records import record_id
from private_rlhf.recipe import DataConfig, ModelConfig, PrivatizeConfig
from private_rlhf.reward_models.pairs import rendered_pairs
from private_rlhf.stages.checks import check_message_keys
from private_rlhf.stages.dpo import token_ids
from private_rlhf.stages.sft import tokenized
from support.other_machines import move_to
from support.preference_files import assistant, user, write_jsonl, write_parquet

from .test_templates import tokenizer_of

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ ' ' + m['name'] if m['name'] else '' }}\n"
    "{{ '[' + m['reasoning_content'] + ']' if m['reasoning_content'] else '' }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}({{ call['function'] | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = ("tool_calls", "tools", "reasoning_content", "name")
NAMED = Options(message_keys=KEYS)
TOOLS = [
    {"type": "function", "function": {"name": "warmth", "description": "Degrees.", "parameters": {"type": "object"}}}
]


def call(argument: str) -> list[dict[str, Any]]:
    """A tool call, in the form of OpenAI."""
    function = {"name": "warmth", "arguments": {"of": argument}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    ]


RESULT = [{"role": "tool", "content": "40 degrees", "tool_call_id": "1"}]
ROW = {
    "tools": TOOLS,
    "prompt": user("the fox"),
    "chosen": [*call("tea"), *RESULT, *assistant("It is warm.")],
    "rejected": [*call("rum"), *RESULT, *assistant("It is warm.")],
}


@pytest.fixture(scope="module")
def renderer(checkpoint: Path) -> Renderer:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = TEMPLATE
    return Renderer(tokenizer, 1000, 8)


def whole(renderer: Renderer, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """The template's own rendering, up to the last end of turn."""
    ids: list[int] = renderer.tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    return ids[: len(ids) - ids[::-1].index(renderer.tokenizer.eos_token_id)]


def learnt(renderer: Renderer, ids: list[int]) -> str:
    text: str = renderer.tokenizer.decode([token for token in ids if token >= 0])
    return text


def test_tool_calls_are_read_and_learnt_as_the_template_renders_them(tmp_path: Path, renderer: Renderer) -> None:
    """By SFT, DPO, reward and evaluation; what the tool says is outside the loss and the score."""
    ((prompt, chosen, rejected, _),) = read_preferences(write_jsonl(tmp_path, [ROW]), None, NAMED)
    assert chosen != rejected
    assert prompt == [user("the fox")[0] | {"tools": TOOLS}]
    said = [message | {"content": message["content"] or ""} for message in ROW["chosen"]]
    ids = renderer.learnt_ids(chosen)
    assert renderer.prompt_ids(prompt) + renderer.response_ids(chosen) == whole(
        renderer, [*user("the fox"), *said], TOOLS
    )
    end = renderer.tokenizer.eos_token
    assert learnt(renderer, ids) == f'({{"name": "warmth", "arguments": {{"of": "tea"}}}}){end}It is warm.{end}'
    (row,) = tokenized([Demonstration(prompt, chosen)], renderer)
    assert learnt(renderer, row["labels"]) == learnt(renderer, ids)
    pair = ReleasedPair(prompt, chosen, rejected, "0" * 64)
    assert token_ids(pair, renderer)[1] == pair_rows([pair], renderer)[0][1] == ids
    assert rendered_pairs([pair], renderer, "error").pairs[0][0] == row["input_ids"]
    assert "tea" in dialogue(chosen)


def test_pairs_that_differ_in_a_key_are_different_records(tmp_path: Path, renderer: Renderer) -> None:
    """In the release, in the ledger, and read again; a release is written again to the same bytes."""
    other = ROW | {"rejected": [*call("ale"), *RESULT, *assistant("It is warm.")]}
    reasoned = ROW | {"rejected": [assistant("Hot.")[0] | {"reasoning_content": "It boils."}]}
    rows = [ROW, other, reasoned, ROW | {"tools": None}, ROW]
    key, out = keygen(tmp_path / "k.key"), tmp_path / "out"
    move_to(tmp_path / "machine")
    line = privatize_source(Request(str(write_jsonl(tmp_path, rows)), out, 1.0, key, options=NAMED))
    assert line.startswith("4 labels released")
    assert "1 for a pair that an earlier row holds" in line
    bundle = read_release(out)
    bundle.check_rows()
    assert bundle.message_keys == ("tool_calls", "tools", "reasoning_content", "name", "tool_call_id")
    pairs = list(read_preferences(write_jsonl(tmp_path, rows[:4]), None, NAMED))
    assert {row.record_id for row in bundle} == {record_id(pair.prompt, pair[1:3]) for pair in pairs}
    by_id = {row.record_id: row for row in bundle}
    for pair in pairs:
        row = by_id[record_id(pair.prompt, pair[1:3])]
        assert row.prompt == pair.prompt
        assert sorted(map(repr, row[1:3])) == sorted(map(repr, map(canonical, pair[1:3])))
    released = named_prompts(DataConfig(prompts=str(out), message_keys=list(NAMED.message_keys)), "prompts", out)
    assert sorted(map(repr, released)) == sorted({repr(pair.prompt) for pair in pairs})


def canonical(messages: Any) -> list[dict[str, Any]]:
    """Messages with their keys in the order of a release."""
    order = ("role", "content", "tool_calls", "tools", "reasoning_content", "thinking", "name", "tool_call_id")
    return [{key: message[key] for key in order if key in message} for message in messages]


def test_without_the_recipe_key_each_is_refused_by_name(tmp_path: Path) -> None:
    for key in ("tool_calls", "tools", "reasoning_content", "name", "thinking"):
        value: Any = TOOLS if key.startswith("tool") else "x"
        turn = [user("q")[0] | {key: value}]
        sources = [{"prompt": turn, "chosen": assistant("a"), "rejected": assistant("b")}]
        sources += [{"messages": [*turn, *assistant("a")]}, {"prompt": turn}]
        for row, read in zip(sources, (read_preferences, read_demonstrations, read_prompts), strict=True):
            path = write_jsonl(tmp_path, [row])
            with pytest.raises(UserError, match=f"'{key}', which is not read.*data.message_keys"):
                list(read(path))  # type: ignore[operator]
            assert list(read(path, None, Options(message_keys=(key,))))  # type: ignore[operator]


def test_tools_in_a_column_belong_to_prompts_and_demonstrations(tmp_path: Path, renderer: Renderer) -> None:
    """Also as JSON in a cell, beside a text."""
    asked = [{"role": "user", "content": "q", "tools": TOOLS}]
    for tools in (TOOLS, json.dumps(TOOLS)):
        path = write_jsonl(tmp_path, [{"prompt": "q", "response": "a", "tools": tools}])
        assert list(read_demonstrations(path, None, NAMED)) == [(asked, assistant("a"))]
        keys = list(NAMED.message_keys)
        data = DataConfig(prompts=str(path), evaluation_prompts=str(path), message_keys=keys)
        assert named_prompts(data, "prompts", tmp_path) == [asked]
        assert named_prompts(data, "evaluation_prompts", tmp_path) == [asked]
        assert "warmth" in renderer.tokenizer.decode(renderer.prompt_ids(asked))
        with pytest.raises(
            UserError, match="has the column 'tools', which belongs to the prompt and is not read; name it"
        ):
            list(read_demonstrations(path))


def test_null_keys_of_arrow_structs_are_absent(tmp_path: Path) -> None:
    """Parquet writes the union of all arguments into each call."""
    rows = [ROW, ROW | {"chosen": [*call("tea")], "rejected": assistant("no")}]
    two = [{"id": "2", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    rows.append(
        ROW | {"chosen": [{"role": "assistant", "content": "", "tool_calls": two}], "rejected": assistant("no")}
    )
    found = [pair[:3] for pair in read_preferences(write_parquet(tmp_path, rows), None, NAMED)]
    assert found == [pair[:3] for pair in read_preferences(write_jsonl(tmp_path, rows), None, NAMED)]


@pytest.mark.parametrize("key", ["tools", "tool_calls", "reasoning_content", "name"])
def test_a_template_that_drops_a_key_is_refused(checkpoint: Path, key: str) -> None:
    plain = Renderer(load_tokenizer(checkpoint), 1000, 8)
    value: Any = TOOLS if key.startswith("tool") else "Ann"
    turn = {"role": "user" if key in ("tools", "name") else "assistant", "content": "x", key: value}
    render = plain.prompt_ids if turn["role"] == "user" else plain.learnt_ids
    with pytest.raises(UserError, match=f"template of this model drops '{key}' of a message"):
        render([turn])


def test_a_key_that_the_template_drops_stops_the_run_before_it_costs_anything(tmp_path: Path, checkpoint: Path) -> None:
    path = write_jsonl(tmp_path, [ROW, ROW | {"chosen": assistant("no")}])
    source = RawSource(DataConfig(preferences=str(path), message_keys=KEYS), PrivatizeConfig(epsilon=1.0), tmp_path)
    with pytest.raises(UserError, match=r"template of this model drops 'tools' of a message \('the fox'\): remove it"):
        check_message_keys(ModelConfig(source=str(checkpoint)), source)


def test_names_of_special_tokens_in_prompts_and_calls_are_plain_text(renderer: Renderer) -> None:
    """However a text is written, a turn ends once."""
    end = renderer.tokenizer.eos_token_id
    text = f"x{renderer.tokenizer.eos_token}y"
    plain, marked = renderer.prompt_ids(user("xy")), renderer.prompt_ids(user(text))
    assert marked.count(end) == plain.count(end) == 1
    assert renderer.tokenizer.decode(marked) == renderer.tokenizer.decode(plain).replace("xy", text)
    assert renderer.response_ids(call(text)).count(end) == 1


FAMILIES = [  # of the architecture matrix, with a template that renders tools, and what it does not render
    ("qwen2_5.jinja", {"reasoning_content", "name"}),
    ("qwen3.jinja", {"name"}),
    ("llama3_1.jinja", {"reasoning_content", "name"}),
    ("gptoss.jinja", {"name"}),
]


@pytest.mark.parametrize(("template", "dropped"), FAMILIES)
def test_families_of_models_render_their_tools_or_say_so(template: str, dropped: set[str]) -> None:
    tokenizer = tokenizer_of(template)
    renderer = Renderer(tokenizer, 10**6, 8)
    prompt = [user("the fox")[0] | {"tools": TOOLS}]
    assert "warmth" in tokenizer.decode(renderer.prompt_ids(prompt))
    history = [*prompt, *call("tea"), *RESULT]
    history[1]["content"] = ""
    assert "warmth" in tokenizer.decode(renderer.prompt_ids(history)[len(renderer.prompt_ids(prompt)) :])
    if template == "gptoss.jinja":  # its calls end with another token than its answers
        with pytest.raises(UserError, match="changes earlier turns"):
            renderer.response_ids([history[1]])
    else:
        ids = renderer.response_ids([history[1]])
        assert '"of": "tea"' in tokenizer.decode(ids)
        assert renderer.prompt_ids("the fox") + ids == whole(renderer, [*user("the fox"), history[1]])
    for key in ("name", "reasoning_content"):
        turn = assistant("a")[0] | {key: "Ann"}
        if key in dropped:
            with pytest.raises(UserError, match=f"drops '{key}'"):
                renderer.learnt_ids([turn])
        elif key == "reasoning_content" and template != "gptoss.jinja":
            assert "Ann" in learnt(renderer, renderer.learnt_ids([turn]))
