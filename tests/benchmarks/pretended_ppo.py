"""Memory of PPO on a GPU, measured without one: an iteration of the trainer on `support.pretended_gpu`.

    python tests/benchmarks/pretended_ppo.py [--model 1b 8b] [--minibatch 8] [--prompt 256] [--response 128]

Models are those of `tests/gpu/throughput.py`: random weights in bfloat16, LoRA, a reward model of the policy's size.
One minibatch of responses at their cap is scored (reward, π, π_ref) and learnt from. Peaks are of tensors: a GPU adds
fragments and the work memory of kernels. Sampling is left out: it reads token by token, and its cache is smaller.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "benchmarks")]

from gpu.throughput import Ours, Task, model_config  # noqa: E402
from peer_processes import table, write_json  # noqa: E402
from private_rlhf.lm.drawing import Drawn, Engine, Rows  # noqa: E402
from private_rlhf.lm.generate import Sampling  # noqa: E402
from support.pretended_gpu import GPU, TOKEN, pretended_gpu  # noqa: E402

GIB = 1 << 30


class AtTheCap(Engine):
    """Responses as long as they may be, without a model."""

    def sample(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
               progress: str | None = None) -> Drawn:  # fmt: skip
        """See `Engine`."""
        return [[TOKEN] * sampling.max_new_tokens for _ in prompts], None


@dataclass(frozen=True)
class Peaks:
    """GiB of tensors on the GPU: of weights, and at most while responses are scored and learnt from. waits: of the
    host for the GPU, per response."""

    weights: float
    scoring: float
    learning: float
    waits: float


def peaks(shape: str, size: str, minibatch: int, prompt: int, response: int) -> Peaks:
    """Measure one minibatch whose responses are all at the cap."""
    sizes = {"rollouts": minibatch, "minibatch": minibatch, "epochs": 1, "prompt": prompt, "response": response}
    task = Task(model_config(shape, size), GPU, argparse.Namespace(**sizes))
    with pretended_gpu() as (gpu, _):
        trainer = Ours(task).trainer
        trainer.engine = AtTheCap()
        weights = gpu.live
        gpu.waits.clear()
        rollout, _ = trainer.collect(0)
        scoring, gpu.peak = gpu.peak, gpu.live
        for _ in range(2):  # with the optimiser's states from the second on
            trainer.update(rollout, 0)
        return Peaks(weights / GIB, scoring / GIB, gpu.peak / GIB, gpu.waits.total() / minibatch)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=["tiny", "1b", "8b"], default=["1b", "8b"])
    parser.add_argument("--minibatch", type=int, nargs="+", default=[8])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of each response")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args()
    rows, found = [], {}
    for size in given.model:
        for minibatch in given.minibatch:
            one = found[f"{size} {minibatch}"] = vars(peaks("llama", size, minibatch, given.prompt, given.response))
            rows.append([size, str(minibatch), *(f"{value:.1f}" for value in one.values())])
    print(table(["model", "minibatch", "weights, GiB", "scoring", "learning", "waits a response"], rows))
    write_json(given.json, found)


if __name__ == "__main__":
    main()
