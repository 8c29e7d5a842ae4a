"""The public Python API: names, signatures, examples, and folders with modules of the same names as ours."""

from __future__ import annotations

import copy
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import private_rlhf
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from private_rlhf import PpoConfig, PpoTrainer, RewardScorer, gibbs_weights, privatize
from private_rlhf.core.errors import UserError
from private_rlhf.data.render import Prompt
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.privacy.keys import PrivacyKey
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SIGNATURES = {
    "privatize": ["labels", "epsilon", "key", "ids"],
    "canonicalize": ["batch", "labeler_column", "event_column"],
    "release": ["sorted_batch", "key", "epsilon"],
    "read_release": ["directory"],
    "verify_release": ["folder", "signer", "as_published"],
    "load_recipe": ["path", "overrides"],
    "run": ["recipe", "folder", "start", "only"],
    "private_likelihood_loss": ["margin", "private_label", "noise"],
    "gibbs_weights": ["scores", "kl_coef"],
    "RandomizedResponse": ["epsilon"],
    "LabelNoise": ["epsilon", "exact_keep"],
    "sample_key": ["parts"],
    "Sampling": ["max_new_tokens", "temperature", "top_p"],
    "sample_responses": [
        "model", "prompts", "keys", "sampling", "pad_token_id", "eos_token_id", "batch_size", "progress",
    ],
}  # fmt: skip
FROM_POLICY = [
    "policy", "tokenizer", "reward", "prompts", "settings", "max_prompt_tokens", "max_response_tokens", "seed",
    "accelerator",
]  # fmt: skip


def test_every_public_name_exists() -> None:
    assert set(private_rlhf.__all__) == set(private_rlhf._MODULES) <= set(dir(private_rlhf))
    for name in private_rlhf.__all__:
        assert getattr(private_rlhf, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = private_rlhf.nothing


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(private_rlhf, name)).parameters) == SIGNATURES[name]


def test_the_signature_of_the_trainer() -> None:
    assert list(inspect.signature(private_rlhf.PpoTrainer.from_policy).parameters) == FROM_POLICY


def test_importing_loads_nothing() -> None:
    program = (
        "import sys, private_rlhf; private_rlhf.__all__\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "ours = [name for name in sys.modules if name.startswith('private_rlhf.')]\n"
        "assert not heavy and not ours, (heavy, ours)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_folder_with_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("pipeline", "reward_models"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')\n")
    for arguments in (["-m", "private_rlhf.cli", "--help"], ["-c", "import private_rlhf.reward_models.losses"]):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert bool(done.stdout) == ("-m" in arguments)


# --- labels in a program ----------------------------------------------------------------------------------------------


def test_keyed_labels_repeat_at_the_stated_rate() -> None:
    """The key is fixed, so no false alarm; the bound is four standard errors."""
    key, labels = PrivacyKey(bytes(range(32))), [1, -1] * 2000
    ids = [f"pair {number}" for number in range(4000)]
    weak, strong = (privatize(labels, epsilon, key, ids) for epsilon in (2.0, 0.5))
    assert weak == privatize(labels, 2.0, key, ids)
    assert privatize(labels[::-1], 2.0, key, ids[::-1]) == weak[::-1]
    flips = [{i for i, z in enumerate(drawn) if z != labels[i]} for drawn in (weak, strong)]
    for flipped, alpha in zip(flips, (0.8808, 0.6225), strict=True):
        assert abs(len(flipped) / 4000 - (1 - alpha)) < 4 * 0.0079


def test_labels_without_a_key_are_drawn_anew() -> None:
    labels = [1] * 400
    assert privatize(labels, 0.5) != privatize(labels, 0.5)  # equal with probability below 1e-100


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("epsilon must be", {"epsilon": 0.0}),
        ("a label must be", {"labels": [1, 0]}),
        ("a label must be", {"labels": np.array([True, False])}),
        ("labels must be", {"labels": {1, -1}}),
        ("labels must be", {"labels": (label for label in (1, -1))}),
        ("labels must be", {"labels": 1}),
        ("key and ids must be", {"ids": ["a", "b"]}),
        ("key and ids must be", {"key": PrivacyKey(bytes(32))}),
        ("key must be", {"key": bytes(32), "ids": ["a", "b"]}),
        ("ids must be", {"key": PrivacyKey(bytes(32)), "ids": ["a", "a"]}),
        ("ids must be", {"key": PrivacyKey(bytes(32)), "ids": ["a"]}),
        ("ids must be", {"key": PrivacyKey(bytes(32)), "ids": [1, 2]}),
        ("ids must be", {"key": PrivacyKey(bytes(32)), "ids": [["a"], None]}),
    ],
)
def test_wrong_lists_are_refused(message: str, wrong: dict) -> None:
    with pytest.raises(UserError, match=f"^{message} "):
        privatize(**{"labels": [1, -1], "epsilon": 1.0, **wrong})


