"""Bars from a history: what belongs together is joined, what has no end says so, a clock that was set does no harm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core import events
from ckptmirror.core.journal import utc_text
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.observe.history import History
from ckptmirror.observe.timeline import Timeline, build_timeline
from ckptmirror.observe.timeline_bars import Bar
from tests.kit.history import KINDS, MIRROR, START_S, WrittenRun, long_run
from tests.kit.saves import save_id_of
from tests.unit.core.core_builders import a_meta

STATE = RecordState
ONE, TWO = save_id_of(1), save_id_of(2)


def built(run: WrittenRun) -> Timeline:
    return build_timeline(run.history())


def only(timeline: Timeline, kind: str) -> Bar:
    (bar,) = [bar for bar in timeline.bars if bar.kind == kind]
    return bar


def spans(timeline: Timeline, kind: str) -> list[tuple[int | None, float, float | None]]:
    """Step, begin and end of the bars of one kind, from the start of the run."""
    return [
        (bar.step, round(bar.begin_s - START_S, 3), None if bar.end_s is None else round(bar.end_s - START_S, 3))
        for bar in timeline.bars
        if bar.kind == kind
    ]


# -- saves --------------------------------------------------------------------------------------------------


def test_a_save_is_a_host_copy_and_then_a_commit_on_each_rank() -> None:
    run = WrittenRun()
    run.save(100, ONE, ranks=2)
    timeline = built(run)
    assert spans(timeline, "host_copy") == [(100, 0.0, 0.1)] * 2
    assert spans(timeline, "commit") == [(100, 0.1, 1.1)] * 2
    assert {(bar.rank, bar.save_id, bar.outcome) for bar in timeline.bars} == {(0, ONE, "done"), (1, ONE, "done")}


def test_a_save_that_nobody_ended_is_unfinished_up_to_the_next_attempt() -> None:
    run = WrittenRun()
    run.decide(1)
    run.tell(events.HostCopied(step=100, kinds=KINDS, duration_s=0.1))
    run.wait(50.0).decide(2, writer="w1")
    run.wait(10.0).save(100, ONE, attempt="w1")
    timeline = built(run)
    lost, kept = [bar for bar in timeline.bars if bar.kind == "commit"]
    assert (lost.outcome, lost.end_s, lost.until_s - lost.begin_s) == ("unfinished", None, 50.5)
    assert (kept.outcome, kept.save_id) == ("done", ONE)
    first, second = [bar for bar in timeline.bars if bar.kind == "attempt"]
    assert (first.outcome, first.end_s, first.until_s) == ("unfinished", None, second.begin_s)
    assert second.until_s == timeline.end_s


def test_the_next_host_copy_may_be_told_before_the_end_of_the_last_save() -> None:
    run = WrittenRun()
    copied = [events.HostCopied(step=step, kinds=KINDS, duration_s=0.1) for step in (100, 200)]
    done = [
        events.SaveCommitted(step=step, kinds=KINDS, save_id=i, duration_s=0.5) for step, i in ((100, ONE), (200, TWO))
    ]
    for event in (copied[0], copied[1], done[0], done[1]):
        run.wait(1.0).tell(event)
    timeline = built(run)
    assert [(bar.step, bar.save_id, bar.outcome) for bar in timeline.of_kind("commit")] == [
        (100, ONE, "done"),
        (200, TWO, "done"),
    ]
    assert [bar.save_id for bar in timeline.of_kind("host_copy")] == [ONE, TWO]


def test_a_save_that_failed_lasts_from_its_host_copy_and_says_why() -> None:
    run = WrittenRun()
    run.tell(events.HostCopied(step=100, kinds=KINDS, duration_s=0.0))
    run.wait(3.0).tell(events.SaveFailed(step=100, kinds=KINDS, reason="the disk is full"))
    run.wait(1.0).tell(events.SaveFailed(step=200, kinds=KINDS, reason="in the host copy"))
    first, second = built(run).of_kind("commit")
    assert (first.outcome, first.until_s - first.begin_s, first.reason) == ("failed", 3.0, "the disk is full")
    assert (second.outcome, second.is_moment) == ("failed", True)


def test_a_save_of_before_the_journal_is_a_moment_from_its_meta() -> None:
    run = WrittenRun()
    run.save(200, TWO)
    run.saves += [
        a_meta(save_id=ONE, step=100, created_at_utc=utc_text(START_S - 500)),
        a_meta(save_id=TWO, step=200, created_at_utc=utc_text(START_S)),
        a_meta(save_id=save_id_of(3), step=300, kinds=("emergency",), created_at_utc=utc_text(START_S + 9)),
        a_meta(save_id=save_id_of(4), step=400, created_at_utc="some day"),
    ]
    timeline = built(run)
    assert [(bar.step, bar.is_moment) for bar in timeline.of_kind("commit")] == [(100, True), (200, False)]
    assert only(timeline, "emergency").step == 300
    assert timeline.begin_s == START_S - 500


# -- attempts -----------------------------------------------------------------------------------------------


def test_two_attempts_hold_what_began_in_them() -> None:
    timeline = built(long_run(6))
    first, second = timeline.of_kind("attempt")
    assert (first.attempt, first.outcome, second.attempt, second.outcome) == (1, "done", 2, "unfinished")
    assert "stopped" in first.reason
    assert second.begin_s - first.until_s == pytest.approx(9 * 3600 + 0.5)
    assert [bar.attempt for bar in timeline.of_kind("commit") if bar.rank == 0] == [1, 1, 1, 2, 2, 2]
    assert [(bar.attempt, bar.step) for bar in timeline.of_kind("resume")] == [(1, None), (2, 300)]


def test_a_second_attempt_of_the_same_process_ends_the_first() -> None:
    run = WrittenRun()
    run.decide(1)
    run.wait(10.0).decide(2, 100)
    run.wait(5.0).tell(events.AttemptEnded(attempt=2, status="incomplete", pending=3))
    first, second = built(run).of_kind("attempt")
    assert (first.outcome, first.until_s - first.begin_s) == ("done", 10.0)
    assert second.outcome == "failed"
    assert "3 files pending" in second.reason


# -- uploads ------------------------------------------------------------------------------------------------


def test_an_upload_lasts_from_the_first_file_to_the_last_and_ends_with_a_commit_there() -> None:
    run = WrittenRun()
    run.upload(ONE, 100, 4.0)
    timeline = built(run)
    bar = only(timeline, "upload")
    assert (bar.begin_s - START_S, bar.end_s, bar.outcome) == (0.0, START_S + 4.0, "done")
    assert (bar.step, bar.mirror, bar.save_id, bar.tries) == (100, MIRROR, ONE, 2)
    assert only(timeline, "mirror_commit").begin_s == START_S + 4.0


def test_an_upload_that_was_put_back_is_one_bar_and_one_that_is_retried_is_two() -> None:
    run = WrittenRun()
    run.move(ONE, 100, None, STATE.PENDING)
    run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.PENDING, reason="503")
    run.wait(1.0).move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.FAILED, reason="403")
    run.wait(9.0).move(ONE, 100, STATE.FAILED, STATE.PENDING)
    run.wait(1.0).move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED)
    first, second = built(run).of_kind("upload")
    assert (first.outcome, first.reason, first.tries, first.until_s - first.begin_s) == ("failed", "403", 2, 3.0)
    assert (second.outcome, second.reason, second.tries, second.until_s - second.begin_s) == ("done", "", 1, 1.0)


def test_an_upload_whose_last_file_is_still_on_its_way_at_the_retry_lasts_no_longer_than_to_that() -> None:
    run = WrittenRun()
    for path in ("a", "b"):
        run.move(ONE, 100, None, STATE.PENDING, path=path)
        run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING, path=path)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.FAILED, path="a", reason="403")
    run.wait(1.0).move(ONE, 100, STATE.FAILED, STATE.PENDING, path="a")
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED, path="b")
    run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING, path="a")
    run.wait(7.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED, path="a")
    first, second = built(run).of_kind("upload")
    assert (first.outcome, first.end_s, first.until_s - first.begin_s) == ("failed", None, 2.0)
    assert (second.outcome, second.until_s - second.begin_s) == ("done", 7.0)


def test_one_failed_file_fails_the_upload_though_others_went_well() -> None:
    run = WrittenRun()
    for path in ("a", "b"):
        run.move(ONE, 100, None, STATE.PENDING, path=path)
        run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING, path=path)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.FAILED, path="a", reason="403")
    running = only(built(run), "upload")
    assert (running.outcome, running.end_s) == ("failed", None)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED, path="b")
    over = only(built(run), "upload")
    assert (over.outcome, over.reason, over.until_s - over.begin_s) == ("failed", "403", 2.0)


def test_an_upload_that_goes_on_is_unfinished_up_to_the_last_thing_known() -> None:
    run = WrittenRun()
    run.move(ONE, 100, None, STATE.PENDING)
    run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(30.0).tell(events.StopRequested(reason="SIGTERM", deadline_s=9.0, age_s=3.0))
    timeline = built(run)
    bar = only(timeline, "upload")
    assert (bar.outcome, bar.end_s, bar.until_s) == ("unfinished", None, START_S + 30.0)
    assert only(timeline, "stop").begin_s == START_S + 27.0


def test_records_that_wait_and_were_never_begun_are_no_bar() -> None:
    run = WrittenRun()
    run.move(ONE, 100, None, STATE.PENDING)
    run.save(100, ONE)
    assert built(run).of_kind("upload") == []


def test_an_object_that_was_found_gone_is_uploaded_in_a_second_bar() -> None:
    run = WrittenRun()
    run.upload(ONE, 100)
    run.wait(5.0).move(ONE, 100, STATE.VERIFIED, STATE.PENDING, reason="the object is gone")
    run.wait(1.0).move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED)
    assert [bar.outcome for bar in built(run).of_kind("upload")] == ["done", "done"]


def test_a_save_that_left_the_table_before_it_was_uploaded_has_failed_with_the_reason() -> None:
    run = WrittenRun()
    run.move(ONE, 100, None, STATE.PENDING)
    run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wait(2.0).move(ONE, 100, STATE.UPLOADING, None, reason="its files were removed")
    bar = only(built(run), "upload")
    assert (bar.outcome, bar.reason, bar.until_s - bar.begin_s) == ("failed", "its files were removed", 2.0)


def test_uploads_to_two_mirrors_are_two_bars() -> None:
    run = WrittenRun()
    run.upload(ONE, 100)
    run.upload(ONE, 100, mirror="file:///nfs/run-17")
    timeline = built(run)
    assert [bar.mirror for bar in timeline.of_kind("upload")] == [MIRROR, "file:///nfs/run-17"]
    assert len(timeline.of_kind("mirror_commit")) == 2


def test_a_commit_on_a_mirror_that_both_tell_of_is_there_once() -> None:
    run = WrittenRun()
    run.upload(ONE, 100)
    run.tell(events.MirrorCommitted(mirror=MIRROR, step=100, save_id=ONE))
    run.wait(1.0).tell(events.MirrorCommitted(mirror=MIRROR, step=200, save_id=TWO))
    assert [bar.save_id for bar in built(run).of_kind("mirror_commit")] == [ONE, TWO]


# -- rotation, stage, faults --------------------------------------------------------------------------------


def test_a_rotation_is_told_by_the_journal_or_else_by_the_table() -> None:
    run = WrittenRun()
    run.upload(ONE, 100)
    run.upload(TWO, 200)
    run.wait(1.0).tell(events.SaveRotated(step=100, save_id=ONE, reason="not wanted", duration_s=0.5), by="rotate")
    for save_id, step in ((ONE, 100), (TWO, 200)):
        run.move(save_id, step, STATE.VERIFIED, None, reason="the local save was deleted")
    first, second = built(run).of_kind("rotation")
    assert (first.save_id, first.by, first.reason, first.is_moment) == (ONE, "rotate", "not wanted", False)
    assert (second.save_id, second.by, second.is_moment) == (TWO, "", True)
    assert [bar.outcome for bar in built(run).of_kind("upload")] == ["done", "done"]


def test_a_stage_is_a_bar_and_says_how_it_ended() -> None:
    run = WrittenRun()
    for writer, end in (
        ("s1", events.StageFinished(mirror=MIRROR, step=100, duration_s=4.0)),
        ("s2", events.StageFailed(mirror=MIRROR, step=100, reason="no room")),
        ("s3", None),
    ):
        run.wait(1.0).tell(events.StageStarted(mirror=MIRROR, step=100), writer, "stage")
        run.wait(4.0)
        if end is not None:
            run.tell(end, writer, "stage")
    run.tell(events.StageFailed(mirror=MIRROR, step=300, reason="no such step"), "s4", "stage")
    found = [(bar.outcome, bar.step, bar.until_s - bar.begin_s, bar.reason) for bar in built(run).of_kind("stage")]
    assert found == [
        ("done", 100, 4.0, ""),
        ("failed", 100, 4.0, "no room"),
        ("unfinished", 100, 4.0, ""),
        ("failed", 300, 0.0, "no such step"),
    ]


def test_faults_are_moments_with_their_reasons() -> None:
    run = WrittenRun()
    told = [
        events.RotationRefused(step=100, save_id=ONE, reason="failed uploads"),
        events.MirrorUnreachable(mirror=MIRROR, reason="503"),
        events.MirrorUnreachable(mirror=MIRROR, reason="401", refused=True),
        events.Fenced(attempt=1, reason="attempt 2 has started"),
        events.CopyBroken(step=100, save_id=ONE, place="/root", reason="crc32c"),
        events.SaveGone(step=100, save_id=ONE, reason="removed by hand"),
        events.SaveQuarantined(step=100, save_id=ONE, reason="3 starts in a row failed from it"),
        events.SaveReleased(step=100, save_id=ONE, reason="attempt 5 was told to continue from it"),
    ]
    for event in told:
        run.wait(1.0).tell(event)
    found = [(bar.kind, bar.outcome) for bar in built(run).bars]
    assert found == [
        ("rotation", "refused"),
        ("unreachable", "failed"),
        ("unreachable", "refused"),
        ("fence", "refused"),
        ("broken_copy", "failed"),
        ("gone", "failed"),
        ("quarantine", "failed"),
        ("quarantine", "done"),
    ]
    assert all(bar.reason and bar.is_moment for bar in built(run).bars)


# -- clocks, and what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_s", [86_400.0, -86_400.0, -45.0])
def test_a_clock_that_is_set_in_the_middle_changes_no_duration_and_no_order(by_s: float) -> None:
    """The clock is set between two uploads: everything before it is moved by as much."""

    def told(jump_s: float) -> WrittenRun:
        run = WrittenRun()
        run.decide(1)
        for number in range(1, 7):
            run.wait(20.0).save(number, save_id_of(number))
            run.upload(save_id_of(number), number)
            run.tell(events.SaveRotated(step=number, save_id=save_id_of(number), duration_s=0.1))
            if number == 3:
                run.wall_off_s += jump_s
        return run

    plain, jumped = built(told(0.0)), built(told(by_s))
    assert plain.jumps == ()
    assert [jump.by_s for jump in jumped.jumps] == pytest.approx([by_s])
    assert [(bar.kind, bar.step) for bar in jumped.bars] == [(bar.kind, bar.step) for bar in plain.bars]
    for before, after in zip(plain.bars, jumped.bars, strict=True):
        assert after.begin_s - by_s == pytest.approx(before.begin_s, abs=0.01)
        assert after.until_s - by_s == pytest.approx(before.until_s, abs=0.01)


def test_a_clock_that_is_set_back_without_a_journal_makes_no_bar_that_ends_before_it_begins() -> None:
    run = WrittenRun()
    run.move(ONE, 100, None, STATE.PENDING)
    run.move(ONE, 100, STATE.PENDING, STATE.UPLOADING)
    run.wall_off_s -= 5000
    run.wait(1.0).move(ONE, 100, STATE.UPLOADING, STATE.VERIFIED)
    bar = only(built(run), "upload")
    assert bar.end_s is not None
    assert bar.end_s >= bar.begin_s


def test_events_of_several_boots_lie_one_after_the_other() -> None:
    run = WrittenRun()
    run.save(100, ONE)
    run.wait(60.0)
    run.boot, run.boot_off_s = "boot-2", -run.now_s + 3.0
    run.save(200, TWO, attempt="v")
    assert [bar.step for bar in built(run).of_kind("commit")] == [100, 200]
    assert spans(built(run), "commit")[1] == (200, 61.2, 62.2)


def test_lines_that_are_lost_are_counted_and_lines_that_grew_too_old_are_not() -> None:
    run = WrittenRun()
    for step in range(1, 8):
        run.wait(1.0).tell(events.StopRequested(reason=str(step)))
    history = run.history()
    without = History(told=(*history.told[2:4], *history.told[5:]), broken_lines=2, problems=("x",))
    timeline = build_timeline(without)
    assert timeline.lost_lines == 3
    assert timeline.problems == ("x",)
    assert len(timeline.bars) == 4


def test_what_is_told_out_of_order_is_put_in_order() -> None:
    history = long_run(4).history()
    assert build_timeline(replace(history, told=history.told[::-1])).begin_s == build_timeline(history).begin_s
    kinds = [bar.kind for bar in build_timeline(history).bars]
    assert kinds[0] == "resume"
    assert [bar.begin_s for bar in build_timeline(history).bars] == sorted(
        bar.begin_s for bar in build_timeline(history).bars
    )


def test_every_save_of_a_long_run_is_there() -> None:
    timeline = built(long_run(500, ranks=4))
    assert {bar.save_id for bar in timeline.of_kind("commit")} == {save_id_of(number) for number in range(1, 501)}
    assert len(timeline.of_kind("host_copy")) == 4 * 500
    assert [bar.outcome for bar in timeline.of_kind("upload")].count("failed") == 1
