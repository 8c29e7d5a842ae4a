"""The container of a release: shards with fixed writer settings, a closed list of files, fixed modes and times.

Written again from its rows, a shard gives the same bytes under one version of pyarrow. So nothing beside the rows can
carry a label: metadata of Parquet, borders of row groups and pages, compression, further files, links, modes, times and
extended attributes are all fixed.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from private_rlhf.core.errors import UserError

ROWS_PER_GROUP = 8192
FILE_MODE, FOLDER_MODE = 0o644, 0o755
PUBLISHED = 315_619_200
"""Modification time of what is published: 2 January 1980, the first day that a zip file states in every time zone."""
EXTRA_TYPES = (pa.string(), pa.bool_(), pa.int64(), pa.float64())
"""Of the columns beside prompt, responses and id."""
_WRITER = re.compile(r"parquet-cpp-arrow version (\d{1,3}\.\d{1,3}\.\d{1,3})")


def write_shard(target: Path | io.RawIOBase, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Write one shard; the groups become row groups and have at most ROWS_PER_GROUP rows."""
    with pq.ParquetWriter(
        target, schema, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False
    ) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=ROWS_PER_GROUP)


# --- what is in the folder --------------------------------------------------------------------------------------------


def check_files(folder: Path, names: Collection[str]) -> None:
    """UserError if the folder holds anything but these regular files. Links count as other files."""
    with os.scandir(folder) as entries:
        others = sorted(one.name for one in entries if one.name not in names or not one.is_file(follow_symlinks=False))
    if others:
        raise UserError(
            f"{folder / others[0]}: is not a file of the release, which has only its manifest, signature and shards:"
            " move it elsewhere"
        )


def writer_version(path: Path, footer: pq.FileMetaData) -> str:
    """The version of pyarrow that wrote the shard. UserError if its footer is not one that `write_shard` leaves."""
    writer = _WRITER.fullmatch(footer.created_by)
    groups = [footer.row_group(place) for place in range(footer.num_row_groups)]
    full = [ROWS_PER_GROUP] * (len(groups) - 1)
    sound = (
        list(footer.metadata or ()) == [b"ARROW:schema"]
        and [group.num_rows for group in groups[:-1]] == full
        and all(0 < group.num_rows <= ROWS_PER_GROUP for group in groups)
    )
    if writer is None or not sound:
        raise _other_settings(path)
    return writer[1]


def check_columns(path: Path) -> None:
    """UserError if a column was written with other settings than those of `write_shard`. The rows were read before."""
    footer = pq.read_metadata(path)
    groups = map(footer.row_group, range(footer.num_row_groups))
    # pyarrow ends the process at the column of a damaged footer, unless reading has refused it before
    if not all(_has_our_settings(group.column(place)) for group in groups for place in range(group.num_columns)):
        raise _other_settings(path)


def _other_settings(path: Path) -> UserError:
    return UserError(
        f"{path}: was not written with the settings of a release (metadata, row groups, compression), so it may carry"
        " more than its rows; ask its holder for the release as it was written"
    )


def _has_our_settings(column: Any) -> bool:
    plain = column.compression == "ZSTD" and set(column.encodings) <= {"PLAIN", "RLE"}
    return plain and not (column.is_stats_set or column.has_dictionary_page or column.bloom_filter_length)


def differs_from_rows(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bool:
    """Write the shard's batches again, of ROWS_PER_GROUP rows each, and compare with its bytes. Nothing is stored."""
    with path.open("rb") as file:
        sink = _Comparison(file)
        write_shard(sink, schema, (pa.Table.from_batches([batch]).cast(schema) for batch in batches))
        return sink.differs or file.read(1) != b""


class _Comparison(io.RawIOBase):
    """A file to write to that compares what it gets with another file."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file, self.position, self.differs = file, 0, False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any) -> int:
        size = len(data)
        self.differs = self.differs or self.file.read(size) != bytes(data)
        self.position += size
        return size


# --- modes, times, attributes -----------------------------------------------------------------------------------------


def settle(folder: Path) -> None:
    """Give the folder and its files the modes and times of a release, and remove their extended attributes."""
    for path in (*folder.iterdir(), folder):
        for name in _attributes(path):
            os.removexattr(path, name)
        path.chmod(_mode(path))
        os.utime(path, (PUBLISHED, PUBLISHED))


def unpublished(folder: Path) -> str | None:
    """The first thing whose mode, time or attributes are not those that `settle` gives; None if there is none."""
    for path in (*sorted(folder.iterdir()), folder):
        info = path.stat()
        if attributes := _attributes(path):
            return f"{path}: has the extended attribute {attributes[0]!r}"
        if info.st_mtime_ns != PUBLISHED * 10**9:
            return f"{path}: has another modification time than a release is published with"
        if stat.S_IMODE(info.st_mode) != _mode(path):
            return f"{path}: has mode {stat.S_IMODE(info.st_mode):o}, not {_mode(path):o}"
    return None


def is_copy(folder: Path) -> bool:
    """True if no file has the time of publication: a tool that copies sets its own times."""
    return all(path.stat().st_mtime_ns != PUBLISHED * 10**9 for path in folder.iterdir())


def _mode(path: Path) -> int:
    return FOLDER_MODE if path.is_dir() else FILE_MODE


def _attributes(path: Path) -> list[str]:
    """Extended attributes, but for those that the system itself sets (labels of SELinux and the like)."""
    if not hasattr(os, "listxattr"):  # pragma: no cover (macOS)
        return []
    try:
        return sorted(name for name in os.listxattr(path) if not name.startswith("security."))
    except OSError:  # a file system without attributes
        return []
