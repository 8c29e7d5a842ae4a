"""One place says how noisy a label is: no second α, flip probability, debiasing or test for ε = ∞."""

from __future__ import annotations

import ast
import re

import pytest

Sources = dict[str, ast.Module]

# local.py works as a single file outside the package, so it brings its own threshold (a test compares the two).
ALLOWED = {"pipeline/core/noise.py", "pipeline/core/noise_levels.py", "pipeline/privacy/local.py"}
ACCOUNTS = "pipeline/accounting/"  # its ε is mostly that of a total or of a draw: both may be infinite
EPSILON = re.compile(r"(^|[._\W])(epsilon(?!_draw)|eps(?!ilon))s?\w*\b")
FLIP = re.compile(r"(^|[._])flip(_prob)?$")
INFINITE = re.compile(r"^((math|np|numpy|torch)\.inf|float\('inf'\))$")


def _epsilon(node: ast.AST) -> bool:
    return EPSILON.search(ast.unparse(node)) is not None


def _function(node: ast.AST, *names: str) -> bool:
    """A call of one of the functions, whatever its module, with ε in its arguments."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] in names
        and any(_epsilon(argument) for argument in node.args)
    )


def _sum_with_one(node: ast.AST, sign: type[ast.operator]) -> list[ast.expr]:
    """[x] of 1 + x, x + 1 or 1 - x."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, sign):
        return []
    one, other = ast.Constant(1), [node.left, node.right]
    return [right for left, right in (other, other[::-1]) if isinstance(left, ast.Constant) and left.value == one.value]


def _second_formula(node: ast.AST) -> str | None:
    """What a node decides that `LabelNoise` knows; None for anything else."""
    if _function(node, "sigmoid", "expit", "logsigmoid"):
        return "alpha"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _plus_exp(node.right):
        return "alpha"  # 1/(1 + exp(-ε)), exp(ε)/(1 + exp(ε)), exp(-ε)/(1 + exp(-ε))
    if _function(node, "tanh") and _half(node.args[0]):  # type: ignore[attr-defined]
        return "factor"
    for part in _sum_with_one(node, ast.Sub):
        sides = [part.left, part.right] if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult) else []
        if any(FLIP.search(ast.unparse(side)) for side in sides):
            return "factor"  # 1 - 2 flip
        if FLIP.search(ast.unparse(part)) or re.search(r"keep_prob(\(.*\))?$", ast.unparse(part)):
            return "the other probability"
    if _function(node, "isinf", "isfinite"):
        return "infinity"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(INFINITE.match(ast.unparse(side)) for side in sides) and any(_epsilon(side) for side in sides):
            return "infinity"
    if isinstance(node, ast.IfExp) and any(INFINITE.match(ast.unparse(side)) for side in (node.body, node.orelse)):
        return "infinity" if _epsilon(node.test) else None
    return None


def _plus_exp(node: ast.expr) -> bool:
    """1 + exp(ε)."""
    return any(_function(part, "exp") for part in _sum_with_one(node, ast.Add))


def _half(node: ast.expr) -> bool:
    """x / 2 or 0.5 * x."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(value in (2, 0.5) for value in constants)


def found(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of every second formula."""
    return [(node.lineno, what) for node in ast.walk(tree) if (what := _second_formula(node)) is not None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "planted",
    [
        "keep = 1 / (1 + math.exp(-epsilon))",
        "keep = np.exp(self.epsilon) / (1.0 + np.exp(self.epsilon))",
        "flip = math.exp(-eps) / (math.exp(-eps) + 1)",
        "keep = expit(epsilon)",
        "keep = torch.sigmoid(settings.epsilon)",
        "factor = math.tanh(epsilon / 2)",
        "factor = np.tanh(0.5 * recipe.privatize.epsilon)",
        "true = (share - flip) / (1 - 2 * flip)",
        "scale = 1.0 - 2.0 * noise.flip_prob",
        "flip = 1 - keep_prob(epsilon)",
        "flip = 1.0 - manifest.keep_prob",
        "keep = 1 - flip_prob",
        "public = math.isinf(recipe.privatize.epsilon)",
        "private = np.isfinite(table.epsilon)",
        "public = epsilon == math.inf",
        "fine = 0 < epsilon < float('inf')",
        "epsilon = math.inf if manifest.epsilon is None else manifest.epsilon",
        "stated = None if math.isinf(epsilon) else epsilon",
    ],
)
def test_a_second_formula_is_found(planted: str) -> None:
    assert found(ast.parse(planted))


@pytest.mark.parametrize(
    "honest",
    [
        "p = 1 / (1 + np.exp(-margin))",
        "labels = 1 - 2 * secrets.randbits(1)",
        "growth = math.exp(epsilon)",
        "moved = np.tanh(0.5 * margin)",
        "bad = math.isinf(loss)",
        "alpha = noise.keep_prob",
        "shrink = math.tanh(epsilon_draw / 2)",
        "miss = 1 - noise.factor",
    ],
)
def test_other_formulas_are_let_alone(honest: str) -> None:
    assert not found(ast.parse(honest))


def test_label_noise_is_computed_in_one_place(sources: Sources) -> None:
    wrong = {f"{path}:{line}: {what}" for path, tree in sources.items() if path not in ALLOWED
             for line, what in found(tree) if not (what == "infinity" and path.startswith(ACCOUNTS))}
    assert not wrong
    assert all(path in sources for path in ALLOWED)
