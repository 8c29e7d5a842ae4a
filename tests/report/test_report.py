"""The page as a whole: well formed, self-contained, escaped, marked when not private, the same bytes every time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from private_rlhf.accounting.people import randomized_response
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import OUTSIDE, upper_text
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.recipe import ModelConfig, PrivatizeConfig, Recipe
from private_rlhf.report.pages import GLOSSARY, render_html, render_markdown, reward_figures, win_rate_figures
from private_rlhf.report.run_card import privacy_status, run_card
from private_rlhf.report.run_facts import read_run
from private_rlhf.stages import report
from private_rlhf.stages.context import StageContext
from support.report_runs import MakeRun, write_run

STAGES = ("privatize", "sft", "reward", "ppo", "evaluate", "report")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects what the tests ask about and fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, *names: str) -> list[str]:
        return [value for _, name, value in self.attributes if name in names]

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.text))


def render(run: RunDir, lean: bool = False) -> str:
    """The page of `run`; `lean` leaves out what is drawn, which is what takes time."""
    facts = read_run(run, STAGES)
    if lean:
        facts = replace(facts, evaluation={}, ppo_history=[], reward_fit={}, sft_loss=[], manifests={})
    status = privacy_status(facts)
    return render_html(facts, status, run_card(facts, status))


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the default run, drawn once."""
    return render(write_run(tmp_path_factory.mktemp("page") / "run"))


def banner(html: str) -> bool:
    return 'class="banner"' in html


def test_page_is_well_formed_and_self_contained(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "http" not in html
    assert "@import" not in html
    assert all(link.startswith("#") for link in page.values("href", "src", "xlink:href"))
    assert page.tags.count("svg") == 4 + 1 + 4 + 2 + 2


def test_ids_are_unique_and_every_reference_resolves(html: str) -> None:
    ids = Page(html).values("id")
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert wanted
    assert wanted <= set(ids)


def test_drawings_take_their_colours_from_the_theme(html: str) -> None:
    style = html[: html.index("</style>")]
    assert set(re.findall(r"var\(--([a-z-]+)\)", html)) <= set(re.findall(r"--([a-z-]+):", style))
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.findall(r"(?:fill|stroke): #\w+", drawn)


def test_completions_and_names_are_escaped(make_run: MakeRun) -> None:
    run = make_run()
    recipe = run.root / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: demo", "name: <img src=x>"))
    html = render(run, lean=True)
    page = Page(html)
    assert "<script" not in html
    assert "<img" not in html
    assert "<script>alert('reward')</script> & a great, lovely plan!" in page.words
    assert "Tell me about <b>bold</b> plans." in page.words


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, False),
        ({"name": "uncorrected"}, False),
        ({"epsilon": math.inf, "name": "nonprivate"}, True),
        ({"insecure_seed": 3}, True),
    ],
)
def test_banner_appears_exactly_when_due(make_run: MakeRun, settings: dict[str, object], due: bool) -> None:
    run = make_run(**settings)
    assert banner(render(run, lean=True)) is due
    facts = read_run(run, STAGES)
    status = privacy_status(facts)
    card = run_card(facts, status)
    assert ("**NOT PRIVATE**" in render_markdown(facts, status, card)) is due
    assert (card["mark"] == "NOT PRIVATE") is due


@pytest.mark.parametrize("where", ["mark", "guarantee"])
def test_a_mark_in_the_release_is_enough_for_the_banner(make_run: MakeRun, where: str) -> None:
    run = make_run()
    path = run.root / "privatize/release/_manifest"
    release = json.loads(path.read_text())
    (release if where == "mark" else release["guarantee"])["mark"] = "NOT PRIVATE"
    path.write_text(json.dumps(release))
    assert banner(render(run, lean=True))


def test_labels_that_the_program_draws_are_protected_and_said_to_be_synthetic(make_run: MakeRun) -> None:
    facts = read_run(make_run(), STAGES)
    for recipe, synthetic in (
        ({"data": {"preferences": "embedded"}}, True),
        ({"data": {"preferences": "embedded"}, "online": {"labeller": "page"}}, False),
        ({"data": {"preferences": "mine.jsonl"}}, False),
    ):
        each = replace(facts, recipe=facts.recipe | recipe)
        status = privacy_status(each)
        card = run_card(each, status)
        assert (status.mark, card["statement"] != "none") == (None, True)
        assert ("synthetic" in card["facts"].get("labels_from", "")) == synthetic
        assert ("synthetic" in render_markdown(each, status, card).partition("## Privacy card")[0]) == synthetic


