"""An ε for each label: releases, the ledger's laws, who may set a level and when, and what a level tells."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.audit.canaries import plant, read_truth
from private_rlhf.audit.suite import run_attacks
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options, parse_levels
from private_rlhf.data.release import PERSON, WORD, Release, file_of, read_release
from private_rlhf.data.release_import import divide
from private_rlhf.data.totals import check_totals
from private_rlhf.privacy.card import card_rows, privacy_card
from private_rlhf.privacy.guarantee import status_of
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.mechanism import LevelledResponse, RandomizedResponse
from private_rlhf.recipe import PrivatizeConfig
from support.other_machines import move_to

LEVELS = (0.5, 1.0, 4.0)
pytestmark = pytest.mark.usefixtures("quick_disk")


def rows_of(epsilons: dict[str, float], count: int = 30) -> list[dict[str, Any]]:
    """`count` pairs of each person, at that person's ε."""
    return [
        {"prompt": f"number {number}", "chosen": f"yes {number}", "rejected": f"no {number}", "who": who, "eps": level}
        for who, level in epsilons.items()
        for number in range(count)
    ]


def release(rows: list[dict[str, Any]], output: Path, key: Path, **more: Any) -> Release:
    """The release of rows at the ε of each; more: of `Request`, and `epsilon` for one of all."""
    data = output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    epsilon = more.pop("epsilon", None)
    levels: dict[str, Any] = {} if epsilon else {"epsilon_column": "eps", "epsilon_levels": more.pop("levels", LEVELS)}
    options = Options(labeler_column=more.pop("labeler_column", "who"), **levels)
    privatize_source(Request(str(data), output, epsilon, key, options=options, **more))
    opened = read_release(output)
    opened.check_rows()
    return opened


def shown(key: Path) -> dict[str, Any]:
    return Ledger.open(load_key(key)).show()


def test_each_row_is_what_its_level_alone_releases(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k.key")
    rows = rows_of({"a": 0.5, "b": 1.0, "c": 4.0})
    mixed = release(rows, tmp_path / "mixed", key)
    assert mixed.manifest.levels == {"chosen": PERSON, "events": [[0.5, 30], [1.0, 30], [4.0, 30]]}
    assert mixed.schema.names == ["prompt", "chosen", "rejected", "record_id", "epsilon"]
    assert check_totals(mixed) == 5.5
    for epsilon in LEVELS:
        alone = release(rows, tmp_path / f"at {epsilon}", key, epsilon=epsilon)
        assert alone.schema.names == ["prompt", "chosen", "rejected", "record_id"]
        for one, other in zip(alone.rows, mixed.rows, strict=True):
            if other.epsilon == epsilon:
                assert one.chosen == other.chosen
    noise = mixed.manifest.noise_of(mixed.rows)
    assert isinstance(noise, LevelledNoise)
    assert noise.as_json()["levels"] == mixed.manifest.levels["events"]
    with pytest.raises(UserError, match="has an ε for each label"):
        _ = mixed.manifest.noise


def test_a_mix_of_one_level_has_the_rows_of_one_epsilon(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k.key")
    rows = rows_of({"a": 1.0, "b": 1.0})
    mixed = release(rows, tmp_path / "mixed", key)
    plain = release(rows, tmp_path / "plain", key, epsilon=1.0)
    assert [row[:4] for row in mixed.rows] == [row[:4] for row in plain.rows]
    assert shown(key)["epsilon_total"] == 1.0


people = st.lists(st.sampled_from(LEVELS), min_size=3, max_size=3)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(people, min_size=1, max_size=4))
def test_whoever_raises_pays_the_difference_and_whoever_lowers_nothing(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[float]]
) -> None:
    """Of several releases at levels that change, each event costs its largest, and each person the sum of theirs."""
    folder = tmp_path_factory.mktemp("raise")
    move_to(folder)
    key, most = keygen(folder / "k.key"), [0.0, 0.0, 0.0]
    for number, levels in enumerate(batches):
        release(rows_of(dict(zip("abc", levels, strict=True)), 3), folder / f"r{number}", key)
        most = [max(pair) for pair in zip(most, levels, strict=True)]
        facts = shown(key)
        assert facts["epsilon_total"] == max(most)
        assert facts["labelers"]["max_epsilon"] == 3 * max(most)
        assert facts["labelers"]["busiest"] == [{"epsilon": max(most), "events": 3}]
        assert [[level, 3 * levels.count(level)] for level in LEVELS] in [each["levels"] for each in facts["releases"]]
    assert Ledger.open(load_key(key)).verify() == []


