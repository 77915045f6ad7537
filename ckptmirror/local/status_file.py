"""The file in which a trainer says how it stands, for people and monitors. No decision rests on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import new_id
from ckptmirror.local import files

__all__ = ["read_status_file", "write_status_file"]

_log = logging.getLogger("ckptmirror")
_STATUS_LIMIT_BYTES = 1024 * 1024


def write_status_file(root: Path, facts: Mapping[str, Any]) -> None:
    """Leave ``.ckptmirror/status.json`` for people and monitors. A failure to do so is only logged."""
    try:
        data = json.dumps(facts, indent=1, sort_keys=True).encode() + b"\n"
        files.write_bytes(root / names.STATUS_NAME, data, save_id=new_id(), replace=True)
    except CkptMirrorError as error:
        _log.warning("status.json was not written: %s", error)


def read_status_file(root: Path) -> dict[str, Any]:
    """Return what the trainer last wrote there; empty if there is none, or it cannot be read."""
    try:
        facts = json.loads(files.read_limited(root / names.STATUS_NAME, _STATUS_LIMIT_BYTES))
    except (FileNotFoundError, ValueError, RecursionError, IntegrityError):
        return {}  # what anybody could have written there does not keep the rest from being told
    return facts if isinstance(facts, dict) else {}
