"""Stage evaluate: the trained policy against π_ref on held-out prompts and pairs, with 95 % intervals.

Win rates by the ground truth (where there is one) and by the reward model, KL(π‖π_ref), r̄, r*, J = E[r*] − kl_coef·KL,
the likelihood win rate beside the longer-answer rule, and the Gibbs policy of the same r̂ as the yardstick of PPO.

Reads:   sft/model (π_ref; ppo/reference under ppo.quantize), ppo/model (or that of the aligner; ppo/adapter too where
         servers draw), reward/model, held-out prompts, privatize/evaluation.
Writes:  evaluate/evaluation.json, evaluate/samples.json, evaluate/by_prompt.json (for paired comparisons of runs),
         evaluate/decisions.json (which answer of each held-out pair the policies find likelier, for stage count),
         evaluate/pairs.json (the answers that were compared, their scores and verdicts, and whose they are).
Command: private-rlhf launch -m private_rlhf.stages.evaluate --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise, is_public, share_text, withheld
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.core.stats import Estimate
from private_rlhf.data.inputs import named_prompts
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.data.render import (
    Renderer,
    dialogue,
    keep_fitting,
    keep_fitting_pairs,
    left_out,
    make_renderer,
    text_count,
)
from private_rlhf.evaluation.evaluation_sampler import PromptResult, Sampler, Truth, once
from private_rlhf.evaluation.judges import Judge, judged_pairs, judged_rates, make_judge
from private_rlhf.evaluation.rates import (
    LIKELIHOOD_TEXTS,
    LONGER,
    beats_by_truth,
    likelihood_win_rate,
    longer_answer_baseline,
    longer_answers,
    pair_rows,
    preferences,
    prefers_longer,
    prompt_numbers,
    win_rate_at_like_length,
    write_decisions,
)
from private_rlhf.evaluation.summary import Summary
from private_rlhf.evaluation.truths import load_truth, reward_function, truth_name
from private_rlhf.lm.distributed import is_sharded, make_accelerator, split_frozen
from private_rlhf.lm.drawing import Engine, TransformersEngine
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.logprobs import mean_logprobs
from private_rlhf.lm.model_card import write_results
from private_rlhf.lm.model_folders import weights_digest
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.lm.numerics import precision
from private_rlhf.lm.saving import ADAPTER, QUANTISED_REFERENCE, REFERENCE
from private_rlhf.recipe import EvaluateConfig, Recipe
from private_rlhf.reward_models.external import key_names
from private_rlhf.reward_models.scorer import RewardScorer, load_scorer
from private_rlhf.rl.engines import connect
from private_rlhf.stages.context import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Measure a share of prompts and pairs on every process; summarise on the main one."""
    recipe, settings, run_dir = context.recipe, context.recipe.evaluate, context.run
    accelerator = make_accelerator(context.world)

    # --- policies, reward model, prompts ------------------------------------------------------------------------------
    reference_path = run_dir.stage("ppo") / REFERENCE if quantised(recipe) else context.reference
    renderer = make_renderer(recipe.model, load_tokenizer(reference_path))
    reference = split_frozen(accelerator, load_causal_lm(reference_path, recipe.model.dtype))
    method, policy_path = method_name(recipe), run_dir.stage(recipe.aligner) / "model"
    policy = split_frozen(accelerator, load_causal_lm(policy_path, recipe.model.dtype))
    size, use_bonus = recipe.reward.feature_batch_size, recipe.reward.kappa > 0
    scorer = load_scorer(context.reward_model, recipe.model, size, use_bonus=use_bonus)
    scorer.place(accelerator)
    known_truth = truth_name(settings.truth, recipe.data.evaluation_prompts)
    truth = None if known_truth is None else reward_function(known_truth)

    # --- answers of both policies, and the Gibbs policy of the same r̂ -------------------------------------------------
    everything = named_prompts(recipe.data, "evaluation_prompts", run_dir.released)
    fitting = [everything[i] for i in keep_fitting(everything, renderer, recipe.model.too_long)]
    process, processes = accelerator.process_index, accelerator.num_processes
    mine = list(enumerate(fitting[: settings.num_prompts]))[process::processes]
    sampler = make_sampler(context, accelerator, policy, reference, renderer, scorer, truth)
    share = f"{process}-of-{processes}"
    counts = settings.samples_per_prompt, settings.gibbs_candidates
    path = context.checkpoints / f"answers-{share}.json"
    measured = once(path, lambda: sampler.measure(mine, *counts), accelerator.device if sampler.together else None)
    results: list[PromptResult] = sorted(gather_object(measured), key=lambda result: result.index)
    summary = Summary(results, recipe.ppo.kl_coef, recipe.seed)

    # --- an outside judge ---------------------------------------------------------------------------------------------
    judge: Judge | None = None
    if settings.judge is not None:
        log, names = context.checkpoints / f"verdicts-{share}.jsonl", key_names("evaluate.judge")
        judge = make_judge(settings.judge, renderer, accelerator.device, names, log=log, share=processes)
    compared = sorted(gather_object(compared_pairs(measured, judge)), key=lambda row: row["index"])
    rates = None if judge is None else judged_rates(compared, summary.longer(), recipe.seed, beats_by_truth(compared))

    # --- likelihood on held-out pairs ---------------------------------------------------------------------------------
    release = read_release(run_dir.released / "evaluation")
    rows = list(release)
    places = keep_fitting_pairs(rows, renderer, recipe.model.too_long)
    dropped, places = len(rows) - len(places), places[: settings.max_pairs]
    pairs = [rows[place] for place in places]
    noise = release.manifest.noise_of(pairs)
    likelihood = {name: sharded_logprobs(accelerator, model, pairs, renderer, recipe.ppo.temperature, name)
                  for name, model in (("sft", reference), (method, policy))}  # fmt: skip

    # --- results ------------------------------------------------------------------------------------------------------
    terms = {**read_release(run_dir.released / "release").manifest.terms, "kl_coef": recipe.ppo.kl_coef}
    methods = describe_methods(method, summary)
    for name, metrics in methods.items():
        metrics |= likelihood_metrics(likelihood.get(name), pairs, noise, recipe.evaluation_labels != "laplace") | terms
    trained = methods[method]
    trained |= {f"{metric}_judge": rates[name] for metric, name in JUDGED.items()} if rates is not None else {}
    evaluation = describe(recipe, summary, method, methods, longer_answer_baseline(pairs, noise))
    facts = None if judge is None else judge.facts
    evaluation["judge"] = None if facts is None else {**facts, "rates": rates}
    evaluation["judge_notes"] += outside_notes(facts, rates, len(compared))
    if accelerator.is_main_process:
        atomic.write_json(context.folder / "evaluation.json", evaluation)
        choices = {name: preferences(values) for name, values in likelihood.items()} | {LONGER: longer_answers(pairs)}
        write_decisions(context.folder, choices, places, len(rows))
        atomic.write_json(context.folder / "by_prompt.json", summary.by_prompt())
        atomic.write_json(context.folder / "samples.json", shown_samples(results, summary, method, settings))
        sources = checkpoint_facts(run_dir.root, policy=policy_path, reference=reference_path)
        atomic.write_json(context.folder / "pairs.json", {**sources, "judge": facts, "pairs": compared})
        write_results(policy_path, card_lines(trained))
        run_dir.stamp(recipe.aligner)  # its card is younger than the rest of the stage by now
    return {
        "prompts": len(results),
        "pairs": len(pairs),
        **sampler.facts,
        "texts": [
            text_count("prompts", len(everything), len(fitting), renderer),
            text_count("pairs", len(rows), len(rows) - dropped, renderer),
        ],
        "summary": headline(trained, summary.ppo_over_gibbs()) + (f"; pairs{left_out(dropped)}" if dropped else ""),
    }


