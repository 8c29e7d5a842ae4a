"""Options and keys of `keygen`, `privatize` and the commands that read no data of their own."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cli.bad_inputs.sandbox import RELEASED, ROWS, Row, lines, option, privatize

COUNTED = ("owner.key.state/ledger.", "home/")
"""The ledger's revision rises where a release was planned and refused; nothing else of it changes."""
LONG = "x" * 5000
HEX = "5a3c" * 16
KEY = "private-rlhf key v1\n"
GOOD = bytes(range(32)).hex()


def rows() -> Iterator[Row]:
    """All of this module."""
    yield from keygen_rows()
    yield from option_rows()
    yield from key_rows()
    yield from output_rows()
    yield from other_commands()
    yield from account_rows()


def keygen_rows() -> Iterator[Row]:
    """Where no key can be made."""
    places = {
        "exists": "owner.key", "the current folder": ".", "the folder above": "..", "the root": "/", "nothing": "",
        "a folder": "release", "below a file": "good.jsonl/x.key", "over-long": LONG, "over-long part": f"a/{'y' * 256}",
        "in /proc": "/proc/nowhere/x.key", "in /dev/null": "/dev/null/x.key", "a device": "/dev/null",
        "a state of another": "lost.key", "NUL": "a\0b", "half a character": "a\udc80b",
    }  # fmt: skip
    legal = {"half a character"}
    for name, place in places.items():
        command = ["keygen", f"--output={place}"]
        if name in legal:
            yield Row(f"keygen: {name}", command, code=0, may_change=("a", "home/"))
        else:
            yield Row(f"keygen: {name}", command, make=lambda: Path("lost.key.state").mkdir())
    for name, target in (("a link to nowhere", "nowhere"), ("a link to a key", "owner.key"), ("a loop", "link.key")):
        yield Row(f"keygen: {name}", ["keygen", "--output=link.key"], make=lambda t=target: os.symlink(t, "link.key"))
    yield Row("keygen: no output", ["keygen"], code=0, may_change=("home/",))
    yield Row("keygen: an option it lacks", ["keygen", "--outptu=x"])
    yield Row("keygen: an argument", ["keygen", "x.key"])
    yield Row("keygen: a new folder", ["keygen", "--output=new/deep/x.key"], code=0, may_change=("new", "home/"))


def option_rows() -> Iterator[Row]:
    """Values of single options of `privatize`."""
    epsilons = ("nan", "-nan", "inf", "-inf", "1e400", "0", "-0.0", "1e-400", "-1", "one", "", " ", "1,5", "0x1", "1_0", "1_0_", "١٢x")
    for value in epsilons:
        yield Row(f"privatize --epsilon {value!r}", privatize(epsilon=value))
    for value in ("1e-300", "5e-324", "745", "1.7e308"):
        yield Row(f"privatize --epsilon {value!r}", privatize(epsilon=value), code=0, may_change=RELEASED)
    for value in ("0", "-1", "65", "1_0", "100000000000000000000", "1.5", "many", "", "nan", "٣x"):
        yield Row(f"privatize --workers {value!r}", privatize(workers=value))
    for value in ("nan", "inf", "0", "-1", "much", "", "0.5", "1e-300"):
        yield Row(f"privatize --budget {value!r}", privatize(budget=value))
    for value in ("person", "each", "", "Event"):
        yield Row(f"privatize --budget-per {value!r}", privatize(budget=5, budget_per=value), may_change=COUNTED)
    yield Row("privatize --budget-per alone", privatize(budget_per="event"))
    for value in ("0", "-3", "1.5", "x", ""):
        yield Row(f"privatize --max-events-per-person {value!r}", privatize(max_events_per_person=value))
    for name in ("labeler-column", "event-column", "corrects-column", "columns", "label-column"):
        for value in ("absent", LONG, "\x1b[2J", "prompt,", "chosen", "a\nb"):
            yield Row(f"privatize --{name} {value[:9]!r}, {len(value)} characters", privatize(**{name: value}))
    for value in ("", " ", ",", "prompt", "record_id", "chosen,rejected", "a,a"):
        if value.strip(", "):
            yield Row(f"privatize --columns {value!r}", privatize(columns=value))
    for value in ("", "A", "A,A", "A,B,C", ",", "1,true", "1,1.0"):
        made = [{"prompt": "p", "response_a": "a", "response_b": "b", "y": "A"}]
        yield Row(f"privatize --labels {value!r}", privatize(data="l.jsonl", label_column="y", labels=value),
                  make=lambda m=made: lines("l.jsonl", m))
    yield Row("privatize --labels without a column", privatize(labels="A,B"))
    yield Row("privatize --label-column without labels", privatize(label_column="y"))
    for value in ("nosuch", "", "../x", LONG, "\0"):
        yield Row(f"privatize --split {value[:9]!r}, {len(value)} characters", privatize(split=value))
    for value in ("", " ", "x" * 201, "a\nb", "\x1b[31m", "a\u202eb", "\x9b", "\t", "\0"):
        yield Row(f"privatize --source {value[:9]!r}, {len(value)} characters", privatize(source=value))
    for value in ("hh", "日本語", "a | b <i>", "x" * 200):
        yield Row(f"privatize --source {value[:9]!r}, {len(value)} characters", privatize(source=value), code=0, may_change=RELEASED)
    for name in ("data", "output", "epsilon", "key"):
        yield Row(f"privatize without --{name}", privatize(**{name: None}))
    yield Row("privatize: doubled option", [*privatize(), "--epsilon=3"], code=0, may_change=RELEASED)
    yield Row("privatize: an option it lacks", [*privatize(), "--epsilom=3"])
    yield Row("privatize: a setting without a recipe", [*privatize(), "privatize.epsilon=3"])
    yield Row("privatize: --run-dir without a recipe", [*privatize(), "--run-dir=r"])
    yield Row("privatize: --accept-code without a recipe", [*privatize(), "--accept-code"], says="--accept-code")


