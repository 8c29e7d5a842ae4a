"""Which module may import which: read from the syntax trees, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

HEAVY = {"torch", "transformers", "trl", "peft", "accelerate"}
# Modules of the light packages that may be heavy themselves: they turn text into tokens, or open `datasets` folders.
HEAVY_ALLOWED = {"pipeline.data.render", "pipeline.data.sources"}
LIGHT = ("pipeline.core", "pipeline.privacy", "pipeline.data")

Sources = dict[str, ast.Module]


def dotted(path: str) -> str:
    """The module name of a path in the checkout."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


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


def test_the_graph_sees_known_imports(sources: Sources) -> None:
    """Guards the other tests: an import finder that finds nothing passes everything."""
    full, loading = graph(sources), graph(sources, module_level=True)
    assert "pipeline.core.errors" in loading["pipeline.core.config"]
    assert "accelerate" in full["pipeline.core.world"] - loading["pipeline.core.world"]
    assert any("torch" in names for names in loading.values())


FLOORS = (
    ("pipeline.stages", "pipeline.runner", "pipeline.cli"),
    ("pipeline.planning",),
    ("pipeline.rl", "pipeline.evaluation"),
    ("reward_models",),
    ("pipeline.lm",),
    ("pipeline.data",),
    ("pipeline.privacy",),
    ("pipeline.core",),
)
"""From the top down: a room imports from its own floor and from those below."""


def test_arrows_point_down(sources: Sources) -> None:
    wrong = set()
    for name, used in graph(sources).items():
        floor = next((number for number, rooms in enumerate(FLOORS) if inside(name, *rooms)), None)
        if floor is None:
            continue
        above = tuple(room for rooms in FLOORS[:floor] for room in rooms)
        wrong |= {(name, target) for target in used if above and inside(target, *above)}
    allowed = {("pipeline.stages.entry", "pipeline.cli")}
    assert not wrong - allowed


def test_kernels_know_no_stage_of_learning(sources: Sources) -> None:
    """What computes a product or an attention imports nothing of the pipeline but errors and the device of the run."""
    known = ("pipeline", "pipeline.core.errors", "pipeline.core.world")
    wrong = {(name, target) for name, used in graph(sources).items() if inside(name, "pipeline.lm.kernels")
             for target in used if inside(target, "pipeline", "reward_models")
             and target not in known and not inside(target, "pipeline.lm.kernels")}
    assert not wrong


def test_core_and_privacy_stand_alone(sources: Sources) -> None:
    """pipeline.core imports no other part of the pipeline; pipeline.privacy core alone, so that it can be audited."""
    allowed = {"pipeline.core": ("pipeline.core",), "pipeline.privacy": ("pipeline.core", "pipeline.privacy")}
    wrong = {(name, target) for package, own in allowed.items() for name, used in graph(sources).items()
             if inside(name, package) for target in used
             if inside(target, "pipeline", "reward_models") and target != "pipeline" and not inside(target, *own)}
    assert not wrong


def test_light_packages_load_without_torch(sources: Sources) -> None:
    """Neither directly nor through what they import; parents count, as importing a.b.c runs a and a.b."""
    loading = graph(sources, module_level=True)

    def heavy(name: str, seen: set[str]) -> set[str]:
        if name in seen or name in HEAVY_ALLOWED:
            return set()
        seen.add(name)
        parts = name.split(".")
        parents = {".".join(parts[:end]) for end in range(1, len(parts))}
        direct = {f"{name} -> {target}" for target in loading[name] if target.split(".")[0] in HEAVY}
        return direct.union(*(heavy(target, seen) for target in (loading[name] | parents) & set(loading)))

    light = [name for name in loading if inside(name, *LIGHT) and name not in HEAVY_ALLOWED]
    assert light
    assert not {trail for name in light for trail in heavy(name, set())}


def test_nothing_imports_a_stage(sources: Sources) -> None:
    """By import or by name in a string; the runner and the command line walk the table, and a stage has its start."""
    known = {dotted(path) for path in sources}
    wrong = set()
    for path, tree in sources.items():
        targets = {name for name in imports(path, tree, known) if inside(name, "pipeline.stages")}
        if path in ("pipeline/runner.py", "pipeline/cli.py"):
            targets -= {"pipeline.stages.table", "pipeline.stages.base"}
        if inside(dotted(path), "pipeline.stages"):
            targets -= {"pipeline.stages.entry"}
        if path in ("pipeline/stages/table.py", "pipeline/stages/base.py"):
            targets -= {"pipeline.stages.base", "pipeline.stages.checks"}
        wrong |= {(path, target) for target in targets}
        if path == "pipeline/stages/base.py":  # starts them by name
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        wrong |= {(path, node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)
                  and isinstance(node.value, str) and id(node) not in prose and "pipeline.stages." in node.value}
    assert not wrong


def test_no_import_cycles(sources: Sources) -> None:
    loading = graph(sources, module_level=True)
    own = {name: {target for target in used if target in loading and target != name}
           for name, used in loading.items()}
    try:
        tuple(TopologicalSorter(own).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' <- '.join(error.args[1])}") from None
