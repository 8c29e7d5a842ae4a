"""vLLM servers that draw a policy's responses: they get its adapter.

A server (`launch/vllm.sh`) serves π_ref. Each version of the adapter goes into a new folder under a new name, is loaded
by every server, and takes the place of the one before, whose folder stays for one version more: vLLM may read it again.
Each row is one request with the seed of its key, token ids in and out, so nothing is rendered or tokenised twice.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from packaging.version import InvalidVersion, Version
from peft import PeftModel
from private_rlhf.core.errors import RunStopped, UserError, one_line
from private_rlhf.data.render import Renderer
from private_rlhf.lm.distributed import adapter_off, put_back
from private_rlhf.lm.drawing import Engine, Numbers, Rows
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import end_ids
from private_rlhf.lm.saving import adapter_tensors, write_adapter
from private_rlhf.recipe.rollout_section import MAX_RANK, UNSERVED_MODULES, RolloutConfig
from private_rlhf.rl.sync_proof import Draws, SyncProof
from requests.adapters import HTTPAdapter
from tqdm import tqdm

OLDEST = Version("0.32")
"""Of vLLM: earlier CPU builds ignored seeds in mixed batches, and their sampler had a bias."""
UNSERVED = ("modules_to_save", "use_dora", "target_parameters", "trainable_token_indices", "layer_replication")
"""Options of an adapter that vLLM ignores or refuses."""

REFERENCES = 64, 2048
"""Responses of each process, and tokens, that are read at least where the trainer does not read all."""

NEUTRAL = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Settings of sampling that a checkpoint's generation_config would otherwise change."""

Response = tuple[list[int], list[float]]


