"""Writes the reference pages that follow from the code: every recipe key, every command, every tried file shape; and
into the pages of `pipeline/labelling` their words, from `locales/`, and the SHA-256 of their scripts and styles.

python docs/generate.py [--check]    --check fails where a page is not what the code says
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import tempfile
import typing
from base64 import b64encode
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import typer
import yaml
from private_rlhf.recipe import Recipe

DOCS = Path(__file__).resolve().parent
MODULES = sorted((DOCS.parent / "pipeline" / "recipe").glob("*.py"))


def said_in(module: Path) -> dict[str, dict[str, str]]:
    """Class -> key -> the text below the key in the source."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for key, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(key, ast.AnnAssign) and isinstance(after, ast.Expr):
                    texts[ast.unparse(key.target)] = inspect.cleandoc(ast.literal_eval(after.value))
    return found


def type_in(module: Path) -> dict[str, dict[str, str]]:
    """Class -> key -> its type as the source writes it, without what only checks it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            keys = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            found[node.name] = {ast.unparse(key.target): plain(key.annotation) for key in keys}
    return found


def plain(annotation: ast.expr) -> str:
    """`Annotated[T, …]` as T, `Literal['a', 'b']` as its values."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return plain(annotation.slice.elts[0])
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        inner = annotation.slice
        values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return " or ".join(str(ast.literal_eval(value)) for value in values)
    if isinstance(annotation, ast.BinOp):
        return f"{plain(annotation.left)} or {plain(annotation.right)}"
    return ast.unparse(annotation).replace("None", "null")


def shown(value: Any) -> str:
    """A default as YAML writes it."""
    if is_dataclass(value):
        return "see below"
    text = yaml.safe_dump(str(value) if isinstance(value, Path) else value, default_flow_style=True)
    return text.split("\n...")[0].strip()


def table(schema: Any, said: dict[str, str], types: dict[str, str]) -> list[str]:
    """The keys of one dataclass."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields(schema):
        default = field.default if field.default is not MISSING else None
        if hasattr(default, "get_default"):  # pydantic's Field
            default = default.get_default(call_default_factory=True)
        elif field.default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        needed = (field.default is MISSING and field.default_factory is MISSING) or "Undefined" in repr(default)
        cells = (f"`{field.name}`", types.get(field.name, ""), "required" if needed else f"`{shown(default)}`",
                 said.get(field.name, ""))  # fmt: skip
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return lines


def recipe_page() -> str:
    """Every section and key of a recipe."""
    said: dict[str, dict[str, str]] = {}
    types: dict[str, dict[str, str]] = {}
    for module in MODULES:
        said |= said_in(module)
        types |= type_in(module)
    lines = ["# Recipe keys", "", "Made by `docs/generate.py` from the typed recipe. "
             "`private-rlhf print-config --config demo` prints a recipe with every key written out.", ""]  # fmt: skip
    waiting: list[tuple[str, Any]] = [("", Recipe)]
    seen = set()
    while waiting:
        name, schema = waiting.pop(0)
        if schema in seen:
            continue
        seen.add(schema)
        title = f"`{name}`" if name else "Top level"
        lines += [f"## {title}", "", inspect.cleandoc(schema.__doc__ or "").split("\n\n")[0], ""]
        lines += [*table(schema, said.get(schema.__name__, {}), types.get(schema.__name__, {})), ""]
        hints = typing.get_type_hints(schema)
        for field in fields(schema):
            for part in parts_of(hints[field.name]):
                waiting.append((f"{name}.{field.name}".lstrip("."), part))
    return "\n".join(lines).rstrip() + "\n"


def parts_of(hint: Any) -> list[Any]:
    """The dataclasses in a type."""
    if is_dataclass(hint):
        return [hint]
    return [part for inner in typing.get_args(hint) for part in parts_of(inner)]


def cli_page() -> str:
    """Every command with its options."""
    from private_rlhf.cli import app

    lines = ["# Commands", "", "Made by `docs/generate.py` from the command line itself.", ""]
    root = typer.main.get_command(app)

    def add(command: Any, path: str) -> None:
        lines.extend([f"## `{path}`", "", " ".join((command.help or "").split()), ""])
        if hasattr(command, "commands"):
            for name in sorted(name for name, below in command.commands.items() if not below.hidden):
                add(command.commands[name], f"{path} {name}")
            return
        rows = [option for option in command.params if option.name != "help" and not getattr(option, "hidden", False)]
        if rows:
            lines.extend(["| option | meaning |", "|---|---|"])
        for option in rows:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            required = " (required)" if option.required else ""
            text = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
            lines.append(f"| {names}{required} | {text} |")
        lines.append("")

    add(root, "private-rlhf")
    return "\n".join(lines).rstrip() + "\n"


SHAPES = """# Shapes of preference files

