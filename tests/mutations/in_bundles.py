"""Leaks planted into bundles: order, ids, files and what stands beside the rows."""

from __future__ import annotations

from mutations.mutant import Edit, Mutant

BATCHES, ENGINE, CURATE = "pipeline/privacy/batches.py", "pipeline/data/engine.py", "pipeline/data/curate.py"
PRIVATIZE, PROTECTED = "pipeline/stages/privatize.py", "pipeline/data/raw_source.py"
ROWS, WHOLE = "tests/data/test_curate_rows.py", "tests/data/test_curate.py"
COLUMNS, STAGE = "tests/privacy/test_batches.py", "tests/stages/test_privatize_stage.py"

_BUCKET = "    bucket = read_bucket(rows, shard, job.bits, texts=not target.exists())\n"
_ORDERED = "bucket = Bucket(bucket.keys[order], bucket.duplicates, bucket.order[order], bucket.texts)\n"
_TABLE = '        beside = [_hexadecimal(bucket.keys["id"][part])]\n'
_SHARD = "        write_shard(temporary, job.schema, _tables(job, bucket, labels))\n"
_MANIFEST = "    write_json(done / MANIFEST, manifest.as_dict())\n"


def _after(file: str, old: str, new: str) -> Edit:
    return Edit(file, old, old + new)


def _before(file: str, old: str, new: str) -> Edit:
    return Edit(file, old, new + old)


