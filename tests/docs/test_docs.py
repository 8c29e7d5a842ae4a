"""README and docs/: short, not stale, without dead links, and with commands that exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from private_rlhf.cli import app
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "cli.md"]


RUN_BY = {
    "private-rlhf verify-release": ("tests/data/test_signature.py", "\"verify-release\", str(bundle)"),
    "private-rlhf inspect": ("tests/docs/test_annotation_tools.py", '"inspect"'),
    "private-rlhf keygen": ("tests/cli/test_commands.py", '"keygen"'),
    "private-rlhf privatize": ("tests/cli/test_commands.py", '"privatize"'),
    "private-rlhf run": ("tests/support/pipeline_runs.py", '"run"'),
    "private-rlhf ledger": ("tests/cli/test_ledger_commands.py", '"ledger"'),
    "private-rlhf attack": ("tests/audit/test_command.py", '"attack"'),
    "private-rlhf label": ("tests/labelling/test_server.py", '"label"'),
    "private-rlhf label-filter": ("tests/cli/test_label_filter.py", "label-filter"),
    "private-rlhf account": ("tests/accounting/test_account_command.py", "randomized-response"),
    "private-rlhf stages": ("tests/launch/test_scripts.py", '"stages"'),
    "private-rlhf online": ("tests/stages/test_online.py", '"online"'),
    "private-rlhf plan": ("tests/cli/test_plan.py", '"plan"'),
    "private-rlhf verify-run": ("tests/stages/test_twins.py", '"verify-run"'),
    "private-rlhf design": ("tests/evaluation/test_design.py", '"design"'),
    "private-rlhf sample": ("tests/cli/test_commands.py", '"sample"'),
    "launch/run_pipeline.sh": ("tests/launch/test_scripts.py", "run_pipeline.sh"),
    "launch/sweep_epsilon.sh": ("tests/launch/test_scripts.py", "sweep_epsilon.sh"),
    "python tests/gpu/throughput.py": ("tests/gpu/test_throughput.py", "throughput.py"),
    "python tests/benchmarks/pretended_ppo.py": ("tests/rl/test_pretended_gpu.py", "pretended_ppo.py"),
    "python tests/benchmarks/cost_curves.py": ("tests/stages/test_cost_curves.py", "cost_curves.__file__"),
    "launch/vllm.sh": ("tests/launch/test_scripts.py", '"vllm.sh"'),
    "sbatch": ("tests/launch/test_scripts.py", '"slurm.sbatch"'),  # without Slurm
    "private-rlhf launch": ("tests/launch/test_launcher.py", '"ddp"'),  # as far as accelerate goes without a GPU
    "hf": ("tests/stages/test_upload.py", "huggingface_hub.cli.hf"),
    "python -m": ("tests/cli/test_core_install.py", '"wheel"'),
}
"""First words of a command -> the file of tests that runs it, and what must stand there."""

BY_HAND = {"make demo", "make test", "cp configs/own_data.yaml configs/mine.yaml"}
"""No test runs these: the demo takes minutes, the suite is itself, and the copy is edited next."""
DAEMON = ("docker build ", "docker run ")
"""Nor these: tests/launch/test_container.py reads the image's recipe, and the page says what was tried."""


