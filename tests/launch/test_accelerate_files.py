"""The accelerate files: read by accelerate's own loader and launch checks; the CPU one really starts two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
FILES = sorted(LAUNCH.glob("*.yaml"))

# distributed_type and what `accelerate launch` has to derive from it.
EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "cpu2": ("MULTI_GPU", {"multi_gpu": True, "use_cpu": True, "num_processes": 2}),
    "single_gpu": ("NO", {"multi_gpu": False, "num_processes": 1}),
    "ddp": ("MULTI_GPU", {"multi_gpu": True, "use_fsdp": False}),
    "fsdp2": ("FSDP", {"use_fsdp": True, "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
}

REPORT = """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.ones(()), reduction="sum").item()
line = f"world={os.environ['WORLD_SIZE']} accelerate={accelerator.num_processes} sum={total:g}\\n"
os.write(1, line.encode())  # one write per process, so that lines do not mix
"""
STAGE_LIKE = f"""
from private_rlhf.core.world import join_world

world = join_world()  # first, as in a stage: what it finds must hold for the accelerator that follows
{REPORT}
assert (world.rank, world.size) == (accelerator.process_index, accelerator.num_processes)
"""


def test_every_file_is_expected() -> None:
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_accepts_the_file(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    kind, derived = EXPECTED[path.stem]
    assert load_config_from_file(str(path)).distributed_type.value == kind  # unknown keys raise here
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert {key: getattr(arguments, key) for key in derived} == derived


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_nested_key_is_an_option_of_the_launcher(path: Path) -> None:
    """The loader does not look into the nested sections; a misspelt key there would be ignored silently."""
    from accelerate.commands.launch import launch_command_parser

    known = set(vars(launch_command_parser().parse_args(["train.py"])))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    nested = {key for section in content.values() if isinstance(section, dict) for key in section}
    assert nested <= known


def launch(tmp_path: Path, code: str, use_cpu: str | None) -> list[str]:
    """What each process of a launch with `cpu2.yaml` reports; `use_cpu` is put into the environment."""
    script = tmp_path / "probe.py"
    script.write_text(code, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment.pop("ACCELERATE_USE_CPU", None)
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = str(LAUNCH.parent)
    if use_cpu is not None:
        environment["ACCELERATE_USE_CPU"] = use_cpu
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "cpu2.yaml"),
               "--main_process_port", "0", str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return [line for line in result.stdout.splitlines() if line.startswith("world=")]


@pytest.mark.thorough
def test_cpu2_starts_two_processes_that_share_sums(tmp_path: Path) -> None:
    assert launch(tmp_path, STAGE_LIKE, use_cpu="true") == ["world=2 accelerate=2 sum=2"] * 2


@pytest.mark.slow
def test_accelerate_alone_needs_the_variable(tmp_path: Path) -> None:
    """The table of launch/README.md; when this fails, accelerate has changed and the workaround can go."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("with GPUs the two processes join over them")
    code = f"{REPORT}\naccelerator.state.destroy_process_group()"
    assert launch(tmp_path, code, use_cpu="true") == ["world=2 accelerate=2 sum=2"] * 2
    assert launch(tmp_path, code, use_cpu=None) == ["world=2 accelerate=1 sum=1"] * 2
