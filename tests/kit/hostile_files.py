"""Hostile checkpoint files, built by hand: pickles from opcodes, archives from ``struct``."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmirror.core.sealed_json import seal

PROTO_2 = b"\x80\x02"


def global_(module: str, name: str) -> bytes:
    """Push a global."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    """Push text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Push an integer of at most 255 bytes."""
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def tuple_(*items: bytes) -> bytes:
    """Push a tuple of what the items push."""
    return b"(" + b"".join(items) + b"t"


def put(index: int) -> bytes:
    """Store the top of the stack in the memo."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Push what was remembered."""
    return b"j" + struct.pack("<I", index)


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    """Push a storage of ``count`` values from the record ``data/<key>``."""
    return tuple_(text("storage"), global_("torch", kind), text(key), text("cpu"), number(count)) + b"Q"


def tensor(place: bytes, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> bytes:
    """Push a tensor over a storage."""
    arguments = (
        place,
        number(offset),
        tuple_(*map(number, size)),
        tuple_(*map(number, stride)),
        b"\x89",
        global_("collections", "OrderedDict") + b")R",
    )
    return global_("torch._utils", "_rebuild_tensor_v2") + tuple_(*arguments) + b"R"


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """Push what a call of a global returns."""
    return global_(module, name) + tuple_(*arguments) + b"R"


def nested_tuples(depth: int) -> bytes:
    """Push a tuple in a tuple in a tuple, and so on."""
    return b")" + b"\x85" * depth


def nested_lists(depth: int) -> bytes:
    """Push a list in a list in a list, and so on."""
    return b"]" * depth + b"a" * (depth - 1)


def doubling_tuples(times: int) -> bytes:
    """Push a tuple that unfolds to ``2 ** times`` leaves, in a few bytes each: the billion laughs."""
    return number(1) + b"".join(put(i) + get(i) + b"\x86" for i in range(times))


def doubling_lists(times: int) -> bytes:
    """Push a list that unfolds to ``2 ** times`` leaves."""
    # Each holds the next, which is empty then, so that nobody who adds up while reading knows its weight.
    links = b"".join(get(i) + b"(]" + put(i + 1) + get(i + 1) + b"e" for i in range(times - 1))
    return b"(]" + put(0) + links + b"t"


def dict_of(*pairs: tuple[bytes, bytes]) -> bytes:
    """Push a dict."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def pickled(body: bytes) -> bytes:
    """Return a whole pickle."""
    return PROTO_2 + body + b"."


@dataclass
class Record:
    """One record of an archive; a field that is not None is a lie."""

    name: str
    data: bytes
    deflated: bool = False
    claims_size: int | None = None
    top: str | None = None
    at: int | None = None
    """Of an earlier record: its local header is pointed at instead of one of its own."""


def archive(*records: Record, top: str = "archive/", count: int | None = None, end: bytes | None = None) -> bytes:
    """Return a zip archive of records, as torch reads it."""
    out, central, starts = bytearray(), bytearray(), []
    for record in records:
        name = ((record.top or top) + record.name).encode()
        stored = _deflated(record.data) if record.deflated else record.data
        size = len(record.data) if record.claims_size is None else record.claims_size
        big = size >= 0xFFFFFFFF
        extra = struct.pack("<HHQ", 1, 8, size) if big else b""
        packed = len(stored) if record.deflated or not big else 0xFFFFFFFF
        if big and not record.deflated:
            extra = struct.pack("<HHQQ", 1, 16, size, size)
        fields = (20, 0, 8 if record.deflated else 0, 0, 0, zlib.crc32(record.data), packed, min(size, 0xFFFFFFFF))
        if record.at is None:
            starts.append(len(out))
            out += b"PK\3\4" + struct.pack("<HHHHHIIIHH", *fields, len(name), 0) + name + stored
        else:
            starts.append(starts[record.at])
        central += b"PK\1\2" + struct.pack("<H", 20) + struct.pack("<HHHHHIIIHH", *fields, len(name), len(extra))
        central += struct.pack("<HHHII", 0, 0, 0, 0, starts[-1]) + name + extra
    total = len(records) if count is None else count
    if end is None and total > 0xFFFF:
        fields = (44, 45, 45, 0, 0, total, total, len(central), len(out))
        end = b"PK\6\6" + struct.pack("<QHHIIQQQQ", *fields)
        end += b"PK\6\7" + struct.pack("<IQI", 0, len(out) + len(central), 1)
        end += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, len(central), len(out), 0)
    if end is None:
        end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, total, total, len(central), len(out), 0)
    return bytes(out + central + end)


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def pt(body: bytes, **records: bytes) -> bytes:
    """Return a ``.pt`` file whose pickle is ``body`` and whose storages are ``records`` (``s0=…`` is ``data/0``)."""
    return archive(
        Record("data.pkl", pickled(body)),
        Record("byteorder", b"little"),
        *(Record(f"data/{name[1:]}", data) for name, data in records.items()),
        Record("version", b"3\n"),
    )


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a command": lambda: pt(called("posix", "system", text("touch owned"))),
    "a bytearray of a length": lambda: pt(called("builtins", "bytearray", number(10**10))),
    "a bytearray of a length, called by a tensor": lambda: pt(
        called(
            "torch._tensor",
            "_rebuild_from_type_v2",
            global_("builtins", "bytearray"),
            global_("torch", "Tensor"),
            tuple_(number(10**10)),
            b"}",
        )
    ),
    "a tensor of a length": lambda: pt(called("torch", "FloatTensor", number(10**9))),
    "a storage of a length": lambda: pt(called("torch.storage", "UntypedStorage", number(10**9))),
    "a codec": lambda: pt(called("_codecs", "encode", text("a" * 100), text("idna"))),
    "a storage that is shorter": lambda: pt(tensor(storage("0", 10**8), [10**8], [1]), s0=b"\0" * 400),
    "a storage of less than nothing": lambda: pt(tensor(storage("0", -100), [1], [1]), s0=b"\0" * 400),
    "a storage that is not there": lambda: pt(tensor(storage("7", 100), [1], [1]), s0=b"\0" * 400),
    "an offset beyond its storage": lambda: pt(tensor(storage("0", 100), [1], [1], offset=10**6), s0=b"\0" * 400),
    "an offset before its storage": lambda: pt(tensor(storage("0", 100), [1], [1], offset=-9), s0=b"\0" * 400),
    "a shape beyond its storage": lambda: pt(tensor(storage("0", 100), [10**9], [1]), s0=b"\0" * 400),
    "a stride backwards": lambda: pt(tensor(storage("0", 100), [100], [-1]), s0=b"\0" * 400),
    "another persistent id": lambda: pt(text("storage") + b"Q"),
    "a key that is hashed for hours": lambda: pt(dict_of((doubling_tuples(60), number(1)))),
    "a key that is hashed 300,000 deep": lambda: pt(dict_of((nested_tuples(300_000), number(1)))),
    "keys of a set that are hashed for hours": lambda: pt(
        called("builtins", "set", b"](" + doubling_tuples(60) + b"e")
    ),
    "tuples that unfold for hours": lambda: pt(dict_of((text("a"), doubling_tuples(60)))),
    "lists that unfold for hours": lambda: pt(dict_of((text("a"), doubling_lists(60)))),
    "lists 100,000 deep": lambda: pt(dict_of((text("a"), nested_lists(100_000)))),
    "tuples 100,000 deep": lambda: pt(dict_of((text("a"), nested_tuples(100_000)))),
    "four million lists in as many bytes": lambda: pt(b"](" + b"]" * 4_000_000 + b"e"),
    "four million marks": lambda: pt(b"(" * 4_000_000),
    "a list that holds itself": lambda: pt(b"]" + put(0) + get(0) + b"a"),
    "one list copied for hours": lambda: pt(
        b"("
        + (b"](" + number(0) * 10_000 + b"e" + put(0) + global_("builtins", "set") + put(1))
        + (get(1) + get(0) + b"\x85R") * 100_000
        + b"t"
    ),
    "one long tuple given to calls for hours": lambda: pt(
        b"("
        + (b"(" + number(0) * 20_000 + b"t" + put(0) + global_("collections", "OrderedDict") + put(1))
        + (get(1) + get(0) + b"R") * 20_000
        + b"t"
    ),
    "a bytearray of a tensor": lambda: pt(
        called("builtins", "bytearray", tensor(storage("0", 1), [], [])), s0=b"\0" * 4
    ),
    "a set of a tensor that says how long it is": lambda: pt(
        called("builtins", "set", tensor(storage("0", 1), [10**9], [0])), s0=b"\0" * 4
    ),
    **{
        f"a marked {mark} over a tensor that says how long it is": lambda mark=mark: _marked(
            mark, tensor(storage("0", 4, "ByteStorage"), [10**9], [0])
        )
        for mark in ("set", "frozenset", "tuple", "deque", "array", "shard", "permuted")
    },
    "a marked array over a tensor that has no memory": lambda: _marked(
        "array",
        called(
            "torch._utils",
            "_rebuild_meta_tensor_no_storage",
            global_("torch", "uint8"),
            tuple_(number(10**9)),
            tuple_(number(1)),
            b"\x89",
        ),
    ),
    "a tensor that says how long it is, of another device": lambda: pt(
        called(
            "torch._utils",
            "_rebuild_device_tensor_from_cpu_tensor",
            tensor(storage("0", 1), [10**9], [0]),
            global_("torch", "float32"),
            text("cpu"),
            b"\x89",
        ),
        s0=b"\0" * 4,
    ),
    "sparse indices far outside the shape": lambda: pt(
        called(
            "torch._utils",
            "_rebuild_sparse_tensor",
            called("torch.serialization", "_get_layout", text("torch.sparse_coo")),
            tuple_(
                tensor(storage("0", 1, "LongStorage"), [1, 1], [1, 1]),
                tensor(storage("1", 1), [1], [1]),
                called("torch", "Size", tuple_(number(4))),
            ),
        ),
        s0=(10**12).to_bytes(8, "little"),
        s1=b"\0" * 4,
    ),
    "a key of a storage that ends early for some": lambda: pt(tensor(storage("0\0x", 1), [1], [1]), s0=b"\0" * 4),
    "a storage of a graphics card": lambda: pt(
        tensor(
            tuple_(text("storage"), global_("torch.cuda", "FloatStorage"), text("0"), text("cpu"), number(1)) + b"Q",
            [1],
            [1],
        ),
        s0=b"\0" * 4,
    ),
    "a text of 2 ** 32 bytes": lambda: pt(b"X" + b"\xff\xff\xff\xff"),
    "a number of 2 ** 31 bytes": lambda: pt(b"\x8b" + b"\xff\xff\xff\x7f"),
    "an opcode that no pickler writes": lambda: pt(number(1) + b"2\x86"),
    "a record compressed 1000:1": lambda: with_record(Record("data/0", b"\0" * 10**8, deflated=True), 10**8),
    "records in one place": lambda: archive(
        Record(
            "data.pkl", pickled(b"](" + b"".join(tensor(storage(f"{i}", 10**6), [1], [1]) for i in range(9)) + b"e")
        ),
        Record("data/0", b"\0" * 4 * 10**6),
        *(Record(f"data/{i}", b"\0" * 4 * 10**6, at=1) for i in range(1, 9)),
        Record("version", b"3\n"),
    ),
    "a record of 4 TB": lambda: with_record(Record("data/0", b"\0" * 400, claims_size=4 * 10**12), 4 * 10**12),
    "a record of 3 GB": lambda: with_record(Record("data/0", b"\0" * 400, claims_size=3 * 10**9), 3 * 10**9),
    "a record twice": lambda: archive(
        Record("data.pkl", pickled(number(1))), Record("data.pkl", pickled(number(2))), Record("version", b"3\n")
    ),
    "a record elsewhere": lambda: archive(
        Record("data.pkl", pickled(number(1))), Record("version", b"3\n"), Record("x", b"", top="other/")
    ),
    "a directory of more than there is": lambda: archive(Record("data.pkl", pickled(number(1))), count=60_000),
    "bytes behind the end": lambda: pt(number(1)) + b"\0" * 100,
    "a cut": lambda: pt(number(1))[:-30],
    "nothing": lambda: b"",
    "a pickle without an archive": lambda: pickled(dict_of((text("a"), number(1)))),
}
"""What a ``.pt`` may hold, by what is wrong with it."""


def _marked(mark: str, data: bytes) -> bytes:
    """Return a ``.pt`` file with a value in the marked form, over what ``data`` pushes."""
    facts = {"set": "items", "frozenset": "items", "tuple": "items", "deque": "items"}
    return pt(
        dict_of(
            (text("__ckptmirror__"), text(mark)),
            (text(facts.get(mark, "data")), data),
            (text("dtype"), text("|u1")),
            (text("shape"), b"](" + number(10**9) + b"e"),
            (text("offsets"), b"](" + number(0) + b"e"),
            (text("order"), b"](" + number(0) + b"e"),
            (text("maxlen"), b"N"),
        ),
        s0=b"\0" * 4,
    )


def resealed(document: dict[str, Any]) -> bytes:
    """Return a meta with whatever is in it, and the checksum that belongs to it."""
    fields = {key: value for key, value in document.items() if key not in ("checksum", "format", "version")}
    return seal(document["format"], fields)


def with_record(record: Record, size_bytes: int) -> bytes:
    """Return an archive with one tensor over one record."""
    count = size_bytes // 4
    body = pickled(tensor(storage("0", count), [count], [1]))
    return archive(Record("data.pkl", body), Record("byteorder", b"little"), record, Record("version", b"3\n"))
