"""Saving what was trained as an ordinary checkpoint: adapters merged by peft, and what was written read again.

Before its folder gets its name, each weight of a checkpoint must be the trained one, rounded once, which finds an
adapter left out; and it must compute what was trained, which finds settings that the weights do not show.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from private_rlhf.core import atomic
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.data.render import Renderer
from private_rlhf.lm.distributed import whole_tensor
from private_rlhf.lm.models import DTYPES, dense_state, end_ids, is_four_bit, load_causal_lm, no_progress_bars, unwrap
from private_rlhf.lm.templates import tokenizer_as_trained
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from accelerate import Accelerator

REFERENCE, ADAPTER = "reference", "adapter"
QUANTISED_REFERENCE = (
    "sft/model quantised to 4 bits (NF4), which the adapter was trained on; the KL penalty, KL and J are measured"
    f" against it, not against sft/model; its dequantised weights are in ppo/{REFERENCE}"
)
"""Statement for cards and reports about a π_ref that is not sft/model itself."""
PROBE = (2, 16)
"""Rows and tokens on which a saved model is compared with the trained one."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats that log-probabilities may differ by on average. In bfloat16 the merged weights, and every product, are rounded:
0.005 to 0.02 on tiny models of six families, 0.07 on SmolLM2."""
SUMS = 1e-6, 1e-4
"""Relative error of a merged weight by the order of float32 sums: of itself, and of the tensor's largest update."""

Read = Callable[..., Any]


def save_merged(
    accelerator: Accelerator,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    dtype: str,
    *,
    wrapped: Any = None,
    read: Read | None = None,
) -> None:
    """Saves a causal LM or PEFT model as an ordinary checkpoint in `dtype`, adapter merged in float32. Every process
    calls it.

    wrapped: holds the weights where they are split; `model` unless given. read: calls the model where a module around
    it has to; `wrapped` unless given. RunStopped: the checkpoint does not compute what `model` does; `target` is as
    before.
    """
    holder = model if wrapped is None else wrapped
    expected = probe_logprobs(holder if read is None else read, model)
    state = accelerator.get_state_dict(holder)
    problem, computed = [""], "bfloat16" if accelerator.mixed_precision == "bf16" else dtype
    if accelerator.is_main_process:
        try:
            write_checkpoint(accelerator.unwrap_model(model), state, tokenizer, target, dtype, expected, computed)
        except RunStopped as error:  # on every process: the others would wait for this one
            problem = [str(error)]
    if broadcast_object_list(problem)[0]:
        raise RunStopped(problem[0])


def save_policy(
    accelerator: Accelerator, policy: Any, renderer: Renderer, folder: Path, dtype: str, quantised: bool, read: Read
) -> None:
    """Saves the policy of PPO to `folder`/model and, of a 4-bit base, its π_ref to `folder`/reference: an adapter
    trained on 4-bit weights corrects those, so both are saved as dequantised weights. Every process calls it; errors of
    `save_merged`."""
    tokenizer = tokenizer_as_trained(renderer)
    save_merged(accelerator, policy, tokenizer, folder / "model", dtype, read=read)
    if quantised:
        with policy.disable_adapter():
            save_merged(accelerator, policy, tokenizer, folder / REFERENCE, dtype, read=read)
    elif accelerator.is_main_process:
        shutil.rmtree(folder / REFERENCE, ignore_errors=True)  # of an earlier recipe


def adapter_tensors(policy: PeftModel) -> dict[str, torch.Tensor]:
    """The whole trainable tensors of an adapter by parameter name, copied to the CPU. Every process calls it."""
    tensors = {name: whole_tensor(each.detach()) for name, each in policy.named_parameters() if each.requires_grad}
    return {name: each.to("cpu", copy=True).contiguous() for name, each in tensors.items()}


