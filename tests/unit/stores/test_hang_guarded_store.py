"""The store whose calls end: what a directory that hangs does to its caller, and what it may do later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core.errors import StoreHangs, StoreTemporary
from ckptmirror.local.hang_guard import HangGuard
from ckptmirror.stores import file as file_store
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from ckptmirror.stores.decorator import StoreDecorator
from ckptmirror.stores.file import FileStore
from ckptmirror.stores.hang_guarded import HangGuardedStore
from ckptmirror.stores.retrying import RetryingStore
from ckptmirror.stores.same_place import SamePlaceStore
from ckptmirror.stores.throttled import ThrottledStore
from tests.contract.stores_under_test import BytesSource, pattern_bytes, upload_of
from tests.kit.faulty_store import FaultyStore, StoreFault

DATA = pattern_bytes(100_000)
_numbers = itertools.count()


class Hanging(StoreDecorator):
    """A store that hangs in its first contact until it is released."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.answers = threading.Event()

    def identity(self, expected: str | None = None) -> str | None:
        self.answers.wait(60)
        return super().identity(expected)


@pytest.fixture
def behind(tmp_path: Path) -> FaultyStore:
    store = FileStore(tmp_path / "mirror")
    store.write("x", DATA, if_generation=0)
    return FaultyStore(store)


@pytest.fixture
def release(behind: FaultyStore) -> Iterator[threading.Event]:
    """All calls hang until this is set."""
    event = threading.Event()
    behind.script(StoreFault(hold=event, times=0))
    yield event
    event.set()


def impatient(behind: Store, limit_s: float = 0.0) -> HangGuardedStore:
    return HangGuardedStore(behind, Path(f"/nfs/run-{next(_numbers)}"), limit_s)


ASKS: list[Callable[[Store], object]] = [
    lambda store: store.stat("x"),
    lambda store: list(store.list()),
    lambda store: store.read("x", limit_bytes=200_000),
    lambda store: store.write("y", b"1", if_generation=0),
    lambda store: store.upload(upload_of("z", b"1")),
    lambda store: store.download("x", generation=1, offset=0, buffer=memoryview(bytearray(9))),
    lambda store: store.delete("x", generation=1),
]


@pytest.mark.parametrize("ask", ASKS)
def test_i7_a_directory_that_hangs_is_a_mirror_that_does_not_answer(
    behind: FaultyStore, release: threading.Event, ask: Callable[[Store], object]
) -> None:
    with pytest.raises(StoreHangs, match="/nfs/run-"):
        ask(impatient(behind))


def test_a_download_that_was_given_up_touches_the_callers_buffer_no_more(
    behind: FaultyStore, release: threading.Event
) -> None:
    generation = behind._store.stat("x").generation  # type: ignore[union-attr]
    buffer = bytearray(len(DATA))
    store = impatient(behind)
    with pytest.raises(StoreHangs):
        store.download("x", generation=generation, offset=0, buffer=memoryview(buffer))
    release.set()
    until_returned(store)
    assert buffer == bytes(len(DATA))


def test_an_upload_that_was_given_up_reads_its_source_no_more(behind: FaultyStore, release: threading.Event) -> None:
    source = BytesSource(DATA)
    store = impatient(behind)
    with pytest.raises(StoreHangs):
        store.upload(upload_of("z", DATA, source=source))
    release.set()
    until_returned(store)
    assert source.read_bytes == 0
    assert behind._store.stat("z") is None


def until_returned(store: HangGuardedStore) -> None:
    """What hung has returned."""
    while store._guard._hanging:
        HangGuard(Path("/")).call(lambda: None)


def test_a_start_asks_a_directory_that_hangs_until_it_answers(tmp_path: Path) -> None:
    hanging = Hanging(FileStore(tmp_path / "mirror"))
    store = RetryingStore(impatient(hanging, 0.5), wait=lambda _delay_s: hanging.answers.set())
    assert SamePlaceStore(store, lambda: None, str).stat("x") is None


def test_a_directory_that_is_not_mounted_is_not_asked_again(tmp_path: Path) -> None:
    waits: list[float] = []
    store = RetryingStore(HangGuardedStore(FileStore(tmp_path / "mirror"), tmp_path), wait=waits.append)
    with pytest.raises(StoreTemporary, match="is it mounted"):
        store.identity("11" * 16)
    assert waits == []


def test_a_limit_of_bytes_is_no_hang(behind: FaultyStore) -> None:
    bounded = HangGuardedStore(behind, Path("/nfs/slow"))
    guard = bounded._guard
    now_s = [0.0]
    guard.clock = lambda: now_s[0]

    def wait(delay_s: float) -> bool:
        now_s[0] += max(delay_s, 1e6)
        return False

    store = ThrottledStore(bounded, bytes_per_s=1000.0, clock=lambda: now_s[0], wait=wait)
    info = store.upload(upload_of("z", DATA))
    assert info.size_bytes == len(DATA)
    assert now_s[0] > 1e6


def test_every_mirror_in_a_directory_is_bounded_and_no_other_is(tmp_path: Path) -> None:
    assert isinstance(open_store(f"file://{tmp_path}/m", retry=False), HangGuardedStore)
    assert not isinstance(open_store("memory://bounded", retry=False), HangGuardedStore)
    assert isinstance(file_store.open(f"file://{tmp_path}/m"), FileStore)
