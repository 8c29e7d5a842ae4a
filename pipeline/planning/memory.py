"""Peak memory of one process of a stage: the moments a stage passes through, and what is held in each.

All sizes are bytes. A moment is a dictionary of named terms; a stage's peak is its largest moment. The formula is for
decoders of Llama's kind; texts that are sampled are taken to be as long as the cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from private_rlhf.evaluation.likelihood import LIKELIHOOD_TEXTS
from private_rlhf.evaluation.samples import KL_TEXTS
from private_rlhf.lm.kernels.attention import LONG
from private_rlhf.lm.kernels.token_terms import chunk_numbers
from private_rlhf.planning.model import Adapter, ModelShape
from private_rlhf.planning.tokens import Lengths, Texts
from private_rlhf.recipe import LoraSettings, Recipe
from private_rlhf.rl.reader import KEPT_BYTES
from private_rlhf.rl.trainer import EVALUATED

GIB = 1 << 30
FLOAT = 4
"""Of float32: all that learns, and its gradient."""
FOUR_BIT = 0.5 + FLOAT / 64
"""Of a number in NF4 with a float32 scale for each 64 of them."""
STATES = {None: 8, "adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0, "sgd": 0}
"""Of an optimiser, per number that learns."""
HEAD = 12
"""Tokens of a chat template that all texts begin with."""
AGAIN = 1.5
"""Layers' activations that are alive where layers are computed again: one whole and its gradients (measured: 1.44)."""
CONTEXT = 0.75 * GIB
"""A CUDA context with its libraries' workspaces; measured on none here, so a round number."""
PRIMITIVE = {2: 0.65 * 2**20, 4: 0.9 * 2**20}
"""What a product of another shape leaves behind in oneDNN and the heap, by bytes of its numbers (measured)."""
PRIMITIVES = {2: 1024, 4: 2048}
"""Of how many products: oneDNN keeps 1,024; in float32 the heap went on growing to twice that and more."""

Terms = dict[str, float]


@dataclass(frozen=True)
class Machine:
    """Attributes:
    device: `cpu` or `cuda`.
    limit: of one process, bytes.
    processes: that share a batch.
    base: of a process that has imported everything, before any model.
    sharded: what learns is split over the processes (FSDP2).
    packs: decoding uses packed copies of the weights (`lm.kernels.packed`).
    """

    device: str
    limit: float
    processes: int
    base: float
    sharded: bool = False
    packs: bool = False

    @property
    def split(self) -> int:
        """Into how many parts weights that learn, gradients and optimiser states are split."""
        return self.processes if self.sharded else 1


