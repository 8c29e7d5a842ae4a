"""An installation without extras: what it does, and the one line it has for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from private_rlhf.core.environment import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = sorted({module for modules in EXTRAS.values() for module in modules} | {"tokenizers", "huggingface_hub"})
PROGRAM = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {BLOCKED!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from private_rlhf.cli import main
sys.exit(main(sys.argv[1:]))
"""
TINY = ["--config", "tiny"]


def core(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """`private-rlhf` as an installation without extras runs it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], cwd=folder, env=environment, input=given,
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(40)]
    (tmp_path / "prefs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_core_privatises_accounts_and_attacks(folder: Path) -> None:
    event = json.dumps({"id": "1", "label": 1})
    for arguments, given in (
        (("keygen", "--output", "keys/k"), ""),
        (("privatize", "--data", "prefs.jsonl", "--output", "out", "--epsilon", "1", "--key", "keys/k"), ""),
        (("ledger", "show", "--key", "keys/k"), ""),
        (("attack", "out"), ""),
        (("label-filter", "--epsilon", "1", "--store", "store"), event),
        (("account", "randomized-response", "--epsilon", "1", "--labels-per-person", "1"), ""),
        (("print-config", *TINY), ""),
        (("stages", *TINY), ""),
        (("--help",), ""),
    ):
        done = core(folder, *arguments, given=given)
        assert done.returncode == 0, (arguments, done.stderr[-800:])
        assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("run", *TINY), "train"),
        (("sft", *TINY), "train"),
        (("plan", *TINY), "train"),
        (("report", *TINY), "train"),  # the first that it finds missing
        (("evaluate", "--policy", "a", "--reference", "b", "--prompts", "embedded", "--judge", "truth"), "train"),
        (("sample", "--policy", "a", "Hi."), "train"),
        (("validate", "all", "--quick"), "validate"),
        (("label", "serve", "--store", "s", "--epsilon", "1"), "label"),
    ],
)
def test_the_rest_names_its_extra_in_one_line(folder: Path, arguments: tuple[str, ...], extra: str) -> None:
    done = core(folder, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("private-rlhf: ")
    assert line.endswith(f"is not installed: pip install 'private-rlhf[{extra}]' brings it")


def test_the_extras_are_those_of_the_distribution() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"all", "dev", "docs"}
    for extra, modules in EXTRAS.items():
        brought = " ".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert all(module in brought for module in modules), extra
    assert not [name for name in BLOCKED if any(line.startswith(name) for line in project["dependencies"])]


@pytest.mark.slow
def test_a_wheel_with_the_core_alone(folder: Path) -> None:
    """In a virtual environment of its own, outside the checkout; pip must have an index."""
    wheels, python = folder / "wheels", folder / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    for command in (
        [sys.executable, *pip, "wheel", "--no-deps", "-w", str(wheels), str(ROOT)],
        [sys.executable, "-m", "venv", str(folder / "venv")],
        [str(python), *pip, "install", "-c", str(ROOT / "constraints.txt"), "WHEEL"],
    ):
        found = [str(next(wheels.glob("*.whl"))) if part == "WHEEL" else part for part in command]
        subprocess.run(found, check=True, cwd=folder, env=environment)
    program = python.with_name("private-rlhf")
    for arguments in (
        ("keygen", "--output", "keys/k"),
        ("privatize", "--data", "prefs.jsonl", "--output", "out", "--epsilon", "1", "--key", "keys/k"),
        ("print-config", "--config", "demo"),
    ):
        subprocess.run([str(program), *arguments], check=True, cwd=folder, env=environment)
    listing = [str(python), "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(listing, check=True, capture_output=True, env=environment)
    names = {row["name"].lower() for row in json.loads(listed.stdout)}
    assert not names & {"torch", "transformers", "matplotlib", "gymnasium"}
    packages = python.parents[1] / "lib"
    files = [path for path in packages.rglob("*") if path.is_file() and not path.is_symlink()]
    own = [path for path in files if "/pip/" not in str(path) and "/setuptools/" not in str(path)]
    megabytes = sum(path.stat().st_size for path in own) / 1e6
    bytecode = sum(path.stat().st_size for path in own if path.suffix == ".pyc") / 1e6
    print(f"core: {len(names)} packages, {megabytes:.0f} MB, of these {bytecode:.0f} MB bytecode")
    assert megabytes < 450
