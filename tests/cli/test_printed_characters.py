"""No character that a terminal or a browser obeys, or hides, leaves the program from data, files or models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from private_rlhf.cli import main
from private_rlhf.commands import compare
from private_rlhf.core.errors import printable
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data.render import Renderer
from private_rlhf.evaluation.runs import Run
from private_rlhf.lm.model_card import CardText, Provenance, write_beside
from private_rlhf.privacy.keys import keygen
from private_rlhf.recipe import DataConfig, ModelConfig
from private_rlhf.stages import report
from private_rlhf.stages.context import StageContext
from support.preference_files import write_jsonl
from support.recipes import recipe_of
from support.report_runs import write_run

STAGES = ("privatize", "sft", "reward", "ppo", "evaluate", "report")
PLANTED = "\x1b[2J\x1b]0;owned\x07\rgone\u202e\u2066\u200b\u2060\ufeff\x9b31m\0\x7f\u2028end"
Capture = pytest.CaptureFixture[str]


def obeyed(text: str) -> set[str]:
    return {each for each in text if not (each.isprintable() or each in "\n\u00a0")}


def test_escapes_stand_for_what_is_obeyed_or_hidden_and_nothing_else() -> None:
    assert printable("a\r\x1b[2J\u202eb\u200b\0\ud800") == r"a\r\x1b[2J\u202eb\u200b\x00\ud800"
    for plain in ("é ε 日本 π_ref\u00a0%", "two\nlines", "\u3000", "🙂", ""):
        assert printable(plain) == plain
    assert not obeyed(printable(PLANTED))


def planted_run(folder: Path) -> RunDir:
    run = write_run(folder)
    recipe = yaml.safe_load((run.root / "recipe.yaml").read_text())
    recipe["name"] = f"demo {PLANTED}"
    recipe["model"] = {"source": f"model {PLANTED}"}
    (run.root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    names = {"source": f"file {PLANTED}", "extra_columns": [f"column {PLANTED}"]}
    for path in (run.root / "privatize" / "release").glob("*manifest*"):
        path.write_text(json.dumps(json.loads(path.read_text()) | names))
    fit = run.stage("reward") / "fit.json"
    external = {"external": f"reward {PLANTED}", "source": f"reward {PLANTED}", "mode": f"x {PLANTED}"}
    fit.write_text(json.dumps(json.loads(fit.read_text()) | external))
    samples = run.stage("evaluate") / "samples.json"
    answer = {"text": f"answer {PLANTED}", "true_reward": 1.0, "reward": 1.0}
    samples.write_text(json.dumps([{"prompt": f"prompt {PLANTED}", "sft": answer, "private": answer}]))
    evaluation = run.stage("evaluate") / "evaluation.json"
    content = json.loads(evaluation.read_text())
    content |= {"judge_notes": [f"judge: {PLANTED}"], "judge": {"kind": "chat", "model": PLANTED, "url": PLANTED}}
    evaluation.write_text(json.dumps(content))
    return run


def test_pages_of_a_run(tmp_path: Path) -> None:
    """Report, card and terminal, with characters planted in every name and text that they repeat."""
    run = planted_run(tmp_path / "run")
    context = StageContext(recipe_of(), run, World(0, 1), "report", STAGES)
    context.folder.mkdir(parents=True, exist_ok=True)
    report.run(context)
    pages = {path.name: path.read_text(encoding="utf-8") for path in context.folder.glob("*.*")}
    assert {"report.md", "report.html", "card.md"} <= pages.keys()
    for name in ("report.md", "report.html", "card.md"):
        assert not obeyed(pages[name]), name
        assert "\\x1b" in pages[name], name
    assert "answer \\x1b[2J" in pages["report.html"]


def test_pages_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def read(folder: Path) -> Run:
        row = {"kl": 0.5, "win": 1.0, "longer": 0, "verdicts": [1.0], "objective_gain": 1.0, "true_reward": None}
        rows = {f"prompt {place}": row | {"kl": float(place)} for place in range(20)}
        terms = dict.fromkeys(("judge", "kl_coef", "truth", "sampling"), PLANTED)
        return Run(f"{folder.name} {PLANTED}", 2.0, PLANTED, 0, "π_ref", terms, rows)

    monkeypatch.setattr(compare, "read_run", read)
    assert main(["compare", "one", "two", "--output", str(tmp_path / "page.md")]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "page.md").read_text(encoding="utf-8")):
        assert "\\x1b[2J" in text
        assert not obeyed(text)


def test_cards_of_models(tmp_path: Path) -> None:
    origin = Provenance("sft", f"run {PLANTED}", ModelConfig(source="tiny"), DataConfig(), PLANTED)
    text = CardText(f"texts {PLANTED}", "text-generation", f"start {PLANTED}")
    write_beside(tmp_path, origin, Renderer(None, 10, 7, f"system {PLANTED}"), None, text)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count("\\x1b[2J") >= 3
    assert not obeyed(card)


def test_commands_that_read_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """What is inspected, released or refused, by names of files and columns and by texts."""
    monkeypatch.chdir(tmp_path)
    name = PLANTED.replace("\0", "")
    row = {"prompt": f"Say {PLANTED}", "chosen": f"yes {PLANTED}", "rejected": "no", f"column {PLANTED}": 1}
    folder = tmp_path / f"folder {name}"
    folder.mkdir()
    source, key = str(write_jsonl(folder, [row])), str(keygen(tmp_path / "k"))
    release = ["--epsilon", "1", "--key", key, "--output"]
    for words, code in (
        (["inspect", source], 0),
        (["privatize", "--data", source, *release, f"out {name}"], 0),
        (["verify-release", f"out {name}"], 0),
        (["ledger", "show", "--key", key], 0),
        (["privatize", "--data", f"absent {name}", *release, "more"], 2),
        (["inspect", source, "--label-column", f"label {name}", "--labels", f"{name},b"], 2),
        (["inspect", source, f"--{name}"], 2),
        (["compare", f"absent {name}", "two"], 2),
    ):
        assert main(words) == code, words
        printed = capsys.readouterr()
        assert not obeyed(printed.out), words
        assert not obeyed(printed.err.replace("\r", "\n")), words  # a progress bar returns to the start of its line
        assert "\\x1b" in printed.out + printed.err or words[0] in ("ledger",), words


def test_a_failure_of_a_model_with_its_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Run:
        raise RuntimeError(f"the model said {PLANTED}")

    monkeypatch.setattr(compare, "read_run", fail)
    assert main(["compare", "one", "two"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert not obeyed(printed)
