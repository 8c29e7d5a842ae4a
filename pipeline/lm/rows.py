"""Token sequences in rows that hold trees of their prefixes: what sequences begin with alike is computed once.

A tree is written depth first; trees stand side by side where a row has room. Every token has one column, sees only its
own prefix and itself, and has its position in its sequence, so outputs and gradients are those of each sequence by
itself. Shapes: N sequences in R rows of T columns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.kernels.attention import NAME as GROUPED
from private_rlhf.lm.models import unwrap
from torch import Tensor

FAMILIES = frozenset({"gemma", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
"""`model_type` of rotary decoders in which tokens meet in causal attention only, by test."""

LIKE = 0.85
"""Smallest width of a tree in a forward pass, as a share of the widest."""

Tokens = Sequence[int]


@dataclass(frozen=True)
class Sharing:
    """The prices that decide which sequences share rows of a model. price: of computing a token, in pairs of tokens
    that could meet. columns: of a forward pass from which on it pays to make another one rather than to pad."""

    price: int
    columns: int


@dataclass(frozen=True)
class Rows:
    """Attributes:
    input_ids, position_ids: (R, T) int64; padding on the right has position 0.
    ends: (R, T) int64: the tokens from a column up to this one continue the prefix that ends in it. Padding: its own.
    paths: N lists: the columns, counted over all R·T, of each sequence's tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    ends: Tensor
    paths: list[list[int]]

    def attention(self, dtype: torch.dtype) -> Tensor:
        """(R, T) int64, 1 on real tokens, where each row is one sequence. Else (R, 1, T, T) of `dtype`, to be added to
        scores: 0 where a token sees another, the lowest number elsewhere. Padding sees itself: a row of −∞ is NaN."""
        column = torch.arange(self.ends.shape[1], device=self.ends.device)
        if len(self.paths) == len(self.ends):
            return (column < self.ends[:, :1]).long()
        query, key = column[None, :, None], column[None, None, :]
        visible = (key <= query) & (query < self.ends[:, None, :])
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """`paths`, each int64, sent to the device together: it would wait for each list that indexes it."""
        joined = torch.tensor([column for path in self.paths for column in path], device=self.ends.device)
        return joined.split([len(path) for path in self.paths])

    @property
    def last(self) -> Tensor:
        """(N,) int64: the column, counted over all, of each sequence's last token."""
        return torch.tensor([path[-1] for path in self.paths], device=self.ends.device)


def make_rows(
    sequences: Sequence[Tokens], pad_token_id: int, device: torch.device, sharing: Sharing | None = None
) -> Rows:
    """Rows of token sequences; a row each, in their order, where `sharing` is None (`sharing_of`).

    ValueError where a sequence is empty.
    """
    if not all(sequences):
        raise ValueError("sequences must have tokens, got an empty one: drop it")
    groups = grouped(sequences, sharing)
    trees = [_tree([sequences[index] for index in group]) for group in groups]
    width = max(len(tree.ids) for tree in trees)
    shape = (len(trees), width)
    rows = filled([len(tree.ids) for tree in trees], width) if sharing else [[number] for number in range(len(trees))]
    ids, positions = torch.full(shape, pad_token_id), torch.zeros(shape, dtype=torch.long)
    ends = torch.arange(1, width + 1).repeat(len(trees), 1)
    paths: list[list[int]] = [[] for _ in sequences]
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            tree = trees[number]
            columns = slice(start, start + len(tree.ids))
            ids[row, columns], positions[row, columns] = torch.tensor(tree.ids), torch.tensor(tree.positions)
            ends[row, columns] = torch.tensor(tree.ends) + start
            for index, path in zip(groups[number], tree.paths, strict=True):
                paths[index] = [row * width + start + column for column in path]
            start = columns.stop
    used = slice(0, len(rows))
    return Rows(ids[used].to(device), positions[used].to(device), ends[used].to(device), paths)


