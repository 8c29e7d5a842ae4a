"""Docstrings and error messages drawn at random, to read aloud: `python tests/support/read_aloud.py [N] [SEED]`.

A sentence that needs a second reading is rewritten. `--all` prints the docstrings that begin with a clause.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.rooms import Sources, read_sources

CLAUSES = ("What", "Whether", "Which", "How", "Where", "That", "When", "Who")
ERRORS = {"UserError", "ValueError", "RunStopped", "RunWaits", "DocumentError", "RefusedError"}


def docstrings(sources: Sources) -> Iterator[tuple[str, str]]:
    """(path and line, text) of every docstring of a module, class or function."""
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def messages(sources: Sources) -> Iterator[tuple[str, str]]:
    """(path and line, source text) of the message of every error that is raised."""
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args:
                yield f"{path}:{node.lineno}", ast.unparse(node.args[0])


def begins_with_a_clause(text: str) -> bool:
    """True for a docstring that names its subject by a clause, such as `What the stage reads`."""
    return re.match(rf"({'|'.join(CLAUSES)})\b", text) is not None


def main() -> None:
    """Prints N of each, drawn by a seed."""
    sources = read_sources(Path(__file__).resolve().parents[2])
    if "--all" in sys.argv:
        print("\n".join(f"{place}: {text.splitlines()[0]}" for place, text in docstrings(sources)
                        if begins_with_a_clause(text)))  # fmt: skip
        return
    count, seed = (int(word) for word in (*sys.argv[1:], *("20", "0")[len(sys.argv) - 1 :]))
    for title, entries in (("docstrings", docstrings(sources)), ("errors", messages(sources))):
        print(f"--- {title}")
        for place, text in random.Random(seed).sample(list(entries), count):
            print(f"{place}\n    {text}\n")


if __name__ == "__main__":
    main()