def write_adapter(policy: PeftModel, tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Writes the adapter with these tensors as a folder that peft and vLLM load; it does not name its base's folder."""
    name = policy.active_adapter
    config = copy.copy(policy.peft_config[name])
    config.base_model_name_or_path = None
    with atomic.new_folder(target) as temporary:
        state = get_peft_model_state_dict(policy, tensors, adapter_name=name)
        save_file(state, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(temporary))


def keep_adapter(accelerator: Accelerator, policy: Any, folder: Path, served: bool) -> None:
    """Writes `folder`/adapter if servers will draw from it; without them there is none. Every process calls it."""
    bare = accelerator.unwrap_model(policy)
    tensors = adapter_tensors(bare) if served else None
    if accelerator.is_main_process and tensors is not None:
        write_adapter(bare, tensors, folder / ADAPTER)
    elif accelerator.is_main_process:
        shutil.rmtree(folder / ADAPTER, ignore_errors=True)  # of an earlier recipe


def write_checkpoint(
    model: Any,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    dtype: str,
    expected: torch.Tensor | None = None,
    computed: str | None = None,
) -> None:
    """Writes the whole weights `state` of `model`, LoRA merged in float32, to `target` atomically; a 4-bit base becomes
    its dequantised weights. expected: `probe_logprobs` of the model, in precision `computed` (None: dtype). RunStopped
    where the written checkpoint does not load whole, or computes something different."""
    plain = merged_copy(model, state, DTYPES[dtype])
    ends = sorted(end_ids(model, tokenizer))  # plain `generate` goes by this list, not by the tokenizer
    plain.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    with atomic.new_folder(target) as temporary, no_progress_bars():
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)  # safetensors writes 0600; a released checkpoint is as readable as the rest of the run
        del plain
        check_written(temporary, target, dtype, whole_copy(model, state), expected, computed or dtype)


def check_written(
    folder: Path, target: Path, dtype: str, whole: Any, expected: torch.Tensor | None, computed: str
) -> None:
    """Reads `folder` again, which is to become `target`. RunStopped: see `write_checkpoint`.

    whole: the saved model (`whole_copy`); expected: its `probe_logprobs`, in precision `computed`.
    """
    try:
        checkpoint = load_causal_lm(folder, dtype)
    except UserError as error:
        raise RunStopped(f"{target} could not be read again after it was saved, and was not kept: {error}") from None
    if wrong := wrong_weight(whole, checkpoint):
        raise RunStopped(
            f"{target} does not hold the weights that were trained ({wrong} differs by more than rounding) and was not "
            "kept: this architecture cannot be merged; train it with lora: null"
        )
    if expected is None:
        return
    difference = distance(expected, probe_logprobs(checkpoint, checkpoint))
    if not difference <= TOLERANCE[DTYPES[computed]]:
        raise RunStopped(
            f"{target} does not compute what was trained (log-probabilities differ by {difference:.3g} nats on average)"
            " and was not kept: this architecture cannot be merged; train it with lora: null"
        )