@pytest.mark.parametrize("array", [np.array, torch.tensor, pa.array, tuple])
def test_labels_of_arrays(array: Any) -> None:
    key, ids = PrivacyKey(bytes(32)), ["a", "b", "c"]
    assert privatize(array([1, -1, 1]), 1.0, key, ids) == privatize([1, -1, 1], 1.0, key, ids)


def test_one_override_is_taken_whole() -> None:
    """A text is a sequence of letters, of which the first was refused."""
    recipe = ROOT / "configs" / "own_data.yaml"
    one = private_rlhf.load_recipe(recipe, "ppo.kl_coef=0.2")
    assert one == private_rlhf.load_recipe(recipe, ["ppo.kl_coef=0.2"])
    assert one.ppo.kl_coef == 0.2


def test_gibbs_weights_are_numbers() -> None:
    assert gibbs_weights(np.zeros(4), 1.0).tolist() == [0.25] * 4
    assert gibbs_weights(np.array([100, 0], np.float16), 1e-3).tolist() == [1.0, 0.0]


def test_a_path_is_no_recipe() -> None:
    with pytest.raises(UserError, match="recipe must be what load_recipe returns, got str"):
        private_rlhf.run("recipe.yaml")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_page_runs_from_a_wheel_beside_files_of_the_same_names(tmp_path: Path) -> None:
    """The folder has its own `pipeline.py` and `reward_models.py`. Fresh noise: a false alarm in < 1e-6 of runs."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "source").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    for name in ("pipeline", "reward_models"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["-qq", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "packages")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    subprocess.run([*command, str(tmp_path / "source")], check=True, capture_output=True)
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("pipeline.py", "reward_models.py"):
        (folder / name).write_text("raise SystemExit('the file of the user was imported')\n")
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    blocks = [block.split("\n```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 4
    program = "\n".join([*blocks, "import private_rlhf", "print(private_rlhf.__file__)"])
    text = in_a_fresh_process(["-c", program], folder, PYTHONPATH=str(tmp_path / "packages"))
    assert text.splitlines()[-1].startswith(str(tmp_path / "packages"))


@pytest.mark.thorough
def test_the_private_loss_in_a_trainer_of_trl(tmp_path: Path) -> None:
    """The held-out accuracy is that of the best reward, .9, within five standard errors: of fresh noise, so a false
    alarm has probability < 1e-5.
    """
    program = DOCS / "examples" / "private_reward.py"
    assert len(program.read_text(encoding="utf-8").splitlines()) <= 60
    text = in_a_fresh_process([str(program)], tmp_path)
    accuracy = float(re.search(r"held-out debiased accuracy ([\d.]+) ±", text)[1])  # type: ignore[index]
    assert 0.77 < accuracy < 1.03
    assert not list(tmp_path.iterdir())


def in_a_fresh_process(arguments: list[str], folder: Path, **variables: str) -> str:
    """Standard output of a Python program that runs in `folder` without the network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **variables}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("how", ["adapter", "all weights", "an adapter of the user's"])
def test_ppo_without_recipe(how: str, tmp_path: Path) -> None:
    """At first the policy is π_ref, whatever learns; afterwards exactly that has moved."""
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings = PpoConfig(iterations=1, rollouts=4, minibatch_size=2, learning_rate=1e-2)
    if how == "all weights":
        settings = replace(settings, lora=None)
    elif how != "adapter":
        policy = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=True))
    arguments = (policy, tokenizer, shorter, ["Say hello."], settings)
    trainer = PpoTrainer.from_policy(*arguments, max_response_tokens=4)
    before = {name: each.detach().clone() for name, each in trainer.policy.named_parameters()}
    (entry,) = trainer.train()
    moved = {name for name, each in trainer.policy.named_parameters() if not torch.equal(each, before[name])}
    assert entry["kl"] == 0.0
    assert moved
    assert how == "all weights" or all("lora_" in name for name in moved)


