"""Stage count: how often the evaluated policies are right about true evaluation labels, with discrete Laplace noise.

Only under `evaluation_labels: laplace`. The answer is differentially private and its cost is in the ledger; a question
that was asked before is free (`private_rlhf.privacy.counts`).

Reads:   evaluate/decisions.json, data.preferences (raw), the owner's key file.
Writes:  count/counts.json, count/rates.json (likelihood win rates, which metrics and report take).
Command: python -m private_rlhf.stages.count --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from private_rlhf.core.atomic import write_json
from private_rlhf.core.noise import share_text
from private_rlhf.data.curate import response
from private_rlhf.data.engine import count_right, gather_events
from private_rlhf.data.publish import refusals
from private_rlhf.data.raw_source import RawSource, split_rows
from private_rlhf.evaluation.rates import LONGER, counted_rates, read_decisions, spread
from private_rlhf.privacy import counts as privacy_counts
from private_rlhf.privacy.ledger import Ledger, ReleasePlan
from private_rlhf.privacy.prf import frame
from private_rlhf.recipe.data_section import bare_name
from private_rlhf.stages.context import StageContext

KNOWN_ALREADY = 5e-324  # an ε that changes no total: the events are compared with the store and not entered


def run(context: StageContext) -> dict[str, Any]:
    """Read labels once, on the main process."""
    if not context.world.main:
        return {}
    choices, places, rows = read_decisions(context.run.stage("evaluate"))
    counted = noisy_counts(context, spread(choices, places, rows))
    rates = {name: rate.as_dict() for name, rate in counted_rates(choices, counted).items()}
    longer = rates.pop(LONGER)
    results = {"likelihood_win_rate": rates, "longer_answer_baseline": longer, "label_counts": counted}
    write_json(context.folder / "rates.json", results)
    text = ", ".join(f"{name} {share_text(rate)}" for name, rate in rates.items())
    return {"summary": f"likelihood win rates by noisy counts at ε = {counted['epsilon']:g}: {text}"}


def noisy_counts(context: StageContext, decisions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Noisy numbers of evaluation labels that each rule gets right, all at privatize.count_epsilon together.

    Also written to count/counts.json.

    decisions: by rule, for every row of privatize/evaluation in its order: +1 if the rule prefers `chosen`, -1 if it
        prefers `rejected`, 0 if it abstains.

    Returns: JSON types: `epsilon`, `epsilon_per_count`, `counts` by rule, `ledger` (the card's facts, this included).

    Raises:
        UserError: the preferences changed since the release, or a budget would be exceeded.
    """
    recipe = context.recipe
    raw = RawSource(recipe.data, recipe.privatize, context.run.root)
    epsilon = recipe.privatize.count_epsilon
    assert epsilon is not None
    key = raw.owner_key()
    ledger = Ledger.open(key)
    if not raw.input_unchanged():
        raise raw.changed()
    sources = raw.open_sources()
    mechanism = response(recipe.privatize.epsilon, sources[0].layout.options)
    with refusals(context.folder), raw.workspace(key, sources, context.folder, context.checkpoints) as workspace:
        test = split_rows(workspace, recipe.data, sources).test
        events = gather_events(workspace.pool, [test], key, workspace.work / "events")
        if any(len(rule) != len(events) for rule in decisions.values()):
            raise raw.changed()
        counts, names = count_right(test, mechanism, key, decisions, (repr(epsilon).encode(), events.content))
        identity = key.keyed_digest(map(frame, (b"counts", *names.values())))
        plan = ReleasePlan(bare_name(recipe.data.preferences), epsilon, len(events), identity, "counts")
        with ledger.reserve(plan, raw.budget()) as reservation:
            known, into = [KNOWN_ALREADY] * len(mechanism.levels), reservation.generation
            if not reservation.already and any(events.merge(workspace.pool, ledger.store, known, into)):
                raise raw.changed()
            reservation.written()
            answer = privacy_counts.noisy_counts(key.prf, names, counts, epsilon)
            write_json(context.folder / "counts.json", answer)
            reservation.commit(context.folder.resolve())
    return answer | {"ledger": ledger.card_facts()}


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("count")
