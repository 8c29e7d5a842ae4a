"""Raw labels cannot be reached from anything but the doors that are named here, whichever functions lie between."""

from __future__ import annotations

import ast

import pytest
from call_graph import Graph, call_graph, nodes_of, reachable

# Functions and classes that yield or carry a true label, or the bytes of a raw file.
LABELS = {
    "pipeline.data.formats:read_preferences",
    "pipeline.data.sources:source_chunks",
    "pipeline.embedded.task:draw_labels",
    "pipeline.privacy.privatize:privatize_records",
    "pipeline.privacy.records:RawPair",
    "pipeline.privacy.records:PreferenceRecord",
    "pipeline.privacy.records:canonical_record",
}
# The one door for everybody else: what comes out of it has forgotten the labels (tested below).
GUARD = "pipeline.data.overlap:protected_pairs"
# What learns, samples, measures or prints. `pipeline.stages.privatize` and `pipeline.data.curate` randomise; the runner
# and the command line start stages by name.
OUTSIDE = (
    "pipeline.core",
    "pipeline.data.inputs",
    "pipeline.data.release",
    "pipeline.data.render",
    "pipeline.evaluation",
    "pipeline.lm",
    "pipeline.preflight",
    "pipeline.report",
    "pipeline.rl",
    "pipeline.runner",
    *(f"pipeline.stages.{name}" for name in ("dpo", "entry", "evaluate", "ppo", "report", "reward", "sft")),
    "reward_models",
)


@pytest.fixture(scope="module")
def graph(sources: dict[str, ast.Module]) -> Graph:
    return call_graph(sources)


def test_the_labels_are_where_they_were(graph: Graph) -> None:
    """A renamed source of labels would slip past; and so would a graph without edges."""
    assert set(graph) >= LABELS | {GUARD}
    assert reachable(graph, ["pipeline.stages.privatize:run"]) & LABELS >= {
        "pipeline.data.formats:read_preferences",
        "pipeline.embedded.task:draw_labels",
        "pipeline.privacy.records:canonical_record",
    }
    # A long way round: through the inputs to the reader of releases.
    assert "pipeline.data.release:_parse_manifest" in reachable(graph, ["pipeline.stages.evaluate:run"])


@pytest.mark.parametrize("outside", OUTSIDE)
def test_no_path_leads_to_a_label(graph: Graph, outside: str) -> None:
    start = nodes_of(graph, outside)
    assert start
    found = reachable(graph, start, closed={GUARD}) & LABELS
    assert not found


def test_the_guard_hands_out_pairs_that_have_forgotten_their_labels(sources: dict[str, ast.Module]) -> None:
    """Whatever `protected_pairs` yields went through `_forget`, which sorts the two responses by their own text."""
    body = {node.name: node for node in sources["pipeline/data/overlap.py"].body if isinstance(node, ast.FunctionDef)}
    yields = [node for node in ast.walk(body["protected_pairs"]) if isinstance(node, ast.Yield | ast.YieldFrom)]
    assert len(yields) == 3
    assert all(ast.unparse(node).startswith("(yield _forget(") for node in yields)
    users = {name for name, function in body.items() if "read_preferences" in ast.unparse(function)}
    assert users == {"protected_pairs"}


def test_stages_are_started_by_name_in_one_place(sources: dict[str, ast.Module]) -> None:
    """The graph does not see computed imports; those of validation modules lead to `pipeline.validation` alone."""
    users = {path for path, tree in sources.items() for node in ast.walk(tree)
             if isinstance(node, ast.Attribute | ast.Name) and "import_module" in ast.unparse(node)}
    assert users == {"pipeline/runner.py", "pipeline/validation/registry.py"}


@pytest.mark.parametrize(
    "leak",
    [
        "from pipeline.data.formats import read_preferences\ndef run(context): return list(read_preferences('x'))",
        "def run(context):\n    from pipeline.data import formats\n    return formats.read_preferences('x')",
        "import pipeline.data.formats\ndef run(context): return pipeline.data.formats.read_preferences('x')",
        "from pipeline.stages import privatize\nclass Reader:\n    def go(self): return privatize.raw_pairs(1, 'e')\n"
        "def run(context): return Reader().go()",
        "from pipeline.stages.privatize import raw_pairs as prompts\nTABLE = {'a': prompts}\n"
        "def run(context): return TABLE['a'](1, 2)",
    ],
)
def test_a_leak_is_found(sources: dict[str, ast.Module], leak: str) -> None:
    leaky = call_graph({**sources, "pipeline/stages/evaluate.py": ast.parse(leak)})
    assert reachable(leaky, ["pipeline.stages.evaluate:run"], closed={GUARD}) & LABELS