@pytest.mark.parametrize("where", ["recipe", "manifest"])
def test_labels_declared_public_are_given_no_claim_of_protection(make_run: MakeRun, where: str) -> None:
    """Whatever was done to them: SFT may have read the chosen answers, and the evaluation the labels as they are."""
    run = make_run()
    if where == "recipe":
        path = run.root / "recipe.yaml"
        path.write_text(path.read_text().replace("public_labels: false", "public_labels: true"))
    else:
        path = run.root / "sft/manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"declared_public": True}))
    facts = read_run(run, STAGES)
    status = privacy_status(facts)
    card, lean = run_card(facts, status), replace(facts, evaluation={}, ppo_history=[], reward_fit={}, sft_loss=[])
    page = render_html(lean, status, card)
    assert (status.private, status.mark, card["mark"]) == (False, "LABELS DECLARED PUBLIC", "LABELS DECLARED PUBLIC")
    assert (card["statement"], card["accounts"]) == ("none", [])
    assert card["protected"].startswith("Nothing is claimed")
    for text in (page, render_markdown(facts, status, card)):
        assert "so no protection is claimed" in text
        assert "Private: each preference label" not in text
        assert "times as likely" not in text
    assert not banner(page)


@pytest.mark.parametrize("stage", ["privatize", "sft", "evaluate"])
def test_an_override_of_any_stage_marks_page_card_and_text(make_run: MakeRun, stage: str) -> None:
    """The labels of the release are private; the run is not."""
    run = make_run()
    path = run.root / stage / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"override": "somebody overruled the guard"}))
    facts = read_run(run, STAGES)
    status = privacy_status(facts)
    card = run_card(facts, status)
    assert not status.private
    assert banner(render_html(replace(facts, evaluation={}, ppo_history=[], reward_fit={}, sft_loss=[]), status, card))
    assert "**NOT PRIVATE**: somebody overruled the guard." in render_markdown(facts, status, card)
    assert (card["mark"], card["mark_reason"]) == ("NOT PRIVATE", "somebody overruled the guard")
    assert card["statement"] == "none"
    assert card["protected"].startswith("Nothing")
    assert card["epsilon_per_event"] == 2.0


def test_same_facts_same_bytes(make_run: MakeRun, html: str) -> None:
    assert render(make_run()) == html


def test_private_page_says_the_numbers(html: str) -> None:
    words = Page(html).words
    assert "labels, the policy beats the reference policy 71 % of the time (95 % interval 65–77 %; 240 held-" in words
    assert "rises by 0.45 [0.24, 0.66]" in words
    assert "PPO reaches 82 % [70, 95]" in words
    assert "longer answer: 59 %" in html.replace("\u00a0", " ")


def test_the_card_stands_before_the_figures_and_the_first_sentences_have_no_symbol(html: str) -> None:
    assert html.index("<figure>") < html.index('id="privacy"') < html.index('id="results"')
    first = html[html.index("<h1>") : html.index("Private: each preference label.")]
    assert "<abbr" not in first
    assert not re.search("[εΓπ]|kl_coef|KL", first)
    assert f'<abbr title="{GLOSSARY["Γ"]}">Γ</abbr>' in html


def test_one_sentence_says_how_much_the_uncertainty_covers(make_run: MakeRun) -> None:
    row = {"coverage": 0.291, "ci_low": 0.2, "ci_high": 0.4, "nominal": 0.683}
    rows = [row | {"kappa": kappa} for kappa in (0.5, 1, 2)]
    figures = reward_figures(replace(read_run(make_run(), STAGES), evaluation={"coverage": rows}))
    assert any("Γ covers 29\u00a0% of errors (68\u00a0% of normal ones)." in figure["note"] for figure in figures)


def test_the_rule_by_which_samples_were_chosen_is_stated(make_run: MakeRun, html: str) -> None:
    assert "Prompts are spread evenly over the held-out ones" in html
    assert "The worst:" not in html
    run = make_run()
    path = run.root / "evaluate" / "samples.json"
    rows = json.loads(path.read_text())
    rows[1]["private"]["worst"] = True
    path.write_text(json.dumps(rows))
    assert render(run).count("The worst:") == 1


