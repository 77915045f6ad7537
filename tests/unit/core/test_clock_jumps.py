"""Times of a wall clock that was set are laid on one line, as far apart as they were."""

from __future__ import annotations

import pytest

from ckptmirror.core.clock_jumps import Jump, LaidClock, Reading

WALL = 1_790_000_000.0


def reading(boot_s: float, off_s: float = 0.0, boot: str = "b") -> Reading:
    return Reading(WALL + boot_s + off_s, boot, boot_s)


def test_without_readings_times_stay_as_they_are() -> None:
    clock = LaidClock([])
    assert clock.of_wall(WALL) == WALL
    assert clock.jumps == ()


def test_a_clock_that_was_never_set_has_no_jumps() -> None:
    clock = LaidClock([reading(at_s, 0.0002 * at_s) for at_s in range(0, 1000, 10)])
    assert clock.jumps == ()
    assert clock.of(reading(500, 0.1)) == pytest.approx(WALL + 500, abs=0.5)


@pytest.mark.parametrize("by_s", [3600.0, -3600.0, 5.0, -5.0])
def test_what_was_before_a_jump_is_moved_and_the_jump_is_told(by_s: float) -> None:
    before, after = [reading(at_s) for at_s in (10, 20, 30)], [reading(at_s, by_s) for at_s in (40, 50)]
    clock = LaidClock([*after, *before])
    laid = [clock.of(one) - WALL - by_s for one in (*before, *after)]
    assert laid == pytest.approx([10, 20, 30, 40, 50])
    assert clock.jumps == (Jump(WALL + 40 + by_s, by_s),)


def test_a_time_of_the_wall_clock_alone_is_moved_with_what_is_around_it() -> None:
    clock = LaidClock([*(reading(at_s) for at_s in (10, 20, 30)), *(reading(at_s, 3600.0) for at_s in (40, 50))])
    assert clock.of_wall(WALL + 15) == pytest.approx(WALL + 3615)
    assert clock.of_wall(WALL + 3645) == pytest.approx(WALL + 3645)
    assert clock.of_wall(WALL - 100) == pytest.approx(WALL + 3500)
    assert clock.of_wall(WALL + 9000) == pytest.approx(WALL + 9000)


def test_where_a_clock_was_set_back_the_order_decides_between_two_places() -> None:
    clock = LaidClock([*(reading(at_s) for at_s in (0, 50, 100)), *(reading(at_s, -90.0) for at_s in (110, 200))])
    assert clock.of_wall(WALL + 60, WALL - 90 + 40) == pytest.approx(WALL - 90 + 60)
    assert clock.of_wall(WALL + 60, WALL - 90 + 120) == pytest.approx(WALL + 60)


def test_each_boot_lies_where_its_own_last_wall_clock_says() -> None:
    clock = LaidClock([reading(10, -1e9), reading(20), reading(5, 5000.0, "second")])
    assert clock.of(reading(10, -1e9)) == pytest.approx(WALL + 10)
    assert clock.of(reading(5, 5000.0, "second")) == pytest.approx(WALL + 5005)
    assert [jump.by_s for jump in clock.jumps] == pytest.approx([1e9])


def test_a_boot_that_has_no_clock_of_its_own_is_laid_by_the_wall_clock() -> None:
    clock = LaidClock([reading(10, 0, "unknown"), reading(20, 700, "unknown")])
    assert clock.of(reading(10, 0, "unknown")) == WALL + 10
    assert clock.jumps == ()
