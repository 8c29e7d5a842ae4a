"""Commands whose refusal is checked word for word: the culprit and the remedy stand in the one line."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from cli.bad_inputs.sandbox import RECIPE, RELEASED, ROWS, Row, lines
from private_rlhf import cli
from private_rlhf.commands.account import IN_THE_LAB

RUN = "run --config=tiny.yaml --run-dir=r"
OWN = f"{RUN} data.limit=null sft.batch_size=1"
SAME, LATE = f"{OWN} --data=same.jsonl", f"{OWN} --data=late.jsonl"
PRIVATE = f"{OWN} data.public_labels=false evaluation_labels=private"
PRIVATIZE = "privatize --output=out --epsilon=1 --key=owner.key"
LABELLED = f"{PRIVATIZE} --label-column=y"
LIMITS = "model.max_prompt_tokens=500 model.max_response_tokens=13"
TOKENS = "model.max_prompt_tokens 500 and max_response_tokens 13 make 513 tokens, and"
OVERLAP = "data.demonstrations chosen.jsonl: repeats one response, and not equally the other, of 7 of 8"
BUDGET = "over the budget of 0.75 per event: the largest total of any one record under this key is 0.5"
POSITIVE = "epsilon must be a number > 0"
MESSAGES = {
    # preferences and other texts
    f"{OWN} --data=nowhere.jsonl": "nowhere.jsonl: no such file or folder; check the path",
    f"{OWN} --data=lacks.jsonl": "lacks.jsonl, line 4: lacks one of 'chosen'/'rejected'; add it, or remove the row",
    LATE: "late.jsonl, line 121: lacks one of",
    f"{OWN} --data=empty.jsonl": "empty.jsonl: holds no rows; give a data set with at least one",
    SAME: "no rows are left; 8 had identical responses",
    f"{PRIVATIZE} --data=same.jsonl": "no rows are left; 8 had identical responses and 0 an empty prompt or response; check that `chosen` and `rejected` are two different answers",
    f"{OWN} --data=latin.jsonl": "latin.jsonl, line 1: is not UTF-8 text; convert the file to UTF-8",
    **{f"{OWN} data.{key}={name}": says for key in ("demonstrations", "prompts", "evaluation_prompts")
       for name, says in {"nowhere.jsonl": "nowhere.jsonl: no such file or folder", "cut.jsonl": "cut.jsonl, line 1: is not valid JSON"}.items()},
    f"{OWN} data.demonstrations=good.jsonl": "tuning on preferred answers would reveal the labels",
    **{f"{PRIVATE} --data=good.jsonl data.demonstrations=chosen.jsonl{more}": OVERLAP for more in ("", " --dry-run", " --only=sft")},
    # the recipe
    f"{RUN} {LIMITS}": f"{TOKENS} tiny has 512 positions: lower one of them",
    f"{RUN} {LIMITS} model.source=model": f"{TOKENS} model has 512 positions",
    f"{RUN} {LIMITS} model.source=model_of_text": f"{TOKENS} model_of_text has 512 positions",
    "run --config=misspelt.yaml": "misspelt.yaml: unknown key 'ppo.iteratoins'; did you mean 'iterations'?",
    "run --config=open.yaml": "open.yaml is not valid YAML at line 2; fix it",
    "run --config=list.yaml": "list.yaml must be a mapping",
    "run --config=latin.yaml": "latin.yaml is not UTF-8 text",
    "run --config=short.yaml": "key 'model' is required",
    "run --config=nowhere.yaml": "recipe nowhere.yaml does not exist: name a file or a shipped recipe",
    **{f"{words} --config={name}": "data.preferences must name the preferences to learn from, got none: give --data PATH"
       for words in ("run --dry-run", "run", "privatize", "sft", "plan", "verify-run") for name in ("own_data", "hh_truth", "hh_rlhf_smollm2")},
    f"{RUN} ppo.iteratoins=6": "unknown key 'ppo.iteratoins'; did you mean 'iterations'?",
    f"{RUN} pqo.iterations=6": "unknown key 'pqo'; did you mean 'ppo'?",
    f"{RUN} ppo.iterations": "override 'ppo.iterations' is not of the form section.key=value",
    f"{RUN} ppo.iterations=many": "ppo.iterations: ",
    f"{RUN} ppo.minibatch_size=3": "minibatch_size 3 must divide rollouts 8",
    f"{RUN} reward.refit_ridge=2": "refit_ridge must go with mode lora or full",
    f"{RUN} reward.micro_batch_size=2": "micro_batch_size must go with mode lora or full: set feature_batch_size",
    f"{RUN} privatize.epsilon=0": POSITIVE, f"{RUN} privatize.epsilon=-1": POSITIVE, f"{RUN} privatize.epsilon=.nan": POSITIVE,
    f"{RUN} data.public_labels=false": "data.public_labels must be true for evaluation_labels: public: set it, or take private",
    f"{PRIVATE} privatize.epsilon=.inf": "data.public_labels must be true where privatize.epsilon is .inf",
    f"{RUN} sft.trainer_args.weight_decya=0.1": "trl.SFTConfig has no 'weight_decya'; did you mean 'weight_decay'?",
    f"{RUN} sft.trainer_args.max_steps=3": "sft.trainer_args.max_steps is set by the stage itself",
    f"{RUN} sft.trainer_args.weight_decay=heavy": "sft.trainer_args.weight_decay must be a float, got 'heavy'",
    f"{RUN} sft.trainer_args.optim=nonsense": "sft.trainer_args: trl.SFTConfig refuses a value",
    f"{RUN} reward.trainer_args.weight_decay=0.1": "reward.trainer_args is for reward.mode lora or full",
    f"{RUN} reward.mode=lora reward.trainer_args.weight_decya=0.1": "trl.RewardConfig has no 'weight_decya'; did you mean 'weight_decay'?",
    f"{RUN} sft.micro_batch_size=3": "sft.batch_size 8 must be a multiple of",
    f"{RUN} sft.batch_size=600": "texts or pairs to learn from, fewer than sft.batch_size 600",
    f"{RUN} model.source=./nowhere": "model.source must be a checkpoint folder, a hub id owner/name, 'smollm2' or 'tiny', got './nowhere'",
    f"{RUN} ppo.quantize=4bit ppo.lora=null": "ppo: lora must not be null with quantize, which trains an adapter: give it its settings",
    f"{RUN} ppo.quantize=8bit": "ppo.quantize",
    # the run directory and the key
    "run --config=tiny.yaml --run-dir=other": "was made by recipe 'other', not 'tiny': choose another --run-dir",
    "run --config=tiny.yaml --run-dir=other --dry-run": "was made by recipe 'other'",
    "run --config=tiny.yaml --run-dir=letters": "is not a run directory and not empty: choose another --run-dir",
    "run --config=tiny.yaml --run-dir=good.jsonl/run": "good.jsonl/run cannot be written",
    "run --config=tiny.yaml --run-dir=damaged": "manifest.json is damaged: delete the folder",
    f"{RUN} privatize.key_file=open.key": "open.key: the key can be read by others; run `chmod 600",
    f"{RUN} privatize.key_file=r/owner.key": "is inside the run directory: keep the key elsewhere",
    f"{RUN} --from=sft": "has not completed stage 'privatize': run it first (private-rlhf run --only privatize)",
    f"{RUN} --only=ppo": "has not completed stage 'sft': run it first (private-rlhf run --only sft)",
    f"{PRIVATE} --data=good.jsonl privatize.budget=0.75 privatize.epsilon=1": BUDGET,
    f"{PRIVATE} --data=good.jsonl privatize.budget=0.75 privatize.epsilon=1 --dry-run": BUDGET,
    # options
    f"{RUN} --from=rewrad": "--from rewrad: no such stage; did you mean 'reward'?",
    f"{RUN} --only=x": "--only x: no such stage; valid keys here: count, dpo,",
    f"{RUN} --from=sft --only=ppo": "--from and --only exclude each other",
    f"{RUN} --colour": "--colour", "run": "--config", "walk": "walk",
    "privatize --data=d --output=o --epsilon=1": "make it with `private-rlhf keygen`",
    "privatize --data=good.jsonl --output=out --epsilon=1 --key=nowhere.key": "nowhere.key: no such key file; make one with `private-rlhf keygen --output nowhere.key`",
    "privatize --epsilon=much": "--epsilon",
    "evaluate --policy=p": "evaluate without --config needs --reference, --prompts, --judge",
    "evaluate --config=r.yaml --limit=3": "evaluate --config does not take --limit",
    "evaluate --policy=p seed=3": "evaluate without --config does not take 'seed=3'",
    "privatize --config=r.yaml --epsilon=0.5": "privatize --config does not take --epsilon",
    "privatize --config=r.yaml --budget=1 --output=x": "does not take --output, --budget",
    "privatize --data=x data.limit=5": "privatize without --config does not take 'data.limit=5'",
    "privatize --data=x --run-dir=r": "privatize without --config does not take --run-dir",
    "privatize --data=x --output=o --epsilon=1 --key=k --budget-per=event": "--budget-per needs --budget",
    "ledger init --i-know=1_0": "underscore", "label-filter --epsilon=1_0 --store=s": "underscore", "label serve --store=s --port=8_0": "underscore",
    "label-filter --epsilon=1 --store=s --labels=A": "does not name two different labels",
    "attack nowhere": "nowhere: no such folder", "attack release --canaries=0": "--canaries 0: give at least 1",
    "attack release --raw=x.jsonl --key=k": "takes --raw or canaries (--key, --truth), not both", "attack release --plant=p.jsonl": "you have no key yet",
    "attack release --plant=p.jsonl --raw=x": "not --raw", "attack release --canaries=2 --truth=missing.jsonl": "missing.jsonl: no such file of canaries",
    **{f"account {kind} --epsilon=1 --help": f"run private-rlhf-lab account {kind} …" for kind in IN_THE_LAB},
    "evaluate --policy=nowhere --reference=b --prompts=embedded --judge=truth": "nowhere",
    "sample --policy=nowhere Hello": "nowhere",
    "keygen --output=owner.key": "is a key, which no command overwrites",
    f"{PRIVATIZE} --data=release": "release",
    **{f"privatize --output=out --key=owner.key --data=good.jsonl --epsilon={value}": "epsilon" for value in ("0", "-1", "nan", "inf", "one", "1e400")},
    **{f"{PRIVATIZE} --data=good.jsonl --source='{name}'": "--source is no name: give one line of at most 200" for name in (" ", "x" * 201, "a\u202eb")},
    # labels in a column
    **{f"{LABELLED} --data=label{number}.jsonl --labels={labels}": f"label{number}.jsonl, line 3"
       for number, labels in enumerate(("0,1", "0,1", "0,1", "A,B", "A,B", "A,B", "0,1"))},
    **{f"{LABELLED} --data=letters.jsonl --labels={labels}": "--labels" for labels in ("''", "A", "A,A", "A,B,C")},
}  # fmt: skip
"""Command -> words of its refusal; `files` makes what they name."""
UNDECLARED = (2, None, 0.5, "unspeakable", "a", [1], {"y": 1})
DECLARED = {"-1,1": (-1, 1), "0,1": (0, 1), "A,B": ("A", "B"), "true,false": (True, False)}


def rows() -> Iterator[Row]:
    """All of this module."""
    for words, says in MESSAGES.items():
        work = ("owner.key.state/work",) if words in (SAME, LATE) else ()  # an empty folder: rows were read before they were refused
        yield Row(words, shlex.split(words), make=files, says=says, may_change=work)
    yield Row("keygen for the user, twice", ["keygen"], make=lambda: cli.main(["keygen"]), says="overwritten")
    for labels, values in DECLARED.items():
        yield Row(f"labels {labels} that are declared", shlex.split(f"{LABELLED} --data=y.jsonl --labels={labels}"), code=0, may_change=RELEASED,
                  make=lambda values=values: labelled("y.jsonl", values * 3))


def labelled(name: str, values: tuple[object, ...]) -> None:
    """Rows with a label column y."""
    lines(name, [{"prompt": f"unspeakable {i}", "response_a": f"a{i}", "response_b": f"b{i}", "y": value} for i, value in enumerate(values)])


def files() -> None:
    """Make all files and folders that the commands name."""
    lines("lacks.jsonl", [*ROWS[:3], {"prompt": "p", "chosen": "c"}])
    lines("late.jsonl", [*(dict(row, prompt=f"{n} {row['prompt']}") for n in range(15) for row in ROWS), {"prompt": "p"}])
    lines("empty.jsonl", [])
    lines("same.jsonl", [dict(row, rejected=row["chosen"]) for row in ROWS])
    lines("chosen.jsonl", [{"prompt": row["prompt"], "response": row["chosen"]} for row in ROWS[:7]])
    labelled("letters.jsonl", ("A", "B"))
    for number, value in enumerate(UNDECLARED):
        labelled(f"label{number}.jsonl", (*(("A", "B") if 3 <= number <= 5 else (0, 1)), value))
    for folder in ("model", "model_of_text", "other", "letters", "damaged/sft"):
        Path(folder).mkdir(parents=True)
    texts = {
        "latin.jsonl": b'{"prompt": "p", "chosen": "\xff", "rejected": "r"}\n', "cut.jsonl": b"{\n",
        "misspelt.yaml": RECIPE.replace("iterations: 6", "iteratoins: 6").encode(), "open.yaml": b"name: [\n", "list.yaml": b"- a\n",
        "latin.yaml": b"name: \xff\n", "short.yaml": b"name: one\nevaluation_labels: public\nprivatize: {epsilon: 1}\n",
        "model/config.json": json.dumps({"max_position_embeddings": 512, "text_config": None}).encode(),
        "model_of_text/config.json": json.dumps({"text_config": {"n_positions": 512}}).encode(),
        "other/recipe.yaml": b"name: other\n", "letters/letter.txt": b"Dear all,", "damaged/recipe.yaml": b"name: tiny\n",
        "damaged/sft/manifest.json": b'{"stage": ', "open.key": Path("owner.key").read_bytes(),
    }  # fmt: skip
    for name, content in texts.items():
        Path(name).write_bytes(content)
    Path("open.key").chmod(0o644)
