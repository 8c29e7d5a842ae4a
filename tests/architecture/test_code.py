"""Size limits, forbidden calls, module state, and what lies in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.rooms import room_of

MAX_FUNCTION_LINES, MAX_STAGE_RUN_LINES = 80, 80
ROOM_LINES = {
    "accounting": 382, "audit": 3_024, "commands": 1_648, "core": 1_986, "data": 7_444, "embedded": 149,
    "evaluation": 1_979, "labelling": 1_595, "lm": 3_569, "online": 693, "privacy": 4_256, "private_rlhf": 1_147,
    "recipe": 1_480, "report": 1_382, "reward_models": 3_097, "rl": 3_007, "stages": 2_975, "validation": 1_830,
}
"""Lines of Python that a room may have. A budget for a room, and not for a file: where to cut a file is a question of
its subject. Raising one means that another falls."""
MAX_FILE_BYTES = 2_500_000
CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
# Resume state may hold python objects: it stays under checkpoints/, is loaded weights_only and is never released.
CHECKPOINT_CODE = {"pipeline/rl/resume_state.py"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"}

Sources = dict[str, ast.Module]


def test_rooms_keep_to_their_budget(root: Path, sources: Sources) -> None:
    lines: Counter[str] = Counter()
    for path in sources:
        room = room_of(path).removeprefix("private_rlhf.")
        lines[room] += len((root / path).read_text(encoding="utf-8").splitlines())
    assert lines.keys() == ROOM_LINES.keys()
    assert not {room: count for room, count in lines.items() if count > ROOM_LINES[room]}


def test_functions_are_short(sources: Sources) -> None:
    long = {}
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                stage_run = path.startswith("pipeline/stages/") and node.name == "run"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > (MAX_STAGE_RUN_LINES if stage_run else MAX_FUNCTION_LINES):
                    long[f"{path}:{node.name}"] = length
    assert not long


def test_device_is_never_hard_coded(sources: Sources) -> None:
    """accelerate places models and tensors."""
    wrong = {f"{path}:{node.lineno}" for path, tree in sources.items() for node in ast.walk(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"}
    assert not wrong


def test_one_door_leads_to_the_terminal(sources: Sources) -> None:
    """`core.errors`, where what a terminal obeys is escaped. `privacy.local` works as a single file, with its own; the
    traceback in `validation.lab` is of a study, which reads no data."""
    doors = {"pipeline/core/errors.py", "pipeline/privacy/local.py", "pipeline/validation/lab.py"}
    calls = ("print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc", "typer.echo", "warnings.warn")
    assert {path for path, tree in sources.items() for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls} == doors  # fmt: skip


def test_no_pickles_outside_checkpoints(sources: Sources) -> None:
    """Neither the modules nor torch's own pickle-based files; a load anywhere says weights_only=True."""
    wrong = set()
    for path, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                if names & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}:
                    wrong.add(f"{path}:{node.lineno}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save" and path not in CHECKPOINT_CODE:
                wrong.add(f"{path}:{node.lineno}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                if path not in CHECKPOINT_CODE or not safe:
                    wrong.add(f"{path}:{node.lineno}")
    assert not wrong


def test_no_module_state(sources: Sources) -> None:
    """No `global`, and no list, dict or set of a module that the module's own code changes."""
    wrong = set()
    for path, tree in sources.items():
        containers = set()
        for line in tree.body:
            if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None and _is_container(line.value):
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                containers |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Global) or _changed_name(node) in containers:
                wrong.add(f"{path}:{getattr(node, 'lineno', 0)}")
    assert not wrong


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in {"list", "dict", "set", "defaultdict", "Counter", "deque", "OrderedDict"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_name(node: ast.AST) -> str | None:
    """The plain name that a statement changes in place: `name[…] = …`, `del name[…]`, `name.append(…)`."""
    owner: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        owner = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        owner = node.func.value
    return owner.id if isinstance(owner, ast.Name) else None


def test_the_mutation_finder_finds_mutations() -> None:
    tree = ast.parse("SEEN[1] = 2\ndel GONE[0]\nLIST.append(3)\nx = READ[0]")
    assert {_changed_name(node) for node in ast.walk(tree)} - {None} == {"SEEN", "GONE", "LIST"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_loads_strictly(path: Path) -> None:
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe

    assert load_recipe(Recipe, path).name == path.stem


def test_the_paper_s_settings_are_the_paper_s() -> None:
    """Section 6 of the PPKL paper, key by key; deviations stand in the recipe's header."""
    from private_rlhf.recipe import Recipe
    from private_rlhf.recipe.load import load_recipe

    recipe = load_recipe(Recipe, CONFIGS[0].parent / "hh_rlhf_llama3_1b.yaml")
    paper = {"iterations": 500, "rollouts": 16, "ppo_epochs": 3, "minibatch_size": 4, "temperature": 1.0, "top_p": 0.9,
             "clip_range": 0.2, "learning_rate": 1e-6, "value_learning_rate": 5e-6, "value_coef": 0.5,
             "entropy_coef": 0.01, "max_grad_norm": 1.0, "kl_coef": 0.1, "gamma": 1.0, "lam": 0.95}
    assert {key: getattr(recipe.ppo, key) for key in paper} == paper
    assert (recipe.model.max_prompt_tokens, recipe.model.max_response_tokens) == (256, 64)
    assert (recipe.reward.mode, recipe.reward.head_warmup, recipe.reward.epochs) == ("full", True, 5)
    assert recipe.reward.reward_bound == 10.0
    assert recipe.data.demonstrations == "release"


def tracked(root: Path) -> list[Path]:
    """Files under version control; skips outside a git checkout."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [root / name for name in result.stdout.split("\0") if name and (root / name).is_file()]


def test_no_large_file_is_tracked(root: Path) -> None:
    assert not {path for path in tracked(root) if path.stat().st_size > MAX_FILE_BYTES}


def test_top_level_is_what_the_design_says(root: Path) -> None:
    top = {path.relative_to(root).parts[0] for path in tracked(root)}
    plain = {name for name in top if not name.startswith(".")}
    assert plain <= {"pyproject.toml", "pipeline", "configs", "reward_models", "launch", "tests", "README.md",
                     "Makefile", "constraints.txt", "lock.txt", "LICENSE", "CHANGELOG.md", "SECURITY.md", "docs",
                     "mkdocs.yml", "lab"}


def test_the_lab_has_the_version_of_the_product(root: Path) -> None:
    import tomllib

    product, lab = (tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
                    for folder in (".", "lab"))
    assert lab["version"] == product["version"]
    assert lab["dependencies"] == [f"private-rlhf[all]=={product['version']}"]


def test_test_names_do_not_clash(root: Path) -> None:
    """Without `--import-mode=importlib` (or packages), two test files of one name stop pytest."""
    import tomllib

    options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    if "--import-mode=importlib" in options["addopts"]:
        pytest.skip("importlib mode: names may repeat")
    names = Counter(path.name for path in (root / "tests").rglob("test_*.py"))
    assert not {name for name, count in names.items() if count > 1}


def pinned(root: Path, name: str) -> dict[str, str]:
    """Version by canonical name of a file of pins; a local part (torch's +cpu) is left out, hashes are skipped."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    lines = (root / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.rstrip(" \\")) for line in lines if line and not line.startswith(("#", " "))]
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")).public for pin in pins}


def test_constraints_pin_every_dependency(root: Path) -> None:
    """What pyproject.toml asks for directly stands in the constraints with an exact version inside its range."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = pinned(root, "constraints.txt")
    wanted = [*project["dependencies"], *(row for extra in project["optional-dependencies"].values() for row in extra)]
    others = [requirement for requirement in map(Requirement, wanted) if requirement.name != project["name"]]
    for requirement in others:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement.name


def test_the_lock_has_the_versions_of_the_constraints(root: Path) -> None:
    """`make lock` writes it; each version has a SHA-256, and no place it came from is named."""
    assert pinned(root, "lock.txt") == pinned(root, "constraints.txt")
    text = (root / "lock.txt").read_text(encoding="utf-8")
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", block) for block in re.split(r"\n(?=\w)", text.rstrip())[1:])
    assert not re.search(r"://|index-url|find-links", text)
