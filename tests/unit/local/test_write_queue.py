"""Buffers are written in order beside their producer, or by it where no thread can be had."""

from __future__ import annotations

import threading

import pytest

from ckptmirror.local import direct_io
from ckptmirror.local.write_queue import WriteQueue


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct_io, "BUFFER_SIZE_BYTES", 4096)
    monkeypatch.setattr(direct_io, "_kept", [])


class Writes:
    """Notes what is written, by whom; holds each write until it may go on; fails at some."""

    def __init__(self, *, fails_at: tuple[int, ...] = ()) -> None:
        self.offsets: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails_at = fails_at

    def __call__(self, _buffer: memoryview, offset: int) -> None:
        assert self.go_on.wait(30)
        self.offsets.append(offset)
        self.threads.add(threading.current_thread())
        if offset in self.fails_at:
            raise OSError(5, f"at {offset}")


def test_everything_is_written_in_order_by_another_thread_which_then_ends():
    queue, writes = WriteQueue(2), Writes()
    for offset in range(50):
        queue.put(writes, direct_io.take_buffer(), offset)
    queue.drain()
    assert writes.offsets == list(range(50))
    assert threading.current_thread() not in writes.threads
    for thread in writes.threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(direct_io._kept) <= 3  # no more were ever taken at once


def test_put_waits_while_too_many_are_on_their_way():
    queue, writes = WriteQueue(2), Writes()
    writes.go_on.clear()
    for offset in (0, 1):
        queue.put(writes, direct_io.take_buffer(), offset)
    put = threading.Thread(target=queue.put, args=(writes, direct_io.take_buffer(), 2))
    put.start()
    put.join(0.2)
    assert put.is_alive()
    writes.go_on.set()
    put.join(30)
    assert not put.is_alive()
    queue.drain()
    assert writes.offsets == [0, 1, 2]


def test_the_caller_writes_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    queue, writes = WriteQueue(2), Writes()
    for offset in range(5):
        queue.put(writes, direct_io.take_buffer(), offset)
    queue.drain()
    assert writes.offsets == list(range(5))
    assert writes.threads == {threading.current_thread()}


def test_after_a_failure_nothing_more_is_written_and_every_buffer_is_given_back():
    queue, writes = WriteQueue(3), Writes(fails_at=(1,))
    writes.go_on.clear()
    for offset in range(3):
        queue.put(writes, direct_io.take_buffer(), offset)
    writes.go_on.set()
    for _ in range(2):
        with pytest.raises(OSError, match="at 1"):
            queue.drain()
    with pytest.raises(OSError, match="at 1"):
        queue.put(writes, direct_io.take_buffer(), 3)
    queue.stop()
    assert writes.offsets == [0, 1]
    assert len(direct_io._kept) == 3


def test_stop_drops_what_waits_and_waits_for_the_write_that_has_begun():
    queue, writes = WriteQueue(4), Writes()
    writes.go_on.clear()
    for offset in range(4):
        queue.put(writes, direct_io.take_buffer(), offset)
    begun = threading.Timer(0.1, writes.go_on.set)
    begun.start()
    queue.stop()
    assert writes.offsets in ([], [0])
    assert len(direct_io._kept) == 4


def test_an_interrupt_while_its_thread_starts_leaves_a_queue_that_can_be_stopped_and_used(
    monkeypatch: pytest.MonkeyPatch,
):
    honest = threading.Thread.start
    calls: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) == 1:
            raise KeyboardInterrupt
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    queue, writes = WriteQueue(2), Writes()
    with pytest.raises(KeyboardInterrupt):
        queue.put(writes, direct_io.take_buffer(), 0)
    queue.put(writes, direct_io.take_buffer(), 1)
    queue.drain()
    assert writes.offsets == [0, 1]
    queue.stop()