def key_rows() -> Iterator[Row]:
    """What is no key file."""

    def made(content: bytes, mode: int = 0o600) -> None:
        path = Path("bad.key")
        path.write_bytes(content)
        path.chmod(mode)
        Path("bad.key.state").mkdir()

    contents = {
        "empty": b"", "a line break": b"\n", "header alone": KEY.encode(), "too short": f"{KEY}{GOOD[:-2]}\n".encode(),
        "too long": f"{KEY}{GOOD}00\n".encode(), "half a byte": f"{KEY}{GOOD[:-1]}\n".encode(),
        "no hex": f"{KEY}{GOOD[:-1]}g\n".encode(), "zeros": f"{KEY}{'0' * 64}\n".encode(),
        "ones": f"{KEY}{'f' * 64}\n".encode(), "a pattern": f"{KEY}{HEX}\n".encode(),
        "another version": f"private-rlhf key v2\n{GOOD}\n".encode(), "no header": f"{GOOD}\n".encode(),
        "twice": f"{KEY}{GOOD}\n{GOOD}\n".encode(), "UTF-16": f"{KEY}{GOOD}\n".encode("utf-16"),
        "bytes": bytes(range(256)), "a megabyte": b"\xff" * (1 << 20), "digits of another script": f"{KEY}{'٣' * 64}".encode(),
        "NUL": f"{KEY}{GOOD}\0\n".encode(), "JSON": b"{}", "PEM": b"-----BEGIN PRIVATE KEY-----\nAAAA\n",
    }  # fmt: skip
    for name, content in contents.items():
        yield Row(f"key: {name}", privatize(key="bad.key"), make=lambda c=content: made(c), says="restore it from a backup")
    for mode in (0o640, 0o604, 0o660, 0o666, 0o777, 0o601):
        yield Row(f"key: mode {mode:o}", privatize(), make=lambda m=mode: Path("owner.key").chmod(m))
    yield Row("key: 2 GiB of nothing", privatize(key="bad.key"), make=sparse)
    for place in (".", "/dev/null", "/dev/zero", "release", "good.jsonl/x", "nowhere.key", "", LONG, "a\0b"):
        yield Row(f"key: {place[:9]!r}, {len(place)} characters", privatize(key=place))
    yield Row("key: a copy without its state", privatize(key="copy.key"), make=copied)
    yield Row("key: a copy with its state", privatize(key="copy.key"), make=lambda: copied(state=True))
    yield Row("key: a pipe", privatize(key="pipe"), make=lambda: os.mkfifo("pipe", 0o600))
    yield Row("key: a loop of links", privatize(key="loop"), make=lambda: os.symlink("loop", "loop"))


def sparse() -> None:
    """A file that is all hole."""
    with open("bad.key", "wb") as file:
        file.truncate(2 << 30)
    Path("bad.key").chmod(0o600)


def copied(state: bool = False) -> None:
    """The owner's key under another name."""
    import shutil

    shutil.copy2("owner.key", "copy.key")
    if state:
        shutil.copytree("owner.key.state", "copy.key.state")


