"""What every store promises, asked of every store and of every decorated store."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptmirror.core.errors import (
    BrokenMeta,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import ObjectInfo, Store
from ckptmirror.testing import GcsServerProcess
from tests.contract.stores_under_test import OPENERS, Opener, pattern_bytes, server_with_bucket, upload_of
from tests.kit.saves import digest_of

MIB = 1024 * 1024
NAMES = ("plain", "a/b/c.json", "späte Namen/日本.pt", "100% of it", "a%2Fb", "a+b c&d=e?f#g", "dcp_000200/.metadata")


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with server_with_bucket(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(params=sorted(OPENERS))
def opener(request: pytest.FixtureRequest, tmp_path: Path, gcs_server: GcsServerProcess) -> Opener:
    return OPENERS[request.param](tmp_path, gcs_server)


@pytest.fixture
def store(opener: Opener) -> Iterator[Store]:
    opened = opener.open()
    assert isinstance(opened, Store)
    yield opened
    opened.close()


def _stat(store: Store, name: str) -> ObjectInfo:
    info = store.stat(name)
    assert info is not None
    return info


def _download(store: Store, info: ObjectInfo, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    store.download(info.name, generation=info.generation, offset=offset, buffer=memoryview(buffer))
    return bytes(buffer)


def test_url_reads_back_as_the_same_store(store: Store) -> None:
    from ckptmirror.stores import normalise_url

    assert normalise_url(store.url) == store.url


def test_a_place_says_the_same_of_itself_at_every_opening_or_nothing(opener: Opener) -> None:
    first, second = opener.open(), opener.open()
    found = first.identity()
    first.write("x", b"", if_generation=0)
    assert found is None or found
    assert second.identity() == first.identity() == second.identity(found) == found
    assert (first.local_directory is None) == (found is None)  # a directory may be another tomorrow, a bucket never is


def test_a_place_that_has_an_identity_is_not_taken_for_another(opener: Opener) -> None:
    if opener.open().identity() is None:
        return
    with pytest.raises(StoreTemporary, match="another mirror"):
        opener.open().identity("0" * 32)
    store = opener.open()
    store.identity()
    with pytest.raises(StoreTemporary, match="another mirror"):
        store.identity("0" * 32)
    store.write("x", b"", if_generation=0)  # it is still the one that it was


def test_no_store_draws_from_the_generators_of_the_training(store: Store) -> None:
    """google-cloud-storage draws a number for each small upload, from whatever it finds as ``random``."""

    def drawn() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = drawn()
    written = store.write("a", b"1", if_generation=0)
    store.write("a", b"2", if_generation=written.generation)
    store.upload(upload_of("b", pattern_bytes(300_000)))
    assert [info.name for info in store.list()] == ["a", "b"]
    store.read("a", limit_bytes=10)
    store.delete("b", generation=_stat(store, "b").generation)
    assert drawn() == before


def test_a_free_name_is_none_to_stat_and_not_found_to_read(store: Store) -> None:
    assert store.stat("nothing/here.json") is None
    with pytest.raises(ObjectNotFound):
        store.read("nothing/here.json", limit_bytes=10)
    with pytest.raises(ObjectNotFound):
        store.download("nothing/here.json", generation=1, offset=0, buffer=memoryview(bytearray(1)))
    assert list(store.list()) == []


@pytest.mark.parametrize("name", NAMES)
def test_any_allowed_name_is_written_read_listed_and_deleted(store: Store, name: str) -> None:
    info = store.write(name, b"content", if_generation=0)
    assert info.name == name
    assert info.generation > 0
    assert store.read(name, limit_bytes=7) == (b"content", _stat(store, name))
    assert [found.name for found in store.list()] == [name]
    store.delete(name, generation=info.generation)
    assert store.stat(name) is None
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "/abs", "../up", "a/../b", "a//b", "dir/", "a\\b", "new\nline", "x" * 1025])
def test_a_name_that_could_leave_the_mirror_is_refused(store: Store, name: str) -> None:
    with pytest.raises(BrokenMeta):
        store.write(name, b"", if_generation=0)
    with pytest.raises(BrokenMeta):
        store.stat(name)


def test_create_fails_if_the_name_exists_and_changes_nothing(store: Store) -> None:
    first = store.write("x", b"first", if_generation=0)
    with pytest.raises(PreconditionFailed):
        store.write("x", b"second", if_generation=0)
    with pytest.raises(PreconditionFailed):
        store.upload(upload_of("x", b"third"))
    with pytest.raises(PreconditionFailed):
        store.upload(upload_of("x", pattern_bytes(2 * MIB)))
    assert store.read("x", limit_bytes=10)[0] == b"first"
    assert _stat(store, "x").generation == first.generation


def test_replace_happens_only_at_the_given_generation(store: Store) -> None:
    first = store.write("x", b"1", if_generation=0)
    second = store.write("x", b"22", if_generation=first.generation)
    assert second.generation != first.generation
    with pytest.raises(PreconditionFailed):
        store.write("x", b"333", if_generation=first.generation)
    with pytest.raises(PreconditionFailed):
        store.write("absent", b"333", if_generation=first.generation)
    assert store.read("x", limit_bytes=10) == (b"22", _stat(store, "x"))
    assert store.stat("absent") is None


def test_every_write_gives_a_generation_never_seen_before(store: Store) -> None:
    seen: set[int] = set()
    generation = 0
    for number in range(20):
        info = store.write("x", b"same", if_generation=generation)
        assert info.generation not in seen
        seen.add(info.generation)
        generation = info.generation
        if number % 3 == 2:
            store.delete("x", generation=generation)
            generation = 0


def test_write_says_what_stat_and_list_say(store: Store) -> None:
    metadata = {"ckptmirror-save": "1f0c9a2e", "ünï": "cödé"}
    written = store.write("x", b"abc", if_generation=0, metadata=metadata)
    assert written == _stat(store, "x") == next(iter(store.list()))
    assert written.size_bytes == 3
    capabilities = store.capabilities
    assert written.crc32c == (crc32c(b"abc") if capabilities.server_crc32c else None)
    assert written.metadata == (metadata if capabilities.custom_metadata else {})


def test_delete_is_idempotent_and_refuses_another_generation(store: Store) -> None:
    info = store.write("dir/x", b"1", if_generation=0)
    with pytest.raises(PreconditionFailed):
        store.delete("dir/x", generation=info.generation + 1)
    assert _stat(store, "dir/x") == info
    store.delete("dir/x", generation=info.generation)
    store.delete("dir/x", generation=info.generation)
    store.delete("never/there", generation=5)
    again = store.write("dir/x", b"1", if_generation=0)
    with pytest.raises(PreconditionFailed):
        store.delete("dir/x", generation=info.generation)
    assert _stat(store, "dir/x") == again


def test_list_is_in_name_order_and_honours_any_prefix(store: Store) -> None:
    names = ["b", "a/2", "a/10", "a.txt", "ab", "a/sub/x", "Z"]
    for name in names:
        store.write(name, name.encode(), if_generation=0)
    assert [info.name for info in store.list()] == sorted(names)
    assert [info.name for info in store.list("a/")] == ["a/10", "a/2", "a/sub/x"]
    assert [info.name for info in store.list("a/1")] == ["a/10"]
    assert [info.name for info in store.list("a")] == ["a.txt", "a/10", "a/2", "a/sub/x", "ab"]
    assert list(store.list("none/")) == []


def test_read_refuses_what_is_larger_than_its_limit(store: Store) -> None:
    store.write("x", b"12345", if_generation=0)
    with pytest.raises(StorePermanent):
        store.read("x", limit_bytes=4)


def test_a_generation_that_is_gone_is_not_found(store: Store) -> None:
    old = store.write("x", b"old", if_generation=0)
    new = store.write("x", b"new", if_generation=old.generation)
    with pytest.raises(ObjectNotFound):
        store.read("x", generation=old.generation, limit_bytes=10)
    for size_bytes in (3, 0):
        with pytest.raises(ObjectNotFound):
            _download(store, old, 0, size_bytes)
    assert store.read("x", generation=new.generation, limit_bytes=10)[0] == b"new"


@pytest.mark.parametrize("size_bytes", [0, 1, 256 * 1024, MIB + 1, 20 * MIB])
def test_upload_arrives_byte_for_byte(store: Store, size_bytes: int) -> None:
    data = pattern_bytes(size_bytes)
    metadata = {"ckptmirror-save": "s"}
    progress: list[int] = []
    info = store.upload(upload_of("deep/dir/x", data, metadata=metadata, on_progress=progress.append))
    assert info == _stat(store, "deep/dir/x")
    assert info.size_bytes == size_bytes
    assert info.metadata == (metadata if store.capabilities.custom_metadata else {})
    assert _download(store, info, 0, size_bytes) == data
    assert progress == sorted(progress)
    assert not progress or progress[-1] == size_bytes


def test_any_range_is_downloaded_exactly(store: Store) -> None:
    data = pattern_bytes(3 * MIB + 17)
    info = store.upload(upload_of("x", data))
    for offset, size_bytes in [
        (0, 1),
        (1, 1),
        (4095, 2),
        (MIB - 1, MIB + 2),
        (len(data) - 1, 1),
        (0, len(data)),
        (9, 0),
    ]:
        assert _download(store, info, offset, size_bytes) == data[offset : offset + size_bytes]


def test_a_range_past_the_end_is_an_error_never_short(store: Store) -> None:
    info = store.upload(upload_of("x", b"12345"))
    for offset, size_bytes in [(0, 6), (4, 2), (5, 1), (100, 1)]:
        with pytest.raises(StoreTemporary):
            _quick(store, info, offset, size_bytes)


def _quick(store: Store, info: ObjectInfo, offset: int, size_bytes: int) -> None:
    """Download without the retrying decorator's patience."""
    inner = getattr(store, "_store", store)
    _download(inner, info, offset, size_bytes)


