"""The shell scripts: syntax, usage errors, and the commands they issue, seen through a stand-in for python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]
FAKE_PYTHON = """#!/usr/bin/env bash
if [[ "$*" == *"private_rlhf.cli stages"* ]]; then
    printf 'privatize alone\\nsft launched\\nreward launched\\ndpo launched\\nevaluate launched\\nreport alone\\n'
    exit
fi
echo "$*" >> "$CALLS"
[[ "$*" != *"$FAIL_ON"* ]]
"""


def run(tmp_path: Path, script: str, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
    """Exit code, the calls of python, and stderr of `launch/SCRIPT arguments`."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    dropped = ("ACCELERATE_CONFIG", "ACCELERATE_ARGS", "EPSILONS", "SEEDS")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"PYTHON": str(python), "CALLS": str(calls), "FAIL_ON": "\n", **variables}
    result = subprocess.run(["bash", str(ROOT / "launch" / script), *arguments], cwd=ROOT, env=environment,
                            capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, calls.read_text(encoding="utf-8").splitlines() if calls.exists() else [], result.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_stops_on_errors(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert re.search(r"^set -e?uo pipefail$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if path.suffix != ".sbatch":
        assert os.access(path, os.X_OK)


def test_pipeline_runs_the_stages_that_the_program_names(tmp_path: Path) -> None:
    code, calls, _ = run(tmp_path, "run_pipeline.sh", "configs/x.yaml", "runs/a", "seed=3", "ppo.iterations=2")
    assert code == 0
    modules = [re.search(r"private_rlhf\.stages\.(\w+)", call) for call in calls]
    assert [found[1] for found in modules if found] == ["privatize", "sft", "reward", "dpo", "evaluate", "report"]
    assert all(call.endswith("--config configs/x.yaml --run-dir runs/a seed=3 ppo.iterations=2") for call in calls)
    launched = {found[1] for call, found in zip(calls, modules, strict=True) if found and "cli launch" in call}
    assert launched == {"sft", "reward", "dpo", "evaluate"}


def test_the_program_names_the_stages_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    from private_rlhf.cli import main

    assert main(["stages", "--config", str(ROOT / "configs" / "tiny.yaml"), "aligner=rloo"]) == 0
    lines = ["privatize alone", "sft launched", "reward launched", "rloo launched", "evaluate launched", "report alone"]
    assert capsys.readouterr().out.splitlines() == lines


def test_pipeline_defaults_to_two_cpu_processes_and_a_run_named_after_the_recipe(tmp_path: Path) -> None:
    _, calls, _ = run(tmp_path, "run_pipeline.sh", "configs/tiny.yaml", "seed=3")
    assert all("--run-dir runs/tiny seed=3" in call for call in calls)
    assert any("cpu2.yaml -m private_rlhf.stages.sft" in call for call in calls)


def test_pipeline_takes_another_accelerate_file_and_options(tmp_path: Path) -> None:
    _, calls, _ = run(tmp_path, "run_pipeline.sh", "configs/x.yaml",
                      ACCELERATE_CONFIG="launch/ddp.yaml", ACCELERATE_ARGS="--num_processes 8")
    assert any("--config_file launch/ddp.yaml --num_processes 8 -m private_rlhf.stages.dpo" in call for call in calls)


def test_pipeline_stops_at_the_first_failing_stage(tmp_path: Path) -> None:
    code, calls, _ = run(tmp_path, "run_pipeline.sh", "configs/x.yaml", FAIL_ON="private_rlhf.stages.reward")
    assert code != 0
    assert "private_rlhf.stages.reward" in calls[-1]


@pytest.mark.parametrize("script", ["run_pipeline.sh", "sweep_epsilon.sh"])
def test_usage_error(tmp_path: Path, script: str) -> None:
    code, calls, stderr = run(tmp_path, script)
    assert (code, calls) == (2, [])
    assert "usage:" in stderr


def test_pipeline_names_a_missing_accelerate_file(tmp_path: Path) -> None:
    code, calls, stderr = run(tmp_path, "run_pipeline.sh", "configs/x.yaml", ACCELERATE_CONFIG="launch/none.yaml")
    assert (code, calls) == (2, [])
    assert "launch/none.yaml does not exist" in stderr


def test_sweep_runs_the_grid_then_compares(tmp_path: Path) -> None:
    code, calls, _ = run(tmp_path, "sweep_epsilon.sh", "configs/demo.yaml", "ppo.iterations=2",
                         EPSILONS="0.5 .inf", SEEDS="0 1")
    assert code == 0
    runs = [f"runs/demo-eps{name}-seed{seed}" for name in ("0.5", "inf") for seed in (0, 1)]
    assert [re.search(r"--run-dir (\S+)", call)[1] for call in calls[:-1]] == runs  # type: ignore[index]
    assert calls[2].endswith("run --config configs/demo.yaml --run-dir runs/demo-epsinf-seed0 "
                             "--accept-reward ppo.iterations=2 privatize.epsilon=.inf seed=0")
    assert calls[-1].endswith("private_rlhf.cli compare --output runs/demo-sweep.md " + " ".join(runs))


def test_ci_installs_lints_and_tests_through_make() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"make {target}" in text for target in ("setup", "lint", "test"))


def test_a_server_is_started_for_what_the_recipe_says(tmp_path: Path) -> None:
    """Rank 20 needs a server for 32; the longest text is prompt and response together."""
    run_dir = tmp_path / "run"
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "model" / "config.json").write_text("{}", encoding="utf-8")
    recipe = {"aligner": "ppo", "ppo": {"lora": {"rank": 20}}}
    recipe["model"] = {"dtype": "bfloat16", "max_prompt_tokens": 96, "max_response_tokens": 32}
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    python = tmp_path / "vllm-python"
    script = f'[[ "$1" == - ]] && exec {sys.executable} "$@"\necho "$*"\n'
    python.write_text(f"#!/usr/bin/env bash\n{script}", encoding="utf-8")
    python.chmod(0o755)
    command = ["bash", str(ROOT / "launch" / "vllm.sh"), str(run_dir), "8001", "--enforce-eager"]
    environment = os.environ | {"VLLM_PYTHON": str(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert f"--model {run_dir}/sft/model --host 127.0.0.1 --port 8001" in done.stdout
    assert "--dtype bfloat16 --max-model-len 128 --enable-lora --max-lora-rank 32 --max-loras 2" in done.stdout
    assert "--logprobs-mode processed_logprobs --generation-config vllm --enforce-eager" in done.stdout
    assert run(tmp_path, "vllm.sh")[0] == 2
