"""The shell scripts: syntax, usage errors, and the commands they issue, seen through a stand-in for python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.slurm import job

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]
FAKE_PYTHON = """#!/usr/bin/env bash
if [[ "$*" == *"private_rlhf.cli stages"* ]]; then
    printf 'privatize alone\\nsft launched\\nreward launched\\ndpo launched\\nevaluate launched\\nreport alone\\n'
    exit
fi
echo "$*" >> "$CALLS"
if [[ "$*" == *"$HANG_ON"* ]]; then
    trap 'echo "ended $*" >> "$CALLS"; trap - TERM; kill $$' TERM
    while :; do sleep 0.05; done
fi
[[ "$*" != *"$FAIL_ON"* ]]
"""


def start(tmp_path: Path, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`launch/SCRIPT arguments`, whose calls of python go to the file `calls`."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(FAKE_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    dropped = ("ACCELERATE_CONFIG", "ACCELERATE_ARGS", "EPSILONS", "SEEDS", "LAUNCH")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"PYTHON": str(python), "CALLS": str(calls), "FAIL_ON": "\n", "HANG_ON": "\n", **variables}
    # A shell cannot trap what was ignored when it began, as SIGINT is below a job in the background.
    return subprocess.Popen(["bash", str(ROOT / "launch" / script), *arguments], cwd=ROOT, env=environment,
                            stderr=subprocess.PIPE, text=True, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def end(tmp_path: Path, process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, the calls of python, and stderr."""
    _, error = process.communicate(timeout=60)
    return process.returncode, calls_of(tmp_path), error


def calls_of(tmp_path: Path) -> list[str]:
    calls = tmp_path / "calls"
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


