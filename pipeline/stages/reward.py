"""Stage reward: the reward r̄ from privatised labels by the private likelihood (PPKL Eq. 8–9), and its uncertainty Γ.

`head` fits the papers' linear class: frozen last-token features and a linear head, by Fisher scoring, with the ridge
chosen by cross-validated private log-likelihood (reading z only, so it costs no privacy). `lora` and `full` go on from
there with TRL's RewardTrainer, and fit the head again on the trained features. Either way the statistics of Γ are those
of the head's own fit, of the privatised likelihood's Fisher information unless the recipe asks for another kind.
`reward.external` takes a finished reward model instead.

Reads:   privatize/release (z and its ε), sft/model (backbone).
Writes:  reward/model (AutoModelForSequenceClassification + metadata + bonus statistics), reward/fit.json.
Command: private-rlhf launch -m private_rlhf.stages.reward --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import PUBLIC, LabelNoise, share_text
from private_rlhf.core.noise_levels import LevelledNoise, group_numbers, independent_labels, rows_of, true_share
from private_rlhf.data.release import ReleasedPair, ReleaseManifest, read_release
from private_rlhf.data.render import Renderer, left_out, make_renderer, text_count
from private_rlhf.evaluation.calibration import preference_calibration
from private_rlhf.evaluation.rates import beats, prompt_numbers
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.model_card import CardText, Provenance, write_beside
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.bonus_fit import check_uncertainty, head_bonus
from private_rlhf.reward_models.checkpoint import LEVELS, RewardMetadata, reward_text, save_reward_checkpoint
from private_rlhf.reward_models.external import use_external
from private_rlhf.reward_models.head import PairFeatures, fit_head, refit_head
from private_rlhf.reward_models.losses import bounded_reward, get_loss
from private_rlhf.reward_models.model import RewardModel, set_score_weight
from private_rlhf.reward_models.pairs import pair_features, rendered_pairs
from private_rlhf.reward_models.ridge import RidgeSelection
from private_rlhf.reward_models.training import TrainedBackbone, train_backbone
from private_rlhf.reward_models.uncertainty import Bonus
from private_rlhf.stages.context import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Fit the features that all processes bring; save from the main one."""
    recipe, settings = context.recipe, context.recipe.reward
    accelerator = make_accelerator(context.world)
    if settings.external is not None:
        main = accelerator.is_main_process
        return use_external(settings.external, settings.kappa, recipe.model, context.folder, main, recipe.name)

    # --- z, its ε, and token ids --------------------------------------------------------------------------------------
    release = read_release(context.run.released / "release")
    renderer = make_renderer(recipe.model, load_tokenizer(context.reference))
    rows, pairs, dropped = rendered_pairs(release.rows, renderer, recipe.model.too_long, settings.max_pairs)
    training, validation = split([row.record_id for row in rows], settings.validation_fraction, recipe.seed)
    noise, held_out_noise = noises(release.manifest, rows, (training, validation), accelerator.num_processes)
    groups = torch.from_numpy(prompt_numbers([rows[i] for i in validation]))

    # --- r̄: linear head on frozen features, then optionally the whole backbone ----------------------------------------
    pad = renderer.tokenizer.pad_token_id
    load = partial(load_backbone, context.reference, settings, recipe.model.dtype, pad)

    def features_of(model: RewardModel, part: str) -> PairFeatures:
        keep = context.checkpoints / part
        return pair_features(model, pairs, pad, settings.feature_batch_size, keep, accelerator)

    backbone = load()
    check_uncertainty(backbone, settings)
    model = RewardModel(backbone.to(accelerator.device), reward_bound=settings.reward_bound)
    result, more = TrainedBackbone(backbone, [], None), {}
    if settings.mode == "head" or settings.head_warmup:
        features = features_of(model, "frozen")
        prompts = [rows[i].prompt for i in training]
        fit, selection = fit_head(features.rows(training), noise, settings, prompts=prompts, seed=recipe.seed)
    if settings.mode != "head":
        result = train_backbone(
            backbone,
            [pairs[i] for i in training],
            [pairs[i] for i in validation],
            noise,
            settings,
            held_out_noise=held_out_noise,
            tokenizer=renderer.tokenizer,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
            checkpoints=context.checkpoints,
            world=context.world,
            warm_weight=fit.weight if settings.head_warmup else None,
            reload=load,
            track=context.track,
        )
        model = RewardModel(result.model.to(accelerator.device), reward_bound=settings.reward_bound)
        features = features_of(model, "trained")
        trained = held_out(model, features.rows(validation), held_out_noise, groups)["validation_log_likelihood"]
        warm_ridge = fit.ridge if settings.head_warmup else None
        more = {"warm_start_ridge": warm_ridge, "trained_head_log_likelihood": trained}
        fit, selection = refit_head(features.rows(training), features.rows(validation), noise, settings, held_out_noise)
    bonus = head_bonus(fit, features.rows(training), settings, recipe.seed)
    set_score_weight(result.model, fit.weight)

    # --- held-out check on z, and the checkpoint ----------------------------------------------------------------------
    check = held_out(model, features.rows(validation), held_out_noise, groups)
    ridge_judged = settings.mode != "head" and settings.refit_ridge is None
    imitated = recipe.data.demonstrations == "release_preferred"  # the backbone has seen what their labels prefer
    check["validation_after_selection"] = ridge_judged or result.early_stopping is not None or imitated
    metadata = describe_model(recipe, release.manifest, noise, backbone, fit.ridge, len(training))
    facts = describe(metadata, check | more, selection, result, dropped)
    if accelerator.is_main_process:
        text = reward_text(f"{len(training)} released pairs", held_out_text(check), result.model, metadata.reward_bound)
        save(context, result.model, metadata, bonus, facts, renderer, release.manifest, text)
    accuracy, unread = check["validation_accuracy_debiased"], ""
    if len(rows) + dropped < len(release.rows):
        unread = f" and {len(validation)} held out, of {len(release.rows)} (reward.max_pairs)"
    return {
        **{name: facts[name] for name in ("mode", "loss", "ridge", "num_pairs", "validation_log_likelihood")},
        "losses": [loss for _, loss in result.history],
        "texts": [text_count("pairs", len(release.rows), len(release.rows) - dropped, renderer)],
        "summary": f"{settings.mode} fit of {len(training)} pairs{unread}{left_out(dropped)} by {settings.loss}, "
        f"λ = {metadata.ridge:.3g}; "
        f"held-out debiased accuracy {share_text(accuracy)}",
    }


