"""Wrong use and wrong input: exit code 2, one line that names the culprit and the remedy, nothing left behind."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.privacy.keys import keygen
from private_rlhf.stages.checks import POSITIONS
from support.pipeline_runs import TINY, Workspace, tree

ROWS = [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(40)]


class Refused:
    """Runs a command that must be refused, and keeps the one line that it said."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *arguments: str, new: Set[str] = frozenset()) -> str:
        before = tree(self.folder)
        self.capsys.readouterr()
        assert main(arguments) == 2
        out, err = self.capsys.readouterr()
        said = [line for line in err.splitlines() if not line.startswith("[private-rlhf] ")]
        assert len(said) == 1, err
        assert said[0].startswith("private-rlhf: ")
        assert "Traceback" not in out + err
        after = tree(self.folder)
        assert {name for name in after if after[name] != before.get(name)} <= new
        assert before.keys() <= after.keys()
        return said[0]

    def run(self, *overrides: str, config: Path = TINY, new: Set[str] = frozenset()) -> str:
        """`run` in a fresh run directory."""
        own = [f"privatize.key_file={self.folder / 'owner.key'}", f"model.cache_dir={self.folder / 'cache'}"]
        return self("run", "--config", str(config), "--run-dir", str(self.folder / "run"), *own, *overrides, new=new)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    keygen(tmp_path / "owner.key")
    return Refused(tmp_path, capsys)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- preferences ------------------------------------------------------------------------------------------------------


def test_missing_data(refused: Refused) -> None:
    line = refused.run("--data", "nowhere.jsonl")
    assert "nowhere.jsonl: no such file or folder; check the path" in line


def test_a_row_without_rejected(refused: Refused, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [*ROWS[:3], {"prompt": "p", "chosen": "c"}])
    line = refused.run("--data", data)
    assert "data.jsonl, line 4: lacks one of 'chosen'/'rejected'; add it, or remove the row" in line


def test_a_late_row_without_rejected_is_found_before_any_training(refused: Refused, tmp_path: Path) -> None:
    """Beyond the rows of the first look: the run directory is claimed by then, and goes again."""
    late = [*(dict(row, prompt=f"{n} {row['prompt']}") for n in range(3) for row in ROWS), {"prompt": "p"}]
    data = write_rows(tmp_path / "data.jsonl", late)
    assert "line 121: lacks" in refused.run("--data", data)
    assert not (tmp_path / "run").exists()


def test_an_empty_data_set(refused: Refused, tmp_path: Path) -> None:
    line = refused.run("--data", write_rows(tmp_path / "data.jsonl", []))
    assert "data.jsonl: holds no rows; give a data set with at least one" in line


def test_identical_responses_only(refused: Refused, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [dict(row, rejected=row["chosen"]) for row in ROWS])
    key, output = str(tmp_path / "owner.key"), str(tmp_path / "release")
    line = refused("privatize", "--data", data, "--output", output, "--epsilon", "1", "--key", key)
    assert "no rows are left; 40 had identical responses" in line
    assert "check that `chosen` and `rejected` are two different answers" in line
    assert "no rows are left; 40 had identical responses" in refused.run("--data", data)


def test_text_that_is_not_utf8(refused: Refused, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"prompt": "p", "chosen": "\xff", "rejected": "r"}\n')
    assert "data.jsonl, line 1: is not UTF-8 text; convert the file to UTF-8" in refused.run("--data", str(data))


