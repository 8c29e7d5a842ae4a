"""What a 135M backbone learns of people from pairs of answers at each ε, beside "the answer of more tokens wins".

The backbone is SmolLM2-135M-Instruct, frozen; a linear reward is fitted by the private likelihood. For each ε and seed
of flips everything is chosen by five-fold cross-validation over prompts inside the training pairs, on the privatised
labels alone: which layers (one or several), pooled how, how many principal directions, the ridge, and whether the log
length of an answer comes in as a nuisance covariate. The evaluation pairs, with people's own labels, are judged by the
chosen reward and by three ablations named beforehand (`ARMS`). "Like length" are pairs whose answers' lengths differ by
at most a fifth: |log ratio of tokens| ≤ 0.2.

Run:  python -m private_rlhf_lab.benches.human_reward --home DIR [--seeds 5] [--data hh_harmless]
      (PRIVATE_RLHF_TEST_DATA names the folder that the data's folder is in; the extra `truth` brings MiniLM; resumable:
      features and finished fits are kept; an hour on one core)
Writes DIR/fits.jsonl and DIR/table.md (docs/results/human.md)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.stats import wilson
from private_rlhf.data.render import Renderer, dialogue
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.privacy.keys import insecure_seed_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.reward_models.basis import pair_basis
from private_rlhf.reward_models.linear import fit_linear
from private_rlhf.reward_models.ridge import assign_folds, ridge_from_margin_scale, select_ridge
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.epsilon_tables import interval, name_of, over_prompts
from private_rlhf_lab.benches.human_features import (
    HELPFUL,
    LAYERS,
    Pairs,
    backbone_features,
    digest,
    kept_features,
    load_pairs,
    renderer_of,
)
from private_rlhf_lab.truths.human_truth import truth_features
from private_rlhf_lab.truths.sentences import SentenceModel

EPSILONS = (math.inf, 2.0, 1.0, 0.5)
LIKE = 0.2
SCALES = (0.1, 0.2, 0.4, 0.7, 1.2, 2.0)
"""Standard deviations of the margin, in nats, that the ridges stand for."""
COMPONENTS = (32, 128, 256)
LAST, MEAN = 0, 1
SETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **{f"last of {layer}": ((layer,), (LAST,)) for layer in LAYERS[1:]},
    **{f"mean of {layer}": ((layer,), (MEAN,)) for layer in LAYERS},
    **{f"last and mean of {layer}": ((layer,), (LAST, MEAN)) for layer in (10, 15, 20)},
    "last of 10, 20": ((10, 20), (LAST,)),
    "last of 5 to 25": ((5, 10, 15, 20, 25), (LAST,)),
    "last and mean of 10, 15, 20": ((10, 15, 20), (LAST, MEAN)),
}
"""Name of a feature set -> its layers and pools."""
MINILM = "MiniLM"
RECIPE = ("last of 10", 64, False)
"""What configs/hh_rlhf_smollm2.yaml reads: features, directions, length."""
ARMS = {
    "chosen": "the reward chosen",
    "without length": "the same, length fitted beside it and left out",
    "recipe": f"{RECIPE[0]}, {RECIPE[1]} directions",
    "minilm": "MiniLM's sentence embeddings instead",
}
LONGER = "the answer of more tokens wins"
"""By tokens, as the covariate is; `longer_answers` counts characters."""


@dataclass(frozen=True)
class Setting:
    """What is chosen besides the ridge: a feature set, its leading directions, and whether length is a covariate."""

    features: str
    components: int
    length: bool

    def __str__(self) -> str:
        return f"{self.features}; {self.components} directions{'; length' if self.length else ''}"


class Bed:
    """Training and evaluation pairs in coordinates of a label-free basis; chosen and rejected answers by turns."""

    def __init__(
        self, features: dict[str, dict[str, torch.Tensor]], lengths: dict[str, torch.Tensor], identity: str
    ) -> None:
        """features: per split and name (2n, d); lengths: per split (2n,) tokens of the answers; identity: of the texts
        and of what is chosen among."""
        self.identity = identity
        self.lengths = {split: own.double().log() for split, own in lengths.items()}
        self._coordinates: dict[str, dict[str, torch.Tensor]] = {}
        for name, phi in features["train"].items():
            basis = pair_basis(phi[0::2], phi[1::2], num_components=max(COMPONENTS), whiten=False)
            self._coordinates[name] = {split: basis.coordinates(own[name]) for split, own in features.items()}

    def coordinates(self, setting: Setting, split: str) -> torch.Tensor:
        """(2n, k) float64, a column more for length, which the ridge takes for as likely to matter as all the rest."""
        own = self._coordinates[setting.features]
        scale = _difference(own["train"][:, : setting.components]).square().mean().sqrt()
        x = own[split][:, : setting.components] / scale
        if not setting.length:
            return x
        column = self.lengths[split] * math.sqrt(x.shape[1]) / _difference(self.lengths["train"]).std()
        return torch.cat([x, column[:, None]], dim=1)

    @property
    def log_ratio(self) -> torch.Tensor:
        """(n,) log of chosen over rejected length of the evaluation pairs."""
        return _difference(self.lengths["eval"])


def _difference(values: torch.Tensor) -> torch.Tensor:
    return values[0::2] - values[1::2]


# --- features ---------------------------------------------------------------------------------------------------------


def load_bed(home: Path, data: str = HELPFUL) -> tuple[Bed, list[str]]:
    """The bed, and the prompts of the training pairs; features are computed on the first call and kept."""
    renderer = renderer_of(smollm2_checkpoint(home / "smollm2"))
    pairs = {split: load_pairs(split, renderer, data) for split in ("train", "eval")}
    features = {split: _features(home, split, own) for split, own in pairs.items()}
    chosen_among = [SETS, COMPONENTS, SCALES, RECIPE]
    identity = digest([*chosen_among, *(own.texts for own in pairs.values())])
    bed = Bed(features, {split: _lengths(renderer, own) for split, own in pairs.items()}, identity)
    return bed, [dialogue(row["prompt"]) for row in pairs["train"].rows]


def _features(home: Path, split: str, pairs: Pairs) -> dict[str, torch.Tensor]:
    states = backbone_features(home, split, pairs.texts, "bfloat16")
    found = {}
    for name, (layers, pools) in SETS.items():
        picked = states[:, [LAYERS.index(layer) for layer in layers]][:, :, list(pools)]
        found[name] = picked.flatten(1).float()

    def of_sentences() -> torch.Tensor:
        prompts, answers = zip(*pairs.texts, strict=True)
        return truth_features(SentenceModel(), [*map(dialogue, prompts)], answers)

    return found | {MINILM: kept_features(home / f"minilm-{split}.safetensors", pairs.texts, of_sentences)}


def _lengths(renderer: Renderer, pairs: Pairs) -> torch.Tensor:
    return torch.tensor([len(renderer.response_ids(answer)) for _, answer in pairs.texts])


# --- fits -------------------------------------------------------------------------------------------------------------


def private_labels(count: int, epsilon: float, seed: int) -> torch.Tensor:
    """(n,) ±1, +1 where randomised response kept people's choice."""
    if math.isinf(epsilon):
        return torch.ones(count)
    mechanism, prf = RandomizedResponse(epsilon), insecure_seed_key(seed).prf
    return torch.tensor([float(mechanism.release(prf, str(index).encode(), 1)) for index in range(count)])


