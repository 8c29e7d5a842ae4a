"""Composes the page and its Markdown sister from the facts of a run. Pure: the same facts give the same bytes."""

from __future__ import annotations

import html
import re
from typing import Any

import jinja2
from markupsafe import Markup, escape
from private_rlhf.core.noise import outside, share_text
from private_rlhf.core.reward_verdict import RewardVerdict
from private_rlhf.privacy.card import markdown
from private_rlhf.privacy.card import render_markdown as render_card
from private_rlhf.privacy.guarantee import SYNTHETIC, PrivacyStatus
from private_rlhf.report import plots, sections
from private_rlhf.report.plots import GIBBS, INK, OTHER, POLICY
from private_rlhf.report.run_card import card_rows
from private_rlhf.report.run_facts import REFERENCE, RunFacts
from private_rlhf.report.sections import UNKNOWN, drawable, number, percent

Figure = dict[str, Any]
"""{"title", "note", "svg"}: one picture with its caption."""
GLOSSARY = {
    "π_ref": "the reference policy: the model after sft, before it learns from labels",
    "kl_coef": "the price of a nat of KL in the objective J",
    "KL": "how far the policy has moved from the reference policy, in nats of a whole response",
    "J": "the objective: the mean reward less kl_coef times KL",
    "e^ε": "the factor by which a released label changes the odds of the true one at most",
    "ε": "the privacy loss of one label: smaller is more private, and 0 tells nothing",
    "r̄": "the reward that was estimated from the private labels",
    "r̂": "the pessimistic reward: r̄ less its uncertainty Γ; policies learn from it",
    "Γ": "the uncertainty of the estimated reward",
    "r*": "the true reward, which is known for a synthetic task only",
}
_SYMBOLS = re.compile("|".join(rf"(?<!\w){re.escape(symbol)}(?!\w)" for symbol in GLOSSARY))