def describe_model(
    recipe: Recipe,
    manifest: ReleaseManifest,
    noise: LabelNoise | LevelledNoise,
    backbone: Any,
    ridge: float,
    num_pairs: int,
) -> RewardMetadata:
    """The metadata of a reward model fitted to `num_pairs` labels."""
    settings = recipe.reward
    return RewardMetadata(
        noise=noise,
        loss=settings.loss,
        reward_bound=settings.reward_bound,
        ridge=ridge,
        n_pairs=num_pairs,
        kappa=settings.kappa,
        mode=settings.mode,
        num_layers=int(backbone.config.num_hidden_layers),
        base_model=recipe.model.source.split("/")[-1],
        public=not manifest.private,
        uncertainty=settings.uncertainty.kind,
    )


def save(
    context: StageContext,
    model: Any,
    metadata: RewardMetadata,
    bonus: Bonus,
    facts: dict[str, Any],
    renderer: Renderer,
    manifest: ReleaseManifest,
    text: CardText,
) -> None:
    """Write reward/model with its card, and reward/fit.json, from the main process."""
    folder, tokenizer = context.folder / "model", tokenizer_as_trained(renderer, "right")
    save_reward_checkpoint(folder, model, metadata, bonus=bonus, tokenizer=tokenizer, overwrite=True)
    atomic.write_json(context.folder / "fit.json", facts)
    recipe = context.recipe
    origin = Provenance("reward", recipe.name, recipe.model, recipe.data, recipe.override)
    write_beside(folder, origin, renderer, manifest.as_dict(), text)


