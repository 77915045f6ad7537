"""A trainer's root, its mirror that notes and breaks downloads, and an eval host's directory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from tests.factory import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror

MIB = 1024 * 1024


def nothing(*_: object) -> None:
    """A hook that lets everything pass."""


class SpyStore:
    """Passes everything on, and notes and breaks downloads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.downloads: list[tuple[str, int, int]] = []
        self.before: Callable[..., None] = nothing
        self.after: Callable[..., None] = nothing
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.downloads.append((name, offset, len(buffer)))
        self.before(name, offset)
        self._store.download(name, generation=generation, offset=offset, buffer=buffer)
        self.after(name, offset, buffer)

    @property
    def downloaded_bytes(self) -> int:
        return sum(length for _, _, length in self.downloads)


class Place:
    """A trainer's root, its mirror, and an eval host's directory."""

    def __init__(self, tmp_path: Path, url: str | None = None) -> None:
        self.root = tmp_path / "root"
        self.dest = tmp_path / "eval"
        self.url = url or f"memory://m-{uuid.uuid4().hex}/run"
        self.spy = SpyStore(open_store(self.url))
        self.mirror = Mirror(self.spy.url, True, self.spy)  # type: ignore[arg-type]
        put_attempts(self.spy, [FIRST_ATTEMPT])  # type: ignore[arg-type]

    def save(self, step: int = 200, kinds: tuple[str, ...] = ("dcp", "model"), number: int = 1, **more: object) -> Meta:
        meta = make_save(self.root, step, kinds, number=number, **more)  # type: ignore[arg-type]
        put_on_mirror(self.spy, self.root, meta)  # type: ignore[arg-type]
        return meta

    def on_mirror(self, meta: Meta) -> Meta:
        return mirror_catalog(self.mirror).saves[meta.save_id]


def whole_saves(root: Path) -> dict[str, Meta]:
    """Every whole save of a directory by id; its bytes must be those of its meta."""
    inventory = read_inventory(root)
    assert [str(save.meta_path) + save.why for save in inventory.incomplete] == []
    for save in inventory.saves:
        for artifact in save.meta.artifacts:
            verify_file(root / artifact.path, artifact.digest)
    return {save.meta.save_id: save.meta for save in inventory.saves}


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != names.CONTROL_DIR)
