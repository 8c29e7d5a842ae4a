"""Ledgers and states that were damaged, edited or taken from elsewhere; and what `attack` reads besides bundles."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cli.bad_inputs.sandbox import Row, privatize

STATE = Path("owner.key.state")
LEDGER, LOCK = STATE / "ledger.json", STATE / "ledger.lock"
SHOW = ["ledger", "show", "--key=owner.key"]


def rows() -> Iterator[Row]:
    """All of this module."""
    yield Row("ledger: as it should be", SHOW, code=0)
    yield from ledger_rows()
    yield from command_rows()
    yield from attack_rows()


def ledger_rows() -> Iterator[Row]:
    """The ledger's files."""
    texts: dict[str, bytes] = {
        "empty": b"", "a list": b"[]", "null": b"null", "cut short": b'{"ledger": ', "not UTF-8": b"\xff", "deep": b"[" * 100_000, "NaN": b'{"ledger": NaN, "mac": "x"}', "no MAC": b'{"ledger": {}}',
        "a MAC that is no text": b'{"ledger": {"format": 2, "key": 1}, "mac": 3}', "half a character": b'{"ledger": {"format": 2, "key": "x"}, "mac": "\\ud800"}', "a later format": b'{"ledger": {"format": 99, "key": "x"}, "mac": "x"}',
        "a key twice": b'{"ledger": {}, "ledger": {}, "mac": "x"}', "a huge number": b'{"ledger": {"format": ' + b"9" * 5000 + b'}, "mac": "x"}', "wide": b"[" + b"1," * 1_000_000 + b"1]",
        "a format that is a list": b'{"ledger": {"format": [], "key": "x"}, "mac": "x"}', "a body that is a list": b'{"ledger": [], "mac": "x"}',
    }  # fmt: skip
    for name, text in texts.items():
        make = lambda t=text: LEDGER.write_bytes(t)  # noqa: E731
        yield Row(f"ledger: {name}", SHOW, make=make)
        yield Row(f"ledger, verify: {name}", ["ledger", "verify", "--key=owner.key"], make=make, code=1)
        yield Row(f"ledger, privatize: {name}", privatize(), make=make)

    def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
        def make() -> None:
            facts = json.loads(LEDGER.read_text())
            change(facts["ledger"])
            LEDGER.write_text(json.dumps(facts))

        return make

    for name in ("format", "key", "revision", "serial", "entries", "budgets", "max_events", "events", "labelers"):
        for value in (None, 10**12, "x", [], {}):
            if not (name in ("budgets", "max_events") and value in (None, [])):  # as it was
                yield Row(f"ledger: {name} is {value!r}", SHOW, make=edited(lambda body, n=name, v=value: body.update({n: v})))
    yield Row("ledger: a half-character MAC", SHOW, make=lambda: LEDGER.write_text(json.dumps(json.loads(LEDGER.read_text()) | {"mac": "\ud800"})))
    places: dict[str, Callable[[], Any]] = {
        "missing": LEDGER.unlink, "a folder": lambda: (LEDGER.unlink(), LEDGER.mkdir()), "a loop": lambda: (LEDGER.unlink(), os.symlink(LEDGER.name, LEDGER)), "a pipe": lambda: (LEDGER.unlink(), os.mkfifo(LEDGER, 0o600)),
        "no lock": LOCK.unlink, "a lock of letters": lambda: LOCK.write_text("many"), "a lock of a later one": lambda: LOCK.write_text(f"{99:020d}\n"), "a lock that is a folder": lambda: (LOCK.unlink(), LOCK.mkdir()),
        "no state": lambda: shutil.rmtree(STATE), "a state that is a file": lambda: (shutil.rmtree(STATE), STATE.write_text("x")), "another key's state": lambda: (shutil.rmtree(STATE), shutil.copytree("other.key.state", STATE)),
        "no events": lambda: shutil.rmtree(STATE / "events"), "events cut short": lambda: [path.write_bytes(path.read_bytes()[:-1]) for path in (STATE / "events").iterdir()],
        "events longer": lambda: [path.write_bytes(path.read_bytes() + b"x") for path in (STATE / "events").iterdir()],
    }  # fmt: skip
    for name, make in places.items():
        yield Row(f"ledger: {name}", SHOW, make=make)
        yield Row(f"ledger, privatize: {name}", privatize(epsilon=2), make=make)
    anchors: dict[str, bytes] = {
        "empty": b"", "a list": b"[]", "no revision": b'{"folder": "x"}', "deep": b"[" * 100_000, "not UTF-8": b"\xff", "a revision that is text": b'{"folder": "x", "revision": "many"}', "a later one": b'{"folder": "owner.key.state", "revision": 99}',
        "a folder that is a list": b'{"folder": [], "revision": []}', "NUL": b'{"folder": "a\\u0000b", "revision": 99}', "infinite": b'{"folder": "x", "revision": 1e999}', "over-long": b'{"folder": "' + b"x" * 5000 + b'", "revision": 99}',
    }  # fmt: skip
    for name, text in anchors.items():
        yield Row(f"anchor: {name}", SHOW, make=lambda t=text: [path.write_bytes(t) for path in Path("home/private-rlhf/ledgers").iterdir()])


