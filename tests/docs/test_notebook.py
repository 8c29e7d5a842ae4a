"""The notebook runs from top to bottom, and keeps no output of an earlier run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorial.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    program = "\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "of the labels were kept; 0.881 are expected" in done.stdout
    assert "pairs, randomised at epsilon 1" in done.stdout
    assert "report.html" in done.stdout


def test_the_pages_that_the_notebook_links_exist() -> None:
    text = "".join("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert links
    assert not [link for link in links if not (NOTEBOOK.parent / link).is_file()]