def output_rows() -> Iterator[Row]:
    """Where no release can be put."""

    def full(name: str) -> None:
        Path(name).mkdir(parents=True)
        Path(name, "letter.txt").write_text("Dear all,")

    places = {
        "the current folder": ".", "the folder above": "..", "the root": "/", "nothing": "", "a file": "good.jsonl",
        "below a file": "good.jsonl/out", "the key": "owner.key", "the state": "owner.key.state",
        "in the state": "owner.key.state/out", "in its events": "owner.key.state/events/out",
        "another release": "release", "over-long": "y" * 201, "over-long for the system": "y" * 300, "far too long": LONG,
        "a mount point": "/proc", "in /proc": "/proc/out", "a device": "/dev/null", "trailing dots": "out/..", "dots to the state": "release/../owner.key.state/y", "below the key": "owner.key/x",
        "over-long letters": "é" * 101, "a thousand folders": "a/" * 2100,
        "NUL": "a\0b", "full": "full",
    }  # fmt: skip
    for name, place in places.items():
        yield Row(f"output: {name}", privatize(output=place), make=lambda: full("full"))
    for name, target in (("a link to a folder", "full"), ("a link to nowhere", "nowhere"), ("a loop", "link")):
        yield Row(f"output: {name}", privatize(output="link"), make=lambda t=target: (full("full"), os.symlink(t, "link")))
        yield Row(f"output: {name}, as a folder", privatize(output="link/"), make=lambda t=target: (full("full"), os.symlink(t, "link")))
    yield Row("output: a linked work folder", privatize(),
              make=lambda: (full("full"), os.symlink("full", ".out.work")))
    yield Row("output: a file as work folder", privatize(), make=lambda: Path(".out.work").write_text("mine"))
    yield Row("output: a pipe as work folder", privatize(), make=lambda: os.mkfifo(".out.work"))
    yield Row("output: a lock that is a link", privatize(),
              make=lambda: (Path(".out.work").mkdir(0o700), os.symlink("../good.jsonl", ".out.work/lock")))
    yield Row("output: where every user may write", privatize(output="open/out"),
              make=lambda: (Path("open").mkdir(), Path("open").chmod(0o777)))
    yield Row("output: where every user may write his own", privatize(output="open/out"), code=0, may_change=("open", *RELEASED),
              make=lambda: (Path("open").mkdir(), Path("open").chmod(0o1777)))
    yield Row("output: an empty folder", privatize(), make=lambda: Path("out").mkdir(), code=0, may_change=RELEASED)
    yield Row("output: new folders", privatize(output="out/a/b"), code=0, may_change=RELEASED)
    yield Row("output: half a character", privatize(output="out\udc80"))


