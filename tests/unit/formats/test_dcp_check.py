"""Everything that a ``.metadata`` may say and that is not so is refused by itself, with the entry's name."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.regions import Region, are_apart
from ckptmirror.formats.dcp_metadata import check_entries, check_ranges, loads_metadata

FIRST, SECOND, NOTE = MetadataIndex("w", [0, 0]), MetadataIndex("w", [2, 0]), MetadataIndex("note")
NOTHING = _StorageInfo("a.distcp", 0, 0)
SIZES_BYTES = {"a.distcp": 32, "b.distcp": 37}


def honest() -> Metadata:
    """Two pieces of a tensor of four by four, and a value, in two files."""
    pieces = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 4])) for row in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4, 4]), pieces)
    return Metadata(
        {"w": tensor, "note": BytesStorageMetadata()},
        storage_data={
            FIRST: _StorageInfo("a.distcp", 0, 32),
            SECOND: _StorageInfo("b.distcp", 0, 32),
            NOTE: _StorageInfo("b.distcp", 32, 5),
        },
    )


def entry(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"]).update(fields)


def piece(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"].chunks[0]).update(fields)


def info(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.storage_data[FIRST]).update(fields)


def described_as(value: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.state_dict_metadata.update(w=value)


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a place of nothing": (lambda m: m.storage_data.update({MetadataIndex("x"): NOTHING}), "stores something"),
    "a value that was not written": (lambda m: m.storage_data.pop(NOTE), "note was planned but not written"),
    "a piece that was not written": (
        lambda m: m.storage_data.pop(SECOND),
        r"w at \(2, 0\) was planned",
    ),
    "a path outside": (info(relative_path="../x"), "not a file name inside the directory"),
    "the metadata itself": (info(relative_path=".metadata"), "not a file name inside the directory"),
    "a piece in another dimension": (piece(offsets=torch.Size([0])), "outside its shape"),
    "a piece beyond the tensor": (piece(offsets=torch.Size([0, 1])), "outside its shape"),
    "a piece that is too short": (info(length=31), "too short"),
    "pieces that are not the whole": (entry(size=torch.Size([5, 4])), "hold 16 of its 20 values"),
    "a file that is not there": (info(relative_path="c.distcp"), "the file c.distcp, which holds w, is missing"),
    "two in one place": (info(relative_path="b.distcp", offset=1), "overlaps another entry in b.distcp"),
    "a place past the end": (info(offset=1), "ends at byte 33 of a.distcp, which has 32"),
}
OF_ANOTHER_TYPE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no entries": (lambda m: setattr(m, "state_dict_metadata", None), "no table of entries"),
    "no places": (lambda m: setattr(m, "storage_data", [1]), "no table of entries"),
    "a place that is none": (lambda m: m.storage_data.update({MetadataIndex("x"): 1}), "a int in place of a _Stor"),
    "a place under no index": (lambda m: m.storage_data.update(w=NOTHING), "a str in place of a MetadataIndex"),
    "a name that is a number": (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "without a name"),
    "an entry of another kind": (described_as(7), "a int in place of a TensorStorageMetadata"),
    "a path that is none": (info(relative_path=None), "w is at None"),
    "an offset below nothing": (info(offset=-1), "offset -1"),
    "a length that is no number": (info(length=math.inf), "length inf"),
    "a transformed file": (info(transform_descriptors=["zstd"]), "w was transformed"),
    "a size below nothing": (entry(size=torch.Size([-1, 4])), "w with no valid size"),
    "a size that is a list": (entry(size=[4, 4]), "w with no valid size"),
    "a size in 65 dimensions": (entry(size=torch.Size([1] * 65)), "w with no valid size"),
    "pieces that are none": (entry(chunks=None), "w without pieces"),
    "no dtype": (entry(properties=None), "w without a dtype"),
    "a piece without a size": (piece(sizes=None), "w with no valid size"),
}


def check(metadata: Metadata) -> None:
    check_entries(metadata, "here")
    check_ranges(metadata, SIZES_BYTES, "here")


@pytest.mark.parametrize("what", LIES)
def test_what_is_not_so_is_refused(what: str) -> None:
    change, why = LIES[what]
    metadata = honest()
    change(metadata)
    with pytest.raises(IntegrityError, match=f"here.*{why}"):
        check(metadata)


@pytest.mark.parametrize("what", OF_ANOTHER_TYPE)
def test_what_is_of_another_type_is_refused_as_it_is_read(what: str) -> None:
    change, why = OF_ANOTHER_TYPE[what]
    metadata = honest()
    change(metadata)
    with pytest.raises(IntegrityError, match=f"here.*{why}"):
        loads_metadata(pickle.dumps(metadata), "here")


def test_what_they_were_made_of_is_let_through() -> None:
    check(honest())
    check(loads_metadata(pickle.dumps(honest()), "here"))


def test_a_file_that_nothing_refers_to_is_refused() -> None:
    with pytest.raises(IntegrityError, match=r"nothing refers to the file c\.distcp"):
        check_ranges(honest(), {**SIZES_BYTES, "c.distcp": 1}, "here")


def test_a_file_that_lies_elsewhere_is_not_missed() -> None:
    check_ranges(honest(), {"b.distcp": 37}, "here", expected=lambda name: name != "a.distcp")


def in_pieces(size: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Metadata:
    """One tensor in pieces of (offsets, sizes), each with a file of its own."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    tensors = {"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)}
    stored = {
        MetadataIndex("w", torch.Size(offsets)): _StorageInfo(f"{number}.distcp", 0, 4 * math.prod(sizes))
        for number, (offsets, sizes) in enumerate(boxes)
    }
    return Metadata(tensors, storage_data=stored)


@pytest.mark.parametrize(
    "boxes",
    [
        (((0, 0), (2, 4)), ((1, 0), (2, 4))),  # rows 1 twice, row 3 never
        (((0, 0), (4, 2)), ((0, 1), (4, 2))),
        (((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((1, 2), (2, 2))),
    ],
)
def test_pieces_that_overlap_and_leave_gaps_are_refused_although_they_have_all_the_values(boxes: Any) -> None:
    with pytest.raises(IntegrityError, match="the pieces of w overlap"):
        check_entries(in_pieces((4, 4), *boxes), "here")


def test_pieces_in_a_grid_of_uneven_rows_and_columns_are_let_through() -> None:
    rows, columns = ((0, 3), (3, 3), (6, 1), (7, 0)), ((0, 4), (4, 4), (8, 2))
    check_entries(in_pieces((7, 10), *(((r, c), (n, m)) for r, n in rows[:3] for c, m in columns)), "here")
    check_entries(in_pieces((7,), *(((r,), (n,)) for r, n in rows)), "here")  # one rank has nothing of it
    many = tuple(((row, 0), (1, 8)) for row in range(20_000))
    check_entries(in_pieces((20_000, 8), *many), "here")


def test_the_pieces_of_a_tensor_cost_no_more_than_their_number() -> None:
    """Two pieces in ten dimensions, apart, have a grid of 59,049 cells."""
    pieces = ((0,) * 10, (2,) * 10), ((3, *(1,) * 9), (2,) * 10)
    assert not are_apart([Region((5,) * 10, offsets, sizes) for offsets, sizes in pieces])
