"""The kinds of failure a command can end in, and the exit codes they map to (`private_rlhf.cli`)."""

from __future__ import annotations

MOST_CHARACTERS = 1000
MOST_NAME = 200
"""Characters of a name that ledgers, manifests and cards repeat."""


def printable(text: str) -> str:
    """The text with its line breaks, where what a terminal would obey is an escape. All that came from data or models
    goes through here before it is printed or written on a page."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text as one line of at most `most` characters that a terminal shows and does not obey.

    White space becomes single spaces, what cannot be printed (escape sequences, marks that turn the direction, halves
    of characters) an escape; a text that is too long loses its middle.
    """
    shown = printable(" ".join(text.split()))
    return shown if len(shown) <= most else f"{shown[: most // 2 - 2]} ... {shown[-(most // 2 - 3) :]}"


def is_name(text: str) -> bool:
    """Whether a text can be printed as a name: one line of printable characters, not empty, not long."""
    return text.isprintable() and 0 < len(text.strip()) <= len(text) <= MOST_NAME


class UserError(Exception):
    """Wrong use or wrong input: the message is one line that names the culprit and the remedy.

    The command line prints it on stderr without a traceback and exits with code 2.
    """


class RunStopped(RuntimeError):
    """A run that ended itself to do no more harm, e.g. on a loss that is not finite: the message is one line with the
    reason, what was kept and the remedy.

    The command line prints it on stderr without a traceback and exits with code 1.
    """


class RunWaits(RunStopped):
    """A run that ended because others have to act before it can go on: nothing failed, and the same command resumes.

    The command line prints it on stderr and exits with code 3.
    """
