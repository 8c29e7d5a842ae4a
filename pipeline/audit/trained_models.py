"""Attacks on trained models: does a checkpoint tell a canary's label better than its z does? Leak 3, and memory.

Every transformers checkpoint below the roots is asked for its margin between the two responses of each event: a reward
model by score, a language model by log-likelihood, two language models by the difference of theirs. The guess is the
sign of the margin; its sign where the model is surest; and what margin and z together told on the known half.

On real labels a good model guesses well: that is utility, so these attacks are judged on canaries alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit.judge import Guesses
from private_rlhf.audit.learn import bins, cell_guesses, crossed
from private_rlhf.audit.view import View, plain_text
from private_rlhf.core.documents import read_json
from private_rlhf.core.environment import check_installed
from private_rlhf.core.noise import is_public
from private_rlhf.data.render import Renderer

MOST_EVENTS = 2000
MOST_TOKENS = 512
BATCH = 16


def checkpoints(view: View, most: int = MOST_EVENTS) -> Iterator[Guesses]:
    """Guesses from every loadable checkpoint, and from pairs of language models. Folders of adapters alone are left."""
    events = _events(view, most)
    if not len(events):
        return
    language: dict[str, np.ndarray] = {}
    for folder, kind in model_folders(view):
        margins = model_margins(view, folder, kind, events)
        if margins is None:
            continue
        name = _name(view, folder)
        yield from _from_margins(view, name, events, margins)
        if kind == "language":
            language[name] = margins
    for one, two in combinations(language, 2):
        yield from _from_margins(view, f"{two} against {one}", events, language[two] - language[one])


def _events(view: View, most: int) -> np.ndarray:
    """The first events of the first table with labels."""
    for table in view.tables:
        if table.epsilon is not None and not is_public(table.epsilon):
            return np.sort(table.event)[:most]
    return np.arange(min(view.size, most))


def model_folders(view: View) -> list[tuple[Path, str]]:
    """(folder, "reward" or "language") of each checkpoint below the roots."""
    found = []
    for path in view.files:
        if path.name == "config.json" and any(path.parent.glob("*.safetensors")):
            try:
                name = str((read_json(path).get("architectures") or [""])[0])
            except (ValueError, AttributeError, TypeError, LookupError):
                continue
            if "SequenceClassification" in name:
                found.append((path.parent, "reward"))
            elif "CausalLM" in name:
                found.append((path.parent, "language"))
    return found


def model_margins(view: View, folder: Path, kind: str, events: np.ndarray) -> np.ndarray | None:
    """(m,) float64 margin of the first response over the second; None where the checkpoint does not load.

    Raises:
        UserError: the extra `audit` is not installed.
    """
    check_installed("audit")
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    loader: Any = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        model = loader.from_pretrained(str(folder), dtype=torch.float32).eval()
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

    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]) + len(rows[number][1]))
    for start in range(0, len(order), BATCH):
        picked = order[start : start + BATCH]
        width = max(len(rows[number][0]) + len(rows[number][1]) for number in picked)
        ids = torch.zeros((len(picked), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, number in enumerate(picked):
            whole = rows[number][0] + rows[number][1]
            ids[place, : len(whole)] = torch.tensor(whole)
            mask[place, : len(whole)] = 1
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
    labels = np.sign(margins).astype(np.int8)
    said = labels != 0
    yield Guesses("checkpoints", f"{name}: sign of the margin", events[said], labels[said])
    size = np.abs(margins)
    sure = said & (size >= np.quantile(size, 0.9))
    yield Guesses("checkpoints", f"{name}: surest tenth", events[sure], labels[sure])
    cells = np.full(view.size, -1, dtype=np.int64)
    cells[events] = bins(margins)
    z = view.own_z(view.tables[0])
    yield Guesses(
        "checkpoints", f"{name}: margin and z", *cell_guesses(crossed(cells, z), view.known, view.alpha), learned=True
    )


def _name(view: View, folder: Path) -> str:
    root = next((root for root in view.roots if root in folder.parents), folder.parent)
    return str(folder.relative_to(root)) if folder != root else folder.name
