"""Row counts before a run, so that too few rows for one batch stop it at once and not after hours of training.

Of a large source only the first rows are read. Texts that are too long are left out later, so the stages that learn
count their rows once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from private_rlhf.data.inputs import rows_of_file
from private_rlhf.data.overlap import protected_pairs
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import held_out, names_bundle
from private_rlhf.data.render import prompt_key
from private_rlhf.data.sources import run_splits
from private_rlhf.embedded import task
from private_rlhf.recipe import OF_RELEASE, DataConfig, is_hub_id


@dataclass(frozen=True)
class RowCounts:
    """Counts of the rows that a run learns from.

    released: folder of the stage that releases the labels. new_release: that stage is about to run; otherwise its
    release is there. online: the run asks for its labels. several_labels: one pair may have more than one label.
    """

    data: DataConfig
    released: Path
    new_release: bool
    online: bool
    several_labels: bool

    def demonstrations(self, size: int) -> int | None:
        """Number of demonstrations, exact below `size`; None where it is not known."""
        source = self.data.demonstrations
        if source in OF_RELEASE:
            count = self.pairs(size)
            return None if count is None else count * (2 if source == "release_both" else 1)
        rows = task.load_demonstrations() if source == "embedded" else rows_of_file(self.data, "demonstrations")
        return sum(1 for _ in islice(rows, size))

    def pairs(self, size: int, fraction: float = 0.0) -> int | None:
        """Number of released pairs to learn from when a fraction is held out, exact below `size`; None where it is not
        known."""
        names = self.training_pairs(3 * size + 10)
        if names is None:
            return None
        return len(names) - (max(1, round(len(set(names)) * fraction)) if fraction else 0)

    def has_one_prompt(self) -> bool:
        """True if all pairs to learn from have the same prompt; False where they are not known."""
        source = self.data.preferences
        if self.online or source == "embedded" or (self.new_release and is_hub_id(source)):
            return False
        pairs: Iterable[Any] = protected_pairs(self.data, self.released, True, ("train",))
        if not self.new_release:
            pairs = read_release(self.released / "release")
        prompts = (prompt_key(pair.prompt) for pair in pairs)
        first = next(prompts, None)
        return first is not None and all(prompt == first for prompt in prompts)

    def training_pairs(self, most: int) -> list[str] | None:
        """Names that tell the released training pairs apart: of all, or of at least the first ones up to `most`.

        None where they are not known: a data set of the hub, several labels of one pair, many pairs that are written
        twice, questions that are still to be asked. most: over twice the largest batch.
        """
        source = self.data.preferences
        if self.online:
            return None
        if not self.new_release:
            return [row.record_id for row in islice(read_release(self.released / "release"), most)]
        if names_bundle(source):
            pairs = [row.record_id for row in islice(read_release(Path(source).expanduser()), most)]
        elif is_hub_id(source) or self.several_labels:
            return None
        else:
            rows = [repr(pair) for pair in islice(protected_pairs(self.data, self.released, True, ("train",)), most)]
            pairs = list(dict.fromkeys(rows))
            if len(pairs) < len(rows) == most:
                return None
        divided = names_bundle(source) or len(run_splits(source, self.data.split)) == 1
        if divided and len(pairs) < most:
            pairs = pairs[: len(pairs) - held_out(len(pairs))]
        return pairs[: self.data.limit]
