"""Rows that were measured on something else are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_rlhf.core.atomic import appending
from private_rlhf.core.errors import UserError
from private_rlhf_lab.bed_rows import rows_of


def test_rows_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with appending(path) as append:
        append({"bed": "one", "n": 1})
    assert rows_of(path, lambda row: "one") == [{"bed": "one", "n": 1}]
    with pytest.raises(UserError, match="holds rows measured on other data or settings: choose another folder"):
        rows_of(path, lambda row: "other")
