"""Texts of the report: the headline, the tables and the facts, as plain strings. Pure functions of `RunFacts`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

from private_rlhf.core.noise import LabelNoise, bound_of, clipped, outside, share_text, withheld
from private_rlhf.core.noise_levels import levels_text
from private_rlhf.privacy.guarantee import NOT_PRIVATE, PrivacyStatus
from private_rlhf.report.run_facts import GIBBS, REFERENCE, RunFacts

UNKNOWN = "–"
SPACE = "\u00a0"
WIN_RATES = (
    ("generation_win_rate_truth", "Generation win rate by the true reward"),
    ("generation_win_rate_judge", "Generation win rate by the outside judge"),
    ("generation_win_rate_rm", "Generation win rate by the reward model"),
    ("length_controlled_win_rate", "Generation win rate, length-controlled"),
    ("decided_win_rate", "Generation win rate, ties by Rao–Kupper"),
    ("length_controlled_win_rate_judge", "Generation win rate by the outside judge, length-controlled"),
    ("likelihood_win_rate", "Likelihood win rate"),
    ("likelihood_win_rate_like_length", "Likelihood win rate, answers of like length"),
)
CONTROLLED = "length_controlled_win_rate"
BESIDE = (
    ("likelihood_prefers_longer", "Finds the longer answer likelier"),
    ("agreement_rm", "Agreement of the reward model with the truth"),
    ("agreement_judge", "Agreement of the outside judge with the truth"),
)
_JUDGES = {
    "generation_win_rate_truth": "held-out prompts, judged by the true reward",
    "generation_win_rate_judge": "held-out prompts, judged by an outside judge",
    "generation_win_rate_rm": "held-out prompts, judged by the reward model it was trained on",
    "length_controlled_win_rate": "held-out prompts, at equal length",
}
Cell = tuple[str, str]
"""A value and the interval below it."""


# --- numbers ----------------------------------------------------------------------------------------------------------


def known(value: Any) -> TypeGuard[float]:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, digits: int = 2, signed: bool = False) -> str:
    """`value` with `digits` decimals."""
    if not known(value):
        return UNKNOWN
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def significant(value: Any, digits: int = 3) -> str:
    """`value` with `digits` significant digits, no trailing zeros, no exponent below a million."""
    if not known(value):
        return UNKNOWN
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-6 <= abs(value) < 1e6:
        text = f"{value:.0f}" if abs(value) >= 1 else f"{value:.6f}".rstrip("0")
    return text.replace("-", "−")


def percent(share: Any, digits: int = 0) -> str:
    """A share in [0, 1] as per cent."""
    return f"{number(100 * share, digits)}{SPACE}%" if known(share) else UNKNOWN


def interval(low: Any, high: Any, digits: int = 2) -> str:
    """`[low, high]`, or nothing when a bound is unknown."""
    return f"[{number(low, digits)}, {number(high, digits)}]" if known(low) and known(high) else ""


def percent_interval(estimate: dict[str, Any]) -> str:
    """`66–77 %`, or `−3 to 8 %`."""
    low, high = estimate.get("ci_low"), estimate.get("ci_high")
    if not (known(low) and known(high)):
        return ""
    return f"{number(100 * low, 0)}{'–' if low >= 0 else ' to '}{number(100 * high, 0)}{SPACE}%"


def epsilon_text(epsilon: Any) -> str:
    """ε as printed: infinity is null in files."""
    return "∞" if not known(epsilon) else significant(epsilon, 6)


def duration(seconds: Any) -> str:
    """`48 s`, `3 min 05 s` or `2 h 10 min`."""
    if not known(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{number(seconds, 1)}{SPACE}s" if seconds < 10 else f"{whole}{SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{SPACE}min {whole % 60:02d}{SPACE}s"
    minutes = round(whole / 60)
    return f"{minutes // 60}{SPACE}h {minutes % 60:02d}{SPACE}min"


def usable(estimate: Any) -> TypeGuard[dict[str, Any]]:
    """True for an {"value", "ci_low", "ci_high", "n"} object with a value."""
    return isinstance(estimate, dict) and known(estimate.get("value"))


def drawable(share: Any) -> TypeGuard[dict[str, Any]]:
    """True for a share that is known and not withheld."""
    return usable(share) and not withheld(share)


# --- names ------------------------------------------------------------------------------------------------------------


def label_of(method: str, result: dict[str, Any] | None = None) -> str:
    """Name of a method in tables and pictures; claims no privacy, only names ε (that is the card's business)."""
    trained, _, aligner = method.partition("_")
    aligner = aligner.upper() or "PPO"
    if trained in ("private", "nonprivate") and result is not None and "epsilon" in result:
        return f"{aligner}, ε {'≤' if 'levels' in result else '='} {epsilon_text(result['epsilon'])}"
    if trained == "uncorrected":
        return f"{aligner}, uncorrected"
    return {REFERENCE: "π_ref (SFT)", GIBBS: "Gibbs"}.get(method, method)


# --- headline ------------------------------------------------------------------------------------------------------


def headline(facts: RunFacts, status: PrivacyStatus) -> str:
    """One or two sentences with the numbers that matter and no symbols; says so where the data cannot tell."""
    method = facts.policy
    labels = "labels that are not private" if status.reasons else "privatised labels"
    if method is None:
        return f"A run on {labels}; its policy has not been evaluated."
    result = facts.methods[method]
    change = _objective_sentence(result.get("objective_gain"), reward_name(facts))
    return f"Trained on {labels}, the policy {_win_sentence(result)}.{' ' + change if change else ''}"


def main_win_rate(result: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The win rate the headline speaks of: by the truth where there is one."""
    return next(((key, result[key]) for key in _JUDGES if usable(result.get(key))), None)


def _win_sentence(result: dict[str, Any]) -> str:
    main = main_win_rate(result)
    if main is None:
        return "was not compared with the reference policy by any judge"
    key, estimate = main
    if why := withheld(estimate):
        return f"cannot be judged, its win rate is {why} {_JUDGES[key]}"
    low, high = estimate.get("ci_low"), estimate.get("ci_high")
    count = f"{estimate.get('n', '?')} {_JUDGES[key]}"
    rate = f"{percent(estimate['value'])} of the time (95\u00a0% interval {percent_interval(estimate)}; {count})"
    if key != CONTROLLED and drawable(controlled := result.get(CONTROLLED)):
        rate += f", {percent(controlled['value'])} at equal length ({percent_interval(controlled)})"
    if known(low) and low > 0.5:
        return f"beats the reference policy {rate}"
    if known(high) and high < 0.5:
        return f"loses to the reference policy: it wins only {rate}"
    return f"cannot be told apart from the reference policy: it wins {rate}"


def reward_name(facts: RunFacts) -> str:
    """Name of the reward that J is measured with: the truth where it is known."""
    truth = any(known(result.get("true_reward")) for result in facts.methods.values())
    return "true reward" if truth else "estimated reward"


def _objective_sentence(gain: Any, reward: str) -> str:
    if not usable(gain):
        return ""
    low, high = gain.get("ci_low"), gain.get("ci_high")
    size, bounds = number(abs(gain["value"])), interval(low, high)
    subject = f"The {reward} less the price of moving away from that policy"
    if known(low) and low > 0:
        return f"{subject} rises by {size} {bounds}."
    if known(high) and high < 0:
        return f"{subject} falls by {size} {bounds}."
    return f"{subject} changes by {number(gain['value'], signed=True)} {bounds}, which may be chance."


def privacy_sentence(status: PrivacyStatus) -> str:
    """The protection of the labels, in two sentences."""
    if status.reasons or status.epsilon is None:
        return "Nothing is private in this run: " + "; ".join(status.reasons) + "."
    if status.declared_public:
        return (
            "No protection is claimed: the labels of this run are declared public or synthetic by their holder, and it"
            " may have read them as they are. Those that were trained on were randomised all the same: each was kept"
            f" with probability {status.kept}."
        )
    reader = ", for whoever lacks the key and cannot break BLAKE2b" if status.keyed else ""
    likely = f"at most {bound_of(status.epsilon)} times (e^ε, rounded up) as likely under one answer as"
    rest = f" Not private: prompts, responses, and which pairs were labelled. Who must be trusted: {status.trusted}."
    weak = f" Beware: {status.noise.warning}." if status.noise.warning else ""
    by = f" ({status.claim}). By that statement it" if status.claim else ". It"
    several = f" {status.several_answers.strip()}" if status.several_answers else ""
    return (
        f"Private: each preference label{by} was kept with probability {status.kept} and"
        " turned round otherwise, before anything was trained, so whatever is released is"
        f" {likely} under the other{reader}. A person with m labels loses up to m·ε.{several}{weak}{rest}"
    )


def tiles(facts: RunFacts, status: PrivacyStatus) -> list[dict[str, str]]:
    """The figures under the headline."""
    result = facts.methods.get(facts.policy or "", {})
    shown = []
    if main := main_win_rate(result):
        shown.append(("win rate against π_ref", *_share(main[0], 0)(result)))
        if main[0] != CONTROLLED and usable(result.get(CONTROLLED)):
            shown.append(("win rate at equal length", *_share(CONTROLLED, 0)(result)))
    if usable(result.get("objective_gain")):
        shown.append(("gain in J", *_gain(result)))
    if known(result.get("kl")):
        shown.append(("KL from π_ref", number(result["kl"]), "nats per response"))
    terms = f"kept with probability {status.noise.keep_text()}"
    if status.levels:
        terms = f"at most; {levels_text({'levels': status.levels})}"
    note = NOT_PRIVATE if status.reasons else terms + (", as stated" if status.claim else "")
    shown.append(("ε per label", epsilon_text(status.epsilon), note))
    return [{"label": label, "value": value, "note": text} for label, value, text in shown]


# --- tables --------------------------------------------------------------------------------------------------------


def methods_table(facts: RunFacts) -> tuple[list[str], list[tuple[str, list[Cell]]]]:
    """Column labels, and rows of (label, one cell per method); rows nobody has a value for are left out."""
    rows: list[tuple[str, Callable[[dict[str, Any]], Cell]]] = [
        *((title, _share(key)) for key, title in (*WIN_RATES, *BESIDE)),
        ("KL from π_ref, nats per response", _plain("kl")),
        ("True reward", _plain("true_reward")),
        ("Estimated reward r̄", _plain("reward")),
        ("Pessimistic reward r̂ = r̄ − Γ", _plain("pessimistic_reward")),
        (f"Objective J, by the {reward_name(facts)}", _plain("objective")),
        ("Gain in J over π_ref, paired", _gain),
        ("Response, tokens", _plain("response_tokens", 1)),
        ("distinct-1", _plain("distinct_1", 3)),
        ("distinct-2", _plain("distinct_2", 3)),
    ]
    methods = facts.methods
    table = [(label, [cell(result) for result in methods.values()]) for label, cell in rows]
    filled = [row for row in table if any(value for value, _ in row[1])]
    return [label_of(name, result) for name, result in methods.items()], filled


def _share(key: str, digits: int = 1) -> Callable[[dict[str, Any]], Cell]:
    def cell(result: dict[str, Any]) -> Cell:
        estimate = result.get(key)
        if not usable(estimate):
            return "", ""
        if why := withheld(estimate):
            return UNKNOWN, why
        estimate = clipped(estimate)
        return percent(estimate["value"], digits), f"{percent_interval(estimate)}, n{SPACE}={SPACE}{estimate['n']}"

    return cell


def _plain(key: str, digits: int = 2) -> Callable[[dict[str, Any]], Cell]:
    def cell(result: dict[str, Any]) -> Cell:
        if not known(result.get(key)):
            return "", ""
        bounds = result.get(f"{key}_ci")
        return number(result[key], digits), interval(bounds[0], bounds[1], digits) if bounds else ""

    return cell


def _gain(result: dict[str, Any]) -> Cell:
    gain = result.get("objective_gain")
    if not usable(gain):
        return "", ""
    return number(gain["value"], signed=True), interval(gain.get("ci_low"), gain.get("ci_high"))


# --- facts and notes -----------------------------------------------------------------------------------------------

_FIT_LABELS = {
    "mode": "What is trained",
    "loss": "Loss",
    "epsilon": "ε",
    "keep_prob": "α",
    "num_pairs": "Pairs",
    "reward_bound": "Reward bound B",
    "ridge": "Ridge λ",
    "warm_start_ridge": "Ridge λ of the warm start",
    "uncertainty": "Kind of Γ",
    "kappa": "Pessimism κ",
    "num_layers": "Layers",
    "dropped_too_long": "Pairs left out as too long",
    "validation_pairs": "Held-out pairs",
    "validation_log_likelihood": "Held-out private log-likelihood per pair",
    "trained_head_log_likelihood": "The same of the trained head, before it was fitted again",
    "validation_log_likelihood_se": "Standard error of that log-likelihood",
    "null_log_likelihood": "Log-likelihood of a fair coin",
    "validation_accuracy_private": "Held-out accuracy on private labels",
    "validation_accuracy_debiased": "Held-out accuracy, debiased to true labels",
    "validation_after_selection": "Held-out pairs were used by backbone, training or ridge",
}
_FIT_DRAWN = frozenset({"ridge_path", "calibration"})


def fit_facts(fit: dict[str, Any]) -> list[tuple[str, str]]:
    """The reward fit's scalars and estimates, the known ones first; lists and objects are drawn or left out."""
    order = [key for key in dict.fromkeys([*_FIT_LABELS, *fit]) if key in fit and key not in _FIT_DRAWN]
    if known(fit.get("keep_prob")):
        fit = {**fit, "keep_prob": LabelNoise.from_json(fit).keep_text(4)}
    facts = {_FIT_LABELS.get(key, key.replace("_", " ").capitalize()): _fact(key, fit[key]) for key in order}
    return [(label, text) for label, text in facts.items() if text]


def _fact(key: str, value: Any) -> str:
    if key == "epsilon":
        return epsilon_text(value)
    if usable(value) and key.startswith("validation_accuracy"):
        return share_text(value)
    if usable(value):
        return f"{number(value['value'], 3)} {interval(value.get('ci_low'), value.get('ci_high'), 3)}"
    if isinstance(value, bool | str):
        return str(value).replace("_", " ") if isinstance(value, str) else ("yes" if value else "no")
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return significant(value, 4) if known(value) else ""


def longer_answer(facts: RunFacts) -> str:
    """The rate at which the longer answer is the preferred one, as a sentence with its interval."""
    baseline = facts.evaluation.get("longer_answer_baseline")
    if not usable(baseline):
        return ""
    right, bounds = _share("")({"": baseline})
    return f'"The longer answer wins" is right on {right} ({bounds}) of the likelihood pairs.'


def unclipped(facts: RunFacts) -> str:
    """An explanation of rates on privatised or counted labels that are no shares; empty where all are."""
    names = ("likelihood_win_rate", "likelihood_win_rate_like_length")
    shares = [result.get(name) for result in facts.methods.values() for name in names]
    return outside(*shares, facts.evaluation.get("longer_answer_baseline"))


def texts_table(facts: RunFacts) -> list[list[str]]:
    """(stage, what it read, how many, how many of them were left out as too long, limit) of every completed stage."""
    return [
        [stage, entry["what"], _fact("", entry["read"]), _fact("", entry["too_long"]), _limit(entry)]
        for stage, manifest in facts.manifests.items()
        for entry in (manifest.get("report") or {}).get("texts", [])
    ]


def _limit(entry: dict[str, Any]) -> str:
    together = entry["max_text_tokens"]
    return f"prompt {entry['max_prompt_tokens']}" + (f", with a response {together}" if together else "")


def yardstick(facts: RunFacts) -> str:
    """Share of the Gibbs yardstick's gain that the policy reaches."""
    share = facts.evaluation.get("ppo_over_gibbs")
    if not usable(share):
        return ""
    if share["ci_high"] - share["ci_low"] > 2:
        return f"Gibbs resampling gains too little in J here for {facts.aligner}'s share of it to mean anything."
    reached = f"{percent(share['value'])} {interval(100 * share['ci_low'], 100 * share['ci_high'], 0)}"
    return f"{facts.aligner} reaches {reached} of the gain in J that Gibbs resampling reaches with the same reward."


def stage_seconds(facts: RunFacts) -> dict[str, float]:
    """Wall time of each completed stage, in order."""
    return {name: float(m["seconds"]) for name, m in facts.manifests.items() if known(m.get("seconds"))}


def ppo_seconds(facts: RunFacts) -> dict[str, float]:
    """Seconds PPO spent generating, scoring and updating, over all iterations."""
    rows = [row.get("seconds") or {} for row in facts.ppo_history]
    parts = {part: sum(_column(rows, part)) for part in ("generate", "score", "update")}
    return parts if any(parts.values()) else {}


def time_sentence(facts: RunFacts) -> str:
    """The total, PPO's shares, throughput and memory."""
    seconds, parts = stage_seconds(facts), ppo_seconds(facts)
    if not seconds:
        return ""
    clauses = [f"{duration(sum(seconds.values()))} in all"]
    if parts:
        total = sum(parts.values())
        names = {"generate": "generating", "score": "scoring", "update": "updating"}
        shares = [f"{names[part]} {percent(spent / total)}" for part, spent in parts.items()]
        clauses.append("inside PPO " + ", ".join(shares))
    if speeds := _column(facts.ppo_history, "tokens_per_second"):
        clauses.append(f"{number(sum(speeds) / len(speeds), 0)} tokens a second in rollouts")
    for key, what in (("peak_rss_mb", "peak memory"), ("peak_gpu_mb", "of a GPU")):
        if peaks := _column(facts.manifests.values(), key):
            clauses.append(f"{what} {number(max(peaks) / 1024, 1)} GiB")
    if sizes := sorted(set(_column(facts.manifests.values(), "world_size"))):
        clauses.append(f"{'–'.join(str(size) for size in sizes)} process{'es' if sizes[-1] > 1 else ''}")
    return "; ".join(clauses) + "."


_MACHINE = {
    "code_digest": "Code digest", "python": "Python", "platform": "Platform", "cpu": "Processor", "cpu_count": "Cores",
    "memory_gb": "Memory, GiB", "accelerators": "GPUs", "device": "Device", "dtype": "Dtype of frozen weights",
    "dtype_reason": "On bfloat16", "cpu_capability": "CPU instructions", "threads": "Threads", "kernels": "Kernels",
}  # fmt: skip


def _column(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if known(row.get(key))]


def environment_facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Commit, platform and versions."""
    if not environment:
        return []
    commit = environment.get("commit") or "unknown"
    rows = [("Commit", f"{commit}{' (with uncommitted changes)' if environment.get('dirty') else ''}")]
    for key, label in _MACHINE.items():
        value = environment.get(key)
        if value not in (None, []):
            rows.append((label, ", ".join(value) if isinstance(value, list) else str(value)))
    return rows + [(name, str(version)) for name, version in (environment.get("versions") or {}).items() if version]


def sample_cards(facts: RunFacts) -> list[dict[str, Any]]:
    """For each shown prompt: its text and the answers, π_ref first, with the rewards under each."""
    cards = []
    for sample in facts.samples:
        names = [REFERENCE, *(key for key in sample if key not in ("prompt", REFERENCE, GIBBS)), GIBBS]
        answers = []
        for name, answer in ((name, sample.get(name)) for name in names):
            if isinstance(answer, dict):
                rewards = (("true reward", answer.get("true_reward")), ("r̄", answer.get("reward")))
                notes = [f"{label} {number(value)}" for label, value in rewards if known(value)]
                label, text = label_of(name, facts.methods.get(name)), str(answer.get("text", ""))
                answers.append({"method": name, "label": label, "text": text, "notes": notes})
        worst = any(isinstance(answer, dict) and answer.get("worst") is True for answer in sample.values())
        cards.append({"prompt": str(sample.get("prompt", "")), "answers": answers, "worst": worst})
    return cards


# --- on the terminal --------------------------------------------------------------------------------------------------


def closing_lines(facts: RunFacts, status: PrivacyStatus, card: dict[str, Any], folder: Path) -> list[str]:
    """Six lines at the end of a run: what was protected, how, at what cost, the gain, the report, what to do next.

    card: as in card.json. folder: of the report.
    """
    events = f"{card['events']} preference labels"
    origin = ", synthetic and treated as people's" if facts.synthetic_labels else ""
    what, how = f"nothing ({status.mark}: {status.mark_reason})", card["mechanism"]
    cost = "not counted, for no protection is claimed"
    if status.private and status.epsilon is not None:
        what = f"each of {events}{origin}"
        how = f"kept with probability {status.kept} and turned round otherwise, before any training"
        odds = bound_of(status.epsilon)
        cost = f"ε = {epsilon_text(status.epsilon)} a label{' at most' if status.levels else ''}: the odds of its two"
        cost += f" values change by a factor of {odds} at most; ε = {card['epsilon_total_per_event']:g} with all"
        cost += " releases under this key"
    following = f"sample --policy {folder.parent / facts.aligner.lower() / 'model'} PROMPT"
    if facts.synthetic_labels:
        following = "run --config own_data --data PREFERENCES --dry-run"
    policy = "not evaluated" if facts.policy is None else f"it {_win_sentence(facts.methods[facts.policy])}"
    return [
        f"protected  {what}",
        f"how        {how}",
        f"cost       {cost}",
        f"policy     {policy}",
        f"report     {folder / 'report.html'}; as text {folder / 'report.md'}",
        f"next       private-rlhf {following}",
    ]
