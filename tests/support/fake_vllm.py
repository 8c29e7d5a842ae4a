"""A stand-in for `vllm serve` on a small model: the same answers over HTTP, and the ways in which servers lie."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.logprobs import response_forward, token_batch
from transformers import TopPLogitsWarper

LIES = {
    "stale": "adapter of the version before",
    "base": "base model without the adapter",
    "temperature": "temperature 0.5",
    "raw": "temperature 1 in place of 2",
    "top_p": "a cut tail",
    "tokens": "log-probabilities of other tokens",
    "biased": "a biased sampler",
}
"""Name -> part of the cause that must be named."""


class FakeVllm:
    """A server of `model`; it tells lies from version `from_version` of the adapter on, the truth before.

    Attributes:
        url: its address, while it runs.
        version: of vLLM, as it tells.
        max_model_len: tokens that it takes, as it tells.
        adapters: loaded now, by name.
        log: (path, name of the model or adapter) of all requests.
        failures: statuses of the next requests for a response, in place of answers.
        restart_after: requests for responses, after which it forgets its adapters; None for never.
    """

    def __init__(self, model: Any, pad: int, lie: str = "", from_version: int = 2) -> None:
        self.base, self.pad, self.lie, self.from_version = copy.deepcopy(model), pad, lie, from_version
        self.version, self.max_model_len, self.url = "0.32.0", 64, ""
        self.adapters: dict[str, Path] = {}
        self.log: list[tuple[str, str]] = []
        self.failures: list[int] = []
        self.restart_after: int | None = None
        self.model: Any = None
        self.lock = threading.Lock()

    @contextmanager
    def running(self, port: int = 0) -> Iterator[FakeVllm]:
        """Within, it answers at `url`."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                base = {"id": "base", "parent": None, "max_model_len": fake.max_model_len}
                found = {"/version": {"version": fake.version}, "/v1/models": {"data": [base]}}.get(self.path)
                self.answer(404 if found is None else 200, found)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    self.answer(*fake.post(self.path, body))

            def answer(self, status: int, content: Any) -> None:
                self.close_connection = not fake.url
                if self.close_connection:  # it runs no longer
                    return
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.url = ""
            server.shutdown()
            server.server_close()
            thread.join()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = body.get("model", body.get("lora_name", ""))
        self.log.append((path, name))
        if path == "/v1/load_lora_adapter":
            return self.load(name, Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            return (200, "removed") if self.adapters.pop(name, None) else (404, "cannot be found")
        if self.failures:
            return self.failures.pop(0), "busy"
        if self.restart_after is not None:
            self.restart_after -= 1
            if self.restart_after < 0:
                self.adapters, self.restart_after = {}, None
        if name != "base" and name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        return 200, self.complete(name, body)

    def load(self, name: str, path: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, f"The lora adapter '{name}' has already been loaded."
        if not path.is_dir():
            return 404, f"No adapter found for '{path}'"
        self.adapters[name] = path
        key = name.replace(".", "-")
        with torch.random.fork_rng(devices=[]):  # peft draws weights before it reads them; a server draws elsewhere
            if self.model is None:
                self.model = PeftModel.from_pretrained(self.base, str(path), adapter_name=key).eval()
            elif key not in self.model.peft_config:
                self.model.load_adapter(str(path), adapter_name=key)
        return 200, "added"

    def complete(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        version = int(name.rpartition("-v")[2]) if name != "base" else 0
        lie = self.lie if version >= self.from_version else ""
        model, off = self.model or self.base, nullcontext()
        if self.model is not None:
            off = model.disable_adapter() if name == "base" or lie == "base" else nullcontext()
            if name != "base":
                loaded = list(model.peft_config)
                model.set_adapter(loaded[loaded.index(name.replace(".", "-")) - (lie == "stale")])
        warmth = 0.5 if lie == "temperature" else body["temperature"]
        top_p = 0.5 if lie in ("top_p", "biased") else body["top_p"]
        prompt, stops = body["prompt"], body["stop_token_ids"]
        how = {"pad_token_id": self.pad, "eos_token_id": stops, "batch_size": 1}
        with off, torch.no_grad():
            sampling = Sampling(body["max_tokens"], warmth, top_p)
            (ids,) = sample_responses(model, [prompt], [body["seed"]], sampling, **how)
            logits, _ = response_forward(model, batch := token_batch([prompt], [ids], self.pad, torch.device("cpu")))
        logits = logits if lie == "raw" else logits / warmth
        logits = TopPLogitsWarper(top_p)(None, logits) if lie == "top_p" else logits
        logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, None])[:, 0].tolist()
        if lie == "tokens":
            ids = [token if token in stops else next(t for t in (2, 3) if t != token) for token in ids]
        choice = {"token_ids": ids, "prompt_token_ids": prompt, "logprobs": {"token_logprobs": logprobs}}
        return {"model": name, "choices": [choice]}
