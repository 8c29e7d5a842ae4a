"""A release carries nothing but its rows: each place beside them where a label could hide is refused, signed or not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from private_rlhf.cli import main
from private_rlhf.core.atomic import json_text, write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.container import PUBLISHED, is_copy, settle, unpublished, write_shard
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_prompts
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import names_bundle
from private_rlhf.data.verify import verify_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.signatures import file_digest, sign
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytestmark = pytest.mark.usefixtures("quick_disk")
GOLDEN = Path(__file__).parents[1] / "golden" / "releases"
SETTINGS = {"compression": "zstd", "compression_level": 1, "use_dictionary": False, "write_statistics": False}
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
SHARD = "part-00000.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed release of 60 pairs in `bundle`, its key in `owner.key`."""
    home = tmp_path_factory.mktemp("container")
    rows = [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}", "n": i} for i in range(60)]
    (home / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key, options = keygen(home / "owner.key"), Options(columns=("n",))
    privatize_source(Request(str(home / "raw.jsonl"), home / "bundle", 1.0, key, options=options))
    return home


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "bundle", tmp_path / "bundle"))


def sign_again(bundle: Path, key: Path) -> None:
    """As a program would whose writer carries something: the signature holds."""
    files = {path.name: file_digest(path) for path in sorted(bundle.iterdir()) if path.name != "_signature"}
    write_json(bundle / "_signature", sign(load_key(key), files))
    settle(bundle)


def verified(bundle: Path, *options: str) -> int:
    return main(["verify-release", str(bundle), *options])


# --- bytes of a shard -------------------------------------------------------------------------------------------------


def written(change: Callable[[pa.Table], pa.Table] = lambda table: table, rows: int = 8192, **settings: Any) -> Any:
    def write(path: Path) -> None:
        pq.write_table(change(pq.read_table(path)), path, row_group_size=rows, **(SETTINGS | settings))

    return write


def by_label(path: Path) -> None:
    """A row group ends after each row that has a label of +1."""
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema, **SETTINGS) as writer:
        ends = [row for row in range(len(table)) if table["chosen"][row].as_py().startswith("yes")]
        for start, end in zip([-1, *ends], [*ends, len(table) - 1], strict=True):
            if end > start:
                writer.write_table(table[start + 1 : end + 1])


def appended(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"1")


def between_pages_and_footer(path: Path) -> None:
    """Bytes that no reader looks at: the footer says where pages are."""
    data = path.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    path.write_bytes(data[:-footer] + b"1011" + data[-footer:])


CARRIERS: dict[str, Callable[[Path], None]] = {
    "metadata of the file": written(lambda table: table.replace_schema_metadata({"writer": "0110"})),
    "metadata of a column": written(
        lambda table: table.cast(table.schema.set(1, table.schema.field(1).with_metadata({"y": "1"})))
    ),
    "a column that is not nullable": written(
        lambda table: table.cast(table.schema.set(1, table.schema.field(1).with_nullable(False)))
    ),
    "a row group for each label": by_label,
    "smaller row groups": written(rows=30),
    "another level of compression": written(compression_level=9),
    "another compression": written(compression="gzip"),
    "a dictionary": written(use_dictionary=["chosen"]),
    "statistics": written(write_statistics=["chosen"]),
    "checksums": written(write_page_checksum=True),
    "smaller pages": written(data_page_size=100, write_batch_size=10),
    "another version of pages": written(data_page_version="2.0"),
    "an index of pages": written(write_page_index=True),
    "another version of the format": written(version="1.0"),
    "no schema of Arrow": written(store_schema=False),
    "another encoding": written(column_encoding={"chosen": "DELTA_BYTE_ARRAY"}),
    "bytes after the file": appended,
    "bytes between pages and footer": between_pages_and_footer,
    "wider integers": written(lambda table: table.set_column(4, "n", table["n"].cast(pa.int32()))),
}


@pytest.mark.parametrize("kind", CARRIERS)
def test_what_a_shard_carries_beside_its_rows_is_refused(
    bundle: Path, made: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CARRIERS[kind](bundle / SHARD)
    sign_again(bundle, made / "owner.key")
    assert verified(bundle) == 2
    error = capsys.readouterr().err
    assert str(bundle) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["metadata of the file", "a row group for each label", "smaller row groups"])
def test_every_reader_refuses_what_the_footer_shows(bundle: Path, made: Path, kind: str) -> None:
    CARRIERS[kind](bundle / SHARD)
    sign_again(bundle, made / "owner.key")
    with pytest.raises(UserError, match="was not written with the settings of a release"):
        read_release(bundle)


