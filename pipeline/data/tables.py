"""The two halves of a release as pure functions on Arrow tables, for engines that divide and sort rows themselves.

No file, store or ledger is read or written: nothing counts ε here, and nothing stops a label that changed from being
drawn again. `private-rlhf privatize` keeps a ledger and writes a release.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from private_rlhf.core.errors import UserError
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.engine import PER_ROW
from private_rlhf.data.formats import explicit_text
from private_rlhf.data.layout import Layout
from private_rlhf.data.release import release_schema
from private_rlhf.data.sources import table_rows
from private_rlhf.privacy import batches
from private_rlhf.privacy.keys import PrivacyKey, as_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.sorted_runs import strings_of

TEXTS = ("record_id", "prompt", "response_a", "response_b", "labeler", "event")
CANONICAL = pa.schema({**dict.fromkeys(TEXTS, pa.string()), "label": pa.int8(), "position": pa.int64()})
"""Columns of canonical rows. They hold true labels: whatever carries them is for the owner only."""


def canonicalize(
    batch: pa.Table | pa.RecordBatch, labeler_column: str | None = None, event_column: str | None = None
) -> pa.Table:
    """Put pairs into an order that does not depend on their labels, and name them; needs no key.

    Args:
        batch: texts `prompt`, `chosen`, `rejected`, and whole numbers `position` that rise in the order of the input.
        labeler_column, event_column: columns of texts that say who gave the label, and which of their answers it is.

    Returns:
        `record_id`, `prompt`, `response_a`, `response_b`, `labeler`, `event`, `label` (+1 if response_a was preferred)
        and `position`. Pairs of two equal responses, and pairs with an empty text, are left out.

    Raises:
        UserError: a column is missing, or a row is not a pair of texts.
    """
    table = _table(batch, "batch")
    numbered = table["position"] if "position" in table.schema.names else None
    if numbered is None or not pa.types.is_integer(numbered.type) or numbered.null_count:
        raise UserError("position must be a column of whole numbers, got another or none: number the rows of the input")
    layout = Layout(Options(labeler_column, event_column, fold_names=True), explicit_text)
    columns = layout.fast_columns(table)
    if columns is None:
        columns = layout.row_columns(table_rows([table]), "batch, row")
    rows = batches.canonicalize(columns, 0, None)
    places = batches.arrow_places(rows.keys["position"].astype(np.int64))
    texts, first = strings_of(rows.keys, rows.blob).view(pa.large_string()), np.arange(len(places)) * PER_ROW
    lower = batches.a_is_lower(rows.keys)
    found = {
        "record_id": pa.array([name.hex() for name in batches.id_bytes(rows.keys)], pa.string()),
        "prompt": texts.take(batches.arrow_places(first + 1)),
        "response_a": texts.take(batches.arrow_places(first + np.where(lower, 2, 3))),
        "response_b": texts.take(batches.arrow_places(first + np.where(lower, 3, 2))),
        "labeler": pa.array(columns.labelers or [""] * len(table), pa.string()).take(places),
        "event": pa.array(columns.events or [""] * len(table), pa.string()).take(places),
        "label": pa.array(rows.keys["label"].tolist(), pa.int8()),
        "position": numbered.take(places),
    }
    return pa.table(found).cast(CANONICAL)


def _table(batch: pa.Table | pa.RecordBatch, name: str) -> pa.Table:
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if not isinstance(batch, pa.Table):
        raise UserError(f"{name} must be a pyarrow.Table, got {type(batch).__name__}: convert it")
    return batch


def release(sorted_batch: pa.Table | pa.RecordBatch, key: PrivacyKey | str | Path, epsilon: float) -> pa.Table:
    """Randomise the labels of canonical rows, at `epsilon`-label-LDP: rows of a release, in its order.

    The same rows, key and ε give the same labels, and labels at several ε cost the largest of them together. Of rows
    with one record, labeller and event the first by `position` stays.

    Args:
        sorted_batch: what `canonicalize` returned, with all rows of each record id that it has any row of.
        key: a key, or the path of a file that `private-rlhf keygen` made.
        epsilon: finite, above 0; smaller is more private.

    Returns:
        `prompt`, `chosen` (what the private label prefers), `rejected`, `record_id`.

    Raises:
        UserError: an invalid ε, label or key, or a table of other columns or with nulls.
    """
    mechanism, prf, rows = RandomizedResponse(epsilon), as_key(key).prf, _table(sorted_batch, "sorted_batch")
    whole = rows.schema.names == CANONICAL.names and pa.types.is_integer(rows["label"].type)
    if not whole or any(column.null_count for column in rows.columns):
        names = ", ".join(CANONICAL.names)
        raise UserError(f"sorted_batch must hold {names}, none of them null: give what canonicalize returned")
    try:
        rows = rows.cast(CANONICAL).combine_chunks()  # engines widen texts and numbers on the way
    except pa.ArrowInvalid as error:
        raise UserError(f"sorted_batch must hold what canonicalize returned, got {error}: give that") from None
    named = pc.all(pc.match_substring_regex(rows["record_id"], "^[0-9a-f]{64}$"), min_count=0).as_py()
    if not named or (pc.min(rows["position"]).as_py() or 0) < 0:
        raise UserError("record_id and position must be those of canonicalize, got others: give what it returned")
    keys = np.zeros(len(rows), batches.KEYS)
    keys["id"] = np.frombuffer(bytes.fromhex("".join(rows["record_id"].to_pylist())), ">u8").reshape(-1, 4)
    for name in ("label", "position"):
        keys[name] = rows[name].to_pylist()
    batches.name_events(keys, rows["labeler"].to_pylist(), rows["event"].to_pylist(), prf)
    order = batches.event_order(keys)
    first, places = batches.first_of_each(keys[order]), keys["position"][order]
    if (~first[1:] & (places[1:] == places[:-1])).any():  # which label stays would depend on the order of arrival
        raise UserError("position must differ between rows, got one twice for a pair: number the rows of all files")
    order = order[first]
    prefers_b = batches.release_labels(mechanism, prf, keys[order]) == -1
    responses = pa.chunked_array([*rows["response_a"].chunks, *rows["response_b"].chunks], pa.string())
    kept = batches.arrow_places(order)
    chosen, rejected = (
        responses.take(batches.arrow_places(order + len(rows) * is_b)) for is_b in (prefers_b, ~prefers_b)
    )
    columns = [rows["prompt"].take(kept), chosen, rejected, rows["record_id"].take(kept)]
    return pa.table(columns, schema=release_schema("standard"))
