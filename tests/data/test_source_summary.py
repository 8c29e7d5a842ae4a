"""What is shown of a source before its labels are used: right counts, what the model sees, and nothing of a label."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from _pytest.capture import CaptureIO
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.data.chunks import cut, read_chunk
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.layout import find_layout
from private_rlhf.data.render import Renderer
from private_rlhf.data.source_summary import SourceSummary, summary_of
from private_rlhf.data.sources import open_source
from private_rlhf.lm.base_models import tiny_tokenizer
from private_rlhf.privacy.keys import keygen
from support.preference_files import write_jsonl

pytestmark = pytest.mark.usefixtures("quick_disk")
Row = dict[str, Any]


def rows(count: int, **changes: Any) -> list[Row]:
    return [
        {"prompt": f"Say number {i}.", "chosen": f"yes {i}", "rejected": f"no, {i}", "score": i} | changes
        for i in range(count)
    ]


def messages(count: int) -> list[Row]:
    """Implicit prompts of one or two user turns."""
    made = []
    for i in range(count):
        shared = [{"role": "user", "content": f"Say number {i}."}]
        if i % 3 == 0:
            shared += [{"role": "assistant", "content": "Which?"}, {"role": "user", "content": "That."}]
        both = ([*shared, {"role": "assistant", "content": text}] for text in (f"yes {i}", f"no, {i}"))
        made.append(dict(zip(("chosen", "rejected"), both, strict=True)))
    return made


def odd(count: int) -> list[Row]:
    """A fifth of each fault that is dropped, beside sound rows."""
    faults: list[Row] = [
        {},
        {"chosen": "same", "rejected": "same"},
        {"chosen": " "},
        {"rejected": ""},
        {"prompt": "Hi"},
    ]
    return [row | faults[i % 5] for i, row in enumerate(rows(count))] + rows(7)


def test_a_dialogue_that_ends_in_an_empty_turn_is_empty(tmp_path: Path) -> None:
    """As some of HH do: an answer of no words would be learnt."""
    talk, end = "\n\nHuman: Say {i}.\n\nAssistant: {answer}", "\n\nHuman: And?\n\nAssistant:"
    given = [{"chosen": talk.format(i=i, answer="yes") + end * (i < 3)} for i in range(7)]
    given = [row | {"rejected": row["chosen"].replace("yes", "no")} for row in given]
    assert summary(tmp_path, given).dropped["empty"] == 3
    (part,) = open_source(tmp_path)
    layout = find_layout("it", [part], Options())
    (chunk,) = cut(part, layout.wanted)
    (columns,) = read_chunk(chunk, layout)
    assert columns.blank.tolist() == [True] * 3 + [False] * 4


def swapped(given: list[Row], seed: int) -> list[Row]:
    draw = random.Random(seed)
    return [
        row | ({"chosen": row["rejected"], "rejected": row["chosen"]} if draw.random() < 0.5 else {}) for row in given
    ]


def summary(folder: Path, given: list[Row], **options: Any) -> SourceSummary:
    folder.mkdir(exist_ok=True)
    return summary_of(str(write_jsonl(folder, given)), None, Options(**options))


ON = "No.\n\nUser: Why?\n\nAssistant: &quot;So.&quot;"
KINDS = {"text": rows(150), "messages": messages(150), "odd": odd(150)}
KINDS["signs"] = [row | ({} if i % 9 else {"rejected": ON}) for i, row in enumerate(rows(150))]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets messages go to a terminal, where `privatize` shows what it reads before it spends anything."""
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_is_printed_depends_on_a_label(
    tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `inspect`, with a model and without one, and of the head of `privatize`; labels of random rows are swapped."""
    recipe = (
        "name: x\nevaluation_labels: private\nmodel: {source: tiny, cache_dir: ../cache}\n"
        "data: {accept_odd: true}\nprivatize: {epsilon: 1.0, key_file: ../none.key}\n"
    )
    said = []
    for name, given in (("one", KINDS[kind]), ("two", swapped(KINDS[kind], seed))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_jsonl(tmp_path / name, given)
        Path("recipe.yaml").write_text(recipe)
        assert main(["inspect", "train.jsonl"]) == 0
        assert main(["inspect", "train.jsonl", "--config", "recipe.yaml"]) == 0
        code = main(["privatize", "--data", "train.jsonl", "--output", "out", "--epsilon", "1", "--key", "none.key"])
        printed = capsys.readouterr()
        said.append((code, printed.out, re.sub(r"\rWriting[^\r\n]*", "", printed.err).strip()))
    assert said[0] == said[1]
    assert "⟦" in said[0][1]


@pytest.mark.usefixtures("terminal")
def test_the_stage_of_a_recipe_shows_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "name: x\nevaluation_labels: private\nmodel: {source: tiny}\nprivatize: {epsilon: 1.0, key_file: ../k}\n"
    Path("recipe.yaml").write_text(recipe)
    write_jsonl(tmp_path, rows(40))
    keygen(tmp_path.parent / "k")
    assert main(["privatize", "--config", "recipe.yaml", "--data", "train.jsonl"]) == 0
    printed = capsys.readouterr().err
    assert "columns read: chosen, prompt, rejected; not read: score" in printed
    assert printed.index("⟦") < printed.index("no rows left out; 4 evaluation pairs (private labels)")


def test_counts_are_those_of_the_rows(tmp_path: Path) -> None:
    found = summary(tmp_path, odd(50))
    assert (found.rows, found.whole) == (57, True)
    assert found.dropped == {"identical": 10, "empty": 20, "duplicates": 2, "ties": 0}
    assert found.short == 10
    assert found.read == ("chosen", "prompt", "rejected")
    assert found.unread == ("score",)
    assert found.turns == {2: 57}
    text = "\n".join(found.lines())
    assert "32 rows left out (10 for identical responses, 20 for an empty prompt" in text
    assert "not read: score" in text
    assert summary(tmp_path / "m", messages(9)).turns == {2: 6, 4: 3}


LEFT_OUT = (
    "32 rows left out (10 for identical responses, 20 for an empty prompt or response, 2 for a pair that an earlier row"
    " holds)"
)


@pytest.mark.usefixtures("terminal")
def test_the_counts_are_those_of_the_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, key = write_jsonl(tmp_path, odd(50)), keygen(tmp_path / "k")
    words = ["privatize", "--data", str(source), "--output", str(tmp_path / "out"), "--epsilon", "1", "--key", str(key)]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert LEFT_OUT in printed.err
    assert LEFT_OUT in printed.out


ODD = {
    "prompt of under": rows(85) + rows(15, prompt="Hi"),
    "two identical responses": rows(85) + rows(15, chosen="same", rejected="same"),
    "an empty prompt or response": rows(85) + rows(15, rejected=" "),
    "a pair that an earlier row holds": rows(45) * 3,
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_source_stops_the_run_unless_it_is_meant(tmp_path: Path, what: str) -> None:
    found = summary(tmp_path, ODD[what])
    with pytest.raises(UserError, match=rf"rows have .*{what}.*data\.accept_odd: true, for privatize --accept-odd"):
        found.check(accept=False)
    found.check(accept=True)
    summary(tmp_path / "few", ODD[what][-50:]).check(accept=False)  # fewer rows than are judged
    words = ["privatize", "--data", str(tmp_path / "train.jsonl"), "--output", str(tmp_path / "out"), "--epsilon", "1"]
    words += ["--key", str(keygen(tmp_path / "k"))]
    assert main(words) == 2
    assert not (tmp_path / "out").exists()
    assert main([*words, "--accept-odd"]) == 0


def test_a_sign_in_a_text_is_counted_over_the_rows(tmp_path: Path) -> None:
    """Two in a hundred answers that run on stop a run, and one is told of."""
    on = rows(1, rejected=ON)
    with pytest.raises(UserError, match="2 of 100 rows have a response that goes on with a turn of the user"):
        summary(tmp_path, rows(98) + on * 2).check(accept=False)
    found = summary(tmp_path, rows(99) + on)
    found.check(accept=False)
    assert [line[27:35] for line in found.lines() if line.startswith("rare: 1 of 100 rows")] == ["response", "text wit"]


def test_spellings_of_a_labeller_are_one_person_as_in_a_release(tmp_path: Path) -> None:
    given = [row | {"who": who} for who in ("Ann B.", " ann  b.", "bob") for row in rows(4)]
    assert summary(tmp_path, given, labeler_column="who").dropped["duplicates"] == 4


@pytest.mark.parametrize("labels", ["1,0", ">0,<0"])
def test_labels_by_sign_are_named_whatever_they_are(tmp_path: Path, labels: str) -> None:
    """Labels 1 to 5 pass for signed ones, and to refuse those of one sign would tell them."""
    row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}
    source = write_jsonl(tmp_path, [row | {"label": 1}] * 12)
    lines = summary_of(str(source), None, Options(label_column="label", labels=tuple(labels.split(",")))).lines()
    assert any(line.startswith("labels are read by their sign") for line in lines) == (labels != "1,0")


def test_an_odd_data_set_of_the_hub_stops_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plan does not read it."""
    import datasets

    given = datasets.Dataset.from_list(rows(9, chosen="['yes']", rejected="['no']"))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda _: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: given.to_iterable_dataset())
    monkeypatch.chdir(tmp_path)
    recipe = "name: x\nevaluation_labels: private\nmodel: {source: tiny}\nprivatize: {epsilon: 1.0, key_file: ../k}\n"
    Path("recipe.yaml").write_text(recipe)
    assert main(["privatize", "--config", "recipe.yaml", "--data", "owner/name"]) == 2
    assert "9 of 9 rows have a prompt or two responses in JSON" in capsys.readouterr().err


