"""Runs one command on one bad input in a folder of its own, and says what came of it.

The folder holds a key with a ledger, good data, a release, a recipe and a store of local draws. Whatever a row makes
there is made before the command; then every byte, mode, name and link of the folder is compared, the key's state and
the user's own folder among them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from private_rlhf import cli

SECRET = "unspeakable"
"""In every text of the good data: a refusal repeats none of them."""
SECRETS = (SECRET, "00010203", "5a3c5a3c")
"""These, and the keys in `commands.key_rows`."""
ROWS = [{"prompt": f"{SECRET} prompt {i}", "chosen": f"{SECRET} yes {i}", "rejected": f"{SECRET} no {i}"}
        for i in range(8)]  # fmt: skip
KINDS = ("refused", "accepted legally", "said", "traceback", "hang", "hog", "silent damage", "wrong answer")
SOUND = frozenset(KINDS[:3])
"""Others are defects. `said`: exit code 1 with its reason, for a verdict (a leak, a damaged ledger)."""
COMMAND_LINE = cli.command_line
COMMAND: Any = COMMAND_LINE()
"""The same commands, put together once and not for each row."""
SECONDS, MEMORY_MIB = 8.0, 400
RELEASED = ("out", "home/", "owner.key.state/")
"""What a command that is right to accept its input may change."""


def nothing() -> None:
    """Makes nothing."""


@dataclass(frozen=True)
class Row:
    """One input. make: puts it into the current folder. code: the right exit code. says: in the one line, or on stdout.
    may_change: beginnings of names that may change; nothing may where the input is refused."""

    name: str
    command: list[str]
    make: Callable[[], Any] = nothing
    code: int = 2
    says: str = ""
    stdin: bytes = b""
    may_change: tuple[str, ...] = ()
    slow: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a row; `said`: its line, or what was wrong."""

    row: Row
    kind: str
    said: str
    seconds: float


class Hang(BaseException):
    """Raised by the alarm."""


