"""Checks the dependency ranges of pyproject.toml; a script, not a test: it installs two environments and takes minutes.

    .venv/bin/python tests/ranges/check_ranges.py                 # all of it
    .venv/bin/python tests/ranges/check_ranges.py lowest --tests tests/lm/kernels tests/reward_models

`lowest` installs every direct dependency at its lower bound, `newest` what pip takes by itself; each runs the tiny
recipe from end to end in a throw-away environment of the running Python. `wheels` only resolves: pip names the wheels
that it would install for other Pythons, and nothing of them runs; a condition of a dependency on `python_version` is
read as of the running Python there, not of the other one. torch alone is pinned in all three (--torch): what pip takes
by itself may be gigabytes of CUDA. pip takes everything from wherever it is configured to look. Exits with 1 where
something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("lowest", "newest", "wheels")
PYTHONS = ("3.12", "3.13", "3.14")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "configs", "pipeline", "reward_models")
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
TIMEOUT = 1800  # seconds; a guard against a hang

Versions = dict[str, str]


def direct_dependencies() -> list[Requirement]:
    """What pyproject.toml asks for, with the extras of users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {name: rows for name, rows in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    lines = [*project["dependencies"], *(row for rows in groups.values() for row in rows)]
    found = {row.name: row for row in map(Requirement, lines)}
    return [row for name, row in found.items() if name != project["name"]]


def lower_bound(requirement: Requirement) -> str:
    """The version after `>=`.

    Raises:
        ValueError: there is none.
    """
    bounds = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"{requirement} has no lower bound")
    return bounds[0]


def pinned_torch() -> str:
    """torch's version in the project's constraints."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(r"^torch==(\S+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("constraints.txt does not pin torch")
    return found[1]


def installed_versions(python: Path) -> Versions:
    """Package to version in the environment of `python`."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True)
    return {canonicalize_name(row["name"]): row["version"] for row in json.loads(listed.stdout)}


def shown(versions: Versions) -> str:
    """The direct dependencies among `versions`."""
    names = [canonicalize_name(requirement.name) for requirement in direct_dependencies()]
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def tail(done: subprocess.CompletedProcess[str], lines: int = 15) -> str:
    """The end of what a failed command said."""
    return "\n".join(f"    {line}" for line in (done.stdout + done.stderr).rstrip().splitlines()[-lines:])


def environment(python: Path) -> dict[str, str]:
    """This process's environment without other Python paths, offline for model hubs, with the new interpreter first."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "HF_HUB_OFFLINE": "1"}


def run(command: list[str], folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in `folder`, whatever its exit code."""
    return subprocess.run(
        command, cwd=folder, env=environment(python), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def install(folder: Path, pins: list[str], extra: list[str]) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A new environment in `folder` with a copy of the project, so that the checkout gets no build products."""
    copy = folder / "project"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    venv.create(folder / "environment", with_pip=True, symlinks=sys.platform != "win32")
    python = folder / "environment" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    constraints = folder / "pins.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints), f"{copy}[all]", *extra]
    return python, run(command, folder, python)


def check_by_running(part: str, pins: list[str], tests: list[str]) -> bool:
    """Installs with `pins`, runs the tiny recipe and then `tests`; says how it went."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory(prefix="ranges-") as name:
        folder = Path(name)
        python, done = install(folder, pins, list(TEST_TOOLS) if tests else [])
        if done.returncode:
            print(f"{part} (Python {version}): FAILED to install\n{tail(done)}", flush=True)
            return False
        print(f"{part} (Python {version}): installed {shown(installed_versions(python))}", flush=True)
        command = [str(python.parent / "private-rlhf"), "run", "--config", str(ROOT / "configs" / "tiny.yaml")]
        command += ["--run-dir", "run", "privatize.key_file=owner.key", "model.cache_dir=cache"]
        began = time.monotonic()
        done = run(command, folder, python)
        ok = done.returncode == 0 and (folder / "run" / "report" / "report.html").is_file()
        print(f"{part}: the tiny recipe {'ran: ok' if ok else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
        if not ok:
            print(tail(done), flush=True)
        if tests:
            done = run([str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests], ROOT, python)
            passed = done.returncode == 0
            print(f"{part}: the tests {'passed' if passed else 'FAILED'}", flush=True)
            print(tail(done, lines=1 if passed else 15), flush=True)
            ok = ok and passed
        return ok


def resolve(python: str, requirements: list[str]) -> Versions | str:
    """What pip would install for another Python from wheels alone, or why it cannot."""
    with tempfile.TemporaryDirectory(prefix="ranges-") as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", "-"]
        command += ["--target", folder, "--only-binary=:all:", "--python-version", python, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        return " ".join(errors[-1:]) or "pip failed"
    rows = [row["metadata"] for row in json.loads(done.stdout)["install"]]
    return {canonicalize_name(row["name"]): row["version"] for row in rows}


def check_by_resolving(python: str, torch: str) -> bool:
    """Looks for wheels for another Python; says what pip found, or which direct dependency stands in the way."""
    wanted = [f"torch=={torch}" if row.name == "torch" else str(row) for row in direct_dependencies()]
    found = resolve(python, wanted)
    if isinstance(found, dict):
        print(f"wheels (Python {python}): resolved, not run: {shown(found)}", flush=True)
        return True
    print(f"wheels (Python {python}): NOT resolved: {found}", flush=True)
    for requirement in wanted:
        alone = resolve(python, [requirement])
        if isinstance(alone, str):
            print(f"    {requirement} by itself: {alone}", flush=True)
    return False


def main() -> int:
    """Runs the parts that were asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Check the dependency ranges of pyproject.toml.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--torch", default=pinned_torch(), help="torch's version; that of the constraints by default")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run too where something is installed")
    asked = parser.parse_args()
    unknown = set(asked.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    parts = asked.parts or PARTS
    dependencies = direct_dependencies()
    bounds = {row.name: lower_bound(row) for row in dependencies}
    torch = f"torch=={asked.torch}"
    good = True
    if "lowest" in parts:
        if not Requirement(f"torch=={bounds['torch']}").specifier.contains(asked.torch):
            print(f"lowest: torch {asked.torch} stands in for the lower bound {bounds['torch']}, which was not run")
        pins = [torch if name == "torch" else f"{name}=={bound}" for name, bound in bounds.items()]
        good &= check_by_running("lowest", pins, asked.tests)
    if "newest" in parts:
        good &= check_by_running("newest", [torch], asked.tests)
    if "wheels" in parts:
        for python in PYTHONS:
            good &= check_by_resolving(python, asked.torch)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
