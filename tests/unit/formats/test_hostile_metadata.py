"""A ``.metadata`` of somebody who means harm, and tensors in a DCP directory that are none."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.formats.dcp_metadata import loads_metadata
from ckptmirror.formats.dcp_read import read_directory_metadata, read_full_directory
from tests.kit.formats import make_state, save
from tests.kit.hostile_files import (
    Record,
    called,
    dict_of,
    doubling_tuples,
    get,
    global_,
    nested_lists,
    nested_tuples,
    number,
    pt,
    put,
    storage,
    tensor,
    text,
    tuple_,
    with_record,
)

_HERE = "torch.distributed.checkpoint.metadata"


def made(name: str, state: bytes) -> bytes:
    """Push an object of DCP's with a state."""
    return global_(_HERE, name) + b")\x81" + state + b"b"


def _index_of_indices(times: int) -> bytes:
    """Push a dict with a key that holds another twice, and so on; each is filled when the one above has it already."""
    empty = global_(_HERE, "MetadataIndex") + b")\x81"
    links = b"".join(
        get(i) + dict_of((text("fqn"), tuple_(empty + put(i + 1), get(i + 1)))) + b"b" for i in range(times)
    )
    return b"(" + empty + put(0) + links + b"t" + put(times + 1) + dict_of((get(0), number(1))) + b"\x86"


def _size(*numbers: int) -> bytes:
    return called("torch", "Size", tuple_(*map(number, numbers)))


def _metadata_of(entries: bytes, paths: bytes = b"N", stored: bytes = b"}") -> bytes:
    fields = (text("state_dict_metadata"), entries), (text("planner_data"), paths), (text("storage_data"), stored)
    return made("Metadata", dict_of(*fields))


def _entry_of(chunks: bytes) -> bytes:
    properties = global_(_HERE, "TensorProperties") + b")\x81" + tuple_(global_("torch", "float32"), b"N" * 4) + b"b"
    fields = (text("properties"), properties), (text("size"), _size(0)), (text("chunks"), b"](" + chunks + b"e")
    return made("TensorStorageMetadata", dict_of(*fields))


def _shared_by(names: int, first: bytes) -> bytes:
    """Push a dict in which ``names`` keys share what ``first`` pushes."""
    return dict_of((text("first"), first + put(99)), *((text(f"{i}"), get(99)) for i in range(names)))


_PIECE = made("ChunkStorageMetadata", dict_of((text("offsets"), _size(0)), (text("sizes"), _size(0))))
_FAR_MORE = "pieces, and stores 0"
_PRIME = 2**61 - 1  # its multiples have the hash 0