def noises(
    manifest: ReleaseManifest, rows: list[ReleasedPair], parts: tuple[torch.Tensor, torch.Tensor], processes: int
) -> list[LabelNoise | LevelledNoise]:
    """The noise of the labels of each part of the rows. UserError for an ε of each label on several processes."""
    noise = manifest.noise_of(rows)
    if isinstance(noise, LevelledNoise) and processes > 1:
        raise UserError(f"{manifest.source}: an ε for each label is fitted by one process: run without launch")
    return [rows_of(noise, part) for part in parts]


def split(record_ids: list[str], fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(training, validation) indices without a record id in both. UserError: too few pairs for both."""
    record, total = torch.from_numpy(group_numbers(record_ids)), len(set(record_ids))
    count = max(1, round(total * fraction))
    if total - count < 2:
        raise UserError(f"the released pairs must be enough to fit a reward and hold some out, got {total}: bring more")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    validation = torch.isin(record, order[:count])
    return (~validation).nonzero()[:, 0], validation.nonzero()[:, 0]


@torch.no_grad()
def held_out(
    model: RewardModel, features: PairFeatures, noise: LabelNoise | LevelledNoise, groups: torch.Tensor
) -> dict[str, Any]:
    """Private log-likelihood per pair and debiased accuracy on held-out z; both read z only. groups: (n,) the
    `prompt_numbers` of all pairs."""
    chosen = bounded_reward(model.raw_score_of(features.chosen.to(model.weight.device)), model.reward_bound)
    rejected = bounded_reward(model.raw_score_of(features.rejected.to(model.weight.device)), model.reward_bound)
    margin = features.spread.all((chosen - rejected).cpu())
    loss = get_loss("private_likelihood").value(margin, torch.ones_like(margin), noise)
    prompts = features.spread.all(groups if features.numbers is None else groups[features.numbers]).numpy()
    agrees = beats(margin.numpy(), np.zeros(len(margin)))
    count = independent_labels((loss - loss.mean()).numpy(), prompts)
    return {
        "validation_pairs": len(margin),
        "validation_log_likelihood": -float(loss.mean()),
        "validation_log_likelihood_se": float(loss.std() / math.sqrt(count)) if len(margin) > 1 else None,
        "null_log_likelihood": -math.log(2.0),
        "validation_accuracy_private": true_share(agrees, PUBLIC, prompts).as_dict(),
        "validation_accuracy_debiased": true_share(agrees, noise, prompts).as_dict(),
        "calibration": preference_calibration(margin.numpy(), noise, prompts),
    }


def held_out_text(check: dict[str, Any]) -> str:
    """The result of `held_out` as a sentence for the card."""
    accuracy = share_text(check["validation_accuracy_debiased"])
    likelihood, error = check["validation_log_likelihood"], check["validation_log_likelihood_se"]
    spread = f" (standard error {error:.3f})" if error is not None else ""
    return (
        f"On {check['validation_pairs']} held-out pairs: accuracy {accuracy} on true labels, estimated from the private"
        f" ones, chance .5; private log-likelihood per pair {likelihood:.3f}{spread}, chance"
        f" {check['null_log_likelihood']:.3f}."
    )


def describe(
    metadata: RewardMetadata,
    check: dict[str, Any],
    selection: RidgeSelection,
    result: TrainedBackbone,
    dropped: int,
) -> dict[str, Any]:
    """reward/fit.json, computed only from z."""
    record = metadata.to_json()
    path = zip(selection.ridges, selection.held_out_loss, selection.paired_standard_error, strict=True)
    names = ("mode", "loss", "epsilon", "keep_prob", LEVELS, "reward_bound", "ridge", "kappa")
    return {
        **{name: record[name] for name in names if name in record},
        "uncertainty": metadata.uncertainty,
        "num_pairs": metadata.n_pairs,
        "num_layers": metadata.num_layers,
        "dropped_too_long": dropped,
        **check,
        "ridge_path": [[ridge, -loss, error] for ridge, loss, error in path],
        "training_loss": result.history,
        "early_stopping": result.early_stopping,
    }


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("reward")
