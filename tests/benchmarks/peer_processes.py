"""Loops that are compared: each in a process of its own, started once, then told to do one iteration at a time in turn.

So peak memory is that of one loop, and a machine that slows down for a minute slows all of them. Standard library only:
`trl_ppo_loop.py` imports this from another environment. A loop says a line `@ {json}` on its standard output once it is
ready and after each iteration; other lines are not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

MARK = "@ "
Measured = dict[str, Any]
"""What one iteration says: `seconds` by phase, `tokens` or `pairs`, `peak_rss_mib`, and `other_cpus` (see `Loop`)."""

# --- in the loop's process --------------------------------------------------------------------------------------------


def say(message: Mapping[str, Any]) -> None:
    """One line to the process that compares."""
    print(MARK + json.dumps(message), flush=True)


def wait_for_turn() -> bool:
    """Waits for the next iteration; False when there is none. Peak memory is counted from here."""
    if not sys.stdin.readline():
        return False
    with contextlib.suppress(OSError):  # not allowed: the peak is then that since the start
        Path("/proc/self/clear_refs").write_text("5")
    return True


def peak_rss_mib() -> float:
    """Peak resident memory since `wait_for_turn`, MiB.

    Read from /proc, as getrusage also counts the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: this benchmark needs Linux")


def serve(iterate: Callable[[int], Measured], facts: Mapping[str, Any]) -> None:
    """Does iterations in turn until there is none; `facts` (trainable parameters, say) are told first."""
    say(facts)
    number = 0
    while wait_for_turn():
        say({**iterate(number), "peak_rss_mib": peak_rss_mib()})
        number += 1


# --- in the process that compares -------------------------------------------------------------------------------------


class Loop:
    """A started loop. `other_cpus` of an iteration is the mean number of CPUs that other processes kept busy."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the loop
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.facts = self._hear()

    def step(self) -> Measured:
        """One iteration."""
        started, busy, own = time.monotonic(), busy_seconds(), cpu_seconds(self.process.pid)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("next\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        said = self._hear()
        others = busy_seconds() - busy - (cpu_seconds(self.process.pid) - own)
        return {**said, "other_cpus": max(0.0, others / (time.monotonic() - started))}

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(60)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                heard: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return heard
        return self._fail()

    def _fail(self) -> dict[str, Any]:
        self.process.wait()
        self.errors.seek(0)
        sys.exit(f"{self.errors.read()[-4000:]}\nthe loop '{self.name}' ended with {self.process.returncode}")


def busy_seconds() -> float:
    """CPU seconds of all processes since the machine started (user, nice, system, interrupts)."""
    counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(counts[:3]) + sum(counts[5:7])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU seconds of one process; 0 once it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def in_turn(commands: Mapping[str, Sequence[str]], iterations: int, warmup: int) -> dict[str, dict[str, Any]]:
    """Runs `warmup + iterations` rounds of all loops, each round starting with the next one.

    Returns:
        by loop: `facts`, `warmup` and `iterations`, the last two lists of what was measured.
    """
    loops: list[Loop] = []
    try:
        loops += [Loop(name, command) for name, command in commands.items()]
        heard: dict[str, list[Measured]] = {loop.name: [] for loop in loops}
        for turn in range(warmup + iterations):
            for loop in loops[turn % len(loops) :] + loops[: turn % len(loops)]:
                heard[loop.name].append(loop.step())
                shown = f"{sum(heard[loop.name][-1]['seconds'].values()):.2f} s"
                print(f"  round {turn + 1}, {loop.name}: {shown}", file=sys.stderr, flush=True)
    finally:
        for loop in loops:
            loop.close()
    return {
        loop.name: {
            "facts": loop.facts,
            "warmup": heard[loop.name][:warmup],
            "iterations": heard[loop.name][warmup:],
        }
        for loop in loops
    }


def spread(values: Sequence[float], digits: int = 2) -> str:
    """median [min-max]."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, rule, *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes all that was measured, when asked."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