def test_loss_tokens_are_marked_as_they_are_learnt(tmp_path: Path) -> None:
    """Two assistant turns in a response: what stands between them is not learnt."""
    from private_rlhf.data.source_summary import _marked

    renderer = Renderer(tiny_tokenizer(["Say it. Once more? yes no"]), 64, 16)
    turns = [("assistant", "yes"), ("user", "Once more?"), ("assistant", "no")]
    text = _marked(
        renderer.learnt_ids([{"role": role, "content": content} for role, content in turns]), renderer.tokenizer
    )
    assert text.startswith("⟦yes<|im_end|>⟧")
    assert text.endswith("⟦no<|im_end|>⟧")
    assert "Once more?" in text.split("⟧")[1].split("⟦")[0]


ESCAPES = "\x1b[2Jgone\x07\x9b31m\u202e"


def test_no_control_character_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of texts, names of columns and the file's name."""
    given = rows(3, prompt=f"Look {ESCAPES} here", chosen=f"yes\r{ESCAPES}") + rows(1)
    folder = tmp_path / "a\x1bb"
    folder.mkdir()
    source = write_jsonl(folder, [{f"n{ESCAPES}": 1} | row for row in given])
    assert main(["inspect", str(source)]) == 0
    printed = capsys.readouterr().out
    assert r"\x1b[2J" in printed
    assert all(each.isprintable() or each == "\n" for each in printed)
    assert json.loads(source.read_text().splitlines()[0])  # the file itself holds them
