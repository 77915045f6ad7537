"""The ``meta.json`` of a legacy checkpoint: free-form JSON that writers before ckptmirror put beside the tensors.

Rules:
* It names no files and has no checksums, so its checkpoint never counts as a whole save. It can be listed and loaded,
  and every reader says that it is a legacy checkpoint.
* Only its step is relied on, and only if it is an integer; everything else is passed on unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.names import MAX_STEP
from ckptmirror.core.sealed_json import check_bounds

__all__ = ["LegacyMeta", "legacy_meta_from_bytes"]

_STEP_KEYS = ("step", "global_step")
_CONFIG_KEYS = ("training_config", "config")


@dataclass(frozen=True, slots=True)
class LegacyMeta:
    """The contents of a ``meta.json``.

    Attributes:
        step: None if it names no step.
        values: Everything in it.
    """

    step: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def training_config(self) -> Mapping[str, Any]:
        """The training config; empty if there is none."""
        found = [self.values[key] for key in _CONFIG_KEYS if isinstance(self.values.get(key), Mapping)]
        return found[0] if found else {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that are numbers."""
        listed = self.values.get("metrics")
        items = listed.items() if isinstance(listed, Mapping) else ()
        return {key: float(value) for key, value in items if _is_number(value)}


def legacy_meta_from_bytes(data: bytes) -> LegacyMeta:
    """Read a ``meta.json``.

    Raises:
        BrokenMeta: It is not a JSON object, or its step is not valid.
    """
    check_bounds(data)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenMeta(f"meta.json is not JSON: {str(error)[:200]}") from error
    if not isinstance(values, dict):
        raise BrokenMeta("meta.json is not a JSON object.")
    found = [values[key] for key in _STEP_KEYS if values.get(key) is not None]
    for step in found:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP or step != found[0]:
            raise BrokenMeta(f"meta.json says that its step is {' and '.join(map(repr, found))[:80]}.")
    return LegacyMeta(found[0] if found else None, values)


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
