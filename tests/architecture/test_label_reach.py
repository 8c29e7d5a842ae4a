"""Raw labels cannot be reached from anything but the doors that are named here, whichever functions lie between."""

from __future__ import annotations

import ast

import pytest
from support.call_graph import Graph, call_graph, nodes_of, reachable

# Functions and classes that yield or carry a true label, or the bytes of a raw file.
LABELS = {
    "private_rlhf.data.chunks:read_chunk",
    "private_rlhf.data.layout:read_preferences",
    "private_rlhf.data.sources:source_chunks",
    "private_rlhf.embedded.task:draw_labels",
    "private_rlhf.privacy.records:RawPair",
    "private_rlhf.privacy.records:PreferenceRecord",
    "private_rlhf.privacy.records:canonical_record",
    "private_rlhf.privacy.sorted_runs:read_bucket",
}
# The one door for everybody else: what comes out of it has forgotten the labels (tested below).
GUARD = "private_rlhf.data.overlap:protected_pairs"
# What learns, samples, measures or prints. `stages.privatize` and `data.curate` randomise; the runner
# and the command line start stages by name.
STAGES = ("checks", "context", "declarations", "dpo", "entry", "evaluate", "grpo", "gvpo",
          "launch_strategies", "on_prompts", "pace", "ppo", "report", "reward", "rloo", "sft")
OUTSIDE = (
    "private_rlhf.core",
    "private_rlhf.data.row_counts",
    "private_rlhf.data.inputs",
    "private_rlhf.data.release",
    "private_rlhf.data.render",
    "private_rlhf.evaluation",
    "private_rlhf.lm",
    "private_rlhf.report",
    "private_rlhf.rl",
    "private_rlhf.runner",
    *(f"private_rlhf.stages.{name}" for name in STAGES),
    "private_rlhf.reward_models",
)


@pytest.fixture(scope="module")
def graph(sources: dict[str, ast.Module]) -> Graph:
    return call_graph(sources)


def test_the_labels_are_where_they_were(graph: Graph) -> None:
    """A renamed source of labels would slip past; and so would a graph without edges."""
    assert set(graph) >= LABELS | {GUARD}
    assert reachable(graph, ["private_rlhf.stages.privatize:run"]) & LABELS >= {
        "private_rlhf.data.chunks:read_chunk",
        "private_rlhf.embedded.task:draw_labels",
        "private_rlhf.privacy.sorted_runs:read_bucket",
    }
    # A long way round: through the inputs to the reader of releases.
    assert "private_rlhf.data.release:_parse_manifest" in reachable(graph, ["private_rlhf.stages.evaluate:run"])


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


def test_only_noisy_counts_come_back_to_the_evaluation(sources: dict[str, ast.Module]) -> None:
    """The second door is a stage of its own: it reads what the evaluation asks from a file, and writes and returns what
    `privacy.counts` answers, what follows from that, and the ledger's facts."""
    tree = sources["pipeline/stages/count.py"]
    door, start = (next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
                   for name in ("noisy_counts", "run"))
    labels = {"open_sources", "split_rows", "gather_events", "count_right", "workspace_for"}
    assert not {node.id for node in ast.walk(start) if isinstance(node, ast.Name)} & labels
    returned = [ast.unparse(node.value) for node in ast.walk(door) if isinstance(node, ast.Return) and node.value]
    assert returned == ["answer | {'ledger': ledger.card_facts()}"]
    given = [ast.unparse(node.value) for node in ast.walk(door)
             if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "answer"]
    assert given == ["privacy_counts.noisy_counts(key.prf, names, counts, epsilon)"]
    written = [ast.unparse(node) for node in ast.walk(door)
               if isinstance(node, ast.Call) and ast.unparse(node.func) in ("write_json", "say", "print")]
    assert written == ["write_json(context.folder / 'counts.json', answer)"]


def test_stages_are_started_by_name_in_one_place(sources: dict[str, ast.Module]) -> None:
    """The graph does not see computed imports; those of validation modules lead to `private_rlhf.validation` alone, and
    those of reward functions that a recipe names never into this package (tests/rl/test_extra_rewards.py)."""
    users = {path for path, tree in sources.items() for node in ast.walk(tree)
             if isinstance(node, ast.Attribute | ast.Name) and "import_module" in ast.unparse(node)}
    assert users == {"pipeline/__init__.py", "pipeline/stages/declarations.py", "pipeline/validation/lab.py",
                     "reward_models/external.py"}


@pytest.mark.parametrize(
    "leak",
    [
        "from private_rlhf.data.layout import read_preferences\ndef run(context): return list(read_preferences('x'))",
        "def run(context):\n    from private_rlhf.data import layout\n    return layout.read_preferences('x')",
        "import private_rlhf.data.layout\ndef run(context): return private_rlhf.data.layout.read_preferences('x')",
        "from private_rlhf.data import raw_source\nclass Reader:\n"
        "    def go(self): return raw_source.embedded_part(1, 2)\n"
        "def run(context): return Reader().go()",
        "from private_rlhf.data.raw_source import embedded_part as prompts\nTABLE = {'a': prompts}\n"
        "def run(context): return TABLE['a'](1, 2)",
    ],
)
def test_a_leak_is_found(sources: dict[str, ast.Module], leak: str) -> None:
    leaky = call_graph({**sources, "pipeline/stages/evaluate.py": ast.parse(leak)})
    assert reachable(leaky, ["private_rlhf.stages.evaluate:run"], closed={GUARD}) & LABELS
