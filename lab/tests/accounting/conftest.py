"""The same examples every time."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("deterministic", deadline=None, derandomize=True)
hypothesis.settings.load_profile("deterministic")
