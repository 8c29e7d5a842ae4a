"""`python -m pipeline.stages.NAME` and `accelerate launch -m pipeline.stages.NAME`: one stage from the command line."""

from __future__ import annotations

import sys


def main_for(stage: str) -> None:
    """Runs one stage with the options of `private-rlhf STAGE`, and exits with its code."""
    from pipeline.cli import main

    sys.exit(main([stage, *sys.argv[1:]]))
