"""Every path that a command takes is declared as one that it reads, or goes through `core.outputs`."""

from __future__ import annotations

import ast

READ = {
    "config": "recipe", "run_dir": "run directory: `RunDir.check`", "run": "run directory", "runs": "run directories",
    "targets": "releases", "key": "key", "bundle": "release", "pilot": "release",
    "source": "tasks, or a copy of a state folder", "pairs": "questions", "guidelines": "text",
    "pool": "a pool that is there", "model_config": "config.json",
    "store": "store: what is there must be one",
}  # fmt: skip
"""Parameters of commands that are read, or whose place has a check of its own."""
DOORS = {"output_file", "output_folder"}


def unguarded(sources: dict[str, ast.Module]) -> set[str]:
    """Parameters of type Path of the commands that are neither in READ nor given to a door by their command."""
    found = set()
    for path, tree in sources.items():
        aliases = {
            target.id
            for line in tree.body
            if isinstance(line, ast.Assign) and "typer" in ast.unparse(line.value) and "Path" in ast.unparse(line.value)
            for target in line.targets
            if isinstance(target, ast.Name)
        }
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            doors = [node for node in ast.walk(function) if isinstance(node, ast.Call)
                     and isinstance(node.func, ast.Name) and node.func.id in DOORS]  # fmt: skip
            given = {name.id for door in doors for name in ast.walk(door.args[0]) if isinstance(name, ast.Name)}
            for each in function.args.args:
                kind = "" if each.annotation is None else ast.unparse(each.annotation)
                option = ("typer." in kind and "Path" in kind) or kind in aliases
                if option and each.arg not in READ and each.arg not in given:
                    found.add(f"{path}:{function.name}:{each.arg}")
    return found


def test_every_output_of_a_command_goes_through_one_door(sources: dict[str, ast.Module]) -> None:
    commands = {
        path: tree for path, tree in sources.items() if path == "pipeline/cli.py" or "pipeline/commands/" in path
    }
    assert len(commands) > 10
    assert unguarded(commands) == set()


def test_an_output_that_goes_past_the_door_is_found() -> None:
    text = """
Out = Annotated[Path, typer.Option("--out")]
def one(output: Annotated[Path | None, typer.Option("--output")] = None, config: Annotated[Path, typer.Option()] = 1):
    write(output)
def two(page: Out):
    output_file(page, "--out")
def three(page: Out):
    write(page)
def four(folder: Annotated[Path, typer.Option("--folder")]):
    output_folder(folder / "x", "--folder")
"""
    assert unguarded({"cli.py": ast.parse(text)}) == {"cli.py:one:output", "cli.py:three:page"}
