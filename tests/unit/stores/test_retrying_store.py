"""The retrying decorator: what it tries again, how long, and what it passes on."""

from __future__ import annotations

import itertools
import threading

import pytest

from ckptmirror.core.errors import (
    ConfigError,
    IntegrityError,
    NotAuthorised,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.stores import memory, open_store
from ckptmirror.stores.base import Upload
from ckptmirror.stores.retrying import RetryingStore
from ckptmirror.stores.same_place import SamePlaceStore
from tests.contract.stores_under_test import pattern_bytes, upload_of
from tests.kit.faulty_store import FaultyStore, StoreFault


class Waits(list[float]):
    """The waits between tries; a clock that only they move."""

    def __call__(self, delay_s: float) -> None:
        self.append(delay_s)

    def clock(self) -> float:
        return sum(self)


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> FaultyStore:
    memory.drop("retrying")
    return FaultyStore(memory.open("memory://retrying"))


def _asked_after(delay_s: float) -> StoreTemporary:
    error = StoreTemporary()
    error.retry_after_s = delay_s
    return error


def test_temporary_faults_are_tried_again_until_it_works(faulty: FaultyStore) -> None:
    waits = Waits()
    store = RetryingStore(faulty, wait=waits)
    faulty.script(StoreFault(times=3, when="before"))
    assert store.stat("x") is None
    assert len(faulty.calls) == 4
    assert len(waits) == 3


def retrying_by(waits: Waits, store: FaultyStore, **more: float) -> RetryingStore:
    return RetryingStore(store, wait=waits, clock=waits.clock, **more)


def test_i7_a_mirror_that_answers_503_is_asked_for_two_minutes_and_not_a_few_times(faulty: FaultyStore) -> None:
    waits = Waits()
    errors = (StoreTemporary(f"fault {number}") for number in itertools.count(1))
    faulty.script(StoreFault(times=0, when="before", error=lambda: next(errors)))
    with pytest.raises(StoreTemporary) as last:
        retrying_by(waits, faulty).stat("x")
    assert sum(waits) == pytest.approx(120)
    assert str(last.value) == f"fault {len(faulty.calls)}"


def test_it_gives_up_when_the_next_try_would_begin_too_late(faulty: FaultyStore) -> None:
    waits = Waits()
    faulty.script(StoreFault(times=0, when="before", error=lambda: _asked_after(61.0)))
    with pytest.raises(StoreTemporary):
        retrying_by(waits, faulty, total_s=60.0).stat("x")
    assert len(faulty.calls) == 1
    assert waits == []


def test_a_mirror_that_was_silent_for_all_that_time_is_asked_once_by_each_call_until_it_answers(
    faulty: FaultyStore,
) -> None:
    waits = Waits()
    store = retrying_by(waits, faulty)
    faulty.go_down()
    with pytest.raises(StoreTemporary):
        store.stat("x")
    before = len(faulty.calls)
    for name in "yz":
        with pytest.raises(StoreTemporary):
            store.stat(name)
    assert len(faulty.calls) == before + 2
    faulty.script()
    store.stat("x")
    faulty.script(StoreFault(times=3, when="before"))
    store.stat("y")
    assert len(faulty.calls) == before + 2 + 1 + 4


def test_a_start_asks_a_mirror_for_the_whole_time_however_long_it_was_silent(faulty: FaultyStore) -> None:
    waits = Waits()
    store = SamePlaceStore(retrying_by(waits, faulty), lambda: None, str)
    faulty.go_down()
    with pytest.raises(StoreTemporary):
        store.stat("x")
    before, waited_s = len(faulty.calls), sum(waits)
    store.ask_patiently()
    with pytest.raises(StoreTemporary):
        store.stat("x")
    assert len(faulty.calls) > before + 1
    assert sum(waits) - waited_s == pytest.approx(120)


def test_any_answer_ends_the_silence_also_one_that_is_an_error(faulty: FaultyStore) -> None:
    waits = Waits()
    store = retrying_by(waits, faulty)
    faulty.go_down()
    with pytest.raises(StoreTemporary):
        store.stat("x")
    faulty.script(StoreFault(when="before", error=NotAuthorised), StoreFault(times=2, nth=1, when="before"))
    with pytest.raises(NotAuthorised):
        store.stat("x")
    assert store.stat("x") is None


def test_delays_double_up_to_a_limit_and_are_never_shorter_than_asked(faulty: FaultyStore) -> None:
    waits = Waits()
    faulty.script(StoreFault(times=0, when="before"))
    store = retrying_by(waits, faulty, first_delay_s=1.0, longest_delay_s=8.0)
    with pytest.raises(StoreTemporary):
        store.stat("x")
    assert len(waits) > 14
    for delay_s, limit_s in zip(waits, itertools.chain([1, 2, 4], itertools.repeat(8)), strict=False):
        assert 0.0 <= delay_s <= limit_s
    assert len(set(waits)) == len(waits)
    waits.clear()
    faulty.script(StoreFault(times=2, when="before", error=lambda: _asked_after(7.0)))
    RetryingStore(faulty, first_delay_s=1.0, wait=waits).stat("x")
    assert waits == [7.0, 7.0]


@pytest.mark.parametrize("error", [StorePermanent, NotAuthorised, IntegrityError, PreconditionFailed])
def test_what_would_fail_again_is_not_tried_again(faulty: FaultyStore, error: type[Exception]) -> None:
    faulty.script(StoreFault(when="before", error=error))  # type: ignore[arg-type]
    with pytest.raises(error):
        RetryingStore(faulty, wait=Waits()).stat("x")
    assert len(faulty.calls) == 1


def test_a_create_that_took_effect_meets_itself_and_says_so(faulty: FaultyStore) -> None:
    store = RetryingStore(faulty, wait=Waits())
    faulty.script(StoreFault(operation="write", when="after"))
    with pytest.raises(PreconditionFailed):
        store.write("x", b"ours", if_generation=0)
    assert store.read("x", limit_bytes=9)[0] == b"ours"


def test_a_delete_that_took_effect_succeeds(faulty: FaultyStore) -> None:
    store = RetryingStore(faulty, wait=Waits())
    info = store.write("x", b"1", if_generation=0)
    faulty.script(StoreFault(operation="delete", when="after"))
    store.delete("x", generation=info.generation)
    assert store.stat("x") is None


def test_an_upload_goes_on_with_the_session_of_the_failed_try(faulty: FaultyStore) -> None:
    seen: list[str | None] = []

    class Watching:
        def __init__(self) -> None:
            self.fail = True

        def upload(self, upload: Upload) -> object:
            seen.append(upload.session)
            upload.on_session("learned")
            if self.fail:
                self.fail = False
                raise StoreTemporary
            return faulty.upload(upload)

    told: list[str] = []
    store = RetryingStore(Watching(), wait=Waits())  # type: ignore[arg-type]
    store.upload(upload_of("x", pattern_bytes(10), session="saved", on_session=told.append))
    assert seen == ["saved", "learned"]
    assert told[0] == "learned"


@pytest.mark.parametrize(("limit_s", "waits_at_least"), [("0", 0), ("0.9", 1)])
def test_the_environment_says_for_how_long_a_mirror_is_tried_again(
    limit_s: str, waits_at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", limit_s)
    waits = Waits()
    store = open_store("gs://a-bucket/run", on_wait=lambda _url, delay_s, _error: waits(delay_s))
    with pytest.raises(StoreTemporary):
        store.stat("x")
    assert len(waits) >= waits_at_least
    assert sum(waits) <= float(limit_s)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds_is_a_setting_to_correct(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", text)
    with pytest.raises(ConfigError, match=f"CKPTMIRROR_RETRY_S is '{text}'") as caught:
        open_store("memory://retrying")
    assert "Correct CKPTMIRROR_RETRY_S" in caught.value.hint


def test_a_listing_goes_on_after_the_last_name_that_was_yielded(faulty: FaultyStore) -> None:
    store = RetryingStore(faulty, wait=Waits())
    for number in range(5):
        store.write(f"x{number}", b"", if_generation=0)
    faulty.script(StoreFault(operation="list", when="after"), StoreFault(operation="list", when="before"))
    assert [info.name for info in store.list("x")] == [f"x{number}" for number in range(5)]


@pytest.mark.parametrize("end", ["close", "stop_retrying"])
def test_a_wait_ends_at_once_when_nothing_is_to_be_tried_again(faulty: FaultyStore, end: str) -> None:
    store = RetryingStore(faulty, first_delay_s=1e3, longest_delay_s=1e3, total_s=1e9)
    faulty.script(StoreFault(times=0, when="before", error=lambda: _asked_after(1e3)))
    failed = threading.Event()

    def ask() -> None:
        with pytest.raises(StoreTemporary):
            store.stat("x")
        failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    getattr(SamePlaceStore(store, lambda: None, print), end)()
    assert failed.wait(30)
    thread.join(30)


def test_faults_strike_as_scripted(faulty: FaultyStore) -> None:
    data = pattern_bytes(100)
    info = faulty.write("x", data, if_generation=0)
    faulty.script(
        StoreFault(operation="read", corrupt_byte_at=5),
        StoreFault(operation="read", short_by_bytes=3),
        StoreFault(operation="download", corrupt_byte_at=51),
        StoreFault(operation="download", short_by_bytes=1),
        StoreFault(operation="upload", name="^rot", corrupt_byte_at=7),
    )
    assert faulty.read("x", limit_bytes=100)[0] == data[:5] + bytes([data[5] ^ 0xFF]) + data[6:]
    assert faulty.read("x", limit_bytes=100)[0] == data[:97]
    buffer = bytearray(10)
    faulty.download("x", generation=info.generation, offset=50, buffer=memoryview(buffer))
    assert buffer == data[50:51] + bytes([data[51] ^ 0xFF]) + data[52:60]
    with pytest.raises(StoreTemporary):
        faulty.download("x", generation=info.generation, offset=50, buffer=memoryview(buffer))
    with pytest.raises(IntegrityError):
        faulty.upload(upload_of("rotten", data))
    faulty.upload(upload_of("whole", data))
    faulty.go_down()
    for _ in range(3):
        with pytest.raises(StoreTemporary):
            faulty.stat("x")
    faulty.script()
    assert faulty.stat("x") == info


def test_a_held_call_waits_for_its_event(faulty: FaultyStore) -> None:
    held, answered = threading.Event(), threading.Event()
    faulty.script(StoreFault(operation="stat", hold=held))

    def ask() -> None:
        faulty.stat("x")
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not answered.is_set()
    held.set()
    thread.join(30)
    assert answered.is_set()