def make_sampler(
    context: StageContext,
    accelerator: Accelerator,
    policy: Any,
    reference: Any,
    renderer: Renderer,
    scorer: RewardScorer,
    truth: Truth | None,
) -> Sampler:
    """The sampler of answers; the two models draw, or the recipe's servers with the policy's adapter."""
    recipe, size = context.recipe, context.recipe.evaluate.batch_size
    sampling = Sampling(renderer.max_response_tokens, recipe.ppo.temperature, recipe.ppo.top_p)
    engine: Engine = TransformersEngine(accelerator, renderer.tokenizer, size)
    if recipe.rollout is not None:
        how = context.checkpoints / "adapters", recipe.model.dtype, sampling.temperature, size
        models = {"reference": reference, "together": is_sharded(policy)}
        engine = connect(accelerator, recipe.rollout, policy, renderer, *how, **models)
        engine.publish(context.run.stage(recipe.aligner) / ADAPTER)
    return Sampler(
        accelerator, policy, reference, renderer, scorer, truth, sampling, recipe.seed, engine, recipe.ppo.gather_once
    )


def describe_methods(trained: str, summary: Summary) -> dict[str, dict[str, Any]]:
    """Metrics by method: π_ref, the policy `trained`, and the Gibbs policy where it was drawn."""
    gibbs = summary.gibbs_metrics()
    methods = {"sft": summary.reference_metrics(), trained: summary.policy_metrics()}
    return methods | ({} if gibbs is None else {"gibbs": gibbs})


