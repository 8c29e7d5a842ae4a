"""`private-rlhf attack` from outside: exit codes, JSON, where the owner's results go, what is refused."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest
from audit.worlds import World, make_world, sound, write_jsonl
from private_rlhf.audit.canaries import truth_path, write_truth
from private_rlhf.audit.view import stated_epsilon
from private_rlhf.cli import main
from private_rlhf.core.user import user_folder
from private_rlhf.privacy.keys import default_key, keygen
from support.leaky import chosen_first, id_of_joined_texts, kept_column

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def world() -> World:
    return make_world(250, seed=3)


def truth_file(world: World, folder: Path) -> Path:
    path = folder / "truth.jsonl"
    write_truth(path, world.truth())
    return path


def test_canaries_keep_the_person_and_the_epsilon_of_their_rows(tmp_path: Path, capsys: Capture) -> None:
    source, planted, key = tmp_path / "s.jsonl", tmp_path / "planted.jsonl", tmp_path / "k.key"
    rows = [{"prompt": f"prompt {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "who": f"w{i % 7}",
             "eps": (0.5, 4)[i % 7 > 2], "note": "left"} for i in range(400)]  # fmt: skip
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keygen(key)
    plant = ["attack", str(source), "--canaries", "300", "--plant", str(planted), "--key", str(key), "--carry"]
    assert main([*plant, "who,epsi"]) == 2
    assert "epsi" in capsys.readouterr().err
    assert not planted.exists()
    assert main([*plant, "who", "--truth", str(planted)]) == 2
    assert "--truth must be another file than --plant" in capsys.readouterr().err
    assert not planted.exists()
    assert main([*plant, "who,eps"]) == 0
    kept = [json.loads(line) for line in planted.read_text().splitlines()]
    assert [(row["prompt"], row["who"], row["eps"]) for row in kept] == [(f"prompt {i}", row["who"], row["eps"])
                                                                        for i, row in enumerate(rows)]  # fmt: skip
    assert {*kept[0]} == {"prompt", "chosen", "rejected", "who", "eps"}
    given = ["--output", str(tmp_path / "out"), "--key", str(key), "--labeler-column", "who", "--epsilon-column", "eps",
             "--epsilon-levels", "0.5,4"]  # fmt: skip
    assert main(["privatize", "--data", str(planted), *given]) == 0
    capsys.readouterr()
    assert main(["verify-release", str(tmp_path / "out")]) == 0
    assert f"{len(rows)} labels at ε = 0.5 (" in capsys.readouterr().out
    assert main(["attack", str(tmp_path / "out"), "--key", str(key)]) == 0


def test_without_a_key_canaries_are_planted_beside_the_user_s_own(tmp_path: Path, world: World) -> None:
    source = world.write_raw(tmp_path / "source.jsonl")
    assert main(["keygen"]) == 0
    assert main(["attack", str(source), "--canaries", "9", "--plant", str(tmp_path / "planted.jsonl")]) == 0
    assert truth_path(default_key()).is_file()


def test_planted_released_and_judged(tmp_path: Path, world: World, capsys: Capture) -> None:
    """The whole way through the command line; a sound run fails 1 time in 1,000."""
    source, key, release = world.write_raw(tmp_path / "source.jsonl"), tmp_path / "owner.key", tmp_path / "release"
    assert main(["keygen", "--output", str(key)]) == 0
    planted = tmp_path / "planted.jsonl"
    given = ["--canaries", "200", "--plant", str(planted), "--key", str(key)]
    assert main(["attack", str(source), *given]) == 0
    assert "200 canaries in" in capsys.readouterr().out
    options = {"--data": planted, "--output": release, "--epsilon": 1, "--key": key}
    assert main(["privatize", *(str(part) for option in options.items() for part in option)]) == 0
    capsys.readouterr()
    assert main(["attack", str(release), "--key", str(key), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "no leak found"
    assert (result["events"], result["canaries"], result["owner_only"]) == (200, "planted", False)
    assert "exact statistics (they need the labels of all rows, of 100 or more; 200 of 250 are" in result["untried"]
    assert 0 < result["power"]["excess_over_alpha"] < 0.27
    assert 0 <= result["epsilon_lower_bound"] <= 1
    keys = {"attack", "variant", "n", "correct", "rate", "ci_low", "ci_high", "p_value", "p_adjusted", "verdict"}
    assert keys <= set(result["attacks"][0])


def test_a_leak_ends_with_one_and_says_what_to_do(tmp_path: Path, world: World, capsys: Capture) -> None:
    folder = chosen_first(world, tmp_path / "bundle")
    assert main(["attack", str(folder), "--truth", str(truth_file(world, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "column order" in out
    assert "what to do: put the two responses in an order that does not depend on the label" in out
    assert "verdict: LEAK" in out


def test_real_labels_stay_with_their_owner(tmp_path: Path, world: World, capsys: Capture) -> None:
    folder, raw = chosen_first(world, tmp_path / "bundle"), world.write_raw(tmp_path / "raw.jsonl")
    assert main(["attack", str(folder), "--raw", str(raw), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["owner_only"] is True
    row = next(row for row in result["attacks"] if row["attack"] == "column order")
    assert (row["rate"], row["verdict"]) == (1.0, "leak")
    assert row["ceiling"] >= result["alpha"]
    assert 0.5 <= row["rate_without_bundle"] < 0.65
    written = tmp_path / "raw.jsonl.attacks.json"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert json.loads(written.read_text()) == result
    assert main(["attack", str(folder), "--raw", str(raw), "--output", str(folder / "result.json")]) == 2
    assert "from where things are released" in capsys.readouterr().err
    assert not (folder / "result.json").exists()


def test_a_sound_release_of_real_labels_is_not_accused(tmp_path: Path, capsys: Capture) -> None:
    """Labels that the text predicts: the longer response wins 8 times in 10. A sound run fails 1 time in 1,000."""
    world = make_world(600, seed=8)
    generator = random.Random(0)
    labels = [(1 if len(a) > len(b) else -1) * (1 if generator.random() < 0.8 else -1) for _, a, b in world.pairs]
    world = World(world.pairs, labels)
    folder, raw = sound(world, tmp_path / "bundle", 0.5), world.write_raw(tmp_path / "raw.jsonl")
    assert main(["attack", str(folder), "--raw", str(raw), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["attacks"]
    row = next(row for row in rows if row["attack"] == "private label")
    assert row["rate_without_bundle"] > 0.72 > row["rate"]  # the text tells more than z does
    leaky = kept_column(world, tmp_path / "leaky")
    assert main(["attack", str(leaky), "--raw", str(raw), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["attacks"]
    assert "extra columns" in {row["attack"] for row in rows if row["verdict"] == "leak"}


@pytest.mark.thorough
def test_without_truth_canaries_are_replayed(tmp_path: Path, world: World, capsys: Capture) -> None:
    """The replay is of this program, which is sound (1 in 1,000 fails); the ids of the given release are not."""
    folder, remembered = sound(world, tmp_path / "bundle"), set(user_folder().rglob("*"))
    assert main(["attack", str(folder), "--canaries", "200", "--json"]) == 0
    assert set(user_folder().rglob("*")) == remembered  # nothing stays of the throw-away key
    result = json.loads(capsys.readouterr().out)
    assert (result["canaries"], result["events"], result["verdict"]) == ("replayed", 200, "no leak found")
    leaky = id_of_joined_texts(world, tmp_path / "leaky")
    assert main(["attack", str(leaky), "--canaries", "100"]) == 1
    assert "LEAK in the release itself" in capsys.readouterr().out


def test_a_claim_below_the_release_s_epsilon_is_refuted(tmp_path: Path, world: World, capsys: Capture) -> None:
    """The replay is at the release's ε, whatever claim is tested."""
    folder = sound(world, tmp_path / "bundle", 3.0)
    assert main(["attack", str(folder), "--canaries", "200", "--epsilon", "0.1"]) == 1
    assert "the claim is 0.100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("manifest", "epsilon"),
    [({"optimizer": {"eps": 1e-8}, "epsilon": 2}, 2), ({"a": {"b": {"eps": None}}, "c": [{"EPSILON": 3}]}, 3),
     ({"adam": {"eps": 1e-8}, "privacy": {"epsilon": 1}}, 1), ({"note": {}}, None),
     ({"adam": {"eps": 1e-8}, "dp": {"labels": {"epsilon": 1}}}, 1), ({"eps": "adam", "dp": {"EPS": 2}}, 2)],
)  # fmt: skip
def test_the_outermost_epsilon_is_the_claim(tmp_path: Path, manifest: object, epsilon: float | None) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert stated_epsilon(tmp_path) == epsilon


