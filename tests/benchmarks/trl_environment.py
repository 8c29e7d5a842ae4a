"""The throw-away environment of TRL 1.10, the last release with PPO: `ppo_peers.py --trl` makes it with venv and pip.

torch, transformers, accelerate and datasets have the versions of the running interpreter, so that this loop runs on the
same kernels and model code as the others; pip takes them from wherever it is configured to look.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

TRL = "1.10"
SHARED = ("torch", "transformers", "accelerate", "datasets")
UNDECLARED = ("pandas", "rich")
"""What TRL's PPO imports beside its declared dependencies."""

PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def public(release: str) -> str:
    """A version without its local part: 2.13.0+cpu -> 2.13.0."""
    return release.partition("+")[0]


def requirements() -> list[str]:
    """What pip is asked for."""
    return [f"trl=={TRL}.*", *(f"{name}=={public(version(name))}" for name in SHARED), *UNDECLARED]


def missing(python: Path) -> list[str]:
    """The packages that the interpreter `python` lacks or has in another version."""
    names = ["trl", *SHARED, *UNDECLARED]
    asked = [str(python), "-c", PROBE, *names]
    found = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    wanted = {name: public(version(name)) for name in SHARED}
    return [
        name
        for name in names
        if name not in found
        or (name == "trl" and not found[name].startswith(f"{TRL}."))
        or (name in wanted and public(found[name]) != wanted[name])
    ]


def trl_interpreter(folder: Path) -> str:
    """The interpreter of an environment with TRL's PPO in `folder`: made there, or used again where it is whole."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        if folder.exists() and any(folder.iterdir()):
            sys.exit(f"{folder} holds something else than a Python environment; name an empty or a new folder")
        print(f"making an environment for TRL {TRL} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, symlinks=sys.platform != "win32")
    if missing(python):
        command = [str(python), "-m", "pip", "install", "-qq", *requirements()]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(f"pip could not install {' '.join(requirements())}; make one by hand and pass --trl ENV_PYTHON")
    return str(python)
