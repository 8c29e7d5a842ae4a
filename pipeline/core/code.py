"""The source files that a program runs, and their digests: read from its imports; nothing is imported."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = "private_rlhf"
REWARD_MODELS = f"{PACKAGE}.reward_models"
DATA = frozenset({".j2", ".parquet"})
"""Files beside the modules that are part of the program."""


def source_files(*modules: str) -> dict[str, str]:
    """Path in the checkout -> digest (16 hex digits) of the modules, of all that they import at any time, and of the
    data in those packages.

    What is imported by a computed name is not seen, nor what runs only where a module is the program itself.
    """
    return {name: _digest(path) for name, path in _reached(*modules).items()}


@cache
def _reached(*modules: str) -> dict[str, Path]:
    """Path in the checkout -> file of all that `source_files` names, sorted."""
    paths: dict[str, Path] = {}
    waiting = [*modules, *_packages(modules)]
    while waiting:
        path = _path(waiting.pop())
        if path is None or str(path.relative_to(_root())) in paths:
            continue
        paths[str(path.relative_to(_root()))] = path
        waiting += _imported(path)
    for folder in {path.parent for path in paths.values()}:
        paths |= {str(path.relative_to(_root())): path for path in folder.iterdir() if path.suffix in DATA}
    return dict(sorted(paths.items()))


def all_files() -> dict[str, str]:
    """Path in the checkout -> digest of every source file of both packages."""
    paths = [path for folder in {_folder(PACKAGE), _folder(REWARD_MODELS)} for path in folder.rglob("*")]
    return {str(path.relative_to(_root())): _digest(path) for path in sorted(paths) if path.suffix in {".py", *DATA}}


def digest_of(files: Mapping[str, str]) -> str:
    """SHA-256 of what `source_files` or `all_files` returns: where it is equal, the same program runs."""
    return hashlib.sha256("\n".join(f"{name} {files[name]}" for name in sorted(files)).encode()).hexdigest()


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _folder(package: str) -> Path:
    """The folder of a package: in a checkout `pipeline` and `reward_models`, in a wheel one inside the other."""
    here = Path(__file__).resolve().parents[1]
    if package == PACKAGE:
        return here
    return next(folder for folder in (here / "reward_models", here.parent / "reward_models") if folder.is_dir())


def _path(module: str) -> Path | None:
    """The file of a module of these packages; None of another one, and of a name in a module."""
    if not _inside(module, PACKAGE):
        return None
    package = REWARD_MODELS if _inside(module, REWARD_MODELS) else PACKAGE
    base = _folder(package).joinpath(*module.removeprefix(package).split(".")[1:])
    if base == _folder(package):
        return base / "__init__.py"
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """Names that a file imports, with the packages around them; some are not modules."""
    names = set()
    for node in _nodes(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    inside = {name for name in names if _inside(name, PACKAGE)}
    return tuple(sorted(inside | _packages(inside)))


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _packages(names: Iterable[str]) -> set[str]:
    """The packages around some modules."""
    return {name.rsplit(".", count)[0] for name in names for count in range(1, name.count(".") + 1)}


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if __name__ == "__main__"` and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and any(name in ast.unparse(child.test) for name in ("__main__", "TYPE_CHECKING")):
            continue
        yield child
        yield from _nodes(child)
