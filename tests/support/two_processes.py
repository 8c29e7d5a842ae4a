"""Two gloo processes of a worker script, for tests of what they do together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from private_rlhf.core.world import World

from support.pipeline_runs import ROOT, TIMEOUT, clean_environment

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


def run_two(worker: str, folder: Path) -> Path:
    """Runs two processes of a worker, which leave what they say in `folder`."""
    commands = [[sys.executable, "-m", f"support.{worker}", str(folder), str(rank)] for rank in (0, 1)]
    environment = clean_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environment["PYTHONPATH"]])
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], errors
    return folder


@contextmanager
def gloo_pair(folder: Path, rank: int, backend: str = "gloo", **environment: str) -> Iterator[World]:
    """In a worker, to its end: it joins the other one, and leaves without the interpreter's clean-up.

    What FSDP2 caches keeps gloo's threads alive; one of them that wants Python's lock while Python ends aborts the
    process now and then, on a busy machine.
    """
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(own | {"ACCELERATE_USE_CPU": "true"} | environment)
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=2)
    yield World(rank, 2)
    torch.distributed.barrier()  # neither leaves while the other still waits for what it sent
    sys.stderr.flush()
    os._exit(0)
