"""The training config of an older checkpoint, read by newer code: missing keys get the value that turns them off.

Rules:
* The checkpoint's own values stay. Only missing keys are added, and never from the current run: these weights were
  trained without features that came later.
* The caller says which value turns a feature off; nothing is guessed from types.
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
        off: Each key that was added since, with the value that makes the code behave as it did without the key; nested
            dicts are followed.
        where: The path of ``config``, for the returned names.
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