ORDER = (
    Mutant(
        "A",
        "the rows of a shard in the order of their true labels",
        "Rows or shards in an order that labels decide",
        (_after(ENGINE, _BUCKET, f'    order = np.argsort(bucket.keys["label"], kind="stable")\n    {_ORDERED}'),),
        tests=(f"{ROWS}::test_rows_are_accounted_for_and_ordered",),
    ),
    Mutant(
        "A2",
        "the same in shards of more than 2,000 rows alone",
        "Rows or shards in an order that labels decide",
        (
            _after(
                ENGINE,
                _BUCKET,
                '    if len(bucket.keys) > 2000:\n        order = np.argsort(bucket.keys["label"], kind="stable")\n'
                f"        {_ORDERED}",
            ),
        ),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
    Mutant(
        "order within a byte",
        "rows whose ids begin with the same byte in the order of their true labels",
        "Rows or shards in an order that labels decide",
        (
            _after(
                ENGINE,
                _BUCKET,
                '    order = np.lexsort((bucket.keys["label"], bucket.keys["id"][:, 0] >> np.uint64(56)))\n'
                f"    {_ORDERED}",
            ),
        ),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
    Mutant(
        "parity of the id",
        "the last bit of record_id says whether the lower text was preferred",
        "Ids hash (prompt, chosen, rejected) in that order",
        (
            _before(
                ENGINE,
                _TABLE,
                '        ids = bucket.keys["id"][part].copy()\n'
                '        lower_wins = (bucket.keys["label"][part] == 1) == a_is_lower(bucket.keys[part])\n'
                "        ids[:, 3] = ids[:, 3] & ~np.uint64(1) | lower_wins.astype(np.uint64)\n",
            ),
            Edit(ENGINE, '_hexadecimal(bucket.keys["id"][part])', "_hexadecimal(ids)"),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "id of the ordered pair",
        "record_id is a digest of the pair with the chosen response first",
        "Ids hash (prompt, chosen, rejected) in that order",
        (
            Edit(
                BATCHES,
                "    swapped = _bools(pc.greater(first, second))[keep]\n",
                "    swapped = columns.preferred[keep] < 0\n",
            ),
        ),
        tests=(f"{COLUMNS}::test_strings_as_the_plain_records",),
    ),
    Mutant(
        "row groups",
        "where a row group of the Parquet file ends depends on the number of positive labels",
        "Rows or shards in an order that labels decide",
        (
            Edit(
                ENGINE,
                "    for start in range(0, len(labels), ROWS_PER_GROUP):\n"
                "        part = slice(start, start + ROWS_PER_GROUP)\n",
                '    step = 1000 + int((bucket.keys["label"] > 0).sum()) % 97\n'
                "    for start in range(0, len(labels), step):\n        part = slice(start, start + step)\n",
            ),
        ),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
    Mutant(
        "added column",
        "a column beside the pair holds the true label",
        "Extra columns (`score`",
        (
            Edit(
                ENGINE,
                "        plain = [field.remove_metadata() for field in self.extra]  # the note that a text is JSON"
                " stays here\n",
                '        plain = [*self.extra, pa.field("bucket", pa.int8())]\n',
            ),
            Edit(
                ENGINE,
                '*extra], schema=job.schema)\n',
                '*extra, pa.array(bucket.keys["label"][part].tolist(), pa.int8())], schema=job.schema)\n',
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "held-out pairs",
        "how many pairs are held out for evaluation depends on the labels",
        "The held-out tenth",
        (
            Edit(
                PROTECTED,
                "        count = total - held_out(total)\n",
                "        import numpy as np\n\n        from private_rlhf.privacy.events import ENTRY\n\n"
                '        labels = np.concatenate([np.fromfile(part.path, ENTRY)["label"] for part in survey.pieces])\n'
                "        count = total - held_out(total) - int((labels > 0).sum()) % 97\n",
            ),
        ),
        tests=(f"{STAGE}::test_a_file_gives_its_last_tenth_to_the_evaluation",),
        attacks=("stage",),
    ),
    Mutant(
        "J",
        "of copies that contradict each other the one with the label +1 is kept",
        "Copies of a pair that contradict each other",
        (Edit(BATCHES, '        columns = (some["position"], tags', '        columns = (-some["label"], tags'),),
        tests=(f"{ROWS}::test_conflicting_copies_keep_the_first",),
        attacks=("copies",),
    ),
    Mutant(
        "dropped rows",
        "rows with an empty response are counted where the chosen one is empty",
        "Prompts cut from `chosen` only; filters",
        (
            Edit(
                BATCHES,
                "int((columns.blank & ~same).sum())",
                "int((columns.blank & ~same & blank_texts(columns.first)).sum())",
            ),
        ),
        tests=(f"{COLUMNS}::test_strings_as_the_plain_records",),
    ),
)

BESIDE = (
    Mutant(
        "E",
        "quality.json in the bundle holds the number of labels that were kept",
        "Flip counts, agreement rates or samples of true labels",
        (
            _before(
                ENGINE,
                "    with new_file(target, beside=job.folder) as temporary:\n",
                '    kept = {"kept": int((labels == bucket.keys["label"]).sum())}\n'
                '    (job.folder / "quality.json").write_text(json.dumps(kept))\n',
            ),
        ),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
    Mutant(
        "G",
        "evaluation labels are raw and their manifest states ε",
        "Exact win rates, accuracies or baselines on raw labels",
        (Edit(PRIVATIZE, "         by,\n", '         PublicLabels() if name == "evaluation" else by,\n'),),
        tests=(f"{STAGE}::test_a_file_gives_its_last_tenth_to_the_evaluation",),
        attacks=("stage",),
    ),
    Mutant(
        "label balance",
        "the manifest says how many labels prefer response_a",
        "Flip counts, agreement rates or samples of true labels",
        (
            Edit(
                CURATE,
                _MANIFEST,
                '    labels = [run.read(0, 4096)[0]["label"] for run in bundle.rows.runs]\n'
                '    more = {"statistics": {"positives": sum(int((some > 0).sum()) for some in labels)}}\n'
                "    write_json(done / MANIFEST, manifest.as_dict() | more)\n",
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "Parquet metadata",
        "the schema of a shard holds the number of positive labels",
        "Flip counts, agreement rates or samples of true labels",
        (
            Edit(
                ENGINE,
                _SHARD,
                '        known = {"positives": str(int((bucket.keys["label"] > 0).sum()))}\n'
                "        write_shard(temporary, job.schema.with_metadata(known), _tables(job, bucket, labels))\n",
            ),
        ),
        tests=(f"{WHOLE}::test_the_bytes_and_the_refusals_of_the_plain_way",),
    ),
    Mutant(
        "work left in the bundle",
        "a sorted run with its true labels stays in the bundle as a cache",
        "Raw labels on their way",
        (_after(CURATE, _MANIFEST, '    shutil.copy(bundle.rows.runs[0].path, done / "cache.bin")\n'),),
        tests=(f"{ROWS}::test_where_every_private_label_agrees_the_bytes_agree",),
    ),
)
