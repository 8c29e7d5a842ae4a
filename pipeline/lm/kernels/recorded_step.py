"""Decoding on a CUDA GPU without waiting for Python: a step's hundreds of small kernels are started as one.

Started one by one they take several times as long as they run. A CUDA graph replays them on the memory that they were
recorded on, so that shapes are fixed, and what changes from step to step is copied into place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from private_rlhf.core.errors import RunStopped
from torch import Tensor


def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`step` as a CUDA graph, which writes its result into the same memory each time.

    step: called here, then done again by each replay; it must do the same each time. RunStopped: the graph does not.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what libraries set up at a first call must not be recorded
        first = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads, as NCCL's, may go on
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    check_replay(first, replay())
    return replay


def check_replay(first: Tensor, again: Tensor) -> None:
    """Check that a recorded step gives what the step gave. RunStopped where more than one result in ten differs: fewer
    may, if the library took another kernel."""
    wrong = float((first != again).float().mean())
    if wrong > 0.1:
        raise RunStopped(
            f"a decoding step recorded as a CUDA graph draws {wrong:.0%} other tokens than the step itself: set"
            " PRIVATE_RLHF_KERNELS=plain, and report model and versions"
        )