@pytest.mark.parametrize(
    ("manifest", "message"),
    [({"dp": {"epsilon": None}}, "states no finite epsilon"),
     ({"epsilon": -1}, "manifest.json must be a finite number above 0, got -1"),
     ({"epsilon": "2.0"}, "manifest.json must be a finite number above 0, got '2.0'")],
)  # fmt: skip
def test_a_release_without_a_protected_label_or_a_usable_claim_is_refused(
    tmp_path: Path, world: World, capsys: Capture, manifest: object, message: str
) -> None:
    """Raw labels declared public left zero events, and none of them leaked."""
    folder = sound(world, tmp_path / "bundle")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    attack = ["attack", str(folder), "--truth", str(truth_file(world, tmp_path))]
    assert main(attack) == 2
    assert message in capsys.readouterr().err
    public = manifest == {"dp": {"epsilon": None}}
    assert main([*attack, "--epsilon", "2"]) == (2 if public else 0)
    assert ("must hold labels to judge, got only public ones" in capsys.readouterr().err) == public


def test_a_pair_with_a_blank_response_is_left_out_of_the_replay(tmp_path: Path, capsys: Capture) -> None:
    rows = [{"prompt": f"q {i}", "a1": f"yes {i}", "a2": f"no {i}" * (i != 7), "label": i % 2} for i in range(30)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "manifest.json").write_text(json.dumps({"epsilon": 1}))
    assert main(["attack", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == 29
    assert main(["attack", str(tmp_path), "--canaries", "30"]) == 2
    assert "must hold at least 30 pairs without a blank text, got 29: ask for fewer" in capsys.readouterr().err
