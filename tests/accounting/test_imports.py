"""The accountants can be called from a privacy card: importing them loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

NAMES = ("bounded_range", "composition", "conversions", "dptd", "draws", "people", "private_rl")


def test_no_heavy_import() -> None:
    modules = ", ".join(f"private_rlhf.accounting.{name}" for name in NAMES)
    heavy = ("torch", "transformers", "dp_accounting", "matplotlib")
    code = f"import sys, {modules}, private_rlhf.commands.account; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
