"""The chat template that is saved renders, in plain transformers, what training rendered: token ids are equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import TEMPLATE_DATE, Prompt, Renderer
from private_rlhf.lm.base_models import CHAT_TEMPLATE, smollm2_checkpoint, tiny_tokenizer
from private_rlhf.lm.templates import end_of_turn, give_plain_template, tokenizer_as_trained
from support.families import FAMILIES
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers", "12345 ünïcode"]
THEIRS = Path(trl.__file__).parent / "chat_templates"
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's."""
TULU = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
OF_FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama": ("llama3.jinja", "llama3_1.jinja", "llama3_2.jinja"),
    "Qwen2": ("qwen2_5.jinja",),
    "Qwen3": ("qwen3.jinja", "qwen3_instruct_2507.jinja"),
    "Mistral": (MISTRAL,),
    "Mistral (sliding window)": (MISTRAL,),
    "SmolLM3": ("qwen3.jinja",),
    "Gemma-1": ("gemma.jinja",),
    "Gemma-2": ("gemma.jinja",),
    "Gemma-3 text": ("gemma3.jinja",),
    "Phi-3": ("phi3.jinja", "phi3_5.jinja"),
    "OLMo2": (TULU,),
    "OLMoE": (TULU,),
    "Mixtral": (MISTRAL,),
    "StableLM": (CHAT_TEMPLATE, DEFAULT_SYSTEM),
    "Qwen3-MoE": ("qwen3.jinja",),
    "Qwen3-Next": ("qwen3_instruct_2507.jinja",),
    "DeepSeek-V3": ("deepseekv3.jinja", "deepseek_r1_distill.jinja"),
    "gpt-oss": ("gptoss.jinja",),
    "Granite": (TULU,),
    "Cohere": ("cohere.jinja", "cohere2.jinja"),
    **dict.fromkeys(("Phi", "OPT", "BLOOM", "GPT-2", "GPT-NeoX", "StarCoder2"), ("",)),
}
"""Templates of the families' models, of TRL's package where it has them; "" is the plain one of base models."""
TEMPLATES = sorted({name for names in OF_FAMILIES.values() for name in names} | {"qwen3_training.jinja"})
PROMPTS: list[Prompt] = [
    "the fox",
    [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": " jumps\n"},
        {"role": "user", "content": "who?"},
    ],
    [{"role": "system", "content": "be dull"}, {"role": "user", "content": "the fox"}],
]
ANSWERS = ("rivers are kind", " two\nlines \n", "", "<think>\na\n</think>\n\nb", "ünï ,")
SETTINGS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    ("", {}),
    ("be 'kind' {% endif %}\n", {}),
    ("", {"enable_thinking": False, "xml": {"a": [None, 1.5, "ü"]}}),
]


def tokenizer_of(template: str) -> Any:
    """The tiny tokenizer with a template (a file of TRL's, text, or "" for the plain one) and its special tokens."""
    tokenizer: Any = tiny_tokenizer(TEXTS)
    text = (THEIRS / template).read_text(encoding="utf-8") if template.endswith(".jinja") else template
    special = sorted({*re.findall(r"<[|｜][^<>]+[|｜]>|</?(?:start_of_turn|end_of_turn)>", text), "<BOS>"})
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.bos_token = "<BOS>"
    if text:
        tokenizer.chat_template = text
    else:
        give_plain_template(tokenizer)
    tokenizer.eos_token = end_of_turn(tokenizer) or tokenizer.eos_token
    return tokenizer


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def plain_ids(tokenizer: Any, messages: Any, **how: Any) -> list[int]:
    """Token ids as plain transformers gives them by default."""
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=True, **how)["input_ids"]
    return ids


def check_equal(renderer: Renderer, folder: Path) -> int:
    """How many renderings were equal, with the tokenizer saved and read again; those that training refuses are not."""
    tokenizer_as_trained(renderer).save_pretrained(folder)
    saved, equal = PreTrainedTokenizerFast.from_pretrained(folder), 0
    for prompt in PROMPTS:
        try:
            expected = renderer.prompt_ids(prompt)
        except UserError:
            continue
        messages = messages_of(prompt)
        assert plain_ids(saved, messages, add_generation_prompt=True) == expected
        for answer in ANSWERS:
            whole = [*messages, {"role": "assistant", "content": answer}]
            assert plain_ids(saved, whole) == expected + renderer.response_ids(answer)
            equal += 1
    return equal


def test_every_family_that_is_trained_has_a_template_here() -> None:
    assert set(FAMILIES) - set(OF_FAMILIES) == {"Falcon-H1", "Gemma-3 multimodal", "Mamba"}  # refused


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda text: text if len(text) < 40 else text[:24])
def test_a_saved_template_renders_what_training_rendered(template: str, tmp_path: Path) -> None:
    tokenizer, equal = tokenizer_of(template), 0
    for number, (system, variables) in enumerate(SETTINGS):
        equal += check_equal(Renderer(tokenizer, 10**6, 64, system, variables), tmp_path / str(number))
    refuses_system = template in (MISTRAL, "gemma.jinja")
    assert equal == len(ANSWERS) * (6 if refuses_system else 12)


