"""Measures of the house, read from the syntax trees: `python tests/support/measures.py [CHECKOUT]`.

Lines by room, functions that take the whole recipe or a stage's context, what `stages.ppo` loads, and the journey of
`context` through calls from a stage's `run`: files, and returns (a call into a file that was left). Checkouts whose
packages were still called `pipeline` and `reward_models` can be measured too.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import rooms
from support.rooms import Sources, closure, dotted, read_sources, room_of

AUDIT = ("attacks", "audit")
ROOT_FILES = {f"pipeline/{name}.py" for name in ("cli", "runner", "launcher", "api", "__init__", "twins",
                                                "twin_files", "twin_answers")}  # fmt: skip
PASSENGERS = ("Recipe", "StageContext", "RunDir")
JOURNEYS = ("ppo", "reward", "evaluate")


def names_whole(tree: ast.AST) -> set[str]:
    """Those of `PASSENGERS` that a module imports, annotates with (also as text) or takes as an attribute."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found & set(PASSENGERS)


def takers(tree: ast.AST, *passengers: str) -> list[ast.FunctionDef]:
    """Functions with a parameter whose type names one of the passengers."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            and any(each.annotation is not None and names_whole(each.annotation) & set(passengers)
                    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))]  # fmt: skip


def short_room(path: str) -> str:
    """The room without the package's name; `` for files directly in `pipeline/`."""
    parts = path.split("/")
    return "reward_models" if parts[0] == "reward_models" else parts[1] if len(parts) > 2 else ""


def functions(sources: Sources) -> dict[str, tuple[str, ast.FunctionDef]]:
    """`module:name` or `module:Class.name` -> (path, definition) of every top-level function and method."""
    table = {}
    for path, tree in sources.items():
        for node in tree.body:
            for each, prefix in ([(node, "")] if isinstance(node, ast.FunctionDef) else
                                 [(inner, f"{node.name}.") for inner in node.body]
                                 if isinstance(node, ast.ClassDef) else []):  # fmt: skip
                if isinstance(each, ast.FunctionDef):
                    table[f"{dotted(path)}:{prefix}{each.name}"] = (path, each)
    return table


def visible(tree: ast.AST, sources: Sources) -> dict[str, str]:
    """Local name -> `module` or `module:name` of the project, from every import in a tree."""
    known = {dotted(path) for path in sources}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = inner if inner in known else f"{node.module}:{alias.name}"
    return names


def journey(sources: Sources, start: str, most: int = 400) -> tuple[int, int]:
    """(files, returns) of the calls that hand on the first parameter, whole or in part, depth first.

    A call counts where the passenger, or something read from it, stands in an argument or is the object of a method.
    A method is known by `self`, or by a name that one class of the project has and nothing of Python's or NumPy's own
    (`replace` may be of a text, `mean` of an array). The trip ends after `most` calls.
    """
    table, imported = functions(sources), {path: visible(tree, sources) for path, tree in sources.items()}
    files, left, returns, calls = set(), set(), 0, 0

    def ride(name: str, carried: frozenset[str], deep: tuple[str, ...]) -> None:
        nonlocal calls, returns
        path, function = table[name]
        files.add(path)
        for node in ast.walk(function):  # `recipe, run = context.recipe, context.run` carries it on
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
                pairs = zip(_parts(node.targets[0]), _parts(node.value), strict=False)
                carried |= {name.id for name, value in pairs if isinstance(name, ast.Name) and _root(value) in carried}
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or calls >= most:
                continue
            target = _target(node.func, name, path, imported[path], table)
            riding = [_names(value) & carried for value in node.args]
            words = {word.arg for word in node.keywords if _names(word.value) & carried}
            method = "." in target.partition(":")[2]
            is_object = method and isinstance(node.func, ast.Attribute) and bool(_names(node.func.value) & carried)
            if target not in table or target in deep or not (any(riding) or words or is_object):
                continue
            calls += 1
            where, callee = table[target]
            if where != path:
                returns += where in left
            parameters = [each.arg for each in (*callee.args.args, *callee.args.kwonlyargs)]
            taken = {name for name, rides in zip(parameters[method:], riding, strict=False) if rides}
            taken |= set(parameters[:1]) if is_object else set()
            ride(target, frozenset(taken | {word for word in words if word}), (*deep, target))
            left.add(where)

    first = table[start][1].args.args[0].arg
    ride(start, frozenset({first}), (start,))
    return len(files), returns


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _root(value: ast.expr) -> str:
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _target(called: ast.expr, caller: str, path: str, names: Mapping[str, str], table: Mapping[str, object]) -> str:
    """The function, constructor or method that is called; `` where that is not known."""
    if isinstance(called, ast.Name):
        target = names.get(called.id, f"{dotted(path)}:{called.id}")
    elif not isinstance(called, ast.Attribute):
        return ""
    elif isinstance(called.value, ast.Name) and called.value.id in names:
        target = f"{names[called.value.id]}:{called.attr}"
    elif isinstance(called.value, ast.Name) and called.value.id in ("self", "cls"):
        target = f"{caller.rpartition('.')[0]}.{called.attr}"
    else:
        methods = [name for name in table if name.endswith(f".{called.attr}") and "." in name.partition(":")[2]]
        everyday = any(hasattr(kind, called.attr) for kind in (str, dict, list, set, Path, os, np.ndarray))
        return methods[0] if len(methods) == 1 and not everyday else ""
    constructors = (f"{target}.__init__", f"{target}.__post_init__")
    return next((name for name in (target, *constructors) if name in table), "")


def main() -> None:
    """Prints the measures of a checkout."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    if "private_rlhf" not in (root / "pyproject.toml").read_text(encoding="utf-8"):
        rooms.FOLDERS = {"pipeline": "pipeline", "reward_models": "reward_models"}
    sources = read_sources(root)
    length = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    by_room: Counter[str] = Counter()
    for path, count in length.items():
        by_room[room_of(path)] += count
    print(f"{len(sources)} files, {sum(length.values())} lines")
    print("\n".join(f"  {room:32}{count:6}" for room, count in sorted(by_room.items())))
    upper = {"recipe", "stages", "commands", "planning", "report", "", *AUDIT}
    for names in (("Recipe",), ("StageContext",), ("Recipe", "StageContext")):
        below = {path: len(takers(tree, *names)) for path, tree in sources.items() if short_room(path) not in upper}
        count = sum(len(takers(tree, *names)) for tree in sources.values())
        print(f"functions that take {' or '.join(names)}: {count}, of them below the stages {sum(below.values())}")
    package = rooms.FOLDERS["pipeline"]
    loaded = closure(sources, f"{package}.stages.ppo")
    print(f"stages.ppo loads {len(loaded)} files, {sum(length[p] for p in sources if dotted(p) in loaded)} lines")
    for stage in JOURNEYS:
        trip = journey(sources, f"{package}.stages.{stage}:run")
        print("context in {}.run: {} files, {} returns".format(stage, *trip))


if __name__ == "__main__":
    main()
