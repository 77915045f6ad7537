"""Events: a listener hears all, and its errors reach nobody."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from ckptmirror.core import events
from ckptmirror.core.events import Event, EventBus, ListenerFailure, SaveCommitted


def an_event(step: int = 200) -> SaveCommitted:
    return SaveCommitted(step=step, kinds=("dcp",))


def failing(event: Event) -> None:
    raise ValueError("broken listener")


def test_listeners_hear_every_event_in_order_until_they_unsubscribe() -> None:
    bus, heard = EventBus(), []
    unsubscribe = bus.subscribe(heard.append)
    bus.emit(an_event(1))
    bus.emit(an_event(2))
    unsubscribe()
    unsubscribe()
    bus.emit(an_event(3))
    assert heard == [an_event(1), an_event(2)]


def test_a_listeners_error_never_reaches_the_emitter_or_the_other_listeners() -> None:
    bus, heard = EventBus(), []
    bus.subscribe(failing)
    bus.subscribe(heard.append)
    bus.emit(an_event())
    assert heard == [an_event()]


def test_a_failing_listener_is_reported_once() -> None:
    reports: list[ListenerFailure] = []
    bus = EventBus(reports.append)
    bus.subscribe(failing)
    bus.subscribe(failing)
    for step in range(3):
        bus.emit(an_event(step))
    assert [str(report.error) for report in reports] == ["broken listener"] * 2


def test_a_failing_reporter_does_not_reach_the_emitter_either() -> None:
    reports: list[ListenerFailure] = []

    def report(failure: ListenerFailure) -> None:
        reports.append(failure)
        raise OSError("broken reporter")

    bus = EventBus(report)
    bus.subscribe(failing)
    bus.emit(an_event())
    assert len(reports) == 1


def test_a_listener_may_unsubscribe_itself_while_it_is_called() -> None:
    bus, heard = EventBus(), []

    def once(event: Event) -> None:
        heard.append(event)
        unsubscribe()

    unsubscribe = bus.subscribe(once)
    bus.emit(an_event(1))
    bus.emit(an_event(2))
    assert heard == [an_event(1)]


def test_threads_may_emit_and_subscribe_at_once() -> None:
    failures: list[ListenerFailure] = []
    bus, heard, start = EventBus(failures.append), [], threading.Barrier(4)
    others: list[Event] = []
    bus.subscribe(heard.append)

    def work() -> None:
        start.wait()
        for step in range(200):
            bus.subscribe(others.append)()
            bus.emit(an_event(step))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 800
    assert failures == []


def test_every_event_is_a_frozen_value_with_a_docstring() -> None:
    for cls in Event.__subclasses__():
        assert cls.__doc__
        assert cls.__name__ in events.__all__
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        an_event().step = 3  # type: ignore[misc]
