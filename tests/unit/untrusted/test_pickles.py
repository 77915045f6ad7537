"""Each rule of the reader of pickles, alone: a pickle that breaks this one and no other."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.untrusted import read_limits
from ckptmirror.untrusted.pickles import check_whole, read_pickle
from ckptmirror.untrusted.tensor_files import load_bytes
from tests.kit.hostile_files import (
    called,
    dict_of,
    doubling_tuples,
    get,
    global_,
    nested_lists,
    nested_tuples,
    number,
    pickled,
    pt,
    put,
    storage,
    tensor,
    text,
    tuple_,
)


def read(data: bytes) -> Any:
    """Read a pickle that may name anything."""
    found = read_pickle(data, lambda _: True)
    check_whole(found, len(data))
    return found


WIDE = b"(" + b"K\x00" * 100_001 + b"t"
LONG = b"](" + b"K\x00" * 90_000 + b"e"
DEEP = nested_tuples(17)
TOO_MUCH_OF_A_KEY = "a key that holds too much, or too deep"
TOO_OFTEN = "far more memory than its"

BROKEN = {
    "an item for a tuple": (b")K\x01a", "tuple at byte"),
    "an item for a number": (b"K\x01K\x02a", "adds an item to a int"),
    "a key without a value": (b"}(K\x01u", "broken at byte"),
    "a call without a tuple": (global_("a", "b") + b"]R", "calls a Name with a list"),
    "a global of numbers": (b"K\x01K\x02\x93", "a name that is no text"),
    "a memo that was not filled": (get(7), "broken at byte"),
    "a memo that was skipped": (number(1) + put(7) + get(6), "broken at byte"),
    "a memo behind a skipped one": (number(1) + put(7) + b"\x94" + get(8), "broken at byte"),  # MEMOIZE counts: it is 1
    "a tuple of more than there is": (b"K\x01\x87", "broken at byte"),
    "no end": (b"", "broken at byte"),
}
UNSAFE = {
    "a wide key": (dict_of((WIDE, number(1))), TOO_MUCH_OF_A_KEY),
    "a deep key": (dict_of((DEEP, number(1))), TOO_MUCH_OF_A_KEY),
    "a deep key, set alone": (b"}" + DEEP + b"K\x01s", TOO_MUCH_OF_A_KEY),
    "a deep key in what a set is made of": (called("builtins", "set", b"]" + DEEP + b"a"), TOO_MUCH_OF_A_KEY),
    "a deep key in what a dict is made of": (
        called("collections", "OrderedDict", b"](]" + DEEP + b"aK\x01ae"),
        TOO_MUCH_OF_A_KEY,
    ),
    "one key hashed for hours": (
        WIDE[:180_001] + b"t" + put(0) + b"](" + (b"}" + get(0) + b"K\x01s") * 1000 + b"e",
        TOO_OFTEN,
    ),
    "one list copied by calls": (
        tuple_(LONG + put(0), b"](" + called("builtins", "set", get(0)) * 1000 + b"e"),
        TOO_OFTEN,
    ),
    "an encoding that is written for hours": (
        called("_codecs", "encode", text("x"), doubling_tuples(60)),
        "encodes a str as a tuple",
    ),
    "an encoding 100,000 deep": (called("_codecs", "encode", text("x"), nested_tuples(100_000)), "encodes a str as a"),
    "pairs copied by calls": (
        tuple_(
            b"](" + b"".join(number(i) + b"N\x86" for i in range(1000)) + b"e" + put(0),
            b"](" + called("collections", "OrderedDict", get(0)) * 1000 + b"e",
        ),
        TOO_OFTEN,
    ),
    "empty lists of a byte each": (tuple_(b"]" * 1_000_000), TOO_OFTEN),
    "an empty dict in a million places": (
        tuple_(
            called("collections", "OrderedDict") + put(0),
            b"](" + get(0) * 1000 + b"e" + put(1),
            tuple_(get(1) * 990),
        ),
        "unfold to far more than",
    ),
    "different keys of one hash": (
        b"}(" + b"".join(b"\x8a\x09" + (i * (2**61 - 1)).to_bytes(9, "little") + b"N" for i in range(2000)) + b"u",
        "different keys of one hash",
    ),
    "different members of one hash": (
        called(
            "builtins",
            "set",
            b"](" + b"".join(b"\x8a\x09" + (i * (2**61 - 1)).to_bytes(9, "little") for i in range(2000)) + b"e",
        ),
        "different keys of one hash",
    ),
    "a second state": (global_("a", "b") + b")\x81}b}b", "gives a state to a Made"),
    "a state for what it names": (global_("a", "b") + b"}b", "gives a state to a Name"),
    "a state for a tuple": (b")}b", "gives a state to a tuple"),
    "a state that holds what it belongs to": (global_("a", "b") + b")\x81" + put(0) + get(0) + b"b", "holds itself"),
    "a list that holds itself": (b"]" + put(0) + get(0) + b"a", "holds itself"),
    "a list beneath a deep state": (global_("a", "b") + b")\x81" + nested_lists(400) + b"b", "nested more than"),
    "marks": (b"(" * 10_001, "marks its stack"),
    "another opcode": (b"\x8a\x01\x01" + b"2", "the opcode 0x32"),
    "a persistent object": (text("x") + b"Q", "persistent object"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_no_pickler_writes_is_broken(what: str) -> None:
    body, why = BROKEN[what]
    with pytest.raises(IntegrityError, match=why) as caught:
        read(pickled(body)[: None if body else -1])
    assert not isinstance(caught.value, UnsafePickle)


@pytest.mark.parametrize("what", UNSAFE)
def test_what_would_cost_more_than_its_bytes_is_unsafe(what: str) -> None:
    body, why = UNSAFE[what]
    with pytest.raises(UnsafePickle, match=why):
        read(pickled(body))


@pytest.mark.parametrize(
    "body",
    [
        dict_of((WIDE[:100_001] + b"t", number(1))),
        dict_of((nested_tuples(15), number(1))),
        b"](" + b"](" * 4999 + b"e" * 5000,
        number(1) + put(1000),
    ],
    ids=["wide", "deep", "marks", "memo"],
)
def test_what_is_just_within_a_limit_is_let_through(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmirror.untrusted.pickles.max_depth", lambda: 10_000)
    read(pickled(body))


def test_storages_count_as_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_limits, "FREE_BYTES", 10)
    body = storage("0", 1)[:-1] + put(0) + tuple_(b"h\x00Q" * 2000)
    with pytest.raises(UnsafePickle, match="far more memory than its"):
        load_bytes(pt(body, s0=bytes(4)), "here")


def test_the_depth_has_an_end_whatever_python_was_told() -> None:
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1_000_000)
        assert read_limits.max_depth() == 3_000
    finally:
        sys.setrecursionlimit(before)


HOOKS: dict[str, Callable[[bytes], bytes]] = {
    "a tensor": lambda hooks: tensor(storage("0", 1), [1], [1]).replace(
        global_("collections", "OrderedDict") + b")R", hooks
    ),
    "a parameter": lambda hooks: called(
        "torch._utils", "_rebuild_parameter", tensor(storage("0", 1), [1], [1]), b"\x88", hooks
    ),
}


@pytest.mark.parametrize("what", HOOKS)
def test_a_tensor_is_one_value_only_if_nothing_hangs_on_it(what: str) -> None:
    load_bytes(pt(HOOKS[what](called("collections", "OrderedDict")), s0=bytes(4)), "here")
    filled = called("collections", "OrderedDict") + text("a") + nested_lists(400) + b"s"
    for hooks in (nested_lists(400), filled):
        with pytest.raises(UnsafePickle, match=r"nested more than|tensor with hooks"):
            load_bytes(pt(HOOKS[what](hooks), s0=bytes(4)), "here")


def _pid(*count: bytes, what: str = "storage", kind: bytes = global_("torch", "FloatStorage")) -> bytes:
    return tuple_(text(what), kind, text("0"), text("cpu"), *count) + b"Q"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (tensor(number(1), [1], [1]), "over something that is not a storage"),
        (tensor(b"]", [1], [1]), "over something that is not a storage"),
        (tensor(storage("0", 1), [1], [1, 1]), "an invalid shape"),
        (tensor(storage("0", 1), [-1], [1]), "an invalid shape"),
        (tensor(storage("0", 1), [1], [1]).replace(tuple_(number(1)), tuple_(text("x"))), "an invalid shape"),
        (tensor(storage("0", 1), [5], [1]), "ends at value 4 of a storage of 4 bytes"),
        (tensor(storage("0", 2), [1], [1]), "says that storage '0' of 4 bytes has 2 values"),
        (tensor(storage("0", -1), [1], [1]), "says that storage '0' of 4 bytes has -1 values"),
        (tensor(storage("1", 1), [1], [1]), "names a storage '1' that the archive does not hold"),
        (storage("0", 1), "makes a persistent by itself"),
        (storage("0", 1, "F"), "asks for 'torch.F'"),
        (tensor(_pid(b"N"), [1], [1]), "says that storage '0' of 4 bytes has None values"),
        (tensor(_pid(), [1], [1]), "over something that is not a storage"),
        (tensor(_pid(number(1), what="module"), [1], [1]), "over something that is not a storage"),
        (tensor(_pid(number(1), kind=text("torch.F")), [1], [1]), "over something that is not a storage"),
        (called("torch._tensor", "_rebuild_from_type_v2", b"N", b"N", b")", b"N"), "makes a tensor of nothing"),
        (called("torch._tensor", "_rebuild_from_type_v2", b"N"), "without what belongs to it"),
        (
            called(
                "torch._tensor",
                "_rebuild_from_type_v2",
                global_("torch._tensor", "_rebuild_from_type_v2"),
                global_("torch", "Tensor"),
                tuple_(global_("builtins", "bytearray"), b"N", tuple_(number(9)), b"N"),
                b"N",
            ),
            "not on the allow-list",
        ),
        (called("torch.cuda", "FloatTensor", number(9)), "asks for 'torch.cuda.FloatTensor'"),
        (called("torch.sparse", "FloatTensor", number(9)), "asks for 'torch.sparse.FloatTensor'"),
        (
            called("torch.distributed.device_mesh", "DeviceMesh"),
            r"asks for 'torch\.distributed\.device_mesh\.DeviceMesh",
        ),
        (global_("torch", "LongStorage") + tuple_(number(9)) + b"\x81", "makes a torch.LongStorage by itself"),
        (called("__builtin__", "bytearray", number(9)), "makes a bytearray of a int"),
        (called("UserDict", "Counter", number(9)), "makes a Counter of a int"),
        (tensor(storage("0", 1), [1 << 40], [0]), "show far more values than it has bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        load_bytes(pt(body, s0=bytes(4)), "here")


def test_a_text_in_latin_1_is_how_bytes_are_written() -> None:
    assert read(pickled(called("_codecs", "encode", text("abc"), text("latin1")))) == b"abc"
    assert load_bytes(pt(called("builtins", "bytearray", text("abc"), text("latin-1"))), "here") == bytearray(b"abc")
    with pytest.raises(UnsafePickle, match="encodes a str as 'punycode'"):
        read(pickled(called("_codecs", "encode", text("abc"), text("punycode"))))
    with pytest.raises(UnsafePickle, match="encodes a str as 'punycode'"):  # whose time grows with the square
        load_bytes(pt(called("builtins", "bytearray", text("abc"), text("punycode"))), "here")


def test_lengths_lie_inside_the_pickle() -> None:
    for body in (b"B" + struct.pack("<I", 9), b"X" + struct.pack("<I", 9), b"\x95" + struct.pack("<Q", 9), b"\x8a\x09"):
        with pytest.raises(IntegrityError, match=r"9 bytes"):
            read(pickled(body))
