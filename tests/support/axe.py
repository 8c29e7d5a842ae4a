"""axe-core on a page: its rules, WCAG 2.1 AA and best practices."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browsers import Tab


def check_barriers(tab: Tab) -> None:
    """None in light and dark, on a phone and a desk; and nothing is cut off at the side. Skips without axe-core."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    if not tab.run("'axe' in globalThis"):
        tab.run(f"{axe}; 1")
    for width in (360, 1200):
        tab.resize(width, 800)
        for scheme in ("light", "dark"):
            tab.show_as(scheme)
            barriers = tab.run("axe.run().then((all) => all.violations.map((each) => [each.id, each.nodes[0].html]))")
            assert not barriers, (width, scheme, barriers)
            assert tab.run("document.documentElement.scrollWidth") <= width, "nothing is cut off on a phone"
