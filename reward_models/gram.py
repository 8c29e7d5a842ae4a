"""Streamed d×d statistics, and the check that one of them can be inverted.

For d = 4096 a statistic is 134 MB of float64, however many pairs went in: rows are added a block at a time, whatever
their dtype, and processes add up once at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.linalg.lapack import dpocon
from torch import Tensor

MAX_CONDITION = 1e14
BLOCK = 1024


class StreamedGram:
    """Σ x xᵀ (k, k) and a count, both float64.

    `product_dtype` is that of the product over one block of rows. float64 is exact to rounding; float32 is the faster
    choice on GPUs and loses no more than one block's rounding, because the sum over blocks is float64 all the same.
    """

    def __init__(self, size: int, device: torch.device, product_dtype: torch.dtype = torch.float64) -> None:
        if product_dtype not in (torch.float32, torch.float64):
            raise ValueError(f"product_dtype must be float32 or float64, not {product_dtype}: sums in less lose pairs")
        self.product_dtype = product_dtype
        self.total = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, rows: Tensor, count: int) -> None:
        """Add the rows (B, k) of `count` units."""
        rows = rows.to(self.product_dtype)
        self.total += (rows.T @ rows).to(torch.float64)
        self.count += count

    def all_reduce(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Add up over processes; `reduce_sum` maps a tensor to its sum over them (accelerator.reduce with "sum")."""
        self.total = reduce_sum(self.total)
        self.count = reduce_sum(self.count)


def definite_factor(matrix: Tensor, name: str) -> Tensor:
    """The lower Cholesky factor (k, k) of a symmetric matrix that is safe to invert.

    ValueError for a matrix that is not finite, not positive definite, or whose condition in the 1-norm (LAPACK's
    estimate from the factor) exceeds `MAX_CONDITION`: beyond it a float64 solve has no digit left.
    """
    remedy = "use a larger ridge or fewer components"
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"the {name} matrix is not positive definite: it is not finite; check the features")
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        raise ValueError(f"the {name} matrix is not positive definite (at row {int(info)} of {len(matrix)}); {remedy}")
    norm = float(torch.linalg.matrix_norm(matrix, 1))
    reciprocal, _ = dpocon(factor.cpu().numpy(), norm, uplo="L")
    if reciprocal * MAX_CONDITION < 1.0:
        raise ValueError(f"the {name} matrix has condition {1.0 / max(reciprocal, 1e-300):.1e}; {remedy}")
    return factor
