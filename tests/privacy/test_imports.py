"""The privacy and data packages stand alone: light imports, and privacy knows nothing but itself and the core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import private_rlhf.privacy

MODULES = (
    *(
        f"private_rlhf.privacy.{name}"
        for name in ("card", "events", "keys", "ledger", "mechanism", "person", "prf", "guarantee", "records")
    ),
    *(f"private_rlhf.data.{name}" for name in ("formats", "release", "sources")),
)
ARRAYS = frozenset({"numpy", "pyarrow"})
SIGNATURES = {"signatures.py": {"cryptography"}}  # Ed25519 is not ours to write


def test_no_heavy_import() -> None:
    heavy = ("torch", "transformers", "trl", "datasets")
    code = f"import sys, {', '.join(MODULES)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_privacy_imports_the_core_and_arrays_alone() -> None:
    for path in Path(private_rlhf.privacy.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.split(".")[0]
                allowed = (
                    name.startswith(("private_rlhf.privacy", "private_rlhf.core"))
                    or top in ARRAYS | sys.stdlib_module_names
                    or top in SIGNATURES.get(path.name, ())
                )
                assert allowed, f"{path.name} imports {name}"
