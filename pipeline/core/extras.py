"""What an installation needs for what: the base privatises, accounts and attacks; the rest comes in extras."""

from __future__ import annotations

from importlib.util import find_spec

from private_rlhf.core.errors import UserError

EXTRAS = {
    "train": ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "requests", "jinja2"),
    "report": ("jinja2", "markupsafe", "matplotlib"),
    "validate": ("gymnasium", "ale_py", "matplotlib", "torch", "safetensors"),
    "label": ("starlette", "uvicorn", "h11"),
    "audit": ("torch", "transformers"),
    "demo": ("vaderSentiment",),
    "quant": ("bitsandbytes",),
}
"""Extra of pyproject.toml -> the modules by which it is recognised."""


def check_installed(*extras: str) -> None:
    """The extras are installed. Raises: UserError: one is not, with the line that installs it."""
    for extra in extras:
        missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
        if missing:
            raise UserError(f"{missing[0]} is not installed: {remedy(extra)}")


def extra_of(error: ModuleNotFoundError) -> str | None:
    """The first extra that brings the module that was not found; None where none does."""
    name = (error.name or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if name in modules), None)


def remedy(extra: str) -> str:
    """What to do about a missing extra."""
    return f"pip install 'private-rlhf[{extra}]' brings it"
