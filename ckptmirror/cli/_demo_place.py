"""The demo's own place on the user's mirror, which it leaves as it found it.

Rules:
* The place is a new prefix under the given URL. Nothing outside of it is read, written or deleted.
* The demo runs only if the place is empty before the first object is created.
* The demo removes the objects that are listed under the prefix, each at the listed generation.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from urllib.parse import unquote
from uuid import uuid4

from ckptmirror.cli._human_text import size
from ckptmirror.core.errors import BucketNotFound, CkptMirrorError, ConfigError, NameTaken
from ckptmirror.stores import normalise_url, open_store

__all__ = ["DemoPlace", "make_place"]

_NAME = "ckptmirror-demo"


@dataclass(frozen=True, slots=True)
class DemoPlace:
    """A prefix on a mirror that belongs to one demo."""

    url: str

    def check_empty(self) -> None:
        """Ask the mirror for the first time.

        Raises:
            NameTaken: Something is under this prefix.
            ConfigError: The mirror cannot be a run's only one.
            BucketNotFound: There is no such bucket or directory.
        """
        store = open_store(self.url)
        try:
            if self.url.startswith("memory:") or not store.capabilities.compare_and_swap:
                raise ConfigError(
                    f"A run cannot have {self.url} as its only mirror, so the demo cannot either.",
                    hint="Pass --mirror gs://bucket/prefix, or a directory.",
                )
            if next(iter(store.list()), None) is not None:
                raise NameTaken(f"{self.url} is not empty: the demo uses only a prefix that it created.")
        except BucketNotFound:
            if store.local_directory is None:
                raise
            parent = store.local_directory.parent
            if not parent.exists():
                raise BucketNotFound(
                    f"The demo cannot use {parent} as its mirror: it does not exist.",
                    hint=f"Create it (`mkdir -p {quote(str(parent))}`), or correct --mirror.",
                ) from None
            store.local_directory.mkdir()  # a mirror creates its own directory, not the one above
        finally:
            store.close()

    def measure(self) -> tuple[int, int]:
        """Return the number of objects and their bytes."""
        store = open_store(self.url)
        try:
            sizes = [info.size_bytes for info in store.list()]
        finally:
            store.close()
        return len(sizes), sum(sizes)

    def remove(self) -> tuple[int, int]:
        """Delete every object of the demo; return how many there were, and their bytes."""
        store = open_store(self.url)
        try:
            found = list(store.list())
            if store.local_directory is not None:
                shutil.rmtree(store.local_directory)  # objects, folders and lock files: all of it is the demo's
            else:
                for info in found:
                    store.delete(info.name, generation=info.generation)
        finally:
            store.close()
        return len(found), sum(info.size_bytes for info in found)

    @property
    def removal(self) -> str:
        """The command with which a person removes it."""
        if self.url.startswith("gs://"):
            return f"gcloud storage rm --recursive {self.url}"
        return f"rm -r {quote(unquote(self.url.removeprefix('file://')))}"

    @property
    def left(self) -> str:
        """A sentence that says where objects may be left, and how to remove them."""
        return f"its objects may be under {self.url}; `{self.removal}` removes them"

    def leave(self, *, keep: bool) -> None:
        """Print what is there and how to remove it, or remove it and print that."""
        if keep:
            count, size_bytes = self.measure()
            print(f"{count} objects ({size(size_bytes)}) are kept under {self.url}; remove them with")
            print(f"  {self.removal}")
            return
        try:
            count, size_bytes = self.remove()
        except (CkptMirrorError, OSError):
            self.report_kept()
            raise
        print(f"The demo removed its {count} objects ({size(size_bytes)}) from {self.url}.")

    def report_kept(self) -> None:
        """Print on stderr that the demo did not finish, and that its objects are still there."""
        try:
            count, size_bytes = self.measure()
            what = f"{count} objects ({size(size_bytes)})"
        except CkptMirrorError:
            what = "objects of the demo"
        print(f"{what} may be under {self.url}; remove them with\n  {self.removal}", file=sys.stderr)


def make_place(mirror: str) -> DemoPlace:
    """Choose a new prefix under a mirror; nothing is written."""
    name = f"{_NAME}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:8]}"
    return DemoPlace(normalise_url(f"{mirror.rstrip('/')}/{name}"))
