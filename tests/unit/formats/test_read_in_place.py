"""Pieces that are read straight into the tensors that they are for, and those that cannot be."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.shards import fill_all, piece_of, region_of, stored
from ckptmirror.sums.digests import byte_view
from ckptmirror.untrusted.tensor_files import load_part
from tests.kit.formats import load, make_state, save

NAME = "model.inner.weight"


def as_file(tmp_path: Path, value: Any) -> tuple[int, int]:
    stream = io.BytesIO()
    torch.save(value, stream)
    path = tmp_path / "piece"
    path.write_bytes(stream.getvalue())
    return os.open(path, os.O_RDONLY), len(stream.getvalue())


def test_a_storage_of_the_size_is_read_into_the_memory_that_is_given(tmp_path: Path) -> None:
    value, target = torch.rand(3, 4), torch.zeros(3, 4)
    descriptor, size_bytes = as_file(tmp_path, value)
    read = load_part(descriptor, 0, size_bytes, "piece", into=byte_view(target))
    assert read.data_ptr() == target.data_ptr()
    assert target.equal(value)
    os.close(descriptor)


@pytest.mark.parametrize("numbers", [1, 300, 500, 700, 900, 1_000, 100_000])
def test_all_but_the_values_of_one_tensor_takes_two_reads(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, value, target = io.BytesIO(), torch.rand(numbers), torch.zeros(numbers)
    torch.save(value, stream)
    (path := tmp_path / "pieces").write_bytes(b"before" + stream.getvalue() + b"after")
    reads = []
    monkeypatch.setattr(os, "pread", lambda *of, pread=os.pread: reads.append(of) or pread(*of))
    descriptor = os.open(path, os.O_RDONLY)
    load_part(descriptor, len(b"before"), len(stream.getvalue()), "piece", into=byte_view(target))
    os.close(descriptor)
    assert target.equal(value)
    assert len(reads) <= 2


def test_of_two_storages_of_the_size_only_the_first_is(tmp_path: Path) -> None:
    values, target = [torch.rand(5), torch.rand(5)], torch.zeros(5)
    descriptor, size_bytes = as_file(tmp_path, values)
    read = load_part(descriptor, 0, size_bytes, "piece", into=byte_view(target))
    assert [one.tolist() for one in read] == [one.tolist() for one in values]
    assert read[1].data_ptr() != target.data_ptr()
    os.close(descriptor)


def _transposed(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous().t()


def _in_a_larger_storage(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(values[:1]), values])[1:]


def _negated(values: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-values)


@pytest.mark.parametrize("layout", [torch.Tensor.clone, _transposed, _in_a_larger_storage, _negated])
def test_a_piece_of_any_layout_comes_back(layout: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    meta = save("dcp", tmp_path, make_state())
    directory = tmp_path / "dcp_000200"
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == NAME)
    values = torch.rand(metadata.state_dict_metadata[NAME].size)
    stream = io.BytesIO()
    torch.save(layout(values), stream)
    info = metadata.storage_data[index]
    path = directory / info.relative_path
    info.offset, info.length = path.stat().st_size, len(stream.getvalue())
    path.write_bytes(path.read_bytes() + stream.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    state = make_state(seed=1)
    before = state.model.inner.weight.data_ptr()
    load("dcp", tmp_path, meta, state)
    assert state.model.inner.weight.equal(values)
    assert state.model.inner.weight.data_ptr() == before


def test_many_tensors_are_filled_whatever_the_mode_of_the_caller() -> None:
    with torch.inference_mode():
        saved = [torch.rand(10, number) for number in range(50)]
        live = [torch.zeros(10, number) for number in range(50)]
        fill_all([(now, stored(one).pieces, "x") for now, one in zip(live, saved, strict=True)])
    assert all(now.equal(one) for now, one in zip(live, saved, strict=True))


def test_a_tensor_that_lacks_a_piece_is_named() -> None:
    half = piece_of(torch.rand(4))
    short = type(half)(region_of(torch.rand(8)), torch.rand(8))
    with pytest.raises(IntegrityError, match="second: a saved piece is of shape"):
        fill_all([(torch.zeros(4), stored(half).pieces, "first"), (torch.zeros(4), stored(short).pieces, "second")])