def settings() -> Iterator[Setting]:
    """Every setting that may be chosen, and those of the ablations."""
    for name in (*SETS, MINILM):
        for count in COMPONENTS:
            for length in (False, True):
                yield Setting(name, count, length)
    yield Setting(*RECIPE)


def fit(bed: Bed, prompts: Sequence[str], epsilon: float, seed: int) -> dict[str, Any]:
    """One row: what was chosen, and each arm's margins on the evaluation pairs."""
    labels, noise = private_labels(len(prompts), epsilon, seed), LabelNoise.of(epsilon)
    folds = torch.from_numpy(assign_folds(prompts, 5, seed))
    table = {}
    for setting in settings():
        x = bed.coordinates(setting, "train")
        ridges = [ridge_from_margin_scale(scale, x.shape[1]) for scale in SCALES]
        found = select_ridge(x[0::2], x[1::2], labels, noise, ridges=ridges, folds=folds)
        table[setting] = (min(found.held_out_loss), found.ridge)

    def best(*, minilm: bool = False, length: bool = False) -> Setting:
        able = [s for s in table if (s.features == MINILM) == minilm and (s.length or not length)]
        return min(able, key=lambda setting: table[setting][0])

    chosen = {
        "chosen": best(),
        "without length": best(length=True),
        "recipe": Setting(*RECIPE),
        "minilm": best(minilm=True),
    }
    arms = {}
    for name, setting in chosen.items():
        x, judged = (bed.coordinates(setting, split) for split in ("train", "eval"))
        theta = fit_linear(x[0::2], x[1::2], labels, noise, ridge=table[setting][1]).theta.clone()
        if name == "without length":
            theta[-1] = 0.0
        scale = math.sqrt(x.shape[1] / table[setting][1])
        margin = [round(float(value), 5) for value in _difference(judged @ theta)]
        arms[name] = {"setting": str(setting), "scale": scale, "loss": table[setting][0], "margin": margin}
    losses = {str(setting): round(loss, 4) for setting, (loss, _) in table.items()}
    return {"epsilon": name_of(epsilon), "seed": seed, "arms": arms, "losses": losses}