def test_ppo_refuses_a_long_prompt_and_a_reward_of_another_length(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings = PpoConfig(iterations=1, rollouts=2, minibatch_size=2)
    for reward, prompt, message in (
        (shorter, "word " * 99, "max_prompt_tokens = 64"),
        (lambda prompts, responses: [1.0], "Say hello.", "got 1: return one for each"),
    ):
        trainer = PpoTrainer.from_policy(
            policy, tokenizer, reward, [prompt], settings, max_prompt_tokens=64, max_response_tokens=4
        )
        with pytest.raises(UserError, match=message):
            trainer.train()


def test_ppo_refuses_what_it_cannot_train_with(tmp_path: Path) -> None:
    """Before anything is drawn; a text in place of a list was taken for a prompt a letter."""
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer, bare = AutoModelForCausalLM.from_pretrained(folder), *(
        AutoTokenizer.from_pretrained(folder) for _ in range(2))  # fmt: skip
    bare.pad_token = None
    settings = PpoConfig(iterations=1, rollouts=2, minibatch_size=2, lora=None)
    right = {"policy": policy, "tokenizer": tokenizer, "reward": shorter, "prompts": ["Say."], "settings": settings}
    lists = ("Say.", [], [1], [[]], [{"prompt": "x"}], [[{"rolle": "user", "content": "x"}]], iter(["x"]),
             np.array(["x"]))  # fmt: skip
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    learnt = get_peft_model(copy.deepcopy(policy), adapter)
    frozen = get_peft_model(copy.deepcopy(policy), adapter).requires_grad_(False)
    for wrong, message in (
        *(({"prompts": each}, "prompts must be one or more texts") for each in lists),
        ({"reward": 3}, "reward must be a function .*, got int"),
        ({"tokenizer": bare}, "tokenizer must have a chat template, an end of turn and a padding token"),
        ({"max_response_tokens": 0}, "max_response_tokens must be at least 1, got 0"),
        ({"accelerator": Accelerator(gradient_accumulation_steps=2)}, "accelerator must accumulate 1 step, got 2"),
        ({"policy": frozen}, "policy must have an adapter that learns, got a frozen one"),
        ({"policy": learnt, "settings": replace(settings, reference_rollouts=True)}, "settings.reference_rollouts"),
        ({"settings": replace(settings, max_prompts=3)}, "settings.max_prompts must be left out"),
        ({"settings": replace(settings, warm_start="regression")}, "settings.warm_start must be left out"),
        ({"settings": replace(settings, reference_rollouts=True, baseline=False)}, "settings.baseline must be true"),
        ({"policy": copy.deepcopy(policy).bfloat16()}, "policy must be float32 .*, got torch.bfloat16"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            PpoTrainer.from_policy(**{**right, **wrong})


def test_ppo_without_recipe_begins_with_the_completions_of_each_prompt(tmp_path: Path) -> None:
    """A prompt that comes twice has one set of completions."""
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings = PpoConfig(iterations=1, rollouts=2, minibatch_size=2, reference_rollouts=True, reference_samples=3)
    arguments = (policy, tokenizer, shorter, ["Say.", "Ask.", "Say."], settings)
    (entry,) = PpoTrainer.from_policy(*arguments, max_response_tokens=4).train()
    assert entry["rollouts"] == 6


@pytest.mark.parametrize("baseline", [True, False])
def test_ppo_without_recipe_subtracts_the_baseline_of_a_scorer_if_asked(tmp_path: Path, baseline: bool) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings, unread = PpoConfig(rollouts=4, baseline=baseline), Any
    scorer = RewardScorer(unread, unread, use_bonus=False, use_baseline=not baseline)  # type: ignore[arg-type]
    trainer = PpoTrainer.from_policy(policy, tokenizer, scorer, ["Say."], settings)
    assert trainer.scorer.has_reference("Say.") != baseline
    assert scorer.has_reference("Say.") == baseline


def test_a_scorer_that_served_another_policy_keeps_nothing_of_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    unread, draws = Any, {"Say.": torch.zeros(1)}
    scorer = RewardScorer(unread, unread, use_bonus=False, references=draws)  # type: ignore[arg-type]
    trainer = PpoTrainer.from_policy(policy, tokenizer, scorer, ["Say."], PpoConfig(rollouts=4))
    assert trainer.scorer.references == {}
    assert scorer.references == draws


def test_ppo_without_recipe_recomputes_layers_if_asked(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", ["Say hello."])
    tokenizer, entries = AutoTokenizer.from_pretrained(folder), []
    for recompute in (False, True):
        settings = PpoConfig(iterations=1, rollouts=2, minibatch_size=2, gradient_checkpointing=recompute)
        policy = AutoModelForCausalLM.from_pretrained(folder)
        trainer = PpoTrainer.from_policy(policy, tokenizer, shorter, ["Say."], settings, max_response_tokens=4)
        assert recompute == any("forward" in vars(module) for module in trainer.policy.base_model.model.model.layers)
        entries += trainer.train()
    assert entries[0]["policy_loss"] == pytest.approx(entries[1]["policy_loss"], abs=1e-6)


def shorter(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """A reward that prefers short responses."""
    return [-float(len(text)) for text in responses]
