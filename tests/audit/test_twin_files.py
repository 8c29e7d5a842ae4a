"""The comparison of twins lets declared fields of time and memory pass, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from private_rlhf.audit.twin_files import Comparison, compare_folders
from private_rlhf.core.rundir import RunDir
from private_rlhf.runner import NAMES

M, H, C = "sft/manifest.json", "ppo/history.jsonl", "report/card.json"
PAGE = "<p>a</p><figure>{} s in all</figure><p>{}</p>"
MOMENT = "2026-11-25T09:30:0{}+00:00"


def passages(root: Path) -> dict[str, tuple[str, ...]]:
    """The page says what the manifest of its run says."""
    both = (root / M).is_file() and (root / "report").is_dir()
    seconds = json.loads((root / M).read_text())["seconds"] if both else 1
    return {"report/report.html": (f"<figure>{seconds} s in all</figure>",)}


def compared(folder: Path, name: str, one: bytes | str, two: bytes | str) -> Comparison:
    for twin, content in (("A", one), ("B", two)):
        path = folder / twin / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        RunDir(folder / twin).stamp(Path(name).parts[0])
    return compare_folders(folder / "A", folder / "B", NAMES, passages)


@pytest.mark.parametrize(
    ("name", "one", "two", "fields"),
    [
        ("a.bin", b"\0\1", b"\0\1", ()),
        (M, '{"n": 1, "seconds": 2.5}', '{"n": 1, "seconds": 12.5}', ("seconds",)),
        ("metrics.json", '{"peak_rss_mb": 1, "seconds": {"sft": 1}}', '{"peak_rss_mb": 2, "seconds": {"sft": 3}}',
         ("peak_rss_mb", "seconds")),
        (H, '{"kl": 1, "tokens_per_second": 2}\n', '{"kl": 1, "tokens_per_second": 3}\n', ("tokens_per_second",)),
        (C, json.dumps({"releases": [{"time": MOMENT.format(1)}]}),
         json.dumps({"releases": [{"time": MOMENT.format(2)}]}), ("time",)),
    ],
)  # fmt: skip
def test_declared_fields_may_differ(tmp_path: Path, name: str, one: str, two: str, fields: tuple[str, ...]) -> None:
    found = compared(tmp_path, name, one, two)
    assert found.leaks == ()
    assert found.compared == 1
    assert found.differing.get(name, ()) == fields


@pytest.mark.parametrize(
    ("name", "one", "two", "said"),
    [
        ("a.safetensors", b"\0\xff", b"\0\xfe", "differs (2 and 2 bytes)"),
        (M, '{\n "seconds": 1,\n "rate": 0.45\n}', '{\n "seconds": 2,\n "rate": 0.51\n}',
         'line 3: "rate": 0.45 in one twin, "rate": 0.51 in the other'),
        (M, '{"kept_seconds": 1}', '{"kept_seconds": 2}', "line 1"),
        (M, '{"n": 1}', '{"n": 1.0}', "line 1"),
        (M, '{"n": 1}', '{"n": true}', "line 1"),
        (M, '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "line 1"),
        (M, '{"seconds": 1, "n": 1}', '{"seconds": 1,  "n": 1}', "line 1"),
        (M, '{"seconds": 1, "n": 1}', '{"seconds": 2,  "n": 1}', "line 1"),
        (H, '{"tokens_per_second": 1}\n{"tokens_per_second": 1}\n',
         '{"tokens_per_second": 2}\n{"tokens_per_second": 2}  \n', "line 2"),
        (M, '{"seconds": 1}', '{"seconds": "1"}', "line 1"),
        (M, '{"seconds": 1, "n": 1, "n": 2}', '{"seconds": 2, "n": 3, "n": 2}', "line 1"),
        (H, '{"n": 1}\n{"n": 2}\n', '{"n": 2}\n{"n": 1}\n', "line 1"),
        (H, '{"tokens_per_second": 1}\n', '{"tokens_per_second": 2}\n{"tokens_per_second": 2}\n', "differs"),
        ("notes.txt", "seconds: 1", "seconds: 2", "line 1"),
        # Declared, but by another file, at another place, or too long to be a time:
        ("timing.json", '{"seconds": 1}', '{"seconds": 2}', "line 1"),
        ("timing.json", '[{"seconds": 1}, {"seconds": 0}]', '[{"seconds": 1}, {"seconds": 1}]', "line 1"),
        ("sft/model/manifest.json", '{"seconds": 1}', '{"seconds": 2}', "line 1"),
        (M, '{"report": {"seconds": 1}}', '{"report": {"seconds": 2}}', "line 1"),
        (M, '[{"seconds": 1}]', '[{"seconds": 2}]', "line 1"),
        (M, '{"seconds": {"a": 1}}', '{"seconds": {"a": 2}}', "line 1"),
        ("metrics.json", '{"seconds": {"row 0": 1}}', '{"seconds": {"row 0": 0}}', "line 1"),
        (M, '{"seconds": 1.0000001}', '{"seconds": 1.0000002}', "line 1"),
        (M, '{"seconds": 10000001}', '{"seconds": 10000002}', "line 1"),
        (M, '{"seconds": -1}', '{"seconds": -2}', "line 1"),
        (M, '{"seconds": 1e-5}', '{"seconds": 2e-5}', "line 1"),
        (M, '{"peak_gpu_mb": null}', '{"peak_gpu_mb": 1}', "line 1"),
        (C, '{"releases": [{"time": "1"}]}', '{"releases": [{"time": "2"}]}', "line 1"),
        (C, json.dumps({"releases": [{"time": MOMENT.format(0)}] * 9}),
         json.dumps({"releases": [{"time": MOMENT.format(0)}] * 8 + [{"time": MOMENT.format(1)}]}), "line 1"),
        ("report/report.html", PAGE.format(1, "x"), PAGE.format(1, "y"), "line 1: <p>a</p><p>x</p>"),
        ("report/report.html", PAGE.format(1, "x"), PAGE.format(2, "x"), "line 1: <p>a</p><p>x</p>"),
    ],
)  # fmt: skip
def test_anything_else_is_a_leak(tmp_path: Path, name: str, one: str, two: str, said: str) -> None:
    found = compared(tmp_path, name, one, two)
    assert len(found.leaks) == 1
    assert f"{name}: " in found.leaks[0]
    assert said in found.leaks[0]


def test_a_page_may_say_of_time_what_its_run_says(tmp_path: Path) -> None:
    for twin, seconds in (("A", 1), ("B", 2)):
        for name, content in ((M, json.dumps({"seconds": seconds})), ("report/report.html", PAGE.format(seconds, "x"))):
            path = tmp_path / twin / name
            path.parent.mkdir(parents=True)
            path.write_text(content)
            RunDir(tmp_path / twin).stamp(Path(name).parts[0])
    found = compare_folders(tmp_path / "A", tmp_path / "B", NAMES, passages)
    assert found.leaks == ()
    assert found.fields == ["seconds", "time and memory"]


def test_files_folders_and_links_of_one_twin_alone_are_leaks(tmp_path: Path) -> None:
    for twin in ("A", "B"):
        (tmp_path / twin).mkdir()
        (tmp_path / twin / "link").symlink_to(f"to {twin}")
    (tmp_path / "A" / "sft").mkdir()
    (tmp_path / "B" / ".hidden").touch()
    for twin in ("A", "B"):
        RunDir(tmp_path / twin).stamp("sft")
    found = compare_folders(tmp_path / "A", tmp_path / "B", NAMES)
    assert [line.partition(":")[0] for line in found.leaks] == [".hidden", "sft", "link"]


def _touch(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (M, lambda path: path.chmod(0o600)),
        ("sft", lambda path: path.chmod(0o700)),
        (".", lambda path: path.chmod(0o700)),
        (M, lambda path: os.setxattr(path, "user.y", b"1011")),
        (M, lambda path: os.link(path, path.parents[2] / "elsewhere")),
        (M, lambda path: _touch(path, time.time())),  # with nanoseconds
        (M, lambda path: _touch(path, int(time.time()) - 7)),  # not as the rest of its stage
        ("metrics.json", lambda path: _touch(path, 61 + path.stat().st_mtime)),
        ("sft", lambda path: _touch(path, int(time.time()) - 3)),
    ],
)
def test_what_copies_carry_beside_bytes_is_compared(
    name: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    for twin in ("A", "B"):
        for file in (M, "metrics.json"):
            path = tmp_path / twin / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        RunDir(tmp_path / twin).stamp("sft")
    assert compare_folders(tmp_path / "A", tmp_path / "B", NAMES).leaks == ()
    try:
        change(tmp_path / "B" / name)
    except OSError as error:
        pytest.skip(f"this file system refuses it: {error}")
    found = compare_folders(tmp_path / "A", tmp_path / "B", NAMES)
    assert found.leaks
    assert found.leaks[0].startswith(("sft", name))


def test_a_stage_s_one_time_cannot_be_any_number(tmp_path: Path) -> None:
    """All files of a stage agree, and say the count of labels."""
    for twin, moment in (("A", 31), ("B", 1_600_000_019)):
        (tmp_path / twin).mkdir()
        (tmp_path / twin / "metrics.json").write_text("{}")
        for path in (tmp_path / twin / "metrics.json", tmp_path / twin):
            _touch(path, moment)
    assert len(compare_folders(tmp_path / "A", tmp_path / "B", NAMES).leaks) == 2
