"""Streamed statistics: dtypes, blocks, several real processes, and refusal of what cannot be inverted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from private_rlhf.reward_models.gram import BLOCK, StreamedGram, definite_factor
from private_rlhf.reward_models.uncertainty import FisherAccumulator


def features(seed: int, n: int = 3000, d: int = 6) -> torch.Tensor:
    """Float32 with a large mean, where sums in bfloat16 or float32 would lose digits."""
    return 30.0 + torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("product", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_half_precision_features_are_summed_in_full(product: torch.dtype, tolerance: float) -> None:
    rows = features(0).bfloat16()
    gram = StreamedGram(6, rows.device, product)
    for block in rows.split(257):
        gram.add(block, len(block))
    exact = rows.double().T @ rows.double()
    assert gram.total.dtype == torch.float64
    assert float((gram.total - exact).abs().max() / exact.abs().max()) < tolerance
    assert int(gram.count) == 3000
    # The sum in the features' own dtype, for comparison, is off in its third digit.
    assert float(((rows.T @ rows).double() - exact).abs().max() / exact.abs().max()) > 1e-4
    with pytest.raises(ValueError, match="float32 or float64"):
        StreamedGram(6, rows.device, torch.bfloat16)


def test_one_large_batch_is_streamed_in_blocks_with_the_same_result() -> None:
    phi_a, phi_b = features(1).bfloat16(), features(2).bfloat16()
    assert len(phi_a) > 2 * BLOCK
    whole, parts = (FisherAccumulator(torch.full((6,), 0.01), noise=1.0, ridge=1.0) for _ in range(2))
    whole.update(phi_a, phi_b)
    for first, second in zip(phi_a.split(7), phi_b.split(7), strict=True):
        parts.update(first, second)
    assert whole.num_pairs == parts.num_pairs == 3000
    torch.testing.assert_close(whole.bonus().information, parts.bonus().information, rtol=1e-12, atol=1e-9)


def test_an_unusable_matrix_is_refused_with_the_reason() -> None:
    size = 40
    vectors = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)).double())[0]

    def matrix(smallest: float) -> torch.Tensor:
        values = torch.ones(size, dtype=torch.float64)
        values[0] = smallest
        return vectors @ torch.diag(values) @ vectors.T

    torch.testing.assert_close(
        definite_factor(matrix(1e-6), "test") @ definite_factor(matrix(1e-6), "test").T, matrix(1e-6)
    )
    for smallest, message in (
        (-0.1, r"the test matrix is not positive definite \(at row \d+ of 40\); use a larger ridge"),
        (1e-14, r"the test matrix has condition .*e\+1[45]; use a larger ridge or fewer components"),
    ):
        with pytest.raises(ValueError, match=message):
            definite_factor(matrix(smallest), "test")
    with pytest.raises(ValueError, match="it is not finite; check the features"):
        definite_factor(matrix(float("nan")), "test")


def test_two_gloo_processes_give_the_statistics_of_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, __file__, str(tmp_path / "record.json")]
        workers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    record = json.loads((tmp_path / "record.json").read_text())
    single = accumulate(slice(None))
    assert record["num_pairs"] == single.num_pairs == 3000
    torch.testing.assert_close(
        torch.tensor(record["information"], dtype=torch.float64), single.bonus().information, rtol=1e-12, atol=1e-9
    )


def accumulate(rows: slice) -> FisherAccumulator:
    accumulator = FisherAccumulator(torch.full((6,), 0.01), noise=1.0, ridge=1.0, reward_bound=8.0)
    accumulator.update(features(1)[rows].bfloat16(), features(2)[rows].bfloat16())
    return accumulator


def _worker(path: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    accumulator = accumulate(slice(0, 1100) if rank == 0 else slice(1100, None))

    def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    accumulator.all_reduce(reduce_sum)
    if rank == 0:
        record = {"num_pairs": accumulator.num_pairs, "information": accumulator.bonus().information.tolist()}
        path.write_text(json.dumps(record))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
