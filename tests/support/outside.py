"""Runs a model card's quick start, or scores by plain transformers, in a process that cannot import this package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHOUT = """
import sys

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
"""
RUNNER = """
import io, os
from contextlib import redirect_stdout
from pathlib import Path

home = os.getcwd()
for folder in sys.argv[1:]:
    os.chdir(Path(home, folder))
    card, seen = Path("README.md").read_text(encoding="utf-8"), io.StringIO()
    program = card.split("```python\\n")[1].split("\\n```")[0]
    with redirect_stdout(seen):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    print("PRINTED", repr(seen.getvalue()))
"""


SCORER = """
import json
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

asked = json.load(sys.stdin)
for job in asked["jobs"]:
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    model = AutoModelForSequenceClassification.from_pretrained(job["folder"], dtype=torch.float32).eval()
    found = []
    for batches in (job["batches"], [[place] for place in range(len(asked["conversations"]))]):
        scores = [0.0] * len(asked["conversations"])
        for batch in batches:
            texts = tokenizer.apply_chat_template(
                [asked["conversations"][place] for place in batch], padding=True, return_dict=True, return_tensors="pt")
            with torch.inference_mode():
                raw = model(**texts).logits[:, 0]
            for place, value in zip(batch, raw.tolist()):
                scores[place] = value
        found.append(scores)
    print("PRINTED", repr(found))
"""


def raw_scores_outside(
    conversations: Sequence[Any], jobs: dict[Path, list[list[int]]]
) -> list[tuple[list[float], list[float]]]:
    """Raw scores by plain transformers, float32, of each folder of `jobs`: in its batches of places, and one by one."""
    asked = {"conversations": conversations, "jobs": [{"folder": str(f), "batches": b} for f, b in jobs.items()]}
    return [tuple(found) for found in _outside(SCORER, input=json.dumps(asked), timeout=3000)]


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
    return _outside(RUNNER, *map(str, folders), timeout=300)


def _outside(program: str, *arguments: str, timeout: float, input: str | None = None) -> list[Any]:
    """The values that a program prints behind PRINTED."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", WITHOUT + program, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False, input=input
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("PRINTED ")]
    return [ast.literal_eval(line.removeprefix("PRINTED ")) for line in lines]
