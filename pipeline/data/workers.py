"""Tasks in order over a few worker processes, or in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

Result = TypeVar("Result")
MAX_WORKERS = 8


class Workers:
    """`run` calls a picklable function on tasks; in this process if there is one worker. share: (i, N) for the i-th of
    every N tasks, the others being left to other machines."""

    def __init__(self, pool: ProcessPoolExecutor | None, count: int, share: tuple[int, int] = (1, 1)) -> None:
        self._pool, self._count, self._share = pool, count, share

    def part(self, number: int, of: int) -> Workers:
        """The same processes for a share of the tasks."""
        return Workers(self._pool, self._count, (number, of))

    def run(self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
        """The results in the order of the tasks, few of which wait at a time.

        Whatever goes wrong first in that order is raised, also if the tasks' own iterator fails after it.
        """
        number, of = self._share
        stream = islice(tasks, number - 1, None, of)
        if self._pool is None:
            for task in stream:
                yield function(*task)
            return
        waiting: deque[Future[Result]] = deque()
        failure: Exception | None = None
        try:
            while True:
                try:
                    task = next(stream)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                waiting.append(self._pool.submit(function, *task))
                if len(waiting) > self._count + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenExecutor:
            raise RuntimeError("a worker process died (out of memory?); run the same command again to resume") from None
        finally:
            for future in waiting:
                future.cancel()
        if failure is not None:
            raise failure


@contextmanager
def start_workers(count: int) -> Iterator[Workers]:
    """count: worker processes; 1 stays in this one."""
    if count == 1:
        yield Workers(None, 1)
        return
    # A forked worker is there at once, and a new interpreter imports for a second; but a fork copies others' locks.
    method = "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"
    pool = ProcessPoolExecutor(count, multiprocessing.get_context(method), _settle)
    try:
        yield Workers(pool, count)
    finally:
        pool.shutdown(cancel_futures=True)


def default_workers(size: int) -> int:
    """For `size` bytes of input: one process where starting others would take longer."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS) if size > 48 << 20 else 1


def _settle() -> None:
    """In a new worker: one thread, and no life beyond the parent's (its death closes no pipe of the pool's)."""
    import pyarrow

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
