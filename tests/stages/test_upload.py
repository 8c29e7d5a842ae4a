"""The commands of docs/how-to/publish.md: what the hub's own tool sends, and what comes back from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from private_rlhf.cli import main
from support.fake_hub import FakeHub
from support.pipeline_runs import ROOT, tree

PAGE = (ROOT / "docs" / "how-to" / "publish.md").read_text(encoding="utf-8")
POLICY, RELEASE, CARD, DOWNLOAD = re.findall(r"^\.venv/bin/hf (.*)$", PAGE, flags=re.MULTILINE)
EXAMPLE = re.search(r"^```markdown\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)

Call = Callable[[str], object]
LOAD = "import datasets, json; print(json.dumps({}['train'].to_list()))"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as fake:
        yield fake


@pytest.fixture
def here(tmp_path: Path, finished_run: Path) -> Path:
    """A folder that holds what the page names."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run)
    (tmp_path / "release").symlink_to(finished_run / "privatize" / "release")
    assert EXAMPLE
    (tmp_path / "labels.md").write_text(EXAMPLE[1], encoding="utf-8")
    return tmp_path


@pytest.fixture
def python(hub: FakeHub, here: Path) -> Callable[..., str]:
    """The output of a Python of its own, whose hub is the fake one."""

    def call(*arguments: str) -> str:
        environment = os.environ | hub.environment(str(here / "cache"))
        program = [sys.executable, *arguments]
        done = subprocess.run(program, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture
def hf(python: Callable[..., str]) -> Call:
    """A line of the page, by the tool that is installed here."""
    return lambda line: python("-m", "huggingface_hub.cli.hf", *line.split())


def test_a_policy_arrives_whole_with_its_card(hub: FakeHub, hf: Call, finished_run: Path) -> None:
    hf(POLICY)
    arrived = hub.files["NAME/policy"]
    arrived.pop(".gitattributes")
    assert arrived == tree(finished_run / "ppo" / "model")
    head = yaml.safe_load(arrived["README.md"].decode().split("---\n")[1])
    assert head["library_name"] == "transformers"


def test_a_release_loads_and_verifies_after_a_round_trip(
    hub: FakeHub, hf: Call, python: Callable[..., str], here: Path, finished_run: Path
) -> None:
    hf(RELEASE)
    hf(CARD)
    release = finished_run / "privatize" / "release"
    sent = {f"release/{name}": content for name, content in tree(release).items()}
    assert hub.files["datasets/NAME/labels"].keys() == {".gitattributes", "README.md", *sent}
    loads = re.search(r"`(datasets\.load_dataset\(.*?\))`", PAGE)
    assert loads
    assert json.loads(python("-c", LOAD.format(loads[1]))) == pq.read_table(release).to_pylist()
    hf(DOWNLOAD)
    assert tree(here / "labels" / "release") == tree(release)
    assert main(["verify-release", str(here / "labels" / "release")]) == 0


def test_a_release_beside_other_files_does_not_verify(hub: FakeHub, hf: Call, here: Path) -> None:
    """Why it gets a folder of its own: what the hub adds is a further file."""
    hf("upload NAME/flat release --repo-type dataset")
    hf("download NAME/flat --repo-type dataset --local-dir flat")
    assert (here / "flat" / "_manifest").is_file()
    assert main(["verify-release", str(here / "flat")]) == 2
