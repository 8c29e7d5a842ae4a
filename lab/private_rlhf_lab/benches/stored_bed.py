"""The bed of a bench, by its options: a linear truth, a pool's file, or the answers that a run has stored."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.lm.features import extract_features
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.basis import pair_basis
from private_rlhf.reward_models.model import RewardModel

from private_rlhf_lab.benches.gibbs_learnt import Bench
from private_rlhf_lab.league.beds import COMPONENTS, Bed, linear_bed, pool_bed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --run, --pool and --kl-coef."""
    parser.add_argument("--run", type=Path, help="A run with aligner=gvpo, for its stored answers.")
    parser.add_argument("--pool", type=Path, help="Of `benchmark preferences --run RUN` or of human_pool.py.")
    parser.add_argument("--kl-coef", type=float, default=0.5, help="Of J, with --pool.")


def bed_of(options: argparse.Namespace) -> tuple[str, Callable[[int], Bed]]:
    """(name, bed of a seed); a linear truth of that seed without --run and --pool. UserError for both."""
    if options.run is None and options.pool is None:
        return "linear", linear_bed
    if options.run is not None and options.pool is not None:
        raise UserError("--run and --pool are two beds: give one of them")
    if options.pool is not None:
        bed, name = pool_bed(options.pool, options.kl_coef), options.pool.stem
    else:
        bed, name = stored_bed(RunDir(options.run)), "stored"
    return name, lambda seed: bed


def stored_bed(run: RunDir) -> Bed:
    """The draws of π_ref that stage gvpo of a run on the embedded task has stored, in the features of its reward; every
    fourth prompt is held out. UserError where there are none."""
    bench = Bench.of(run)
    settings, renderer, answers = bench.recipe.reward, bench.renderer, bench.answers
    layers = load_backbone(bench.home, settings, bench.recipe.model.dtype, renderer.tokenizer.pad_token_id)
    texts = [prompt + response for prompt, response in zip(answers.prompts, answers.responses, strict=True)]
    device, pad = torch.device("cpu"), renderer.tokenizer.pad_token_id
    features = extract_features(RewardModel(layers), texts, pad_token_id=pad, batch_size=32, device=device)
    by_prompt = features[torch.tensor(bench.rows)]
    shown, held = bench.shown, list(range(0, len(bench.rows), 4))
    sides = (by_prompt[shown, place::2].flatten(0, 1) for place in (0, 1))
    basis = pair_basis(*sides, num_components=COMPONENTS, whiten=False)
    x, truth = basis.coordinates(by_prompt), bench.truth
    source = f"answers of {answers.score.sum():.4f}, {COMPONENTS} directions"
    return Bed(x[shown], truth[shown], x[held], truth[held], bench.kl_coef, source)
