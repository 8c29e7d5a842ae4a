"""Rows per second and peak memory of `private-rlhf privatize` against the reference way, on generated pairs.

The reference is one process that reads all JSONL rows into a list, seeds `random.Random(f"{seed}-{id}")` for every
row, flips, and writes gzip JSONL with the default level. Both run as processes of their own on the same file, one after
the other; memory is the largest sum of resident memory over a process and all that it started, sampled 20 times a
second. Rows are drawn from a fixed seed: `long` ones hold as much text as HH-RLHF's pairs (about 1.2 kB), `short` ones
a few words. With --kill each release is made once more, killed at three random points and resumed: the files must be
the same and the ledger must hold one entry.

Run:  python tests/benchmarks/privatize_throughput.py [--rows 100000 1000000] [--kinds long short] [--no-reference]
      (10^7 rows: --rows 10000000 --kinds long --no-reference --kill; needs about 40 GB of disk)
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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


def measured(command: list[str]) -> tuple[float, float]:
    """(seconds, peak resident MiB of the process tree). Exits if the command fails."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, _tree_memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{command[:4]} failed with {process.returncode}")
    return time.monotonic() - start, peak


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
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
    program = [sys.executable, "-m", "private_rlhf.cli"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in arguments.kinds:
            for rows in arguments.rows:
                data = folder / f"{kind}-{rows}.jsonl"
                generate(data, rows, kind)
                print(f"{kind} {rows} rows, {data.stat().st_size / rows:.0f} bytes each", flush=True)
                key, output = folder / f"{kind}-{rows}.key", folder / f"{kind}-{rows}"
                subprocess.run([*program, "keygen", "--output", str(key)], check=True, stdout=subprocess.DEVNULL)
                command = ["privatize", "--data", str(data), "--output", str(output), "--key", str(key)]
                command += ["--epsilon", arguments.epsilon]
                command += ["--workers", arguments.workers] if arguments.workers else []
                seconds, peak = measured([*program, *command])
                print(f"  private-rlhf  {rows / seconds:10.0f} rows/s  {seconds:8.1f} s  peak {peak:7.0f} MiB")
                if not arguments.no_reference:
                    target = folder / "plain.jsonl.gz"
                    line = [sys.executable, "-c", REFERENCE, str(data), str(target), arguments.epsilon]
                    plain, peak = measured(line)
                    print(f"  reference     {rows / plain:10.0f} rows/s  {plain:8.1f} s  peak {peak:7.0f} MiB")
                    print(f"  ratio         {plain / seconds:10.1f}", flush=True)
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
