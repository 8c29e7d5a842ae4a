"""The record of a step that is not finite: the tensor, and the rows that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic

FILE = "nonfinite.json"


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or a field of a rollout is NaN or infinite; nothing was learnt from it.

    Attributes:
        facts: for the dump: "tensor", its "statistics", and the place.
        rows: of the responses concerned, "prompt_ids", "response_ids" and numbers.
    """

    def __init__(self, message: str, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = dict(facts)
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]

    def write(self, folder: Path) -> Path:
        """Writes the dump to `folder`/nonfinite.json, whole or not at all, and returns its path.

        JSON has no NaN: numbers that are not finite become the strings "nan", "inf" and "-inf".
        """
        path = folder / FILE
        atomic.write_json(path, atomic.spell_nonfinite({"message": str(self), **self.facts, "rows": self.rows}))
        return path


def step_error(
    name: str,
    value: float,
    iteration: int,
    rows: Sequence[Mapping[str, Any]],
    gradient: tuple[str, torch.Tensor] | None,
) -> NonFiniteError:
    """The error for an optimiser step that is not made.

    Args:
        name, value: the metric that is not finite.
        iteration: in which it happened.
        rows: of the minibatch, with the metrics of each.
        gradient: name and gradient of a parameter; None where a loss is to blame.
    """
    facts: dict[str, Any] = {"tensor": name, "value": value}
    if gradient is not None:
        facts |= {"tensor": f"gradient of {gradient[0]}", "statistics": tensor_statistics(gradient[1])}
    elif rows and name in rows[0]:
        facts["statistics"] = tensor_statistics(torch.tensor([row[name] for row in rows]))
    text = f"{name.replace('_grad', ' grad').replace('grad_norm', 'gradient norm')} is {value} at iteration {iteration}"
    return NonFiniteError(f"{text}: lower the learning rate", facts, rows)


def tensor_statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, how many entries are NaN, +inf and -inf, where the first is, and the range and mean of the finite ones."""
    values = tensor.detach().float()
    finite = values[torch.isfinite(values)]
    bad = (~torch.isfinite(values)).nonzero()
    return {
        "shape": list(values.shape),
        "nan": int(values.isnan().sum()),
        "positive_infinite": int(values.isposinf().sum()),
        "negative_infinite": int(values.isneginf().sum()),
        "first": bad[0].tolist() if len(bad) else None,
        "finite_min": float(finite.min()) if len(finite) else None,
        "finite_max": float(finite.max()) if len(finite) else None,
        "finite_mean": float(finite.mean()) if len(finite) else None,
    }


def nonfinite_rows(tensor: torch.Tensor) -> list[int]:
    """Indices along the first dimension at which (B, …) holds a value that is not finite."""
    bad = ~torch.isfinite(tensor)
    return bad.reshape(len(bad), -1).any(dim=1).nonzero().flatten().tolist() if tensor.dim() else []


def nonfinite_gradient(model: torch.nn.Module) -> tuple[str, torch.Tensor] | None:
    """Name and gradient of the first parameter whose gradient is not finite; of sharded ones, this process's part."""
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if not torch.isfinite(local).all():
            return name, local
    return None
