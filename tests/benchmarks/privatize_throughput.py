"""Rows per second and peak memory of `private-rlhf privatize` against the reference way, on generated pairs.

The reference is one process that reads all JSONL rows into a list, seeds `random.Random(f"{seed}-{id}")` for every
row, flips, and writes gzip JSONL with the default level. Both run as processes of their own on the same file, in turns;
memory is the largest sum of resident memory over a process and all that it started, sampled 20 times a second. CPU
seconds are user and system time of a process and all that it started: on a machine that others use, compare those.
With --peers, an interpreter that has them, DuckDB and Polars do the plain job too: the same file with seeded flips, no
key, ledger, ids, order or duplicates, written as gzip JSONL and as Parquet. Rows are drawn from a fixed seed: `long`
ones hold as much text as HH-RLHF's pairs (about 1.2 kB), `short` ones a few words. With --kill each release is made
once more, killed at three random points and resumed: the files must be the same and the ledger must hold one entry.

Run:  python tests/benchmarks/privatize_throughput.py [--rows 100000 1000000] [--kinds long short] [--no-reference]
      [--rounds 3] [--peers VENV/bin/python]   (pip install duckdb polars, in an environment of their own)
      (10^7 rows: --rows 10000000 --kinds long --no-reference --kill; needs about 40 GB of disk)
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REFERENCE = """
import gzip, json, math, random, sys
data, output, epsilon, seed = sys.argv[1], sys.argv[2], float(sys.argv[3]), 0
keep = 1 / (1 + math.exp(-epsilon))
with open(data, encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
for number, row in enumerate(rows):
    if random.Random(f"{seed}-{number}").random() > keep:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
with gzip.open(output, "wt", encoding="utf-8") as file:
    for row in rows:
        file.write(json.dumps(row) + "\\n")
"""
DUCKDB = """
import duckdb, math, sys
data, output, epsilon, kind = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
keep = 1 / (1 + math.exp(-epsilon))
rows = f"(SELECT *, random() > {keep} AS flip FROM read_json('{data}', format = 'newline_delimited'))"
pair = (("chosen", "rejected"), ("rejected", "chosen"))
flipped = ", ".join(f"CASE WHEN flip THEN {b} ELSE {a} END AS {a}" for a, b in pair)
form = "FORMAT JSON, COMPRESSION GZIP" if kind == "gzip" else "FORMAT PARQUET"
duckdb.sql("SELECT setseed(0.5)")
duckdb.sql(f"COPY (SELECT prompt, {flipped} FROM {rows}) TO '{output}' ({form})")
"""
POLARS = """
import gzip, math, sys, polars as pl
data, output, epsilon, kind = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
keep = 1 / (1 + math.exp(-epsilon))
frame = pl.read_ndjson(data).with_columns(flip=pl.int_range(pl.len()).hash(0).cast(pl.Float64) / 2**64 > keep)
pair = [pl.when("flip").then(b).otherwise(a).alias(a) for a, b in (("chosen", "rejected"), ("rejected", "chosen"))]
frame = frame.select("prompt", *pair)
if kind == "gzip":
    with gzip.open(output, "wb", 6) as file:
        frame.write_ndjson(file)
else:
    frame.write_parquet(output)
"""
WORDS = {"long": (60, 70, 70), "short": (6, 4, 4)}  # in prompt and responses, on average


def generate(path: Path, rows: int, kind: str) -> None:
    """A JSONL file of explicit pairs; words with the frequencies of a natural text (Zipf), all pairs different."""
    source = random.Random(kind)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(source.choices(letters, range(26, 0, -1), k=source.randint(1, 9))) for _ in range(20_000)]
    pool = source.choices(words, [1 / (rank + 1) for rank in range(len(words))], k=400_000)

    def text(mean: int) -> str:
        count = source.randint(max(1, mean // 3), 2 * mean - mean // 3)
        start = source.randrange(len(pool) - count)
        return " ".join(pool[start : start + count])

    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            prompt, chosen, rejected = map(text, WORDS[kind])
            row = {"prompt": f"{number} {prompt}", "chosen": chosen + ".", "rejected": rejected + "!"}
            file.write(json.dumps(row) + "\n")


def measured(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak resident MiB of the process tree). Exits if the command fails."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _tree_memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{command[:4]} failed with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.monotonic() - start, cpu, peak


def contenders(arguments: argparse.Namespace, data: Path, folder: Path) -> dict[str, list[str]]:
    """The plain jobs, by name."""
    jobs = {}
    if not arguments.no_reference:
        jobs["reference"] = [sys.executable, "-c", REFERENCE, str(data), str(folder / "plain.gz"), arguments.epsilon]
    for name, program in (("DuckDB", DUCKDB), ("Polars", POLARS)) if arguments.peers else ():
        for kind in ("gzip", "Parquet"):
            place = str(folder / f"{name}.{kind}")
            jobs[f"{name} {kind}"] = [arguments.peers, "-c", program, str(data), place, arguments.epsilon, kind]
    return jobs


def in_turns(ours: Callable[[], list[str]], jobs: dict[str, list[str]], rows: int, rounds: int) -> float:
    """Measure everything `rounds` times in turns and print medians; returns the seconds of the release."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("private-rlhf", *jobs)}
    for _ in range(rounds):
        for name in taken:
            taken[name].append(measured(jobs.get(name) or ours()))
    middle = {name: [statistics.median(values) for values in zip(*runs, strict=True)] for name, runs in taken.items()}
    seconds, cpu, _ = middle["private-rlhf"]
    for name, (wall, spent, peak) in middle.items():
        print(
            f"  {name:<15} {rows / wall:9.0f} rows/s {wall:8.1f} s {spent:8.1f} CPU s  peak {peak:7.0f} MiB"
            f"  x {wall / seconds:5.1f} wall {spent / cpu:5.1f} CPU",
            flush=True,
        )
    return seconds


def _tree_memory(root: int) -> float:
    """Resident MiB of a process and its descendants, from /proc: a few small files, so that looking costs nothing."""
    pages, waiting = 0, [root]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            pages += int((folder / "statm").read_text().split()[1])
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def killed_and_resumed(command: list[str], output: Path, whole: Path, seconds: float) -> str:
    """Kills the release to `output` (with its workers) at three random points and runs it to its end; says whether its
    files are those of `whole`, which took `seconds`."""
    points = sorted(random.Random().uniform(0.1, 0.9) * seconds for _ in range(3))
    for point in points:  # a later run starts from what the earlier ones left, so it may end before its point
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(point)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = sorted(path.name for path in whole.iterdir())
    same = names == sorted(path.name for path in output.iterdir())
    same = same and not any(filecmp.cmpfiles(whole, output, names, shallow=False)[1:])
    return f"killed at {', '.join(f'{point:.1f} s' for point in points)}: {'the same bytes' if same else 'DIFFERS'}"


def entries(program: list[str], key: Path) -> int:
    """How many releases the key's ledger holds."""
    shown = subprocess.run([*program, "ledger", "show", "--json", "--key", str(key)], check=True, capture_output=True)
    return len(json.loads(shown.stdout)["releases"])


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", choices=sorted(WORDS), default=["long", "short"])
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--epsilon", default="0.5")
    parser.add_argument("--workers", default=None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", help="an interpreter with duckdb and polars")
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
    program = [sys.executable, "-m", "private_rlhf.cli"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "keys")  # not the user's own: each release has a new key
        for kind in arguments.kinds:
            for rows in arguments.rows:
                data = folder / f"{kind}-{rows}.jsonl"
                generate(data, rows, kind)
                print(f"{kind} {rows} rows, {data.stat().st_size / rows:.0f} bytes each", flush=True)
                key, output = folder / f"{kind}-{rows}.key", folder / f"{kind}-{rows}"
                command = ["privatize", "--data", str(data), "--output", str(output), "--key", str(key)]
                command += ["--epsilon", arguments.epsilon]
                command += ["--workers", arguments.workers] if arguments.workers else []

                def afresh(key: Path = key, output: Path = output, command: Sequence[str] = command) -> list[str]:
                    """The release under a new key: a second one under the same key writes nothing."""
                    for path in (output, key.with_name(f"{key.name}.state"), folder / "keys"):
                        shutil.rmtree(path, ignore_errors=True)
                    key.unlink(missing_ok=True)
                    made = [*program, "keygen", "--output", str(key)]
                    subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    return [*program, *command]

                seconds = in_turns(afresh, contenders(arguments, data, folder), rows, arguments.rounds)
                if arguments.kill:
                    copy, again = folder / "copy.key", folder / "again"  # a ledger of its own, as on another machine
                    os.environ["XDG_STATE_HOME"] = str(folder / "user")
                    shutil.copy(key, copy)
                    subprocess.run([*program, "ledger", "init", "--key", str(copy), "--i-know", "0"], check=True)
                    other = ["privatize", "--data", str(data), "--output", str(again), "--key", str(copy)]
                    other += command[7:]
                    said = killed_and_resumed([*program, *other], again, output, seconds)
                    print(f"  {said}, {entries(program, copy)} ledger entry", flush=True)
                    subprocess.run(["rm", "-rf", str(again), str(copy), f"{copy}.state"], check=True)
                subprocess.run(["rm", "-rf", str(output), str(data)], check=True)


if __name__ == "__main__":
    main()
