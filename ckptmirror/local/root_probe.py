"""Whether the roots of several processes are one directory: each leaves a token in its own, and looks for the others'.

Rules:
* Nothing else is asked. One directory has another device and inode on another host, or through another mount.
* A token that is seen proves that the directory is one. A token that is not seen proves nothing: the root lock decides.
* A token is a temporary of the control directory, so the next start removes that of a process that died.
* Where a disk has no room for a token, a start goes on without it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import LocalStorageFull
from ckptmirror.core.model import new_id
from ckptmirror.local.checksummed_writer import create_temporary
from ckptmirror.local.own_files import make_own_dir

__all__ = ["RootProbe"]


class RootProbe:
    """The token of this process in ``root``, and its view of the others'."""

    def __init__(self, root: Path) -> None:
        self._directory = root / names.CONTROL_DIR
        self._token: tuple[Path, int] | None = None

    def leave(self) -> str:
        """Create the token and return its name, or "" if there is no room for it.

        Raises:
            LocalStorageUnwritable: Read-only, no permission, or the control directory is not one of ours.
        """
        made = new_id()
        path = self._directory / names.tmp_name(f"probe-{made}", made)
        with contextlib.suppress(LocalStorageFull):
            make_own_dir(self._directory)
            self._token = path, create_temporary(path)
            return path.name
        return ""

    def seen(self, tokens: Iterable[str]) -> list[int]:
        """Return which of ``tokens`` (names, "" for none) are in this root, by position."""
        return [at for at, token in enumerate(tokens) if token and os.path.lexists(self._directory / token)]

    def remove(self) -> None:
        """Remove the token, once all ranks have looked. A disk error is ignored: the next start removes it."""
        if self._token is not None:
            path, descriptor = self._token
            self._token = None
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
