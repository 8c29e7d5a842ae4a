"""The Gibbs policy by regression that is solved exactly: what no optimiser, rate or number of passes changes.

Near π_ref a policy is linear in its adapter, so that log(π/π_ref) of an answer is the product of the adapter's change
with the gradient of log π(y|x) at π_ref. Ridge regression of r̂/β on these gradients is then the whole of training. What
it leaves unexplained on held-out prompts is due to the answers, to the adapted layers and to linearity, not to steps.

The prompts, answers and measures are those of `gibbs_learnt`; the ridge is chosen on training prompts. The gradient is
that of B: at π_ref B is 0, and so is the gradient of A.

Run:  python -m private_rlhf_lab.benches.gibbs_linear --run RUN [--layers FIRST-END …]   (6 minutes; 9 GB of memory)
Writes OUTPUT/linear.csv
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.render import evenly_spaced
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import response_forward, token_batch
from private_rlhf.lm.models import load_causal_lm, lora_config
from private_rlhf.recipe import LoraSettings
from torch import Tensor
from tqdm import tqdm

from private_rlhf_lab.benches.gibbs_learnt import BATCH, Bench, gains, shares, write_table

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of a kernel whose mean diagonal is 1."""
FOLDS = 5
"""Of training prompts, to choose the ridge."""