def commands(page: Path) -> list[str]:
    """The lines of the page's shell blocks, without comments."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def check_program(arguments: list[str]) -> None:
    """`private-rlhf` takes these arguments, and recipes have the keys that they override."""
    command: Any = typer.main.get_command(app)
    rest = arguments[: arguments.index("<")] if "<" in arguments else arguments
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context("private-rlhf", list(rest)) as context:
        overrides = context.params.get("overrides") or []
    if overrides:
        load_recipe(Recipe, ROOT / "configs" / "demo.yaml", overrides)


def check_command(line: str) -> None:
    words = shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    name = words[0].removeprefix(".venv/bin/")
    if name == "private-rlhf":
        check_program(words[1:])
    elif name == "hf":
        assert words[1] in ("upload", "download")
    elif name == "docker" and words[1] == "run":
        check_program(words[words.index("private-rlhf") + 1 :])
    elif name == "docker":
        assert (ROOT / words[words.index("-f") + 1]).is_file()
    elif name == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif name == "accelerate":
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        assert importlib.util.find_spec(words[words.index("-m") + 1])
    elif name == "python":
        assert words[1] == "-m" or (ROOT / words[1]).is_file()
    elif name == "sbatch":
        assert (ROOT / next(word for word in words if word.endswith(".sbatch"))).is_file()
    elif name != "cp":
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for line in commands(page):
        try:
            check_command(line)
        except Exception as error:
            raise AssertionError(f"{line}: {error}") from error


def test_every_command_is_run_by_a_test() -> None:
    shown = {line for page in PAGES for line in commands(page)}
    stripped = {re.sub(r"^([A-Z_]+=\S+ )*(\.venv/bin/)?", "", line) for line in shown}
    covered = tuple(f"{first} " for first in RUN_BY)
    assert not [line for line in stripped - BY_HAND if not f"{line} ".startswith((*covered, *DAEMON))]
    for path, text in RUN_BY.values():
        assert text in (ROOT / path).read_text(encoding="utf-8"), (path, text)


def test_worked_examples_are_short_and_fit_the_code() -> None:
    """The page says where the code is touched; an example that no longer applies is tried and written anew."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```diff\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert len(example.splitlines()) < 60
        done = subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=example, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_commands_are_found_and_judged() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 20
    run = ".venv/bin/private-rlhf run"
    for wrong in (f"{run} --confg x", f"{run} --config x ppo.kl_cof=1", "make demoo", ".venv/bin/python tests/none.py"):
        with pytest.raises(Exception):  # noqa: B017
            check_command(wrong)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    files = re.findall(r"[` ]((?:tests|pipeline|reward_models|launch|configs)/[\w/]+\.(?:py|sh|md|yaml|sbatch))", text)
    assert not [name for name in files if name != "configs/mine.yaml" and not (ROOT / name).exists()]
    modules = re.findall(r"`(private_rlhf(?:\.\w+)+)`", text)
    for module in modules:
        parts = module.split(".")[1:]
        parts = parts if parts[0] == "reward_models" else ["pipeline", *parts]
        assert any((ROOT / "/".join(parts[:end])).with_suffix(".py").is_file() for end in range(1, len(parts) + 1)) or (
            ROOT / "/".join(parts)
        ).is_dir(), module


def test_the_page_about_nist_names_keys_of_the_card() -> None:
    page = (ROOT / "docs" / "explanation" / "nist-800-226.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(cells)))
    cards = ("privacy/card.py", "report/run_card.py")
    sources = [(ROOT / "pipeline" / card).read_text(encoding="utf-8") for card in cards]
    trees = [ast.walk(ast.parse(source)) for source in sources]
    known = {node.value for tree in trees for node in tree if isinstance(node, ast.Constant)}
    assert len(named) > 20
    assert not named - known


def test_the_readme_takes_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_reference_pages_are_what_the_code_says() -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """And asks no other machine for fonts or scripts."""
    pytest.importorskip("material")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "site")], cwd=ROOT,
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//', text), page


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda page: page.name)
def test_a_results_page_has_short_tables(page: Path) -> None:
    """At most eight rows each, two tables a page; longer ones are data files beside it, which the page links to."""
    tables = re.findall(r"^(?:\|.*\n)+", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(tables) <= 2
    assert all(len(each.splitlines()) - 2 <= 8 for each in tables)


def test_every_data_file_is_linked() -> None:
    folder = ROOT / "docs" / "results"
    pages = "".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
    files = [*folder.glob("data/*.csv"), *folder.glob("validation/*.csv")]
    assert files
    assert not [path.name for path in files if str(path.relative_to(folder)) not in pages]
