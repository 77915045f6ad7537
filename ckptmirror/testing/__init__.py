"""What users of ckptmirror, and ckptmirror itself, test against.

Rules:
* Nothing here imports the rest of ckptmirror: a second opinion must not share the first one's mistakes.
* Importing this package costs nothing: its names are resolved at first use, and the server's libraries are only ever
  imported in the server's own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmirror.testing.fault import Fault
    from ckptmirror.testing.gcs_process import GcsServerProcess

__all__ = ["Fault", "GcsServerProcess"]


def __getattr__(name: str) -> object:
    if name == "Fault":
        from ckptmirror.testing.fault import Fault

        return Fault
    if name == "GcsServerProcess":
        from ckptmirror.testing.gcs_process import GcsServerProcess

        return GcsServerProcess
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
