"""A store that must be the same place that earlier processes used: the decorator that every mirror of a root gets.

Rules:
* Before the first call, it asks the store for its identity (``Store.identity``). If the root remembers another
  identity, the call fails with a temporary error. If the root remembers none, it first remembers this one, durably.
* After that the store itself checks that it is still the same place.
* A verb in a root that has saved nothing may only read where none is remembered: somebody looks why a start is refused.
* If the root remembers none, it may be told which place a node of the job saw under this URL (``expect``), and uses no
  other: where the file system is not mounted there is an empty directory, or what somebody left in it. Or it may be
  told to make none.
* A store that cannot have an identity is used as it is. A store in a local directory may get one later (it was
  read-only), so it is asked again at each call until it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ckptmirror.core.errors import NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.core.start.mirror_places import Expected, is_expected
from ckptmirror.local.hang_guard import hang_guard
from ckptmirror.stores.base import Store
from ckptmirror.stores.decorator import StoreDecorator
from ckptmirror.stores.file_place import explained, read_identity

__all__ = ["SamePlaceStore", "identity_now"]

_Result = TypeVar("_Result")
_MOUNT_HINT = "Mount it on every node. If you recreated the mirror on purpose, give it a new URL."
_READS = ("stat", "list", "read", "download")


def identity_now(store: Store) -> str | None:
    """Return the identity of the place that is there now; None if it has none. Creates nothing.

    Raises:
        CkptMirrorError: It cannot be read: a StoreTemporary, unless a person has to change something first.
    """
    directory = store.local_directory
    if directory is None:
        return None
    with explained(store.url):
        return hang_guard(directory).look(partial(read_identity, directory))


class SamePlaceStore(StoreDecorator):
    """``store``, as long as it is the remembered place.

    Args:
        store: The store behind.
        recall: Returns the remembered identity, or None.
        remember: Keeps an identity durably, unless one is kept already, and returns the one that is kept.
        by_reading: Whether also a call that only reads takes what is there for the mirror.
    """

    def __init__(
        self,
        store: Store,
        recall: Callable[[], str | None],
        remember: Callable[[str], str],
        *,
        by_reading: bool = True,
    ) -> None:
        super().__init__(store)
        self._by_reading = by_reading
        self._recall = recall
        self._remember = remember
        self._is_met = False
        self._expected: Expected | None = None
        self._may_read = False

    def expect(self, place: Expected | None, *, may_read: bool = False) -> None:
        """Be only this place, as long as none is remembered.

        Args:
            place: Its identity, and who saw it: "node 1"; None: any place will do.
            may_read: Whether calls that only read go to what is there, which they do not take for the mirror.
        """
        self._expected, self._may_read = place, may_read and self._store.local_directory is not None

    def identity(self, expected: str | None = None) -> str | None:
        return self._look(expected if expected is not None else self._recall())

    def _look(self, expected: str | None) -> str | None:
        if expected is None and self._expected is not None and self._store.local_directory is not None:
            identity, where = self._expected
            try:
                there = identity_now(self._store)
            except (NotAuthorised, StorePermanent) as error:
                if identity is None:
                    raise
                why = f"{self._not_expected(identity, where)} It cannot be read: {error.message}"
                raise StoreTemporary(why, hint=error.hint) from error
            if not is_expected(there, identity):
                raise StoreTemporary(self._not_expected(identity, where), hint=_MOUNT_HINT)
            expected = identity  # which is there now, and may be gone at the next call
        return self._store.identity(expected)

    def _not_expected(self, identity: str | None, where: str) -> str:
        if identity is None:
            return f"{self.url} is not a mirror here, and may be one on {where}: is it mounted?"
        if not identity:
            return f"{self.url} may not be the place here that {where} saw under this URL: is it mounted?"
        return f"{self.url} is not the place here that {where} saw under this URL: is it mounted?"

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        """Make the call once the store behind is known to be the right place."""
        del name, size_bytes
        if not self._is_met:  # two threads may get here at once: the first identity counts for both
            expected = self._recall()
            if expected is None and operation in _READS and (self._may_read or not self._by_reading):
                return run()
            found = self._look(expected)
            if expected is None and found is not None:
                expected = self._remember(found)
            if found != expected:
                raise StoreTemporary(
                    f"{self.url} is not the mirror that was used before: is it mounted?",
                    hint="Mount it. If you recreated the mirror on purpose, give it a new URL.",
                )
            self._is_met = found is not None or self._store.local_directory is None
        return run()
