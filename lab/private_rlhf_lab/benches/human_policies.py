"""PPKL's Table 1 in kind, on people's own preferences: how often a policy finds the chosen answer likelier.

SFT, DPO (public labels; private likelihood of Eq. 9, debiased (rDPO), uncorrected (naive)) and PPO on a reward learnt
by the private likelihood, at several ε. All arms of a seed share π_ref, pairs, key and flips (at falling ε a chain),
the same adapted layers and the same test pairs, so what differs is compared pair by pair. All labels of `--pairs` pairs
are there for every arm: DPO takes one step for every 16 of them, once; the reward of PPO reads them all, then PPO takes
the recipe's steps.

Likelihood win rate: length-normalised log-likelihood, ties half. Intervals: 95 % over test pairs of the mean over
seeds (and ± over seeds, Student's t, where there are several). A policy trained on coins gains by it too, as it drifts
towards longer answers: how often it prefers those, and its gain on pairs of like length, stand beside. Against SFT:
Holm over the arms at 5 %. The retained gain is stated, with Fieller's interval, only where the gain at ε = ∞ is three
times the half width of its interval or more.

Run:  python -m private_rlhf_lab.benches.human_policies --home runs/human_policies --data FOLDER [--pairs 768]
      (FOLDER: hh_helpful, with train.jsonl and eval.jsonl; finished arms stay, unfinished ones go on; --report-only)
      With --choose the judges are the training pairs that no arm learns from: settings are chosen there, as DPO's rate.
Writes HOME: a run directory per arm, wins/ARM.npy, settings.json, table.md
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.stats import Estimate, holm, paired_p
from private_rlhf.data.release import ReleasedPair
from private_rlhf.data.render import make_renderer
from private_rlhf.evaluation.rates import (
    like_length,
    longer_answers,
    pair_rows,
    preferences,
    prefers_longer,
)
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import TokenBatch, record_states, response_forward, token_batch
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.lm.rows import batches, sharing_of
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from scipy import stats

from private_rlhf_lab.benches.alignment_arms import Arm, Workshop
from private_rlhf_lab.benches.alignment_cost import bounded
from private_rlhf_lab.benches.epsilon_tables import interval, name_of
from private_rlhf_lab.benches.human_features import digest
from private_rlhf_lab.fieller import fieller

RECIPE = Path(__file__).resolve().parents[3] / "configs" / "hh_rlhf_smollm2.yaml"
ADAPTED = 10  # layers from the top that learn, of 30; those below are read once for all arms
BATCH = 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOSSES = {"private_likelihood": "DPO, Eq. 9", "debiased": "DPO, debiased (rDPO)", "uncorrected": "DPO, naive"}
STAGES = {"dpo": ("privatize", "dpo"), "ppo": ("privatize", "reward", "ppo")}
SHARES = (0.05, 0.1, 0.2)
FACTOR = 3.0  # of a half width, that the gain at ε = ∞ must reach before a share of it says something


# --- arms -------------------------------------------------------------------------------------------------------------


def arms_of(epsilons: Sequence[float], seeds: Sequence[int]) -> list[Arm]:
    """Every arm: those that the others are compared with first, the other losses of DPO last."""
    finite = sorted((epsilon for epsilon in epsilons if not math.isinf(epsilon)), reverse=True)
    found = []
    for seed in seeds:
        found += [Arm("dpo", math.inf, seed, "private_likelihood"), Arm("ppo", math.inf, seed)]
        for epsilon in finite:
            found += [Arm("dpo", epsilon, seed, "private_likelihood"), Arm("ppo", epsilon, seed)]
        for loss in ("uncorrected", "debiased"):
            found += [Arm("dpo", epsilon, seed, loss) for epsilon in finite]
    return found


def label(arm: Arm) -> str:
    """Its method as printed; without flips the three losses of DPO are one."""
    if arm.method == "ppo":
        return "PPO, Eq. 9 reward"
    return "DPO" if math.isinf(arm.epsilon) else LOSSES[str(arm.loss)]


def write_data(source: Path, home: Path, pairs: int, choose: bool) -> None:
    """HOME/data: the first `pairs` training pairs, all test pairs (choose: the other training pairs instead), and
    π_ref's demonstrations: of every training pair the answer that a checksum of the texts picks, whichever was
    preferred.
    """
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(rows) < pairs:
        raise UserError(f"{source} has {len(rows)} training pairs, fewer than --pairs {pairs}")
    shown = []
    for row in rows:
        first, second = sorted((row["chosen"], row["rejected"]))
        picked = zlib.crc32(f"{row['prompt']}\n{first}\n{second}".encode()) % 2
        shown.append({"prompt": row["prompt"], "response": (first, second)[picked]})
    (home / "data").mkdir(parents=True, exist_ok=True)
    judges = lines_of(rows[pairs:]) if choose else (source / "eval.jsonl").read_text(encoding="utf-8")
    files = {"data/train": lines_of(rows[:pairs]), "data/eval": judges, "demonstrations": lines_of(shown)}
    for name, content in files.items():
        atomic.write_text(home / f"{name}.jsonl", content)


def claim(home: Path, settings: dict[str, Any]) -> None:
    """Makes `home` that of these settings, HOME/settings.json. UserError where arms of others, or of unknown ones, are
    finished there: they would stand in one table.
    """
    path = home / "settings.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if known != settings and any((home / "wins").glob("*.npy")):
        raise UserError(f"{home} holds arms of other data or settings: choose another --home")
    home.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, settings)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """All that arms of one table share, by value: texts, recipe, pairs, and overrides beside the paths of a home."""
    files = (options.data / "train.jsonl", options.data / "eval.jsonl", RECIPE)
    given = workshop_of(Path("HOME"), options.pairs, 1, options.set).overrides
    own = {"pairs": options.pairs, "choose": options.choose, "overrides": list(given)}
    return {"texts": digest([path.read_text(encoding="utf-8") for path in files]), **own}


def lines_of(rows: Sequence[dict[str, str]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def workshop_of(home: Path, pairs: int, lanes: int, overrides: Sequence[str]) -> Workshop:
    """All arms adapt the same layers and take the pairs once."""
    own = (
        f"data.preferences={home / 'data'}",
        f"data.demonstrations={home / 'demonstrations.jsonl'}",
        "data.evaluation_prompts=evaluation",
        f"sft.lora.last_layers={ADAPTED}",
        f"ppo.lora.last_layers={ADAPTED}",
        f"dpo.lora={{rank: 16, last_layers: {ADAPTED}, target_modules: [{', '.join(MODULES)}]}}",
        f"dpo.max_steps={pairs // BATCH}",
        f"dpo.batch_size={BATCH}",
        "dpo.micro_batch_size=8",
        "dpo.learning_rate=3.0e-3",  # by --choose: 5.0e-4 turns 3 % of the pairs, this one 18 %
        "reward.num_layers=15",
        "reward.num_components=128",
        "reward.ridge=evidence",
    )
    return Workshop(home, RECIPE, (*own, *overrides), lanes, STAGES)


# --- likelihoods ------------------------------------------------------------------------------------------------------


class Judge:
    """Test pairs read once under π_ref up to the layers that learn."""

    def __init__(self, reference: Path, recipe: Recipe, pairs: Sequence[ReleasedPair]) -> None:
        model = load_causal_lm(reference, recipe.model.dtype).eval()
        renderer = make_renderer(recipe.model, load_tokenizer(reference))
        rows = pair_rows(pairs, renderer)
        self.layers = len(model.get_decoder().layers) - ADAPTED
        self.dtype, self.temperature = recipe.model.dtype, recipe.ppo.temperature
        self.batches: list[tuple[list[int], TokenBatch]] = []
        found = np.zeros(len(rows))
        for picked in batches([[*prompt, *response] for prompt, response in rows], sharing_of(model), 32):
            batch = token_batch(
                [rows[i][0] for i in picked], [rows[i][1] for i in picked], renderer.tokenizer.pad_token_id,
                torch.device("cpu"), sharing=sharing_of(model),
            )  # fmt: skip
            with record_states(model, self.layers) as states, torch.no_grad():
                found[picked] = self._mean(model, batch)
            self.batches.append((picked, batch.above(self.layers, states[0])))
        self.reference = wins(found)

    def of(self, checkpoint: Path) -> np.ndarray:
        """Wins (n,) of a policy whose lower layers are π_ref's."""
        model = load_causal_lm(checkpoint, self.dtype).eval()
        found = np.zeros(2 * len(self.reference))
        for picked, batch in self.batches:
            with torch.no_grad():
                found[picked] = self._mean(model, batch)
        return wins(found)

    def _mean(self, model: Any, batch: TokenBatch) -> np.ndarray:
        logits, _ = response_forward(model, batch)
        logprobs = batch.spread(token_logprobs(logits, batch.tokens, self.temperature))
        return np.asarray((logprobs.sum(dim=1) / batch.response_mask.sum(dim=1)).float().numpy())


