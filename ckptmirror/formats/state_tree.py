"""Turns live values into what is saved: the state of each object in a tree of containers, and plain values as they are.

Rules:
* A save and a load walk the same containers (see ``formats.restore``).
* The versions of a module are collected too, to be saved beside its values.
"""

from __future__ import annotations

from typing import Any

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.containers import TreePath, changed, place
from ckptmirror.formats.names import live_values
from ckptmirror.formats.optimizer_state import state_by_key
from ckptmirror.formats.tree_queries import has, takes_state
from ckptmirror.formats.versions import clean_versions, to_text

__all__ = ["state_of"]

FoundVersions = list[list[Any]]


def state_of(part: Any, where: str, *, versions: FoundVersions | None = None, path: TreePath = ()) -> Any:
    """Return what to save of a part: an object's state, the state of each object in a container, or the value itself.

    Args:
        part: A value, an object with ``state_dict`` and ``load_state_dict``, or containers of them.
        where: Its place in the state, for messages.
        versions: Gets the path of each module and the text of its versions.
        path: The place of ``part``: keys and positions from the top.

    Raises:
        UsageError: An object has a state but no way to load it.
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
            return leaf.state_dict()
        return leaf

    return changed(part, state_at)
