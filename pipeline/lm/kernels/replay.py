"""Decoding on a CUDA GPU without waiting for Python: a step's hundreds of small kernels are started as one.

Started one by one they take several times as long as they run. A CUDA graph replays them on the memory that they were
recorded on, so that shapes are fixed, and what changes from step to step is copied into place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.models import unwrap
from private_rlhf.lm.rows import sharing_of
from torch import Tensor


def replays(model: Any) -> bool:
    """True if the steps of `model` can be recorded: nothing in them waits for the host."""
    inner = unwrap(model)
    device, config = next(inner.parameters()).device.type, inner.config.get_text_config()  # type: ignore[operator]
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        runs("replay", device)
        and sharing_of(model) is not None
        and rope.get("rope_type") not in ("dynamic", "longrope")  # the host looks at the positions
        and getattr(inner, "quantization_method", None) is None
        and not torch.is_autocast_enabled(device)
    )


def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`step` as a CUDA graph, which writes its result into the same memory each time.

    step: called three times before it returns; it must do the same each time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what libraries set up at a first call must not be recorded
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