def describe(
    recipe: Recipe, summary: Summary, trained: str, methods: dict[str, Any], longer_answer: Estimate
) -> dict[str, Any]:
    """evaluation.json without the outside judge. trained: the policy's name among `methods`. longer_answer: the rate
    at which it is preferred."""
    ratio, best = summary.ppo_over_gibbs(), summary.best_of_four()
    return {
        "methods": methods,
        "frontier": summary.frontier(),
        "ppo_over_gibbs": ratio.as_dict() if ratio else None,
        "coverage": summary.coverage(recipe.reward.kappa),
        "best_of_four": best.as_dict() if best else None,
        "longer_answer_baseline": longer_answer.as_dict(),
        "evaluation_labels": recipe.evaluation_labels,
        "judge_notes": judge_notes(recipe) + trust_notes(methods[trained], best),
    }


def checkpoint_facts(root: Path, **folders: Path) -> dict[str, dict[str, str]]:
    """The checkpoints in `folders` by name: the path in `root`, and the digest of the weights."""
    return {name: {"path": str(path.relative_to(root)), "sha256": weights_digest(path)}
            for name, path in folders.items()}  # fmt: skip


def quantised(recipe: Recipe) -> bool:
    """True where PPO's π_ref is sft/model in 4 bits."""
    return recipe.aligner == "ppo" and recipe.ppo.quantize is not None


def method_name(recipe: Recipe) -> str:
    """The trained policy in metrics: private, nonprivate or uncorrected; then the aligner where it is not PPO."""
    trained = recipe.dpo if recipe.aligner == "dpo" else recipe.reward
    suffix = "" if recipe.aligner == "ppo" else f"_{recipe.aligner}"
    if trained.loss == "uncorrected":
        return f"uncorrected{suffix}"
    return ("nonprivate" if is_public(recipe.privatize.epsilon) else "private") + suffix


def sharded_logprobs(
    accelerator: Any, model: Any, pairs: list[ReleasedPair], renderer: Renderer, temperature: float, name: str
) -> np.ndarray:
    """Length-normalised log-likelihoods (2n,) of all pairs by the model `name`, interleaved chosen and rejected."""
    indices = list(range(len(pairs)))[accelerator.process_index :: accelerator.num_processes]
    with precision(accelerator):
        values = mean_logprobs(
            model,
            pair_rows([pairs[i] for i in indices], renderer),
            pad_token_id=renderer.tokenizer.pad_token_id,
            batch_size=LIKELIHOOD_TEXTS,
            device=accelerator.device,
            temperature=temperature,
            progress=f"likelihood of {name}" if accelerator.is_main_process else None,
        ).reshape(-1, 2)
    gathered = dict(gather_object([(index, row.tolist()) for index, row in zip(indices, values, strict=True)]))
    return np.array([gathered[index] for index in range(len(pairs))]).reshape(-1)


