"""The observed decorator: what is told of each call."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.core.events import Event, EventBus, StoreCalled
from ckptmirror.stores import memory
from ckptmirror.stores.observed import ObservedStore
from tests.contract.stores_under_test import upload_of
from tests.kit.faulty_store import FaultyStore, StoreFault


def test_every_call_is_told_once_with_its_bytes_and_what_it_raised() -> None:
    memory.drop("observed")
    faulty = FaultyStore(memory.open("memory://observed"))
    told: list[Event] = []
    bus = EventBus()
    bus.subscribe(told.append)
    ticks = iter(range(1000))
    store = ObservedStore(faulty, bus, clock=lambda: float(next(ticks)))
    info = store.upload(upload_of("x", b"12345"))
    store.write("y", b"12", if_generation=0)
    store.read("y", limit_bytes=9)
    store.stat("x")
    store.download("x", generation=info.generation, offset=1, buffer=memoryview(bytearray(3)))
    assert [found.name for found in store.list("")] == ["x", "y"]
    store.delete("x", generation=info.generation)
    faulty.script(StoreFault("stat", when="before"))
    with pytest.raises(StoreTemporary):
        store.stat("z")
    calls = [event for event in told if isinstance(event, StoreCalled)]
    assert len(calls) == len(told)
    assert [(call.operation, call.name, call.size_bytes) for call in calls] == [
        ("upload", "x", 5), ("write", "y", 2), ("read", "y", 2), ("stat", "x", 0), ("download", "x", 3),
        ("list", "", 0), ("delete", "x", 0), ("stat", "z", 0),
    ]  # fmt: skip
    assert {call.duration_s for call in calls} == {1.0}
    assert {call.mirror for call in calls} == {"memory://observed"}
    assert [bool(call.error) for call in calls] == [False] * 7 + [True]
    assert calls[-1].error.startswith("StoreTemporary: ")
