"""The training config of an older checkpoint, read by newer code: keys that it lacks get what turns them off.

Rules:
* What the checkpoint says stands. Only what it does not mention is added, never from the run at hand: a feature that
  came later was not there when these weights were trained.
* What turns a feature off is said by whoever added it; nothing is guessed from types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["_patch_missing_config_keys"]


def _patch_missing_config_keys(
    config: Mapping[str, Any], off: Mapping[str, Any], where: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``config`` with the keys of ``off`` that it lacks, and their names (``model.use_gate``).

    Args:
        config: The training config of a checkpoint.
        off: Each key that was added since, with the value at which the code does what it did without it; dicts are
            walked into.
        where: The place of ``config``, for the names.
    """
    patched = dict(config)
    added: list[str] = []
    for key, value in off.items():
        name = f"{where}.{key}" if where else str(key)
        there = patched.get(key)
        if key not in patched:
            patched[key] = value
            added.append(name)
        elif isinstance(value, Mapping) and isinstance(there, Mapping):
            patched[key], below = _patch_missing_config_keys(there, value, name)
            added += below
    return patched, tuple(added)
