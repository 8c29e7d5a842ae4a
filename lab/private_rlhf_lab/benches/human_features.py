"""What two frozen models make of real preference pairs, computed once and kept: SmolLM2 by depth, MiniLM's sentences.

`PRIVATE_RLHF_TEST_DATA` names the folder that holds hh_helpful/ or another set (train.jsonl, eval.jsonl, or gzip: any
preference format, with public labels). A text is a prompt with one answer as stage `reward` renders it; its state after
layer k goes through the model's last norm, so that `last` of layer k is what `reward.num_layers: k` reads and `mean` is
the average of the same over the answer's tokens. Interrupted work goes on at the last whole part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.lm.models import DTYPES, load_tokenizer
from private_rlhf.lm.rows import batches, make_rows, sharing_of
from private_rlhf.reward_models.backbone import build_reward_backbone
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from private_rlhf_lab.benches.text_lengths import read_pairs

HELPFUL = "hh_helpful"
LAYERS = (0, 5, 10, 15, 20, 25, 30)
PART = 512
LIMIT = 512


@dataclass(frozen=True)
class Pairs:
    """Preference pairs within the limit of a text: `rows` with prompt (a text, or the messages of a conversation),
    chosen and rejected (texts), and how many there were."""

    rows: list[dict[str, Any]]
    read: int

    @property
    def texts(self) -> list[tuple[Prompt, str]]:
        """(prompt, answer): chosen and rejected by turns."""
        return [(row["prompt"], row[side]) for row in self.rows for side in ("chosen", "rejected")]


def data_folder(data: str = HELPFUL) -> Path:
    """The folder of the pairs. Raises: UserError: it is not named, or not there."""
    root = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    if not root or not (Path(root) / data).is_dir():
        raise UserError(f"PRIVATE_RLHF_TEST_DATA ({root or 'not set'}) must name the folder that holds {data}/")
    return Path(root) / data


def renderer_of(checkpoint: Path) -> Renderer:
    """As configs/hh_rlhf_smollm2.yaml renders, texts of at most `LIMIT` tokens."""
    tokenizer = load_tokenizer(checkpoint)
    return Renderer(tokenizer, LIMIT, 64, system_prompt="", max_text_tokens=LIMIT)


def load_pairs(split: str, renderer: Renderer, data: str = HELPFUL) -> Pairs:
    """The pairs of `train` or `eval` of which both answers fit; without a prompt they are left out."""
    rows = read_pairs(data_folder(data), split)
    fitting = [row for row in rows if row["prompt"] and renderer.fits(row["prompt"], row["chosen"], row["rejected"])]
    return Pairs(fitting, len(rows))


@torch.no_grad()
def text_features(
    backbone: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    layers: Sequence[int] = LAYERS,
    batch_size: int = 16,
) -> torch.Tensor:
    """(N, layers, 2, d) float16 of N prompts with their answers (token ids): the last token, and the answer's mean.

    backbone: a whole sequence-classification model (`build_reward_backbone`). Layer 0 is the embedding.
    """
    body = getattr(backbone, backbone.base_model_prefix)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    sharing, device = sharing_of(backbone), body.embed_tokens.weight.device
    found = torch.empty(len(texts), len(layers), 2, body.config.hidden_size, dtype=torch.float16)
    states: list[torch.Tensor] = []
    places = [body.embed_tokens if layer == 0 else body.layers[layer - 1] for layer in layers]
    handles = [place.register_forward_hook(lambda _, __, out: states.append(_first(out))) for place in places]
    try:
        for picked in batches(texts, sharing, batch_size):
            rows = make_rows([texts[index] for index in picked], body.config.pad_token_id, device, sharing)
            states.clear()
            given = {"attention_mask": rows.attention(body.dtype), "position_ids": rows.position_ids}
            body(input_ids=rows.input_ids, use_cache=False, **given)
            for place, state in enumerate(states):
                flat = body.norm(state).flatten(0, 1).float()
                for index, path in zip(picked, rows.paths, strict=True):
                    own = flat[torch.tensor(path[len(prompts[index]) :], device=device)]
                    found[index, place] = torch.stack([own[-1], own.mean(dim=0)]).to(found.dtype).cpu()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def backbone_features(cache: Path, name: str, texts: Sequence[tuple[Prompt, str]], dtype: str) -> torch.Tensor:
    """(N, layers, 2, d) float16 of (prompt, answer) texts by SmolLM2-135M-Instruct, in parts kept in `cache`."""
    checkpoint = smollm2_checkpoint(cache / "smollm2")
    renderer = renderer_of(checkpoint)
    pad = renderer.tokenizer.pad_token_id
    loaded = lru_cache(lambda: build_reward_backbone(checkpoint, None, DTYPES[dtype], pad_token_id=pad))

    def of_texts(own: Sequence[tuple[Prompt, str]]) -> torch.Tensor:
        prompts, answers = zip(*own, strict=True)
        return text_features(loaded(), [*map(renderer.prompt_ids, prompts)], [*map(renderer.response_ids, answers)])

    parts = []
    for number, start in enumerate(tqdm(range(0, len(texts), PART), desc=f"features of {name}", unit="part")):
        own = texts[start : start + PART]
        parts.append(kept_features(cache / f"{name}-{dtype}-{number:03d}.safetensors", own, partial(of_texts, own)))
    return torch.cat(parts)


def kept_features(path: Path, texts: Sequence[tuple[Prompt, str]], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` makes of these texts: from `path` where that holds it, else made and put there. A file of other
    texts, or one that does not say of which, is made anew."""
    source = {"texts": digest(texts)}
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == source:
                return torch.as_tensor(file.get_tensor("features"))
    features = make()
    with atomic.new_file(path) as temporary:
        save_file({"features": features}, temporary, source)
    return features


def digest(content: Any) -> str:
    """16 hex digits of JSON content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