@dataclass
class VllmEngine(Engine):
    """Clients of `vllm serve`, one set per process.

    Attributes:
        settings: section rollout.
        proof: that they draw from the weights they were given.
        folder: of the adapters.
        ends: token ids that end a response.
        tokens: of the longest prompt with the longest response.
        batch_size: requests of this process at a time.
        version: of the adapter that is served; 0 before the first.
        published, previous: trainable adapter tensors of that version and of the one before, by parameter name.
        reference: π_ref, where it is not the policy without its adapter.
        facts: version of vLLM by address, for the manifest.
        proofs: of what was drawn and is in no history.
    """

    accelerator: Accelerator
    settings: RolloutConfig
    proof: SyncProof
    folder: Path
    ends: Collection[int]
    tokens: int
    batch_size: int
    version: int = 0
    published: dict[str, torch.Tensor] = field(default_factory=dict)
    previous: dict[str, torch.Tensor] = field(default_factory=dict)
    reference: Any | None = None
    facts: dict[str, str] = field(default_factory=dict)
    proofs: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """UserError: a server is too old, serves too short texts, or is not one of vLLM."""
        self.urls = [url.rstrip("/") for url in self.settings.urls]
        self.folder = self.folder.expanduser().resolve()
        self._session = requests.Session()
        self._session.trust_env = False  # neither a proxy nor ~/.netrc: rollouts go to the addresses that were named
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=self.batch_size))
        self._bases: dict[str, str] = {}
        self._names = f"policy-{self._agreed(uuid.uuid4().hex[:8])}"  # new in each start: no name comes twice
        self._on_main(self._clear)
        for url in self.urls:
            self._connect(url)

    def replica(self, row: int) -> str:
        """The server that draws this process's row `row`."""
        return self.urls[(row + self.accelerator.process_index) % len(self.urls)]

    # --- weights ------------------------------------------------------------------------------------------------------

    def publish(self, weights: PeftModel | Path) -> None:
        """See `Engine`. UserError: the folder is not there. RunStopped: a server refuses it, or does not answer."""
        if isinstance(weights, Path) and not weights.is_dir():
            raise UserError(f"{weights} must hold the policy's adapter, got none: run {weights.parent.name} again")
        self.previous = self.published
        self.published = adapter_tensors(weights) if isinstance(weights, PeftModel) else {}
        self.version += 1
        self._on_main(lambda: self._replace(weights))

    def _replace(self, weights: PeftModel | Path) -> None:
        """Writes the adapter, has every server load it and forget the one before."""
        if isinstance(weights, PeftModel):
            write_adapter(weights, self.published, self._path(self.version))
        else:
            shutil.copytree(weights, self._path(self.version))
        for url in self.urls:
            self._load(url)
            if self.version > 1:
                self._send("POST", url, "/v1/unload_lora_adapter", json={"lora_name": self._name(self.version - 1)})
        shutil.rmtree(self._path(self.version - 2), ignore_errors=True)

    def _load(self, url: str) -> None:
        path = self._path(self.version)
        body = {"lora_name": self._name(self.version), "lora_path": str(path)}
        answer = self._send("POST", url, "/v1/load_lora_adapter", json=body)
        if answer.status_code != 200 and "already been loaded" not in answer.text:
            raise RunStopped(f"the server at {url} does not load the adapter {path} ({_error(answer)}): start it with"
                             " launch/vllm.sh, and let it see that folder under that path")

    def prove(self, prompts: Rows, responses: Rows, logprobs: Numbers, read: Numbers | None = None,
              at_reference: bool = False) -> dict[str, float]:
        """See `Engine`."""
        draws = Draws(prompts, responses, logprobs, [self.replica(row) for row in range(len(prompts))])
        if read is None:
            draws = draws.rows(draws.spread(*REFERENCES))
        if at_reference:
            with self._base():
                return self.proof.check(draws, read, {})
        return self.proof.check(draws, read, {"base": self._base} | ({"previous": self.stale} if self.previous else {}))

    def draw(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
             progress: str | None = None) -> list[list[int]]:
        """See `Engine`; its proofs are kept for `summary`."""
        rows, logprobs = self.sample(model, prompts, keys, sampling, at_reference, progress)
        self.proofs.append(self.prove(prompts, rows, logprobs, at_reference=at_reference))
        return rows

    def summary(self, history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """See `Engine`."""
        proofs = [*self.proofs, *(proof for entry in history for proof in entry.get("engine", {}).values())]
        tokens = sum(proof["tokens"] for proof in proofs)
        sums = {name: sum(proof[name] * proof["tokens"] for proof in proofs) for name in ("mean", "kl")}
        means = {name: value / max(1, tokens) for name, value in sums.items()}
        largest = max((proof["largest"] for proof in proofs), default=0.0)
        return {"vllm": sorted(self.facts.values()), "tokens": tokens, "largest": largest, **means}

    def _base(self) -> AbstractContextManager[Any]:
        """Within, the proof reads π_ref."""
        policy = self.proof.policy
        return adapter_off(policy) if self.reference is None else self.proof.reading(self.reference)

    @contextlib.contextmanager
    def stale(self) -> Iterator[None]:
        """Within, the policy has the adapter of the version before. Every process calls it."""
        parameters = dict(self.proof.policy.named_parameters())
        for tensors in (self.previous, self.published):
            for name, tensor in tensors.items():
                put_back(parameters[name], tensor)
            if tensors is self.previous:
                yield

    def _name(self, version: int) -> str:
        return f"{self._names}-v{version}"

    def _path(self, version: int) -> Path:
        return self.folder / self._name(version)

    def _clear(self) -> None:
        """Removes the adapters that earlier starts left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("policy-*-v*"):
            shutil.rmtree(old, ignore_errors=True)

    def _agreed(self, text: str) -> str:
        """The text of the main process."""
        texts: list[Any] = [text]
        return str(broadcast_object_list(texts)[0])

    def _on_main(self, work: Callable[[], None]) -> None:
        """Does it in the main process only; what stops it stops all. RunStopped."""
        problem = ""
        if self.accelerator.is_main_process:
            try:
                work()
            except RunStopped as error:
                problem = str(error)
        if problem := self._agreed(problem):
            raise RunStopped(problem)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
               progress: str | None = None) -> tuple[list[list[int]], list[list[float]]]:
        """See `Engine`. RunStopped: a server does not answer, or not with a response."""
        rows: list[Response] = []
        problem = ""
        with ThreadPoolExecutor(self.batch_size) as pool:
            jobs = [
                pool.submit(self._respond, self.replica(row), list(prompt), key, sampling, at_reference)
                for row, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
            ]
            bar = tqdm(jobs, desc=progress, unit="sample", disable=progress is None or not jobs, leave=False)
            try:
                rows = [job.result() for job in bar]
            except RunStopped as error:
                problem = str(error)
                pool.shutdown(wait=True, cancel_futures=True)
        if problems := [each for each in self.proof.gather([problem]) if each]:  # one stops, all stop
            raise RunStopped(problems[0])
        return [ids for ids, _ in rows], [logprobs for _, logprobs in rows]

    def _respond(self, url: str, prompt: list[int], key: int, how: Sampling, at_reference: bool) -> Response:
        """Token ids and log-probabilities of one response."""
        name = self._bases[url] if at_reference else self._name(self.version)
        body = NEUTRAL | {"model": name, "prompt": prompt, "seed": key, "stop_token_ids": sorted(self.ends)}
        body |= {"max_tokens": how.max_new_tokens, "temperature": how.temperature}
        body |= {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
        answer = self._send("POST", url, "/v1/completions", json=body)
        deadline = time.monotonic() + self.settings.patience
        while answer.status_code in (404, 500) and time.monotonic() < deadline:  # it dies, or was started again
            if answer.status_code == 404 and not at_reference:
                self._load(url)
            time.sleep(0.2)
            answer = self._send("POST", url, "/v1/completions", json=body)
        if answer.status_code != 200:
            raise RunStopped(f"the server at {url} does not draw a response ({_error(answer)}): see its log")
        try:
            choice = answer.json()["choices"][0]
            ids, logprobs = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
            read, served = choice["prompt_token_ids"], answer.json()["model"]
        except (ValueError, LookupError, TypeError):
            remedy = "start it with launch/vllm.sh"
            raise RunStopped(f"the server at {url} must answer as vLLM {OLDEST} does: {remedy}") from None
        ended = [place for place, token in enumerate(ids) if token in self.ends]
        whole = ended == [len(ids) - 1] or (not ended and len(ids) == how.max_new_tokens)
        if read != prompt or served != name:
            raise RunStopped(f"the server at {url} answered another prompt or model than it was asked: see its log")
        if not whole or len(logprobs) != len(ids) or not all(isinstance(each, int | float) for each in logprobs):
            raise RunStopped(f"the server at {url} answered with {len(ids)} tokens, not a whole response: see its log")
        return ids, logprobs

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _connect(self, url: str) -> None:
        """Asks the server who it is."""
        problem = f"rollout.urls must be servers of vLLM {OLDEST} or later, got {url}"
        try:
            version = str(self._send("GET", url, "/version").json()["version"])
            models = self._send("GET", url, "/v1/models").json()["data"]
            (base,) = (model for model in models if not model.get("parent"))
            if Version(version) < OLDEST:
                raise UserError(f"{problem} with {version}: upgrade it")
        except (ValueError, LookupError, TypeError, InvalidVersion):
            raise UserError(f"{problem}: start them with launch/vllm.sh") from None
        length = base.get("max_model_len")
        if length is not None and length < self.tokens:
            raise UserError(f"--max-model-len of {url} must be at least {self.tokens}, got {length}: raise it")
        self._bases[url], self.facts[url] = base["id"], version

    def _send(self, method: str, url: str, path: str, **more: Any) -> requests.Response:
        """The answer; a server that is down or busy is asked again. RunStopped: for too long."""
        deadline, wait = time.monotonic() + self.settings.patience, 0.25
        while True:
            try:
                timeout = (10.0, max(10.0, self.settings.patience))
                answer = self._session.request(method, url + path, timeout=timeout, allow_redirects=False, **more)
                if answer.status_code not in (429, 502, 503, 504):
                    return answer
                problem = f"status {answer.status_code}"
            except requests.RequestException as error:
                problem = type(error).__name__
            if time.monotonic() + wait > deadline:
                raise RunStopped(f"the server at {url} has not answered for {self.settings.patience:g} s ({problem}): "
                                 "start it again with launch/vllm.sh, then this run")
            time.sleep(wait)
            wait = min(2 * wait, 5.0)


def _error(answer: requests.Response) -> str:
    return f"status {answer.status_code}: {one_line(answer.text, 300)}"


def connect(
    accelerator: Accelerator,
    settings: RolloutConfig,
    policy: Any,
    renderer: Renderer,
    folder: Path,
    dtype: str,
    temperature: float,
    batch_size: int,
    *,
    reference: Any | None = None,
    call: Callable[..., Any] | None = None,
    together: bool = False,
) -> VllmEngine:
    """The vLLM servers of section rollout for `policy`, with the proof that they serve it.

    folder: of the adapters, unless the section names one. dtype: of the base model. batch_size: requests of each
    process at a time. reference: π_ref as a model of its own, where nothing is learnt and each process proves its own
    draws, unless they go `together`; None where `policy` has an adapter that is learnt. call, together: of `SyncProof`.
    UserError: vLLM cannot serve what `policy` trains, or a server does not fit. RunStopped: one does not answer.
    """
    learnt = reference is None
    if learnt:
        check_servable(policy)
    bounds = settings.bounds(dtype if accelerator.mixed_precision == "no" else "bfloat16")
    proof = SyncProof(accelerator, policy, renderer.tokenizer, temperature, bounds, call, together, learnt or together)
    ends, tokens = end_ids(policy, renderer.tokenizer), renderer.max_prompt_tokens + renderer.max_response_tokens
    folder = settings.folder or folder
    return VllmEngine(accelerator, settings, proof, folder, ends, tokens, batch_size, reference=reference)


def check_servable(policy: Any) -> None:
    """UserError where vLLM cannot serve what `policy` trains: it takes plain LoRA on the layers' linear modules."""
    rule = "with rollout.engine vllm"
    if not isinstance(policy, PeftModel):
        raise UserError(f"lora must not be null {rule}, which serves adapters: set it")
    config: Any = policy.peft_config[policy.active_adapter]
    options = [name for name in UNSERVED if getattr(config, name, None)]
    options += ["bias"] if getattr(config, "bias", "none") != "none" else []
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, _ in policy.named_parameters() if ".lora_" in name}
    if outside := [*options, *sorted(adapted & UNSERVED_MODULES)]:
        raise UserError(f"lora must be plain {rule}, got {outside[0]}, which vLLM does not serve: leave it out")
    if config.r > MAX_RANK:
        raise UserError(f"lora.rank must be at most {MAX_RANK} {rule}, got {config.r}: lower it")