@pytest.mark.parametrize("size_bytes", [5, 3 * MIB])
def test_bytes_that_are_not_the_committed_ones_are_rejected_and_leave_nothing(store: Store, size_bytes: int) -> None:
    committed = pattern_bytes(size_bytes)
    rotten = committed[:-1] + bytes([committed[-1] ^ 1])
    with pytest.raises(IntegrityError):
        store.upload(upload_of("dir/x", rotten, digest=digest_of(committed)))
    with pytest.raises(IntegrityError):
        store.upload(upload_of("dir/x", committed[:-1], digest=digest_of(committed)))
    assert store.stat("dir/x") is None
    assert list(store.list()) == []
    store.upload(upload_of("dir/x", committed))
    assert _stat(store, "dir/x").size_bytes == size_bytes


def test_two_writers_one_wins(opener: Opener) -> None:
    rounds, writers = 5, 4
    stores = [opener.open() for _ in range(writers)]
    barrier = threading.Barrier(writers)
    won: list[tuple[int, int]] = []

    def create(number: int) -> None:
        for turn in range(rounds):
            barrier.wait(30)
            try:
                if number % 2:
                    stores[number].write(f"x{turn}", f"{number}".encode(), if_generation=0)
                else:
                    stores[number].upload(upload_of(f"x{turn}", f"{number}".encode()))
                won.append((turn, number))
            except PreconditionFailed:
                continue

    threads = [threading.Thread(target=create, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {turn for turn, _ in won} == set(range(rounds))
    if stores[0].capabilities.create_only:
        assert len(won) == rounds
    for turn in range(rounds):
        assert (turn, int(stores[0].read(f"x{turn}", limit_bytes=10)[0])) in won


def test_no_increment_is_lost_among_writers_that_compare_and_swap(opener: Opener) -> None:
    if not opener.open().capabilities.compare_and_swap:
        pytest.skip("it only looks before it replaces, and says so")
    opener.open().write("counter", b"0", if_generation=0)
    errors: list[BaseException] = []

    def increment(store: Store) -> None:
        done = 0
        for _ in range(500):
            try:
                data, info = store.read("counter", limit_bytes=10)
                store.write("counter", str(int(data) + 1).encode(), if_generation=info.generation)
            except (PreconditionFailed, StoreTemporary):
                continue  # another was quicker, or the object kept changing while it was read
            done += 1
            if done == 10:
                return
        errors.append(AssertionError("starved"))

    threads = [threading.Thread(target=increment, args=(opener.open(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert errors == []
    assert opener.open().read("counter", limit_bytes=10)[0] == b"30"


_DOES_EACH_LINE = "import sys\nfor line in sys.stdin:\n    exec(line)\n    sys.stdout.flush()\n"


@contextlib.contextmanager
def _another_process(opener: Opener) -> Iterator[Callable[[str], str]]:
    """Open the store in another process; yield what does a line of code there and returns the line that it prints."""
    if not opener.code:
        pytest.skip("the store lives in one process")
    program = [sys.executable, "-c", f"{opener.code}\n{_DOES_EACH_LINE}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None

        def do(line: str) -> str:
            assert other.stdin is not None
            assert other.stdout is not None
            print(line, file=other.stdin, flush=True)
            return other.stdout.readline()

        yield do
        other.stdin.close()
        assert other.wait(60) == 0


def test_sees_objects_written_by_another_process(store: Store, opener: Opener) -> None:
    with _another_process(opener) as do:
        assert store.stat("dir/x") is None
        assert list(store.list("dir/")) == []
        assert do("store.write('dir/x', b'theirs', if_generation=0); print('done')") == "done\n"
        first = _stat(store, "dir/x")
        assert list(store.list("dir/")) == [first]
        assert do(f"store.write('dir/x', b'THEIRS', if_generation={first.generation}); print('done')") == "done\n"
        second = _stat(store, "dir/x")
        assert second.generation != first.generation
        assert list(store.list()) == [second]
        assert do(f"store.delete('dir/x', generation={second.generation}); print('done')") == "done\n"
        assert store.stat("dir/x") is None
        assert list(store.list()) == []


def test_another_process_agrees_on_the_generation(store: Store, opener: Opener) -> None:
    with _another_process(opener) as do:
        info = store.upload(upload_of("x", b"abc"))
        assert do("print(store.stat('x').generation)") == f"{info.generation}\n"


def test_many_threads_share_one_store(store: Store) -> None:
    data = pattern_bytes(MIB + 5)
    failures: list[str] = []

    def work(number: int) -> None:
        info = store.upload(upload_of(f"n/{number}", data))
        if _download(store, info, number, 1000) != data[number : number + 1000] or store.stat(f"n/{number}") != info:
            failures.append(info.name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(list(store.list("n/"))) == 8


def test_an_unknown_session_is_replaced(store: Store) -> None:
    sessions: list[str] = []
    data = pattern_bytes(2 * MIB)
    info = store.upload(upload_of("x", data, session="no such session", on_session=sessions.append))
    assert _download(store, info, 0, len(data)) == data
    assert bool(sessions) == store.capabilities.resumable