def likelihood_metrics(
    logprobs: np.ndarray | None, pairs: list[ReleasedPair], noise: LabelNoise | LevelledNoise, labelled: bool
) -> dict[str, Any]:
    """One method's likelihood win rate, the one at like length, and the rate at which the longer answer is likelier.

    logprobs: (2n,) as from `pair_rows`, None for a method that has none. labelled: the pairs have labels; where stage
    count counts those, a part of them would be one more question.
    """
    metrics = {}
    if logprobs is not None:
        prompts = prompt_numbers(pairs)
        metrics["likelihood_win_rate"] = likelihood_win_rate(logprobs, noise, prompts)
        metrics["likelihood_prefers_longer"] = prefers_longer(preferences(logprobs), longer_answers(pairs), prompts)
        if labelled and (like := win_rate_at_like_length(logprobs, pairs, noise)):
            metrics["likelihood_win_rate_like_length"] = like
    names = ("likelihood_win_rate", "likelihood_win_rate_like_length", "likelihood_prefers_longer")
    return {name: metrics[name].as_dict() if name in metrics else None for name in names}


def compared_pairs(measured: list[PromptResult], judge: Judge | None) -> list[dict[str, Any]]:
    """The answers whose win rate is reported, by prompt, with each judge's scores: [policy's, reference's]."""
    if not measured:
        return []
    prompts = [result.prompt for result in measured]
    answers, others = [result.policy[0] for result in measured], [result.reference[0] for result in measured]
    texts = [answer.text for answer in answers], [answer.text for answer in others]
    rows = judge.compare(prompts, *texts) if judge is not None else [{}] * len(measured)
    return [{"index": result.index, **row,
             **{name: [getattr(answer, name), getattr(other, name)] for name in ("true_reward", "reward")}}
            for result, row, answer, other in zip(
                measured, judged_pairs(prompts, *texts, rows), answers, others, strict=True)]  # fmt: skip


def outside_notes(facts: dict[str, Any] | None, rates: dict[str, Any] | None, pairs: int) -> list[str]:
    """Notes on the judge that the recipe names; none without one. pairs: compared."""
    if facts is None or rates is None:
        return []
    both = "which got whole conversations with both answers, in both orders"
    gone = f"{rates['unclear_pairs']} of the {pairs} pairs are left out of the judge's rates: "
    if facts["kind"] == "embeddings":
        return ["judge: what people prefer as sentence embeddings know it (hh_truth)"]
    if facts["kind"] == "language model":
        return [f"judge: the log-odds of {facts['source']}, {both}", f"{gone}longer than it reads"]
    if facts["kind"] != "chat":
        return [f"judge: the reward model {facts['source']}, its labels {facts['labels']}"]
    return [f"judge: the chat model {facts['model']} at {facts['url']}, {both}",
            f"{gone}{rates['unclear_verdicts']} of its {2 * pairs} verdicts were unclear"]  # fmt: skip


def trust_notes(metrics: dict[str, Any], best: Estimate | None) -> list[str]:
    """Notes on how far each judge can be trusted, where the truth is known."""
    notes = []
    for judge, name in (("rm", "the reward model"), ("judge", "the outside judge")):
        if agreement := metrics.get(f"agreement_{judge}"):
            share = withheld(agreement) or Estimate(**agreement)
            notes.append(f"{name} prefers the truly better answer of a pair in {share} of them")
    if best is not None and not withheld(best.as_dict()):
        notes.append(f"of four answers of π_ref the fitted reward finds the truly best in {best}, by chance in 0.25")
    return notes


