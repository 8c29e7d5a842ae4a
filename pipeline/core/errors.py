"""Failures that end a command, with their exit codes (`private_rlhf.cli`), and the door to the terminal."""

from __future__ import annotations

import sys
import unicodedata
from typing import IO

MOST_CHARACTERS = 1000
MOST_NAME = 200
"""Characters of a name that ledgers, manifests and cards repeat."""


def printable(text: str) -> str:
    """The text with its line breaks and spaces; an escape stands for each character that a terminal obeys or hides.

    Those are controls, marks of direction and zero-width characters. All that is printed (`print_lines`, `say`) or
    written on a page for people (`atomic.write_page`) goes through here.
    """
    if text.isprintable():
        return text
    return "".join(each if _is_shown(each) else ascii(each)[1:-1] for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text as one line of at most `most` characters that a terminal shows and does not obey.

    White space becomes single spaces, what cannot be printed (escape sequences, marks that turn the direction, halves
    of characters) an escape; a text that is too long loses its middle.
    """
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= most else f"{shown[: most // 2 - 2]} ... {shown[-(most // 2 - 3) :]}"


def is_name(text: str) -> bool:
    """True for a text that can be printed as a name: one short line of printable characters, not empty."""
    return text.isprintable() and 0 < len(text.strip()) <= len(text) <= MOST_NAME


class UserError(Exception):
    """Wrong use or wrong input, in one line with culprit and remedy; the command line exits with code 2."""


class RunStopped(RuntimeError):
    """A run that stopped itself, such as on a loss that is not finite, in one line with the remedy; exit code 1."""


class RunWaits(RunStopped):
    """A run that waits for the answers of people; the same command resumes. Exit code 3."""


def print_lines(*lines: object, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print lines for people, by default on stdout: the only door to a terminal for texts of data and models."""
    print(printable("\n".join(map(str, lines))), file=file or sys.stdout, end=end, flush=True)


def say(line: str) -> None:
    """One progress line on stderr."""
    print_lines(f"[private-rlhf] {line}", file=sys.stderr)
