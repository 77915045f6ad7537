"""A root with its table and its mirrors, as the leader of a node holds them, driven without threads."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core import events, names
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Attempt, Kind, Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.rotation import RotationReport, rotate
from ckptmirror.flow.save.commit import latest_target
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import UploadContext
from ckptmirror.local import files
from ckptmirror.local.uploads import UploadRecord, UploadsTable
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from ckptmirror.stores.faulty import FaultyStore
from tests.factory import FIRST_ATTEMPT, make_save, put_attempts


class HandClock:
    """A clock for leases and delays that stands still until a test moves it."""

    def __init__(self) -> None:
        self.boot_id = "boot-1"
        self.time_ms = 1_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def utc(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def pass_s(self, seconds: float) -> None:
        self.time_ms += round(seconds * 1000)


def no_confirm(_mirror: Mirror, _meta: Meta | None = None) -> None:
    """Nobody fences anybody."""


class MirroredRoot:
    """A root, its table, and any number of mirrors behind faulty stores."""

    def __init__(self, root: Path, urls: Sequence[str] = (), *, optional: Sequence[str] = ()) -> None:
        self.root = root
        self.clock = HandClock()
        self.bus = events.EventBus()
        self.events: list[events.Event] = []
        self.bus.subscribe(self.events.append)
        files.make_dirs(root / names.CONTROL_DIR)
        put_attempts(root, [FIRST_ATTEMPT])
        self.stores = {url: FaultyStore(open_store(url, retry=False)) for url in (*urls, *optional)}
        self.mirrors = [Mirror(url, url not in optional, store) for url, store in self.stores.items()]
        for store in self.stores.values():
            store.identity()  # the first contact, at which a directory is made
        self.table = self.open_table()

    @property
    def store(self) -> FaultyStore:
        """The first mirror's."""
        return self.stores[self.mirrors[0].url]

    def open_table(self) -> UploadsTable:
        table = UploadsTable.open(self.root / names.TABLE_NAME, create=True, clock=self.clock)
        table.set_mirrors([(mirror.url, mirror.required) for mirror in self.mirrors])
        return table

    def lose_table(self) -> None:
        self.table.close()
        for path in self.root.glob(f"{names.TABLE_NAME}*"):
            path.unlink()
        self.table = self.open_table()

    def commit(
        self,
        step: int,
        kinds: Sequence[Kind] = ("model",),
        attempt: Attempt = FIRST_ATTEMPT,
        *,
        number: int | None = None,
        release: bool = True,
        **more: Any,
    ) -> Meta:
        """What a save leaves: files, records, meta, ``latest``."""
        meta = make_save(self.root, step, kinds, attempt, step if number is None else number, **more)
        self.add(meta)
        if release:
            self.table.release_save(meta.save_id)
            files.replace_link(self.root / names.LATEST_NAME, latest_target(meta))
        return meta

    def add(self, meta: Meta) -> None:
        path = names.SaveName(meta.step, meta.tag).meta
        urls = [mirror.url for mirror in self.mirrors]
        self.table.add_save(meta.save_id, meta.step, meta.kinds, meta.artifacts, urls, meta_path=path)

    def context(self, mirror: Mirror | None = None, confirm: Any = no_confirm) -> UploadContext:
        return UploadContext(self.root, self.table, mirror or self.mirrors[0], self.bus, confirm)

    def upload(self, *, limit: int = 200, worker: str = "worker", patient: bool = True) -> int:
        """Carry every claimable record of every mirror as far as it goes; say how many turns that took.

        ``patient``: let the delays of what was put back pass.
        """
        turns, idle = 0, 0
        contexts = [self.context(mirror) for mirror in self.mirrors]
        while turns < limit:
            claimed = False
            for context in contexts:
                claim = self.table.claim(worker, context.mirror.url, lease_s=300)
                if claim is not None:
                    upload_claimed(context, claim)
                    claimed, turns, idle = True, turns + 1, 0
            if not claimed:
                if not patient or not self.records(state=RecordState.PENDING) or self.all_blocked():
                    return turns
                idle += 1
                if idle > 2:  # no delay is longer than a minute: what is left is held, or not released
                    return turns
                self.clock.pass_s(60)
        return turns

    def all_blocked(self) -> bool:
        """Whether what is pending waits for what failed."""
        failed = {(record.save_id, record.mirror) for record in self.records(state=RecordState.FAILED)}
        return all((record.save_id, record.mirror) in failed for record in self.records(state=RecordState.PENDING))

    def records(self, **which: Any) -> list[UploadRecord]:
        return self.table.records(**which)

    def states(self, save_id: str | None = None) -> set[str]:
        return {record.state.value for record in self.records(save_id=save_id)}

    def rotate(self, keep_last: int = 1, **more: Any) -> RotationReport:
        return rotate(
            self.root,
            self.table,
            self.mirrors,
            Retention(keep_last=keep_last),
            bus=self.bus,
            **{"snapshots": True} | more,
        )

    def has(self, meta: Meta) -> bool:
        """Whether the save is whole on the disk."""
        paths = [artifact.path for artifact in meta.artifacts] + [names.SaveName(meta.step, meta.tag).meta]
        return all((self.root / path).exists() for path in paths)

    def close(self) -> None:
        self.table.close()
        for store in self.stores.values():
            store.close()


def memory_url() -> str:
    return f"memory://m-{uuid.uuid4().hex}/run"


def object_names(store: Store) -> list[str]:
    return [info.name for info in store.list() if info.name != names.WRITER_NAME]


def two_saves(place: MirroredRoot, kinds: tuple[str, ...] = ("dcp", "model")) -> tuple[Meta, Meta]:
    return place.commit(100, kinds), place.commit(200, kinds)  # type: ignore[arg-type]


def assert_refused(place: MirroredRoot, meta: Meta, *words: str) -> None:
    report = place.rotate()
    assert report.deleted == ()
    assert place.has(meta)
    for word in words:
        assert word in report.refused[meta.save_id]
    assert any(isinstance(e, events.RotationRefused) and e.save_id == meta.save_id for e in place.events)
