"""How far, how fast, how long still: the arithmetic of a progress line."""

from __future__ import annotations

import pytest

from ckptmirror.cli._transfer_speed import WINDOW_S, Pace
from ckptmirror.flow.upload.transfer_progress import Transfers, UnderWay, Wait, WatchedUpload

MIB = 1024 * 1024


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_a_line_says_amount_speed_and_time_left(clock: HandClock) -> None:
    pace = Pace("stage", clock)
    for second in range(11):
        clock.now_s = 100.0 + second
        pace(second * MIB, 100 * MIB)
    assert pace.line() == "stage: 10.0 MiB of 100.0 MiB, 1.0 MiB/s, 1 min 30 s left"


def test_what_was_there_before_is_done_and_counts_for_no_speed(clock: HandClock) -> None:
    pace = Pace("stage", clock)
    pace(90 * MIB, 100 * MIB, moved_bytes=0)
    assert pace.line() == "stage: 90.0 MiB of 100.0 MiB"
    clock.now_s += 5
    pace(95 * MIB, 100 * MIB, moved_bytes=5 * MIB)
    assert pace.line() == "stage: 95.0 MiB of 100.0 MiB, 1.0 MiB/s, 5 s left"


def test_the_speed_is_that_of_the_last_seconds_and_of_a_standstill_zero(clock: HandClock) -> None:
    pace = Pace("drain", clock)
    for _ in range(100):
        clock.now_s += 1
        pace(pace.done_bytes + MIB, 1000 * MIB)
    for _ in range(int(WINDOW_S)):
        clock.now_s += 1
        pace(pace.done_bytes + 2 * MIB, 1000 * MIB)
    assert pace.speed() == pytest.approx(2 * MIB)
    clock.now_s += WINDOW_S
    assert pace.line() == "drain: 130.0 MiB of 1000.0 MiB, 0 B/s"


def test_the_time_before_the_first_byte_slows_nothing_down(clock: HandClock) -> None:
    pace = Pace("stage", clock)
    clock.now_s += 3
    pace(0, 10 * MIB)
    assert pace.line() == "stage: 0 B of 10.0 MiB"
    clock.now_s += 2
    pace(2 * MIB, 10 * MIB)
    assert pace.speed() == pytest.approx(MIB)


def test_without_a_total_nothing_is_said_of_amounts(clock: HandClock) -> None:
    pace = Pace("verify", clock)
    assert pace.line() == "verify: begins"
    pace.doing("looking at what is there")
    assert pace.line() == "verify: looking at what is there"
    pace(0, 0)
    assert pace.line() == "verify: begins"


def test_a_wait_counts_down_and_ends_when_bytes_move(clock: HandClock) -> None:
    pace = Pace("stage", clock)
    pace(0, 10 * MIB)
    pace.waiting("gs://b/run", 8.0, OSError("refused"))
    assert pace.besides_text() == "waiting for gs://b/run (retry in 8 s): refused"
    clock.now_s += 7.5
    assert "(retry in 1 s)" in pace.besides_text()
    clock.now_s += 1
    assert "(asking again)" in pace.besides_text()
    pace(MIB, 10 * MIB)
    assert pace.besides_text() == ""


def test_a_second_transfer_of_one_verb_begins_anew(clock: HandClock) -> None:
    pace = Pace("rewind", clock)
    clock.now_s += 5
    pace(50 * MIB, 50 * MIB)
    pace(0, 50 * MIB)
    clock.now_s += 5
    pace(5 * MIB, 50 * MIB)
    assert pace.speed() == pytest.approx(MIB)


# -- what is under way --------------------------------------------------------------------------------------


class Bytes:
    """A source of some length."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return max(0, min(len(buffer), self.size_bytes - offset))


def test_several_uploads_add_up_and_one_that_is_over_counts_no_more(clock: HandClock) -> None:
    under_way = UnderWay(clock)
    one, two = (WatchedUpload(Bytes(100), under_way, name, "gs://b/run") for name in ("one", "two"))
    for upload, position in ((one, 40), (two, 100)):
        upload.read_into(0, memoryview(bytearray(100)))
        upload.sent(position)
    assert under_way.seen() == Transfers(there_bytes=140, moved_bytes=140, sending=1, verifying=1)
    under_way.over("two", "gs://b/run")
    assert under_way.seen() == Transfers(there_bytes=40, moved_bytes=140, sending=1)


def test_what_a_mirror_had_of_a_file_was_not_moved(clock: HandClock) -> None:
    under_way = UnderWay(clock)
    upload = WatchedUpload(Bytes(100), under_way, "one", "gs://b/run")
    upload.acknowledged(60)
    upload.read_into(60, memoryview(bytearray(40)))
    upload.sent(70)
    assert under_way.seen() == Transfers(there_bytes=70, moved_bytes=10, sending=1)


def test_a_try_that_begins_further_back_takes_the_file_back(clock: HandClock) -> None:
    under_way = UnderWay(clock)
    upload = WatchedUpload(Bytes(100), under_way, "one", "gs://b/run")
    upload.read_into(0, memoryview(bytearray(100)))
    upload.sent(80)
    upload.read_into(20, memoryview(bytearray(80)))
    assert under_way.seen() == Transfers(there_bytes=20, moved_bytes=80, sending=1)


def test_a_mirror_is_waited_for_until_bytes_move_there(clock: HandClock) -> None:
    under_way = UnderWay(clock)
    under_way.waits("gs://down/run", 8.0, OSError("refused"))
    clock.now_s += 3
    up = WatchedUpload(Bytes(10), under_way, "one", "gs://up/run")
    up.sent(10)
    assert under_way.seen().waits == (Wait("gs://down/run", "refused", 5.0),)
    WatchedUpload(Bytes(10), under_way, "one", "gs://down/run").sent(5)
    assert under_way.seen().waits == ()
