"""The examples for Spark and Ray give the rows of one process, also when a worker is killed; a million rows."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf.data.curate import Request, privatize_source

ROOT = Path(__file__).resolve().parents[2]
ROWS = 1_000_000
EXAMPLE = """
import os, signal, sys
from pathlib import Path
import privatize_{engine} as example

def released(*given, original=example.released, mark=Path(sys.argv[1]), **more):
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*given, **more)

example.released = released
example.main(*sys.argv[2:])
"""


def released(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))).combine_chunks()


def test_a_part_that_two_tasks_write_at_once(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray runs a task again whose machine does not answer, and the first one may go on."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    example = importlib.import_module("privatize_ray")
    pairs = pa.table({"prompt": ["p"], "chosen": ["a"], "rejected": ["b"], "position": [0]})
    task = partial(example.released, example.canonical(pairs, 1), str(tmp_path), str(key), 1.0)
    write, written = pq.write_table, []

    def write_and_run_again(rows: pa.Table, path: Path) -> None:
        write(rows, path)
        written.append(path)
        if len(written) == 1:
            task()

    monkeypatch.setattr(pq, "write_table", write_and_run_again)
    task()
    assert len(released(tmp_path)) == 1
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_an_engine_gives_the_rows_of_one_process(tmp_path: Path, key: Path, engine: str) -> None:
    """Of 1, 7 and 64 partitions the first two lose a worker."""
    package = {"spark": "pyspark"}.get(engine, engine)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed" + (", and needs a JDK" if engine == "spark" else ""))
    texts = [i if i % 10 else i // 2 for i in range(ROWS)]  # some pairs come twice
    columns = {"prompt": [f"Say {i}." for i in texts], "chosen": [f"yes {i}" for i in texts],
               "rejected": [f"no {i}" for i in texts], "position": range(ROWS)}  # fmt: skip
    data = tmp_path / "train.parquet"
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), data, row_group_size=50_000)
    privatize_source(Request(str(data), tmp_path / "one", 1.0, key))
    expected = released(tmp_path / "one")
    paths = os.pathsep.join([str(ROOT / "docs" / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable, "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYSPARK_SUBMIT_ARGS"] = "--master local[2,4] pyspark-shell"  # four tries of a task
    mark = tmp_path / "killed"
    for partitions in (1, 7, 64):
        output = tmp_path / f"parts-{partitions}"
        given = (mark, data, output, key, "1.0", partitions)
        command = [sys.executable, "-c", EXAMPLE.format(engine=engine), *map(str, given)]
        subprocess.run(command, env=environment, check=True, timeout=900)
        assert mark.exists()
        if partitions < 7:
            mark.unlink()
        assert released(output).cast(expected.schema).equals(expected)
