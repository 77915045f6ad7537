"""Each rule of reading a pickle without making anything of it, alone: a pickle that breaks this one and no other."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable

import pytest

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.formats import nesting_limit, pickle_scan
from ckptmirror.formats.archives import _TorchRules
from ckptmirror.formats.pickle_scan import PickleRules, scan_pickle
from tests.kit.hostile_files import (
    called,
    dict_of,
    get,
    global_,
    nested_lists,
    nested_tuples,
    number,
    pickled,
    put,
    storage,
    tensor,
    text,
    tuple_,
)

WIDE = b"(" + b"K\x00" * 100_001 + b"t"
LONG = b"](" + b"K\x00" * 90_000 + b"e"
DEEP = nested_tuples(17)
TOO_MUCH_OF_A_KEY = "a key that holds too much, or too deep"
TOO_OFTEN = "the same values too often"

BROKEN = {
    "an item for a tuple": (b")K\x01a", "changes a tuple"),
    "a state for a tuple": (b")}b", "changes a tuple"),
    "an item for a number": (b"K\x01K\x02a", "changes a int"),
    "a key without a value": (b"}(K\x01u", "broken at byte"),
    "a call without a tuple": (global_("a", "b") + b"]R", "calls something without a tuple"),
    "a global of numbers": (b"K\x01K\x02\x93", "names a global without text"),
    "a memo that was not filled": (get(7), "broken at byte"),
    "a memo that was skipped": (number(1) + put(7) + get(6), "broken at byte"),
    "a memo behind a skipped one": (number(1) + put(7) + b"\x94" + get(8), "broken at byte"),  # MEMOIZE counts: it is 1
    "a tuple of more than there is": (b"K\x01\x87", "broken at byte"),
    "no end": (b"", "broken at byte"),
}
UNSAFE = {
    "a call of what is no global": (b"])R", "calls something that is not a global"),
    "a wide key": (dict_of((WIDE, number(1))), TOO_MUCH_OF_A_KEY),
    "a deep key": (dict_of((DEEP, number(1))), TOO_MUCH_OF_A_KEY),
    "a deep key, set alone": (b"}" + DEEP + b"K\x01s", TOO_MUCH_OF_A_KEY),
    "a deep key added to a set": (b"\x8f(" + DEEP + b"\x90", TOO_MUCH_OF_A_KEY),
    "a deep key of a frozen set": (b"(" + DEEP + b"\x91", TOO_MUCH_OF_A_KEY),
    "a deep key in what a set is made of": (called("builtins", "set", b"]" + DEEP + b"a"), TOO_MUCH_OF_A_KEY),
    "a deep key in what a dict is made of": (
        called("collections", "OrderedDict", b"](]" + DEEP + b"aK\x01ae"),
        TOO_MUCH_OF_A_KEY,
    ),
    "one key hashed for hours": (
        WIDE[:180_001] + b"t" + put(0) + b"](" + (b"}" + get(0) + b"K\x01s") * 1000 + b"e",
        TOO_OFTEN,
    ),
    "one list copied by calls": (LONG + put(0) + b"](" + called("a", "b", get(0)) * 1000 + b"e", TOO_OFTEN),
    "one list copied by calls of calls": (
        called("a", "b", LONG) + put(0) + b"](" + called("a", "b", get(0)) * 1000 + b"e",
        TOO_OFTEN,
    ),
    "one list copied into states": (
        LONG + put(0) + b"](" + (global_("a", "b") + b")\x81" + get(0) + b"b") * 1000 + b"e",
        TOO_OFTEN,
    ),
    "a state copied by calls": (
        global_("a", "b") + b")\x81" + LONG + b"b" + put(0) + b"](" + called("a", "b", get(0)) * 1000 + b"e",
        TOO_OFTEN,
    ),
    "a state that holds what it belongs to": (global_("a", "b") + b")\x81" + put(0) + get(0) + b"b", "holds itself"),
    "a list that holds itself": (b"]" + put(0) + get(0) + b"a", "holds itself"),
    "a list beneath a deep state": (global_("a", "b") + b")\x81" + nested_lists(400) + b"b", "nested more than"),
    "marks": (b"(" * 10_001, "marks its stack"),
    "another opcode": (b"\x8a\x01\x01" + b"2", "Unsupported operand 0x32"),
    "a memo far off": (number(1) + put(1002), "numbers what it remembers 1002"),
    "a persistent object": (text("x") + b"Q", "persistent object"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_no_pickler_writes_is_broken(what: str) -> None:
    body, why = BROKEN[what]
    with pytest.raises(IntegrityError, match=why) as caught:
        scan_pickle(pickled(body)[: None if body else -1], PickleRules())
    assert not isinstance(caught.value, UnsafePickle)


@pytest.mark.parametrize("what", UNSAFE)
def test_what_would_cost_more_than_its_bytes_is_unsafe(what: str) -> None:
    body, why = UNSAFE[what]
    with pytest.raises(UnsafePickle, match=why):
        scan_pickle(pickled(body), PickleRules())


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
    monkeypatch.setattr("ckptmirror.formats.pickle_values.max_depth", lambda: 10_000)
    scan_pickle(pickled(body), PickleRules())


def test_storages_count_as_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_scan, "_FREE_CONTAINERS", 10)
    body = storage("0", 1)[:-1] + put(0) + tuple_(b"h\x00Q" * 2000)
    with pytest.raises(UnsafePickle, match="hold more than 1020 containers"):
        scan_pickle(pickled(body), _TorchRules({"0": 4}))


def test_the_depth_has_an_end_whatever_python_was_told() -> None:
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1_000_000)
        assert nesting_limit.max_depth() == 3_000
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
    rules = _TorchRules({"0": 4})
    scan_pickle(pickled(HOOKS[what](called("collections", "OrderedDict"))), rules)
    filled = called("collections", "OrderedDict") + text("a") + nested_lists(400) + b"s"
    for hooks in (nested_lists(400), filled):
        with pytest.raises(UnsafePickle, match="nested more than"):
            scan_pickle(pickled(HOOKS[what](hooks)), rules)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (tensor(number(1), [1], [1]), "over something that is not a storage"),
        (tensor(b"]", [1], [1]), "over something that is not a storage"),
        (tensor(storage("0", 1), [1], [1, 1]), "an invalid shape"),
        (tensor(storage("0", 1), [-1], [1]), "an invalid shape"),
        (tensor(storage("0", 1), [1], [1]).replace(tuple_(number(1)), tuple_(text("x"))), "an invalid shape"),
        (tensor(storage("0", 1), [5], [1]), "ends at value 4 of a storage of 4 bytes"),
        (storage("0", 2), "says that storage '0' has 2 values"),
        (storage("0", 5, "UntypedStorage"), "says that storage '0' has 5 values"),
        (storage("0", -1), "says that storage '0' has -1 values"),
        (storage("1", 1), "names a storage '1' that the archive does not hold"),
        (tuple_(text("storage"), global_("torch", "F"), text("0"), text("cpu"), b"N") + b"Q", "names a storage '0'"),
        (tuple_(text("storage"), global_("torch", "F"), text("0"), text("cpu")) + b"Q", "that is not a storage"),
        (tuple_(text("module"), global_("torch", "F"), text("0"), text("cpu"), b"N") + b"Q", "that is not a storage"),
        (tuple_(text("storage"), text("torch.F"), text("0"), text("cpu"), number(1)) + b"Q", "that is not a storage"),
        (called("torch._tensor", "_rebuild_from_type_v2", b"N", b"N", b")"), "rebuilds a tensor from nothing"),
        (
            called(
                "torch._tensor",
                "_rebuild_from_type_v2",
                global_("torch._tensor", "_rebuild_from_type_v2"),
                b"N",
                tuple_(global_("builtins", "bytearray"), b"N", tuple_(number(9))),
            ),
            "rebuilds a tensor that is rebuilt",
        ),
        (called("torch.cuda", "FloatTensor", number(9)), "by itself, of any length"),
        (called("torch.sparse", "FloatTensor", number(9)), "by itself, of any length"),
        (global_("torch", "LongStorage") + tuple_(number(9)) + b"\x81", "by itself, of any length"),
        (called("__builtin__", "bytearray", number(9)), "bytearray of a length"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        scan_pickle(pickled(body), _TorchRules({"0": 4}))


def test_a_text_in_latin_1_is_how_bytes_are_written() -> None:
    scan_pickle(pickled(called("_codecs", "encode", text("abc"), text("latin1"))), _TorchRules({}))
    with pytest.raises(UnsafePickle, match="encodes a text as 'punycode'"):
        scan_pickle(pickled(called("_codecs", "encode", text("abc"), text("punycode"))), _TorchRules({}))


def test_lengths_lie_inside_the_pickle() -> None:
    for body in (b"\x8d" + struct.pack("<Q", 9), b"\x95" + struct.pack("<Q", 9), b"\x8a\x09"):
        with pytest.raises(IntegrityError, match=r"9 bytes"):
            scan_pickle(pickled(body), PickleRules())
