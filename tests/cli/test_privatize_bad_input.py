"""`keygen` and `privatize` from outside: whatever is wrong, exit code 2 and one line with the culprit, nothing written.

Messages are the commands' own business; here it counts that the line names the culprit and repeats no text of a row and
no byte of the key.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.cli import main

SECRET = "unspeakable"  # in every text of every row: no message may repeat it
ROWS = [{"prompt": f"{SECRET} p{i}", "chosen": f"{SECRET} c{i}", "rejected": f"{SECRET} r{i}"} for i in range(8)]
FUZZ = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
Refused = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a key and good data."""
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", "--output", "owner.key"]) == 0
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def command(**changed: str) -> list[str]:
    """`privatize` on the good data, with options changed (`no_NAME` leaves one out)."""
    options = {"data": "good.jsonl", "output": "release", "epsilon": "1", "key": "owner.key"} | changed
    left_out = {name.removeprefix("no_") for name in options if name.startswith("no_")}
    return ["privatize", *(f"--{name}={value}" for name, value in options.items() if name not in left_out
                           and not name.startswith("no_"))]


def contents(folder: Path) -> dict[str, bytes | None]:
    """What lies in the folder, the owner's state beside the key apart."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()
            if ".state" not in name}


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs what must be refused and returns its line."""

    def run(*arguments: str, code: int = 2) -> str:
        before, secret = contents(folder), (folder / "owner.key").read_text().split()[-1]
        capsys.readouterr()
        assert main(arguments) == code
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("private-rlhf: ")]
        assert len(lines) == 1, err
        assert len(lines[0]) < 600
        assert "Traceback" not in err
        assert SECRET not in out + err
        assert secret not in out + err
        assert contents(folder) == before
        return lines[0]

    return run


# --- keygen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["owner.key", "good.jsonl", ".", "good.jsonl/new.key", "/proc/nowhere/new.key"])
def test_keygen_writes_where_nothing_is(refused: Refused, output: str) -> None:
    assert output.rstrip("/") in refused("keygen", "--output", output)


def test_keygen_does_not_follow_links(refused: Refused, folder: Path) -> None:
    """A link that somebody left there would put the key elsewhere."""
    (folder / "link.key").symlink_to(folder / "elsewhere.key")
    assert "link.key" in refused("keygen", "--output", "link.key")
    assert not (folder / "elsewhere.key").exists()


def test_keygen_without_an_output_makes_the_user_s_key_once(refused: Refused) -> None:
    assert main(["keygen"]) == 0
    assert "overwritten" in refused("keygen")


def test_two_keys_differ_and_any_name_will_do(folder: Path) -> None:
    names = ["ключ 密钥.key", "a\u202eb.key", "-k"]
    for name in names:
        assert main(["keygen", f"--output={name}"]) == 0
    assert len({(folder / name).read_text() for name in [*names, "owner.key"]}) == 4
    assert main(command(key=names[0])) == 0


# --- epsilon ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "epsilon", ["nan", "-nan", "inf", "-inf", "Infinity", "1e400", "0", "-0.0", "1e-400", "-1", "one", "", "1,5", "0x1"]
)
def test_epsilon_is_a_finite_number_above_0(refused: Refused, epsilon: str) -> None:
    assert "epsilon" in refused(*command(epsilon=epsilon))


@pytest.mark.parametrize("epsilon", ["1e-6", "50", "1e3", "5e-324"])
def test_any_such_number_will_do(folder: Path, epsilon: str) -> None:
    assert main(command(epsilon=epsilon)) == 0
    stated = json.loads((folder / "release" / "_manifest").read_text())["guarantee"]
    assert stated["epsilon"] == float(epsilon)
    assert 0.5 <= stated["keep_prob"] < 1


@pytest.mark.parametrize("option", ["data", "output", "epsilon", "key"])
def test_every_option_is_needed(refused: Refused, option: str) -> None:
    assert f"--{option}" in refused(*command(**{f"no_{option}": ""}))


# --- the key ----------------------------------------------------------------------------------------------------------

