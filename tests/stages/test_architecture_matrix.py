"""The whole tiny recipe on tiny random models of many architectures: each passes, or is refused in one line.

`python -m pytest -s -n 0 -m slow tests/stages/test_architecture_matrix.py` prints a row for each, which README groups;
`-k 'Mixtral or GPT-2'` takes some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from private_rlhf.embedded.task import load_demonstrations
from support.families import FAMILIES, family_checkpoint
from support.pipeline_runs import Workspace, history, read_json

REFUSED = {"Falcon-H1", "Gemma-3 multimodal", "Mamba"}
SMALL = (
    "data.limit=120",
    "sft.max_steps=4",
    "ppo.iterations=2",
    "ppo.reference_samples=2",
    "evaluate.num_prompts=8",
    "evaluate.gibbs_candidates=4",
    "model.max_response_tokens=24",
)
TRAINED_REWARD = ("reward.mode=lora", "reward.ridge=1.0", "reward.max_steps=4", "reward.batch_size=8")
Rows = dict[str, list[str]]


@pytest.fixture(scope="module")
def table() -> Iterator[Rows]:
    """Rows of the table, printed when all were run."""
    rows: Rows = {}
    yield rows
    known = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    print(f"\n\n{known}\n\n| architecture | six stages | with reward.mode=lora |\n|---|---|---|")
    for family, cells in rows.items():
        print(f"| {family} | {' | '.join([*cells, '–'][:2])} |")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_recipe_passes_or_is_refused_in_one_line(
    family: str, workspace: Workspace, table: Rows, tmp_path: Path
) -> None:
    texts = [f"{row.prompt}\n{row.response}" for row in load_demonstrations()]
    source = family_checkpoint(family, tmp_path / "model", texts)
    run, cells = tmp_path / "run", table.setdefault(family, [])
    for more in ((), TRAINED_REWARD):
        start = ("--from", "reward") if more else ()
        options = workspace.options(run, *SMALL, f"model.source={source}", *more)
        done = workspace.finish(workspace.command("run", *start, *options))
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if family in REFUSED:
            cells.append(f"refused: {last.partition(') ')[2]}")
            assert done.returncode == 2, done.stderr[-3000:]
            assert not (run / "privatize").exists()
            return
        cells.append("pass" if done.returncode == 0 else f"fails, exit {done.returncode}: {last[:200]}")
        assert done.returncode == 0, done.stderr[-3000:]
        check_run(run, bool(more))


def check_run(run: Path, trained_reward: bool) -> None:
    """What a finished run must show whatever the architecture: the KL starts at 0 and its models read whole."""
    from private_rlhf.lm.models import load_causal_lm
    from private_rlhf.reward_models.checkpoint import load_reward_checkpoint

    assert abs(history(run)[0]["kl"]) < 1e-4
    for stage in ("sft", "ppo"):
        model = load_causal_lm(run / stage / "model", "float32")
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    reward = load_reward_checkpoint(run / "reward" / "model")
    assert reward.metadata is not None
    assert reward.metadata.mode == ("lora" if trained_reward else "head")
    assert read_json(run / "evaluate" / "manifest.json")
