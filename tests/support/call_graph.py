"""Which function can lead to which, read from the syntax trees: an over-approximation by names.

A node is `module:name` for each top-level function, class or assigned name of the project's modules; a class stands
for all its methods. An edge goes to everything of the project that the node names, called or not: imported at the top
of the module or inside a function, used as `name` or as `module.name`, also through another module that imports it. Not
seen: modules imported by a computed name, and attributes of objects whose class the node does not name.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from support.rooms import dotted

Graph = dict[str, set[str]]


def call_graph(sources: Mapping[str, ast.Module]) -> Graph:
    """Node to the nodes that it names."""
    names = {path: dotted(path) for path in sources}
    trees = {names[path]: tree for path, tree in sources.items()}
    graph: Graph = {}
    for module, tree in trees.items():
        shared = _imported(tree.body, trees)
        own = {name for statement in tree.body for name in _defined(statement)}
        for statement in tree.body:
            visible = {**shared, **_imported(list(ast.walk(statement)), trees)}
            for name in _defined(statement):
                graph.setdefault(f"{module}:{name}", set()).update(_named(statement, module, own, visible, trees))
        for name, target in shared.items():  # `from x import y` makes module:y another name of x:y
            if name not in own and ":" in target:
                graph.setdefault(f"{module}:{name}", set()).add(target)
    return graph


def reachable(graph: Graph, start: Collection[str], closed: Collection[str] = ()) -> set[str]:
    """Every node that a path from `start` leads to; nothing beyond a closed node."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if node not in closed:
                waiting.extend(graph.get(node, ()))
    return seen


def nodes_of(graph: Graph, *prefixes: str) -> set[str]:
    """The nodes of modules that are, or lie in, one of the prefixes."""
    return {
        node
        for node in graph
        if any(node.partition(":")[0] == prefix or node.startswith(prefix + ".") for prefix in prefixes)
    }


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored or {"<import>"}  # a bare expression or an `if` runs on import


def _imported(nodes: Collection[ast.AST], trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """Local name to `module` or `module:name`, of the project alone."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in trees}
        elif isinstance(node, ast.ImportFrom) and node.module in trees | {"private_rlhf": None} and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = inner if inner in trees else f"{node.module}:{alias.name}"
    return found


def _named(
    statement: ast.stmt, module: str, own: set[str], names: Mapping[str, str], trees: Mapping[str, ast.Module]
) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if ":" in names.get(node.id, ""):
                found.add(names[node.id])
            elif node.id in own:
                found.add(f"{module}:{node.id}")
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            target = names.get(owner, owner if owner in trees else "")
            if target in trees:
                found.add(f"{target}:{node.attr}")
    return found