def command_rows() -> Iterator[Row]:
    """`ledger init | restore | export`."""
    for value in ("nan", "inf", "-1", "x", ""):
        yield Row(f"ledger init --i-know {value!r}", ["ledger", "init", "--key=owner.key", f"--i-know={value}"], make=lambda: shutil.rmtree(STATE))
        yield Row(f"ledger restore --i-know {value!r}", ["ledger", "restore", "--key=owner.key", "--from=copy", f"--i-know={value}"], make=lambda: shutil.copytree(STATE, "copy"))
    yield Row("ledger init: there is one", ["ledger", "init", "--key=owner.key", "--i-know=0"])
    for place in ("nowhere", "", ".", "good.jsonl", "release", "other.key.state", "owner.key.state", "x" * 5000, "a\0b"):
        yield Row(f"ledger restore --from {place[:12]!r}", ["ledger", "restore", "--key=owner.key", f"--from={place}", "--i-know=0"])
    yield Row("ledger restore: a damaged copy", ["ledger", "restore", "--key=owner.key", "--from=copy", "--i-know=0"],
              make=lambda: (shutil.copytree(STATE, "copy"), Path("copy/ledger.json").write_text("{}")))
    yield Row("ledger restore: without its events", ["ledger", "restore", "--key=owner.key", "--from=copy", "--i-know=0"],
              make=lambda: (shutil.copytree(STATE, "copy"), shutil.rmtree("copy/events")))
    for place in (".", "/", "release", "good.jsonl/x", "x" * 5000, "a\0b", "", "/proc/x"):
        yield Row(f"ledger export --output {place[:12]!r}", ["ledger", "export", "--key=owner.key", f"--output={place}"])
    for key in ("nowhere.key", ".", "", "good.jsonl", "a\0b", "x" * 5000, "/dev/null"):
        for command in ("show", "verify"):
            yield Row(f"ledger {command} --key {key[:12]!r}", ["ledger", command, f"--key={key}"])


def attack_rows() -> Iterator[Row]:
    """Targets, truths and sources of `attack`."""
    truth = {"empty": b"", "no JSON": b"hello", "a list": b"[]\n", "not UTF-8": b"\xff\n", "deep": b"[" * 100_000, "numbers": b"3\n", "null": b"null\n", "half a character": b'{"id": "\\ud800", "label": 1}\n'}
    head = b'{"format": "private-rlhf canaries v1"}\n'
    truth |= {"another mapping": b"{}\n", "damaged below its header": head + b"nonsense\n"}
    for name, text in truth.items():
        yield Row(f"attack: a truth that is {name}", ["attack", "release", "--truth=t"], make=lambda t=text: (Path("t").write_bytes(t), Path("t").chmod(0o600)), says="t: must be a file of canaries")
    yield Row("attack: a truth that others can read", ["attack", "release", "--truth=t"], make=lambda: (Path("t").write_bytes(head), Path("t").chmod(0o644)), says="t: the canaries' labels can be read by others")
    for target in ("nowhere", "home", "good.jsonl", "owner.key.state", "x" * 5000, "a\0b", "/dev/null"):
        yield Row(f"attack {target[:12]!r}", ["attack", target])
    for more in (["--canaries=0"], ["--canaries=-3"], ["--canaries=9999999"], ["--epsilon=0"], ["--epsilon=nan"], ["--epsilon=x"], ["--raw=nowhere"], ["--raw=good.jsonl", "--truth=t"],
                 ["--raw=good.jsonl", "--output=release/x.json"], ["--key=nowhere.key"], ["--truth=nowhere"], ["--plant=p.jsonl"], ["--plant=p.jsonl", "--epsilon=1"], ["--output=."]):  # fmt: skip
        yield Row(f"attack {' '.join(more)}", ["attack", "release", *([] if any("canaries" in each for each in more) else ["--canaries=2"]), *more])
    yield Row("attack: nothing", ["attack"])
    for source in ("nowhere.jsonl", "release", "empty.jsonl"):
        yield Row(f"attack --plant {source}", ["attack", source, "--plant=p.jsonl", "--key=owner.key", "--canaries=2"], make=lambda: Path("empty.jsonl").write_text(""))
    for place in ("good.jsonl", "release", "good.jsonl/x", "x" * 5000):
        yield Row(f"attack --plant={place[:12]}", ["attack", "good.jsonl", f"--plant={place}", "--key=owner.key", "--canaries=2"])
