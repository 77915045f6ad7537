"""Converts what a user passes (a training config, metrics) to plain values for a meta.

Rules:
* An odd value never makes a save fail: it is written as text. That loses the value's type, but not the checkpoint.
* NaN and infinities are not metrics. They are left out and reported, so that they never count as the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite_metrics", "plain_values"]

_MAX_DEPTH = 32
_MAX_TEXT = 4096
_MAX_INT = 10**39


def plain_values(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as plain JSON: tuples and sets become lists, keys text, and unknown objects their ``str``."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < _MAX_INT else hex(value)
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): plain_values(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain_values(item, depth + 1) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((plain_values(item, depth + 1) for item in value), key=repr)
    return str(value)[:_MAX_TEXT]


def finite_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the metrics that are finite (anything that ``float`` takes), and the names of those that are not."""
    kept: dict[str, float] = {}
    dropped: list[str] = []
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            kept[str(name)] = number
        else:
            dropped.append(str(name))
    return kept, tuple(dropped)
