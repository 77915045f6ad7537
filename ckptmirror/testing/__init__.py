"""What users of ckptmirror, and ckptmirror itself, test against.

Rules:
* The server imports nothing of the rest of ckptmirror: a second opinion must not share the first one's mistakes. What
  runs a user's training (``exact_resume``) uses the public names, and judges the outcome with torch alone.
* Importing this package costs nothing: its names are resolved at first use, and the server's libraries are only ever
  imported in the server's own process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptmirror.testing.exact_resume import assert_exact_resume
    from ckptmirror.testing.fault import Fault
    from ckptmirror.testing.gcs_process import GcsServerProcess

_HOMES = {
    "Fault": "ckptmirror.testing.fault",
    "GcsServerProcess": "ckptmirror.testing.gcs_process",
    "assert_exact_resume": "ckptmirror.testing.exact_resume",
}

__all__ = ["Fault", "GcsServerProcess", "assert_exact_resume"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