def render_html(facts: RunFacts, status: PrivacyStatus, card: dict[str, Any]) -> str:
    """The self-contained page. Everything that comes from a file is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("private_rlhf.report", ""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["maths"] = maths
    columns, table = sections.methods_table(facts)
    return environment.get_template("report.html.j2").render(
        name=facts.name,
        status=status,
        headline=sections.headline(facts, status),
        reward_sentence=reward_sentence(facts),
        privacy_sentence=privacy_sentence(facts, status),
        tiles=sections.tiles(facts, status),
        win_rates=win_rate_figures(facts),
        judge_notes=notes(facts),
        evaluation_labels=facts.evaluation.get("evaluation_labels"),
        columns=columns,
        table=table,
        frontier=frontier_figure(facts),
        resampled=bool(facts.evaluation.get("frontier")),
        yardstick=sections.yardstick(facts),
        ppo=ppo_figures(facts),
        aligner=facts.aligner,
        fit=sections.fit_facts(facts.reward_fit),
        reward=[*online_figures(facts), *reward_figures(facts)],
        work=work_figures(facts),
        texts=sections.texts_table(facts),
        samples=sections.sample_cards(facts),
        card=card_rows(card),
        recipe=facts.recipe_text,
        environment=sections.environment_facts(facts.environment),
        summaries=_summaries(facts),
    )


def render_markdown(facts: RunFacts, status: PrivacyStatus, card: dict[str, Any]) -> str:
    """The short text version: headline, table, privacy card."""
    lines = [f"# {markdown(facts.name)}", ""]
    if status.mark:
        lines += [f"**{status.mark}**: {markdown(status.mark_reason)}.", ""]
    sentences = (sections.headline(facts, status), reward_sentence(facts), privacy_sentence(facts, status))
    lines += [line for text in sentences if text for line in (text, "")]
    columns, table = sections.methods_table(facts)
    if table:
        lines += [_markdown_row(["", *columns]), "|---|" + "---:|" * len(columns)]
        lines += [_markdown_row([label, *(_markdown_cell(*cell) for cell in cells)]) for label, cells in table]
        lines += ["", "In brackets: 95 % intervals.", ""]
    shown = notes(facts) if facts.evaluation.get("judge") else _explained(sections.unclipped(facts))
    lines += [*(f"- {note}" for note in shown), ""] if shown else []
    more = (sections.longer_answer(facts), sections.yardstick(facts), sections.time_sentence(facts))
    lines += [text + "\n" for text in more if text]
    lines.append(render_card(card))
    return "\n".join(lines)


def reward_sentence(facts: RunFacts) -> str:
    """The verdict on the reward; empty where no labels were held out for it."""
    verdict = RewardVerdict.of(facts.reward_fit)
    trained = facts.aligner if facts.aligner.lower() in facts.manifests and facts.aligner != "DPO" else None
    return "" if verdict is None else verdict.sentence(trained)


def privacy_sentence(facts: RunFacts, status: PrivacyStatus) -> str:
    """The protection of the labels, and by whom they are where this program drew them."""
    origin = f" The labels are of {SYNTHETIC}." if facts.synthetic_labels and status.private else ""
    return sections.privacy_sentence(status) + origin


def notes(facts: RunFacts) -> list[str]:
    """Notes on the win rates, as sentences."""
    stated = [_sentence(str(note)).rstrip(".") + "." for note in facts.evaluation.get("judge_notes") or []]
    return stated + _explained(sections.unclipped(facts))


def _explained(why: str) -> list[str]:
    return [f"{_sentence(why)}."] if why else []


def win_rate_figures(facts: RunFacts) -> list[Figure]:
    """One panel per kind of win rate that was measured."""
    figures = []
    for key, title in sections.WIN_RATES:
        likelihood = key.startswith("likelihood_win_rate")
        rows = [(method, sections.label_of(method, result), result.get(key)) for method, result in facts.methods.items()
                if likelihood or method != REFERENCE]  # fmt: skip
        baseline = facts.evaluation.get("longer_answer_baseline") if key == "likelihood_win_rate" else None
        note = "Pairs whose preferred answer is the likelier one." if likelihood else "Against π_ref; the line is 50 %."
        note = " ".join([note, *([sections.longer_answer(facts)] if baseline else [])])
        figures.append((title, plots.win_rates(f"win-{key.replace('_', '-')}", rows, baseline), note))
    return _drawn(*figures)


def frontier_figure(facts: RunFacts) -> Figure:
    """Reward against KL, by the true reward when any method has one."""
    key = "true_reward" if sections.reward_name(facts) == "true reward" else "reward"
    gibbs = facts.evaluation.get("frontier") or []
    svg = plots.frontier("frontier", facts.ppo_history, facts.methods, gibbs, key)
    return _figure("Reward against distance from π_ref", svg, "")


def ppo_figures(facts: RunFacts) -> list[Figure]:
    """The training curves that have data."""
    history = [row | {"pessimistic": row["reward"] - row["bonus"]}
               if None not in (row.get("reward"), row.get("bonus")) else row for row in facts.ppo_history]  # fmt: skip
    rewards = [("reward", "r̄", POLICY), ("pessimistic", "r̂ = r̄ − Γ", OTHER)]
    truth, length = [("true_reward", "true reward", GIBBS)], [("response_tokens", "tokens", INK)]
    return _drawn(
        ("Estimated reward", plots.curves("ppo-reward", history, rewards, "reward"), ""),
        ("True reward", plots.curves("ppo-truth", history, truth, "true reward"),
         "Measured beside training, never used by it."),
        ("KL from π_ref", plots.kl_curve("ppo-kl", history), _coefficient_note(facts)),
        ("Length of responses", plots.curves("ppo-length", history, length, "tokens"),
         "A policy that games its reward often shows it here."),
    )  # fmt: skip


def online_figures(facts: RunFacts) -> list[Figure]:
    """By answers given: accuracy, J, and which pairs were asked."""
    report = facts.manifests.get("online", {}).get("report", {})
    checks = [row["held_out_accuracy_debiased"] for row in report.get("history", [])]
    rounds = [row | ({"accuracy": check["value"]} if drawable(check := row["held_out_accuracy_debiased"]) else {})
              for row in report.get("history", [])]  # fmt: skip
    gain = [("gibbs_objective_gain", str(report.get("strategy")), GIBBS)]

    def curves(name: str, series: list[plots.Series], unit: str) -> Markup | None:
        return plots.curves(f"online-{name}", rounds, series, unit, "labels")

    means = [("asked_above", "answers above the mean", GIBBS), ("asked_margin", "difference of the two", OTHER)]
    return _drawn(
        ("Accuracy by answers", curves("accuracy", [("accuracy", "r̄", POLICY)], "debiased accuracy"),
         _unclipped("Of r̄ after each round of questions, on private answers about held-out prompts."
                    + (f" After the last: {share_text(checks[-1])}." if checks else ""), *checks[:-1])),
        ("J by answers", curves("j", gain, "J gain"),
         "Of the policy π_ref·exp(r̄/kl_coef) among the candidates, by the known truth, which no choice saw."),
        ("Which pairs were asked", curves("asked", means, "r̄, nats"),
         "By r̄ as it was before the round. Each question is in online/rounds."),
    )  # fmt: skip


def _unclipped(note: str, *shares: dict[str, Any]) -> str:
    """A caption, with an explanation of debiased estimates that are no shares."""
    return " ".join([note, *_explained(outside(*shares))])


def reward_figures(facts: RunFacts) -> list[Figure]:
    """Calibration, coverage and ridge path, where the run gives them."""
    fit = facts.reward_fit
    every = [{**row, "value": row.get("observed")} for row in fit.get("calibration") or []]
    bins = [row for row in every if drawable(row)]
    note = f"On held-out private labels. {len(bins)} of {len(every)} groups have enough of them to be shown."
    unit = next((row for row in facts.evaluation.get("coverage") or [] if row["kappa"] == 1), None)
    covers = unit and f"Γ covers {percent(unit['coverage'])} of errors ({percent(unit['nominal'])} of normal ones). "
    return _drawn(
        ("Calibration", plots.calibration("calibration", bins), _unclipped(note, *bins)),
        ("Coverage of r*", plots.coverage("coverage", facts.evaluation.get("coverage") or []),
         f"{covers or ''}Centred at π_ref. Dashed: a normal error of standard deviation Γ; κ = 1 is the default."),
        ("Choice of the ridge", plots.ridge_path("ridge", fit.get("ridge_path") or [], fit.get("ridge")),
         "Dashed: the λ in use. Band: one standard error of the difference from the best."),
    )  # fmt: skip


def work_figures(facts: RunFacts) -> list[Figure]:
    """SFT loss and wall time."""
    time = time_figure(facts)
    loss = plots.curves("sft-loss", facts.sft_loss, [("loss", "loss", POLICY)], "loss, nats per token", "step")
    return _drawn(("SFT loss", loss, ""), (time["title"], time["svg"], time["note"]))


def time_figure(facts: RunFacts) -> Figure:
    """Wall time of the stages."""
    split = " PPO's bar: generating, scoring, updating, dark to light." if sections.ppo_seconds(facts) else ""
    drawing = plots.stage_times("time", sections.stage_seconds(facts), sections.ppo_seconds(facts))
    return _figure("Where the time went", drawing, _sentence(sections.time_sentence(facts)) + split)


def time_passages(facts: RunFacts) -> dict[str, tuple[str, ...]]:
    """All that the page and its text version say of time and memory, by file: it follows from the facts."""
    figure = time_figure(facts)
    return {
        "report/report.html": (str(figure["svg"]), str(maths(figure["note"]))),
        "report/report.md": (sections.time_sentence(facts),),
    }


def maths(text: str) -> Markup:
    """`text` escaped, with π_ref and e^ε set as on paper, and each symbol explained on hover."""
    explained = _SYMBOLS.sub(lambda found: f'<abbr title="{GLOSSARY[found[0]]}">{found[0]}</abbr>', str(escape(text)))
    return Markup(explained.replace(">π_ref<", ">π<sub>ref</sub><").replace(">e^ε<", ">e<sup>ε</sup><"))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figure(title: str, svg: Markup | None, note: str) -> Figure:
    return {"title": title, "svg": svg, "note": note}


def _drawn(*rows: tuple[str, Markup | None, str]) -> list[Figure]:
    """The figures that have data."""
    return [_figure(title, svg, note) for title, svg, note in rows if svg]


def _coefficient_note(facts: RunFacts) -> str:
    coefficients = {row.get("kl_coef") for row in facts.ppo_history}
    return f"kl_coef is {number(coefficients.pop(), 3)} throughout." if len(coefficients) == 1 else ""


def _summaries(facts: RunFacts) -> list[tuple[str, str]]:
    """The last line of each stage."""
    reports = {name: manifest.get("report") or {} for name, manifest in facts.manifests.items()}
    return [(name, str(report["summary"])) for name, report in reports.items() if report.get("summary")]


def _markdown_cell(value: str, bounds: str) -> str:
    if bounds and not bounds.startswith("["):
        bounds = f"({bounds})"
    return f"{value} {bounds}".strip() or UNKNOWN


def _markdown_row(cells: list[str]) -> str:
    escaped = (html.escape(cell, quote=False).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
