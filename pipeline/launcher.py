"""`accelerate launch` for a stage: `run --processes N` and `private-rlhf launch` say in one line why it failed.

A started process leaves its message in the error file that torch elastic names to it, and the launcher prints one of
them: each process would print the same line otherwise, and elastic a traceback of its own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from private_rlhf.core.errors import RunStopped, RunWaits, UserError
from private_rlhf.core.world import World, declared_world, on_cpu

MARK, ERROR_FILE = "PRIVATE_RLHF_LAUNCHED", "TORCHELASTIC_ERROR_FILE"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def planned_world(processes: int) -> World:
    """The world that stages will see. UserError: a launcher started this process already."""
    world = declared_world()
    if processes > 1 and world.size > 1:
        raise UserError("--processes starts the processes itself: leave out accelerate launch, or --processes")
    return World(0, processes) if processes > 1 else world


@dataclass(frozen=True)
class Launcher:
    """processes: of each stage that takes several. options: of the stage's command."""

    processes: int
    options: Sequence[str]

    def start(self, module: str) -> None:
        """Run the stage in `module` to its end.

        UserError: the stage refused its input, or there are fewer GPUs than processes. RunStopped: a process failed.
        """
        import torch

        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._threads())}
        if on_cpu():
            environment["ACCELERATE_USE_CPU"] = "true"
        elif (gpus := torch.accelerator.device_count()) < self.processes:
            rule = f"at most {gpus}, the number of GPUs here"
            raise UserError(f"--processes must be {rule}, got {self.processes}: lower it")
        places = ["--num_machines", "1", "--num_processes", str(self.processes), "--main_process_port", "0"]
        numerics = ["--mixed_precision", "no", "--dynamo_backend", "no"]
        launch(["--multi_gpu", *places, *numerics, "-m", module, *self.options], environment)

    def _threads(self) -> str:
        return str(max(1, (os.cpu_count() or 1) // self.processes))


def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program as `accelerate launch` does, with its options, to the program's end.

    environment: variables of the processes besides this one's. UserError: wrong options, or the program refused its
    input. RunStopped: a process failed; RunWaits: it waits for others. KeyboardInterrupt: this process or one that it
    started was interrupted. CalledProcessError: the only process failed, and printed why.
    """
    from accelerate.commands.launch import launch_command
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options, on_cpus = _parsed(arguments)
    try:
        with patch_environment(**{MARK: "1", **on_cpus, **environment}), _silent_elastic():
            launch_command(options)
    except ChildFailedError as error:
        raise _cause(options.training_script.rpartition(".")[2], error.failures) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        os.kill(os.getpid(), error.sigval)  # as without a launcher: its handler is gone again
    except ValueError as error:  # accelerate's refusals
        raise UserError(f"launch: {error}") from None


def _parsed(arguments: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """accelerate's options, and the variable of a config file with `use_cpu`, which accelerate does not hand on."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    def refuse(message: str) -> NoReturn:
        raise UserError(f"launch: {message}")

    parser: Any = launch_command_parser()
    parser.error = refuse
    options = parser.parse_args(list(arguments))
    if (file := options.config_file) is None:
        return options, {}
    if not os.path.isfile(file):
        raise UserError(f"launch: --config_file must be a file, got {file}: give one such as launch/ddp.yaml")
    return options, {"ACCELERATE_USE_CPU": "true"} if load_config_from_file(file).use_cpu else {}


@contextmanager
def _silent_elastic() -> Iterator[None]:
    """Keep elastic from logging, and its signal handlers from staying."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cause(stage: str, failures: dict[int, Any]) -> BaseException:
    """The error of the process that failed first; a refusal before what it brings about in the other processes."""
    rank, failure = min(failures.items(), key=lambda each: (each[1].exitcode != 2, each[1].timestamp))
    message = failure.message["message"] if isinstance(failure.message, dict) else None
    if failure.exitcode == 130:
        return KeyboardInterrupt()
    if message is not None:
        return {2: UserError, 3: RunWaits}.get(failure.exitcode, RunStopped)(message)
    number = -failure.exitcode
    how = f"by {signal.Signals(number).name}" if number > 0 else f"with exit code {failure.exitcode}"
    return RunStopped(f"{stage}: process {rank} ended {how}; run the same command again to resume")


def report(message: str) -> bool:
    """Leave the message of a failed process for its launcher; False where no `Launcher` started it."""
    path = os.environ.get(ERROR_FILE)
    if MARK not in os.environ or path is None:
        return False
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    return True