def test_another_version_of_the_writer_is_named_and_only_its_settings_are_compared(
    bundle: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, version = bundle / SHARD, pa.cpp_version.encode()
    older = version[:-1] + (b"0" if version[-1:] != b"0" else b"9")
    path.write_bytes(path.read_bytes().replace(b"version " + version, b"version " + older))
    sign_again(bundle, made / "owner.key")
    assert verified(bundle) == 0
    assert f"written by pyarrow {older.decode()}, and another is installed" in capsys.readouterr().out
    written(compression="gzip")(path)
    path.write_bytes(path.read_bytes().replace(b"version " + version, b"version " + older))
    sign_again(bundle, made / "owner.key")
    assert verified(bundle) == 2
    assert "was not written with the settings of a release" in capsys.readouterr().err
    written()(path)
    path.write_bytes(path.read_bytes().replace(b"version " + version, b"version " + version.replace(b".", b"x")))
    sign_again(bundle, made / "owner.key")
    assert verified(bundle) == 2


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    return written(lambda table: pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema))


ROWS: dict[str, tuple[Callable[[Path], None], str]] = {
    "equal responses": (
        rows_of(lambda rows: [row | {"rejected": row["chosen"]} for row in rows]),
        "holds a pair of two equal responses",
    ),
    "ids of other texts": (
        rows_of(lambda rows: [row | {"record_id": f"{place:064x}"} for place, row in enumerate(rows)]),
        "holds a record_id that is not that of its texts",
    ),
    "a space after a prompt": (
        rows_of(lambda rows: [row | {"prompt": row["prompt"] + " " * (row["n"] % 2)} for row in rows]),
        "holds a record_id that is not that of its texts",
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_no_release_holds_are_refused(bundle: Path, kind: str) -> None:
    change, message = ROWS[kind]
    change(bundle / SHARD)
    (bundle / "_signature").unlink()
    with pytest.raises(UserError, match=message):
        read_release(bundle).check_rows()


def test_a_row_in_another_shard_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in the first of two shards: where the border lies is not the writer's to choose."""
    monkeypatch.setattr("private_rlhf.data.release.ROWS_PER_SHARD", 40)
    facts = json.loads((bundle / "_manifest").read_text()) | {"rows_per_shard": 40}
    write_json(bundle / "_manifest", facts)
    (bundle / "_signature").unlink()
    table = pq.read_table(bundle / SHARD)
    write_shard(bundle / "part-00001.parquet", table.schema, ())
    with pytest.raises(UserError, match="holds rows of another shard"):
        read_release(bundle).check_rows()


def test_a_noisy_sum_of_an_earlier_version_is_refused(bundle: Path) -> None:
    facts = json.loads((bundle / "_manifest").read_text())
    facts["guarantee"] |= {"mechanism": "noisy sum", "keep_prob": 0.5, "flip_prob": 0.5, "delta": 1e-6}
    write_json(bundle / "_manifest", facts)
    (bundle / "_signature").unlink()
    with pytest.raises(UserError, match="states a mechanism or a mark that this program does not; write it again"):
        read_release(bundle)


def test_keep_prob_one_half_is_of_labels(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As at an ε below 2^-127: labels that say nothing, and still labels."""
    facts = json.loads((bundle / "_manifest").read_text())
    facts["guarantee"] |= {"keep_prob": 0.5, "flip_prob": 0.5}
    write_json(bundle / "_manifest", facts)
    (bundle / "_signature").unlink()
    settle(bundle)
    assert verified(bundle) == 0
    assert "60 labels at ε = 1" in capsys.readouterr().out


# --- the folder -------------------------------------------------------------------------------------------------------


def linked(bundle: Path) -> None:
    (bundle / SHARD).rename(bundle.with_name("elsewhere"))
    (bundle / SHARD).symlink_to(bundle.with_name("elsewhere"))


OTHERS: dict[str, Callable[[Path], object]] = {
    "a README": lambda bundle: (bundle / "README.md").write_text("epsilon = 0.01"),
    "raw labels": lambda bundle: (bundle / "raw.jsonl").write_text("{}"),
    "a hidden file": lambda bundle: (bundle / ".y").write_text("1"),
    "a folder": lambda bundle: (bundle / "part-00001.parquet").mkdir(),
    "another spelling": lambda bundle: shutil.copy(bundle / SHARD, bundle / "PART-00001.PARQUET"),
    "a link in place of a shard": linked,
    "a link in place of the manifest": lambda bundle: (
        (bundle / "_manifest").rename(bundle.with_name("m")),
        (bundle / "_manifest").symlink_to(bundle.with_name("m")),
    ),
    "a pipe": lambda bundle: os.mkfifo(bundle / "pipe"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_but_the_declared_files_may_lie_in_the_folder(bundle: Path, kind: str) -> None:
    OTHERS[kind](bundle)
    with pytest.raises(UserError, match="is not a file of the release"):
        read_release(bundle)


# --- the signature's file ---------------------------------------------------------------------------------------------


SIGNATURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "a field more": lambda stated: json_text(stated | {"note": "certified by the regulator"}),
    "fields in another order": lambda stated: json_text(dict(reversed(stated.items()))),
    "names in another order": lambda stated: json_text(
        stated | {"files": dict(reversed(stated["files"].items()))}
    ),
    "other spaces": lambda stated: json.dumps(stated, indent=3) + "\n",
    "a line more": lambda stated: json_text(stated) + "\n",
    "other escapes": lambda stated: json_text(stated).replace("manifest", "\\u006danifest"),
    "a version that is a number with a point": lambda stated: json_text(stated | {"schema_version": 1.0}),
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_signature_file_has_one_form(bundle: Path, kind: str) -> None:
    path = bundle / "_signature"
    path.write_text(SIGNATURES[kind](json.loads(path.read_text())))
    with pytest.raises(UserError, match=r"_signature: has "):
        read_release(bundle)


# --- modes, times, attributes -----------------------------------------------------------------------------------------


def attribute(path: Path) -> None:
    try:
        os.setxattr(path, "user.y", b"0110")
    except OSError:
        pytest.skip("a file system without extended attributes")


METADATA: dict[str, Callable[[Path], None]] = {
    "time of a shard": lambda bundle: os.utime(bundle / SHARD, (0, 1234)),
    "nanoseconds of a shard": lambda bundle: os.utime(bundle / SHARD, ns=(0, PUBLISHED * 10**9 + 1)),
    "mode of a shard": lambda bundle: (bundle / SHARD).chmod(0o640),
    "mode of the folder": lambda bundle: bundle.chmod(0o700),
    "time of the folder": lambda bundle: os.utime(bundle, (0, 1)),
    "attribute of a shard": lambda bundle: attribute(bundle / SHARD),
    "attribute of the folder": attribute,
}


@pytest.mark.parametrize("kind", METADATA)
def test_a_mode_time_or_attribute_that_differs_is_refused(
    bundle: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(bundle) == verified(bundle, "--as-published") == 0
    METADATA[kind](bundle)
    assert verified(bundle) == 2
    assert "which may carry a label" in capsys.readouterr().err


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_release_is_published_with_constant_modes_and_times(made: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        privatize_source(Request(str(made / "raw.jsonl"), tmp_path / "out", 1.0, made / "owner.key"))
    finally:
        os.umask(before)
    assert unpublished(tmp_path / "out") is None
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def by_zip(bundle: Path, target: Path) -> None:
    archive = shutil.make_archive(str(target), "zip", bundle)
    with zipfile.ZipFile(archive) as file:
        file.extractall(target)


def by_writing(bundle: Path, target: Path) -> None:
    """As a download does."""
    target.mkdir()
    for path in bundle.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


COPIES: dict[str, Callable[[Path, Path], object]] = {
    "cp -r": lambda bundle, target: subprocess.run(["cp", "-r", bundle, target], check=True),
    "cp -a": lambda bundle, target: subprocess.run(["cp", "-a", bundle, target], check=True),
    "tar": lambda bundle, target: (
        target.mkdir(),
        subprocess.run(f"tar -c -C {bundle} . | tar -xp -C {target}", shell=True, check=True),
    ),
    "zip": by_zip,
    "a download": by_writing,
}


@pytest.mark.parametrize("kind", COPIES)
def test_an_honest_copy_is_accepted(
    bundle: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    COPIES[kind](bundle, tmp_path / "copy")
    assert verified(tmp_path / "copy") == 0
    keeps = kind in ("cp -a", "tar")
    assert is_copy(tmp_path / "copy") is not keeps
    expected = "modes and times are those " + ("it was published with" if keeps else "of a copy, and not compared")
    assert expected in capsys.readouterr().out
    assert verified(tmp_path / "copy", "--as-published") == (0 if keeps else 2)


# --- what was written before ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["standard", "conversational", "answers"])
def test_releases_of_13e2ce0_open_and_verify(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tests/golden/releases` was written by that commit, under pyarrow 26.0.1."""
    copy = shutil.copytree(GOLDEN / name, tmp_path / name, copy_function=shutil.copyfile)
    assert verified(copy) == 0
    assert ("signed by" in capsys.readouterr().out) is (name != "answers")
    assert len(read_release(copy).rows) == 9
    assert list(read_prompts(copy))
    assert names_bundle(str(copy))


def in_old_layout(bundle: Path, key: Path) -> Path:
    """The bundle under the names that 13e2ce0 gave."""
    (bundle / "_manifest").rename(bundle / "manifest.json")
    (bundle / "_signature").unlink()
    files = {path.name: file_digest(path) for path in sorted(bundle.iterdir())}
    write_json(bundle / "signature.json", sign(load_key(key), files))
    settle(bundle)
    return bundle


def test_an_old_bundle_is_held_to_the_same(made: Path, bundle: Path) -> None:
    """Names of one layout, all signed; a file under the other layout's name is another file."""
    verify_release(in_old_layout(bundle, made / "owner.key"), as_published=True)
    other = bundle.with_name("other")
    for name in ("_signature", "_manifest"):
        shutil.copytree(bundle, other)
        shutil.copy(bundle / f"{name[1:]}.json", other / name)
        with pytest.raises(UserError, match=r"is not a file of the release|is not what was signed"):
            read_release(other)
        shutil.rmtree(other)
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"raw.jsonl"', '"census"'))
    with pytest.raises(UserError, match=r"'manifest\.json' is not what was signed"):
        read_release(bundle)


@pytest.mark.parametrize("gone", [(), ("signature.json",)])
def test_the_same_command_gives_an_old_bundle_the_present_names(
    made: Path, bundle: Path, gone: tuple[str, ...]
) -> None:
    in_old_layout(bundle, made / "owner.key")
    for name in gone:
        (bundle / name).unlink()
    privatize_source(Request(str(made / "raw.jsonl"), bundle, 1.0, made / "owner.key", options=Options(columns=("n",))))
    verify_release(bundle, as_published=True)
    for path in (made / "bundle").iterdir():
        assert (bundle / path.name).read_bytes() == path.read_bytes()
    assert len(list(bundle.iterdir())) == 3


# --- programs of others -----------------------------------------------------------------------------------------------


def test_a_release_loads_as_it_is(bundle: Path, tmp_path: Path) -> None:
    """One shard beside manifest and signature: by count, most files are no Parquet."""
    columns = ["prompt", "chosen", "rejected", "record_id", "n"]
    expected = pq.read_table(bundle / SHARD).to_pylist()
    loaded = datasets.load_dataset(str(bundle), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.column_names == columns
    assert loaded.to_list() == expected
    assert list(datasets.load_dataset(str(bundle), split="train", streaming=True)) == expected
    assert pq.read_table(bundle).to_pylist() == expected
    assert pandas.read_parquet(bundle).to_dict("records") == expected


def test_duckdb_reads_a_release(bundle: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed, so no release is read by it")
    rows = duckdb.sql(f"select * from '{bundle}/*.parquet'").fetchall()
    assert rows == [tuple(row.values()) for row in pq.read_table(bundle).to_pylist()]


@pytest.mark.parametrize("form", ["texts", "messages"])
@pytest.mark.parametrize("kind", ["Reward", "DPO"])
def test_trl_trains_on_a_release_as_it_is(
    bundle: Path, made: Path, tmp_path: Path, checkpoint: Path, kind: str, form: str
) -> None:
    if form == "messages":
        rows = [{name: [{"role": role, "content": f"{name} {i}"}] for name, role in ROLES.items()} for i in range(8)]
        (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        bundle = tmp_path / "messages"
        privatize_source(Request(str(tmp_path / "raw.jsonl"), bundle, 1.0, made / "owner.key"))
    loaded = datasets.load_dataset(str(bundle), split="train", cache_dir=str(tmp_path / "cache"))
    load = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load.from_pretrained(checkpoint, **({"num_labels": 1} if kind == "Reward" else {}))
    model.config.pad_token_id = tokenizer.pad_token_id
    settings = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, report_to="none", bf16=False,
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(model, args=settings, train_dataset=loaded, processing_class=tokenizer)
    assert np.isfinite(trainer.train().training_loss)


def test_memory_does_not_grow_with_the_rows_of_a_shard(bundle: Path) -> None:
    """What is written again is compared as it comes: no second file, no second shard in memory."""
    release = read_release(bundle)
    before = pa.total_allocated_bytes()
    release.check_rows()
    assert pa.total_allocated_bytes() <= before + (1 << 20)
    assert sorted(path.name for path in bundle.iterdir()) == ["_manifest", "_signature", SHARD]
