"""A release of the canaries of `detect.attack_release` by the program of this checkout, which may be a mutant's copy.

python tests/mutations/release.py HOME     writes HOME/release, for `verify-release` of the sound program
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from detect import everything_drawn_alike, make_world, raw_rows, release, with_odd_rows, write_jsonl

if __name__ == "__main__":
    home = Path(sys.argv[1])
    with everything_drawn_alike(home):
        rows = with_odd_rows(raw_rows(make_world(4000, seed=31)))
        release(home, write_jsonl(home / "raw.jsonl", rows), "release", 0.5)