def test_the_defect_is_there_without_the_saved_template() -> None:
    """A newline behind the answer, and a system message that training never had: the issue's two causes."""
    tokenizer = tokenizer_of(DEFAULT_SYSTEM)
    renderer = Renderer(tokenizer, 10**6, 64, "")
    turns = [*messages_of("the fox"), {"role": "assistant", "content": "who"}]
    text = tokenizer.decode(plain_ids(tokenizer, turns))
    assert text.startswith("<|im_start|>system\nYou are a helpful")
    assert text.endswith("who<|im_end|>\n")
    saved = tokenizer_as_trained(renderer)
    assert saved.decode(plain_ids(saved, turns)).endswith("<|im_start|>assistant\nwho<|im_end|>")
    assert "helpful" not in saved.decode(plain_ids(saved, turns))
    assert "helpful" in tokenizer.decode(plain_ids(tokenizer, turns))  # the renderer's own is as it was


def test_saving_again_changes_a_template_only_when_the_settings_change() -> None:
    """Stage reward saves the tokenizer that stage sft saved; another run may start from a saved model."""
    first = Renderer(tokenizer_of(DEFAULT_SYSTEM), 10**6, 64, "", {"enable_thinking": False})
    saved = tokenizer_as_trained(first)
    again = tokenizer_as_trained(Renderer(saved, 10**6, 64, "", {"enable_thinking": False}))
    assert again.chat_template == saved.chat_template
    later = Renderer(saved, 10**6, 64, "be kind")
    other = tokenizer_as_trained(later)
    whole = [*messages_of("the fox"), {"role": "assistant", "content": "who"}]
    assert plain_ids(other, whole) == later.prompt_ids("the fox") + later.response_ids("who")
    assert other.decode(plain_ids(other, whole)).count("who") == 1


def test_callers_may_set_variables_and_bring_other_messages() -> None:
    """What transformers, TRL and vLLM's chat endpoint do besides: variables, prefills, masks, parts, tools."""
    tokenizer = tokenizer_of("qwen3_training.jinja")
    saved = tokenizer_as_trained(Renderer(tokenizer, 10**6, 64, "", {"enable_thinking": False}))
    turns = messages_of("the fox")
    assert "<think>" in saved.decode(plain_ids(saved, turns, add_generation_prompt=True))
    asked = plain_ids(saved, turns, add_generation_prompt=True, enable_thinking=True)
    assert "<think>" not in saved.decode(asked)
    whole = [*turns, {"role": "assistant", "content": "who"}]
    prefilled = plain_ids(saved, whole, continue_final_message=True)
    assert prefilled == plain_ids(saved, whole)[:-1]
    masked = saved.apply_chat_template(whole, return_dict=True, return_assistant_tokens_mask=True)
    kept = [token for token, mask in zip(masked["input_ids"], masked["assistant_masks"], strict=True) if mask]
    assert saved.decode(kept) == "who<|im_end|>"
    parts = [*turns, {"role": "assistant", "content": [{"type": "text", "text": "who"}]}]
    assert plain_ids(saved, parts) == plain_ids(saved, whole)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling = [*turns, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "<tool_call>" in saved.apply_chat_template(calling, tokenize=False)
    open_turn = saved.apply_chat_template(turns, tokenize=False)
    assert open_turn.endswith("the fox<|im_end|>\n")


def test_the_date_of_a_template_is_that_of_training() -> None:
    saved = tokenizer_as_trained(Renderer(tokenizer_of("llama3_2.jinja"), 10**6, 64))
    assert TEMPLATE_DATE in saved.apply_chat_template(messages_of("the fox"), tokenize=False)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_tokenizers_that_put_a_space_before_each_text(scheme: str, tmp_path: Path) -> None:
    """As Llama-2's, Mistral's and Gemma's: training renders the answer by itself, and gets that space."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", "<pad>", "[INST]", "[/INST]"])
    letters = "".join(map(chr, range(32, 127))) + "ünï\n"
    inner.train_from_iterator([*TEXTS, " ".join(letters), letters], trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=MISTRAL
    )
    assert check_equal(Renderer(tokenizer, 10**6, 64), tmp_path) == 2 * len(ANSWERS)


def test_what_cannot_be_rendered_alike_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that reads answers in another way once they stand behind a prompt."""
    tokenizer = tokenizer_of("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer.add_tokens(["questionAn", "question An"])
    tokenizer_as_trained(Renderer(tokenizer, 10**6, 64))
    assert "renders answers with other tokens than training" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_s_own_template(tmp_path: Path) -> None:
    from private_rlhf.lm.models import load_tokenizer

    tokenizer = load_tokenizer(smollm2_checkpoint(tmp_path / "cache"))
    for number, system in enumerate((None, "", "be kind")):
        assert check_equal(Renderer(tokenizer, 10**6, 64, system), tmp_path / str(number)) == 3 * len(ANSWERS)
