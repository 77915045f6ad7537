"""The lists of a save's tensors (``tensors_*.json``): a load is proved with them, and none needs them.

Rules:
* A save that only lost lists is loaded, without the proof. It is no whole copy: it counts nowhere as one to keep. An
  emergency snapshot that lost one is not loaded: it lives until the next save, and nothing else says what it holds.
* Each rank writes its ``extra_*`` and its list together. So a meta that names the one and not the other lost the list.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptmirror.core.model import Artifact, Kind, Meta

__all__ = ["is_list", "is_proof", "loadable", "lost_lists"]


def is_list(path: str) -> bool:
    """Whether a path of an artifact is that of a rank's list of tensors."""
    return _name(path).startswith("tensors_")


def is_proof(artifact: Artifact) -> bool:
    """Whether an artifact is a list of tensors that no load needs."""
    return is_list(artifact.path) and "emergency" not in artifact.kinds


def loadable(meta: Meta, damaged: Iterable[Artifact]) -> tuple[tuple[Kind, ...], tuple[str, ...]]:
    """Return what of a save can be loaded without its damaged files.

    Returns:
        The kinds, and the paths of the lists that are damaged.
    """
    damaged = list(damaged)
    lists = tuple(one.path for one in damaged if is_proof(one))
    return meta.kinds_without(one for one in damaged if one.path not in lists), lists


def lost_lists(meta: Meta) -> tuple[int, ...]:
    """Return the ranks whose lists a meta does not name, although it names what they wrote beside them."""
    extras = {one.rank for one in meta.artifacts if one.rank is not None and _name(one.path).startswith("extra_")}
    return tuple(sorted(extras - {one.rank for one in meta.artifacts if is_list(one.path)}))


def _name(path: str) -> str:
    return path.rpartition("/")[2]
