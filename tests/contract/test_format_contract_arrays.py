"""What every kind of save promises about arrays, sets and byte arrays: filled, so that who holds them sees it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from tests.kit.formats import KINDS, load, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


def through(kind: Kind, root: Path, saved: dict[str, Any], into: dict[str, Any], **more: Any) -> tuple[str, ...]:
    """Save one extra state and load it into another; return what was missing."""
    meta = save(kind, root, TrainState(model=nn.Linear(2, 2), extra=saved))
    return load(kind, root, meta, TrainState(**{"model": nn.Linear(2, 2), "extra": into, **more})).missing


def same_array(one: Any, other: Any) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def replaced(where: str, kind: str) -> str:
    return f"{where}: the {kind} here cannot hold what was saved, another object takes its place"


FILLED: dict[str, Callable[[bool], Any]] = {
    "array": lambda full: numpy.arange(6, dtype=numpy.float32).reshape(2, 3) * full,
    "columns": lambda full: numpy.asfortranarray(numpy.arange(6).reshape(2, 3) * full),
    "backwards": lambda full: (numpy.arange(6) * full)[::-2],
    "other endian": lambda full: (numpy.arange(3, dtype=">i4") * full).astype(">i4"),
    "not a number": lambda full: numpy.full(2, numpy.nan if full else 0.0),
    "one number": lambda full: numpy.array(7.5 * full),
    "set": lambda full: {1, "two"} if full else {9},
    "byte array": lambda full: bytearray(b"abcd" if full else 2),
}


@pytest.mark.parametrize("what", FILLED)
def test_what_the_loop_holds_sees_what_was_saved(kind: Kind, what: str, tmp_path: Path) -> None:
    build = FILLED[what]
    into: dict[str, Any] = {"a": build(False), "deep": [(build(False),), deque([build(False)])]}
    held = [into["a"], into["deep"][0][0], into["deep"][1][0]]
    saved: dict[str, Any] = {"a": build(True), "deep": [(build(True),), deque([build(True)])]}
    assert through(kind, tmp_path, saved, into) == ()
    now = [into["a"], into["deep"][0][0], into["deep"][1][0]]
    for one, kept in zip(now, held, strict=True):
        assert one is kept
        assert same_array(one, build(True)) if isinstance(one, numpy.ndarray) else one == build(True)


def frozen() -> Any:
    array = numpy.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("now", "name"),
    [
        (lambda: numpy.zeros(3, dtype=numpy.float32), "ndarray"),
        (lambda: numpy.zeros((3, 1)), "ndarray"),
        (frozen, "ndarray"),
        (lambda: numpy.lib.stride_tricks.as_strided(numpy.zeros(1), (3,), (0,)), "ndarray"),
        (lambda: torch.zeros(3), "Tensor"),
        (lambda: [0.0], "list"),
        (lambda: {"a": 1}, "dict"),
        (lambda: {1}, "set"),
        (lambda: bytearray(3), "bytearray"),
        (lambda: None, None),
        (lambda: (0.0,), None),
        (lambda: 7, None),
    ],
    ids=range(12),
)
def test_what_cannot_be_filled_is_replaced_and_that_is_said(
    kind: Kind, now: Callable[[], Any], name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    into = {"x": now()}
    missing = through(kind, tmp_path, {"x": numpy.arange(3.0)}, into)
    assert same_array(into["x"], numpy.arange(3.0))
    assert missing == (() if name is None else (replaced("extra.x", name),))
    assert all(line in caplog.text for line in missing)


@pytest.mark.parametrize(
    ("now", "saved", "name"),
    [
        (torch.zeros(2), torch.ones(3), "Tensor"),
        (torch.zeros(2), torch.ones(2, dtype=torch.int64), "Tensor"),
        (torch.zeros(2), 0.5, "Tensor"),
        (deque([1], maxlen=2), deque([1], maxlen=3), "deque"),
        ({}, OrderedDict(), "dict"),
        ([], None, "list"),
    ],
    ids=range(6),
)
def test_other_values_that_are_replaced_are_reported_too(
    kind: Kind, now: Any, saved: Any, name: str, tmp_path: Path
) -> None:
    into = {"x": copy.deepcopy(now)}
    assert through(kind, tmp_path, {"x": saved}, into) == (replaced("extra.x", name),)


def test_an_array_that_is_equal_and_not_writeable_stays(kind: Kind, tmp_path: Path) -> None:
    array = frozen()
    into = {"x": array}
    assert through(kind, tmp_path, {"x": numpy.zeros(3)}, into) == ()
    assert into["x"] is array


SHARED: dict[str, Callable[[nn.Linear], dict[str, Any]]] = {
    "the model": lambda model: {"x": model.weight.detach().numpy()},
    "a row of the model": lambda model: {"x": model.weight.detach().numpy()[1:]},
    "a tensor": lambda _: {"a": (one := torch.zeros(2, 2)), "x": one.numpy()},
    "an array": lambda _: {"a": (one := numpy.zeros((2, 2), numpy.float32)), "x": one},
    "a part of an array": lambda _: {"a": (one := numpy.zeros((3, 2), numpy.float32))[:2], "x": one[1:]},
    "an array before a tensor": lambda _: {
        "a": (one := numpy.zeros((2, 2), numpy.float32)),
        "x": torch.from_numpy(one),
    },
    "a set": lambda _: {"a": (one := {0}), "x": one},
    "a byte array": lambda _: {"a": (one := bytearray(2)), "x": one},
    "a view of a byte array": lambda _: {"a": (one := bytearray(4)), "x": numpy.frombuffer(one, numpy.float32)},
}


@pytest.mark.parametrize("how", SHARED)
def test_memory_that_is_spoken_for_is_not_given_other_values(kind: Kind, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state, other = TrainState(model=nn.Linear(2, 2)), TrainState(model=nn.Linear(2, 2))
    other.extra = SHARED[how](other.model)
    state.extra = copy.deepcopy(other.extra)
    for number, value in enumerate(state.extra.values(), 3):
        if isinstance(value, set):
            value.add(number)
        elif isinstance(value, bytearray):
            value[:] = bytes([number]) * len(value)
        else:
            value[...] = number
    expected = copy.deepcopy(state.extra)
    meta = save(kind, tmp_path, state)
    assert load(kind, tmp_path, meta, other).missing == ()
    assert torch.equal(other.model.weight, state.model.weight)
    for key, value in expected.items():
        now = other.extra[key]
        assert bool((now == value).all()) if hasattr(value, "all") else now == value


def test_columns_of_one_array_are_filled_in_place(kind: Kind, tmp_path: Path) -> None:
    matrix = numpy.zeros((3, 2))
    into = {"a": matrix[:, 0], "b": matrix[:, 1]}
    assert through(kind, tmp_path, {"a": numpy.ones(3), "b": numpy.full(3, 2.0)}, into) == ()
    assert matrix.tolist() == [[1.0, 2.0]] * 3


def test_what_was_saved_as_one_array_stays_one(kind: Kind, tmp_path: Path) -> None:
    array, ones = numpy.zeros(3), numpy.ones(3)
    into: dict[str, Any] = {"a": array, "b": [array, array[1:]]}
    assert through(kind, tmp_path, {"a": ones, "b": [ones, ones[1:]]}, into) == ()
    assert into["a"] is into["b"][0] is array
    assert into["b"][1].base is array


def test_arrays_that_were_saved_apart_with_equal_values_come_apart(kind: Kind, tmp_path: Path) -> None:
    array = numpy.zeros(3)
    into: dict[str, Any] = {"a": array, "b": [array, array[1:]]}
    assert through(kind, tmp_path, {"a": numpy.ones(3), "b": [numpy.ones(3), numpy.ones(2)]}, into) == ()
    array[:] = 7
    assert into["a"] is array
    assert [one.tolist() for one in into["b"]] == [[1, 1, 1], [1, 1]]


def test_a_byte_array_that_somebody_looks_at_is_replaced_where_its_length_changes(kind: Kind, tmp_path: Path) -> None:
    into = {"x": bytearray(2)}
    with memoryview(into["x"]):
        assert through(kind, tmp_path, {"x": bytearray(b"abc")}, into) == (replaced("extra.x", "bytearray"),)
    assert into["x"] == b"abc"


def test_named_entries_that_the_save_lacks_are_kept_and_reported(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    into: dict[str, Any] = {"prog": {"flag": True, "n": 0, "deep": OrderedDict(more=[1])}}
    prog = into["prog"]
    missing = through(kind, tmp_path, {"prog": {"n": 5, "deep": OrderedDict(x=1)}}, into)
    assert prog == {"n": 5, "deep": OrderedDict(x=1, more=[1]), "flag": True}
    assert [line.partition(":")[0] for line in missing] == ["extra.prog.deep.more", "extra.prog.flag"]
    assert "The save holds no extra.prog.flag" in caplog.text


def test_lists_and_dicts_that_count_follow_the_save(kind: Kind, tmp_path: Path) -> None:
    into: dict[str, Any] = {"history": [1, 2, 3], "by_step": {1: 0.5, 2: 0.25}, "seen": defaultdict(int, a=1, b=2)}
    saved: dict[str, Any] = {"history": [1], "by_step": {1: 0.5}, "seen": defaultdict(int, a=1)}
    assert through(kind, tmp_path, copy.deepcopy(saved), into) == ()
    assert into == saved
