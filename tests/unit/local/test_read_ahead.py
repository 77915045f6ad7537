"""Reading one buffer ahead of whoever takes the bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from ckptmirror.local import direct_io
from ckptmirror.local.read_ahead import read_ahead

BUFFER = direct_io.BUFFER_SIZE_BYTES
LIMIT_S = 30


def source_of(data: bytes):
    def read_into(offset: int, buffer: memoryview) -> int:
        piece = data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    return read_into


@pytest.fixture(scope="module")
def data() -> bytes:
    return bytes(range(251)) * (5 * BUFFER // 502)


@pytest.mark.parametrize("offset", [0, 1, BUFFER])
def test_the_bytes_come_whole_and_in_order(data: bytes, offset: int) -> None:
    for end in (offset, offset + 1, offset + BUFFER, offset + BUFFER + 1, len(data)):
        assert b"".join(bytes(piece) for piece in read_ahead(source_of(data), offset, end)) == data[offset:end]


def test_where_nothing_is_wanted_nothing_is_read() -> None:
    def read_into(_offset: int, _buffer: memoryview) -> int:
        raise AssertionError("it was read")

    assert list(read_ahead(read_into, 7, 7)) == []


@pytest.mark.parametrize("missing", [1, BUFFER // 2, BUFFER, BUFFER + 1, 5 * BUFFER])
def test_a_source_that_ends_early_gives_what_it_has(data: bytes, missing: int) -> None:
    short = data[: max(len(data) - missing, 0)]
    assert b"".join(bytes(piece) for piece in read_ahead(source_of(short), 0, len(data))) == short


def test_the_next_piece_is_read_while_the_last_is_in_use(data: bytes) -> None:
    second_was_read = threading.Event()
    reads = source_of(data)

    def read_into(offset: int, buffer: memoryview) -> int:
        count = reads(offset, buffer)
        if offset:
            second_was_read.set()
        return count

    with closing(read_ahead(read_into, 0, len(data))) as pieces:
        first = next(pieces)
        assert second_was_read.wait(LIMIT_S)
        assert bytes(first) == data[:BUFFER]


def test_an_error_of_the_source_is_raised_where_the_bytes_are_taken(data: bytes) -> None:
    def read_into(offset: int, buffer: memoryview) -> int:
        if offset:
            raise OSError(5, "the device failed")
        return source_of(data)(offset, buffer)

    with closing(read_ahead(read_into, 0, len(data))) as pieces:
        next(pieces)
        with pytest.raises(OSError, match="the device failed"):
            next(pieces)


def test_after_closing_no_read_is_under_way(data: bytes) -> None:
    is_in_second, may_go_on = threading.Event(), threading.Event()
    under_way: list[int] = []

    def read_into(offset: int, buffer: memoryview) -> int:
        under_way.append(offset)
        if offset:
            is_in_second.set()
            assert may_go_on.wait(LIMIT_S)
        count = source_of(data)(offset, buffer)
        under_way.remove(offset)
        return count

    pieces = read_ahead(read_into, 0, len(data))
    next(pieces)
    assert is_in_second.wait(LIMIT_S)
    threading.Timer(0.05, may_go_on.set).start()
    pieces.close()
    assert under_way == []


def test_without_a_thread_to_be_had_the_caller_reads(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert b"".join(bytes(piece) for piece in read_ahead(source_of(data), 0, len(data))) == data