@pytest.mark.parametrize("key", ["demonstrations", "prompts", "evaluation_prompts"])
def test_every_other_input_is_looked_at_before_anything_runs(refused: Refused, tmp_path: Path, key: str) -> None:
    assert "nowhere.jsonl: no such file or folder" in refused.run(f"data.{key}=nowhere.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    assert "broken.jsonl, line 1: is not valid JSON" in refused.run(f"data.{key}={broken}")


def test_preferences_are_no_demonstrations(refused: Refused, tmp_path: Path) -> None:
    line = refused.run(f"data.demonstrations={write_rows(tmp_path / 'data.jsonl', ROWS)}")
    assert "tuning on preferred answers would reveal the labels" in line


def test_chosen_answers_under_another_name_are_no_demonstrations(refused: Refused, tmp_path: Path) -> None:
    """Found by their text, before anything is written, by `run`, by `--dry-run` and by the stage alone."""
    data = write_rows(tmp_path / "data.jsonl", ROWS)
    chosen = [{"prompt": row["prompt"], "response": row["chosen"]} for row in ROWS[:30]]
    demonstrations = write_rows(tmp_path / "written by experts.jsonl", chosen)
    private = ("data.public_labels=false", "evaluation_labels=private", f"data.demonstrations={demonstrations}")
    line = refused.run("--data", data, *private)
    assert f"data.demonstrations {demonstrations}: repeats one response, and not equally the other, of 30 of 40" in line
    assert "data.allow_label_overlap: true, which marks the run NOT PRIVATE" in line
    assert refused.run("--data", data, "--dry-run", *private) == line
    assert refused.run("--data", data, "--only", "sft", *private) == line


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_prompts_that_fill_the_context(refused: Refused, tmp_path: Path) -> None:
    said = "model.max_prompt_tokens 500 and max_response_tokens 13 make 513 tokens, and"
    limits = ("model.max_prompt_tokens=500", "model.max_response_tokens=13")
    assert f"{said} tiny has 512 positions: lower one of them" in refused.run(*limits)
    for number, config in enumerate((
        {"max_position_embeddings": 512, "text_config": None},
        {"text_config": {"n_positions": 512}},
    )):
        folder = tmp_path / f"model{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        assert f"{said} {folder} has 512 positions" in refused.run(*limits, f"model.source={folder}")


def test_the_positions_of_the_tiny_model_are_those_of_its_checkpoint() -> None:
    assert tiny_config(8, 0, 1).max_position_embeddings == POSITIONS["tiny"]


@pytest.mark.parametrize("name", ["own_data", "hh_truth", "hh_rlhf_smollm2"])
def test_a_recipe_for_own_data_asks_for_them(refused: Refused, name: str) -> None:
    """Every command that would read them; the built-in task is read only where it is named."""
    for command in (["run", "--dry-run"], ["run"], ["privatize"], ["sft"], ["plan"], ["verify-run"]):
        line = refused(*command, "--config", name)
        assert "data.preferences must name the preferences to learn from, got none: give --data PATH" in line
    assert main(["run", "--config", name, "--data", "embedded", "--dry-run"]) == 0


def test_a_misspelt_key_in_the_recipe(refused: Refused, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(TINY.read_text().replace("  iterations: 6", "  iteratoins: 6"))
    line = refused.run(config=recipe)
    assert "mine.yaml: unknown key 'ppo.iteratoins'; did you mean 'iterations'?" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.iteratoins=6", "unknown key 'ppo.iteratoins'; did you mean 'iterations'?"),
        ("pqo.iterations=6", "unknown key 'pqo'; did you mean 'ppo'?"),
        ("ppo.iterations", "override 'ppo.iterations' is not of the form section.key=value"),
        ("ppo.iterations=many", "ppo.iterations: "),
        ("ppo.minibatch_size=3", "minibatch_size 3 must divide rollouts 8"),
        ("reward.refit_ridge=2", "refit_ridge is for mode lora or full"),
        ("reward.micro_batch_size=2", "micro_batch_size is for mode lora or full: mode head has feature_batch_size"),
        ("privatize.epsilon=0", "epsilon must be a number > 0"),
        ("privatize.epsilon=-1", "epsilon must be a number > 0"),
        ("privatize.epsilon=.nan", "epsilon must be a number > 0"),
        ("data.public_labels=false", "evaluation_labels: public needs data.public_labels: true; otherwise use private"),
        ("sft.trainer_args.weight_decya=0.1", "trl.SFTConfig has no 'weight_decya'; did you mean 'weight_decay'?"),
        ("sft.trainer_args.max_steps=3", "sft.trainer_args.max_steps is set by the stage itself"),
        ("sft.trainer_args.optim=nonsense", "sft.trainer_args: trl.SFTConfig refuses a value"),
        ("reward.trainer_args.weight_decay=0.1", "reward.trainer_args is for reward.mode lora or full"),
        ("sft.micro_batch_size=3", "sft.batch_size 8 is no multiple of"),
        ("sft.batch_size=600", "there are 534 texts or pairs to learn from, fewer than sft.batch_size 600"),
        ("model.source=./nowhere", "model.source './nowhere' is no folder"),
    ],
)
def test_a_wrong_override(refused: Refused, override: str, said: str) -> None:
    assert said in refused.run(override)


