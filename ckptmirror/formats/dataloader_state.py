"""The positions of data loaders: of one loader, or of containers in which some loaders may have no position.

Rules:
* A loader without ``state_dict`` and ``load_state_dict`` is not changed, and the log names it once.
* In a saved sequence its place holds None; in a saved mapping it is left out.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ckptmirror.formats.containers import is_mapping, is_sequence, leaves, rebuilt
from ckptmirror.formats.state_tree import state_of

__all__ = ["has_position", "knows_its_position", "position_of", "warn_left_alone"]

log = logging.getLogger(__name__)


def has_position(loader: Any) -> bool:
    """Whether a data loader has ``state_dict`` and ``load_state_dict``."""
    return all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")) and not isinstance(loader, type)


def knows_its_position(dataloader: Any) -> bool:
    """Whether a data loader, or any loader in a container, has a position."""
    return any(map(has_position, leaves(dataloader)))


def position_of(dataloader: Any, where: str) -> Any:
    """Return the position of a data loader, or of each loader in a container that has one."""
    if has_position(dataloader):
        return state_of(dataloader, where)
    if is_mapping(dataloader):
        known = {key: loader for key, loader in dataloader.items() if knows_its_position(loader)}
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