@pytest.mark.parametrize(
    ("low", "said"),
    [
        (0.6, "The reward is better than a coin: its accuracy on held-out labels, debiased, is 0.692 [0.600, 0.716]."),
        (0.4, "The reward cannot be told from a coin: .* PPO trained the policy on it all the same (--accept-reward)."),
        (None, ""),
    ],
)
def test_the_verdict_on_the_reward_stands_by_that_on_the_policy(
    make_run: MakeRun, low: float | None, said: str
) -> None:
    run = make_run()
    path = run.root / "reward" / "fit.json"
    fit = json.loads(path.read_text())
    fit["validation_accuracy_debiased"] = None if low is None else fit["validation_accuracy_debiased"] | {"ci_low": low}
    path.write_text(json.dumps(fit))
    facts = read_run(run, STAGES)
    status = privacy_status(facts)
    wanted = re.escape(said).replace(r"\.\*", ".*")
    for page in (Page(render(run)).words, render_markdown(facts, status, run_card(facts, status))):
        assert re.search(wanted, page)
        assert said or "a coin" not in page


def test_texts_left_out_as_too_long_are_shown(make_run: MakeRun, html: str) -> None:
    shown = "sft demonstrations 560 26 prompt 96, with a response 512"
    assert shown in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    assert "Texts of each stage" not in render(make_run(), lean=True)  # no stage ran


def test_missing_pieces_are_named(make_run: MakeRun) -> None:
    words = Page(render(make_run(ppo=False, truth=False, gibbs=False))).words
    assert "There is no PPO history." in words
    assert "Gibbs resampling was not run" in words
    assert "by the true reward" not in words
    assert "The estimated reward less the price of moving away" in words


def test_a_run_with_only_a_release_still_renders(make_run: MakeRun) -> None:
    run = make_run(ppo=False)
    for path in sorted(run.root.rglob("*")):
        if path.is_file() and path.parent.name != "release":
            path.unlink()
    page = Page(render(run))
    for said in (
        "has not been evaluated",
        "No win rate",
        "no PPO history",
        "no facts",
        "No sample",
        "recipe.yaml is missing",
    ):
        assert said in page.words
    assert "svg" not in page.tags


def test_no_release_no_report(make_run: MakeRun) -> None:
    run = make_run()
    (run.root / "privatize/release/_manifest").unlink()
    with pytest.raises(UserError, match=r"no privatize/release/_manifest: run it first \(--only privatize\)"):
        render(run)
    with (run.root / "recipe.yaml").open("a") as recipe:
        recipe.write("\nonline: {rounds: 1}\n")
    with pytest.raises(UserError, match=r"no online/release/_manifest: run it first \(--only online\)"):
        render(run)


def test_recipe_and_release_must_agree_on_epsilon(make_run: MakeRun) -> None:
    run = make_run()
    recipe = run.root / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("epsilon: 2.0", "epsilon: 0.5"))
    with pytest.raises(UserError, match=r"must be 2\.0, that of the released labels, got 0\.5"):
        render(run)


@pytest.mark.parametrize("name", ["ppo/history.jsonl", "evaluate/evaluation.json", "reward/fit.json"])
def test_damaged_file_is_named(make_run: MakeRun, name: str) -> None:
    run = make_run()
    (run.root / name).write_text('{"cut')
    with pytest.raises(UserError, match=rf"{name} is (missing or )?damaged: .*--from {name.split('/')[0]}"):
        render(run)