def test_misspelt_trainer_args_of_a_lora_reward(refused: Refused) -> None:
    lora = ("reward.mode=lora", "reward.trainer_args.weight_decya=0.1")
    assert "trl.RewardConfig has no 'weight_decya'; did you mean 'weight_decay'?" in refused.run(*lora)


def test_infinite_epsilon_on_labels_that_are_not_public(refused: Refused) -> None:
    line = refused.run("privatize.epsilon=.inf", "data.public_labels=false", "evaluation_labels=private")
    assert "privatize.epsilon .inf needs data.public_labels: true" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: [\n", "mine.yaml is not valid YAML at line 2; fix it"),
        (b"- a\n", "mine.yaml holds no mapping"),
        (b"name: \xff\n", "mine.yaml is not UTF-8 text"),
        (b"name: one\nevaluation_labels: public\nprivatize: {epsilon: 1}\n", "key 'model' is required"),
    ],
)
def test_a_broken_recipe(refused: Refused, tmp_path: Path, content: bytes, said: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_bytes(content)
    line = refused("run", "--config", str(recipe), "--run-dir", str(tmp_path / "run"))
    assert said in line


def test_a_missing_recipe(refused: Refused) -> None:
    assert "recipe nowhere.yaml does not exist: name a file or a shipped recipe" in refused.run(
        config=Path("nowhere.yaml")
    )


# --- the run directory, the key, the options --------------------------------------------------------------------------


def test_a_run_directory_of_another_recipe(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: other\n")
    assert "was made by recipe 'other', not 'tiny': choose another --run-dir" in refused.run()
    assert "was made by recipe 'other'" in refused.run("--dry-run")


def test_a_folder_of_something_else(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("Dear all,")
    assert "is not empty and is no run directory: choose another --run-dir" in refused.run()


def test_a_run_directory_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["run", "--config", str(TINY), "--run-dir", str(tmp_path / "file" / "run")]
    line = refused(*arguments, f"privatize.key_file={tmp_path / 'owner.key'}")
    assert "cannot be written" in line
    assert "choose another --run-dir" in line


def test_a_key_that_others_can_read(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "owner.key").chmod(0o644)
    assert "owner.key: the key can be read by others; run `chmod 600" in refused.run()


def test_a_key_inside_the_run_directory(refused: Refused, tmp_path: Path) -> None:
    line = refused.run(f"privatize.key_file={tmp_path / 'run' / 'owner.key'}")
    assert "is inside the run directory: keep the key elsewhere" in line


def test_a_damaged_manifest(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "run" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("name: tiny\n")
    (tmp_path / "run" / "sft" / "manifest.json").write_text('{"stage": ')
    line = refused.run()
    assert "manifest.json is damaged: delete the folder" in line


def test_a_stage_without_its_input(refused: Refused) -> None:
    for option, stage, needed in (("--from", "sft", "privatize"), ("--only", "ppo", "sft")):
        said = refused.run(option, stage)
        assert f"holds no completed stage '{needed}': run it first (private-rlhf run --only {needed})" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--config", str(TINY), "--from", "rewrad"], "--from rewrad: no such stage; did you mean 'reward'?"),
        (["run", "--config", str(TINY), "--only", "x"], "--only x: no such stage; valid keys here: count, dpo,"),
        (["run", "--config", str(TINY), "--from", "sft", "--only", "ppo"], "--from and --only exclude each other"),
        (["run", "--config", str(TINY), "--colour"], "--colour"),
        (["run"], "--config"),
        (["walk"], "walk"),
        (["privatize", "--data", "d", "--output", "o", "--epsilon", "1"], "make it with `private-rlhf keygen`"),
        (["evaluate", "--policy", "p"], "evaluate without --config needs --reference, --prompts, --judge"),
        (["privatize", "--epsilon", "much"], "--epsilon"),
        (
            ["evaluate", "--policy", "nowhere", "--reference", "b", "--prompts", "embedded", "--judge", "truth"],
            "nowhere",
        ),
        (["sample", "--policy", "nowhere", "Hello"], "nowhere"),
    ],
)
def test_wrong_options(refused: Refused, arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


@pytest.mark.parametrize("epsilon", ["0", "-1", "nan", "inf"])
def test_privatize_wants_a_positive_finite_epsilon(refused: Refused, tmp_path: Path, epsilon: str) -> None:
    data, key = write_rows(tmp_path / "data.jsonl", ROWS), str(tmp_path / "owner.key")
    release = str(tmp_path / "release")
    line = refused("privatize", "--data", data, "--output", release, "--epsilon", epsilon, "--key", key)
    assert "epsilon" in line


def test_a_key_is_never_overwritten(refused: Refused, tmp_path: Path) -> None:
    assert "is a key, which no command overwrites" in refused("keygen", "--output", str(tmp_path / "owner.key"))


def test_a_missing_key_file(refused: Refused, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", ROWS)
    line = refused("privatize", "--data", data, "--output", "release", "--epsilon", "1", "--key", "nowhere.key")
    assert "nowhere.key: no such key file; make one with `private-rlhf keygen --output nowhere.key`" in line


def test_a_budget_that_would_be_exceeded_is_found_by_a_plan(
    refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a plan changes nothing: not the ledger, not its lock."""
    data, key = write_rows(tmp_path / "data.jsonl", ROWS), str(tmp_path / "owner.key")
    spend = ["privatize", "--data", data, "--output", str(tmp_path / "release"), "--key", key, "--epsilon", "0.5"]
    assert main([*spend, "--budget", "0.75"]) == 0
    over = "over the budget of 0.75 per event: the largest total of any one record under this key is 0.5"
    for plan in ((), ("--dry-run",)):
        assert over in refused.run("privatize.epsilon=1", *plan)
    lower = refused.run("privatize.epsilon=0.3", "privatize.budget=0.4", "--dry-run")
    assert "over the budget of 0.4 per event" in lower
    before = tree(tmp_path)
    own = [f"privatize.key_file={key}", f"model.cache_dir={tmp_path / 'cache'}", "privatize.epsilon=0.75"]
    assert main(["run", "--config", str(TINY), "--run-dir", str(tmp_path / "run"), "--dry-run", *own]) == 0
    assert tree(tmp_path) == before


# --- 4 and 8 bits -----------------------------------------------------------------------------------------------------


def test_a_four_bit_base_without_an_adapter(refused: Refused) -> None:
    line = refused.run("ppo.quantize=4bit", "ppo.lora=null")
    assert "ppo: quantize trains an adapter on a frozen 4-bit model: give lora its settings, not null" in line
    assert "ppo.quantize" in refused.run("ppo.quantize=8bit")


@pytest.mark.parametrize("section", ["ppo", "reward"])
def test_bits_without_bitsandbytes(refused: Refused, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "bitsandbytes" else find_spec(name, *rest)
    )
    more = ["reward.mode=lora"] if section == "reward" else []
    for key, value in (("quantize", "4bit"), ("optimizer", "adamw_8bit")):
        line = refused.run(f"{section}.{key}={value}", *more)
        assert f"{section}.{key} {value} needs bitsandbytes: install it with pip install 'private-rlhf[quant]'" in line


@pytest.mark.parametrize("section", ["ppo", "reward"])
def test_paged_optimiser_states_without_a_gpu(refused: Refused, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    more = ["reward.mode=lora"] if section == "reward" else []
    line = refused.run(f"{section}.optimizer=paged_adamw_8bit", *more)
    assert f"{section}.optimizer paged_adamw_8bit needs a GPU: take adamw_8bit" in line


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "ppo.quantize 4bit cannot run under FSDP2: take launch/ddp.yaml",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "sft cannot run under FSDP1, it was never run here: set fsdp_version: 2",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "sft cannot run under ZeRO-3, it was never run here; launch it with launch/ddp.yaml or launch/fsdp2.yaml",
        ),
    ],
)
def test_a_four_bit_base_that_a_launcher_would_split(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert said in refused.run("ppo.quantize=4bit")


# --- as a process -----------------------------------------------------------------------------------------------------


def test_the_process_exits_with_2_and_says_one_line(workspace: Workspace, tmp_path: Path) -> None:
    done = workspace.finish(workspace.command("run", *workspace.options(tmp_path / "run", "ppo.iteratoins=6")))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"private-rlhf: {TINY}: unknown key 'ppo.iteratoins'; did you mean 'iterations'?"
    ]
    assert not (tmp_path / "run").exists()
