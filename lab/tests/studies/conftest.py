"""The same examples every time; the helpers of the planted errors can be imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[3] / "tests")]
hypothesis.settings.register_profile("deterministic", deadline=None, derandomize=True)
hypothesis.settings.load_profile("deterministic")