def test_only_released_json_is_read(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    opened: list[str] = []
    original = Path.read_text

    def spy(self: Path, *args: object, **kwargs: object) -> str:
        opened.append(self.relative_to(run.root).as_posix())
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", spy)
    read_run(run, STAGES)
    assert {Path(name).suffix for name in opened} <= {"", ".json", ".jsonl", ".yaml"}
    assert not [name for name in opened if name.startswith(("checkpoints", "keys"))]


def test_stage_writes_the_four_files(make_run: MakeRun) -> None:
    run = make_run(iterations=5)
    recipe = Recipe(
        name="demo",
        evaluation_labels="private",
        model=ModelConfig(source="tiny"),
        privatize=PrivatizeConfig(epsilon=2.0),
    )
    said = report.run(StageContext(recipe, run, World(rank=0, size=1), "report", STAGES))
    folder = run.stage("report")
    assert sorted(path.name for path in folder.iterdir()) == ["card.json", "card.md", "report.html", "report.md"]
    assert "beats the reference policy" in said["summary"]
    assert "\n" not in said["summary"]
    assert str(run.root) not in said["summary"]
    card = json.loads((folder / "card.json").read_text())
    assert card["epsilon_per_event"] == 2.0
    assert card["facts"]["what_sft_read"] == "demonstrations: embedded"
    assert "| True reward | 5.10 [4.94, 5.26] |" in (folder / "report.md").read_text()


def test_infinite_epsilon_is_null_in_the_card(make_run: MakeRun) -> None:
    facts = read_run(make_run(epsilon=math.inf, name="nonprivate"), STAGES)
    card = run_card(facts, privacy_status(facts))
    assert json.loads(json.dumps(card, allow_nan=False))["epsilon_per_event"] is None


def test_card_states_what_a_labeller_loses_and_claims_nothing_central(make_run: MakeRun) -> None:
    """The accountant's numbers; the KL text says that it is not claimed; a marked run gets neither."""
    facts = read_run(make_run(), STAGES)
    status = privacy_status(facts)
    card = run_card(facts, status)
    assert [each["epsilon"] for each in card["accounts"]] == [2.0, 20.0, 200.0]
    assert all(each["delta"] == 0.0 and each["assumptions"] for each in card["accounts"])
    ten = card["accounts"][1]["exact"]["epsilon"]
    assert ten == randomized_response(2.0, 10).details["exact"]["epsilon"] < 20.0
    text = render_markdown(facts, status, card)
    assert f"10 labels: epsilon 20 at delta 0, {upper_text(ten)} at delta 1e-06" in text
    assert "| Central guarantee | none is claimed for the released policy" in text
    assert "none is claimed for the released policy" in Page(render_html(facts, status, card)).words
    facts = read_run(make_run(epsilon=math.inf, name="nonprivate"), STAGES)
    card = run_card(facts, privacy_status(facts))
    assert card["accounts"] == []
    assert "one_labeller" not in card["facts"]


def test_rates_that_are_no_shares_are_explained_where_they_are_printed(make_run: MakeRun) -> None:
    """Debiased accuracy, calibration and rates on privatised labels; a run whose rates are shares has no such words."""
    run = make_run(ppo=False)
    facts = read_run(run, STAGES)
    status = privacy_status(facts)
    assert OUTSIDE not in render_markdown(facts, status, run_card(facts, status)).lower()
    outside = {"value": 1.157, "ci_low": 0.912, "ci_high": 1.402, "n": 40}
    below = {"value": -0.074, "ci_low": -0.31, "ci_high": 0.16, "n": 40}
    fit = facts.reward_fit | {"validation_accuracy_debiased": outside}
    facts = replace(facts, reward_fit=fit, evaluation=facts.evaluation | {"longer_answer_baseline": below})
    page = render_markdown(facts, status, run_card(facts, status))
    assert "1.000 [0.912, 1.000] (an end of 0 or 1 is clipped" in page
    right = "is right on 0.0\u00a0% (0–16\u00a0%, n\u00a0=\u00a040) of the likelihood pairs."
    assert f'"The longer answer wins" {right}' in page
    assert "- An end of 0 or 1 is clipped" in page
    html = render_html(facts, status, run_card(facts, status))
    assert "1.000 [0.912, 1.000] (an end of 0 or 1" in html
    assert "0.0\u00a0% (0–16\u00a0%, n\u00a0=\u00a040)" in html
    wide = [{"predicted": 0.9, "observed": 1.02, "ci_low": 0.8, "ci_high": 1.24, "n": 20}]
    (figure, *_) = reward_figures(replace(facts, reward_fit={"calibration": wide}))
    assert OUTSIDE in figure["note"].lower()


def test_shares_on_few_labels_or_prompts_are_withheld_wherever_they_stand(make_run: MakeRun) -> None:
    """Headline, tiles, table, fit, sentences and drawings of a run whose shares all are 0.77 on 11."""
    facts = read_run(make_run(), STAGES)
    few = {"value": 0.77, "ci_low": 0.75, "ci_high": 0.79, "n": 11}
    methods = {
        method: {key: few if isinstance(value, dict) else value for key, value in result.items()}
        | {"objective_gain": result["objective_gain"]}
        for method, result in facts.methods.items()
    }
    shares = {"methods": methods, "longer_answer_baseline": few, "judge_notes": []}
    bins = [few | {"predicted": 0.7, "observed": 0.77}]
    fit = facts.reward_fit | {"validation_accuracy_debiased": few, "calibration": bins}
    facts = replace(facts, reward_fit=fit, evaluation=facts.evaluation | shares)
    status = privacy_status(facts)
    card = run_card(facts, status)
    for text in (render_markdown(facts, status, card), render_html(facts, status, card)):
        assert "77" not in re.sub(r"<svg.*?</svg>|\b[0-9a-f]{16,}\b", "", text, flags=re.DOTALL)
        assert text.count("withheld: 11 of at least 12") >= 8
    assert [figure["title"] for figure in reward_figures(facts)] == ["Choice of the ridge"]
    assert win_rate_figures(facts) == []
