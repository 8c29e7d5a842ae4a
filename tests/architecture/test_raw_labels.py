"""Raw labels are reachable from the privatise stage alone: short allow-lists, read from the syntax trees."""

from __future__ import annotations

import ast

import pytest

# What carries or yields a true label, and the modules that may name it. A new entry needs a reason beside it.
ALLOWED = {
    "read_preferences": {
        "pipeline/data/layout.py",  # defines it
        "pipeline/data/overlap.py",  # the guard: forgets which response was preferred before it compares
        "pipeline/audit/canaries.py",  # for the owner: plants canaries, knows what attacks are judged on
    },
    "pair_converter": {
        "pipeline/data/formats.py",  # defines it
        "pipeline/data/layout.py",  # curator mode: rows to the columns below
    },
    "Columns": {
        "pipeline/privacy/batches.py",  # defines it: rows as read, by column
        "pipeline/data/layout.py",  # makes them
        "pipeline/data/chunks.py",  # passes them on
    },
    "read_chunk": {
        "pipeline/data/chunks.py",  # defines it
        "pipeline/data/engine.py",  # straight into owner-only runs
    },
    "read_bucket": {
        "pipeline/privacy/sorted_runs.py",  # defines it
        "pipeline/data/engine.py",  # straight into the randomiser
    },
    "KeptRows": {
        "pipeline/privacy/sorted_runs.py",  # defines it: which rows of which runs
        "pipeline/data/engine.py",
        "pipeline/data/curate.py",
        "pipeline/data/other_key_records.py",  # compares record ids with another key's store, and looks at no label
        "pipeline/data/raw_source.py",  # a range of record ids for training, the others for evaluation
        "pipeline/stages/privatize.py",  # hands them to the ledger
    },
    "OpenedSource": {
        "pipeline/data/curate.py",  # defines it: a source that was opened
        "pipeline/data/raw_source.py",
        "pipeline/data/source_summary.py",  # counts both responses alike
    },
    "privatize_source": {
        "pipeline/data/curate.py",  # defines it: all of the above, for `private-rlhf privatize`
        "pipeline/cli.py",
        "pipeline/commands/releases.py",  # hands it to the replay of a release with coins for labels
    },
    "open_source": {
        "pipeline/data/sources.py",  # defines it: rows as they are in the file
        "pipeline/data/formats.py",  # gives them a meaning
        "pipeline/data/layout.py",
        "pipeline/data/curate.py",
        "pipeline/data/raw_source.py",
        "pipeline/data/source_summary.py",  # hands them to the layout
        "pipeline/audit/",
    },
    "source_chunks": {
        "pipeline/data/sources.py",  # defines it: the bytes of a raw file, for a keyed digest
        "pipeline/data/raw_source.py",
    },
    "load_dataset": {"pipeline/data/sources.py"},  # streamed, so that no raw row is left in the `datasets` cache
    "load_from_disk": {"pipeline/data/sources.py"},
    "draw_labels": {
        "pipeline/embedded/task.py",  # defines it: labels of the built-in task, drawn from the known truth
        "pipeline/data/raw_source.py",
    },
    "RawPair": {
        "pipeline/privacy/records.py",  # defines it
        "pipeline/data/layout.py",  # makes one per pair
    },
    "PreferenceRecord": {
        "pipeline/privacy/records.py",  # defines it
        "pipeline/audit/",
    },
    "canonical_record": {
        "pipeline/privacy/records.py",  # defines it
        "pipeline/audit/",  # recomputes from public data what it can
    },
}


# Who may ask a recipe where the raw preferences lie (`recipe.data.preferences`): whoever knows could open the file,
# past every reader above.
ASKS_WHERE = {
    "pipeline/recipe/data_section.py",  # the recipe itself: which other inputs follow from it
    "pipeline/data/release_import.py",  # a bundle that was released elsewhere
    "pipeline/data/row_counts.py",  # how many pairs there are
    "pipeline/data/overlap.py",  # the guard
    "pipeline/data/raw_source.py",  # the one that opens them
    "pipeline/stages/count.py",  # the name, for the ledger
    "pipeline/stages/privatize.py",  # the name, for the ledger and the manifest
    "pipeline/stages/declarations.py",  # checks before a run
    "pipeline/audit/twins.py",  # makes twins
}


def names_in(tree: ast.Module) -> set[str]:
    """Every identifier a module imports, defines, reads, or takes as an attribute."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_only_the_allowed_modules_name_it(name: str, sources: dict[str, ast.Module]) -> None:
    users = {path for path, tree in sources.items() if name in names_in(tree)}
    assert not {path for path in users if not path.startswith(tuple(ALLOWED[name]))}


def test_only_the_allowed_modules_know_where_the_raw_file_is(sources: dict[str, ast.Module]) -> None:
    users = {path for path, tree in sources.items() for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and node.attr == "preferences"}
    assert users == ASKS_WHERE


def test_the_reader_still_has_the_name_that_is_guarded(sources: dict[str, ast.Module]) -> None:
    """A renamed reader would slip past the allow-list."""
    assert "read_preferences" in names_in(sources["pipeline/data/layout.py"])
    assert {"RawPair", "PreferenceRecord"} <= names_in(sources["pipeline/privacy/records.py"])


def test_nothing_learns_from_raw_labels(sources: dict[str, ast.Module]) -> None:
    """No module that trains or samples a model imports one that reads raw labels, the embedded truth apart."""
    readers = {"read_preferences", "read_chunk", "read_bucket", "draw_labels", "canonical_record"}
    learners = ("pipeline/lm/", "pipeline/rl/", "reward_models/", "pipeline/report/")
    names = ("sft", "reward", "ppo", "dpo", "rloo", "evaluate", "report")
    stages = tuple(f"pipeline/stages/{name}.py" for name in names)
    wrong = {(path, name) for path, tree in sources.items() if path.startswith(learners) or path in stages
             for name in names_in(tree) & readers}
    assert not wrong