def filled(widths: Sequence[int], room: int) -> list[list[int]]:
    """Trees, as indices, side by side in rows of `room` columns: the widest first, each in the first row with room."""
    rows: list[list[int]] = []
    free: list[int] = []
    for number in sorted(range(len(widths)), key=lambda number: -widths[number]):
        row = next((row for row, room_left in enumerate(free) if room_left >= widths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(room)
        rows[row].append(number)
        free[row] -= widths[number]
    return rows


def grouped(sequences: Sequence[Tokens], sharing: Sharing | None) -> list[list[int]]:
    """Sequences that share a tree, as indices in the order of the tree; one each without `sharing`.

    A tree may grow to c + √(c·(c + price)) columns, c being the tokens that the next sequence shares with it: there
    computing c tokens once, and letting all columns meet, cost least together.
    """
    if sharing is None:
        return [[index] for index in range(len(sequences))]
    groups: list[list[int]] = []
    width = 0
    before: Tokens = ()
    for index in sorted(range(len(sequences)), key=lambda index: tuple(sequences[index])):
        sequence = sequences[index]
        common = shared_length(before, sequence)
        if groups and width + len(sequence) - common <= common + math.sqrt(common * (common + sharing.price)):
            groups[-1].append(index)
            width += len(sequence) - common
        else:
            groups.append([index])
            width = len(sequence)
        before = sequence
    return groups


def batches(sequences: Sequence[Tokens], sharing: Sharing | None, size: int) -> list[list[int]]:
    """Sequences, as indices, for one forward pass after another: at most `size` each, trees kept whole where they fit,
    and none padded much beyond its width in a pass that is large enough without it."""
    trees = []
    for group in grouped(sequences, sharing):
        texts = [sequences[index] for index in group]
        fresh = sum(len(after) - shared_length(before, after) for before, after in pairwise(texts))
        trees.append((len(texts[0]) + fresh, group))
    passes: list[list[int]] = []
    widest = columns = 0
    for width, group in sorted(trees, key=lambda tree: -tree[0]):
        full = not passes or len(passes[-1]) + len(group) > size
        if full or (sharing and width < LIKE * widest and columns >= sharing.columns):
            widest, columns = width, 0
            passes += [group[start : start + size] for start in range(0, len(group), size)]
        else:
            passes[-1] += group
        columns += width
    return passes


def shared_length(first: Tokens, second: Tokens) -> int:
    """Number of tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def sharing_of(*models: Any) -> Sharing | None:
    """Sharing of rows that each of these models reads; None where one cannot: it must be of a known family without
    windows, with an attention kernel that takes a mask."""
    kinds = [_sharing(unwrap(model)) for model in models]
    return None if None in kinds else kinds[0]


def _sharing(model: Any) -> Sharing | None:
    """In a decoder layer of width d a token's products are some 24·d² operations and a pair's 4·d, as much again for
    its share of the softmax: a price of 3·d pairs.
    """
    config, device = model.config.get_text_config(), next(model.parameters()).device.type
    fit = (
        runs("rows", device)
        and config.model_type in FAMILIES
        and config._attn_implementation in ("eager", "sdpa", GROUPED)
        and getattr(config, "sliding_window", None) is None
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and "position_ids" in inspect.signature(model.forward).parameters
    )
    return Sharing(3 * int(config.hidden_size), 256 if device == "cpu" else 16384) if fit else None


@dataclass(frozen=True)
class _Tree:
    """One tree; the fields are those of `Rows`, for its columns only."""

    ids: list[int]
    positions: list[int]
    ends: list[int]
    paths: list[list[int]]


def _tree(sequences: Sequence[Tokens]) -> _Tree:
    """The tree of sequences in lexicographic order, which is its own order written depth first."""
    tree = _Tree([], [], [], [])
    path: list[int] = []
    before: Tokens = ()
    for sequence in sequences:
        common = shared_length(before, sequence)
        path = [*path[:common], *range(len(tree.ids), len(tree.ids) + len(sequence) - common)]
        tree.ids.extend(sequence[common:])
        tree.positions.extend(range(common, len(sequence)))
        tree.paths.append(path)
        before = sequence
    tree.ends.extend([0] * len(tree.ids))
    for path in tree.paths:  # the last path through a column ends where its prefix does
        for column in path:
            tree.ends[column] = path[-1] + 1
    return tree
