"""Which module may import which: read from the syntax trees, nothing is imported."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter

from support.rooms import (
    Sources,
    as_graph,
    between_rooms,
    crossings,
    dotted,
    graph,
    imports,
    inside,
    longest_chain,
    room_of,
    tangles,
)

HEAVY = {"torch", "transformers", "trl", "peft", "accelerate"}
# Modules of the light packages that may be heavy themselves: they turn text into tokens, or open `datasets` folders.
HEAVY_ALLOWED = {"private_rlhf.data.render", "private_rlhf.data.sources"}
LIGHT = ("private_rlhf.core", "private_rlhf.privacy", "private_rlhf.data", "private_rlhf.labelling")

def test_the_graph_sees_known_imports(sources: Sources) -> None:
    """Guards the other tests: an import finder that finds nothing passes everything."""
    full, loading = graph(sources), graph(sources, module_level=True)
    assert "private_rlhf.core.errors" in loading["private_rlhf.recipe.load"]
    assert "accelerate" in full["private_rlhf.core.world"] - loading["private_rlhf.core.world"]
    assert any("torch" in names for names in loading.values())


FLOORS = (
    ("private_rlhf",),  # the command line and the runner
    ("private_rlhf.stages",),
    ("private_rlhf.commands",),
    ("private_rlhf.validation",),
    ("private_rlhf.rl", "private_rlhf.evaluation", "private_rlhf.online"),
    ("private_rlhf.reward_models", "private_rlhf.audit"),
    ("private_rlhf.lm", "private_rlhf.report"),
    ("private_rlhf.labelling",),
    ("private_rlhf.data", "private_rlhf.accounting"),
    ("private_rlhf.recipe",),
    ("private_rlhf.privacy",),
    ("private_rlhf.core", "private_rlhf.embedded"),
)
"""From the top down: a room imports rooms of lower floors alone, and none beside it. So there is no cycle of rooms."""


def test_every_room_has_a_floor(sources: Sources) -> None:
    """The whole house is in the table, and nothing else is."""
    assert {room_of(path) for path in sources} == {room for floor in FLOORS for room in floor}


def test_arrows_point_down(sources: Sources) -> None:
    """Per room; imports inside functions count."""
    floor = {dotted(path): number for path in sources
             for number, rooms in enumerate(FLOORS) if room_of(path) in rooms}
    up = {(name, target) for name, target in crossings(sources) if floor[name] >= floor[target]}
    assert not up


def test_tangled_rooms_are_found() -> None:
    """Guards the tests of rooms: a short loop, a lazy import, and the longest chain around them."""
    tree = ast.parse
    house = {
        "pipeline/cli.py": tree("import private_rlhf.data.one"),
        "pipeline/data/one.py": tree("def f():\n    from private_rlhf.lm import two"),
        "pipeline/lm/two.py": tree("from private_rlhf.data import one\nimport private_rlhf.core.three"),
        "pipeline/core/three.py": tree(""),
    }
    arrows = between_rooms(house)
    assert arrows["private_rlhf.data", "private_rlhf.lm"] == arrows["private_rlhf.lm", "private_rlhf.data"] == 1
    assert between_rooms(house, module_level=True)["private_rlhf.data", "private_rlhf.lm"] == 0
    assert tangles(as_graph(arrows)) == [{"private_rlhf.data", "private_rlhf.lm"}]
    assert longest_chain(as_graph(arrows)) == ["private_rlhf", "private_rlhf.data+private_rlhf.lm", "private_rlhf.core"]


def test_kernels_know_no_stage_of_learning(sources: Sources) -> None:
    """What computes a product or an attention imports nothing of the pipeline but errors and the device of the run."""
    known = ("private_rlhf", "private_rlhf.core.errors", "private_rlhf.core.world")
    wrong = {(name, target) for name, used in graph(sources).items() if inside(name, "private_rlhf.lm.kernels")
             for target in used if inside(target, "private_rlhf")
             and target not in known and not inside(target, "private_rlhf.lm.kernels")}
    assert not wrong


def test_core_and_privacy_stand_alone(sources: Sources) -> None:
    """`core` imports only itself, `privacy` only `core`, so that it can be audited."""
    core, privacy = "private_rlhf.core", "private_rlhf.privacy"
    allowed = {core: (core,), privacy: (core, privacy)}
    wrong = {(name, target) for package, own in allowed.items() for name, used in graph(sources).items()
             if inside(name, package) for target in used
             if inside(target, "private_rlhf") and target != "private_rlhf" and not inside(target, *own)}
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


KNOWN_TO_RUNNER = {f"private_rlhf.stages.{name}" for name in ("context", "declarations", "launch_strategies", "pace")}


def test_nothing_imports_a_stage(sources: Sources) -> None:
    """By import or by name in a string; the runner and the command line walk the table, and a stage has its start."""
    known = {dotted(path) for path in sources}
    wrong = set()
    for path, tree in sources.items():
        targets = {name for name in imports(path, tree, known) if inside(name, "private_rlhf.stages")}
        if path in ("pipeline/runner.py", "pipeline/cli.py"):
            targets -= KNOWN_TO_RUNNER
        if inside(dotted(path), "private_rlhf.stages"):
            targets -= {f"private_rlhf.stages.{name}" for name in ("entry", "context", "on_prompts")}
        if path == "pipeline/stages/grpo.py":  # one program with two names
            targets -= {"private_rlhf.stages.rloo"}
        if path == "pipeline/stages/declarations.py":
            targets -= {f"private_rlhf.stages.{name}" for name in ("checks", "launch_strategies")}
        wrong |= {(path, target) for target in targets}
        if path == "pipeline/stages/declarations.py":  # starts them by name
            continue
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        wrong |= {(path, node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)
                  and isinstance(node.value, str) and id(node) not in prose and "private_rlhf.stages." in node.value}
    assert not wrong


def test_the_product_never_imports_the_lab(sources: Sources) -> None:
    """Nor names one of its modules in a string; the lab's pieces reach it by entry points only."""
    wrong = {(name, target) for name, used in graph(sources).items() for target in used
             if inside(target, "private_rlhf_lab")}
    wrong |= {(path, node.value) for path, tree in sources.items() for node in ast.walk(tree)
              if isinstance(node, ast.Constant) and isinstance(node.value, str)
              and re.fullmatch(r"private_rlhf_lab[\w.:]*", node.value)}
    assert not wrong


def test_no_import_cycles(sources: Sources) -> None:
    loading = graph(sources, module_level=True)
    own = {name: {target for target in used if target in loading and target != name}
           for name, used in loading.items()}
    try:
        tuple(TopologicalSorter(own).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' <- '.join(error.args[1])}") from None