@torch.no_grad()
def wrong_weight(whole: Any, checkpoint: torch.nn.Module) -> str | None:
    """The first weight of `written` that is not that of `whole` with its adapter's update, rounded once; or None.

    Merging adds the update in float32 and rounds to the dtype of `written`, by a relative eps/2 at most.
    """
    saved, inner = checkpoint.state_dict(), unwrap(whole)
    layers: dict[str, Any] = {
        f"{name}.{getattr(layer, 'parameter_name', 'weight')}".replace("base_layer.", ""): layer
        for name, layer in inner.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    for full, tensor in inner.state_dict().items():
        name = full.replace("base_layer.", "")
        if "lora_" in name:
            continue
        if name not in saved or saved[name].shape != tensor.shape:
            return name
        trained, update = tensor.float().cpu(), torch.zeros(())
        if name in layers:
            layer = copy.deepcopy(layers[name]).float()  # experts' updates come in the dtype of their weights
            update = sum(layer.get_delta_weight(adapter).float().cpu() for adapter in layer.active_adapters)
            trained = trained + update
        rounding = (torch.finfo(saved[name].dtype).eps / 2 + SUMS[0]) * trained.abs() + SUMS[1] * update.abs().max()
        if not bool(((saved[name].cpu().float() - trained).abs() <= rounding).all()):
            return name
    return None


@torch.no_grad()
def probe_logprobs(read: Any, model: Any) -> torch.Tensor:
    """(rows, tokens, V) float32 on the CPU: log-probabilities of the next token along rows of fixed random tokens.

    read: computes logits: `model` itself, with its dropout off, or what calls it.
    """
    inner: Any = unwrap(model)
    ids = torch.randint(inner.config.get_text_config().vocab_size, PROBE, generator=torch.Generator().manual_seed(0))
    device = next(inner.parameters()).device
    training = model.training
    model.eval()
    try:
        logits = read(input_ids=ids.to(device), attention_mask=torch.ones_like(ids).to(device), use_cache=False).logits
    finally:
        model.train(training)
    return logits.float().log_softmax(dim=-1).cpu()


def distance(expected: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over positions of E|log p − log q|, nats, under p, for log p and log q (…, V)."""
    return float((expected.exp() * (expected - other).abs().clamp_max(1e4)).sum(dim=-1).mean())


@torch.no_grad()
def merged_copy(model: Any, state: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """The plain model inside `model` with the whole weights `state` in `dtype`, adapters merged in float32; for saving
    only, as buffers such as rotary frequencies are missing. RunStopped where `state` does not fit, or for weights that
    are not finite."""
    plain = whole_copy(model, state)
    if isinstance(plain, PeftModel):
        plain = merged(plain, dtype)
    inner: Any = unwrap(model)
    plain.generation_config = copy.deepcopy(inner.generation_config)
    if getattr(plain.config, "output_router_logits", False):
        plain.config.output_router_logits = False  # TRL's SFT asks for router losses: with it, sampling would ask too
    plain.to(dtype)
    plain.config.dtype = dtype
    return plain


def whole_copy(model: Any, state: dict[str, torch.Tensor], device: str = "meta") -> Any:
    """`model` on the tensors of `state`, its adapter included unless that is off; one in 4 bits on its own, dequantised
    tensors. device: of buffers."""
    inner: Any = unwrap(model)
    config = copy.deepcopy(inner.config)
    if is_four_bit(inner):
        state = dense_state(model)
        del config.quantization_config
    with torch.device(device):
        copied: Any = type(inner)(config)
    layers = [module for module in inner.modules() if isinstance(module, BaseTunerLayer)]
    if isinstance(model, PeftModel) and not any(layer.disable_adapters for layer in layers):
        with torch.random.fork_rng(devices=[]):
            copied = get_peft_model(copied, copy.deepcopy(model.peft_config[model.active_adapter]))
    elif layers:
        plain = {name.removeprefix("base_model.model.").replace("base_layer.", ""): name for name in state}
        state = {name: state[full] for name, full in plain.items() if "lora_" not in name}
    fill(copied, state)
    return copied


def fill(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Gives a model on the meta device the weights `state`, tied ones by either name. RunStopped: names differ."""
    result = model.load_state_dict(state, strict=False, assign=True)
    inner: Any = unwrap(model)
    inner.tie_weights()
    missing = sorted(name for name, each in model.named_parameters() if each.is_meta)
    if missing or result.unexpected_keys:
        what = f"lack {missing[0]}" if missing else f"have {result.unexpected_keys[0]} too many"
        raise RunStopped(f"the gathered weights of {type(inner).__name__} {what}: nothing was saved")


def merged(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` without its adapter, merged layer by layer: one layer at a time is in float32."""
    layers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)}
    for name, layer in layers.items():
        if any(name.startswith(f"{other}.") for other in layers):
            continue  # part of a layer: experts have a wrapper around another
        layer.float()
        for part in list(layer.modules()):
            if isinstance(part, BaseTunerLayer):
                try:
                    part.merge(safe_merge=True)
                except ValueError as error:
                    raise RunStopped(f"{name} cannot be merged ({error}): nothing was saved") from None
        layer.to(dtype)
    base: Any = model.base_model
    return base.unload()