class Gradients:
    """Gradients of log π(y|x) at π_ref with respect to a new adapter, by answer; only their inner products are kept.

    Attributes:
        bench: the run, its answers and prompts.
        kernels: by layer, (N, N) float32 inner products of the N answers' gradients, prompt by prompt.
    """

    def __init__(self, bench: Bench, settings: LoraSettings) -> None:
        self.bench = bench
        base = load_causal_lm(bench.home, bench.recipe.model.dtype)
        self.model = get_peft_model(base, lora_config(settings, "CAUSAL_LM", base)).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(self.model.named_parameters()):
            if "lora_A" in name:
                spread = parameter.shape[1] ** -0.5
                parameter.data.uniform_(-spread, spread, generator=generator)
        self._parts: dict[int, list[Tensor]] = {}
        self.kernels = self._kernels()

    def _kernels(self) -> dict[int, Tensor]:
        order = [row for rows in self.bench.rows for row in rows]
        handles = [
            module.register_forward_hook(functools.partial(self._watch, int(name.split(".layers.")[1].split(".")[0])))
            for name, module in self.model.named_modules()
            if name.endswith("lora_B.default")
        ]
        gathered: dict[int, list[Tensor]] = {}
        for start in tqdm(range(0, len(order), BATCH), desc="gradients"):
            self._backward(order[start : start + BATCH])
            for layer, parts in self._parts.items():
                gathered.setdefault(layer, []).append(torch.cat(parts, dim=1).bfloat16())
            self._parts = {}
        for handle in handles:
            handle.remove()
        kernels = {}
        for layer in sorted(gathered):
            rows = torch.cat(gathered.pop(layer)).float()
            kernels[layer] = rows @ rows.T
        return kernels

    def _backward(self, rows: Sequence[int]) -> None:
        answers, pad = self.bench.answers, self.bench.renderer.tokenizer.pad_token_id
        prompts, responses = [answers.prompts[i] for i in rows], [answers.responses[i] for i in rows]
        batch = token_batch(prompts, responses, pad, torch.device("cpu"))  # a row each: gradients stay apart
        token_logprobs(response_forward(self.model, batch)[0], batch.tokens).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def _watch(self, layer: int, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the gradient of this module's weight by answer, (B, out·rank), once that of its output is known."""
        states = inputs[0].detach().float()

        def keep(gradient: Tensor) -> None:
            by_answer = torch.einsum("bto,btr->bor", gradient.float(), states).flatten(1)
            self._parts.setdefault(layer, []).append(by_answer)

        output.register_hook(keep)

    def kernel(self, layers: range) -> Tensor:
        """Return (N, N) float64, centred within each prompt's answers, of a mean diagonal of 1."""
        picked = [kernel for layer, kernel in self.kernels.items() if layer in layers]
        if not picked:
            raise UserError(f"--layers must be adapted, got {layers.start}-{layers.stop}: take {list(self.kernels)}")
        count = len(self.bench.rows[0])
        total = torch.stack(picked).sum(dim=0).double().unflatten(0, (-1, count)).unflatten(2, (-1, count))
        total = total - total.mean(dim=1, keepdim=True)
        total = (total - total.mean(dim=3, keepdim=True)).flatten(2).flatten(0, 1)
        return total / total.diagonal().mean()


def ridge_regression(kernel: Tensor, target: Tensor, known: Tensor, asked: Tensor, ridge: float) -> Tensor:
    """Return the prediction (len(asked),) from the targets of `known`; kernel (N, N), target (N,), places int64."""
    normal = kernel[known][:, known] + ridge * torch.eye(len(known), dtype=kernel.dtype)
    prediction: Tensor = kernel[asked][:, known] @ torch.linalg.solve(normal, target[known])
    return prediction


def explained(prediction: Tensor, target: Tensor) -> float:
    """Return the share of the variance of a target, which has mean 0, that a prediction explains."""
    return float(1 - (target - prediction).square().sum() / target.square().sum())


def best_ridge(kernel: Tensor, target: Tensor, prompts: Sequence[int], count: int) -> float:
    """Return the ridge that explains most on prompts that are left out in turn."""

    asked = [places(prompts[fold::FOLDS], count) for fold in range(FOLDS)]
    known = [torch.cat([part for part in asked if part is not held]) for held in asked]

    def left_out(ridge: float) -> float:
        parts = [ridge_regression(kernel, target, *each, ridge) for each in zip(known, asked, strict=True)]
        return explained(torch.cat(parts), target[torch.cat(asked)])

    return max(RIDGES, key=left_out)


def places(prompts: Sequence[int], count: int) -> Tensor:
    """Return the places of the `count` answers to each prompt."""
    return torch.tensor([prompt * count + answer for prompt in prompts for answer in range(count)])


def lines(bench: Bench, gradients: Gradients, parts: Sequence[range], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of the layers and number of training prompts."""
    held_out, count = list(range(0, len(bench.rows), 4)), len(bench.rows[0])
    utility = bench.score / bench.kl_coef
    target = (utility - utility.mean(dim=1, keepdim=True)).flatten()
    for layers in parts:
        kernel = gradients.kernel(layers)
        for size in sizes:
            shown = evenly_spaced(bench.shown, size)
            ridge = best_ridge(kernel, target, shown, count)
            row = {}
            for split, prompts in (("held-out", held_out), ("training", shown)):
                ratio = ridge_regression(kernel, target, places(shown, count), places(prompts, count), ridge)
                by_prompt = ratio.unflatten(0, (-1, count)).numpy()
                row[split] = gains(by_prompt, bench.score[prompts], bench.truth[prompts], bench.kl_coef)
            name = f"{layers.start}-{layers.stop}"
            setting = {"layers": name, "prompts": len(shown), "answers": len(shown) * count, "ridge": ridge}
            yield setting | shares(row, bench.kl_coef)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--layers", nargs="*", default=[], help="FIRST-END of the adapted layers; all of them besides")
    parser.add_argument("--last-layers", type=int, help="adapted, from the top, 0 for all; as gvpo.lora without it")
    parser.add_argument("--rank", type=int, help="of the adapter; that of gvpo.lora without it")
    parser.add_argument("--prompts", type=int, nargs="*", default=[47, 94, 190], help="to learn from")
    parser.add_argument("--output", type=Path, default=Path("runs/linear"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    bench = Bench.of(RunDir(options.run))
    lora = bench.recipe.gvpo.lora
    if lora is None:
        raise UserError("gvpo.lora must not be null: run the recipe with an adapter")
    last = lora.last_layers if options.last_layers is None else options.last_layers or None
    gradients = Gradients(bench, replace(lora, last_layers=last, rank=options.rank or lora.rank))
    whole = range(min(gradients.kernels), max(gradients.kernels) + 1)
    parts = [whole, *(range(*map(int, part.split("-"))) for part in options.layers)]
    found = []
    for line in lines(bench, gradients, parts, options.prompts):
        print(line, flush=True)
        found.append(line)
        write_table(found, options.output / "linear.csv")


if __name__ == "__main__":
    main()
