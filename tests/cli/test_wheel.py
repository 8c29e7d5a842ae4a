"""`make wheel`: one commit, one wheel, whoever builds it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_builds_of_a_commit_are_the_same_bytes(tmp_path: Path) -> None:
    """Two clones, with other paths, times, umasks, time zones, locales and hash seeds; one has files of its own."""
    binaries = Path(sys.executable).parent
    digests, names = set(), set()
    for place, umask, zone, locale in (("a", 0o022, "UTC", "C"), ("a longer/place", 0o077, "Asia/Tokyo", "C.UTF-8")):
        clone = tmp_path / place
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
        environment |= {"TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": str(umask)}
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, umask=umask)
        if umask == 0o077:
            (clone / "pipeline" / "stray.py").write_text("import this\n")
            time.sleep(2.1)  # zip files count time in steps of two seconds
        command = ["make", "wheel", f"BIN={binaries}", f"VENV={binaries.parent}", "-o", f"{binaries.parent}/.installed"]
        done = subprocess.run(command, cwd=clone, env=environment, umask=umask, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        (wheel,) = (clone / "dist").glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
        names.add(wheel.name)
        assert digests <= {done.stdout.strip().rpartition(":")[2]}
    assert len(digests) == len(names) == 1
