"""Wrong use that depends on the machine, the launcher or the process; all else is a row of `bad_inputs`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.stages.checks import POSITIONS
from support.pipeline_runs import TINY, Workspace, tree


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line of a run that is refused and leaves nothing."""
    before = tree(folder)
    capsys.readouterr()
    own = [f"privatize.key_file={folder / 'owner.key'}", f"model.cache_dir={folder / 'cache'}"]
    assert main(["run", "--config", str(TINY), "--run-dir", str(folder / "run"), *own, *overrides]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[private-rlhf] ")]
    assert len(lines) == 1
    assert tree(folder) == before
    return lines[0]


def test_the_positions_of_the_tiny_model_are_those_of_its_checkpoint() -> None:
    assert tiny_config(8, 0, 1).max_position_embeddings == POSITIONS["tiny"]


@pytest.mark.parametrize("name", ["own_data", "hh_truth", "hh_rlhf_smollm2"])
def test_a_recipe_for_own_data_takes_the_built_in_task_where_it_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--config", name, "--data", "embedded", "--dry-run"]) == 0


@pytest.mark.parametrize("section", ["ppo", "reward"])
def test_bits_without_bitsandbytes(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "bitsandbytes" else find_spec(name, *rest)
    )
    for key, value in (("quantize", "4bit"), ("optimizer", "adamw_8bit")):
        line = refusal(tmp_path, capsys, f"{section}.{key}={value}", "reward.mode=lora")
        assert f"{section}.{key} {value} needs bitsandbytes: install it with pip install 'private-rlhf[quant]'" in line


@pytest.mark.parametrize("section", ["ppo", "reward"])
def test_paged_optimiser_states_without_a_gpu(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    line = refusal(tmp_path, capsys, f"{section}.optimizer=paged_adamw_8bit", "reward.mode=lora")
    assert f"{section}.optimizer paged_adamw_8bit needs a GPU: take adamw_8bit" in line


FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({FSDP: "true", "FSDP_VERSION": "2"}, "ppo.quantize 4bit cannot run under FSDP2: take launch/ddp.yaml"),
        ({FSDP: "true"}, "sft cannot run under FSDP1, it was never run here: set fsdp_version: 2"),
        (
            {DEEPSPEED: "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "sft cannot run under ZeRO-3, it was never run here; launch it with launch/ddp.yaml or launch/fsdp2.yaml",
        ),
    ],
)
def test_a_four_bit_base_that_a_launcher_would_split(
    environment: dict[str, str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert words in refusal(tmp_path, capsys, "ppo.quantize=4bit")


def test_the_process_exits_with_2_and_says_one_line(workspace: Workspace, tmp_path: Path) -> None:
    done = workspace.finish(workspace.command("run", *workspace.options(tmp_path / "run", "ppo.iteratoins=6")))
    line = f"private-rlhf: {TINY}: unknown key 'ppo.iteratoins'; did you mean 'iterations'?"
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [line])
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_not_there_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    run, judge = f"run --config={TINY} --run-dir=r", "--reference=o/b --prompts=nope.jsonl --judge=truth"
    lines = (f"{run} --data=nope", f"{run} --data=nope --dry-run", f"{run} data.prompts=nope.jsonl", "compare a b",
             f"{run} model.source=/nope", f"verify-run --config={TINY} --data=nope", "sample --policy=nope hi",
             f"evaluate --policy=nope {judge}", f"evaluate --policy=o/a {judge}",
             "design --people=9 --answers=9 --epsilon=1 --policy=nope")  # fmt: skip
    program = f"from private_rlhf.cli import main\nimport sys\nfor line in {lines!r}:\n" + (
        "    assert main(line.split()) == 2 and 'torch' not in sys.modules, line\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
