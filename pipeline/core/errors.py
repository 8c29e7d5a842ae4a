"""The kinds of failure a command can end in, and the exit codes they map to (`pipeline.cli`)."""

from __future__ import annotations


class UserError(Exception):
    """Wrong use or wrong input: the message is one line that names the culprit and the remedy.

    The command line prints it on stderr without a traceback and exits with code 2.
    """


class RunStopped(RuntimeError):
    """A run that ended itself to do no more harm, e.g. on a loss that is not finite: the message is one line with the
    reason, what was kept and the remedy.

    The command line prints it on stderr without a traceback and exits with code 1.
    """
