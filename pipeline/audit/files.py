"""Attacks on the other files: which response do they hold, and which one first? Leaks 3 and 7.

Fine-tuning data made of the chosen answers, samples in a log, a cache of the raw rows, a raw copy: each holds the
texts of events in a way that depends on their labels. Files are searched as bytes (decompressed where they are gzip),
as rows where they are data files, for pieces of text that belong to only one response of one event.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import bins, by_cells, by_sign, crossed
from private_rlhf.audit.view import View, file_rows, plain_text
from private_rlhf.core.documents import read_json
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import is_public
from private_rlhf.data.render import Renderer

PIECE = 16  # bytes of a response that are searched for
STARTS = 24  # bytes within which a piece starts, or at the response's end; the first that is its own is taken
MOST_EVENTS = 50_000  # whose texts are searched for
LARGEST = 1 << 26  # bytes of a file that are searched
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".png", ".svg")
MODEL_FILE = re.compile(r"(adapter_|pytorch_)?model.*\.(safetensors|bin)|.*\.(pth?|gguf)")
NEVER = np.iinfo(np.int64).max
_PIECE = re.compile(rb"[^\x00-\x1f\x7f-\xff\"\\<>&'/]{%d}" % PIECE)


def texts_in_files(view: View) -> Iterator[Guesses]:
    """For each file that is not a table: the response it holds, the one it holds first, the one it holds more often."""
    pieces = own_pieces(view)
    if not pieces:
        return
    for path in view.files:
        if path in view.table_files or path.suffix.lower() in WEIGHTS:
            continue
        first_seen = positions(content(path), pieces, view.size)
        held = first_seen < NEVER
        if not held.any():
            continue
        name = _relative(path, view)
        one, two = held[:, 0].astype(np.int64), held[:, 1].astype(np.int64)
        events, order = np.arange(view.size), np.sign(first_seen[:, 1] - first_seen[:, 0])
        yield by_sign("texts in files", f"{name}: the response it holds", events, one - two)
        yield by_sign("texts in files", f"{name}: the response it holds first", events, order * one * two)
        cells = np.where(held.any(axis=1), 2 * one + two, -1)
        signs = [view.own_z(table) for table in view.tables[:1]]
        yield by_cells(view, "texts in files", f"{name}: what it holds, and z", crossed(cells, order, *signs))


def own_pieces(view: View) -> dict[bytes, tuple[int, int]]:
    """piece -> (event, 0 for the first response or 1 for the second), for pieces that belong to only one response.

    A piece has 16 bytes without quotes, backslashes or control characters, so that JSON leaves it as it is.
    """
    times: Counter[bytes] = Counter()
    offered: list[tuple[int, int, list[bytes]]] = []
    for event in range(min(view.size, MOST_EVENTS)):
        for which, text in enumerate((view.first[event], view.second[event])):
            pieces = _pieces(plain_text(text))
            offered.append((event, which, pieces))
            times.update(set(pieces))
    unique = ((next((piece for piece in pieces if times[piece] == 1), None), event, which)
              for event, which, pieces in offered)  # fmt: skip
    return {piece: (event, which) for piece, event, which in unique if piece is not None}


def _pieces(text: str) -> list[bytes]:
    """The first pieces of a text and its last one; a text shorter than a piece has none."""
    data = text.encode("utf-8", "replace")
    pieces = [data[start : start + PIECE] for start in range(0, min(STARTS, len(data) - PIECE) + 1, 4)]
    return [piece for piece in (*pieces, data[-PIECE:]) if _PIECE.fullmatch(piece)]


def content(path: Path) -> bytes:
    """The file's bytes to search, at most 64 MiB: decompressed if gzip, rows as JSON if a compressed data file."""
    name = path.name.lower()
    try:
        if name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                return file.read(LARGEST)
        if name.endswith((".parquet", ".arrow", ".feather")):
            return _rows_as_text(path)
        with path.open("rb") as file:
            return file.read(LARGEST)
    except (OSError, EOFError, zlib.error):
        return b""


