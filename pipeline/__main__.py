"""`python -m private_rlhf`: the command line."""

import sys

from private_rlhf.cli import main

sys.exit(main())