def fits(bed: Bed, prompts: Sequence[str], path: Path, seeds: int) -> list[dict[str, Any]]:
    """All rows, those of an earlier call as they are. UserError where that was on other pairs or feature sets."""
    rows = rows_of(path, lambda _: bed.identity)
    done = {(row["epsilon"], row["seed"]) for row in rows}
    wanted = [(e, seed) for e in EPSILONS for seed in range(1 if math.isinf(e) else seeds)]
    with appending(path) as keep:
        for each in tqdm([(e, s) for e, s in wanted if (name_of(e), s) not in done], desc="fits", unit="fit"):
            rows.append({"bed": bed.identity, **fit(bed, prompts, *each)})
            keep(rows[-1])
    return [row for row in rows if row["seed"] < seeds]


# --- tables -----------------------------------------------------------------------------------------------------------


def hits(margin: np.ndarray) -> np.ndarray:
    """1 where the chosen answer is ahead, ½ for a tie, else 0; any shape."""
    return (margin > 0) + 0.5 * (margin == 0)


def accuracy(own: np.ndarray) -> str:
    """Of hits (seeds, pairs): the share with its Wilson interval for one seed; else the mean, ± 95 % over seeds
    (Student's t), and [95 % over pairs, by the bootstrap]."""
    if len(own) == 1:
        share = wilson(float(own.sum()), own.shape[1])
        return f"{share.value:.3f} [{share.ci_low:.3f}, {share.ci_high:.3f}]"
    mean, half = interval(own.mean(axis=1).tolist())
    pairs = over_prompts(own)
    return f"{mean:.3f} ± {half:.3f} [{pairs.ci_low:.3f}, {pairs.ci_high:.3f}]"


def beyond(own: np.ndarray, longer: np.ndarray) -> str:
    """Hits (seeds, pairs) less those of length (pairs,), in points, with the 95 % interval over pairs."""
    gain = over_prompts(100 * (own - longer))
    return f"{gain.value:+.1f} [{gain.ci_low:+.1f}, {gain.ci_high:+.1f}]"


def lines_of(rows: Sequence[dict[str, Any]], log_ratio: np.ndarray) -> Iterator[str]:
    """The tables in Markdown."""
    like = np.abs(log_ratio) <= LIKE
    longer = hits(log_ratio)
    yield "| reward | ε | all pairs | less that of length, points | like length | less that of length, points |"
    yield "|---|---|---|---|---|---|"
    yield f"| {LONGER} | – | {accuracy(longer[None])} | 0 | {accuracy(longer[None, like])} | 0 |"
    names = [name_of(epsilon) for epsilon in EPSILONS]
    for arm, what in ARMS.items():
        for epsilon in names:
            margins = [row["arms"][arm]["margin"] for row in rows if row["epsilon"] == epsilon]
            if not margins:
                continue
            own = hits(np.array(margins))
            cells = [accuracy(own), beyond(own, longer), accuracy(own[:, like]), beyond(own[:, like], longer[like])]
            yield f"| {what} | {epsilon} | {' | '.join(cells)} |"
    yield ""
    yield f"{like.sum()} of {len(like)} evaluation pairs are of like length. What was chosen:"
    yield ""
    yield "| ε | features; directions; length, and how many seeds chose them |"
    yield "|---|---|"
    for epsilon in names:
        counted = Counter(row["arms"]["chosen"]["setting"] for row in rows if row["epsilon"] == epsilon)
        if counted:
            yield f"| {epsilon} | {'. '.join(f'{name}: {times}' for name, times in counted.most_common())} |"
    whole = next((row["losses"] for row in rows if row["epsilon"] == name_of(math.inf)), None)
    if whole is None:
        return
    yield ""
    yield f"Held-out loss at ε = ∞ by features, nats, at the best number of directions; no reward: {math.log(2):.4f}"
    yield ""
    yield "| features | without length | with length |"
    yield "|---|---|---|"
    for name in (*SETS, MINILM):
        cells = []
        for length in (False, True):
            able = [whole[str(Setting(name, count, length))] for count in COMPONENTS]
            cells.append(f"{min(able):.4f}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", default=HELPFUL, help="folder of train and eval under PRIVATE_RLHF_TEST_DATA")
    options = parser.parse_args()
    options.home.mkdir(parents=True, exist_ok=True)
    try:
        bed, prompts = load_bed(options.home, options.data)
        rows = fits(bed, prompts, options.home / "fits.jsonl", options.seeds)
    except UserError as error:
        print(f"human_reward: {error}", file=sys.stderr)
        return 2
    text = "\n".join(lines_of(rows, bed.log_ratio.numpy())) + "\n"
    atomic.write_text(options.home / "table.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
