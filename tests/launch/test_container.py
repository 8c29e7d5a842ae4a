"""launch/Dockerfile: what may reach an image, who runs in it, and that it installs what the repository names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8"))
LINES = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def values(word: str) -> list[str]:
    return [rest for first, rest in LINES if first == word]


def test_a_build_sees_wheels_and_versions_only() -> None:
    """Whatever lies in the folder: a list of what is let in, after all is kept out."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["*", "!constraints.txt", "!wheels/*.whl"]
    assert not values("COPY")
    assert not values("ADD")
    (run,) = values("RUN")
    assert re.findall(r"--mount=type=bind,source=(\S+),target", run) == ["wheels", "constraints.txt"]


def test_nothing_is_fetched_and_every_version_is_pinned() -> None:
    (run,) = values("RUN")
    assert 'pip="/opt/private-rlhf/bin/pip install --no-cache-dir --no-index"' in run
    installs = re.findall(r"\$pip (.*?)(?:;| &&)", run)
    assert len(installs) == 2
    assert all("--find-links /wheels -c /constraints.txt" in each for each in installs)


def test_it_names_what_is_there() -> None:
    defaults = dict(each.split("=", 1) for each in values("ARG"))
    assert set(defaults["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    for name in defaults["WEIGHTS"].strip('"').split():
        assert re.search(rf"^{name}==", PINS, flags=re.MULTILINE)
        assert f"{name}" in (ROOT / "docs" / "how-to" / "air-gapped.md").read_text(encoding="utf-8")
    (entry,) = values("ENTRYPOINT")
    assert entry == f'["{next(iter(PROJECT["scripts"]))}"]'


def test_it_runs_as_an_unprivileged_user_whose_key_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from private_rlhf.privacy.keys import default_key

    words = [first for first, _ in LINES]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert values("USER") == ["rlhf"]
    (environment,) = values("ENV")
    monkeypatch.setenv("XDG_STATE_HOME", dict(each.split("=") for each in environment.split())["XDG_STATE_HOME"])
    page = (ROOT / "docs" / "how-to" / "container.md").read_text(encoding="utf-8")
    assert f":{default_key().parent}" in page