HEX = "5a" * 32


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"private-rlhf key v1\n",
        f"private-rlhf key v1\n{HEX[:-2]}\n".encode(),
        f"private-rlhf key v1\n{HEX}5a\n".encode(),
        f"private-rlhf key v1\n{HEX[:-1]}\n".encode(),
        f"private-rlhf key v1\n{HEX[:-1]}g\n".encode(),
        f"private-rlhf key v9\n{HEX}\n".encode(),
        f"{HEX}\n".encode(),
        f"private-rlhf key v1\n{HEX}\n{HEX}\n".encode(),
        f"private-rlhf key v1\n{HEX}\n".encode("utf-16"),
        bytes(range(256)) * 4,
        b"\xff" * 1_000_000,
    ],
)
def test_a_damaged_key_is_named_and_not_shown(refused: Refused, folder: Path, content: bytes) -> None:
    path = folder / "damaged.key"
    path.write_bytes(content)
    path.chmod(0o600)
    line = refused(*command(key="damaged.key"))
    assert "damaged.key" in line
    assert HEX[:8] not in line


def test_a_lost_key(refused: Refused, folder: Path) -> None:
    """After a release under it: no other key is made in its place."""
    assert main(command()) == 0
    kept = (folder / "owner.key").read_text()
    (folder / "other.key").write_text(kept)  # what `refused` looks for
    line = refused(*command(key="lost.key", output="again"))
    assert "lost.key" in line
    assert "keygen" in line
    assert not (folder / "lost.key").exists()


@pytest.mark.parametrize("key", [".", "/dev/null", "good.jsonl/x.key"])
def test_what_is_no_key_file(refused: Refused, key: str) -> None:
    assert key in refused(*command(key=key))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_key_that_others_can_use(refused: Refused, folder: Path, mode: int) -> None:
    (folder / "owner.key").chmod(mode)
    line = refused(*command())
    assert "owner.key" in line
    assert "chmod 600" in line


# --- data and output --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["nowhere.jsonl", "", "/dev/null", "owner.key", "."])
def test_what_is_no_data(refused: Refused, data: str) -> None:
    refused(*command(data=data))


def test_a_release_is_not_privatised_again(refused: Refused) -> None:
    assert main(command()) == 0
    assert "release" in refused(*command(data="release", output="again"))


@pytest.mark.parametrize("output", ["good.jsonl", "owner.key", "good.jsonl/release", "full"])
def test_nothing_is_overwritten(refused: Refused, folder: Path, output: str) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("Dear all,")
    assert output.split("/")[0] in refused(*command(output=output))


@pytest.mark.parametrize(
    "source", ["", " ", "x" * 201, "x" * 100_000, "a\nb", "\x1b[31mred", "a\u202eb", "\x9b2J", "a\tb", "half \ud800"]
)
def test_the_name_of_a_source_is_one_printable_line(refused: Refused, source: str) -> None:
    """Ledger, manifest and card repeat it."""
    assert "--source is no name: give one line of at most 200" in refused(*command(), "--source", source)


def test_a_file_s_own_name_is_repeated_printably(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "good.jsonl").rename(folder / "a\x1b[2J\nb.jsonl")
    assert main(command(data="a\x1b[2J\nb.jsonl")) == 0
    assert json.loads((folder / "release" / "_manifest").read_text())["source"] == r"a\x1b[2J b.jsonl"


ODD_ROWS: dict[str, Any] = {
    "a number": {"prompt": "p", "chosen": 1, "rejected": 2},
    "null": {"prompt": "p", "chosen": None, "rejected": SECRET},
    "nothing": {},
    "one answer": {"prompt": "p", "chosen": SECRET},
    "a list of texts": {"prompt": "p", "chosen": [SECRET], "rejected": [SECRET + "2"]},
    "two kinds": {"prompt": "p", "chosen": SECRET, "rejected": [{"role": "assistant", "content": SECRET}]},
    "messages without content": {"prompt": "p", "chosen": [{"role": SECRET}], "rejected": [{"role": "b"}]},
    "a prompt that is null": {"prompt": None, "chosen": SECRET, "rejected": SECRET + "2"},
    "a list": [SECRET],
    "a text": SECRET,
}