@dataclass
class Sandbox:
    """The folder; `run` leaves it as it was."""

    root: Path
    _before: dict[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """The current folder of the commands."""
        return self.root / "work"

    def fill(self) -> None:
        """Make what every row may use, and remember it."""
        self.work.mkdir(parents=True)
        with self._inside():
            lines("good.jsonl", ROWS)
            Path("tiny.yaml").write_text(RECIPE)
            for command in SETUP:
                assert cli.main(command) == 0, command
            assert cli.main(["run", "--config=tiny.yaml", "--run-dir=r", "--dry-run"]) == 0  # loads PyTorch, in seconds
        shutil.copytree(self.work, self.root / "template", symlinks=True)
        self._before = contents(self.work)

    def run(self, row: Row) -> Outcome:
        """The outcome of one row."""
        with self._inside():
            row.make()
            before = contents(self.work) if row.make is not nothing else self._before
            began = time.monotonic()
            code, out, err, trace, peak = call(row)
            seconds = time.monotonic() - began
            after = contents(self.work)
        if after != self._before:
            self._restore()
        secrets = (*SECRETS, (self.root / "template" / "owner.key").read_text().split()[-1])
        kind, said = judge(row, code, out, err, trace, changes(before, after), secrets)
        if kind in SOUND and seconds > SECONDS:
            kind = "hang"
        if kind in SOUND and peak > MEMORY_MIB:
            kind, said = "hog", f"{peak} MiB"
        return Outcome(row, kind, said, seconds)

    def _restore(self) -> None:
        for path in self.work.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(self.work)
        shutil.copytree(self.root / "template", self.work, symlinks=True)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        here, home = Path.cwd(), os.environ.get("XDG_STATE_HOME")
        os.chdir(self.work)
        os.environ["XDG_STATE_HOME"] = str(self.work / "home")
        try:
            yield
        finally:
            os.chdir(here)
            os.environ.pop("XDG_STATE_HOME")
            if home is not None:
                os.environ["XDG_STATE_HOME"] = home


def call(row: Row) -> tuple[int | None, str, str, str, int]:
    """Exit code (None: it did not end), stdout, stderr, traceback, and MiB that it took at most."""
    def alarm(number: int, frame: FrameType | None) -> None:
        raise Hang

    out, err, trace, code = io.StringIO(), io.StringIO(), "", None
    before = _memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    previous = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
    faulthandler.dump_traceback_later(10 * SECONDS, exit=True)  # where no signal is heard
    try:
        shown = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with warnings.catch_warnings(), _descriptors(row.stdin) as written, shown[0], shown[1]:
            warnings.simplefilter("ignore")  # of libraries, once in a process
            cli.command_line = lambda: COMMAND
            code = cli.main(row.command)
    except Hang:
        trace = "hang"
    except BaseException:
        trace = traceback.format_exc()
    finally:
        cli.command_line = COMMAND_LINE
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return code, out.getvalue() + written(), err.getvalue(), trace, (_memory("VmHWM") - before) >> 10


@contextlib.contextmanager
def _descriptors(stdin: bytes) -> Iterator[Callable[[], str]]:
    """Standard input and output as the system knows them; gives what was written."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
        source.write(stdin)
        source.seek(0)
        kept = os.dup(0), os.dup(1)
        os.dup2(source.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        text: list[str] = []
        try:
            yield lambda: text[0] if text else ""
        finally:
            for number, descriptor in enumerate(kept):
                os.dup2(descriptor, number)
                os.close(descriptor)
            sink.seek(0)
            text.append(sink.read().decode(errors="replace"))


def _memory(name: str) -> int:
    """KiB; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def judge(
    row: Row, code: int | None, out: str, err: str, trace: str, changed: list[str], secrets: tuple[str, ...] = SECRETS
) -> tuple[str, str]:
    """(kind, what was said or what was wrong)."""
    if trace:
        return ("hang", "") if trace == "hang" else ("traceback", trace[-400:])
    said = [line for line in err.splitlines() if line.startswith("private-rlhf: ")]
    noise = [line for line in err.splitlines() if not line.startswith(("private-rlhf: ", "[private-rlhf] "))]
    if "Traceback (most recent call last)" in err:
        return "traceback", err[-400:]
    odd = [name for name in changed if not name.startswith(row.may_change)] if row.may_change else changed
    if odd:
        return "silent damage", f"exit code {code}, changed {odd[:5]}"
    if code != row.code:
        return "wrong answer", f"exit code {code}, not {row.code}: {err[-300:]}"
    if row.code == 2 and row.command[0] != "label-filter" and (len(said) != 1 or noise):
        return "wrong answer", f"not one line: {err[-300:]}"
    if row.code == 2 and any(secret in out + err for secret in secrets):
        return "wrong answer", f"repeats a secret: {(out + err)[-300:]}"
    if not all(character.isprintable() for line in said for character in line):
        return "wrong answer", "unprintable"
    if row.says not in err + out:
        return "wrong answer", f"does not say {row.says!r}: {(err + out)[-300:]}"
    return {2: "refused", 1: "said"}.get(row.code, "accepted legally"), (said or [""])[0]


def contents(folder: Path) -> dict[str, str]:
    """Name -> kind, mode and content of everything below a folder."""
    found = {}
    for home, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(home, name)
            info = path.lstat()
            what = f"{stat.filemode(info.st_mode)} "
            if path.is_symlink():
                what += str(path.readlink())
            elif stat.S_ISREG(info.st_mode) and info.st_size < 32 << 20:
                what += hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = what
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names that came, went or are another."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def lines(name: str, rows: list[Any]) -> None:
    """A file of JSON lines."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def option(command: str, given: dict[str, Any], changed: dict[str, Any]) -> list[str]:
    """A command with options; one of value None is left out."""
    options = {**given, **{name.replace("_", "-"): value for name, value in changed.items()}}
    given = {name: value for name, value in options.items() if value is not None}
    return [*command.split(), *(f"--{name}={value}" for name, value in given.items())]


def privatize(**changed: Any) -> list[str]:
    """`privatize` on the good data, with options changed."""
    return option("privatize", {"data": "good.jsonl", "output": "out", "epsilon": 1, "key": "owner.key"}, changed)


RECIPE = """\
name: tiny
evaluation_labels: public
model: {source: tiny, dtype: float32, max_prompt_tokens: 96, max_response_tokens: 12, cache_dir: cache}
data: {preferences: embedded, public_labels: true, limit: 200}
privatize: {epsilon: 2.0, key_file: owner.key}
sft: {max_steps: 12, batch_size: 8}
reward: {num_components: 16}
ppo: {iterations: 6, rollouts: 8, minibatch_size: 4, reference_samples: 4}
evaluate: {num_prompts: 24, gibbs_candidates: 8, max_pairs: 32}
"""
SETUP: list[list[str]] = [
    ["keygen", "--output", "owner.key"],
    ["keygen", "--output", "other.key"],
    privatize(output="release", epsilon=0.5),
]
