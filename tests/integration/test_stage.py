"""Staging from memory, file and strict GCS mirrors: what arrives, what stays, what is refused, and how faults end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    DestinationOccupied,
    IntegrityError,
    KindMismatch,
    LocalStorageFull,
    LocalStorageUnwritable,
    RefusedOnlyCopy,
    RootLocked,
    StoreTemporary,
    UsageError,
)
from ckptmirror.core.model import Meta
from ckptmirror.flow import receive, staging
from ckptmirror.flow.catalog import mirror_catalog
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.flow.resolve import find_local_checkpoint_steps
from ckptmirror.flow.stage import stage_checkpoint_step, stage_save
from ckptmirror.flow.staging import StageProgress
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import RootLock
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from tests.factory import (
    FIRST_ATTEMPT,
    bytes_of,
    flip_bit,
    make_attempt,
    make_save,
    put_attempts,
    put_on_mirror,
)

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

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "root"
        self.dest = tmp_path / "eval"
        self.url = f"memory://m-{uuid.uuid4().hex}/run"
        self.spy = SpyStore(open_store(self.url))
        self.mirror = Mirror(self.spy.url, True, self.spy)  # type: ignore[arg-type]
        put_attempts(self.spy, [FIRST_ATTEMPT])  # type: ignore[arg-type]

    def save(self, step: int = 200, kinds: tuple[str, ...] = ("dcp", "model"), number: int = 1, **more: object) -> Meta:
        meta = make_save(self.root, step, kinds, number=number, **more)  # type: ignore[arg-type]
        put_on_mirror(self.spy, self.root, meta)  # type: ignore[arg-type]
        return meta

    def on_mirror(self, meta: Meta) -> Meta:
        return mirror_catalog(self.mirror).saves[meta.save_id]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def whole_saves(root: Path) -> dict[str, Meta]:
    """Every whole save of a directory by id; its bytes must be those of its meta."""
    from ckptmirror.local.checksums import verify_file

    inventory = read_inventory(root)
    assert [str(save.meta_path) + save.why for save in inventory.incomplete] == []
    for save in inventory.saves:
        for artifact in save.meta.artifacts:
            verify_file(root / artifact.path, artifact.digest)
    return {save.meta.save_id: save.meta for save in inventory.saves}


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != names.CONTROL_DIR)


# -- what arrives --------------------------------------------------------------------------------------------


def test_dcp_brings_the_directory_and_a_meta_and_nothing_else(place: Place) -> None:
    meta = place.save(ranks=2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert (staged.path, staged.step, staged.kind) == (place.dest / "dcp_000200", 200, "dcp")
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]
    (there,) = whole_saves(place.dest).values()
    assert (there.save_id, there.kinds, there.staged_from) == (meta.save_id, ("dcp",), place.mirror.url)
    original = bytes_of(place.root, meta)
    assert bytes_of(place.dest, there) == {path: data for path, data in original.items() if path.startswith("dcp")}


def test_model_brings_one_file_and_full_brings_the_rest(place: Place) -> None:
    place.save(ranks=2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert staged.path == place.dest / "model_000200.pt"
    assert names_in(place.dest) == ["meta_000200.json", "model_000200.pt"]
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model", full=True)
    assert names_in(place.dest) == [
        "extra_000200_rank0.pt",
        "extra_000200_rank1.pt",
        "meta_000200.json",
        "model_000200.pt",
        "optim_000200_rank0.pt",
        "optim_000200_rank1.pt",
        "tensors_000200_rank0.json",
        "tensors_000200_rank1.json",
    ]
    whole_saves(place.dest)


def test_without_a_kind_dcp_comes_before_model_and_the_answer_says_which(place: Place) -> None:
    place.save(100, ("model",), 1)
    place.save(200, ("dcp", "model"), 2)
    assert stage_checkpoint_step(place.mirror, step=100, dest=place.dest).kind == "model"
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest).kind == "dcp"


def test_latest_is_the_newest_step_of_the_lineage_that_has_the_kind(place: Place) -> None:
    first = place.save(100, ("dcp", "model"), 1)
    place.save(300, ("dcp", "model"), 2)
    rewound = make_attempt(1, first)
    place.save(150, ("dcp",), 1, attempt=rewound)
    put_attempts(place.spy, [FIRST_ATTEMPT, rewound])  # type: ignore[arg-type]
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest).step == 150
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest, require_kind="model").step == 100


def test_a_superseded_step_is_staged_only_when_asked_for(place: Place) -> None:
    first = place.save(100, number=1)
    place.save(300, number=2)
    put_attempts(place.spy, [FIRST_ATTEMPT, make_attempt(1, first)])  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match="superseded"):
        stage_checkpoint_step(place.mirror, step=300, dest=place.dest)
    assert stage_checkpoint_step(place.mirror, step=300, dest=place.dest, superseded=True).step == 300


def test_an_explicit_kind_is_never_replaced_by_another(place: Place) -> None:
    place.save(200, ("model",))
    with pytest.raises(KindMismatch, match="it has model") as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert raised.value.exit_code == 4
    assert not place.dest.exists()


def test_a_missing_step_lists_the_nearest_ones(place: Place) -> None:
    for number, step in enumerate((100, 200, 300), start=1):
        place.save(step, ("model",), number)
    with pytest.raises(CheckpointNotFound, match="nearest are 100, 200, 300") as raised:
        stage_checkpoint_step(place.mirror, step=220, dest=place.dest)
    assert raised.value.exit_code == 3
    with pytest.raises(UsageError):
        stage_checkpoint_step(place.mirror, step="newest", dest=place.dest)  # type: ignore[arg-type]


def test_a_save_whose_meta_is_not_there_yet_is_not_staged_until_it_is(place: Place) -> None:
    meta = make_save(place.root, 200)
    put_on_mirror(place.spy, place.root, meta, commit=False)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    asked = threading.Event()
    real = place.spy._store.list

    class Committing(SpyStore):
        def list(self, prefix: str = "") -> Iterator[object]:
            if asked.is_set():
                data = meta_to_bytes(meta)
                if self._store.stat("meta_000200.json") is None:
                    self._store.write("meta_000200.json", data, if_generation=0)
            asked.set()
            return real(prefix)

    mirror = Mirror(place.url, True, Committing(place.spy._store))  # type: ignore[arg-type]
    assert stage_checkpoint_step(mirror, step=200, dest=place.dest, wait_s=30).step == 200


def test_files_larger_than_a_block_and_empty_files_arrive(place: Place) -> None:
    sizes = {"__0_0.distcp": 21 * MIB + 17, "__1_0.distcp": 8 * MIB, ".metadata": 0}
    meta = place.save(200, ("dcp",), sizes=sizes, ranks=2)
    seen: list[StageProgress] = []
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, on_progress=seen.append)
    (there,) = whole_saves(place.dest).values()
    assert {a.path: a.digest for a in there.artifacts} == {
        a.path: a.digest for a in meta.artifacts if a.path.startswith("dcp")
    }
    assert seen[-1] == StageProgress(200, sum(sizes.values()), 0, sum(sizes.values()))
    assert max(length for _, _, length in place.spy.downloads) <= receive.CHUNK_SIZE_BYTES


def test_many_small_files_are_fetched_in_parallel(place: Place) -> None:
    place.save(200, ("dcp",), ranks=20)
    barrier = threading.Barrier(receive.WORKERS)
    first = iter(range(receive.WORKERS))

    def meet(name: str, offset: int) -> None:
        if next(first, None) is not None:
            barrier.wait(30)

    place.spy.before = meet
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    whole_saves(place.dest)


def test_objects_under_other_names_on_the_mirror_arrive_under_the_metas_paths(place: Place) -> None:
    place.save(200, ("model",), 1)
    second = make_save(place.root / "second", 200, ("dcp", "model"), number=2)
    on_mirror = put_on_mirror(place.spy, place.root / "second", second)  # type: ignore[arg-type]
    assert any(artifact.object is not None for artifact in on_mirror.artifacts)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert staged.path == place.dest / "model_000200.pt"
    assert staged.path.read_bytes() == (place.root / "second" / "model_000200.pt").read_bytes()


# -- what is there already -----------------------------------------------------------------------------------


def test_a_staged_step_is_returned_at_once_without_a_download(place: Place) -> None:
    place.save()
    first = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    place.spy.downloads.clear()
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp") == first
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True) == first
    assert place.spy.downloads == []


def test_another_kind_of_a_staged_save_joins_its_meta(place: Place) -> None:
    meta = place.save()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    place.spy.downloads.clear()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert {name for name, _, _ in place.spy.downloads} == {"model_000200.pt"}
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json", "model_000200.pt"]
    assert whole_saves(place.dest)[meta.save_id].kinds == meta.kinds
    assert not list((place.dest / names.TRASH_DIR).iterdir())


def test_the_trainers_own_copy_is_used_as_it_is(place: Place) -> None:
    meta = place.save()
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.root, require_kind="model")
    assert staged.path == place.root / "model_000200.pt"
    assert place.spy.downloads == []
    assert whole_saves(place.root)[meta.save_id].staged_from is None


def test_a_truncated_staged_file_is_fetched_again_even_without_refresh(place: Place) -> None:
    meta = place.save(ranks=2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    (place.dest / "dcp_000200" / "__1_0.distcp").write_bytes(b"short")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert list(whole_saves(place.dest)) == [meta.save_id]
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]


def test_a_bit_flipped_staged_file_is_replaced_on_refresh(place: Place) -> None:
    meta = place.save()
    for kind in ("dcp", "model"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)  # type: ignore[arg-type]
    flip_bit(place.dest / "model_000200.pt")
    # Of any kind: the model file is replaced although dcp is what was asked for.
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert whole_saves(place.dest)[meta.save_id].kinds == meta.kinds
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json", "model_000200.pt"]


def test_without_refresh_a_stale_copy_stays_and_the_new_one_lies_beside_it(place: Place) -> None:
    old = place.save(200, ("model",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    new = place.save(200, ("model",), 2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert staged.path == place.dest / f"model_000200-{new.save_id[:8]}.pt"
    assert set(whole_saves(place.dest)) == {old.save_id, new.save_id}
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest) == staged


def test_stage_checkpoint_step_refresh_replaces_stale_local_model_with_remote_dcp(place: Place) -> None:
    old = place.save(200, ("model",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    new = place.save(200, ("dcp", "model"), 2)
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert list(whole_saves(place.dest)) == [new.save_id]
    assert old.save_id != new.save_id
    assert names_in(place.dest) == [f"dcp_000200-{new.save_id[:8]}", f"meta_000200-{new.save_id[:8]}.json"]
    assert staged.kind == "dcp"
    assert find_local_checkpoint_steps(place.dest, "model") == []


def test_refresh_keeps_a_staged_kind_that_another_current_save_holds(place: Place) -> None:
    model = place.save(200, ("model",), 1)
    dcp = place.save(200, ("dcp",), 2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    flip_bit(place.dest / "model_000200.pt")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert set(whole_saves(place.dest)) == {model.save_id, dcp.save_id}


def test_refresh_in_a_training_root_never_touches_what_the_mirror_does_not_hold(place: Place) -> None:
    local_only = make_save(place.root, 200, ("model",), number=5)
    put_attempts(place.root, [FIRST_ATTEMPT])
    other = make_save(place.root.parent / "other", 200, ("dcp",), number=2)
    put_on_mirror(place.spy, place.root.parent / "other", other)  # type: ignore[arg-type]
    before = names_in(place.root)
    with pytest.raises(RefusedOnlyCopy) as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.root, refresh=True)
    assert raised.value.exit_code == 7
    assert names_in(place.root) == before
    assert list(whole_saves(place.root)) == [local_only.save_id]


def test_refresh_in_a_training_root_mends_a_rotten_save_under_its_own_names(place: Place) -> None:
    meta = place.save()
    put_attempts(place.root, [FIRST_ATTEMPT])
    flip_bit(place.root / "dcp_000200" / "__0_0.distcp")
    before = names_in(place.root)
    stage_checkpoint_step(place.mirror, step=200, dest=place.root, require_kind="dcp", refresh=True)
    assert list(whole_saves(place.root)) == [meta.save_id]
    assert names_in(place.root) == before


def test_a_training_root_whose_trainer_lives_is_not_staged_into(place: Place) -> None:
    place.save()
    put_attempts(place.dest, [FIRST_ATTEMPT])
    lock = RootLock(place.dest)
    lock.acquire({})
    try:
        with pytest.raises(RootLocked):
            stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    finally:
        lock.release()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)


# -- interrupted and broken downloads ------------------------------------------------------------------------


def test_an_interrupted_stage_continues_and_fetches_no_verified_block_again(place: Place) -> None:
    size = 40 * MIB + 5
    place.save(200, ("model",), sizes={"model_000200.pt": size})
    served = iter(range(3))

    def fail_after_three(name: str, offset: int) -> None:
        if next(served, None) is None:
            raise StoreTemporary("gone")

    place.spy.before = fail_after_three
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert find_local_checkpoint_steps(place.dest) == []
    assert all(names.is_tmp_name(name) for name in names_in(place.dest))
    place.spy.before = nothing
    place.spy.downloads.clear()
    seen: list[StageProgress] = []
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, on_progress=seen.append)
    whole_saves(place.dest)
    assert place.spy.downloaded_bytes == size - 3 * receive.CHUNK_SIZE_BYTES
    assert (seen[-1].kept_bytes, seen[-1].total_bytes) == (3 * receive.CHUNK_SIZE_BYTES, size)


def test_a_block_that_rotted_in_the_temporary_is_fetched_again(place: Place) -> None:
    place.save(200, ("model",), sizes={"model_000200.pt": 24 * MIB})

    def fail_at_the_last_block(name: str, offset: int) -> None:
        if offset == 16 * MIB:
            raise StoreTemporary("gone")

    place.spy.before = fail_at_the_last_block
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    (tmp,) = place.dest.glob("*.tmp")
    flip_bit(tmp, 3)
    place.spy.before = nothing
    place.spy.downloads.clear()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    whole_saves(place.dest)
    assert ("model_000200.pt", 0, 8 * MIB) in place.spy.downloads


def test_a_keyboard_interrupt_leaves_only_temporaries(place: Place) -> None:
    place.save(200, ("dcp",), ranks=8)
    calls = iter(range(4))
    interrupted = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def on_interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def interrupt(name: str, offset: int) -> None:
        if next(calls, None) is None and not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(30)

    place.spy.before = interrupt
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert all(names.is_tmp_name(name) for name in names_in(place.dest))
    place.spy.before = nothing
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]
    whole_saves(place.dest)


def test_a_corrupt_block_is_asked_for_again(place: Place) -> None:
    place.save(200, ("model",))
    times = iter(range(2))

    def corrupt(name: str, offset: int, buffer: memoryview) -> None:
        if next(times, None) is not None:
            buffer[0] ^= 1

    place.spy.after = corrupt
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert len(place.spy.downloads) == 3
    whole_saves(place.dest)


def test_a_mirror_that_keeps_sending_other_bytes_is_an_integrity_error(place: Place) -> None:
    place.save(200, ("model",))

    def corrupt(name: str, offset: int, buffer: memoryview) -> None:
        buffer[0] ^= 1

    place.spy.after = corrupt
    with pytest.raises(IntegrityError, match="block 0") as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert raised.value.exit_code == 6
    assert find_local_checkpoint_steps(place.dest) == []


def test_an_object_replaced_meanwhile_is_never_mixed_in(place: Place) -> None:
    place.save(200, ("model",), sizes={"model_000200.pt": 12 * MIB})
    replaced = threading.Event()

    def replace_it(name: str, offset: int, buffer: memoryview) -> None:
        if not replaced.is_set():
            replaced.set()
            info = place.spy._store.stat(name)
            assert info is not None
            place.spy._store.delete(name, generation=info.generation)

    place.spy.after = replace_it
    with pytest.raises(CheckpointNotFound) as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert raised.value.exit_code == 3
    assert find_local_checkpoint_steps(place.dest) == []


# -- the destination -----------------------------------------------------------------------------------------


def test_a_destination_that_is_a_file_is_refused(place: Place) -> None:
    place.save()
    place.dest.write_text("a file")
    with pytest.raises(LocalStorageUnwritable):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)


def test_a_destination_without_room_is_refused_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.save()
    real = os.statvfs

    def nearly_full(path: object) -> os.statvfs_result:
        found = list(real(path))  # type: ignore[call-overload]
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(staging.os, "statvfs", nearly_full)
    with pytest.raises(LocalStorageFull):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert place.spy.downloads == []


def test_foreign_files_under_our_names_stay_and_the_other_names_are_used(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    (place.dest / "model_000200.pt").write_bytes(b"precious")
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert staged.path == place.dest / f"model_000200-{meta.save_id[:8]}.pt"
    assert (place.dest / "model_000200.pt").read_bytes() == b"precious"


def test_a_destination_whose_names_are_all_taken_is_occupied(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    for tag in ("", f"-{meta.save_id[:8]}"):
        (place.dest / f"model_000200{tag}.pt").write_bytes(b"precious")
    before = names_in(place.dest)
    with pytest.raises(DestinationOccupied):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert names_in(place.dest) == before
    assert place.spy.downloads == []


def test_a_copied_file_without_its_meta_is_taken_over_by_its_checksum(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    (place.dest / "model_000200.pt").write_bytes((place.root / "model_000200.pt").read_bytes())
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert place.spy.downloads == []
    assert list(whole_saves(place.dest)) == [meta.save_id]


def test_nothing_is_written_through_a_link(place: Place, tmp_path: Path) -> None:
    meta = place.save(200, ("dcp", "model"))
    outside = tmp_path / "outside"
    outside.mkdir()
    place.dest.mkdir()
    for name in ("dcp_000200", "model_000200.pt"):
        (place.dest / names.tmp_name(name, meta.save_id)).symlink_to(outside / "target")
    (place.dest / names.tmp_name("dcp_000200", meta.save_id)).unlink()
    (place.dest / names.tmp_name("dcp_000200", meta.save_id)).symlink_to(outside)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    with pytest.raises(LocalStorageUnwritable):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert list(outside.iterdir()) == []
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / names.CONTROL_DIR).symlink_to(outside)
    with pytest.raises(DestinationOccupied):
        stage_checkpoint_step(place.mirror, step=200, dest=tmp_path / "second")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../escape.pt", "/etc/escape", ".ckptmirror/attempts.json", "model_000300.pt", "latest"]
)
def test_a_hostile_path_in_a_meta_is_refused(place: Place, path: str) -> None:
    meta = place.on_mirror(place.save(200, ("model",)))
    hostile = replace(meta, artifacts=(replace(meta.artifacts[0], path=path),))
    with pytest.raises(BrokenMeta):
        stage_save(place.mirror, hostile, place.dest, kinds=("model",), full=True)
    assert not place.dest.exists()


# -- processes -----------------------------------------------------------------------------------------------

_CHILD = """
import sys
from ckptmirror.flow.stage import stage_checkpoint_step
print("ready", flush=True)
sys.stdin.readline()
print(stage_checkpoint_step(sys.argv[1], step=200, dest=sys.argv[2]).path, flush=True)
"""


@pytest.fixture
def gcs() -> Iterator[object]:
    from ckptmirror.testing import GcsServerProcess

    with GcsServerProcess(buckets=["ckpts"]) as server:
        yield server


@pytest.fixture
def gcs_place(gcs: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)  # type: ignore[attr-defined]
    place = Place(tmp_path)
    place.url = "gs://ckpts/run"
    place.spy = SpyStore(open_store(place.url))
    place.mirror = Mirror(place.spy.url, True, place.spy)  # type: ignore[arg-type]
    put_attempts(place.spy, [FIRST_ATTEMPT])  # type: ignore[arg-type]
    return place


def test_one_download_per_host(gcs: object, gcs_place: Place) -> None:
    meta = gcs_place.save(200, ("dcp",), ranks=4, sizes={"__0_0.distcp": 9 * MIB})
    gcs.clear_log()  # type: ignore[attr-defined]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, gcs_place.url, str(gcs_place.dest)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    answers = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        answers.append(child.communicate(timeout=120)[0].strip())
    assert answers == [str(gcs_place.dest / "dcp_000200")] * 4
    whole_saves(gcs_place.dest)
    media = [e for e in gcs.log("object.media") if "dcp_000200" in e["object"]]  # type: ignore[attr-defined]
    assert len(media) == sum(1 for a in meta.artifacts if a.path.startswith("dcp")) + 1  # one file has two ranges


@pytest.mark.parametrize(
    "fault",
    [
        {"corrupt_byte_at": 100},
        {"reset_after_bytes": 1000},
        {"truncate_after_bytes": 1000},
        {"status": 503},
        {"stall_s": 0.5, "after_bytes": 1000},
    ],
    ids=["corrupt byte", "reset", "truncated", "busy", "stall"],
)
def test_a_fault_in_a_download_is_survived(gcs: object, gcs_place: Place, fault: dict[str, object]) -> None:
    from ckptmirror.testing import Fault

    meta = gcs_place.save(200, ("model",), sizes={"model_000200.pt": 5 * MIB})
    gcs.faults([Fault(operation="object.media", object="model_000200", times=1, **fault)])  # type: ignore[attr-defined, arg-type]
    stage_checkpoint_step(gcs_place.mirror, step=200, dest=gcs_place.dest)
    assert list(whole_saves(gcs_place.dest)) == [meta.save_id]
    (seen,) = gcs.faults_seen()  # type: ignore[attr-defined]
    assert seen["fired"] == 1


def test_a_stage_after_the_server_died_in_mid_download_continues(gcs: object, gcs_place: Place) -> None:
    from ckptmirror.testing import Fault

    size = 32 * MIB
    gcs_place.save(200, ("model",), sizes={"model_000200.pt": size})
    real = gcs_place.mirror
    bare = Mirror(real.url, True, open_store(gcs_place.url, retry=False))
    gcs.faults([Fault(operation="object.media", object="model_", nth=3, status=503, times=0)])  # type: ignore[attr-defined]
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(bare, step=200, dest=gcs_place.dest)
    gcs.clear_faults()  # type: ignore[attr-defined]
    gcs.clear_log()  # type: ignore[attr-defined]
    stage_checkpoint_step(bare, step=200, dest=gcs_place.dest)
    whole_saves(gcs_place.dest)
    assert len([e for e in gcs.log("object.media") if "model_" in e["object"]]) == 2  # type: ignore[attr-defined]


def test_a_file_mirror_serves_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nfs/run"
    (tmp_path / "nfs").mkdir()
    store = open_store(url)
    put_attempts(store, [FIRST_ATTEMPT])
    meta = make_save(tmp_path / "root", 200)
    put_on_mirror(store, tmp_path / "root", meta)
    staged = stage_checkpoint_step(url, step="latest", dest=tmp_path / "eval")
    assert staged.kind == "dcp"
    assert list(whole_saves(tmp_path / "eval")) == [meta.save_id]
