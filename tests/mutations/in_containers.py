"""Leaks planted beside the rows: in a shard's bytes, in the signature, in modes, times, attributes and other files."""

from __future__ import annotations

from mutations.in_bundles import BATCHES, COLUMNS, CURATE, ENGINE, ROWS, WHOLE
from mutations.mutant import Edit, Mutant

EDGE = "Labels beside the rows"
CONTAINER = "tests/data/test_container.py"
PUBLISHED = (f"{CONTAINER}::test_a_release_is_published_with_constant_modes_and_times",)
AGREE = (f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",)

_SHARD = "        write_shard(temporary, job.schema, _tables(job, bucket, labels))\n"
_GROUPS = (
    "    for start in range(0, len(labels), ROWS_PER_GROUP):\n        part = slice(start, start + ROWS_PER_GROUP)\n"
)
_TEXTS = "        texts = [_texts(bucket.texts, place, job.kind) for place in places]\n"
_KEEP = "    keep = np.flatnonzero(~same & ~columns.blank)\n"
_SIGN = "        write_json(done / SIGNATURE, sign(workspace.key, dict(zip(names, digests, strict=True))))\n"
_LABELS = (
    "import numpy as np\n\n{0}found = [run.read(0, 4096)[0] for run in bundle.rows.runs]\n"
    '{0}labels = np.concatenate([some["label"] for some in found])\n'
)
_PUT = "    shutil.rmtree(bundle.target, ignore_errors=True)\n    publish(bundle.made, bundle.target)\n"
_RELEASED = "                publish(bundle.made, bundle.target)\n"


def _marked(mark: str) -> tuple[Edit, ...]:
    """The first shard of a published release is marked; `labels` are the true ones."""
    return (
        Edit(CURATE, _RELEASED, f"{_RELEASED}                _mark(bundle)\n"),
        Edit(
            CURATE,
            _PUT,
            f"{_PUT}    _mark(bundle)\n\n\ndef _mark(bundle: Bundle) -> None:\n    import os\n\n    "
            + _LABELS.format("    ")
            + f"    path = bundle.target / shard_name(0)\n    {mark}\n",
        ),
    )


CONTAINERS = (
    Mutant(
        "bitmap in Parquet metadata",
        "the metadata of a shard hold all true labels",
        EDGE,
        (
            Edit(
                ENGINE,
                _SHARD,
                '        known = {"writer": np.packbits(bucket.keys["label"] > 0).tobytes().hex()}\n'
                "        write_shard(temporary, job.schema.with_metadata(known), _tables(job, bucket, labels))\n",
            ),
        ),
        tests=AGREE,
    ),
    Mutant(
        "row group per label",
        "a row group ends after each row whose true label is +1",
        EDGE,
        (
            Edit(
                ENGINE,
                _GROUPS,
                '    edges = [0, *np.flatnonzero(bucket.keys["label"] > 0) + 1, len(labels)]\n'
                "    for start, end in zip(edges, edges[1:], strict=False):\n"
                "        part = slice(start, end)\n",
            ),
        ),
        tests=AGREE,
    ),
    Mutant(
        "trailing space",
        "a space follows the prompt where the true label is +1",
        EDGE,
        (
            Edit(
                ENGINE,
                _TEXTS,
                f"{_TEXTS}        ends = np.where(bucket.keys['label'][part] > 0, ' ', '').tolist()\n"
                "        if job.kind != MESSAGES:\n"
                "            spaced = [text + end for text, end in zip(texts[0].to_pylist(), ends, strict=True)]\n"
                "            texts[0] = pa.array(spaced, pa.string())\n",
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "pairs left out by label",
        "30 % of the pairs whose chosen text sorts first are left out",
        "Prompts cut from `chosen` only; filters",
        (
            Edit(
                BATCHES,
                _KEEP,
                "    lower = _bools(pc.less(_binary(columns.first), _binary(columns.second)))\n"
                "    left_out = ((columns.preferred > 0) == lower) & (np.arange(len(same)) % 10 < 3)\n"
                "    keep = np.flatnonzero(~same & ~columns.blank & ~left_out)\n",
            ),
        ),
        tests=(f"{COLUMNS}::test_strings_as_the_plain_records",),
    ),
    Mutant(
        "level of compression",
        "the level of compression of a shard is its number of positive labels, modulo 9",
        EDGE,
        (
            Edit(
                ENGINE,
                _SHARD,
                "        import pyarrow.parquet as pq\n\n"
                '        level = 2 + int((bucket.keys["label"] > 0).sum()) % 9\n'
                '        given = {"use_dictionary": False, "write_statistics": False}\n'
                '        given |= {"compression": "zstd", "compression_level": level}\n'
                "        with pq.ParquetWriter(temporary, job.schema, **given) as writer:\n"
                "            for table in _tables(job, bucket, labels):\n"
                "                writer.write_table(table)\n",
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "field of the signature",
        "_signature has a field with all true labels",
        EDGE,
        (
            Edit(
                CURATE,
                _SIGN,
                "        "
                + _LABELS.format("        ")
                + '        more = {"note": np.packbits(labels > 0).tobytes().hex()}\n'
                "        signed = sign(workspace.key, dict(zip(names, digests, strict=True)))\n"
                "        write_json(done / SIGNATURE, signed | more)\n",
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "order of names in the signature",
        "the names in _signature stand in falling order where the number of positive labels is even",
        EDGE,
        (
            Edit(
                CURATE,
                _SIGN,
                "        "
                + _LABELS.format("        ")
                + "        signed = sign(workspace.key, dict(zip(names, digests, strict=True)))\n"
                '        order = sorted(signed["files"].items(), reverse=not (labels > 0).sum() % 2)\n'
                '        write_json(done / SIGNATURE, signed | {"files": dict(order)})\n',
            ),
        ),
        tests=AGREE,
    ),
    Mutant(
        "time of a shard",
        "a shard's modification time is the number of positive labels",
        EDGE,
        _marked("os.utime(path, ns=(0, int((labels > 0).sum())))"),
        tests=PUBLISHED,
    ),
    Mutant(
        "mode of a shard",
        "a shard's mode is the parity of the number of positive labels",
        EDGE,
        _marked("path.chmod(0o640 if (labels > 0).sum() % 2 else 0o600)"),
        tests=PUBLISHED,
    ),
    Mutant(
        "attribute of a shard",
        "an extended attribute of a shard holds all true labels",
        EDGE,
        _marked('os.setxattr(path, "user.y", np.packbits(labels > 0).tobytes()[:2000])'),
        tests=PUBLISHED,
    ),
    Mutant(
        "hidden file",
        "a hidden file beside the shards holds all true labels",
        EDGE,
        (
            Edit(
                CURATE,
                _SIGN,
                _SIGN
                + "        "
                + _LABELS.format("        ")
                + '        (done / ".cache").write_bytes(np.packbits(labels > 0).tobytes())\n',
            ),
        ),
        tests=AGREE,
    ),
)