def judge_notes(recipe: Recipe) -> list[str]:
    """Notes without which the win rates cannot be read."""
    notes = [
        "generation win rates: the policy's answer against one of π_ref to the same held-out prompt, ties half; "
        "truth and reward model score each answer by itself, so position does not matter. π_ref's own rate is that "
        "of two of its answers: 50 % but for chance"
    ]
    if (name := recipe.evaluate.truth) is not None:
        notes.append(f"truth: {name}, {load_truth(name).description}")
    else:
        known = recipe.data.evaluation_prompts == "embedded"
        notes.append("truth: the embedded task's known reward r*" if known else "no ground truth exists for this data")
    notes.append("reward model: the one that the policy was trained against, so a high rate by it alone may be gaming")
    if quantised(recipe):
        notes.append(f"π_ref, which also stands for sft: {QUANTISED_REFERENCE}")
    if recipe.ppo.temperature != 1:
        notes.append(f"answers, likelihoods and KL are at ppo.temperature {recipe.ppo.temperature:g}")
    if recipe.ppo.top_p < 1:
        notes.append(
            f"answers are drawn with ppo.top_p {recipe.ppo.top_p:g}; KL and J are those of the whole distributions "
            "along such answers, as PPO is charged for them: not the KL of what draws"
        )
    if recipe.evaluation_labels == "private":
        notes.append("likelihood win rates are estimated from privatised test labels (debiased)")
    if recipe.evaluation_labels == "laplace":
        notes.append(
            "likelihood win rates and the longer-answer rule are counts of the true test labels with Laplace noise"
            f" (epsilon {recipe.privatize.count_epsilon:g} for all of them, on top of the labels' own); not clipped"
        )
    return notes


JUDGED = {"generation_win_rate": "win_rate", "length_controlled_win_rate": "length_controlled_win_rate",
          "agreement": "agreement"}  # fmt: skip
"""Metric of an outside judge (`_judge` is added) -> its name among the judge's rates."""
JUDGES = {"truth": "truth", "judge": "outside judge", "rm": "reward model"}


def card_lines(metrics: dict[str, Any]) -> list[str]:
    """Results for the policy's card, one line each; they do not depend on a label."""
    rates = {name: metrics.get(f"generation_win_rate_{name}") for name in JUDGES}
    lines = [
        f"win rate against sft/model by the {JUDGES[name]}, on held-out prompts: {Estimate(**rate)}"
        for name, rate in rates.items()
        if rate
    ]
    low, high = metrics["kl_ci"]
    return [*lines, f"KL to sft/model: {metrics['kl']:.2f} [{low:.2f}, {high:.2f}] nats"]


def headline(metrics: dict[str, Any], ratio: Any) -> str:
    """The stage's one line."""
    rates = {judge: metrics.get(f"generation_win_rate_{name}") for name, judge in JUDGES.items()}
    judge, rate = next((judge, rate) for judge, rate in rates.items() if rate)
    line = f"win rate vs π_ref by {judge} {share_text(rate)}, KL {metrics['kl']:.2f} nats"
    if gain := metrics["objective_gain"]:
        line += f", J gain {gain['value']:+.2f} [{gain['ci_low']:.2f}, {gain['ci_high']:.2f}]"
    return line + (f", {100 * ratio.value:.0f} % of Gibbs" if ratio else "")


def shown_samples(
    results: list[PromptResult], summary: Summary, trained: str, settings: EvaluateConfig
) -> list[dict[str, Any]]:
    """Answers before and after for the report: prompts evenly spread, and the one where the estimated reward falls most
    below π_ref's. trained: the policy's name."""
    count = min(settings.shown_samples, len(results))
    worst = min(range(len(results)), key=lambda at: results[at].policy[0].reward - results[at].reference[0].reward)
    picked = np.linspace(0, len(results) - 1, count).round().astype(int).tolist()
    picked = list(dict.fromkeys([*picked, worst])) if count else []
    gibbs = summary.gibbs_picks() if results[0].candidates else None
    shown = []
    for index in picked:
        result = results[index]
        answers = {"sft": result.reference[0], trained: result.policy[0]}
        if gibbs is not None:
            answers["gibbs"] = result.candidates[gibbs[index]]
        keys = ("text", "true_reward", "reward")
        texts: dict[str, Any] = {name: {key: getattr(each, key) for key in keys} for name, each in answers.items()}
        texts[trained]["worst"] = index == worst
        shown.append({"prompt": dialogue(result.prompt), **texts})
    return shown


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("evaluate")