@dataclass(frozen=True)
class Learner:
    """A language model that a stage trains. `states`: optimiser bytes per number; `summed`: over micro-batches;
    `recomputes`: layers keep what enters them alone, and compute the rest again in the backward pass."""

    shape: ModelShape
    adapter: Adapter | None
    bytes: int
    states: float
    summed: bool
    four_bit: bool = False
    recomputes: bool = False

    def weights(self, machine: Machine) -> float:
        """All weights, the adapter's included."""
        shape = self.shape
        if self.adapter is None:
            return shape.parameters * FLOAT / machine.split
        linear = shape.linear * (FOUR_BIT if self.four_bit else self.bytes)
        return (linear + (shape.parameters - shape.linear) * self.bytes + self.adapter.trained * FLOAT) / machine.split

    @property
    def trained(self) -> int:
        """Numbers that learn."""
        return self.shape.parameters if self.adapter is None else self.adapter.trained

    def held(self, machine: Machine) -> Terms:
        """Between two steps."""
        return {"weights": self.weights(machine), "optimizer": self.trained * self.states / machine.split}

    def steps(self, machine: Machine, tokens: float, width: float, responses: float) -> list[Terms]:
        """Moments of a step: as the backward pass begins, and as it ends.

        Args:
            machine: where.
            tokens, width: of a micro-batch and of its rows.
            responses: tokens whose logits are computed.
        """
        layers = self.shape.layers if self.adapter is None else self.adapter.layers
        dtype = FLOAT if self.adapter is None else self.bytes
        inner = activation(self.shape, dtype, width, machine, full=self.adapter is None)
        kept = (layers + 1) * inner  # and one layer's gradients
        if self.recomputes:
            kept = layers * self.shape.hidden * dtype + AGAIN * inner
        buckets = 2 if machine.processes > 1 and not machine.sharded else 1  # DDP's copies, to be summed
        gradients = buckets * self.trained * FLOAT / machine.split
        head = self.shape.vocabulary * self.shape.hidden * FLOAT if self.adapter is None and responses else 0
        begins = {
            **self.held(machine),
            "activations": tokens * kept,
            "logits": 2 * logits(self.shape, responses, dtype) + chunk(machine),
            "gradients": (gradients if self.summed else 0) + head,
        }
        return [begins, {**self.held(machine), "gradients": gradients + head}]

    def saving(self, machine: Machine) -> Terms:
        """The adapter is merged in float32 and cast; of whole weights only the cast copy is new."""
        merged = self.shape.parameters * self.bytes
        if self.adapter is not None:
            merged = (self.shape.linear if self.four_bit else self.adapter.adapted) * (FLOAT + self.bytes)
        return {**self.held(machine), "merged weights": merged}


def activation(shape: ModelShape, dtype: int, width: float, machine: Machine, *, full: bool) -> float:
    """What one layer keeps of one token for the backward pass, in rows of `width` tokens.

    Two norms keep their input in float32 (and, where their weights learn, the normalised input); their outputs, the
    queries, keys, values and the mixed values, and four inner states of the gated MLP are in the dtype; the attention
    weights in float32, and once more where that is not the dtype.
    """
    norms = 2 * shape.hidden * FLOAT * (2 if full else 1)
    linear = 2 * shape.hidden + 2 * (shape.heads + shape.groups) * shape.head_size + 4 * shape.inner
    fused = machine.device != "cpu" or width > LONG
    weights = 0 if fused else shape.heads * width * (FLOAT + (dtype if dtype != FLOAT else 0))
    return norms + dtype * linear + weights


def logits(shape: ModelShape, tokens: float, dtype: int) -> float:
    """Of that many tokens."""
    return tokens * shape.vocabulary * dtype


def chunk(machine: Machine) -> float:
    """Working copies of logits in float32, of which three are alive."""
    return 3 * chunk_numbers(machine.device) * FLOAT


def tree_width(shape: ModelShape, shared: float, longest: float) -> float:
    """The width of rows in which texts share `shared` tokens (`lm.rows.grouped`)."""
    return max(longest, shared + math.sqrt(shared * (shared + 3 * shape.hidden))) if shape.shares_rows else longest


def decoding(shape: ModelShape, dtype: int, machine: Machine, batch: int, prompt: int, cap: int) -> Terms:
    """What decoding adds to the weights: keys and values of a batch, one of its layers twice, and logits."""
    one = 2 * shape.groups * shape.head_size * dtype * batch * (prompt + cap)
    packed = (shape.linear + shape.vocabulary * shape.hidden) * dtype if machine.packs else 0
    return {
        "KV cache": one * (shape.layers + 1),
        "packed weights": packed,
        "logits": 2 * logits(shape, batch, dtype) + chunk(machine),
    }


def kernels(machine: Machine, passes: float, learns: float, dtype: int) -> float:
    """oneDNN's kept products, as every batch has a shape of its own. A forward pass has some 7 products of different
    shapes in bfloat16 (linear layers and attention), a step of learning 30; in float32 linear layers alone go there: 5
    and 10.
    """
    if machine.device != "cpu":
        return 0.0
    kinds = (5, 10) if dtype == FLOAT else (7, 30)
    return PRIMITIVE[dtype] * min(PRIMITIVES[dtype], kinds[0] * passes + kinds[1] * learns)


