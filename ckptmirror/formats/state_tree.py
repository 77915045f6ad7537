"""Turns live values into what is saved: the state of each object in a tree of containers, and plain values as they are.

Rules:
* A save and a load walk the same containers (see ``formats.restore``).
* A member of an enum and a random number generator become what is saved of them (``formats.live_only``).
* The versions of a module are collected too, to be saved beside its values.
* A data loader without ``state_dict`` and ``load_state_dict`` is not changed, and the log names it once. In a saved
  sequence its place holds None; in a saved mapping it is left out.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from ckptmirror.core.containers import (
    TreePath,
    any_leaf,
    changed,
    has,
    is_mapping,
    is_sequence,
    leaves,
    place,
    rebuilt,
    takes_state,
)
from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.taken_state import gives_no_state
from ckptmirror.formats.live_only import saved_as
from ckptmirror.formats.names import live_values
from ckptmirror.formats.optimizer_state import state_by_key
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS
from ckptmirror.formats.versions import clean_versions, to_text

__all__ = ["has_position", "position_of", "state_of", "warn_left_alone"]

log = logging.getLogger(__name__)


def state_of(part: Any, where: str, *, versions: list[list[Any]] | None = None, path: TreePath = ()) -> Any:
    """Return what to save of a part: an object's state, the state of each object in a container, or the value itself.

    Args:
        part: A value, an object with ``state_dict`` and ``load_state_dict``, or containers of them.
        where: Its place in the state, for messages.
        versions: Gets the path of each module and the text of its versions.
        path: The place of ``part``: keys and positions from the top.

    Raises:
        UsageError: An object has a state but no way to load it, or its ``state_dict()`` fails.
    """

    def state_at(leaf: Any, below: TreePath) -> Any:
        if isinstance(leaf, torch.nn.Module):
            values = live_values(leaf)
            known = clean_versions(leaf, values.metadata)
            if versions is not None and known is not None:
                versions.append([[*path, *below], to_text(known)])
            return dict(values)
        if isinstance(leaf, torch.optim.Optimizer):
            return state_by_key(leaf, place(part, below, where))
        if has(leaf, "state_dict"):
            if not takes_state(leaf):
                raise UsageError(
                    f"{place(part, below, where)} is a {type(leaf).__qualname__} with state_dict() but without "
                    "load_state_dict().",
                    hint="Give it load_state_dict(), or save what its state_dict() returns.",
                )
            try:
                return leaf.state_dict()
            except (CkptMirrorError, MemoryError, RecursionError, *DEVICE_ERRORS):
                raise
            except Exception as error:  # the user's own code may raise anything; the answer is the same
                raise gives_no_state(place(part, below, where), leaf, error) from error
        return saved_as(leaf) or leaf

    return changed(part, state_at)


def has_position(loader: Any) -> bool:
    """Whether a data loader has ``state_dict`` and ``load_state_dict``."""
    return has(loader, "state_dict") and takes_state(loader)


def position_of(dataloader: Any, where: str) -> Any:
    """Return the position of a data loader, or of each loader in a container that has one."""
    if has_position(dataloader):
        return state_of(dataloader, where)
    if is_mapping(dataloader):
        known = {key: loader for key, loader in dataloader.items() if any_leaf(loader, has_position)}
        return rebuilt(dataloader, {key: position_of(loader, f"{where}.{key}") for key, loader in known.items()})
    if is_sequence(dataloader):
        return rebuilt(dataloader, [position_of(loader, f"{where}[{i}]") for i, loader in enumerate(dataloader)])
    return None


def warn_left_alone(dataloader: Any) -> None:
    """Log, once per set of classes, which data loaders have no position to save."""
    kinds = {type(loader).__qualname__ for loader in leaves(dataloader) if not has_position(loader)}
    if dataloader is not None and kinds:
        _warn(", ".join(sorted(kinds)))


@functools.cache
def _warn(kinds: str) -> None:
    log.warning(
        "dataloader: %s has no state_dict() and load_state_dict(), so its position is not saved: a resumed run reads "
        "from the beginning",
        kinds,
    )
