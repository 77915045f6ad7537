"""A store that must be the same place that earlier processes used: the decorator that every mirror of a root gets.

Rules:
* Before the first call, it asks the store for its identity (``Store.identity``). If the root remembers another
  identity, the call fails with a temporary error. If the root remembers none, it first remembers this one, durably.
* After that the store itself checks that it is still the same place.
* A store that cannot have an identity is used as it is. A store in a local directory may get one later (it was
  read-only), so it is asked again at each call until it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores.base import Store
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["SamePlaceStore"]

_Result = TypeVar("_Result")


class SamePlaceStore(StoreDecorator):
    """``store``, as long as it is the remembered place.

    Args:
        store: The store behind.
        recall: Returns the remembered identity, or None.
        remember: Keeps an identity durably, unless one is kept already, and returns the one that is kept.
    """

    def __init__(self, store: Store, recall: Callable[[], str | None], remember: Callable[[str], str]) -> None:
        super().__init__(store)
        self._recall = recall
        self._remember = remember
        self._is_met = False

    def identity(self, expected: str | None = None) -> str | None:
        return self._store.identity(expected if expected is not None else self._recall())

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        """Make the call once the store behind is known to be the right place."""
        del operation, name, size_bytes
        if not self._is_met:  # two threads may get here at once: the first identity counts for both
            expected = self._recall()
            found = self._store.identity(expected)
            if expected is None and found is not None:
                expected = self._remember(found)
            if found != expected:
                raise StoreTemporary(
                    f"{self.url} is not the mirror that was used before: is it mounted?",
                    hint="Mount it. If you recreated the mirror on purpose, give it a new URL.",
                )
            self._is_met = found is not None or self._store.local_directory is None
        return run()
