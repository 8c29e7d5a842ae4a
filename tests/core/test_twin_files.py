"""The comparison of twins lets declared fields of time and memory pass, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.twin_files import Comparison, compare_folders

FIGURE = "<p>a</p><figure>\n<figcaption><b>Where the time went</b> <span>{} s in all</span></figure><p>{}</p>"


def compared(folder: Path, name: str, one: bytes | str, two: bytes | str) -> Comparison:
    for twin, content in (("A", one), ("B", two)):
        path = folder / twin / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return compare_folders(folder / "A", folder / "B")


@pytest.mark.parametrize(
    ("name", "one", "two", "fields"),
    [
        ("a.bin", b"\0\1", b"\0\1", ()),
        ("m.json", '{"n": 1, "seconds": 2.5}', '{"n": 1, "seconds": 12.5}', ("seconds",)),
        ("m.json", '{"a": [{"peak_rss_mb": 1, "seconds": {"sft": 1}}]}',
         '{"a": [{"peak_rss_mb": 2, "seconds": {"sft": 3}}]}', ("peak_rss_mb", "seconds")),
        ("h.jsonl", '{"kl": 1, "tokens_per_second": 2}\n', '{"kl": 1, "tokens_per_second": 3}\n',
         ("tokens_per_second",)),
        ("report/report.html", FIGURE.format(1, "x"), FIGURE.format(2, "x"), ("time and memory",)),
        ("report/report.md", "a\n\n1 s in all; peak memory 1 GiB; 1 process.\nb",
         "a\n\n2 min 3 s in all; peak memory 2 GiB; 1 process.\nb", ("time and memory",)),
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
        ("m.json", '{\n "seconds": 1,\n "rate": 0.45\n}', '{\n "seconds": 2,\n "rate": 0.51\n}',
         'line 3: "rate": 0.45 in one twin, "rate": 0.51 in the other'),
        ("m.json", '{"kept_seconds": 1}', '{"kept_seconds": 2}', "line 1"),
        ("m.json", '{"n": 1}', '{"n": 1.0}', "line 1"),
        ("m.json", '{"n": 1}', '{"n": true}', "line 1"),
        ("m.json", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "line 1"),
        ("m.json", '{"seconds": 1, "n": 1}', '{"seconds": 1,  "n": 1}', "line 1"),
        ("m.json", '{"seconds": 1, "n": 1}', '{"seconds": 2,  "n": 1}', "line 1"),
        ("h.jsonl", '{"seconds": 1}\n{"seconds": 1}\n', '{"seconds": 2}\n{"seconds": 2}  \n', "differs"),
        ("m.json", '{"seconds": 1}', '{"seconds": "1"}', "line 1"),
        ("m.json", '{"seconds": 1, "n": 1, "n": 2}', '{"seconds": 2, "n": 3, "n": 2}', "line 1"),
        ("h.jsonl", '{"n": 1}\n{"n": 2}\n', '{"n": 2}\n{"n": 1}\n', "line 1"),
        ("h.jsonl", '{"seconds": 1}\n', '{"seconds": 2}\n{"seconds": 2}\n', "differs"),
        ("notes.txt", "seconds: 1", "seconds: 2", "line 1"),
        ("report/report.html", FIGURE.format(1, "x"), FIGURE.format(1, "y"), "line 1: <p>a</p><p>x</p>"),
        ("report/report.html", FIGURE.format(1, "x") * 2, FIGURE.format(1, "x") + FIGURE.format(2, "x"), "line"),
        ("report/report.md", "A\n1 s in all; peak memory 1", "B\n1 s in all; peak memory 1", "line 1: A in one"),
    ],
)  # fmt: skip
def test_anything_else_is_a_leak(tmp_path: Path, name: str, one: str, two: str, said: str) -> None:
    found = compared(tmp_path, name, one, two)
    assert len(found.leaks) == 1
    assert f"{name}: " in found.leaks[0]
    assert said in found.leaks[0]


def test_files_folders_and_links_of_one_twin_alone_are_leaks(tmp_path: Path) -> None:
    for twin in ("A", "B"):
        (tmp_path / twin).mkdir()
        (tmp_path / twin / "link").symlink_to(f"to {twin}")
    (tmp_path / "A" / "empty").mkdir()
    (tmp_path / "B" / ".hidden").touch()
    found = compare_folders(tmp_path / "A", tmp_path / "B")
    assert [line.partition(":")[0] for line in found.leaks] == [".hidden", "empty", "link"]
