"""The file in which a trainer reports its state, for people and monitors. No decision depends on it.

Rules:
* It names the process that wrote it, so that a killed trainer is not shown as running (:func:`is_writer_alive`).
* It is replaced at once. On a full disk it is written in place, in room that it took before: there it has most to tell.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, CkptMirrorError, IntegrityError, LocalStorageFull
from ckptmirror.core.model import new_id
from ckptmirror.core.printable import printable_strings
from ckptmirror.core.sealed_json import json_object
from ckptmirror.local import crashpoints, files
from ckptmirror.local.direct_io import write_full
from ckptmirror.local.own_files import open_own_file
from ckptmirror.local.processes import is_alive, pid_namespace, started
from ckptmirror.local.storage_errors import explained

__all__ = ["is_writer_alive", "read_status_file", "write_status_file"]

_log = logging.getLogger("ckptmirror")
_STATUS_LIMIT_BYTES = 1024 * 1024
_ROOM_BYTES = 8 * 1024  # it takes as much from the beginning


def write_status_file(root: Path, facts: Mapping[str, Any]) -> None:
    """Write ``.ckptmirror/status.json`` for people and monitors. A failure is only logged."""
    own = os.getpid()
    writer = {"pid": own, "host": socket.gethostname(), "started": started(own), "pid_namespace": pid_namespace()}
    try:
        data = json.dumps(writer | dict(facts), indent=1, sort_keys=True).encode().ljust(_ROOM_BYTES - 1) + b"\n"
        try:
            files.write_bytes(root / names.STATUS_NAME, data, save_id=new_id(), replace=True)
        except LocalStorageFull:
            _write_in_place(root / names.STATUS_NAME, data)
    except CkptMirrorError as error:
        _log.warning("status.json was not written: %s", error)


def _write_in_place(path: Path, data: bytes) -> None:
    with explained("rewrite", path), crashpoints.around("status.rewrite"):
        descriptor = open_own_file(path, os.O_WRONLY, "rewrite")
        try:
            write_full(descriptor, memoryview(data), 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)


def read_status_file(root: Path) -> dict[str, Any]:
    """Return what the trainer last wrote there; empty if there is none, or it cannot be read."""
    try:
        data = files.read_limited(root / names.STATUS_NAME, _STATUS_LIMIT_BYTES)
        facts: dict[str, Any] = printable_strings(json_object(data))
    except (FileNotFoundError, BrokenMeta, IntegrityError):
        return {}  # a broken status file must not prevent the rest of the report
    return facts


def is_writer_alive(facts: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote ``status.json`` is alive; None if this process cannot know.

    It cannot if that one is on another machine, or in another container of this one.
    """
    pid, began = facts.get("pid"), facts.get("started", "")
    if facts.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return None
    if facts.get("pid_namespace", "") not in ("", pid_namespace()):
        return None
    return is_alive(pid, began if isinstance(began, str) else "")
