"""Random numbers for the libraries of the stores that are not the training's.

google-cloud-storage draws a number for each small upload, and it and others draw delays before they try again, all from
Python's global generator, in whatever thread uploads. A training draws from that generator too: after a resume it would
go on elsewhere, and ranks that upload would no longer draw what the others do.

Rules:
* The libraries get a copy of the module ``random`` whose functions draw from a generator of its own.
* A module is given it once it is loaded: call :func:`draw_apart` after the import of a library, and after what it
  imports late.
"""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType

__all__ = ["draw_apart"]

_LIBRARIES = (
    *("google.", "gcsfs.", "fsspec.", "aiohttp.", "urllib3."),
    *("botocore.", "aiobotocore.", "s3fs.", "azure.", "adlfs."),
)


def _copy_of_random() -> ModuleType:
    copy, generator = ModuleType("random"), random.Random()
    drawing = {name: getattr(generator, name) for name in random.__all__ if hasattr(generator, name)}
    vars(copy).update({**vars(random), **drawing})
    os.register_at_fork(after_in_child=generator.seed)
    return copy


_apart = _copy_of_random()


def draw_apart() -> None:
    """Let the libraries of the stores that are loaded by now draw from a generator of their own."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_LIBRARIES) and getattr(module, "__dict__", {}).get("random") is random:
            setattr(module, "random", _apart)  # noqa: B010 - which no stub of a library has
