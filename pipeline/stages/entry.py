"""`python -m private_rlhf.stages.NAME`, also under `private-rlhf launch`: one stage from the command line."""

from __future__ import annotations

import sys


def main_for(stage: str) -> None:
    """Run one stage with the options of `private-rlhf STAGE`, and exit with its code."""
    from private_rlhf.cli import main

    sys.exit(main([stage, *sys.argv[1:]]))