Made by `docs/generate.py`, which reads two rows of each shape in `tests/support/preference_shapes.py`. The right value
of each that is read, and the line of each that is refused, are tested (`tests/data/test_shapes.py`).
[Own data](../how-to/own-data.md) states the rules.
"""


def shapes_page() -> str:
    """Every shape of preference files that is tested: the form taken, or the line that refuses it."""
    from private_rlhf.core.errors import UserError
    from private_rlhf.data.layout import find_layout, read_preferences
    from private_rlhf.data.source_summary import summary_of
    from private_rlhf.data.sources import open_source

    sys.path.insert(0, str(DOCS.parent / "tests"))
    from support.preference_shapes import READ, REFUSED, options

    read, refused = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for name, (row, _, declared) in {**READ, **REFUSED}.items():
            path.write_text(2 * (json.dumps(row) + "\n"), encoding="utf-8")
            columns = ", ".join(f"`{each}`" for each in row)
            stated = ", ".join(f"`{key}: {value}`" for key, value in declared.items())
            start = f"| {name} | {columns}{'; ' * bool(stated)}{stated} |"
            try:
                list(read_preferences(path, None, options(declared)))
                summary_of(str(path), None, options(declared)).check(accept=False)
                read.append(f"{start} {find_layout('', open_source(path), options(declared)).form} |")
            except UserError as error:
                line = str(error).removeprefix(str(path)).removeprefix(", line 1").removeprefix(": ")
                refused.append(f"{start} {line.replace('|', chr(92) + '|')} |")
    head = ["", "| shape | columns; options | {} |", "|---|---|---|"]
    lines = [f"## Read ({len(read)})", *head, *read, "", f"## Refused ({len(refused)})", *head, *refused]
    return f"{SHAPES}\n" + "\n".join(lines).replace("{}", "read as", 1).replace("{}", "the line", 1) + "\n"


ASKING = DOCS.parent / "pipeline" / "labelling"


def browser_page(name: str) -> str:
    """A page of the labelling room with the words of `locales/` and the SHA-256 of its script and its style."""
    text = (ASKING / name).read_text(encoding="utf-8")
    words = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(LOCALES)}
    lines = ",\n".join(f'"{code}": {json.dumps(words[code], ensure_ascii=False)}' for code in sorted(words))
    lines = lines.replace("<", "\\u003c")
    start = '<script type="application/json" id="languages">'
    text = re.sub(f"(?s)({start}).*?(</script>)", lambda match: f"{match[1]}{{\n{lines}\n}}{match[2]}", text)
    for kind, inside in re.findall(r"(?s)<(script|style)>(.*?)</\1>", text):
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        text = re.sub(f"({kind}-src 'sha256-)[^']*", lambda match, digest=digest: match[1] + digest, text, count=1)
    return text


LOCALES = list((ASKING / "locales").glob("*.json"))
REFERENCE = DOCS / "reference"
PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "recipe.md": recipe_page,
    REFERENCE / "cli.md": cli_page,
    REFERENCE / "shapes.md": shapes_page,
    ASKING / "page.html": partial(browser_page, "page.html"),
    ASKING / "operator.html": partial(browser_page, "operator.html"),
}


def main(check: bool) -> int:
    """Writes or checks the pages; how many are not what the code says."""
    stale = [path for path, page in PAGES.items() if not _same(path, page())]
    for path in stale:
        if check:
            name = path.relative_to(DOCS.parent)
            print(f"{name} is not what the code says: run python docs/generate.py", file=sys.stderr)
        else:
            path.write_text(PAGES[path](), encoding="utf-8")
    return len(stale) if check else 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
