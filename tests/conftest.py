"""Fixtures for every test. No network; the real data only where it lies on the machine."""

from __future__ import annotations

import gc
import os
import random
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from private_rlhf.privacy.keys import keygen
from support.browsers import Browser, Tab
from support.chromium import Chromium
from support.firefox import Firefox
from support.pipeline_runs import Workspace

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch with one thread each is faster than all of them with a thread per core. Set before
    # torch is imported, and handed on to the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, and no time limit: the machine may be busy with something else.
hypothesis.settings.register_profile("deterministic", deadline=None, derandomize=True)
hypothesis.settings.load_profile("deterministic")

SECRETS = random.Random("before the first test")
THOROUGH = {
    "accounting/test_subset_sampling.py", "audit/test_leaky_bundles.py", "cli/test_bad_input.py",
    "cli/test_catalogue.py", "cli/test_core_install.py", "cli/test_outputs.py", "cli/test_plan.py",
    "cli/test_privatize_bad_input.py", "core/test_coin_reward.py", "data/test_name_spellings.py", "data/test_parts.py",
    "data/test_text_spellings.py", "docs/test_notebook.py", "evaluation/test_design.py", "fuzz/test_readers.py",
    "labelling/test_connections.py", "labelling/test_server.py", "labelling/test_soak.py", "launch/test_nodes.py",
    "lm/test_architecture_check.py", "lm/test_gpu_rehearsal.py", "lm/test_made_once.py", "mutations/test_mutations.py",
    "report/test_in_browsers.py", "reward_models/test_early_stopping.py", "reward_models/test_quick_start.py",
    "reward_models/test_sharded.py", "reward_models/test_trainer.py", "rl/test_answer_learner.py", "rl/test_engine.py",
    "rl/test_gibbs.py", "rl/test_group.py", "rl/test_pretended_gpu.py", "rl/test_served_draws.py", "rl/test_sharded.py",
    "stages/test_judged_evaluation.py", "stages/test_llama_recipe.py", "stages/test_online.py",
    "stages/test_online_kills.py", "stages/test_own_data.py", "stages/test_quantised_ppo.py", "stages/test_resume.py",
    "stages/test_resume_world.py", "stages/test_reward_at_scale.py", "stages/test_served_run.py",
    "stages/test_trackers.py", "stages/test_twin_metadata.py", "stages/test_two_processes.py", "stages/test_upload.py",
    "validation/test_claims.py", "validation/test_studies.py",
}  # fmt: skip
"""Modules of `make test-all` only: they take more than half of its time. `make test` keeps what a change is likely to
break, and every law of privacy and numerics."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and item.path.relative_to(folder).as_posix() in THOROUGH:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is left out of later collections, of which a run makes one after each stage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _a_user_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What belongs to the user and no project: no test meets what another run, or the user, left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("user")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _a_user_for_each_module(tmp_path_factory: pytest.TempPathFactory, _a_user_of_its_own: None) -> Iterator[None]:
    """Of fixtures that a module shares: keys of two modules may release the same records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("user")))
        yield


@pytest.fixture(autouse=True)
def _on_the_first_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, _a_user_for_each_module: None
) -> None:
    """Each test is a user of its own; it may go to another machine (`other_machines`), and comes back."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("user")))


@pytest.fixture(scope="session", autouse=True)
def _the_same_secrets_in_every_run() -> Iterator[None]:
    """Keys and coins that the code draws from the operating system come from `SECRETS`, in this process.

    With a fresh key, twenty labels come out of two releases alike once in a while: a test must not fail by such luck
    in one run of many. Processes that a test starts draw real secrets; `workspace` gives them a key.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", lambda size=32: SECRETS.randbytes(size))
        patch.setattr(secrets, "randbits", SECRETS.getrandbits)
        patch.setattr(secrets, "SystemRandom", lambda: SECRETS)
        yield


@pytest.fixture(scope="session", autouse=True)
def _source_files_are_read_once() -> Iterator[None]:
    """They do not change meanwhile, and the runner reads them four times for each stage."""
    from private_rlhf import runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "source_files", cache(runner.source_files))
        yield


@pytest.fixture(autouse=True)
def _secrets_of_this_test(request: pytest.FixtureRequest) -> None:
    """Each test starts from its own name, so that its secrets are the same when it runs alone."""
    SECRETS.seed(request.node.nodeid)


@pytest.fixture(scope="session")
def hh_helpful() -> Path:
    """Folder with `train.jsonl` and `eval.jsonl` of real HH-RLHF pairs; skips where it is absent."""
    root = os.environ.get("PRIVATE_RLHF_TEST_DATA")
    if not root:
        pytest.skip("PRIVATE_RLHF_TEST_DATA is not set: it names the folder that holds hh_helpful/")
    folder = Path(root) / "hh_helpful"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist: PRIVATE_RLHF_TEST_DATA names the folder that holds hh_helpful/")
    return folder


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Key and base model shared by the runs of the session."""
    root = tmp_path_factory.mktemp("workspace")
    SECRETS.seed("workspace")
    keygen(root / "owner.key")
    return Workspace(root)


@pytest.fixture(scope="session")
def finished_run(workspace: Workspace) -> Path:
    """The run directory of one complete tiny run; tests read it or work on a copy."""
    run = workspace.root / "finished"
    workspace.run(run)
    return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels are on, also where the suite runs with PRIVATE_RLHF_KERNELS=plain."""
    from private_rlhf.lm.kernels import SWITCH, plain

    monkeypatch.delenv(SWITCH, raising=False)
    plain.cache_clear()
    yield
    monkeypatch.undo()
    plain.cache_clear()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer on disk."""
    from private_rlhf.lm.base_models import tiny_checkpoint

    texts = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers", "12345 ünïcode"]
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", texts)


@pytest.fixture
def small() -> Any:
    """A Llama of eight tokens, to enumerate; pad 0, end-of-turn 1. Far from uniform."""
    import torch
    from private_rlhf.lm.base_models import tiny_config
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(8, 1, 0)).eval()
    model.lm_head.weight.data.mul_(3)  # peaked, so that tests of the sampler can tell near misses
    return model


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    """fsync does nothing: a test that kills processes, not the machine, cannot tell, and need not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


FIREFOX = pytest.param(Firefox, id="firefox", marks=pytest.mark.thorough)  # a change mostly shows in either


@pytest.fixture(scope="module", params=[pytest.param(Chromium, id="chromium"), FIREFOX])
def program(request: pytest.FixtureRequest) -> Callable[[Path], Browser]:
    """Each browser in turn, to be started with a folder; one that is not installed skips."""
    start: Callable[[Path], Browser] = request.param
    return start


@pytest.fixture(scope="module")
def browser(program: Callable[[Path], Browser], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Each browser in turn, started once for a module."""
    try:
        started = program(tmp_path_factory.mktemp("browser"))
    except AssertionError:  # Firefox sometimes hangs as it starts on a busy machine
        started = program(tmp_path_factory.mktemp("browser"))
    with started as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new tab of each browser."""
    tab = browser.tab()
    yield tab
    tab.close()
