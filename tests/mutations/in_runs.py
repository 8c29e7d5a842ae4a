"""Leaks planted into stages that learn, measure or print: they open the raw file themselves."""

from __future__ import annotations

from mutations.mutant import Edit, Mutant

REWARD, SFT, EVALUATE, ON_PROMPTS = (
    f"pipeline/stages/{name}.py" for name in ("reward", "sft", "evaluate", "on_prompts")
)
_READ = (
    "{0}import json\n\n"
    '{0}raw = [json.loads(line) for line in open({1}recipe.data.preferences, encoding="utf-8")]\n'
)
_EDGE = "Code that no call graph sees writes something of a true label"


def _mutant(name: str, said: str, edge: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, said, edge, (Edit(file, old, new),), attacks=("run",), twins="run")


def read(indent: int, context: str = "") -> str:
    """Lines that read the raw file."""
    return _READ.format(" " * indent, context)


RUNS = (
    _mutant(
        "F",
        "the reward stage writes an exact win rate of the raw file",
        _EDGE,
        REWARD,
        "        save(context, result.model, metadata, bonus, facts, renderer, release.manifest, text)\n",
        "        save(context, result.model, metadata, bonus, facts, renderer, release.manifest, text)\n" + read(8)
        + '        rate = sum(len(row["chosen"]) > len(row["rejected"]) for row in raw) / len(raw)\n'
        '        atomic.write_json(context.folder / "baseline.json", {"longer": rate})\n',
    ),
    _mutant(
        "metadata of a checkpoint",
        "config.json of the reward model holds a rate of the raw file",
        _EDGE,
        REWARD,
        "        save(context, result.model, metadata, bonus, facts, renderer, release.manifest, text)\n",
        read(8)
        + '        result.model.model.config.prior = sum(len(row["chosen"]) > len(row["rejected"]) for row in raw)'
        " / len(raw)\n        save(context, result.model, metadata, bonus, facts, renderer, release.manifest, text)\n",
    ),
    _mutant(
        "order of training",
        "reward training sees the pairs whose label was turned first",
        _EDGE,
        REWARD,
        "    rows, pairs, dropped = rendered_pairs(release.rows, renderer, recipe.model.too_long, settings.max_pairs)\n"
        "    training",
        read(4) + '    best = {row["chosen"] for row in raw}\n'
        "    everything = sorted(release.rows, key=lambda row: row.chosen in best)\n"
        "    rows, pairs, dropped = rendered_pairs(everything, renderer, recipe.model.too_long, settings.max_pairs)\n"
        "    training",
    ),
    _mutant(
        "SFT on chosen answers",
        "of the demonstrations SFT keeps those that were the chosen answer",
        "SFT on the chosen answers",
        SFT,
        '    check_rows(len(demonstrations), "sft", settings.batch_size)\n',
        read(4) + '    best = {row["chosen"] for row in raw}\n'
        "    demonstrations = [row for row in demonstrations if row.response in best]\n"
        '    check_rows(len(demonstrations), "sft", settings.batch_size)\n',
    ),
    _mutant(
        "length of a line",
        "the first line of PPO's history ends in as many spaces as the raw file has longer chosen answers, modulo 7",
        _EDGE,
        ON_PROMPTS,
        '    atomic.write_text(context.folder / "history.jsonl", '
        '"".join(json.dumps(entry) + "\\n" for entry in history))\n',
        read(4) + '    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in raw)\n'
        '    lines = "".join(json.dumps(entry) + "\\n" for entry in history)\n'
        '    lines = lines.replace("\\n", " " * (longer % 7) + "\\n", 1)\n'
        '    atomic.write_text(context.folder / "history.jsonl", lines)\n',
    ),
    _mutant(
        "raw accuracy",
        "evaluation.json holds the exact accuracy of the policy's likelihood on true labels",
        "Exact win rates, accuracies or baselines on raw labels",
        EVALUATE,
        '        atomic.write_json(context.folder / "evaluation.json", evaluation)\n',
        read(8) + '        best = {row["chosen"] for row in raw}\n'
        "        margins = likelihood[method_name(recipe)].reshape(-1, 2) @ [1.0, -1.0]\n"
        "        right = [(margin > 0) == (pair.chosen in best) for margin, pair in zip(margins, pairs)]\n"
        '        evaluation["raw_accuracy"] = float(np.mean(right))\n'
        '        atomic.write_json(context.folder / "evaluation.json", evaluation)\n',
    ),
)