EVENTS = [(who, number) for who in "ab" for number in range(3)]
some = st.dictionaries(st.sampled_from(EVENTS), st.sampled_from(LEVELS), min_size=1)
alike = st.builds(dict.fromkeys, st.lists(st.sampled_from(EVENTS), min_size=1, unique=True), st.sampled_from(LEVELS))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), alike) | st.tuples(st.just(False), some), min_size=2, max_size=4))
def test_any_mix_of_releases_costs_each_event_its_largest_level(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[bool, dict[tuple[str, int], float]]]
) -> None:
    """Some of the events, each at any level or all at one ε, again and again: raised, lowered, left out. The ledger has
    each person's total by level, a budget of exactly that is kept, and an event has one label at one ε."""
    folder = tmp_path_factory.mktemp("mix")
    move_to(folder)
    key, most, seen = keygen(folder / "k.key"), dict.fromkeys(EVENTS, 0.0), dict[tuple[str, float], str]()
    for number, (plain, levels) in enumerate(batches):
        of_all = zip(EVENTS, rows_of({"a": 0, "b": 0}, 3), strict=True)
        rows = [row | {"prompt": f"{row['who']}: {row['prompt']}", "eps": levels[event]}
                for event, row in of_all if event in levels]  # fmt: skip
        most |= {event: max(level, most[event]) for event, level in levels.items()}
        spent = {who: math.fsum(level for event, level in most.items() if event[0] == who) for who in "ab"}
        one: dict[str, Any] = {"epsilon": rows[0]["eps"]} if plain else {"levels_before": True}
        limit = Budget(max(spent.values()), "person")
        opened = release(rows, folder / f"r{number}", key, budget=limit, **one)
        facts = shown(key)
        assert facts["epsilon_total"] == max(most.values())
        assert facts["labelers"]["max_epsilon"] == limit.epsilon
        busiest = {each["epsilon"]: each["events"] for each in facts["labelers"]["busiest"]}
        counted = [{level: list(most.values())[at : at + 3].count(level) for level in LEVELS} for at in (0, 3)]
        assert busiest in [{level: count for level, count in each.items() if count} for each in counted]
        for row in opened:
            epsilon = rows[0]["eps"] if row.epsilon is None else row.epsilon
            assert seen.setdefault((str(row.prompt), epsilon), str(row.chosen)) == row.chosen
    assert Ledger.open(load_key(key)).verify() == []