@pytest.mark.parametrize("kind", ODD_ROWS)
@pytest.mark.parametrize("place", [0, 5])
def test_an_odd_row_is_named_by_its_line(refused: Refused, folder: Path, kind: str, place: int) -> None:
    rows: list[Any] = [*ROWS]
    rows.insert(place, ODD_ROWS[kind])
    (folder / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refused(*command(data="odd.jsonl"))
    assert "odd.jsonl" in line
    assert f"line {place + 1}" in line


@pytest.mark.parametrize("place", range(3))
def test_lone_surrogates_are_refused_wherever_they_are(refused: Refused, folder: Path, place: int) -> None:
    row = json.dumps(ROWS[0])
    at = [f"{SECRET} {name}0" for name in "pcr"][place]
    (folder / "odd.jsonl").write_text(row.replace(at, at + "\\ud800") + "\n")
    assert "odd.jsonl, line 1" in refused(*command(data="odd.jsonl"))


def files(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """The same rows as files of every kind."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), table)
    text = "prompt,chosen,rejected\n" + "".join(f"{row['prompt']},{row['chosen']},{row['rejected']}\n" for row in rows)
    return {"x.jsonl": lines, "x.jsonl.gz": gzip.compress(lines), "x.parquet": table.getvalue(), "x.csv": text.encode()}


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet", "x.csv"])
@FUZZ
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused(refused: Refused, folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert name in refused(*command(data=name))


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet", "x.csv"])
@FUZZ
@given(st.data())
def test_a_damaged_file_is_refused_or_read(folder: Path, capsys: pytest.CaptureFixture[str], name: str,
                                           data: st.DataObject) -> None:
    """Cut short, or with a few bytes changed: exit code 0 or 2, one line, no row of it repeated, no half release."""
    content = bytearray(files(ROWS)[name])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    number = len(list(folder.iterdir()))
    capsys.readouterr()
    code = main(command(data=name, output=f"release{number}"))
    out, err = capsys.readouterr()
    assert code in (0, 2)
    assert SECRET not in out + err
    assert (folder / f"release{number}").exists() == (code == 0)
    assert sum(line.startswith("private-rlhf: ") for line in err.splitlines()) == (code == 2)


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda text: not text.isspace())


@FUZZ
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS).filter(lambda row: row[1] != row[2]), min_size=1, max_size=6))
def test_text_of_every_kind_is_released_byte_for_byte(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    """Line separators, direction marks, NUL, combining and astral characters: the pairs come out as they went in."""
    given_rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    number = len(list(folder.iterdir()))
    lines = "".join(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for row in given_rows)
    (folder / f"{number}.jsonl").write_bytes(lines.encode())
    assert main(command(data=f"{number}.jsonl", output=f"release{number}")) == 0
    released = [row for path in sorted((folder / f"release{number}").glob("*.parquet"))
                for row in pq.read_table(path).to_pylist()]
    pairs = {(row["prompt"], frozenset((row["chosen"], row["rejected"]))) for row in released}
    assert pairs == {(prompt, frozenset(pair)) for prompt, *pair in rows}
    assert len(released) == len(pairs)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written(refused: Refused, folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o500)
    assert "closed" in refused(*command(output="closed/release"))


# --- labels in a column of their own ----------------------------------------------------------------------------------


@pytest.fixture
def labelled(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[list[Any], str], list[str]]:
    """Arguments for data with a label column; skips where the command has no such option."""
    capsys.readouterr()
    main(["privatize", "--help"])
    if "--label-column" not in capsys.readouterr().out:
        pytest.skip("privatize has no --label-column")

    def make(values: list[Any], labels: str) -> list[str]:
        rows = [{"prompt": f"{SECRET} {i}", "response_a": f"{SECRET} a{i}", "response_b": f"{SECRET} b{i}", "y": value}
                for i, value in enumerate(values)]
        (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [*command(data="labelled.jsonl"), "--label-column=y", f"--labels={labels}"]

    return make


@pytest.mark.parametrize(
    ("values", "labels"), [([-1, 1], "-1,1"), ([0, 1], "0,1"), (["A", "B"], "A,B"), ([True, False], "true,false")]
)
def test_declared_labels_are_read(labelled: Callable[..., list[str]], values: list[Any], labels: str) -> None:
    assert main(labelled(values * 3, labels)) == 0


@pytest.mark.parametrize(
    ("value", "labels"),
    [(2, "0,1"), (None, "0,1"), (0.5, "0,1"), (SECRET, "A,B"), ("a", "A,B"), ([1], "-1,1"), ({"y": 1}, "-1,1")],
)
def test_an_undeclared_label_is_refused_and_not_shown(
    labelled: Callable[..., list[str]], refused: Refused, value: Any, labels: str
) -> None:
    known = json.loads(f"[{labels}]") if labels[0] in "-0" else labels.split(",")
    assert "labelled.jsonl" in refused(*labelled([*known, value], labels))


@pytest.mark.parametrize("labels", ["", "A", "A,A", "A,B,C"])
def test_two_different_labels_are_declared(
    labelled: Callable[..., list[str]], refused: Refused, labels: str
) -> None:
    assert "--labels" in refused(*labelled(["A", "B"], labels))
