"""Shapes of preference files that people have: the pair that each means, or the line that refuses it.

`docs/reference/shapes.md` is written from them by `docs/generate.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from private_rlhf.data.declared_columns import Options, parse_labels

from support.preference_files import assistant, user

Row = dict[str, Any]
Q, A, B = "How warm is tea?", "Rather warm.", "No idea."
TALK = (user(Q), assistant(A), assistant(B))
"""The right value of most shapes: the prompt, the preferred response, the other."""
PAIR = {"chosen": A, "rejected": B}
TEXTS = (Q, A, B)


def talk(answer: Any, question: str = Q, **keys: Any) -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **keys}]


def human(answer: str, speaker: str = "Human", start: str = "\n\n", end: str = "\n\n") -> str:
    return f"{start}{speaker}: {Q}{end}Assistant: {answer}"


def both(build: Callable[[str], Any]) -> Row:
    return {"chosen": build(A), "rejected": build(B)}


def argilla(value: Any) -> Row:
    said = [{"value": value, "user_id": "u", "status": "submitted"}, {"value": None, "user_id": "v", "status": "draft"}]
    return {"id": "0", "fields": {"prompt": Q, "r1": B, "r2": A}, "responses": {"rank": said}}


def studio(*values: Row, **data: str) -> Row:
    kinds = {"selected": "pairwise", "choices": "choices", "rating": "rating"}
    result = [
        {"from_name": f"q{place}", "to_name": "a1,a2", "type": kinds[next(iter(value))], "value": value}
        for place, value in enumerate(values)
    ]
    given = {"completed_by": {"id": 1, "email": "p@example.org"}, "was_cancelled": False, "result": result}
    data = data or {"prompt": Q, "a1": B, "a2": A}
    return {"id": 0, "data": data, "annotations": [given, given | {"was_cancelled": True}]}


AB = {"prompt": Q, "response_a": B, "response_b": A}
LABEL = {"label_column": "label"}
ONE_HOT = {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}
KAGGLE = {"prompt": json.dumps([Q]), "response_a": json.dumps([B]), "response_b": json.dumps([A])}
PKU = {"prompt": Q, "response_0": B, "response_1": A, "better_response_id": 1, "safer_response_id": 0}
SUMMARY = {
    "info": {"post": "Tea is warm.", "title": "Tea", "subreddit": "tea"},
    "summaries": [{"text": B}, {"text": A}],
}
TLDR = "SUBREDDIT: tea\n\nTITLE: Tea\n\nPOST: Tea is warm.\n\nTL;DR:"
ROUND = [*assistant(A), *user("And then?"), *assistant("Cold.")]
MT_BENCH = {
    "winner": "model_a",
    "judge": "expert_1",
    "conversation_a": [*talk(A), *user("1"), *assistant("x")],
    "conversation_b": [*talk(B), *user("1"), *assistant("y")],
}
ORDERED = {"prompt": Q, "responses": [B, A]}

READ: dict[str, tuple[Row, Any, Row]] = {  # by name: a row, (prompt, preferred, other), options
    "explicit text": ({"prompt": Q, **PAIR}, TEXTS, {}),
    "implicit messages": (both(talk), TALK, {}),
    "prompt and one message": ({"prompt": Q, **both(assistant)}, TALK, {}),
    "prompt messages and texts": ({"prompt": user(Q), **PAIR}, TALK, {}),
    "prompt repeated in messages": ({"prompt": user(Q), **both(talk)}, TALK, {}),
    "prompt repeated in text": ({"prompt": Q, "chosen": Q + A, "rejected": Q + B}, TEXTS, {}),
    "several turns": ({"chosen": [*user(Q), *ROUND], "rejected": talk(B)}, (user(Q), ROUND, assistant(B)), {}),
    "parted at a user turn": (
        {"chosen": [*talk(A), *user("1"), *assistant("x")], "rejected": [*talk(A), *user("2"), *assistant("x")]},
        (user(Q), [*assistant(A), *user("1"), *assistant("x")], [*assistant(A), *user("2"), *assistant("x")]),
        {},
    ),
    "system message": (
        both(lambda a: [{"role": "system", "content": "s"}, *talk(a)]),
        ([{"role": "system", "content": "s"}, *user(Q)], assistant(A), assistant(B)),
        {},
    ),
    "ShareGPT keys": (both(lambda a: [{"from": "human", "value": Q}, {"from": "gpt", "value": a}]), TALK, {}),
    "roles in capitals": (both(lambda a: [{"role": "Human", "content": Q}, {"role": "Bot", "content": a}]), TALK, {}),
    "parts of type text": (
        both(lambda a: talk([{"type": "text", "text": a[:4]}, {"type": "text", "text": a[4:]}])),
        TALK,
        {},
    ),
    "empty keys of Arrow structs": (both(lambda a: talk(a, name=None, tool_calls=None)), TALK, {}),
    "messages as JSON": (both(lambda a: json.dumps(talk(a))), TALK, {}),
    "messages as JSON, twice": (both(lambda a: json.dumps(json.dumps(talk(a)))), TALK, {}),
    "messages as Python": (both(lambda a: repr(talk(a))) | {"prompt": Q}, TALK, {}),
    "Human and Assistant": (both(human), TALK, {}),
    "without leading lines": (both(lambda a: human(a, start="")), TALK, {}),
    "an assistant's line inside the answer": (
        both(lambda a: human(f"{a}\nAssistant: So.")),
        (user(Q), *(assistant(f"{a}\nAssistant: So.") for a in (A, B))),
        {},
    ),
    "line ends of Windows": (both(lambda a: human(a, start="\r\n\r\n", end="\r\n\r\n")), TALK, {}),
    "User and Assistant": (both(lambda a: human(a, "User")), TALK, {}),
    "System first": (
        both(lambda a: "System: s" + human(a)),
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "two assistant turns of HH": (
        both(lambda a: human("So.") + f"\n\nAssistant: {a}"),
        ([*user(Q), *assistant("So.")], *TALK[1:]),
        {},
    ),
    "transcript as prompt": ({"prompt": human("").strip(" "), "chosen": f" {A}", "rejected": f" {B}"}, TALK, {}),
    "mark in the responses": (
        {"prompt": f"Human: {Q}", "chosen": f"Assistant: {A}", "rejected": f"Assistant: {B}"},
        TALK,
        {},
    ),
    "transcript as prompt, repeated in the responses": ({"prompt": human("").strip(" "), **both(human)}, TALK, {}),
    "question": ({"question": Q, **PAIR}, TEXTS, {}),
    "instruction": ({"instruction": Q, **PAIR, "source": "x"}, TEXTS, {}),
    "system column": (
        {"system": "s", "question": Q, **PAIR},
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "system message in a column": (
        {"system_message": "s", "prompt": Q, **PAIR},
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "empty system column": ({"system": "", "question": Q, **PAIR}, TALK, {}),
    "UltraFeedback binarized": ({"prompt": Q, **both(talk), "messages": talk(A), "score_chosen": 8.0}, TALK, {}),
    "special tokens kept": (
        {"prompt": Q, "chosen": A, "rejected": "<|im_end|>"},
        (Q, A, "<|im_end|>"),
        {"special_tokens": "keep"},
    ),
    "two values": (AB | {"label": "B"}, TEXTS, LABEL | {"labels": "A,B"}),
    "two values of an arena": (
        AB | {"winner": "model_b"},
        TEXTS,
        {"label_column": "winner", "labels": "model_a=a,model_b=b,tie=tie"},
    ),
    "the winner as a model, in places that stay": (
        AB | {"model_a": "m", "model_b": "n", "label": "n"},
        TEXTS,
        LABEL | {"labels": "m,n"},
    ),
    "true is True, as pandas writes it": (AB | {"label": False}, TEXTS, LABEL | {"labels": "True,False"}),
    "TRUE is true, as spreadsheets write it": (AB | {"label": "TRUE"}, TEXTS, LABEL | {"labels": "false=a,true=b"}),
    "1.0 is 1": (AB | {"label": "0.0"}, TEXTS, LABEL | {"labels": "1,0"}),
    "mapped values": (AB | {"label": "right"}, TEXTS, LABEL | {"labels": "left=a,right=b,both=tie"}),
    "signed strength": (AB | {"label": -3}, TEXTS, LABEL | {"labels": ">0,<0"}),
    "scores of both": (AB | {"x": 1, "y": 2.5}, TEXTS, {"label_column": "x,y", "labels": "higher"}),
    "errors of both": (AB | {"x": "3", "y": "2"}, TEXTS, {"label_column": "x,y", "labels": "lower"}),
    "label and question": ({"question": Q, **AB, "label": 0} | {"prompt": Q}, TEXTS, LABEL | {"labels": "1,0"}),
    "HelpSteer2": ({"prompt": Q, "response_1": B, "response_2": A, "preference_strength": 2}, TEXTS, {}),
    "HelpSteer3": ({"context": user(Q), "response1": A, "response2": B, "overall_preference": -1}, TALK, {}),
    "Chatbot Arena": (
        {"conversation_a": talk(B), "conversation_b": talk(A), "winner": "model_b", "judge": "j", "turn": 1},
        TALK,
        {},
    ),
    "Kaggle one-hot": (KAGGLE | ONE_HOT, TALK, {}),
    "SHP": ({"history": Q, "human_ref_A": A, "human_ref_B": B, "labels": 1, "score_A": 3}, TEXTS, {}),
    "PKU better": (PKU, TEXTS, {"format": "pku-better"}),
    "PKU safer": (PKU, (Q, B, A), {"format": "pku-safer"}),
    "WebGPT": (
        {"question": {"full_text": Q}, "answer_0": B, "answer_1": A, "score_0": -0.5, "score_1": 0.5},
        TEXTS,
        {},
    ),
    "OpenAI summarize": (SUMMARY | {"choice": 1, "worker": "w"}, (TLDR, A, B), {}),
    "OpenAI preference": (
        {
            "input": {"messages": user(Q), "tools": []},
            "preferred_output": assistant(A),
            "non_preferred_output": assistant(B),
        },
        TALK,
        {},
    ),
    "Nectar": ({"prompt": human(""), "answers": [{"answer": B, "rank": 2.0}, {"answer": A, "rank": 1.0}]}, TALK, {}),
    "UltraFeedback raw": (
        {"instruction": Q, "completions": [{"response": B, "overall_score": 3}, {"response": A, "overall_score": 8}]},
        TEXTS,
        {},
    ),
    "responses with scores": (ORDERED | {"scores": [0, 1]}, TEXTS, {}),
    "responses with ranks": (ORDERED | {"ranks": [2, 1]}, TEXTS, {}),
    "responses with a choice": (ORDERED | {"choice": 1}, TEXTS, {}),
    "Argilla, names in order": (argilla(["r2", "r1"]), TEXTS, {}),
    "Argilla, ranks": (argilla([{"value": "r1", "rank": 2}, {"value": "r2", "rank": 1}]), TEXTS, {}),
    "Argilla, a name": (argilla("r2"), TEXTS, {}),
    "Argilla, a field more": (
        {
            "fields": {"prompt": Q, "response_1": B, "response_2": A, "guideline": "Be brief."},
            "responses": {"better": [{"value": "response_2", "user_id": "u"}]},
        },
        TEXTS,
        {},
    ),
    "Label Studio": (studio({"selected": "right"}), TEXTS, {}),
    "Label Studio, a response chosen by its name": (studio({"rating": 4}, {"choices": ["a2"]}), TEXTS, {}),
    "Label Studio, other fields": (
        studio({"selected": "left"}, source="x", prompt=Q, answer_1=A, answer_2=B),
        TEXTS,
        {},
    ),
    "Label Studio, flat": ({"prompt": Q, "answer1": A, "answer2": B, "pw": "left", "annotator": 1}, TEXTS, {}),
    "ShareGPT preference": (
        {
            "conversations": [{"from": "human", "value": Q}],
            "chosen": {"from": "gpt", "value": A},
            "rejected": {"from": "gpt", "value": B},
        },
        TALK,
        {},
    ),
    "Capybara": ({"source": "x", "conversation": [{"input": Q, "output": A}], "prompt": Q, **both(talk)}, TALK, {}),
    "Orca pairs of distilabel": (
        {"system": "s", "input": Q, **PAIR, "generations": [A, B], "status": "tie"},
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "system column beside messages": (
        {"system": "s", **both(talk)},
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "question beside answers as messages": ({"question": Q, **both(assistant)}, TALK, {}),
    "Tulu 3": ({"id": "1", "prompt": Q, **both(talk), "chosen_rating": 5, "rejected_model": "b"}, TALK, {}),
    "HelpSteer3 with each judge": (
        {"context": user(Q), "response1": B, "response2": A, "overall_preference": 3}
        | {"individual_preference": [{"score": 3, "reasoning": "x"}], "domain": "general"},
        TALK,
        {},
    ),
    "Arena of 140,000, parts with images": (
        {f"conversation_{name}": talk([{"type": "text", "text": a, "image": None}]) for name, a in (("a", B), ("b", A))}
        | {"winner": "model_b", "evaluation_order": 1, "timestamp": "x"},
        TALK,
        {},
    ),
    "MT-bench, first turn": (MT_BENCH | {"turn": 1}, TALK, {}),
    "MT-bench, first turn, conversations as JSON": (
        MT_BENCH | {"turn": "1"} | {name: json.dumps(MT_BENCH[name]) for name in ("conversation_a", "conversation_b")},
        TALK,
        {},
    ),
    "MT-bench, second turn": (
        MT_BENCH | {"turn": 2},
        (user(Q), [*assistant(A), *user("1"), *assistant("x")], [*assistant(B), *user("1"), *assistant("y")]),
        {},
    ),
    "Argilla 2 records": (
        {
            "fields": {"prompt": Q, "r1": B, "r2": A},
            "responses": {"better": [{"value": "r2", "user_id": "u"}]},
            "status": "completed",
            "suggestions": {},
        },
        TEXTS,
        {},
    ),
    "SHP with all its scores": (
        {"history": Q, "human_ref_A": A, "human_ref_B": B, "labels": 1, "score_A": 9, "score_B": 1, "score_ratio": 9.0},
        TEXTS,
        {},
    ),
    "PKU of the first version": (PKU | {"is_response_0_safe": True}, TEXTS, {"format": "pku-better"}),
    "rm-static": (
        {"prompt": human("").strip(" "), "response": f" {A}", "chosen": f" {A}", "rejected": f" {B}"},
        TALK,
        {},
    ),
    "OpenHermes preferences": (
        {"prompt": Q, "candidates_completions": [A, B], "ranks": [1, 2], "chosen_policy": "m", **both(talk)},
        TALK,
        {},
    ),
    "one message as JSON": ({"prompt": Q, **both(lambda a: json.dumps(assistant(a)[0]))}, TALK, {}),
    "an object with messages as JSON": (both(lambda a: json.dumps({"messages": talk(a)})), TALK, {}),
    "developer role": (
        both(lambda a: [{"role": "developer", "content": "s"}, *talk(a)]),
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "Alpaca with an empty input": ({"instruction": Q, "input": "", **PAIR}, TEXTS, {}),
    "an input that the prompt holds": ({"prompt": f"So: {Q}", "input": Q, **PAIR}, (f"So: {Q}", A, B), {}),
    "Axolotl messages": ({"messages": user(Q), "chosen": assistant(A)[0], "rejected": assistant(B)[0]}, TALK, {}),
    "a conversation beside answers": ({"conversation": user(Q), **both(assistant)}, TALK, {}),
    "a verdict on two answers that the prompt holds": (
        {"prompt": f"1: {A} 2: {B}", "answer_1": A, "answer_2": B, "chosen": "First", "rejected": "Last"},
        (f"1: {A} 2: {B}", "First", "Last"),
        {},
    ),
    "OLMo's mixes, with all completions": (
        {"instruction": Q, "prompt": Q, "completions": [A, B], "ratings": [5, 3], **both(talk)},
        TALK,
        {},
    ),
    "Magpie, with a copy in ShareGPT's form": (
        {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}], **both(talk)},
        TALK,
        {},
    ),
    "choices that the prompt holds": (
        {"prompt": f"{Q} Hot or cold?", "choices": {"1": "Hot", "2": "cold"}, **PAIR},
        (f"{Q} Hot or cold?", A, B),
        {},
    ),
    "messages of the prompt and an answer": ({"prompt": Q, "messages": talk(A), **PAIR}, TEXTS, {}),
    "struck out in HTML": (
        {"prompt": Q, **both(lambda a: f"<s>Cold.</s> {a} |x| <|>")},
        (Q, *(f"<s>Cold.</s> {a} |x| <|>" for a in (A, B))),
        {},
    ),
    "reasoning in the text": (
        {"prompt": user(Q), **both(lambda a: assistant(f"<think>hm</think>{a}"))},
        (user(Q), *(assistant(f"<think>hm</think>{a}") for a in (A, B))),
        {},
    ),
    "empty lists as text, and NaN": ({"prompt": Q, "history": "[]", "context": math.nan, **PAIR}, TEXTS, {}),
    "margin of TRL": ({"prompt": Q, **PAIR, "margin": 1.5}, TEXTS, {}),
    "parts without a type": (
        both(lambda a: [{"role": "user", "content": [{"text": Q}]}, {"role": "model", "content": [{"text": a}]}]),
        TALK,
        {},
    ),
    "last question beside the whole": (
        {"prompt": Q, **both(lambda a: [*user("Hi."), *assistant("Hello."), *talk(a)])},
        ([*user("Hi."), *assistant("Hello."), *user(Q)], *TALK[1:]),
        {},
    ),
    "JSON that the prompt asks for": (
        {"prompt": f"{Q} Reply in JSON.", **both(lambda a: json.dumps({"answer": a}))},
        (f"{Q} Reply in JSON.", *(json.dumps({"answer": a}) for a in (A, B))),
        {},
    ),
    "Prodigy, a pair that was accepted": ({"prompt": Q, **PAIR, "answer": "accept"}, TEXTS, {}),
    "an answer beside the pair": ({"prompt": Q, **PAIR, "answer": "42", "swapped": True}, TEXTS, {}),
    "a flag that turns nothing": (AB | {"label": "B", "swapped": False}, TEXTS, LABEL | {"labels": "A,B"}),
    "formulas of LaTeX": ({"prompt": Q, "chosen": "$\\nabla$", "rejected": B}, (Q, "$\\nabla$", B), {}),
    "two solutions beside short answers": (
        {"prompt": Q, "chosen": "60", "rejected": "20", "solution_1": A, "solution_2": B},
        (Q, "60", "20"),
        {},
    ),
    "a question in a text": ({"prompt": f"Q: {Q}", **PAIR}, (f"Q: {Q}", A, B), {}),
    "an image in HTML": ({"prompt": f"<image>x</image> {Q}", **PAIR}, (f"<image>x</image> {Q}", A, B), {}),
    "PairRM": ({"prompt": Q, "all_rm_scores": [1.0, 0.0], **both(talk)}, TALK, {}),
    "a list of one rejected": ({"prompt": Q, "chosen": A, "rejected": [B]}, TEXTS, {}),
    "system column beside a list": (
        {"system": "s", "prompt": Q, "chosen": A, "rejected": [B]},
        ([{"role": "system", "content": "s"}, *user(Q)], *TALK[1:]),
        {},
    ),
    "tools beside a list": (
        {"tools": [{"name": "f"}], "prompt": Q, "chosen": A, "rejected": [B]},
        ([user(Q)[0] | {"tools": [{"name": "f"}]}], *TALK[1:]),
        {"message_keys": ("tools",)},
    ),
}
REFUSED: dict[str, tuple[Row, str, Row]] = {
    "tool calls": (
        both(lambda a: talk(a, tool_calls=[{"id": 1}])),
        "holds a message with 'tool_calls', which is not read",
        {},
    ),
    "thinking": (both(lambda a: talk(a, thinking="hm")), "holds a message with 'thinking', which is not read", {}),
    "name": (both(lambda a: talk(a, name="n")), "holds a message with 'name', which is not read", {}),
    "content null": (both(lambda a: talk(None)), "holds a message whose 'content' is null; repair", {}),
    "an image": (both(lambda a: talk([{"type": "image", "url": a}])), "a part of a message that is not text", {}),
    "an image beside text": (both(lambda a: talk([{"type": "text", "text": a, "image": "x"}])), "not text", {}),
    "unknown role": (
        both(lambda a: [{"role": "narrator", "content": Q}, *assistant(a)]),
        "of an unknown role; use assistant",
        {},
    ),
    "prefill": ({"prompt": talk("Well,"), **both(assistant)}, "'prompt' does not end with a user message", {}),
    "response ends with the user": (
        both(lambda a: [*talk(a), *user("?")]),
        "does not begin and end with an assistant message",
        {},
    ),
    "system in the middle": (
        both(lambda a: [*user(Q), {"role": "system", "content": ""}, *assistant(a)]),
        "a system message after",
        {},
    ),
    "another prompt": (
        {"prompt": "Other", **both(talk)},
        "is not a user message that 'chosen' and 'rejected' share",
        {},
    ),
    "prompt inside the responses": (
        {"prompt": Q, **both(lambda a: f"Q: {Q} A: {a}")},
        "of the first 2 rows 2 hold their prompt in both responses, and 0 of them exactly at the start",
        {},
    ),
    "prompt inside the responses, with other line ends": (
        {"prompt": f"So:\n{Q}", **both(lambda a: f"So: {Q} {a}")},
        "of the first 2 rows 2 hold their prompt in both responses, and 0 of them exactly at the start",
        {},
    ),
    "prompt inside one response": (
        {"prompt": Q, "chosen": A, "rejected": f"{Q} {B}"},
        "repeats the prompt at the start of one response only; take it out of it, or repeat it in both",
        {},
    ),
    "prompt of messages, repeated in texts": (
        {"prompt": user(Q), **both(lambda a: f"{Q} {a}")},
        "2 of 2 rows have a response that begins with the prompt (write the answer only)",
        {},
    ),
    "prompt of messages, repeated in one text": (
        {"prompt": user(Q), "chosen": A, "rejected": f"{Q} {B}"},
        "2 of 2 rows have a response that begins with the prompt (write the answer only)",
        {},
    ),
    "prompt repeated inside messages": (
        both(lambda a: talk(f"{Q}\n{a}")),
        "2 of 2 rows have a response that begins with the prompt (write the answer only)",
        {},
    ),
    "transcript as prompt, repeated in one response": (
        {"prompt": human("").strip(" "), "chosen": human(A), "rejected": f" {B}"},
        "repeats the prompt at the start of one response only; take it out of it, or repeat it in both",
        {},
    ),
    "OASST pairs": ({"prompt": f"prompter: {Q}", **PAIR}, "begins or ends like a transcript, in a form", {}),
    "responses that say who speaks": (
        {"prompt": Q, **both(lambda a: f"\n\nAssistant: {a}")},
        "begins or ends like a transcript, in a form",
        {},
    ),
    "no prompt": ({**PAIR, "task": Q}, "share no prompt: of the first 2 rows 0 begin alike for 8 characters", {}),
    "answers that begin alike": (
        {"chosen": "The sky is blue", "rejected": "The sky is red"},
        "2 begin alike for 8 characters and 0 part",
        {},
    ),
    "two prompts": (
        {"instruction": Q, "input": "x", **PAIR},
        "has the columns 'instruction', 'input', each of which",
        {},
    ),
    "an input beside the prompt": (
        {"prompt": "Sum it up in a word.", "input": Q, **PAIR},
        "has the column 'input', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "an instruction beside the prompt": (
        {"prompt": Q, "instruction": "Be brief.", **PAIR},
        "has the column 'instruction', which belongs to the prompt and is not read; put it into the prompt",
        {},
    ),
    "a question beside the prompt": (
        {"prompt": "Answer in a word.", "question": Q, **PAIR},
        "has the column 'question', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "an input beside a named shape": (
        {"prompt": "Answer.", "input": Q, "response_1": B, "response_2": A, "preference_strength": 2},
        "has the column 'input', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "a conversation beside its last question": (
        {"prompt": Q, "conversation": [*talk("Hello.", "Hi."), *user(Q)], **PAIR},
        "has the column 'conversation', which belongs to the prompt and is not read; put it into the prompt, or remove",
        {},
    ),
    "a dialogue beside its last question": (
        {"prompt": Q, "dialogue": "A: Hi.\nB: Hello.", **PAIR},
        "has the column 'dialogue', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "choices beside the question": (
        {"question": Q, "choices": ["Hot", "Cold"], **PAIR},
        "has the column 'choices', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "a system prompt in two words": (
        {"prompt": Q, "System Prompt": "s", **PAIR},
        "has the column 'System Prompt', which belongs to the prompt and is not read; put it into the prompt, or",
        {},
    ),
    "a system message in capitals": (
        {"prompt": Q, "System": "s", **PAIR},
        "has the column 'System', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "first steps of the answer": (
        {"prompt": Q, "initial_reason_steps": "Step 1:", **PAIR},
        "has the column 'initial_reason_steps', which belongs to the prompt and is not read; put it into the prompt",
        {},
    ),
    "tools": (
        {"prompt": Q, **PAIR, "tools": [{"name": "f"}]},
        "has the column 'tools', which belongs to the prompt",
        {},
    ),
    "history": ({"instruction": Q, **PAIR, "history": [["a", "b"]]}, "has the column 'history', which belongs", {}),
    "inexact list as text": (both(lambda a: f"[{{'role': 'user', 'content': '{a}'"), "not exactly JSON or Python", {}),
    "single line ends": (
        both(lambda a: f"Human: {Q}\nAssistant: {a}"),
        "begins or ends like a transcript, in a form",
        {},
    ),
    "templated": (
        {"prompt": f"<|im_start|>user\n{Q}<|im_end|>", **PAIR},
        "holds a special token or a mark of a chat",
        {},
    ),
    "end of turn": (
        {"prompt": Q, "chosen": A, "rejected": f"{B}<|eot_id|>"},
        "take the marks out, or say --special-tokens",
        {},
    ),
    "several rejected": (
        {"prompt": Q, "chosen": A, "rejected": [B, "No."]},
        "which of their pairs are ties would tell what was chosen; say --ties coin",
        {"pairs": "all"},
    ),
    "one text on both sides": (
        {"prompt": Q, "chosen": [A], "rejected": [B, A]},
        "holds one text among the chosen and the rejected; repair or remove the row",
        {"ties": "coin"},
    ),
    "lists on both sides": (
        {"prompt": Q, "chosen": [A, Q], "rejected": [B, Q]},
        "several texts on both sides, which may be turns",
        {"ties": "coin"},
    ),
    "names of columns, not texts": (
        {"prompt": Q, "response_1": B, "response_2": A, "chosen": "response_2", "rejected": "response_1"},
        "holds names of columns or models in 'chosen' and 'rejected'; put the texts there",
        {},
    ),
    "letters of columns, not texts": (
        AB | {"chosen": "B", "rejected": "A"},
        "holds names of columns or models in 'chosen' and 'rejected'; put the texts there",
        {},
    ),
    "models, not texts, beside two outputs": (
        {"prompt": Q, "output_a": B, "output_b": A, "chosen": "gpt-4", "rejected": "llama"},
        "columns or models in 'chosen' and 'rejected'; put the texts there, or, if these are the answers, remove",
        {},
    ),
    "models, not texts": (
        {"prompt": Q, "x": B, "y": A, "model_a": "m", "model_b": "n", "chosen": "n", "rejected": "m"},
        "holds names of columns or models in 'chosen' and 'rejected'; put the texts there",
        {},
    ),
    "the winner as a model, in places that change": (
        AB | {"model_a": "m", "model_b": "n", "label": "n"},
        "declares models by --labels, and these change places; write in the label which response it prefers",
        LABEL | {"labels": "n,m"},
    ),
    "the winner as a generator, in places that change": (
        AB | {"generator_1": "m", "generator_2": "n", "label": "n"},
        "declares models by --labels, and these change places; write in the label which response it prefers",
        LABEL | {"labels": "n,m"},
    ),
    "a flag that may turn the label": (
        AB | {"label": "B", "Swapped": True},
        "has the column 'Swapped', which may turn the label and is not read; write each label for the order in which",
        LABEL | {"labels": "A,B"},
    ),
    "Prodigy, a pair that was rejected": (
        {"prompt": Q, **PAIR, "answer": "reject"},
        "has the column 'answer', which says that the row was rejected or skipped; remove such rows, then the column",
        {},
    ),
    "MTurk, work that was rejected": (
        AB | {"label": "B", "AssignmentStatus": "Rejected"},
        "has the column 'AssignmentStatus', which says that the row was rejected or skipped; remove such rows, then",
        LABEL | {"labels": "A,B"},
    ),
    "names of models beside columns of any name": (
        {"prompt": Q, "a": B, "b": A, "chosen": "Model B", "rejected": "Model A"},
        "holds names of columns or models in 'chosen' and 'rejected'; put the texts there",
        {},
    ),
    "places in a list beside them": (
        {"prompt": Q, "completions": [B, A], "chosen": "1", "rejected": "0"},
        "holds names of columns or models in 'chosen' and 'rejected'; put the texts there",
        {},
    ),
    "undeclared label": (AB | {"label": "C"}, "has a label that --labels does not declare", LABEL | {"labels": "A,B"}),
    "label beyond any float": (
        AB | {"label": 10**400},
        "a label or score that is not a number",
        LABEL | {"labels": "<0,>0"},
    ),
    "label not a number": (
        AB | {"label": "much"},
        "a label or score that is not a number",
        LABEL | {"labels": "<0,>0"},
    ),
    "tie": (AB | {"label": 0}, "holds a tie; say --ties coin", LABEL | {"labels": "<0,>0"}),
    "response column missing": (
        {"prompt": Q, "response_a": A, "label": 1},
        "lacks one of 'response_a'/'response_b'",
        LABEL | {"labels": "1,0"},
    ),
    "no label column named": (
        AB | {"label": "A"},
        "read by --label-column and --labels (data.label_column, data.labels)",
        {},
    ),
    "arena tie": ({"conversation_a": talk(B), "conversation_b": talk(A), "winner": "tie (bothbad)"}, "holds a tie", {}),
    "arena winner": (
        {"conversation_a": talk(B), "conversation_b": talk(A), "winner": "me"},
        "has a value in 'winner' that is none of model_a, model_b, tie",
        {},
    ),
    "Kaggle, turns missing": (
        KAGGLE | ONE_HOT | {"response_a": "[]"},
        "one response of each model to every prompt",
        {},
    ),
    "PKU, two labels": (PKU, "holds two labels; choose by name: --format pku-better or --format pku-safer", {}),
    "KTO": (
        {"prompt": Q, "completion": A, "label": True},
        "one response with a label of its own (KTO), which is not read",
        {},
    ),
    "OpenAI with tools": (
        {
            "input": {"messages": user(Q), "tools": [{"name": "f"}]},
            "preferred_output": assistant(A),
            "non_preferred_output": assistant(B),
        },
        "holds a message with 'tools', which is not read",
        {},
    ),
    "choice out of range": (ORDERED | {"choice": 2}, "a choice that is not the index of one of its responses", {}),
    "a choice that is true": (ORDERED | {"choice": True}, "a label or score that is not a number", {}),
    "a strength that is false": (AB | {"label": False}, "score that is not a number", LABEL | {"labels": "<0,>0"}),
    "one response": (
        {"prompt": Q, "responses": [A], "scores": [1]},
        "does not hold two responses with a judgement",
        {},
    ),
    "two judgements": (ORDERED | {"scores": [0, 1], "choice": 1}, "needs one of 'scores', 'ranks' and 'choice'", {}),
    "Argilla, a name missing": (argilla([{"value": "r2", "rank": 1}]), "two responses with a judgement of each", {}),
    "Argilla, only drafts": (argilla(None), "holds no judgement that was given", {}),
    "red-team transcripts": ({"transcript": human(A), "rating": 4.0}, "lacks one of 'chosen'/'rejected'", {}),
    "OASST messages": ({"message_id": "1", "text": Q, "role": "prompter"}, "lacks one of 'chosen'/'rejected'", {}),
    "UltraInteract": ({"trajectory": [{"from": "user", "value": Q}], **PAIR}, "share no prompt", {}),
    "HelpSteer3 edits": ({"context": user(Q), "original_response": B, "edited_response": A}, "by --format", {}),
    "BeaverTails": ({"prompt": Q, "response": A, "is_safe": True}, "lacks one of 'chosen'/'rejected'", {}),
    "PRISM": ({"user_prompt": Q, "model_response": A, "if_chosen": True}, "the nearest is 'if_chosen'", {}),
    "Scale": ({"params": {"prompt": Q}, "response": {"preference": "1"}}, "lacks one of 'chosen'/'rejected'", {}),
    "Prodigy": ({"text": Q, "options": [], "accept": ["a"]}, "lacks one of 'chosen'/'rejected'", {}),
    "doccano": ({"text": Q, "label": [A]}, "lacks one of 'chosen'/'rejected'", {}),
    "Vicuna pairs": ({"question": Q, "answer_a": A, "answer_b": B, "winner": "A"}, "read by --label-column", {}),
    "AlpacaFarm": ({"instruction": Q, "output_1": A, "output_2": B, "preference": 2}, "read by --label-column", {}),
    "paired Stack Exchange": ({"question": Q, "response_j": A, "response_k": B}, "lacks one of 'chosen'", {}),
    "chosen_response": ({"prompt": Q, "chosen_response": A, "rejected_response": B}, "the nearest is 'rejected_r", {}),
    "two system messages": (
        {"system": "t", **both(lambda a: [{"role": "system", "content": "s"}, *talk(a)])},
        "holds two different system messages",
        {},
    ),
    "system column of a shape": (
        {"system": "s", "prompt": Q, "response_1": B, "response_2": A, "preference_strength": 2},
        "has the column 'system', which belongs to the prompt and is not read",
        {},
    ),
    "HelpSteer2, another scale": (
        {"prompt": Q, "response_1": B, "response_2": A, "preference_strength": 7},
        "has a value in 'preference_strength' that is not from -3 to 3, of which 0 is a tie; repair the row",
        {},
    ),
    "MT-bench, no such turn": (MT_BENCH | {"turn": 3}, "judges a turn that a conversation does not have", {}),
    "Alpaca template": (
        {"prompt": f"### Instruction:\n{Q}\n\n### Response:\n", **PAIR},
        "holds a special token or a mark of a chat",
        {},
    ),
    "end of sequence": ({"prompt": Q, "chosen": f"{A}</s>", "rejected": f"{B}</s>"}, "(2 of 2 rows do)", {}),
    "Gemma's beginning": ({"prompt": f"<bos>{Q}", **PAIR}, "(2 of 2 rows do)", {}),
    "Gemma 4's template": ({"prompt": f"<|turn>user\n{Q}<turn|>\n<|turn>model\n", **PAIR}, "(2 of 2 rows do)", {}),
    "Llama's beginning": ({"prompt": Q, **both(lambda a: f"<s> {a}")}, "(2 of 2 rows do)", {}),
    "OpenChat's template": (
        {"prompt": f"GPT4 Correct User: {Q}<|end_of_turn|>GPT4 Correct Helper:", **PAIR},
        "(2 of 2 rows do)",
        {},
    ),
    "Hunyuan's template": ({"prompt": f"<｜hy_User｜>{Q}<｜hy_Assistant｜>", **PAIR}, "(2 of 2 rows do)", {}),
    "Mistral's calls": ({"prompt": Q, "chosen": A, "rejected": '[TOOL_CALLS][{"name": "f"}]'}, "(2 of 2 rows do)", {}),
    "ChatGLM's beginning": ({"prompt": f"[gMASK]<sop>{Q}", **PAIR}, "(2 of 2 rows do)", {}),
    "EXAONE's template": ({"prompt": f"[|user|]{Q}\n[|assistant|]", **PAIR}, "(2 of 2 rows do)", {}),
    "Gemma's end": ({"prompt": Q, "chosen": f"{A}<eos>", "rejected": f"{B}<eos>"}, "(2 of 2 rows do)", {}),
    "DeepSeek's end": ({"prompt": Q, "chosen": f"{A}<｜end▁of▁sentence｜>", "rejected": B}, "(2 of 2 rows do)", {}),
    "transcript as prompt, single line ends": (
        {"prompt": f"Human: {Q}\nAssistant:", **PAIR},
        "begins or ends like a transcript, in a form",
        {},
    ),
    "numpy's lists as text": (
        both(lambda a: "[" + "\n ".join(map(repr, talk(a))) + "]"),
        "that is not exactly JSON or Python",
        {},
    ),
    "prompt not a text": ({"prompt": 7, **PAIR}, "column 'prompt' is neither text nor a list of messages", {}),
    "answers without a prompt": ({"prompt_id": 1, **both(assistant)}, "holds answers without a prompt", {}),
    "Axolotl messages with the answer": (
        {"messages": talk(A), **both(assistant)},
        "does not end with a user message",
        {},
    ),
    "Vicuna's template": (
        {"prompt": f"A chat with an assistant. USER: {Q} ASSISTANT:", **PAIR},
        "begins or ends like a transcript, in a form",
        {},
    ),
    "Phi's end": ({"prompt": Q, **both(lambda a: f"{a}<|endoftext|>")}, "(2 of 2 rows do)", {}),
    "Zephyr's template": ({"prompt": f"<|user|>\n{Q}</s>\n<|assistant|>\n", **PAIR}, "(2 of 2 rows do)", {}),
    "OASST's template": ({"prompt": f"<|prompter|>{Q}<|endoftext|><|assistant|>", **PAIR}, "(2 of 2 rows do)", {}),
    "columns in capitals": ({"Prompt": Q, "Chosen": A, "Rejected": B}, "the nearest is 'Chosen', 'Rejected'", {}),
    "rows under one key": ({"data": [{"prompt": Q, **PAIR}]}, "holds rows inside of a column; write each", {}),
    "rows of the hub's viewer": (
        {"row_idx": 0, "row": {"prompt": Q, **PAIR}, "truncated_cells": []},
        "holds rows inside of a column; write each of them as a row of its own",
        {},
    ),
    "pandas' columns": (
        {"prompt": {"0": Q}, "chosen": {"0": A}, "rejected": {"0": B}},
        "holds the columns of a table; write its rows",
        {},
    ),
    "columns as lists": (
        {"prompt": [Q, Q], "chosen": [A, B], "rejected": [B, A]},
        "which may be turns of a dialogue",
        {},
    ),
    "a transcript in Chinese": ({"prompt": f"用户：{Q}\n助手：", **PAIR}, "begins or ends like a transcript", {}),
    "a transcript in Japanese": ({"prompt": f"ユーザー: {Q}\n", **PAIR}, "begins or ends like a transcript", {}),
    "ChatGLM2's rounds": ({"prompt": f"[Round 1]\n\n问：{Q}\n\n答：", **PAIR}, "begins or ends like a transcript", {}),
    "a transcript as prompt of messages": (
        {"prompt": human(""), **both(assistant)},
        "begins or ends like a transcript, in a form",
        {},
    ),
    "answers that run on": (
        {"prompt": Q, "chosen": A, "rejected": f"{B}\n\nHuman: Thanks.\n\nAssistant: Well."},
        "2 of 2 rows have a response that goes on with a turn of the user, 'User:' or 'Human:' (end it before that)",
        {},
    ),
    "question and answer lines": (both(lambda a: f"Q: {Q}\nA: {a}"), "rows have a prompt like 'Q: ... A:'", {}),
    "question and answer lines in Chinese": (
        {"prompt": f"问：{Q}\n答：", **PAIR},
        "2 of 2 rows have a prompt like 'Q: ... A:', or marks of turns inside messages (write the question only, or",
        {},
    ),
    "a transcript in brackets": ({"prompt": f"[USER] {Q} [ASSISTANT]", **PAIR}, "begins or ends like a transcript", {}),
    "an object around each answer": (
        {"prompt": Q, **both(lambda a: json.dumps({"text": a}))},
        "2 of 2 rows have a prompt or two responses in JSON or Python around one text (write the text)",
        {},
    ),
    "a list around each answer": ({"prompt": Q, **both(lambda a: repr([a]))}, "in JSON or Python around one text", {}),
    "a pipeline's output as text": (
        {"prompt": user(Q), **both(lambda a: json.dumps([{"generated_text": a}]))},
        "in JSON or Python around one text",
        {},
    ),
    "an object that Python printed": (
        {"prompt": Q, **both(lambda a: f"AIMessage(content={a!r}, additional_kwargs={{}})")},
        "in JSON or Python around one text",
        {},
    ),
    "bytes that Python printed": ({"prompt": Q, **both(lambda a: repr(a.encode()))}, "JSON or Python around one", {}),
    "an API's answer as JSON": (
        {"prompt": Q, **both(lambda a: json.dumps({"id": "x", "choices": [{"message": assistant(a)[0]}]}))},
        "in JSON or Python around one text",
        {},
    ),
    "addresses of the answers": (
        {"prompt": Q, "chosen": "s3://answers/1.txt", "rejected": "s3://answers/2.txt"},
        "2 of 2 rows have a prompt or two responses that are a path or an address (write what stands there)",
        {},
    ),
    "HTML's escapes": (
        {"prompt": Q, **both(lambda a: f"That&#39;s {a}")},
        "2 of 2 rows have a text with what an export escaped or decoded wrongly, such as &quot; or",
        {},
    ),
    "line breaks that were escaped": ({"prompt": Q, **both(lambda a: f"So:\\n\\n{a}")}, "export escaped or", {}),
    "UTF-8 that was read as Latin-1": (
        {"prompt": Q, **both(lambda a: f"That\u2019s {a}".encode().decode("cp1252"))},
        "export escaped or decoded wrongly",
        {},
    ),
    "a template without its tokens": (
        both(lambda a: f"system\nYou are\nuser\n{Q}\nassistant\n{a}"),
        "begins or ends like a transcript, in a form that is not read",
        {},
    ),
    "Alpaca's template without its marks": (
        {"prompt": f"Below is an instruction.\n\nInstruction: {Q}\n\nResponse:", **PAIR},
        "2 of 2 rows have a prompt like 'Q: ... A:', or marks of turns inside messages",
        {},
    ),
    "a transcript in a message": (
        {"prompt": user(human("")), **both(assistant)},
        "2 of 2 rows have a prompt like 'Q: ... A:', or marks of turns inside messages",
        {},
    ),
    "quoted twice": ({"prompt": Q, **both(json.dumps)}, "in JSON or Python around one text", {}),
    "an object around the prompt": ({"prompt": repr({"q": Q}), **PAIR}, "in JSON or Python around one text", {}),
    "a place for an image": (
        {"prompt": f"<image><image>\n{Q}", **PAIR},
        "2 of 2 rows have a place for an image, a video or a sound, of which nothing is read (remove such rows)",
        {},
    ),
    "ShareGPT preference, the talk goes on": (
        {"conversations": [*user("Hi."), *assistant("Hello.")], **both(talk)},
        "column 'prompt' does not end with a user message, and answers are not continued; repair it",
        {},
    ),
    "two names of the user in a transcript": (
        both(lambda a: f"{human('So.')}\n\nUser: And?\n\nAssistant: {a}"),
        "'System:' inside a turn of the assistant; begin all turns with the same names after an empty line",
        {},
    ),
    "a user's line inside the answer": (
        {"prompt": human("").strip(" "), **both(lambda a: f"{a}\nHuman: Thanks.\nAssistant: Well.")},
        "which takes it as the assistant's words (2 of 2 rows do)",
        {},
    ),
    "the user's last word": (
        both(lambda a: f"{human(a)}\n\nHuman: Thanks."),
        "does not begin and end with an assistant message",
        {},
    ),
    "only a system message": (
        {"prompt": [{"role": "system", "content": "s"}], **both(assistant)},
        "does not end with a user message",
        {},
    ),
    "Arena, tokens counted in messages": (
        {f"conversation_{name}": [*user(Q), assistant(a)[0] | {"num_tokens": 3}] for name, a in (("a", B), ("b", A))}
        | {"winner": "model_b"},
        "one of the responses holds a message with 'num_tokens', which is not read and would be lost; remove it",
        {},
    ),
    "Arena, two prompts": (
        {"conversation_a": talk(B), "conversation_b": talk(A, "Other"), "winner": "model_b"},
        "one of the responses does not begin and end with an assistant message after the prompt; repair the row",
        {},
    ),
    "Arena, other winners": (
        {"conversation_a": talk(B), "conversation_b": talk(A), "winner": "A"},
        "'winner' that is none of model_a, model_b, tie, tie (bothbad), both_bad; write one",
        {},
    ),
    "Arena, a winner of two responses": (AB | {"winner": "A"}, "response_a and response_b with a label are read", {}),
    "Kaggle, the winner in one column": (
        {name: json.dumps([text]) for name, text in AB.items()} | {"label": "a"},
        "2 of 2 rows have a prompt or two responses in JSON or Python around one text",
        LABEL | {"labels": "a,b"},
    ),
    "Label Studio, choices of other names": (
        studio({"choices": ["Response 2"]}),
        "left or right, or the name of a response's field",
        {},
    ),
    "Argilla, a tie": (argilla("tie"), "holds a tie; say --ties coin", {}),
    "Label Studio, a tie": (studio({"choices": ["Tie"]}), "holds a tie; say --ties coin", {}),
    "Label Studio, other fields in another order": (
        studio({"selected": "left"}, prompt=Q, answer_2=B, answer_1=A),
        "does not tell which field stood left; name the fields as the tags that show them",
        {},
    ),
    "Label Studio, a text as a result": (
        {"data": {"prompt": Q, "a1": B, "a2": A}, "annotations": [{"result": ["x"]}]},
        "column 'result' is not an object; repair or remove the row",
        {},
    ),
    "Argilla, a list as a name": (
        argilla([{"value": ["r1"], "rank": 1}, {"value": "r2", "rank": 2}]),
        "does not hold two responses with a judgement of each",
        {},
    ),
    "Label Studio, ratings": (studio({"rating": 4}), "left or right, or the name of a response's field", {}),
    "Label Studio, two questions": (
        studio({"selected": "left"}, {"choices": ["a2"]}),
        "holds judgements of two questions, of which one can be the label",
        {},
    ),
    "Label Studio, fields of any name": (
        studio({"selected": "left"}, prompt=Q, x=A, y=B, z="Be brief."),
        "more than two fields that may be responses; name the two response_1 and response_2",
        {},
    ),
    "Argilla, two questions": (
        {
            "fields": {"prompt": Q, "r1": B, "r2": A},
            "responses": {"better": [{"value": "r2"}], "safer": [{"value": "r1"}]},
        },
        "holds judgements of two questions, of which one can be the label",
        {},
    ),
    "Argilla, a name among three": (
        {"fields": {"prompt": Q, "r1": B, "r2": A, "guideline": "x"}, "responses": {"better": [{"value": "r2"}]}},
        "more than two fields that may be responses",
        {},
    ),
    "Argilla, a system message in a field": (
        {
            "fields": {"prompt": Q, "system": "s", "response_1": B, "response_2": A},
            "responses": {"better": [{"value": "response_2"}]},
        },
        "has the column 'system', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "Label Studio, the talk before in a field": (
        studio({"selected": "right"}, prompt=Q, dialogue="No.", a1=B, a2=A),
        "has the column 'dialogue', which belongs to the prompt and is not read; put it into the prompt, or remove",
        {},
    ),
    "Argilla, columns for answers": (
        {"prompt": Q, "response_1": B, "response_2": A, "better.responses": ["response_2"]},
        "lacks one of 'chosen'/'rejected'",
        {},
    ),
    "passage beside the instruction": (
        {"instruction": Q, "context": "Tea is hot.", **PAIR},
        "has the column 'context', which belongs to the prompt and is not read; put it into the prompt, or remove it",
        {},
    ),
    "talk before the question": (
        {"question": Q, "chat_history": talk("No."), **PAIR},
        "has the column 'chat_history', which belongs to the prompt",
        {},
    ),
    "two system messages, one a side": (
        {name: [{"role": "system", "content": name}, *talk(text)] for name, text in PAIR.items()},
        "a system message after the first, or two different ones",
        {},
    ),
    "NeMo": (
        {"context": user(Q), "completions": [{"rank": 0, "completion": assistant(A)}]},
        "lacks one of 'chosen'/'rejected'",
        {},
    ),
    "Gemini": (
        both(lambda a: [{"role": "user", "parts": [{"text": Q}]}, {"role": "model", "parts": [{"text": a}]}]),
        "holds a message without a 'role' and a 'content' text",
        {},
    ),
    "tokens of an older TRL": (
        {"input_ids_chosen": [1, 2], "input_ids_rejected": [1, 3]},
        "lacks one of 'chosen'/'rejected'; the nearest is 'input_ids_rejected'",
        {},
    ),
    "trl stepwise": ({"prompt": Q, "completions": [A, B], "labels": [True, False]}, "lacks one of 'chosen'", {}),
    "one-hot list": (AB | {"label": [1, 0]}, "a label that --labels does not declare", LABEL | {"labels": "1,0"}),
    "Likert scale": (AB | {"label": 3}, "a label that --labels does not declare", LABEL | {"labels": "1,5"}),
    "unknown format": ({"prompt": Q, **PAIR}, "--format must be one of helpsteer2, ", {"format": "x"}),
}


def options(declared: Row) -> Options:
    return Options(**(declared | {"labels": parse_labels(declared.get("labels"))}))
