"""Which room imports which, read from the syntax trees; nothing is imported.

A room is a folder of `pipeline/`, `reward_models/`, or `private_rlhf` for the files that stand directly in `pipeline/`.
`python tests/support/rooms.py [CHECKOUT]` prints what is between the rooms of a checkout.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

FOLDERS = {"pipeline": "private_rlhf", "reward_models": "private_rlhf.reward_models"}
"""Folder of the checkout to its import name."""

STARTS = {("private_rlhf.stages.entry", "private_rlhf.cli")}
"""`python -m private_rlhf.stages.NAME` is `private-rlhf NAME`: it asks the command line when it runs."""

Sources = dict[str, ast.Module]
Graph = Mapping[str, set[str]]


def read_sources(root: Path) -> Sources:
    """Every module of the two packages by its path in the checkout, e.g. `pipeline/core/errors.py`."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def dotted(path: str) -> str:
    """The module name of a path in the checkout."""
    folder, _, rest = path.removesuffix(".py").removesuffix("/__init__").partition("/")
    return ".".join([FOLDERS[folder], *filter(None, rest.split("/"))])


def nodes(tree: ast.AST, module_level: bool) -> Iterator[ast.AST]:
    """All nodes; with `module_level` those that run on import: no function bodies, nothing under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(tree):
        if module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if module_level and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from nodes(child, module_level)


def imports(path: str, tree: ast.Module, known: set[str], module_level: bool = False) -> set[str]:
    """Absolute names that a module imports; `from package import module` counts as the module where there is one."""
    found: set[str] = set()
    package = dotted(path).split(".") if path.endswith("__init__.py") else dotted(path).split(".")[:-1]
    for node in nodes(tree, module_level):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            inner = {f"{name}.{alias.name}" for alias in node.names} & known
            found |= inner
            if len(inner) < len(node.names):
                found.add(name)
    return found


def graph(sources: Sources, module_level: bool = False) -> dict[str, set[str]]:
    """Module name to the names it imports, foreign ones included."""
    known = {dotted(path) for path in sources}
    return {dotted(path): imports(path, tree, known, module_level) for path, tree in sources.items()}


def inside(name: str, *packages: str) -> bool:
    """Whether a module is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def room_of(path: str) -> str:
    """The room of a path in the checkout, e.g. `private_rlhf.data`."""
    folders = path.split("/")[:-1]
    return ".".join([FOLDERS[folders[0]], *folders[1:2]])


def crossings(sources: Sources, module_level: bool = False) -> set[tuple[str, str]]:
    """(importing module, imported module) where the two are in different rooms.

    Lazy imports count unless `module_level`; the version in `pipeline/__init__.py` does not, nor do `STARTS`.
    """
    room = {dotted(path): room_of(path) for path in sources}
    return {(name, target) for name, used in graph(sources, module_level).items() for target in used & set(room)
            if room[target] != room[name] and target != "private_rlhf" and (name, target) not in STARTS}


def between_rooms(sources: Sources, module_level: bool = False) -> Counter[tuple[str, str]]:
    """(importing room, imported room) to the number of `crossings`."""
    room = {dotted(path): room_of(path) for path in sources}
    return Counter((room[name], room[target]) for name, target in crossings(sources, module_level))


def tangles(graph: Graph) -> list[set[str]]:
    """Names that reach each other, as groups of two or more: what a cycle ties together."""
    reach = {name: _reached(graph, name) for name in graph}
    groups = {frozenset({name, *(other for other in reach[name] if name in reach.get(other, ()))}) for name in graph}
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    front = [start]
    while front:
        for target in graph.get(front.pop(), set()) - seen:
            seen.add(target)
            front.append(target)
    return seen


def longest_chain(graph: Graph) -> list[str]:
    """Most names that import one another in turn; those of a cycle count as one, written with `+`."""
    tied = {name: "+".join(sorted(group)) for group in tangles(graph) for name in group}
    flat: dict[str, set[str]] = {}
    for name, targets in graph.items():
        own = tied.get(name, name)
        flat.setdefault(own, set()).update({tied.get(target, target) for target in targets} - {own})

    @cache
    def from_(name: str) -> tuple[str, ...]:
        return (name, *max((from_(target) for target in sorted(flat.get(name, ()))), key=len, default=()))

    return list(max((from_(name) for name in sorted(flat)), key=len))


def as_graph(arrows: Counter[tuple[str, str]]) -> dict[str, set[str]]:
    """Room to the rooms it imports."""
    found: dict[str, set[str]] = {}
    for source, target in arrows:
        found.setdefault(source, set()).add(target)
        found.setdefault(target, set())
    return found


def closure(sources: Sources, name: str) -> set[str]:
    """The project's modules that importing `name` runs, itself included, empty `__init__` files aside."""
    loading = graph(sources, module_level=True)
    return {name, *_reached({module: used & set(loading) for module, used in loading.items()}, name)}


def main() -> None:
    """Prints the numbers of a checkout."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    sources = read_sources(root)
    arrows = between_rooms(sources)
    chain = longest_chain(as_graph(arrows))
    print(f"{arrows.total()} imports between rooms, {len(arrows)} arrows")
    print(f"cycles of rooms: {' '.join('+'.join(sorted(group)) for group in tangles(as_graph(arrows))) or 'none'}")
    print(f"longest chain, {len(chain)} rooms: {' → '.join(chain)}")
    length = {dotted(path): len((root / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    for path in sorted(sources):
        if room_of(path) == "private_rlhf.stages" and not path.endswith(("__init__.py", "entry.py")):
            loaded = closure(sources, dotted(path))
            print(f"{dotted(path)} loads {len(loaded)} files, {sum(map(length.__getitem__, loaded))} lines")


if __name__ == "__main__":
    main()