def _rows_as_text(path: Path) -> bytes:
    lines, size = [], 0
    try:
        for row in file_rows(path):
            lines.append(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace"))
            size += len(lines[-1])
            if size > LARGEST:
                break
    except UserError:
        pass  # damaged from here on: what was read counts
    return b"\n".join(lines)


def positions(data: bytes, pieces: dict[bytes, tuple[int, int]], events: int) -> np.ndarray:
    """(events, 2) int64: where each response's piece first stands in the data, `NEVER` if nowhere.

    Windows of 16 bytes are two 64-bit words; the first is looked up in the sorted first words of the pieces, and only
    the few windows that are found there are compared in full.
    """
    first_seen = np.full((events, 2), NEVER, dtype=np.int64)
    if len(data) < PIECE:
        return first_seen
    heads = np.unique(np.frombuffer(b"".join(piece[:8] for piece in pieces), dtype="<u8"))
    raw = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 22
    for start in range(0, len(data) - PIECE + 1, step):
        block = raw[start : start + step + 7].astype(np.uint64)
        words = np.zeros(len(block) - 7, dtype=np.uint64)
        for byte in range(8):
            words |= block[byte : byte + len(words)] << np.uint64(8 * byte)
        at = np.searchsorted(heads, words)
        hits = np.flatnonzero(heads[np.minimum(at, len(heads) - 1)] == words) + start
        for place in hits.tolist():
            owner = pieces.get(data[place : place + PIECE])
            if owner is not None and first_seen[owner] == NEVER:
                first_seen[owner] = place
    return first_seen


def _relative(path: Path, view: View) -> str:
    root = next((root for root in view.roots if root in path.parents), path.parent)
    return str(path.relative_to(root))


MOST_ASKED = 2000
MOST_TOKENS = 512
BATCH = 16


def checkpoints(view: View) -> Iterator[Guesses]:
    """Guesses from every loadable checkpoint, and from pairs of language models. The others, adapters too, go into
    `view.untried`."""
    events = _events(view)
    if not len(events):
        return
    language: dict[str, np.ndarray] = {}
    for folder, kind in model_folders(view).items():
        name, margins = _relative(folder, view), model_margins(view, folder, kind, events) if kind else None
        if margins is None:
            view.untried.append(f"the checkpoint {name} (it does not load as a whole model)")
            continue
        yield from _from_margins(view, name, events, margins)
        if kind == "language":
            language[name] = margins
    for one, two in combinations(language, 2):
        yield from _from_margins(view, f"{two} against {one}", events, language[two] - language[one])


def _events(view: View) -> np.ndarray:
    """The first events of the first table with labels."""
    for table in view.tables:
        if table.epsilon is not None and not is_public(table.epsilon):
            return np.sort(table.event)[:MOST_ASKED]
    return np.arange(min(view.size, MOST_ASKED))


def model_folders(view: View) -> dict[Path, str | None]:
    """"reward", "language" or None (another one, or an adapter) for each folder of weights below the roots."""
    folders: dict[Path, str | None] = {}
    kinds = {"SequenceClassification": "reward", "CausalLM": "language"}
    configured = {path.parent for path in view.files if path.name in ("config.json", "adapter_config.json")}
    for path in view.files:
        folder = path.parent
        if not (MODEL_FILE.fullmatch(path.name) or (path.suffix == ".safetensors" and folder in configured)):
            continue
        try:
            name = str((read_json(folder / "config.json").get("architectures") or [""])[0])
        except (OSError, ValueError, AttributeError, TypeError, LookupError):
            name = ""
        folders[folder] = next((kind for mark, kind in kinds.items() if mark in name), None)
    return folders


def model_margins(view: View, folder: Path, kind: str, events: np.ndarray) -> np.ndarray | None:
    """(m,) float64 margin of the first response over the second; None where the checkpoint does not load. UserError:
    the extra `audit` is not installed."""
    check_installed("audit")
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    loader: Any = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        model = loader.from_pretrained(str(folder), dtype=torch.float32, use_safetensors=True).eval()
        renderer = Renderer(tokenizer, MOST_TOKENS, MOST_TOKENS)
        rows = [
            (_prompt_ids(renderer, view.prompts[event]), renderer.response_ids(plain_text(text)))
            for event in events
            for text in (view.first[event], view.second[event])
        ]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    score = _reward_scores if kind == "reward" else _log_likelihoods
    values = score(model, rows)
    return values[0::2] - values[1::2]


def _prompt_ids(renderer: Renderer, prompt: Any) -> list[int]:
    """Token ids of the prompt; of its end where it is very long; plain text where there is no chat template."""
    if renderer.tokenizer.chat_template is None:
        ids = renderer.tokenizer(plain_text(prompt), add_special_tokens=False)["input_ids"]
    else:
        ids = renderer.prompt_ids(prompt) if renderer.fits(prompt) else renderer.prompt_ids(plain_text(prompt)[-500:])
    return list(ids)[-MOST_TOKENS:]


def _batches(rows: list[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], Any, Any]]:
    """(row numbers, ids (B, T) int64, mask (B, T) int64), rows of similar length together, padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    texts = [torch.tensor(prompt + response) for prompt, response in rows]
    order = sorted(range(len(rows)), key=lambda number: len(texts[number]))
    for start in range(0, len(order), BATCH):
        picked = order[start : start + BATCH]
        ids = pad_sequence([texts[number] for number in picked], batch_first=True)
        mask = pad_sequence([torch.ones_like(texts[number]) for number in picked], batch_first=True)
        yield picked, ids, mask


def _reward_scores(model: Any, rows: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """(n,) raw score of each row: the linear head on the last token's state, and on the sum of all tokens' states where
    it has two outputs (`private_rlhf.reward_models.model`)."""
    import torch

    values = np.zeros(len(rows))
    backbone = getattr(model, model.base_model_prefix)
    with torch.no_grad():
        for picked, ids, mask in _batches(rows):
            hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(ids)), mask.sum(dim=1) - 1].float()
            score = last @ model.score.weight[0].float()
            if len(model.score.weight) == 2:
                score += (mask[..., None] * hidden.float()).sum(dim=1) @ model.score.weight[1].float()
            values[picked] = score.numpy()
    return values


def _log_likelihoods(model: Any, rows: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """(n,) mean log-probability of the response's tokens, nats per token."""
    import torch

    values = np.zeros(len(rows))
    with torch.no_grad():
        for picked, ids, mask in _batches(rows):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            taken = logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(dim=-1)
            for place, number in enumerate(picked):
                start, count = len(rows[number][0]) - 1, len(rows[number][1])
                values[number] = float(taken[place, start : start + count].mean())
    return values


def _from_margins(view: View, name: str, events: np.ndarray, margins: np.ndarray) -> Iterator[Guesses]:
    """The sign; the sign among the surest tenth; margin and z together, fitted on the known half."""
    yield by_sign("checkpoints", f"{name}: sign of the margin", events, margins)
    size = np.abs(margins)
    surest = np.where(size >= np.quantile(size, 0.9), margins, 0.0)
    yield by_sign("checkpoints", f"{name}: surest tenth", events, surest)
    cells = np.full(view.size, -1, dtype=np.int64)
    cells[events] = bins(margins)
    yield by_cells(view, "checkpoints", f"{name}: margin and z", crossed(cells, view.own_z(view.tables[0])))
