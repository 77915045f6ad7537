"""Training roots for tests, with table and mirrors and without threads: pending, drained, mirrored, staged."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core import events, names
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Attempt, Kind, Meta, new_id
from ckptmirror.core.retention import Retention
from ckptmirror.flow.drain import drain
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, mirror_specs
from ckptmirror.flow.retention.reconcile import add_missing_records
from ckptmirror.flow.retention.rotation import RotationReport, rotate
from ckptmirror.flow.save.commit import point_latest
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import UploadContext
from ckptmirror.flow.verify.verify import Verification
from ckptmirror.local import directories
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import Claim, UploadRecord, UploadsTable
from ckptmirror.stores import open_store
from tests.kit.clock import HandClock
from tests.kit.faulty_store import FaultyStore
from tests.kit.mirrors import SpyStore
from tests.kit.saves import FIRST_ATTEMPT, bytes_of, make_save, put_attempts, put_on_mirror

MIB = 1024 * 1024


def no_confirm(_mirror: Mirror, _meta: Meta | None = None, *, is_part: bool = False) -> None:
    """Nobody fences anybody."""


class MirroredRoot:
    """A root, its table, and any number of mirrors behind faulty stores."""

    def __init__(self, root: Path, urls: Sequence[str] = (), *, optional: Sequence[str] = ()) -> None:
        self.root = root
        self.clock = HandClock()
        self.bus = events.EventBus()
        self.events: list[events.Event] = []
        self.bus.subscribe(self.events.append)
        directories.make_dirs(root / names.CONTROL_DIR)
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
            point_latest(self.root, meta)
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


def assert_sound(table: UploadsTable) -> None:
    """Pages, indexes and rows are as they were written."""
    table.check_pages()
    assert table.drop_broken_rows() == []


def two_saves(place: MirroredRoot, kinds: tuple[str, ...] = ("dcp", "model")) -> tuple[Meta, Meta]:
    return place.commit(100, kinds), place.commit(200, kinds)  # type: ignore[arg-type]


def assert_refused(place: MirroredRoot, meta: Meta, *words: str) -> None:
    report = place.rotate()
    assert report.deleted == ()
    assert place.has(meta)
    for word in words:
        assert word in report.refused[meta.save_id]
    assert any(isinstance(e, events.RotationRefused) and e.save_id == meta.save_id for e in place.events)


def assert_arrived(place: MirroredRoot, meta: Meta, mirror: Mirror | None = None) -> None:
    """The mirror lists the save as whole, and a copy staged from it has the very bytes."""
    mirror = mirror or place.mirrors[0]
    there = mirror_catalog(mirror).saves[meta.save_id]
    dest = place.root.parent / f"staged-{meta.save_id[:8]}-{new_id()[:8]}"
    dest.mkdir()
    staged = stage_save(mirror, there, dest, kinds=meta.kinds, full=True)
    assert bytes_of(dest, staged) == bytes_of(place.root, meta)


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


def drained(folder: Path, *steps: int, url: str | None = None, **more: Any) -> tuple[Path, str, list[Meta]]:
    """A root whose saves its table knows as verified on a mirror."""
    url = url or f"file://{folder}/mirror"
    root, metas = make_pending(folder, url, *steps, **({"kinds": ("model",)} | more))
    assert drain(root, timeout_s=60.0).is_verified
    return root, url, metas


def states(found: Verification) -> list[tuple[int | None, str, str]]:
    return [(one.verdict.step, one.verdict.standing, one.verdict.state) for one in found.saves]


def pending(root: Path) -> set[str]:
    with UploadsTable.open(table_path(root), read_only=True) as table:
        return {record.path for record in table.records(state=RecordState.PENDING)}


def make_mirrored(folder: Path, *steps: int, **more: Any) -> tuple[Path, str, list[Meta]]:
    """A root whose saves are on a ``file://`` mirror, committed; the root, the mirror's URL and the metas."""
    root, url = folder / "root", f"file://{folder}/mirror"
    store = open_store(url)
    metas = [make_save(root, step, number=number, **more) for number, step in enumerate(steps, 1)]
    put_attempts(root, [FIRST_ATTEMPT])
    put_attempts(store, [FIRST_ATTEMPT])
    for meta in metas:
        put_on_mirror(store, root, meta)
    store.close()
    return root, url, metas


def require(root: Path, url: str) -> None:
    """Have the root's table say what a trainer's does: that this mirror is required."""
    table = UploadsTable.open(table_path(root), create=True)
    table.set_mirrors([(url, True)])
    table.close()


def make_pending(folder: Path, url: str, *steps: int, **more: Any) -> tuple[Path, list[Meta]]:
    """A root with saves that its table has pending for a mirror."""
    root = folder / "root"
    metas = [make_save(root, step, number=number, **more) for number, step in enumerate(steps, 1)]
    put_attempts(root, [FIRST_ATTEMPT])
    table = UploadsTable.open(table_path(root), create=True)
    specs = mirror_specs([url])
    table.set_mirrors([(spec.url, spec.required) for spec in specs])
    add_missing_records(table, specs, metas)
    table.close()
    return root, metas


def fail_uploads(root: Path, *paths: str, reason: str = "the bucket said 400") -> int:
    """Have the root's table say that the uploads of these files (of all, if none is named) failed for good."""
    table = UploadsTable.open(table_path(root))
    claims: list[Claim] = []
    for url in [row.url for row in table.mirrors()]:
        while (claim := table.claim("test", url, lease_s=60.0)) is not None:
            claims.append(claim)
    for claim in claims:
        if not paths or claim.record.path in paths:
            table.fail(claim, reason)
        else:
            table.put_back(claim, "left for later", not_before_s=0.0)
    table.close()
    return sum(not paths or claim.record.path in paths for claim in claims)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but for what is under ``.ckptmirror``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".ckptmirror" not in path.parts
    }


def whole(root: Path) -> dict[int, Meta]:
    """The newest whole save of each step on the disk."""
    return {save.meta.step: save.meta for save in read_inventory(root).saves}


def leftovers(root: Path) -> list[str]:
    """Everything below a root that is temporary or in the trash, but for a status that is being written."""
    inventory = read_inventory(root)
    loose = [*root.rglob("*.tmp"), *inventory.temporaries, *inventory.trash]
    return [str(path) for path in loose if not path.name.startswith("status.json.")]


def artifact(root: Path, meta: Meta, name: str) -> Path:
    """The path of the one artifact of a save whose path contains ``name``."""
    (path,) = [a.path for a in meta.artifacts if name in a.path]
    return root / path


def control(root: Path, name: str) -> Path:
    """A file of the control directory."""
    return root / names.CONTROL_DIR / name
