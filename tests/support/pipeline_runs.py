"""Starts the tiny recipe as a user would: in a process of its own, with a key file and a cache of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from private_rlhf.cli import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
STAGES = ("privatize", "sft", "reward", "ppo", "evaluate", "report")
TIMEOUT = 600  # seconds; a guard against a hang, far above what any of these runs takes
TIMES = {"seconds", "wall_seconds", "peak_rss_mb", "peak_gpu_mb", "tokens_per_second"}


@dataclass(frozen=True)
class Workspace:
    """A folder with the key and the base model that several runs share; labels are then privatised alike."""

    root: Path

    def options(self, run: Path, *overrides: str) -> list[str]:
        """Command-line options of the tiny recipe in the run directory `run`."""
        own = [f"privatize.key_file={self.root / 'owner.key'}", f"model.cache_dir={self.root / 'cache'}"]
        own.append("model.dtype=float32")  # on every processor, so that numbers compare
        return ["--config", str(TINY), "--run-dir", str(run), *own, *overrides]

    def command(self, *arguments: str) -> list[str]:
        """`private-rlhf` with `arguments`."""
        return [sys.executable, "-m", "private_rlhf.cli", *arguments]

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own."""
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=clean_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background job ignores SIGINT, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def finish(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, whatever its exit code."""
        process = self.start(command, **environment)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def run(self, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`private-rlhf run`, which must succeed; options such as --only come before overrides."""
        done = self.finish(self.command("run", *self.options(run, *arguments)))
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def run_here(self, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`run` in this process, which need not load PyTorch again; with one thread, as a process of its own has."""
        import torch

        threads, out, err = torch.get_num_threads(), io.StringIO(), io.StringIO()
        torch.set_num_threads(1)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(["run", *self.options(run, *arguments)])
        finally:
            torch.set_num_threads(threads)
        assert code == 0, err.getvalue()[-3000:]
        return subprocess.CompletedProcess(["run"], code, out.getvalue(), err.getvalue())

    def launch(
        self, stage: str, run: Path, *overrides: str, processes: int = 2, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """One stage under accelerate with several CPU processes."""
        program = ["-m", f"private_rlhf.stages.{stage}"]
        done = self._launched(processes, program, self.options(run, *overrides), **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def launch_command(
        self, *arguments: str, processes: int, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of `private-rlhf` under accelerate."""
        done = self._launched(processes, ["-m", "private_rlhf.cli"], list(arguments), **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def _launched(
        self, processes: int, program: list[str], options: list[str], **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else ["--num_machines", "1"]
        return self.finish([*command, *program, *options], ACCELERATE_USE_CPU="true", **environment)

    def signal_stage_when(
        self, path: Path, stage: str, run: Path, *overrides: str, processes: int, **environment: str
    ) -> None:
        """Kills one stage under accelerate as soon as `path` exists."""
        program = [str(ROOT / "tests" / "support" / "signalled.py"), str(path), str(int(signal.SIGKILL)), stage]
        done = self._launched(processes, program, self.options(run, *overrides), **environment)
        assert done.returncode != 0
        assert path.exists(), f"ended before the signal:\n{done.stderr[-3000:]}"

    def signal_when(self, path: Path, run: Path, *overrides: str, number: int = signal.SIGKILL) -> int:
        """The exit code of `private-rlhf run` whose process group gets the signal as soon as `path` exists."""
        assert not path.exists()
        command = [sys.executable, str(ROOT / "tests" / "support" / "signalled.py"), str(path), str(int(number))]
        done = self.finish([*command, "run", *self.options(run, *overrides)])
        assert path.exists(), f"ended before the signal:\n{done.stderr[-3000:]}"
        return done.returncode


def clean_environment() -> dict[str, str]:
    """This process's environment without a launcher's, with the checkout importable and one thread per process."""
    dropped = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def stages_started(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The stages that a run says it started."""
    lines = [line.rpartition("[private-rlhf] ")[2] for line in done.stderr.splitlines() if "[private-rlhf] " in line]
    return [line.partition(": starts, ")[0] for line in lines if ": starts, " in line]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def timeless(value: Any) -> Any:
    """A JSON value without seconds, speed and memory."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def history(run: Path, stage: str = "ppo") -> list[dict[str, Any]]:
    """An aligner's history without seconds."""
    return [timeless(json.loads(line)) for line in (run / stage / "history.jsonl").read_text().splitlines()]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder` with its bytes (None for a folder)."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def trained(folder: Path) -> dict[str, bytes | None]:
    """`tree` of a model's folder without the section of its card that stage evaluate writes later."""
    found = tree(folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    before, heading, after = card.partition("\n## Results\n")
    assert heading
    return found | {"README.md": (before + after[after.index("\n## ") :]).encode()}


def numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """Every number of a JSON value by its path."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {prefix: float(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: number for key, item in items for name, number in numbers(item, f"{prefix}/{key}").items()}
