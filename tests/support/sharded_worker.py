"""One of two processes that share the weights of one small model: samples with them, saves them, and says what it saw.

Usage: sharded_worker FOLDER RANK
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from private_rlhf.evaluation.checkpoint_comparison import load_sampler
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.lm.distributed import is_sharded
from private_rlhf.lm.drawing import TransformersEngine
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.saving import write_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from support.two_processes import FSDP, gloo_pair

PROMPTS = {0: [[3, 4], [5], [2, 6, 7, 3, 4], [7, 7, 7], [4, 2]], 1: [[6, 2]]}
CAP = 20  # three strides; an end-of-turn is one token of eight, so that responses end in all of them


def sample(model: Any, rank: int, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    keys = [sample_key("sharded", rank, i) for i in range(len(prompts))]
    return sample_responses(model, prompts, keys, Sampling(CAP), pad_token_id=0, eos_token_id=1, batch_size=batch_size)


def answers(checkpoint: Path, rank: int) -> list[list[int]]:
    """Those of `evaluate --policy`, from weights that it has split itself."""

    def drawing(model: Any, renderer: Any) -> Any:
        assert is_sharded(model)
        return TransformersEngine(None, renderer.tokenizer, 8).draw

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    renderer: Any = SimpleNamespace(tokenizer=tokenizer, max_response_tokens=CAP, prompt_ids=list, text=list)
    prompts: Any = PROMPTS[rank]
    keys = [sample_key("sharded", rank, i) for i in range(len(prompts))]
    return load_sampler(str(checkpoint), renderer, connect=drawing)(prompts, keys)  # type: ignore[return-value]


def split(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with each layer, and what is left, split over the processes; in place."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(folder: Path, rank: int) -> None:
    with gloo_pair(folder, rank):
        torch.manual_seed(0)
        whole = LlamaForCausalLM(tiny_config(8, 1, 0)).eval().requires_grad_(False)
        model = split(copy.deepcopy(whole))
        assert is_sharded(model)
        assert not is_sharded(whole)
        lists = [(PROMPTS[rank], 2), (PROMPTS[0] if rank else [], 8), (PROMPTS[rank] * 4, 100)]
        seen = {
            "sharded": [sample(model, rank, prompts, size) for prompts, size in lists],
            "whole": [sample(whole, rank, prompts, size) for prompts, size in lists],
        }
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            tokenizer: Any = SimpleNamespace(save_pretrained=lambda target: None, eos_token_id=1)
            write_checkpoint(whole, state, tokenizer, folder / "model", "float32")
            whole.save_pretrained(folder / "expected")
        torch.distributed.barrier()
        os.environ.update(FSDP)
        seen["compared"] = [answers(folder / "expected", rank)]
        (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
