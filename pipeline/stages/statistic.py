"""Stage statistic: one noisy sum of the true labels (central label-DP), for recipes with `privatize.trust: holder`.

Every process brings frozen features of some pairs, which know no label, in a basis that knows none. The main process
then takes the privatise stage's way to the labels, adds up the rows whose label is +1 in integers, and adds noise keyed
by the owner's key: the same sum again has the same noise and costs nothing more; another one is charged on top of all
that was released before. docs/explanation/central-label-dp.md has the proof and says who must be trusted.

Reads:   privatize/release (pairs without labels), sft/model (backbone), data.preferences (raw), the owner's key file.
Writes:  statistic/sum (s̃, the public rows and their basis as safetensors; what they are as JSON).
Command: private-rlhf launch -m private_rlhf.stages.statistic --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.data import inputs
from private_rlhf.data.engine import gather_events, sum_of_labels
from private_rlhf.data.publish import refusals
from private_rlhf.data.raw_source import RawSource, split_rows
from private_rlhf.data.render import left_out, text_count
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.privacy.ledger import Ledger, ReleasePlan
from private_rlhf.privacy.mechanism import NoisySum
from private_rlhf.privacy.prf import frame
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.data_section import bare_name
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.basis import FeatureBasis, pair_basis
from private_rlhf.reward_models.central import from_integers, noise_for, public_rows, save_statistic
from private_rlhf.reward_models.head import PairFeatures
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.reward_models.pairs import pair_features, rendered_pairs
from private_rlhf.stages.context import StageContext

KNOWN_ALREADY = 5e-324  # an ε that changes no total: the events are compared with the store, the sum's ε comes on top


def run(context: StageContext) -> dict[str, Any]:
    """Compute features on every process; read the labels once, only on the main one."""
    recipe, world = context.recipe, context.world
    accelerator = make_accelerator(world)

    # --- rows of features, from which no label can be told ------------------------------------------------------------
    release = inputs.release(context.run.released)
    renderer = inputs.make_renderer(recipe.model, load_tokenizer(context.reference))
    kept = rendered_pairs(release.rows, renderer, recipe.model.too_long)
    pad, size = renderer.tokenizer.pad_token_id, recipe.reward.feature_batch_size
    backbone = load_backbone(context.reference, recipe.reward, recipe.model.dtype, pad)
    model = RewardModel(backbone.to(accelerator.device), reward_bound=None)
    features = pair_features(model, kept.pairs, pad, size, context.checkpoints / "frozen", accelerator)
    basis, difference = coordinates(features, recipe)
    if not world.main:
        return {}

    # --- their sum ----------------------------------------------------------------------------------------------------
    rows, clip = public_rows(difference)
    matrix = np.zeros((len(release), rows.shape[1]), np.int64)  # pairs that were left out add nothing
    matrix[kept.places] = rows
    facts = released_sum(context, matrix, clip, basis)
    own = recipe.privatize
    return {
        **facts,
        "texts": [text_count("pairs", len(release), len(kept.rows), renderer)],
        "summary": f"one noisy sum of {len(kept.rows)} true labels{left_out(kept.dropped)} in {rows.shape[1]} "
        f"coordinates, at ε = {own.epsilon:g} and δ = {own.sum_delta:g}",
    }


def coordinates(features: PairFeatures, recipe: Recipe) -> tuple[FeatureBasis, torch.Tensor]:
    """The basis that reward.num_components asks for, and the differences (n, k) of all pairs in it, in their order."""
    sides, spread = (features.chosen, features.rejected), features.spread
    count, blocks = recipe.reward.num_components, recipe.reward.feature_blocks
    basis = pair_basis(*sides, num_components=count, whiten=False, blocks=blocks, spread=spread)
    own = basis.coordinates(features.chosen) - basis.coordinates(features.rejected)
    if features.numbers is None:
        return basis, own
    return basis, spread.all(own)[spread.all(features.numbers).argsort()]


def released_sum(context: StageContext, matrix: np.ndarray, clip: float, basis: FeatureBasis) -> dict[str, Any]:
    """Writes the noisy sum of the rows (n, k) of `matrix`, one for each released pair in order, to statistic/sum.

    Returns what the stage's manifest says of it.

    Raises:
        UserError: the preferences changed since the release, a label is not the one that was released before, or a
            budget would be exceeded; nothing is spent then.
    """
    recipe, own = context.recipe, context.recipe.privatize
    raw = RawSource(recipe.data, own, context.run.root)
    key = raw.owner_key()
    ledger = Ledger.open(key)
    if not raw.input_unchanged():
        raise raw.changed()
    mechanism, sources = NoisySum(own.epsilon, own.sum_delta), raw.open_sources()
    noise = noise_for(matrix, mechanism.epsilon, mechanism.delta)
    with refusals(context.folder), raw.workspace(key, sources, context.folder, context.checkpoints) as workspace:
        train = split_rows(workspace, recipe.data, sources).train
        events = gather_events(workspace.pool, [train], key, workspace.work / "events")
        raw.check_no_cap(ledger.left_out(events.partitions(), None)[1])
        if len(events) != len(matrix):
            raise raw.changed()
        fields = (b"noisy sum", repr(noise).encode(), events.content, repr(matrix.shape).encode(), matrix.tobytes())
        identity = key.keyed_digest(map(frame, fields))
        source = bare_name(recipe.data.preferences)
        plan = ReleasePlan(source, mechanism.epsilon, len(events), identity, "sum", delta=mechanism.delta)
        with ledger.reserve(plan, raw.budget()) as reservation:
            if not reservation.already and any(
                events.merge(workspace.pool, ledger.store, KNOWN_ALREADY, reservation.generation)
            ):
                raise UserError(
                    f"{source}: some labels are not those that were released before under this key, or come under other"
                    " names, so no sum of them is released: a label never changes; give the first ones"
                )
            reservation.written()
            answer = sum_of_labels(train, matrix, noise, key, bytes.fromhex(identity))
            statistic = from_integers(answer, matrix, noise, clip, mechanism.epsilon, mechanism.delta)
            save_statistic(context.folder / "sum", statistic, basis, mechanism.guarantee())
            reservation.commit(context.folder.resolve())
    return {"epsilon": mechanism.epsilon, "delta": mechanism.delta, "ledger": ledger.card_facts()}


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("statistic")
