"""No option that names an output destroys what its user would miss: a key, a ledger, a store, a run, a release, an
input of the same command, or a file that the command did not write."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import all_lines_in, begins_with, json_with, output_file, output_folder

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"
TASKS = [{"id": i, "data": {"prompt": f"q{i}", "answer1": "a", "answer2": "b"}} for i in range(3)]
ASKED = [{"id": f"e{i}", "prompt": f"q{i}", "response_a": "a", "response_b": "b"} for i in range(3)]

COMMANDS = {
    "ledger export --output": (["ledger", "export", "--key=k.key"], "k.key"),
    "label tasks --output": (["label", "tasks", "t.json"], "t.json"),
    "label export --answers": (["label", "export", "--store=store"], "store/questions.jsonl"),
    "label export --out": (["label", "export", "--store=store"], "store/questions.jsonl"),
    "plan --json": (["plan", "--config=tiny.yaml", "--no-calibration"], "tiny.yaml"),
    "design --output": (["design", "--people=9", "--answers=9", "--epsilon=1", "--prompts=raw.jsonl"], "raw.jsonl"),
    "compare --output": (["compare", "run", "run"], "run/metrics.json"),
    "evaluate --output": (
        ["evaluate", "--policy=p", "--reference=p", "--prompts=raw.jsonl", "--judge=truth"],
        "raw.jsonl",
    ),
    "attack --output": (["attack", "rel", "--raw=raw.jsonl"], "raw.jsonl"),
    "attack --plant": (["attack", "raw.jsonl", "--key=k.key"], "raw.jsonl"),
    "attack --truth": (["attack", "raw.jsonl", "--plant=planted.jsonl"], "raw.jsonl"),
    "keygen --output": (["keygen"], "k.key"),
    "privatize --output": (["privatize", "--data=raw.jsonl", "--epsilon=1", "--key=k.key"], "raw.jsonl"),
    "verify-run --folder": (["verify-run", "--config=tiny.yaml"], "tiny.yaml"),
    "validate --output": (["validate", "kl_dp"], "raw.jsonl"),
}
"""By option: the command without it, and what that command reads."""
FURTHER_INPUTS = {
    "plan --json": (["--data=raw.jsonl"], "raw.jsonl"),
    "design --output": (["--policy=checkpoint"], "checkpoint/config.json"),
    "evaluate --output": (["--judge=rm:checkpoint"], "checkpoint/config.json"),
}
"""By option: another input of its command, and a file of it."""
TARGETS = {
    "key": "k.key",
    "ledger": "k.key.state/ledger.json",
    "state": "k.key.state/new.json",
    "memory": "user/private-rlhf/ledgers/new.json",
    "store": "store/questions.jsonl",
    "page's store": "page/answers.db",
    "draws": "draws.db",
    "run": "run/metrics.json",
    "release": "rel/part-00000.parquet",
    "beside a release": "rel/new",
    "link to the key": "link.key",
    "second name of the key": "hard.key",
    "second name of the ledger": "hard.json",
    "ledger behind a linked folder": "linked/ledger.json",
    "ledger behind dots": "run/../k.key.state/ledger.json",
    "no name": "",
    "here": ".",
}
FORCED = {name.split(" --")[0] for name in COMMANDS} - {"keygen", "privatize", "verify-run", "validate"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with one of everything, which no test changes."""
    home = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "user"))
        patch.chdir(home)
        (home / "tiny.yaml").write_text(TINY.read_text())
        rows = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(8)]
        (home / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["keygen", "--output=k.key"]) == 0
        assert main(["privatize", "--data=raw.jsonl", "--epsilon=1", "--key=k.key", "--output=rel"]) == 0
        (home / "t.json").write_text(json.dumps(TASKS))
        for name in ("store", "run", "page", "checkpoint"):
            (home / name).mkdir()
        (home / "checkpoint" / "config.json").write_text("{}")
        (home / "run" / "recipe.yaml").write_text("name: x\n")
        for name in ("environment.json", "metrics.json"):
            (home / "run" / name).write_text("{}")
        (home / "store" / "labeller.json").write_text(json.dumps({"kind": "FileDrop", "epsilon": 1.0}))
        (home / "store" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ASKED))
        (home / "store" / "answers.jsonl").write_text('{"id": "e0", "label": 1}\n')
        for name in ("page/answers.db", "draws.db"):
            with sqlite3.connect(home / name) as base:
                base.execute("CREATE TABLE facts (name TEXT)")
            base.close()
        (home / "link.key").symlink_to("k.key")
        (home / "linked").symlink_to("k.key.state")
        os.link(home / "k.key", home / "hard.key")
        os.link(home / "k.key.state" / "ledger.json", home / "hard.json")
        yield home


