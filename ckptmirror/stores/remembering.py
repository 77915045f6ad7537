"""A store that is met only as the place that an earlier process met: the decorator that every mirror of a root gets.

Rules:
* Before the first call goes through, the store says which place it is (``Store.identity``). Where one is remembered,
  any other, or none, is a temporary fault; where none is, this one is remembered first, durably.
* After that the store itself watches that it stays the same place.
* A store that can have no identity is passed on as it is. One whose objects lie in a directory of this machine may get
  one later (it was read-only): it is asked again at each call until it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores.base import Store
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["RememberingStore"]

_Result = TypeVar("_Result")


class RememberingStore(StoreDecorator):
    """``store``, as long as it is the place that is remembered.

    Args:
        store: The store behind.
        recall: Returns the identity that is remembered; None if none is.
        remember: Keeps an identity, durably, unless one is kept already, and returns the one that is kept.
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
        if not self._is_met:  # two threads may come here at once: what is remembered first stands for both
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