def run(tmp_path: Path, script: str, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
    return end(tmp_path, start(tmp_path, script, *arguments, **variables))


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


def test_an_option_is_no_run_directory(tmp_path: Path) -> None:
    for script, variables in (("run_pipeline.sh", {}), ("slurm.sbatch", job(tmp_path, 1, gpus=4))):
        _, calls, _ = run(tmp_path, script, "configs/tiny.yaml", "--accept-reward", **variables)
        assert calls
        assert all(call.endswith("--run-dir runs/tiny --accept-reward") for call in calls)


def test_pipeline_takes_another_accelerate_file_and_options(tmp_path: Path) -> None:
    _, calls, _ = run(tmp_path, "run_pipeline.sh", "configs/x.yaml",
                      ACCELERATE_CONFIG="launch/ddp.yaml", ACCELERATE_ARGS="--num_processes 8")
    assert any("--config_file launch/ddp.yaml --num_processes 8 -m private_rlhf.stages.dpo" in call for call in calls)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_stage_that_runs_and_says_so_in_one_line(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Only the script gets it, as from Slurm. A stage that a signal has ended says nothing; SIGINT is not ignored."""
    script = "private_rlhf.stages.reward"
    variables = {"HANG_ON": script} if number == signal.SIGTERM else {"PYTHON": interruptible(tmp_path, script)}
    process = start(tmp_path, "run_pipeline.sh", "configs/x.yaml", **variables)
    wait_for(lambda: any(script in call for call in calls_of(tmp_path)))
    process.send_signal(number)
    found, calls, error = end(tmp_path, process)
    assert found == code
    assert script in calls[-1]
    name = number.name
    assert error.splitlines()[1:] == [
        f"[run_pipeline] reward was stopped by {name}: run the same command again to resume"
    ]


def interruptible(tmp_path: Path, hang_on: str) -> str:
    """A stand-in in Python, which ends at SIGINT only if nothing has told it to ignore that."""
    path = tmp_path / "interruptible"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "call = ' '.join(sys.argv[1:])\n"
        "if 'cli stages' in call:\n"
        "    sys.exit(print('sft launched\\nreward launched'))\n"
        "open(os.environ['CALLS'], 'a').write(call + '\\n')\n"
        "try:\n"
        f"    time.sleep(60 if {hang_on!r} in call else 0)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


# --- Slurm ------------------------------------------------------------------------------------------------------------


def asked_of_slurm(tmp_path: Path) -> list[str]:
    return (tmp_path / "slurm.log").read_text(encoding="utf-8").splitlines()


def test_one_node_of_a_job_needs_no_srun(tmp_path: Path) -> None:
    code, calls, _ = run(tmp_path, "slurm.sbatch", "configs/x.yaml", "runs/a", "seed=3", **job(tmp_path, 1, gpus=4))
    assert code == 0
    assert not (tmp_path / "slurm.log").exists()
    launched = [call for call in calls if "cli launch" in call]
    assert len(launched) == 4
    assert all("--config_file launch/ddp.yaml --num_processes 4 -m private_rlhf.stages." in call for call in launched)
    assert all(call.endswith("--config configs/x.yaml --run-dir runs/a seed=3") for call in calls)


def test_every_node_launches_its_part_of_a_stage_and_one_node_the_others(tmp_path: Path) -> None:
    code, calls, _ = run(tmp_path, "slurm.sbatch", "configs/x.yaml", **job(tmp_path, 3, gpus=4))
    assert code == 0
    steps = [line for line in asked_of_slurm(tmp_path) if line.startswith("srun ")]
    assert len(steps) == 4
    assert all("--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=node0,node1,node2 --kill-on-bad-exit=1" in line
               for line in steps)  # fmt: skip
    sft = sorted(call for call in calls if "private_rlhf.stages.sft" in call)
    assert len(sft) == 3
    for rank, call in enumerate(sft):
        assert f"cli launch --num_machines 3 --machine_rank {rank} --main_process_ip node0 " in call
        assert "--main_process_port 21234 " in call
        assert "--config_file launch/ddp.yaml --num_processes 12 -m private_rlhf.stages.sft" in call
    alone = [call for call in calls if "stages.privatize" in call or "stages.report" in call]
    assert len(alone) == 2
    assert not any("launch" in call.split() for call in alone)
    assert (tmp_path / "local" / "private-rlhf-1234").is_dir()


def test_rollout_nodes_serve_and_the_others_train(tmp_path: Path) -> None:
    run_dir = served_run(tmp_path)
    variables = job(tmp_path, 3, gpus=2) | {"ROLLOUT_NODES": "1", "VLLM_PYTHON": vllm_python(tmp_path)}
    hang = {"HANG_ON": "private_rlhf.stages.report"}  # until the servers are up
    process = start(tmp_path, "slurm.sbatch", "configs/x.yaml", str(run_dir), **variables, **hang)
    wait_for(lambda: len(served(tmp_path)) == 2 and any("stages.report" in call for call in calls_of(tmp_path)))
    process.send_signal(signal.SIGTERM)
    code, calls, error = end(tmp_path, process)
    assert code == 143
    assert [line.split(" --model")[0] for line in served(tmp_path)] == ["0 0.0.0.0", "1 0.0.0.0"]
    assert sum(f"--port {port}" in line for port in (8000, 8001) for line in served(tmp_path)) == 2
    serving, *training = [line for line in asked_of_slurm(tmp_path) if line.startswith("srun ")]
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=node2" in serving
    assert all("--nodelist=node0,node1 " in line for line in training)
    overrides = "rollout.engine=vllm rollout.urls=[http://node2:8000, http://node2:8001]"
    assert all(call.endswith(overrides) for call in calls if "private_rlhf.stages" in call and "ended" not in call)
    assert any("--num_processes 4" in call for call in calls)
    assert error.splitlines()[-1].startswith("[slurm] stopped by SIGTERM in ")


def served_run(tmp_path: Path) -> Path:
    """A run directory with what a server waits for."""
    run_dir = tmp_path / "run"
    (run_dir / "sft" / "model").mkdir(parents=True)
    (run_dir / "sft" / "model" / "config.json").write_text("{}", encoding="utf-8")
    recipe = {"aligner": "ppo", "ppo": {"lora": {"rank": 20}}}
    recipe["model"] = {"dtype": "bfloat16", "max_prompt_tokens": 96, "max_response_tokens": 32}
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return run_dir


def vllm_python(tmp_path: Path) -> str:
    """A server that leaves its GPU, address and options in a file of its own."""
    path = tmp_path / "vllm-python"
    script = f'[[ "$1" == - ]] && exec {sys.executable} "$@"\n'
    script += f'echo "$CUDA_VISIBLE_DEVICES $HOST $*" > {tmp_path}/served-$CUDA_VISIBLE_DEVICES\nexec sleep 60\n'
    path.write_text(f"#!/usr/bin/env bash\n{script}", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def served(tmp_path: Path) -> list[str]:
    texts = [path.read_text(encoding="utf-8").replace("-m vllm.entrypoints.openai.api_server ", "")
             for path in sorted(tmp_path.glob("served-*"))]  # fmt: skip
    return [text for text in texts if text]


@pytest.mark.parametrize(("state", "again"), [("RUNNING", True), ("COMPLETING", False)])
def test_sigterm_queues_the_job_again_unless_it_was_cancelled(tmp_path: Path, state: str, again: bool) -> None:
    """Within Slurm's 30 seconds, though the signal reaches only the batch script."""
    stage = "private_rlhf.stages.dpo"
    variables = job(tmp_path, 2) | {"SLURM_STATE": state, "HANG_ON": stage}
    process = start(tmp_path, "slurm.sbatch", "configs/x.yaml", **variables)
    wait_for(lambda: sum(stage in call for call in calls_of(tmp_path)) == 2)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, calls, error = end(tmp_path, process)
    assert time.monotonic() - started < 30
    assert code == 143
    assert [call.split()[0] for call in calls[-2:]] == ["ended", "ended"]
    assert ("scontrol requeue 1234" in asked_of_slurm(tmp_path)) == again
    *_, stopped, last = error.splitlines()
    assert stopped == "[run_pipeline] dpo was stopped by SIGTERM: run the same command again to resume"
    assert re.fullmatch(r"\[slurm\] stopped by SIGTERM in \d+ s: .* resumes", last)


def test_a_stage_that_fails_is_not_queued_again(tmp_path: Path) -> None:
    variables = job(tmp_path, 2) | {"FAIL_ON": "private_rlhf.stages.reward"}
    code, calls, _ = run(tmp_path, "slurm.sbatch", "configs/x.yaml", **variables)
    assert code == 1
    assert not any("stages.dpo" in call for call in calls)
    assert not any("requeue" in line for line in asked_of_slurm(tmp_path))


def test_a_job_without_a_node_to_train_on_is_refused(tmp_path: Path) -> None:
    variables = job(tmp_path, 2) | {"ROLLOUT_NODES": "2"}
    code, calls, error = run(tmp_path, "slurm.sbatch", "configs/x.yaml", **variables)
    assert (code, calls) == (2, [])
    assert "ROLLOUT_NODES must be below the 2 node(s) of the job, got 2" in error
    assert run(tmp_path, "slurm.sbatch", **variables)[0] == 2


def test_ci_installs_lints_and_tests_through_make() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"make {target}" in text for target in ("setup", "lint", "test"))


def test_a_server_is_started_for_what_the_recipe_says(tmp_path: Path) -> None:
    """Rank 20 needs a server for 32; the longest text is prompt and response together."""
    run_dir = served_run(tmp_path)
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