def tree(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def refused(folder: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "user"))
    monkeypatch.chdir(folder)
    before = tree(folder)
    assert main(arguments) == 2
    assert tree(folder) == before


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("option", COMMANDS)
def test_no_output_takes_the_place_of_what_is_kept(
    folder: Path, option: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --force neither, where there is one."""
    command, name = COMMANDS[option][0], f"--{option.split(' --')[1]}={TARGETS[target]}"
    refused(folder, [*command, name], monkeypatch)
    err = capsys.readouterr().err
    assert err.startswith(f"private-rlhf: --{option.split(' --')[1]} ")
    assert err.count("\n") == 1
    if option.split(" --")[0] in FORCED:
        refused(folder, [*command, name, "--force"], monkeypatch)


@pytest.mark.parametrize("option", COMMANDS)
def test_no_output_is_an_input(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, source = COMMANDS[option]
    force = ["--force"] if option.split(" --")[0] in FORCED else []
    refused(folder, [*command, f"--{option.split(' --')[1]}={source}", *force], monkeypatch)
    if option in FURTHER_INPUTS:
        more, source = FURTHER_INPUTS[option]
        capsys.readouterr()
        refused(folder, [*command, *more, f"--{option.split(' --')[1]}={source}", "--force"], monkeypatch)
        assert "is an input of this command" in capsys.readouterr().err


def test_a_key_goes_into_no_run_and_no_release(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("rel/new.key", "run/new.key", "run/deep/er/new.key"):
        refused(folder, ["keygen", f"--output={place}"], monkeypatch)


@pytest.mark.parametrize("option", ["ledger export --output", "label tasks --output", "label export --answers"])
def test_its_own_file_is_written_again_and_another_one_when_forced(
    folder: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "user"))
    monkeypatch.chdir(folder)
    place = tmp_path / "out"
    command = [*COMMANDS[option][0], f"--{option.split(' --')[1]}={place}"]
    for _ in range(2):
        assert main(command) == 0
    written = place.read_bytes()
    place.write_text("the work of a week\n")
    capsys.readouterr()
    assert main(command) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert place.read_text() == "the work of a week\n"
    assert main([*command, "--force"]) == 0
    assert place.read_bytes() == written


def test_what_recognises_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, json_like, page, lines in (
        ('{"a": 1, "b": 2}', True, False, False),
        ('{"a": 1}', False, False, False),
        ("# 3 runs", False, True, False),
        ("one\ntwo\n", False, False, True),
        ("one\nthree\n", False, False, False),
        ("", False, False, True),
    ):
        path.write_text(text)
        found = (json_with("a", "b")(path), begins_with(r"# \d+ runs")(path), all_lines_in(["two\n", "one\n"])(path))
        assert found == (json_like, page, lines)
    path.write_bytes(b"\xff\xfe")
    assert not all_lines_in(["one"])(path)


def test_what_is_no_file_is_no_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "is a device or a pipe"), (".", "must name a new"), ("..", "must name a new")):
        with pytest.raises(UserError, match=words):
            output_file(tmp_path / name if name == "pipe" else Path(name), "--output", force=True)
    with pytest.raises(UserError, match="is a folder"):
        output_file(tmp_path, "--output", force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds what this command did not write"):
        output_folder(tmp_path / "mine", "--output", rewrites=("run.json",))
    (tmp_path / "mine" / "run.json").write_text("{}")
    assert output_folder(tmp_path / "mine", "--output", rewrites=("run.json",)) == tmp_path / "mine"


def test_a_project_s_own_recipe_makes_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    (tmp_path / "page.md").write_text("my page")
    assert output_file(tmp_path / "page.md", "--output", force=True) == tmp_path / "page.md"
    assert output_file(tmp_path / "own.key", "--output", secret=True) == tmp_path / "own.key"


@pytest.mark.parametrize("mark", ["environment.json", "sft/manifest.json"])
def test_either_mark_of_a_run_keeps_keys_out(tmp_path: Path, mark: str) -> None:
    """environment.json names the hardware, so somebody may remove it before a run is passed on."""
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    for name in ("recipe.yaml", mark):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="from where things are released"):
        output_file(tmp_path / "own.key", "--output", secret=True)


def test_force_is_named_where_the_command_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("my page")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"was not written by this command: choose another file$"):
        output_file(Path("page.md"), "--page", rewrites=begins_with("# What"))
    with pytest.raises(UserError, match="choose another file, or add --force"):
        output_file(Path("page.md"), "--output", force=False)
