"""Runs the quick start of a model card in its folder, in a process that cannot import this package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

RUNNER = """
import io, os, sys
from contextlib import redirect_stdout
from pathlib import Path

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "private_rlhf":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refused())
try:
    import private_rlhf
except ImportError:
    pass
else:
    sys.exit("the package is there")
home = os.getcwd()
for folder in sys.argv[1:]:
    os.chdir(Path(home, folder))
    card, seen = Path("README.md").read_text(encoding="utf-8"), io.StringIO()
    program = card.split("```python\\n")[1].split("\\n```")[0]
    with redirect_stdout(seen):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    print("PRINTED", repr(seen.getvalue()))
"""


def quick_start(folder: Path) -> str:
    """The program in the card of a model's folder."""
    return (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("\n```")[0]


def imported(program: str) -> set[str]:
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(program)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def run_outside(*folders: Path) -> list[str]:
    """What the quick start in each folder prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", RUNNER, *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("PRINTED ")]
    return [ast.literal_eval(line.removeprefix("PRINTED ")) for line in lines]