def wins(logprobs: np.ndarray) -> np.ndarray:
    """(n,) 1 where the chosen answer is likelier, 0 where the other is, ½ for a tie; (2n,) as from `pair_rows`."""
    return 0.5 + 0.5 * preferences(logprobs)


# --- statistics -------------------------------------------------------------------------------------------------------


def over_pairs(values: np.ndarray) -> Estimate:
    """Mean of (seeds, pairs) with its 95 % interval over pairs (Student's t of the means over seeds)."""
    mean, half = interval(values.mean(axis=0).tolist())
    return Estimate(mean, mean - half, mean + half, values.shape[1])


def detectable(disagreement: float, pairs: int) -> float:
    """The paired difference of win rates found 8 times in 10 at 5 %, where two policies disagree on that share."""
    return float((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * math.sqrt(disagreement / pairs))


def retained(gain: np.ndarray, whole: np.ndarray) -> tuple[float, float, float] | None:
    """(share, low, high) of mean gains, (seeds, pairs) each, by Fieller; None where the whole gain is too small."""
    total = over_pairs(whole)
    if total.value < FACTOR * (total.ci_high - total.value):
        return None
    top, bottom = gain.mean(axis=0), whole.mean(axis=0)
    return (float(top.mean() / bottom.mean()), *fieller(top, bottom))


def p_value(gain: np.ndarray) -> float:
    """Two-sided, of no difference, over pairs of the mean over seeds."""
    return paired_p(gain.mean(axis=0))


# --- table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Of the test pairs, (pairs,): `longer` as from `longer_answers`; `like`, whether both answers are of like length.

    A policy that merely drifts finds longer answers likelier than before, whatever its labels said, and people choose
    them more often: on pairs of like length that is worth nothing.
    """

    longer: np.ndarray
    like: np.ndarray

    @classmethod
    def of(cls, pairs: Sequence[ReleasedPair]) -> Lengths:
        """In characters."""
        return cls(longer_answers(pairs), like_length(pairs))

    def prefers_longer(self, won: np.ndarray) -> float:
        """Share of pairs, wins (seeds, pairs), on which the longer answer is found likelier; ½ where there is none."""
        return float(np.mean([prefers_longer(2.0 * own - 1.0, self.longer).value for own in won]))


def summarise(found: dict[Arm, np.ndarray], reference: dict[int, np.ndarray], lengths: Lengths) -> list[dict[str, Any]]:
    """One entry per method and ε, over the seeds that are there and, against ε = ∞, those that both have."""
    groups: dict[tuple[str, str | None, float], dict[int, np.ndarray]] = {}
    for arm, values in found.items():
        groups.setdefault((arm.method, arm.loss, arm.epsilon), {})[arm.seed] = values
    whole = {method: groups.get((method, loss, math.inf), {}) for method, loss in
             (("dpo", "private_likelihood"), ("ppo", None))}  # fmt: skip
    entries = []
    for (method, loss, epsilon), own in groups.items():
        gain = np.stack([own[seed] - reference[seed] for seed in own])
        common = [seed for seed in own if seed in whole[method]]
        entry: dict[str, Any] = {
            "arm": Arm(method, epsilon, 0, loss),
            "seeds": sorted(own),
            "win": over_pairs(np.stack(list(own.values()))),
            "gain": over_pairs(gain),
            "gain_over_seeds": interval(gain.mean(axis=1).tolist())[1],
            "disagreement": float(np.mean(gain**2)),
            "prefers_longer": lengths.prefers_longer(np.stack(list(own.values()))),
            "like": over_pairs(gain[:, lengths.like]),
            "p": p_value(gain),
        }
        if common and not math.isinf(epsilon):
            mine, theirs = (np.stack([side[seed] for seed in common]) for side in (own, whole[method]))
            base = np.stack([reference[seed] for seed in common])
            entry |= {"loss": over_pairs(mine - theirs), "retained": retained(mine - base, theirs - base)}
        eq9 = groups.get(("dpo", "private_likelihood", epsilon), {})
        if both := [seed for seed in own if loss in ("uncorrected", "debiased") and seed in eq9]:
            entry["behind"] = over_pairs(np.stack([eq9[seed] - own[seed] for seed in both]))
        entries.append(entry)
    for entry, different in zip(entries, holm([entry["p"] for entry in entries]), strict=True):
        entry["different"] = different
    return entries


def points(estimate: Estimate | None) -> str:
    """A difference of win rates in points."""
    if estimate is None:
        return "–"
    low, value, high = (100 * each for each in (estimate.ci_low, estimate.value, estimate.ci_high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def table(
    entries: Sequence[dict[str, Any]], reference: dict[int, np.ndarray], longer: Estimate, lengths: Lengths, left: int
) -> str:
    """Markdown: the power calculation, then one row an arm."""
    size = len(next(iter(reference.values())))
    power = ", ".join(f"{100 * detectable(share, size):.1f} where {share:.0%} of pairs turn" for share in SHARES)
    base = over_pairs(np.stack(list(reference.values())))
    lines = [
        f"{size} test pairs. Found 8 times in 10 is a paired difference of, in points: {power}.", "",
        "| policy | ε | seeds | win rate | less SFT, points | prefers the longer | less SFT, like length"
        " | pairs turned | less that at ε = ∞ | retained |",
        "|---" * 10 + "|",
        f"| the longer answer | – | – | {bounded(longer.as_dict(), '.3f')} | – | 1.00 | – | – | – | – |",
        f"| SFT | – | {len(reference)} | {bounded(base.as_dict(), '.3f')} | –"
        f" | {lengths.prefers_longer(np.stack(list(reference.values()))):.2f} | – | – | – | – |",
    ]  # fmt: skip
    for entry in entries:
        win, share = entry["win"], entry.get("retained")
        seeds = "" if math.isnan(entry["gain_over_seeds"]) else f", seeds ± {100 * entry['gain_over_seeds']:.1f}"
        mark = " \\*" if entry["different"] else ""
        cells = [
            label(entry["arm"]), name_of(entry["arm"].epsilon), str(len(entry["seeds"])),
            bounded(win.as_dict(), ".3f"),
            f"{points(entry['gain'])}{seeds}{mark}",
            f"{entry['prefers_longer']:.2f}", points(entry["like"]),
            f"{entry['disagreement']:.0%}", points(entry.get("loss")),
            "–" if share is None else f"{share[0]:.0%} [{share[1]:.0%}, {share[2]:.0%}]",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    like = f"{int(lengths.like.sum())} pairs are of like length."
    lines += ["", f"\\*: differs from SFT, Holm over all rows at 5 %. {like}"]
    behind = [
        f"{label(e['arm'])}, ε = {name_of(e['arm'].epsilon)}: {points(e['behind'])}" for e in entries if "behind" in e
    ]
    lines += ["", f"Eq. 9 less other losses of DPO, at equal seeds, in points: {'; '.join(behind)}."] if behind else []
    return "\n".join([*lines, f"{left} arms were not run." if left else ""]).rstrip() + "\n"


# --- the command ------------------------------------------------------------------------------------------------------


def measure(workshop: Workshop, arms: Sequence[Arm], report_only: bool) -> tuple[dict[Arm, Any], dict[int, Any]]:
    """Wins of every arm that is finished, made one after the other, and of π_ref by seed."""
    folder = workshop.home / "wins"
    folder.mkdir(parents=True, exist_ok=True)
    pairs = eval_pairs(workshop.home)
    judges: dict[int, Judge] = {}
    found, reference = {}, {}
    for arm in arms:
        path, base = folder / f"{arm.name}.npy", folder / f"sft-seed{arm.seed}.npy"
        if not path.is_file() and not report_only and not workshop.make([arm]):
            recipe = load_recipe(Recipe, workshop.run_dir(arm).root / "recipe.yaml")
            if arm.seed not in judges:
                judges[arm.seed] = Judge(workshop.run_dir(arm).stage("sft") / "model", recipe, pairs)
                save(base, judges[arm.seed].reference)
            save(path, judges[arm.seed].of(workshop.run_dir(arm).stage(arm.method) / "model"))
        if path.is_file():
            found[arm], reference[arm.seed] = np.load(path), np.load(base)
    return found, reference


def eval_pairs(home: Path) -> list[ReleasedPair]:
    """Of HOME/data."""
    rows = map(json.loads, (home / "data" / "eval.jsonl").read_text(encoding="utf-8").splitlines())
    return [ReleasedPair(row["prompt"], row["chosen"], row["rejected"], "") for row in rows]


def save(path: Path, values: np.ndarray) -> None:
    """By a temporary name."""
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, values)
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="hh_helpful, with train.jsonl and eval.jsonl")
    parser.add_argument("--pairs", type=int, default=2096, help="training pairs, a multiple of 16")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.1, 0.5, 2.0, math.inf])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override of every arm")
    parser.add_argument("--arms", nargs="+", default=["ppo", *LOSSES], choices=["ppo", *LOSSES], help="and no others")
    parser.add_argument("--choose", action="store_true", help="judge by the training pairs that no arm learns from")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    home = options.home.resolve()
    try:
        if not options.report_only:
            claim(home, settings_of(options))
            write_data(options.data, home, options.pairs, options.choose)
        arms = [arm for arm in arms_of(options.epsilons, options.seeds) if (arm.loss or arm.method) in options.arms]
        workshop = workshop_of(home, options.pairs, options.lanes, options.set)
        found, reference = measure(workshop, arms, options.report_only)
        if not found:
            raise UserError(f"{home} holds no finished arm: run without --report-only")
        lengths = Lengths.of(eval_pairs(home))
        entries = summarise(found, reference, lengths)
        longer = over_pairs(0.5 + 0.5 * lengths.longer[None])
        text = table(entries, reference, longer, lengths, len(arms) - len(found))
        atomic.write_text(home / "table.md", text)
        print(text)
    except UserError as error:
        print(f"human_policies: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
