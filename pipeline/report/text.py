"""Numbers as the report prints them: a true minus sign, an en dash for what is unknown."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

UNKNOWN = "–"
SPACE = "\u00a0"


def known(value: Any) -> TypeGuard[float]:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, digits: int = 2, signed: bool = False) -> str:
    """`value` with `digits` decimals."""
    if not known(value):
        return UNKNOWN
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def significant(value: Any, digits: int = 3) -> str:
    """`value` with `digits` significant digits, no trailing zeros, no exponent below a million."""
    if not known(value):
        return UNKNOWN
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-6 <= abs(value) < 1e6:
        text = f"{value:.0f}" if abs(value) >= 1 else f"{value:.6f}".rstrip("0")
    return text.replace("-", "−")


def percent(share: Any, digits: int = 0) -> str:
    """A share in [0, 1] as per cent."""
    return f"{number(100 * share, digits)}{SPACE}%" if known(share) else UNKNOWN


def interval(low: Any, high: Any, digits: int = 2) -> str:
    """`[low, high]`, or nothing when a bound is unknown."""
    return f"[{number(low, digits)}, {number(high, digits)}]" if known(low) and known(high) else ""


def percent_interval(estimate: dict[str, Any]) -> str:
    """`66–77 %`."""
    low, high = estimate.get("ci_low"), estimate.get("ci_high")
    return f"{number(100 * low, 0)}–{number(100 * high, 0)}{SPACE}%" if known(low) and known(high) else ""


def epsilon_text(epsilon: Any) -> str:
    """ε as printed: infinity is null in files."""
    return "∞" if not known(epsilon) else significant(epsilon)


def duration(seconds: Any) -> str:
    """`48 s`, `3 min 05 s` or `2 h 10 min`."""
    if not known(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{number(seconds, 1)}{SPACE}s" if seconds < 10 else f"{whole}{SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{SPACE}min {whole % 60:02d}{SPACE}s"
    minutes = round(whole / 60)
    return f"{minutes // 60}{SPACE}h {minutes % 60:02d}{SPACE}min"


def usable(estimate: Any) -> TypeGuard[dict[str, Any]]:
    """True for an {"value", "ci_low", "ci_high", "n"} object with a value."""
    return isinstance(estimate, dict) and known(estimate.get("value"))