def _index_at(first: int, *, of: int = 4) -> bytes:
    """Push the place of a piece; all have one hash."""
    offset = _size(*(first // of**digit % of * _PRIME for digit in range(6)))
    return made("MetadataIndex", dict_of((text("fqn"), text("w")), (text("offset"), offset)))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a command": (called("posix", "system", text("touch owned")), "not on the allow-list"),
    "a text of 2 ** 60 bytes": (b"\x8d" + struct.pack("<Q", 1 << 60), "the opcode 0x8d"),
    "bytes of 2 ** 60": (b"\x8e" + struct.pack("<Q", 1 << 60), "the opcode 0x8e"),
    "a bytearray of 2 ** 38": (b"\x96" + struct.pack("<Q", 1 << 38), "the opcode 0x96"),
    "a frame of 2 ** 60 bytes": (b"\x95" + struct.pack("<Q", 1 << 60), "a frame of"),
    "a number of 2 ** 31 bytes": (b"\x8b" + b"\xff\xff\xff\x7f", "the opcode 0x"),
    "a key that is hashed for hours": (dict_of((doubling_tuples(60), number(1))), "a key that holds too much"),
    "a key that is hashed 300,000 deep": (dict_of((nested_tuples(300_000), number(1))), "a key that holds too much"),
    "an index that is hashed for hours": (
        dict_of((made("MetadataIndex", dict_of((text("fqn"), doubling_tuples(60)))), number(1))),
        "not the metadata",
    ),
    "an index of indices": (_index_of_indices(60), "not the metadata"),
    "lists 100,000 deep": (nested_lists(100_000), "not the metadata"),
    "lists 100,000 deep as the paths": (_metadata_of(b"}", nested_lists(100_000)), "nested more than"),
    "a duplicate of the stack": (number(1) + b"2\x86", "the opcode 0x"),
    "an extension": (b"\x82\x01", "the opcode 0x"),
    "a persistent id": (text("x") + b"Q", "persistent object"),
    "lists 100,000 deep behind two MiB": (
        _metadata_of(b"}", tuple_(text("a" * (2 << 20)), nested_lists(100_000))),
        "nested more than",
    ),
    "another opcode behind two MiB": (tuple_(text("a" * (2 << 20)), number(1) + b"2"), "the opcode 0x32"),
    "a state for a memory format": (
        called(_HERE, "_MEM_FORMAT_ENCODING", number(0)) + dict_of((text("_value_"), number(9))) + b"b",
        "not the metadata",
    ),
    "a state for another member of an enumeration": (
        called("builtins", "getattr", global_(_HERE, "_MEM_FORMAT_ENCODING"), text("TORCH_CHANNELS_LAST"))
        + dict_of((text("_value_"), number(9)))
        + b"b",
        "not the metadata",
    ),
    "a layout that is none": (called("torch.serialization", "_get_layout", text("torch.load")), "not the metadata"),
    "pieces shared by entries": (
        _metadata_of(_shared_by(600, _entry_of(_PIECE + put(98) + get(98) * 25_000))),
        _FAR_MORE,
    ),
    "a path shared by entries": (
        _metadata_of(_shared_by(20_000, _entry_of(b"")), _shared_by(20_000, tuple_(text("model") * 300))),
        "unfold to far more than",
    ),
    "places of one hash": (
        _metadata_of(b"}", stored=dict_of(*((_index_at(i), b"N") for i in range(2000)))),
        "different keys of one hash",
    ),
    "an attribute": (called("builtins", "getattr", global_("torch", "Size"), text("numel")), "not the metadata"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_metadata_is_refused_before_it_is_unpickled(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    body, why = HOSTILE[what]
    with pytest.raises(IntegrityError, match=why):
        loads_metadata(b"\x80\x04" + body + b".", "here")
    assert not (tmp_path / "owned").exists()
    assert [one.value for one in _MEM_FORMAT_ENCODING] == [0, 1, 2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An honest one."""
    save("dcp", tmp_path, make_state())
    return tmp_path / "dcp_000200"


def _metadata(directory: Path) -> Metadata:
    found = pickle.loads((directory / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def _write(directory: Path, metadata: Metadata) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_shape_whose_product_takes_hours_is_refused(directory: Path) -> None:
    metadata = _metadata(directory)
    entry: Any = metadata.state_dict_metadata["model.inner.weight"]
    for shape in ((3,) * 200_000, (1 << 2000, 0), (1 << 63,)):
        entry.size = shape
        _write(directory, metadata)
        with pytest.raises(IntegrityError, match="no valid size"):
            read_directory_metadata(directory)


def test_a_tensor_of_a_petabyte_in_a_file_of_ten_bytes_is_refused(directory: Path) -> None:
    metadata = _metadata(directory)
    entry: Any = metadata.state_dict_metadata["model.inner.weight"]
    entry.size = torch.Size([10**15])
    entry.chunks[0].sizes = torch.Size([10**15])
    entry.chunks[0].offsets = torch.Size([0])
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.inner.weight")
    metadata.storage_data[MetadataIndex(index.fqn, torch.Size([0]))] = metadata.storage_data.pop(index)
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match="too short"):
        read_full_directory(directory)
    next(iter(metadata.storage_data.values())).length = 10**18
    for info in metadata.storage_data.values():
        info.length = 10**18
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match=r"ends at byte|overlaps"):
        read_full_directory(directory)


def test_a_place_in_the_state_that_is_100000_names_deep_is_refused(directory: Path) -> None:
    metadata = _metadata(directory)
    metadata.planner_data["model.inner.weight"] = ("model",) * 100_000
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match="deep"):
        read_full_directory(directory)


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (pt(called("builtins", "bytearray", number(10**9)), sx=b"\0" * 1000), "bytearray of a int"),
        (pt(tensor(storage("0", 100), [10**9], [1]), s0=b"\0" * 400, sx=b"\0" * 1000), "ends at value"),
        (with_record(Record("data/0", b"\0" * 10**6, deflated=True), 10**6), "compressed"),
        (_saved(torch.eye(3).to_sparse()), "layout torch.sparse_coo"),
        (b"\x80\x02" + called("posix", "system", text("touch owned")) + b".", "not an archive"),
    ],
    ids=["bytearray", "shape", "bomb", "sparse", "pickle"],
)
def test_a_tensor_of_a_dcp_directory_is_checked_before_torch_loads_it(
    what: bytes, why: str, directory: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(directory.parent)
    metadata = _metadata(directory)
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.inner.weight")
    info = metadata.storage_data[index]
    path = directory / info.relative_path
    what = what.ljust(500, b"\0")  # as long as the tensor at least
    info.offset, info.length = path.stat().st_size, len(what)
    path.write_bytes(path.read_bytes() + what)
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match=why):
        read_full_directory(directory)
    assert not (directory.parent / "owned").exists()


def test_unsafe_is_told_apart_from_broken() -> None:
    with pytest.raises(UnsafePickle):
        loads_metadata(b"\x80\x04" + called("posix", "system", number(1)) + b".", "here")
    with pytest.raises(IntegrityError) as caught:
        loads_metadata(b"\x80\x04(", "here")
    assert type(caught.value) is IntegrityError


def test_a_piece_on_the_meta_device_is_refused(directory: Path) -> None:
    metadata = _metadata(directory)
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.inner.weight")
    entry: Any = metadata.state_dict_metadata[index.fqn]
    info = metadata.storage_data[index]
    path = directory / info.relative_path
    whole = path.read_bytes()
    saved = _saved(torch.empty(entry.size, dtype=entry.properties.dtype, device="meta"))
    info.offset, info.length = len(whole), len(saved)
    path.write_bytes(whole + saved)
    _write(directory, metadata)
    with pytest.raises(IntegrityError, match="that no DCP directory does"):
        read_full_directory(directory)