def test_a_person_s_total_is_by_level(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k.key")
    rows = rows_of({"a": 0.5}, 4)
    release(rows, tmp_path / "first", key)
    more = [{**row, "prompt": f"later {row['prompt']}", "eps": 4.0} for row in rows]
    release(more, tmp_path / "later", key)
    busiest = shown(key)["labelers"]["busiest"]
    assert busiest == [{"epsilon": 0.5, "events": 4}, {"epsilon": 4.0, "events": 4}]
    with pytest.raises(UserError, match="over the budget of 18 per person"):
        release([{**row, "eps": 1.0} for row in rows], tmp_path / "over", key, budget=Budget(18.0, "person"))
    release([{**row, "eps": 1.0} for row in rows], tmp_path / "in", key, budget=Budget(22.0, "person"))


def test_a_level_that_changes_within_a_person_s_batch_is_refused(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k.key")
    rows = rows_of({"a": 0.5, "b": 4.0}, 4)
    rows[0]["eps"] = 4.0
    with pytest.raises(UserError, match="chosen after the answer tells it"):
        release(rows, tmp_path / "refused", key)
    with pytest.raises(UserError, match="persons without a name"):
        release(rows_of({"a": 0.5}, 4)[1:] + rows[:1], tmp_path / "nobody", key, labeler_column=None)
    assert shown(key)["releases"] == []
    told = release(rows, tmp_path / "told", key, levels_before=True)
    assert told.manifest.levels is not None
    assert told.manifest.levels["chosen"] == WORD


@pytest.mark.parametrize("value", [2.0, "x", None, True, 0.0, math.nan])
def test_an_undeclared_level_is_refused_by_its_row(tmp_path: Path, value: Any) -> None:
    rows = rows_of({"a": 0.5}, 3)
    rows[1]["eps"] = value
    with pytest.raises(UserError, match="line 2"):
        release(rows, tmp_path / "out", keygen(tmp_path / "k.key"))


def test_levels_that_are_none() -> None:
    for text in ("1", "1,1", "0,1", "x,1", "1,inf", "1_0,2"):
        with pytest.raises(UserError, match="epsilon-levels"):
            LevelledResponse.of(parse_levels(text))
    assert parse_levels("4,0.5") == (0.5, 4.0)
    with pytest.raises(UserError, match="go together"):
        Options(epsilon_column="eps")
    with pytest.raises(UserError, match="names the ε of each label"):
        Options(epsilon_column="eps", epsilon_levels=LEVELS, columns=("epsilon",))
    both = Options(epsilon_column="e", epsilon_levels=LEVELS)
    with pytest.raises(UserError, match="one ε for all, or each its own"):
        _ = Request("d", Path("o"), 1.0, Path("k"), options=both).mechanism


def test_a_recipe_takes_the_largest_level_as_its_epsilon() -> None:
    levels: dict[str, Any] = {"epsilon_column": "eps", "epsilon_levels": [4.0, 0.5]}
    assert PrivatizeConfig(**levels).epsilon == 4.0
    refused: list[tuple[dict[str, Any], str]] = [
        ({"epsilon": 2.0}, "the largest"),
        ({"person_budget": 2.0}, "without person_budget"),
        ({"epsilon_levels": None, "epsilon": 1.0}, "go with"),
        ({"epsilon_levels": [1.0]}, "two or more"),
    ]
    for more, rule in refused:
        with pytest.raises(ValueError, match=rule):
            PrivatizeConfig(**{**levels, **more})


def test_a_manifest_that_lies_about_levels_is_refused(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k.key")
    opened = release(rows_of({"a": 0.5, "b": 4.0}, 4), tmp_path / "out", key)
    path = file_of(opened.directory, "_manifest")
    file_of(opened.directory, "_signature").unlink()
    honest = path.read_text()
    for old, new in (("0.5,\n        4", "0.5,\n        3"), ("      0.5,\n      1.0", "      0.6,\n      1.0"),
                     (PERSON, "whenever")):  # fmt: skip
        assert old in honest
        path.write_text(honest.replace(old, new, 1))
        with pytest.raises(UserError):
            read_release(opened.directory).check_rows()
    # the counts exchanged: their sum is right, and the rows say otherwise
    one = release(rows_of({"a": 0.5, "b": 4.0}, 4)[1:], tmp_path / "uneven", key)
    path = file_of(one.directory, "_manifest")
    file_of(one.directory, "_signature").unlink()
    text = path.read_text().replace("0.5,\n        3", "0.5,\n        X").replace("4.0,\n        4", "4.0,\n        3")
    path.write_text(text.replace("X", "4"))
    with pytest.raises(UserError, match="ε of its rows"):
        read_release(one.directory).check_rows()


def test_a_bundle_that_is_taken_over_keeps_each_level(tmp_path: Path) -> None:
    mixed = release(rows_of({"a": 0.5, "b": 1.0, "c": 4.0}), tmp_path / "mixed", keygen(tmp_path / "k.key"))
    taken, held = divide(mixed, None, tmp_path / "train", tmp_path / "test")
    parts = [read_release(tmp_path / name) for name in ("train", "test")]
    assert [len(part) for part in parts] == [taken, held]
    for part in parts:
        part.check_rows()
    assert sorted(row for part in parts for row in part.rows) == sorted(mixed.rows)


def test_card_and_page_say_the_distribution(tmp_path: Path) -> None:
    mixed = release(rows_of({"a": 0.5, "b": 4.0}), tmp_path / "mixed", keygen(tmp_path / "k.key"))
    rows = card_rows(privacy_card(mixed.manifest.as_dict()))
    carried, least = (30 * (math.tanh(0.25) ** 2 + math.tanh(2.0) ** 2), 60 * math.tanh(0.25) ** 2)
    stated = rows["Epsilon of each event"]
    assert "0.5 (30), 1 (0), 4 (30)" in stated
    assert f"as much as {carried:.1f} true ones, and at the least level for all {least:.1f}" in stated
    assert PERSON in stated
    assert "0.622459 at 0.5" in rows["Realised alpha (probability that a label is kept)"]
    status = status_of(mixed.manifest.as_dict())
    assert status.levels == ((0.5, 30), (1.0, 0), (4.0, 30))
    assert status.epsilon == 4.0
    assert "62" in status.kept


# --- what a level tells that depends on the label ---------------------------------------------------------------------


def worst_ratio(by_label: dict[int, dict[float, float]]) -> float:
    """The largest |log P(level, z | y)/P(level, z | −y)|. by_label: by label, the probability of each level."""
    ratios = []
    for level in by_label[1]:
        keep = float(LabelNoise.of(level).exact_keep)
        for kept, turned in ((keep, 1 - keep), (1 - keep, keep)):
            ratios.append(math.log(by_label[1][level] * kept / (by_label[-1][level] * turned)))
    return max(map(abs, ratios))


def test_what_the_threat_model_says_of_levels_that_depend_on_labels() -> None:
    fair = {0.5: 0.5, 4.0: 0.5}
    assert worst_ratio({1: fair, -1: fair}) == pytest.approx(4.0)
    some = {1: {0.5: 0.4, 4.0: 0.6}, -1: {0.5: 0.6, 4.0: 0.4}}
    assert worst_ratio(some) == pytest.approx(4.0 + math.log(1.5))
    least = math.log(0.6 / 0.4) + 0.5
    assert least == pytest.approx(0.905, abs=1e-3)  # of the level 0.5, stated as 0.5
    assert max(0.5 + math.log(9), 4 - math.log(9)) == pytest.approx(2.70, abs=0.01)  # of 0.5, at .9 and .1
    much = {1: {0.5: 0.1, 4.0: 0.9}, -1: {0.5: 0.9, 4.0: 0.1}}
    assert worst_ratio(much) == pytest.approx(6.2, abs=0.01)


@pytest.mark.parametrize("told", [False, True])
def test_attack_finds_levels_that_were_chosen_by_the_label(tmp_path: Path, told: bool) -> None:
    """Canaries of fair coins. Mutant: who prefers the longer answer asks for 4, others for .5, by their holder's word
    before the labels. Sound: people's own levels."""
    generator = random.Random(3)
    source = tmp_path / "source.jsonl"
    words = ["".join(generator.choices("abcdefgh ", k=generator.randint(20, 60))) for _ in range(1600)]
    pairs = [(f"question {i}", *words[2 * i : 2 * i + 2], f"person {i % 5}", LEVELS[i % 5 % 3]) for i in range(800)]
    names = ("prompt", "chosen", "rejected", "who", "eps")
    source.write_text("".join(json.dumps(dict(zip(names, pair, strict=True))) + "\n" for pair in pairs))
    planted, truth = tmp_path / "planted.jsonl", tmp_path / "truth.jsonl"
    plant(str(source), planted, truth, 700, lambda: 1 - 2 * generator.getrandbits(1), ("who", "eps"))
    rows = [json.loads(line) for line in planted.read_text().splitlines()]
    for row in rows if told else ():
        row["eps"] = (0.5, 4.0)[len(row["chosen"]) > len(row["rejected"])]
    key = keygen(tmp_path / "k.key")
    release(rows, tmp_path / "released", key, levels_before=told)
    outcome = run_attacks([tmp_path / "released"], read_truth(truth))
    assert outcome.leak == told
    if told:
        found = [verdict for verdict in outcome.attacks if verdict.leak]
        assert all(verdict.variant.endswith("of events at ε = 0.5") for verdict in found)


def test_the_mechanism_of_levels_is_each_level_s(tmp_path: Path) -> None:
    mixed = LevelledResponse.of((4.0, 0.5))
    assert [level.epsilon for level in mixed.levels] == [0.5, 4.0]
    assert mixed.guarantee()["levels"] == [0.5, 4.0]
    assert mixed.noise == RandomizedResponse(4.0).noise
    assert np.isclose(mixed.levels[0].noise.keep_prob, 0.6225, atol=1e-4)
