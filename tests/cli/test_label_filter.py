"""The label filter as a process: in the package and as a single file, killed anywhere, and several on one store."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.pipeline_runs import ROOT, clean_environment

LOCAL = ROOT / "pipeline" / "privacy" / "local.py"
TIMEOUT = 300  # seconds; a guard against a hang


def lines_of(ids: range, label: int = 1) -> bytes:
    return "".join(json.dumps({"id": f"e{i}", "label": label}) + "\n" for i in ids).encode()


def answers(sent: bytes) -> dict[str, int]:
    """Label by id; a line that was cut off by a kill has not been sent."""
    whole = sent[: sent.rfind(b"\n") + 1]
    return {row["id"]: row["label"] for row in map(json.loads, whole.splitlines())}


def single_file(store: Path, *options: str) -> list[str]:
    return [sys.executable, "-I", str(LOCAL), "--epsilon", "0.3", "--store", str(store), *options]


def run(command: list[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=given, capture_output=True, timeout=TIMEOUT, env=clean_environment())


def test_the_single_file_and_the_command_answer_alike(tmp_path: Path) -> None:
    """-I: without PYTHONPATH and the current folder, so the file stands alone; beside it lies no other."""
    (tmp_path / "tool").mkdir()
    copy = shutil.copy(LOCAL, tmp_path / "tool")
    store = tmp_path / "draws.db"
    alone = run([sys.executable, "-I", str(copy), "--epsilon", "0.3", "--store", str(store)], lines_of(range(200)))
    assert alone.returncode == 0
    assert alone.stderr.decode() == f"new store {store}: keep it, events in it are never drawn again\n"
    command = [sys.executable, "-m", "private_rlhf.cli", "label-filter", "--epsilon", "0.3", "--store", str(store)]
    packaged = run(command, lines_of(range(200), label=-1))
    assert (packaged.returncode, packaged.stderr) == (0, b"")
    assert packaged.stdout == alone.stdout
    assert len(answers(alone.stdout)) == 200


def test_it_imports_the_standard_library_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(LOCAL.parent)!r}); import local;"
        "print({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'local', '__main__'})"
    )
    # -S as well: site-packages may bring modules of its own on start.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_each_answer_comes_before_the_next_line(tmp_path: Path) -> None:
    """A labelling tool that waits for its answer gets it."""
    command = single_file(tmp_path / "draws.db")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as filter_:
        assert filter_.stdin is not None
        assert filter_.stdout is not None
        for i in range(3):
            filter_.stdin.write(lines_of(range(i, i + 1)))
            filter_.stdin.flush()
            assert json.loads(filter_.stdout.readline())["id"] == f"e{i}"
        filter_.stdin.close()
        assert filter_.wait(TIMEOUT) == 0


def test_refused_lines_give_exit_code_2(tmp_path: Path) -> None:
    done = run(single_file(tmp_path / "draws.db"), b'{"id": "a", "label": "SECRET"}\n' + lines_of(range(2)))
    assert done.returncode == 2
    assert b"SECRET" not in done.stdout + done.stderr
    assert b'label-filter: 1 lines were refused, see the "error" answers' in done.stderr
    assert [set(json.loads(line)) for line in done.stdout.splitlines()] == [{"line", "error"}, *[{"id", "label"}] * 2]


def killed_between_store_and_send(store: Path) -> int:
    """A process whose first write kills it: the draws are stored and nothing was sent."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from private_rlhf.privacy.local import DrawStore, LabelFilter\n"
        "store = DrawStore(Path(sys.argv[1]), (-1, 1))\n"
        "LabelFilter(store, 0.3, (-1, 1)).serve(lambda: os.read(0, 65536), lambda _: os.kill(os.getpid(), 9))"
    )
    done = run([sys.executable, "-c", code, str(store)], lines_of(range(300)))
    assert done.stdout == b""
    return done.returncode


def test_killed_between_store_and_send_the_draw_stands(tmp_path: Path) -> None:
    """The retry sends what was stored before the kill: the file does not change any more."""
    store = tmp_path / "draws.db"
    assert killed_between_store_and_send(store) == -signal.SIGKILL
    stored = store.read_bytes()
    retry = run(single_file(store), lines_of(range(300), label=-1))
    assert len(answers(retry.stdout)) == 300
    assert store.read_bytes() == stored
    assert run(single_file(store), lines_of(range(300))).stdout == retry.stdout


def test_killed_anywhere_nothing_that_was_sent_is_drawn_again(tmp_path: Path) -> None:
    """Redrawing at ε = 0.3 would contradict each sent answer with probability 0.49."""
    store, sent, rng = tmp_path / "draws.db", {}, random.Random(5)
    for round_ in range(4):
        process = subprocess.Popen(
            single_file(store), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        assert process.stdout is not None
        received = b""
        for i in range(rng.randrange(1, 40)):  # so many answers, then a line whose answer may or may not come
            process.stdin.write(lines_of(range(100 * round_ + i, 100 * round_ + i + 1)))
            process.stdin.flush()
            received += process.stdout.readline()
        process.stdin.write(lines_of(range(100 * round_ + 50, 100 * round_ + 60)))
        process.stdin.flush()
        time.sleep(rng.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        received += process.stdout.read()
        process.stdin.close()
        process.wait(TIMEOUT)
        process.stdout.close()
        sent |= answers(received)
    again = answers(run(single_file(store), lines_of(range(400), label=-1)).stdout)
    assert len(sent) >= 4
    assert {name: again[name] for name in sent} == sent


def test_several_processes_on_one_store(tmp_path: Path) -> None:
    """Three at once on the same events, from a store that does not exist yet: one draw per event."""
    store = tmp_path / "draws.db"
    processes = [
        subprocess.Popen(single_file(store), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for place, process in enumerate(processes):
        assert process.stdin is not None
        process.stdin.write(lines_of(range(400), label=-1 if place % 2 else 1))
        process.stdin.close()
        process.stdin = None
    said = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert said[0][0] == said[1][0] == said[2][0]
    assert len(answers(said[0][0])) == 400
    assert sum(b"new store" in err for _, err in said) == 1