@dataclass(frozen=True)
class Planner:
    """The stages of one recipe. `adapters`: by stage, of the whole model (`sft` and the aligner) or of the backbone."""

    recipe: Recipe
    shape: ModelShape
    adapters: Mapping[str, Adapter | None]
    texts: Texts
    machine: Machine
    passes: Mapping[str, tuple[float, float]]

    @property
    def dtype(self) -> int:
        """Bytes of a frozen weight."""
        return 2 if self.recipe.model.dtype == "bfloat16" else FLOAT

    @property
    def cap(self) -> int:
        """Tokens of the longest response."""
        return self.recipe.model.max_response_tokens

    @property
    def reward_model(self) -> float:
        """Weights of the reward model where it only scores."""
        return self.shape.cut(self.recipe.reward.num_layers) * self.dtype

    def stage(self, name: str) -> list[Terms]:
        """The moments of stage `name`, all terms included."""
        moments = {"sft": self._sft, "reward": self._reward, "dpo": self._dpo, "evaluate": self._evaluate}
        found = moments[name]() if name in moments else self._on_prompts(name)
        passes, steps = self.passes[name]
        common = {"process": self.machine.base, "kernels": kernels(self.machine, passes, steps, self.dtype)}
        return [{**common, **moment} for moment in found]

    def _learner(self, stage: str, settings: Any, micro: int, shape: ModelShape | None = None) -> Learner:
        four_bit = getattr(settings, "quantize", None) is not None
        share = settings.batch_size // self.machine.processes
        states = STATES[getattr(settings, "optimizer", None)]
        keys = vars(settings) if stage == "ppo" else settings.trainer_args
        recomputes = bool(keys.get("gradient_checkpointing"))
        adapter = self.adapters[stage]
        return Learner(shape or self.shape, adapter, self.dtype, states, micro < share, four_bit, recomputes)

    def _micro(self, settings: Any) -> int:
        share = max(1, settings.batch_size // self.machine.processes)
        return min(settings.micro_batch_size or share, share)

    def _sft(self) -> list[Terms]:
        settings, texts = self.recipe.sft, self.texts
        micro = self._micro(settings)
        learner = self._learner("sft", settings, micro)
        responses = texts.demonstrations.batch(micro)
        longest = texts.demonstrated.longest + texts.demonstrations.longest
        width = tree_width(self.shape, HEAD, longest)
        steps = learner.steps(self.machine, texts.demonstrated.batch(micro) + responses, width, responses)
        return [*steps, learner.saving(self.machine)]

    def _pairs(self, pairs: int) -> tuple[float, float, float]:
        """(tokens, width of rows, response tokens) of a batch of pairs."""
        texts = self.texts
        responses = texts.pair_responses.batch(2 * pairs)
        copies = 1 if self.shape.shares_rows else 2
        longest = texts.pair_prompts.longest + texts.pair_responses.longest
        width = tree_width(self.shape, texts.pair_prompts.mean, longest)
        return copies * texts.pair_prompts.batch(pairs) + responses, width, responses

    def _reward(self) -> list[Terms]:
        settings = self.recipe.reward
        kept = settings.num_layers or self.shape.layers
        shape = _with_layers(self.shape, kept)
        tokens, width, _ = self._pairs(settings.feature_batch_size // 2 or 1)
        inner = tokens * activation(shape, self.dtype, width, self.machine, full=False)  # of one layer at a time
        moments: list[Terms] = [{"weights": self.reward_model, "activations": inner}]
        if settings.mode != "head":
            micro = self._micro(settings)
            learner = self._learner("reward", settings, micro, shape)
            tokens, width, _ = self._pairs(micro)
            moments += [*learner.steps(self.machine, tokens, width, 0), learner.saving(self.machine)]
        return moments

    def _on_prompts(self, stage: str) -> list[Terms]:
        settings, machine, shape = getattr(self.recipe, stage), self.machine, self.shape
        micro = self._micro(settings)
        learner = self._learner(stage, settings, micro)
        dtype = FLOAT if settings.lora is None else self.dtype
        held = {"reward model": self.reward_model}
        if settings.lora is None:
            held["reference"] = shape.parameters * FLOAT / (machine.split if stage == "ppo" else 1)
        drawn = settings.rollouts / machine.processes
        if self.recipe.draws_references:  # completions of π_ref for every prompt that is new
            drawn = max(drawn, drawn / settings.samples_per_prompt * self.recipe.ppo.reference_samples)
        batch = math.ceil(min(settings.generate_batch_size, drawn))
        sampling = decoding(shape, dtype, machine, batch, self.texts.prompts.longest, self.cap)
        length = self.texts.prompts.mean + self.cap
        read = micro * (1 if settings.micro_batch_size else EVALUATED)
        reading = {"logits": logits(shape, min(read, drawn) * self.cap, dtype) + chunk(machine)}
        kept = settings.rollouts * length * shape.hidden * dtype
        if learner.adapter and learner.adapter.layers < shape.layers and machine.processes == 1 and kept <= KEPT_BYTES:
            held["kept states"] = kept
        tokens = self.texts.prompts.batch(micro) + micro * self.cap
        width = tree_width(shape, HEAD, self.texts.prompts.longest + self.cap)
        steps = learner.steps(machine, tokens, width, micro * self.cap)
        between = learner.held(machine)
        if machine.sharded and stage == "ppo" and settings.gather_once:  # of one model at a time: π, or a copied π_ref
            between["gathered weights"] = learner.weights(replace(machine, sharded=False))
        moments = [{**between, **sampling}, {**between, **reading}, *steps, learner.saving(machine)]
        return [{**held, **moment} for moment in moments]

    def _dpo(self) -> list[Terms]:
        settings = self.recipe.dpo
        micro = self._micro(settings)
        learner = self._learner("dpo", settings, micro)
        held = {"reference": self.shape.parameters * FLOAT} if settings.lora is None else {}
        tokens, width, responses = self._pairs(micro)
        steps = learner.steps(self.machine, tokens, width, responses)
        return [{**held, **moment} for moment in [*steps, learner.saving(self.machine)]]

    def _evaluate(self) -> list[Terms]:
        settings, shape = self.recipe.evaluate, self.shape
        held = {"weights": 2 * shape.parameters * self.dtype, "reward model": self.reward_model}
        drawn = settings.num_prompts * max(settings.gibbs_candidates, settings.samples_per_prompt)
        batch = min(settings.batch_size, math.ceil(drawn / self.machine.processes))
        sampling = decoding(shape, self.dtype, self.machine, batch, self.texts.evaluation_prompts.longest, self.cap)
        compared = 2 * logits(shape, KL_TEXTS * self.cap, self.dtype)
        answers: Lengths = self.texts.pair_responses
        likelihood = logits(shape, answers.batch(LIKELIHOOD_TEXTS), self.dtype)
        reading = {"logits": max(compared, likelihood) + chunk(self.machine)}
        return [{**held, **sampling}, {**held, **reading}]


def peak(moments: list[Terms]) -> Terms:
    """The largest moment."""
    return max(moments, key=lambda terms: sum(terms.values()))


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    """The reward backbone: fewer layers, and a score layer of no size instead of the output layer."""
    linear = shape.linear * layers // shape.layers
    return replace(shape, layers=layers, linear=linear, parameters=linear + shape.vocabulary * shape.hidden)


def trains_with(recipe: Recipe) -> dict[str, LoraSettings | None]:
    """By stage that trains, its adapter's settings; None where it trains all weights."""
    found = {"sft": recipe.sft.lora, recipe.aligner: getattr(recipe, recipe.aligner).lora}
    if recipe.reward.external is None and recipe.reward.mode != "head":
        found["reward"] = recipe.reward.lora if recipe.reward.mode == "lora" else None
    return found
