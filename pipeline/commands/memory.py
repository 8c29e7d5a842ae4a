"""Peak memory of each stage before it runs, for decoders of Llama's kind.

Bytes of one process: weights, optimiser states, gradients, activations, logits and KV cache, with every text as long as
the recipe allows. Kernels, allocator and communication are not known, and nothing is measured: leave a third free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import declared_world, on_cpu
from private_rlhf.evaluation.evaluation_sampler import KL_TEXTS
from private_rlhf.lm.base_models import base_config, skeleton
from private_rlhf.lm.kernels import runs
from private_rlhf.lm.kernels.attention import LONG
from private_rlhf.lm.kernels.token_terms import chunk_numbers
from private_rlhf.lm.logprobs import frozen_layers
from private_rlhf.lm.models import add_lora
from private_rlhf.recipe import LoraSettings, Recipe

GIB = 1 << 30
FLOAT = 4  # bytes of float32: all that learns, and its gradient
FOUR_BIT = 0.5 + FLOAT / 64  # bytes of a weight in NF4, with a float32 scale for each 64
STATES = {None: 8, "adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0, "sgd": 0}
"""Bytes of an optimiser per number that learns."""
PROCESS = 0.75 * GIB  # Python and its libraries, or a CUDA context: a round number
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
OURS = ("ppo", "gvpo")  # trained by PpoTrainer, the others by TRL
BATCH = ("activations", "logits", "KV cache")  # terms that grow with a batch
ADAPTER = "train an adapter ({section}.lora) in place of all weights"
REMEDIES = {
    "activations": "lower {section}.micro_batch_size, or model.max_text_tokens and max_prompt_tokens",
    "logits": "lower {section}.micro_batch_size, or model.max_text_tokens and max_response_tokens",
    "KV cache": "lower {batch} or model.max_response_tokens",
    "packed weights": "take a smaller model or fewer processes on this machine",
    "gathered weights": "set ppo.gather_once=false, which takes more time",
    "reference": ADAPTER,
    "optimizer": f"{ADAPTER}, or more GPUs with --sharded",
    "gradients": f"{ADAPTER}, or more GPUs with --sharded",
    "weights": "a smaller model, ppo.quantize=4bit under an adapter, or more GPUs with --sharded",
}

Terms = dict[str, float]


@dataclass(frozen=True)
class Machine:
    """device: `cpu` or `cuda`. limit: bytes of one process. processes: that share a batch. sharded: FSDP2
    splits weights. packs: decoding uses packed copies of them (`lm.kernels.linear_layers`)."""

    device: str
    limit: float
    processes: int
    sharded: bool = False
    packs: bool = False


@dataclass(frozen=True)
class Shape:
    """parameters: of the model, tied weights once; `linear` of them in decoder layers. groups: key-value heads."""

    parameters: int
    linear: int
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int

    def cut(self, layers: int | None) -> Shape:
        """The reward backbone: embeddings and the first `layers` layers (None: all)."""
        count = min(layers or self.layers, self.layers)
        linear = self.linear * count // self.layers
        return replace(self, layers=count, linear=linear, parameters=linear + self.vocabulary * self.hidden)


@dataclass(frozen=True)
class Adapter:
    """trained: numbers that learn. adapted: weights under the adapter. layers: that keep activations."""

    trained: int
    adapted: int
    layers: int


@dataclass(frozen=True)
class Learner:
    """A language model that a stage trains. dtype: bytes of a frozen weight. states: optimiser bytes per number.
    summed: gradients are kept over micro-batches. recomputes: gradient checkpointing."""

    shape: Shape
    adapter: Adapter | None
    dtype: int
    states: float
    summed: bool = False
    four_bit: bool = False
    recomputes: bool = False
    on_cpu: bool = True
    """Its allocator keeps the float32 layers from which adapters are merged."""

    @property
    def weights(self) -> float:
        """Bytes of all weights, the adapter's included."""
        shape = self.shape
        if self.adapter is None:
            return shape.parameters * FLOAT
        linear = shape.linear * (FOUR_BIT if self.four_bit else self.dtype)
        return linear + (shape.parameters - shape.linear) * self.dtype + self.adapter.trained * FLOAT

    def moments(self, split: int, texts: float, length: int, responses: int) -> list[Terms]:
        """Start and end of a backward pass over `texts` rows of `length` tokens, `responses` of them with logits, and
        saving. split: parts of what learns."""
        shape, dtype = self.shape, self.dtype if self.adapter else FLOAT
        adapter = self.adapter or Adapter(shape.parameters, shape.parameters, shape.layers)
        save = (self.dtype + (FLOAT if self.adapter and self.on_cpu else 0)) * (split == 1 or self.on_cpu)
        held = {"weights": self.weights / split, "optimizer": adapter.trained * self.states / split}
        one, logits = activation(shape, dtype, length, self.on_cpu), texts * responses * shape.vocabulary
        token = adapter.layers * shape.hidden * dtype + one if self.recomputes else adapter.layers * one
        gradients = adapter.trained * FLOAT / split
        return [
            {**held, "activations": texts * length * token, "gradients": gradients if self.summed else 0,
             "logits": 2 * logits * dtype + 4 * FLOAT * min(logits, chunk_numbers("cpu" if self.on_cpu else "cuda"))},
            {**held, "gradients": gradients},
            {**held, "merged weights": adapter.adapted * save},  # split ones: in the main process's own memory
        ]  # fmt: skip