def other_commands() -> Iterator[Row]:
    """Commands of which a word is wrong."""
    recipe = "--config=tiny.yaml"
    wrong: dict[str, list[str]] = {
        "no such command": ["walk"], "no command of ledger": ["ledger", "walk"], "ledger without a key": ["ledger", "show"],
        "run without a recipe": ["run"], "run: no such recipe": ["run", "--config=nowhere.yaml"],
        "run: no such shipped recipe": ["run", "--config=nowhere"], "run: a folder": ["run", "--config=release"],
        "run: over-long": ["run", f"--config={LONG}"], "run: NUL": ["run", "--config=a\0b.yaml"],
        "run: /dev/zero": ["run", "--config=/dev/zero"], "run: no such option": ["run", recipe, "--colour"],
        "run: no such stage": ["run", recipe, "--only=rewrad"], "run: no stage": ["run", recipe, "--from="],
        "run: both": ["run", recipe, "--from=sft", "--only=ppo"], "run: an absent stage": ["run", recipe, "--only=dpo"],
        "run: before its input": ["run", recipe, "--only=ppo"], "run: run-dir is a file": ["run", recipe, "--run-dir=good.jsonl"],
        "run: run-dir below a file": ["run", recipe, "--run-dir=good.jsonl/x"],
        "run: run-dir of something else": ["run", recipe, "--run-dir=release"],
        "run: over-long run-dir": ["run", recipe, f"--run-dir={LONG}"], "run: NUL run-dir": ["run", recipe, "--run-dir=a\0b"],
        "run: key inside": ["run", recipe, "--run-dir=r", "privatize.key_file=r/owner.key"],
        "print-config: no recipe": ["print-config"], "stages: no recipe": ["stages", "--config=x.yaml"],
        "privatize: a recipe and options": ["privatize", recipe, "--epsilon=3"],
        "evaluate: options missing": ["evaluate", "--policy=release"],
        "evaluate: no such checkpoint": ["evaluate", "--policy=no/where/x", "--reference=b", "--prompts=embedded", "--judge=truth"],
        "evaluate: a folder that is none": ["evaluate", "--policy=release", "--reference=release", "--prompts=embedded", "--judge=truth"],
        "evaluate: temperature": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=truth", "--temperature=nan"],
        "evaluate: judge": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=truths"],
        "evaluate: judge without target": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=rm:"],
        "evaluate: judge on http": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=openai:http://x/v1"],
        "evaluate: judge with a password": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=openai:https://u:p@x/v1"],
        "evaluate: judge, no host": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=openai:https:///v1"],
        "evaluate: judge, bad port": ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=openai:https://x:99999/v1"],
        "evaluate: a recipe and options": ["evaluate", recipe, "--policy=a"],
        "sample: no such checkpoint": ["sample", "--policy=no/where/x", "Hello"], "sample: no prompt": ["sample", "--policy=a"],
        "sample: count": ["sample", "--policy=a", "--count=0", "Hello"],
        "sample: a folder that is none": ["sample", "--policy=release", "Hello"],
        "validate: no such module": ["validate", "walk"], "validate: a path": ["validate", "../../x"],
        "plan: a model elsewhere": ["plan", recipe, "model.source=owner/model"], "plan: gpus alone": ["plan", recipe, "--gpus=2"], "plan: no gpus": ["plan", recipe, "--gpus=0", "--gpu-memory=80"],
        "plan: memory": ["plan", recipe, "--gpus=1", "--gpu-memory=nan"], "plan: sharded": ["plan", recipe, "--sharded"],
        "plan: memory that nothing fits": ["plan", recipe, "--gpus=1", "--gpu-memory=-5"],
        "plan: memory without end": ["plan", recipe, "--gpus=1", "--gpu-memory=inf", "--json=F"],
        "design: --kl-coef": ["design", "--people=9", "--answers=2", "--epsilon=1", "--kl-coef=inf"],
        "account person: no information": ["account", "person", "--budget=1e-310", "--questions=5"],
        "label-filter: a field twice": ["label-filter", "--epsilon=1", "--store=new.db", "--keep=label"],
        "plan: no such model": ["plan", recipe, "--no-calibration", "--model-config=nowhere.json"],
        "plan: a model that is none": ["plan", recipe, "--no-calibration", "--model-config=good.jsonl"],
        "verify-release: nothing": ["verify-release"], "verify-release: no bundle": ["verify-release", "nowhere"],
        "verify-release: a file": ["verify-release", "good.jsonl"], "verify-release: signer": ["verify-release", "release", "--signer=me"],
        "verify-release: another signer": ["verify-release", "release", f"--signer={'0' * 64}"],
        "verify-run: no recipe": ["verify-run"], "verify-run: laplace": ["verify-run", recipe, "evaluation_labels=laplace"],
        "verify-run: infinite": ["verify-run", recipe, "privatize.epsilon=.inf"],
        "verify-run: a folder of something else": ["verify-run", recipe, "--folder=release"],
        "verify-run: a file": ["verify-run", recipe, "--folder=good.jsonl"],
    }  # fmt: skip
    for name, command in wrong.items():
        yield Row(name, command)
    yield Row("privatize: a recipe and a zero", ["privatize", recipe, "--budget=0"], says="--budget")
    for more in ("--limit=0", "--limit=-2", "--seed=-3", "--data=good.jsonl", "--accept-code"):
        command = ["evaluate", "--policy=a", "--reference=b", "--prompts=c", "--judge=truth", more]
        yield Row(f"evaluate {more}", command, says=more.partition("=")[0])


def account_rows() -> Iterator[Row]:
    """Accountants outside their assumptions."""
    kinds = {
        "account randomized-response": {"epsilon": 1, "labels-per-person": 10},
    }
    for command, given in kinds.items():
        yield Row(f"{command}: as it should be", option(command, given, {}), code=0)
        for name in given:
            yield Row(f"{command} without --{name}", option(command, given, {name: None}))
            for value in ("nan", "inf", "-1", "x"):
                if value != "x":
                    yield Row(f"{command} --{name} {value}", option(command, given, {name: value}))


assert len(ROWS) == 8
