"""Folders of models: which names may stand for one, how many tokens it takes, and whether it was replaced. No torch."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from private_rlhf.core.code import PACKAGE
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError
from private_rlhf.recipe import ExtraRewardSettings, JudgeSettings, ModelConfig, is_hub_id


def check_checkpoint(name: str, where: str, others: str = "") -> str:
    """`name` as a path if it is a checkpoint folder, or unchanged if it can be a hub id `owner/name`. where: its key or
    option, and others: further remedies, for messages. UserError where it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            check_no_adapter(folder, where)
            remedy = f"{folder / 'model'}" if (folder / "model" / "config.json").is_file() else "a whole checkpoint"
            raise UserError(f"{where} must be a folder with config.json, got '{name}': give {remedy}")
        return str(folder)
    parent_is_here = folder.parent != Path() and folder.parent.is_dir()
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or parent_is_here:
        raise UserError(f"{where} must be a checkpoint folder, a hub id owner/name{others}, got '{name}'")
    return name


def check_given(checkpoints: dict[str, str], prompts: str = "embedded") -> None:
    """Check that checkpoints, by option, and prompts are there, before torch is imported. UserError otherwise."""
    check_installed("train")
    for option, name in checkpoints.items():
        check_checkpoint(name, option)
    if not (prompts == "embedded" or is_hub_id(prompts) or Path(prompts).exists()):
        raise UserError(f"--prompts must be `embedded` or a file with prompts, got {prompts}: check the path")


def check_no_adapter(folder: Path, where: str) -> None:
    """UserError for the folder of an adapter without its base model."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{where} '{folder}' is an adapter, not a whole checkpoint: merge it into its base model first (peft: "
            "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OTHER)), with its"
            " tokenizer, and give that folder"
        )


def check_weights(folder: Path, where: str, whole: bool = True) -> None:
    """UserError where the weights of a checkpoint folder are absent (if it must be whole), unreadable or not finite.
    Reads all of them."""
    from transformers.modeling_utils import load_state_dict

    files = sorted([*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")])
    if whole and not files:
        raise UserError(f"{where} '{folder}' must hold weights (such as model.safetensors), got none: give them")
    for path in files:
        try:
            damaged = [name for name, weight in load_state_dict(path).items() if not weight.isfinite().all()]
        except Exception as error:  # of each format its own kinds
            cause = type(error).__name__
            raise UserError(f"{where}: {path} cannot be read ({cause}): copy or download it again") from None
        if damaged:
            raise UserError(f"{where} '{folder}': {damaged[0]} holds NaN or infinity: give an undamaged checkpoint")


def check_lm_folder(folder: Path, where: str) -> None:
    """UserError where `folder`, given as `where`, holds no checkpoint: a hub id is not looked for."""
    if not (folder / "config.json").is_file():
        check_no_adapter(folder, where)
        raise UserError(f"{where} must be the folder of a whole causal language model, got {folder}: give it")


def positions_of(folder: Path) -> int | None:
    """The positions of the model in `folder`; None where it states none, or is not a whole checkpoint."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config = {**config, **(config.get("text_config") or {})}
    return config.get("max_position_embeddings") or config.get("n_positions")


def check_positions(settings: ModelConfig, positions: int | None) -> None:
    """UserError where the longest prompt and response of the recipe exceed the positions; None: of unknown number."""
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    if positions is not None and longest > positions:
        raise UserError(
            f"model.max_prompt_tokens {settings.max_prompt_tokens} and max_response_tokens "
            f"{settings.max_response_tokens} make {longest} tokens, and {settings.source} has {positions} positions: "
            "lower one of them"
        )


def folder_digest(folder: Path) -> str:
    """SHA-256 over names, sizes and times of the files in a checkpoint folder: cheap, and another once replaced."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        facts = path.stat()
        digest.update(repr((str(path.relative_to(folder)), facts.st_size, facts.st_mtime_ns)).encode())
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and contents of configuration and weights in a checkpoint folder: which model it is."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])]:
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def extra_reward_digests(rewards: Sequence[ExtraRewardSettings]) -> dict[str, str]:
    """By name, digests of the folders and the source files behind ppo.extra_rewards."""
    digests = {str(reward.path): folder_digest(reward.path) for reward in rewards if reward.path is not None}
    return digests | {reward.callable: source_digest(reward.callable) for reward in rewards if reward.callable}


def judge_digests(judge: JudgeSettings | None) -> dict[str, str]:
    """By name, the digest of the folder behind evaluate.judge."""
    folder = None if judge is None else judge.path or judge.lm
    return {} if folder is None else {str(folder): folder_digest(folder)}


def source_digest(name: str) -> str:
    """SHA-256 of the file of the module in `package.module:function`; "absent" where there is none."""
    path = module_file(name.partition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else "absent"


def module_file(name: str) -> Path | None:
    """The file of a module, found without running a line of it or of the packages around it; None if there is none."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # it is loaded and says nothing of its file
        spec = None
    for part in inner:
        top = f"{top}.{part}"
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(top, places)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def check_function(name: str, key: str) -> None:
    """Checks that `package.module:function` is there by its source: nothing of it runs before its stage does. UserError
    where the module is missing, is not Python, is a part of this package, or binds only a constant to that name."""
    module, _, function = name.partition(":")
    if module.split(".")[0] == PACKAGE:
        raise UserError(f"{key}.callable {name} is a part of this package, not a reward: name a function of your own")
    path = module_file(module)
    if path is None:
        remedy = "install it, or put its folder on PYTHONPATH"
        raise UserError(f"{key}.callable {name}: No module named '{module}': {remedy}")
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{key}.callable {name} must be valid Python, got {path}: fix it") from None
    bound = _bound(tree)
    if not bound & {function, "*", "__getattr__"}:
        raise UserError(f"{key}.callable {name}: {module} has no function {function}: name one that it has")


def _bound(tree: ast.AST) -> set[str]:
    """Names that a module or a block in it binds to something that may be a function; "*" for all of another's."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            names |= _bound(node)
    return names