def activation(shape: Shape, dtype: int, length: int, on_cpu: bool) -> float:
    """Bytes that one layer keeps of one token of a row of `length` tokens for the backward pass: norms in float32,
    projections and inner states of the gated MLP in the dtype; on a CPU in short rows the attention weights."""
    groups = shape.groups if on_cpu else shape.heads  # fused attention under a mask copies keys and values
    linear = 2 * shape.hidden + 2 * (shape.heads + groups) * shape.head_size + 4 * shape.inner
    attention = shape.heads * length if on_cpu and length <= LONG else 0
    return 2 * shape.hidden * FLOAT + dtype * (linear + attention)


@dataclass
class Estimate:
    """The peak of every stage of a recipe that runs a model. adapters: by stage that trains, None for all weights."""

    recipe: Recipe
    shape: Shape
    adapters: Mapping[str, Adapter | None]
    machine: Machine

    @property
    def peaks(self) -> dict[str, Terms]:
        """Stage to the terms of its largest moment, in bytes."""
        recipe = self.recipe
        stages = {"sft": self._learning("sft", 1)}
        if recipe.reward.external is None:
            stages["reward"] = self._reward()
        stages[recipe.aligner] = self._dpo() if recipe.aligner == "dpo" else self._on_prompts()
        stages["evaluate"] = self._evaluate()
        peaks = {name: max(moments, key=lambda terms: sum(terms.values())) for name, moments in stages.items()}
        return {name: {"process": PROCESS, **terms} for name, terms in peaks.items()}

    def __post_init__(self) -> None:
        self._dtype = 2 if self.recipe.model.dtype == "bfloat16" else FLOAT
        self._backbone = self.shape.cut(self.recipe.reward.num_layers)
        self._split = self.machine.processes if self.machine.sharded else 1

    def _learner(self, stage: str) -> tuple[Learner, int]:
        """The model that a stage trains, and rows of a micro-batch of one process."""
        settings = getattr(self.recipe, stage)
        share = max(1, settings.batch_size // self.machine.processes)
        micro = min(settings.micro_batch_size or share, share)
        owner: Any = self.recipe.ppo if stage in OURS else settings  # of the keys that save memory
        keys = vars(owner) if stage in OURS else owner.trainer_args
        shape = self._backbone if stage == "reward" else self.shape
        return Learner(
            shape, self.adapters[stage], self._dtype, STATES[getattr(owner, "optimizer", None)], micro < share,
            getattr(owner, "quantize", None) is not None, bool(keys.get("gradient_checkpointing")),
            self.machine.device == "cpu",
        ), micro  # fmt: skip

    def _learning(self, stage: str, texts: int) -> list[Terms]:
        """Moments of training on data, `texts` texts in a row of a batch."""
        (learner, micro), model = self._learner(stage), self.recipe.model
        responses = 0 if stage == "reward" else model.max_text_tokens - model.max_prompt_tokens
        return learner.moments(self._split, texts * micro, model.max_text_tokens, responses)

    def _reward(self) -> list[Terms]:
        settings, shape, length = self.recipe.reward, self._backbone, self.recipe.model.max_text_tokens
        token = activation(shape, self._dtype, length, self.machine.device == "cpu")
        layer = settings.feature_batch_size * length * token
        reading: Terms = {"weights": shape.parameters * self._dtype, "activations": layer}
        return [reading, *([] if settings.mode == "head" else self._learning("reward", 2))]

    def _dpo(self) -> list[Terms]:
        reference = self.shape.parameters * FLOAT if self.recipe.dpo.lora is None else 0
        return [{"reference": reference, **terms} for terms in self._learning("dpo", 2)]

    def _on_prompts(self) -> list[Terms]:
        stage, model = self.recipe.aligner, self.recipe.model
        settings, (learner, micro) = getattr(self.recipe, stage), self._learner(stage)
        length = model.max_prompt_tokens + model.max_response_tokens
        steps = learner.moments(self._split, micro, length, model.max_response_tokens)
        held: Terms = {"reward model": self._backbone.parameters * self._dtype / self._split}
        if settings.lora is None:  # TRL splits it as one piece, which each pass gathers
            held["reference"] = self.shape.parameters * FLOAT / (self._split if stage in OURS else 1)
        sampling = self._decoding(FLOAT if settings.lora is None else self._dtype, settings.generate_batch_size)
        if self.machine.sharded and self.recipe.ppo.gather_once:
            sampling["gathered weights"] = learner.weights
        sampling |= {name: steps[0][name] for name in ("weights", "optimizer")}
        return [{**held, **terms} for terms in (sampling, *steps)]

    def _evaluate(self) -> list[Terms]:
        shape, dtype, weight = self.shape, self._dtype, self._dtype / self._split
        held = {"weights": 2 * shape.parameters * weight, "reward model": self._backbone.parameters * weight}
        reading = 2 * KL_TEXTS * self.recipe.model.max_response_tokens * shape.vocabulary * dtype
        sampling = self._decoding(dtype, self.recipe.evaluate.batch_size)
        if self.machine.sharded and self.recipe.ppo.gather_once:
            sampling["gathered weights"] = shape.parameters * dtype
        return [{**held, **sampling}, {**held, "logits": reading}]

    def _decoding(self, dtype: int, batch: int) -> Terms:
        """Terms that decoding a batch adds to the weights."""
        shape, model = self.shape, self.recipe.model
        texts = math.ceil(batch / self.machine.processes)
        token = 2 * shape.groups * shape.head_size * dtype * shape.layers
        packed = (shape.linear + shape.vocabulary * shape.hidden) * dtype if self.machine.packs else 0
        cache = texts * (model.max_prompt_tokens + model.max_response_tokens) * token
        return {"KV cache": cache, "packed weights": packed, "logits": 2 * texts * shape.vocabulary * FLOAT}

    def check_fits(self) -> str | None:
        """A warning with its remedy where a batch of the longest texts would exceed the limit; None if it fits.

        UserError: the memory of a stage without any text exceeds the limit.
        """
        peaks, limit = self.peaks, self.machine.limit
        held = {name: sum(size for term, size in terms.items() if term not in BATCH) for name, terms in peaks.items()}
        fits = max(held.values()) <= limit  # with a smaller batch or shorter texts
        sizes = {name: sum(terms.values()) for name, terms in peaks.items()}
        section = max(peaks, key=(sizes if fits else held).__getitem__)
        terms, needed = peaks[section], sizes[section]
        if needed <= limit:
            return None
        causes = [name for name in terms if name in REMEDIES and (name in BATCH) == fits]
        term = max(causes or terms, key=terms.__getitem__)
        batch = "evaluate.batch_size" if section == "evaluate" else f"{section}.generate_batch_size"
        remedy = REMEDIES.get(term, "take a machine with more memory").format(section=section, batch=batch)
        if section == "ppo" and term == "activations" and not self.recipe.ppo.gradient_checkpointing:
            remedy += ", or set ppo.gradient_checkpointing=true"
        line = (f"{section} needs {needed / GIB:.1f} GiB per process and has {limit / GIB:.1f}, for texts as long as"
                f" the recipe allows; of it {term} ({terms[term] / GIB:.1f} GiB): {remedy}")  # fmt: skip
        if not fits:
            raise UserError(line)
        return line


def estimate(recipe: Recipe, machine: Machine, model_config: Path | None = None) -> Estimate:
    """The estimate of a recipe that states its dtype. model_config: file of its model's config. UserError if bad."""
    model = recipe.model if model_config is None else replace(recipe.model, source=str(model_config), revision=None)
    config, reward = base_config(model), recipe.reward
    if config is None:
        key = "model.source" if model_config is None else "--model-config"
        raise UserError(f"{key} {model.source} is not on this machine: give its config.json to --model-config")
    shape = shape_of(skeleton(config, model.source))
    adapters = {stage: adapter_of(config, getattr(recipe, stage).lora) for stage in ("sft", recipe.aligner)}
    whole = adapter_of(config, reward.lora) if reward.mode == "lora" and reward.external is None else None
    if whole and reward.num_layers:  # the adapter of the first layers
        share, layers = reward.num_layers / shape.layers, min(reward.num_layers, whole.layers)
        whole = Adapter(round(whole.trained * share), round(whole.adapted * share), layers)
    return Estimate(recipe, shape, {**adapters, "reward": whole}, machine)


def shape_of(model: Any) -> Shape:
    """The shape of a causal LM."""
    config, layers = model.config.get_text_config(), model.get_decoder().layers
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters, linear = (sum(each.numel() for each in part.parameters()) for part in (model, layers))
    return Shape(parameters, linear, len(layers), config.hidden_size, config.intermediate_size, heads, groups,
                 head_size, config.vocab_size)  # fmt: skip


def adapter_of(config: Any, settings: LoraSettings | None) -> Adapter | None:
    """The adapter of these settings on the model; None for all weights. UserError: modules that it does not have."""
    if settings is None:
        return None
    model = add_lora(skeleton(config, "the model"), settings, seed=0)
    adapted = sum(each.numel() for name, each in model.named_parameters() if name.endswith(".base_layer.weight"))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return Adapter(trained, adapted, len(model.get_base_model().get_decoder().layers) - frozen_layers(model))


def this_machine() -> Machine:
    """CPU: a process's share of the memory of the machine or its container; GPU: all of the first one."""
    processes = declared_world().size
    if not on_cpu():
        device: Any = torch.accelerator.current_accelerator()
        return Machine("cuda", torch.get_device_module(device).get_device_properties(0).total_memory, processes)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP:
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()).isdecimal():
            total = min(total, float(text))
    return Machine("cpu", total / int(os.environ.get("LOCAL_WORLD_SIZE", processes)), processes, packs=runs("packed"))
