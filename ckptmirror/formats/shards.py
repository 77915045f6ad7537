"""Pieces of sharded tensors: cuts them out on save, and joins them for any number of ranks on load.

Rules:
* A piece is a plain tensor with the shape of the whole and its own offsets: reading it needs no process group.
* Nothing here talks to other ranks.
* A region is filled completely, or loading fails and says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import changed
from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.regions import Region, are_apart
from ckptmirror.formats.tensor_bytes import has_plain_bytes
from ckptmirror.formats.weights_only_values import MARK, decode
from ckptmirror.local.daemon_pool import cores, run_jobs
from ckptmirror.sums.digests import byte_view

__all__ = [
    "Piece",
    "Stored",
    "cut",
    "fill",
    "fill_all",
    "fills",
    "is_row",
    "local_of",
    "piece_of",
    "read_pieces",
    "region_of",
    "spread",
    "stored",
]


@dataclass(frozen=True)
class Piece:
    """A block of a tensor with its values."""

    region: Region
    data: torch.Tensor


class Pieces(Protocol):
    """Returns the pieces of a saved tensor that have values of a region.

    A piece that is exactly the region may be read into ``into``, the memory that it is for: its data is then ``into``.
    """

    def __call__(self, wanted: Region, into: torch.Tensor | None = None, /) -> Iterable[Piece]:
        """Return them; what is not in memory is read one by one."""
        ...


@dataclass(frozen=True)
class Stored:
    """A saved value that may not be read yet.

    Attributes:
        pieces: Returns the pieces of the tensor that have values of a region.
        read: Returns the value as it was saved.
        shape: The tensor's; None for a value that is not a tensor.
        dtype: The tensor's.
        held: The first piece, if it is in memory.
    """

    pieces: Pieces
    read: Callable[[], Any]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    held: Piece | None = None

    @property
    def is_cut(self) -> bool:
        """Whether only a part of the tensor is here."""
        return self.held is not None and self.held.region.sizes != self.held.region.shape


def stored(value: Any, others: Callable[[], Iterable[Any]] = tuple) -> Stored:
    """Return a value that was read; ``others`` returns the same value in the other ranks' files."""
    if isinstance(value, Stored):
        return value
    if isinstance(value, torch.Tensor):
        value = Piece(region_of(value), value)
    if not isinstance(value, Piece):
        return Stored(lambda _region, _into=None: (), lambda: value)

    def pieces(_region: Region, _into: torch.Tensor | None = None) -> Iterator[Piece]:
        yield value
        yield from (other for other in others() if isinstance(other, Piece))

    return Stored(pieces, lambda: value.data, value.region.shape, value.data.dtype, value)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank holds of ``tensor``: itself, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region_of(tensor: torch.Tensor) -> Region:
    """Return the region of ``tensor`` that this rank holds (all of it, if it is not sharded)."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Region(shape, (0,) * len(shape), shape)
    # The protocol by which DCP asks tensors for their chunks; there is no other public way to the offsets.
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as torch has it
    if len(chunks) != 1:
        raise UsageError(
            f"A rank holds {len(chunks)} pieces of one tensor; only one for each rank can be saved and loaded."
        )
    return Region(shape, tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def piece_of(tensor: torch.Tensor) -> Piece:
    """Return this rank's block of ``tensor``."""
    local = local_of(tensor)
    region = region_of(tensor)
    return Piece(region, local.detach().reshape(region.sizes) if local.numel() == 0 else local.detach())


def cut(tree: Any) -> Any:
    """Return ``tree`` with a marked, plain piece in place of each DTensor."""

    def plain(leaf: Any, _: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        piece = piece_of(leaf)
        shape, offsets = list(piece.region.shape), list(piece.region.offsets)
        return {MARK: "shard", "shape": shape, "offsets": offsets, "data": piece.data}

    return changed(tree, plain)


def read_pieces(tree: Any) -> Any:
    """Decode a tree that :func:`cut` made: shards become :class:`Piece`."""

    def shard(value: dict[str, Any]) -> Piece:
        if value.get(MARK) != "shard":
            raise IntegrityError(
                f"The save holds a marked value {value.get(MARK)!r}, which this version does not know."
            )
        try:
            data = value["data"]
            region = Region(tuple(value["shape"]), tuple(value["offsets"]), tuple(data.shape))
            if not region.is_inside:
                raise ValueError(f"offsets {region.offsets} and sizes {region.sizes} are not inside {region.shape}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"The save holds a broken shard: {error}") from error
        return Piece(region, data)

    return decode(tree, shard)


def fills(values: torch.Tensor) -> bool:
    """Whether a saved tensor has values of its own, in rows, that can be copied into another."""
    return values.layout == torch.strided and not values.is_meta


def fill(target: torch.Tensor, region: Region, pieces: Iterable[Piece], name: str) -> None:
    """Copy what ``pieces`` hold of ``region`` into ``target``, a plain tensor of the region's sizes.

    Pieces are taken only until the region is full, so lazy ones are read only if they are needed.

    Raises:
        IntegrityError: The pieces do not cover the region, or overlap; names the tensor.
    """
    wanted = math.prod(region.sizes)
    done: set[Region] = set()
    filled = 0
    source = iter(pieces)
    while filled < wanted:
        piece = next(source, None)
        if piece is None:
            raise IntegrityError(f"{name}: the saved pieces hold {filled} of the {wanted} values that this rank needs.")
        if piece.region.shape != region.shape:
            raise IntegrityError(f"{name}: a saved piece is of shape {piece.region.shape}, not {region.shape}.")
        if piece.region not in done:
            done.add(piece.region)
            filled += _copy_overlap(target, region, piece)
    if not are_apart(done):
        raise IntegrityError(f"{name}: the saved pieces overlap, or lie in no grid that can be checked.")


def fill_all(wanted: Sequence[tuple[torch.Tensor, Pieces, str]]) -> None:
    """Fill tensors as :func:`fill` does, several at a time: neither a read nor a copy needs the interpreter's lock."""
    jobs = [(local_of(tensor), region_of(tensor), pieces, name) for tensor, pieces, name in wanted]
    is_inference = torch.is_inference_mode_enabled()  # each thread has its own mode

    def fill_one(job: tuple[torch.Tensor, Region, Pieces, str]) -> None:
        target, region, pieces, name = job
        with torch.inference_mode(is_inference):
            fill(target, region, pieces(region, target), name)

    run_jobs(jobs, fill_one, name="ckptmirror-fill", workers=cores())


def _copy_overlap(target: torch.Tensor, region: Region, piece: Piece) -> int:
    common = region.overlap(piece.region)
    if common is None:
        return 0
    source = piece.data
    if piece.region == region and target.shape == source.shape and is_row(target) and is_row(source, target.dtype):
        if source.data_ptr() != target.data_ptr():  # else it was read into the target
            byte_view(target)[:] = byte_view(source)  # on a busy machine torch's threads wait for one another
        torch.autograd.graph.increment_version(target)
    else:
        with torch.no_grad():
            target[common.index_in(region)].copy_(source[common.index_in(piece.region)])
    return math.prod(common.sizes)


def is_row(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor (of ``dtype``) is nothing but its values in a row, in host memory that may be written."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_plain_bytes(tensor)
    is_here = tensor.device.type == "cpu" and not tensor.is_inference()
    is_as_stored = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and is_here and is_as_stored and dtype in (None, tensor.dtype)


def spread(value: Any, others: Callable[[], Iterator[Any]], like: torch.Tensor | None, name: str) -> Any:
    """Return a saved value as a live one: full, or sharded like ``like``.

    Args:
        value: A :class:`Piece`, a plain tensor, or a plain value (returned as it is), from this rank's file.
        others: The same value in the other ranks' files, read only if needed.
        like: The live tensor whose shards to follow; used if it has the same shape.
        name: The value's name, for messages.
    """
    if not isinstance(value, (torch.Tensor, Piece)) or isinstance(value, DTensor):
        return value
    item = stored(value, others)
    if isinstance(like, DTensor) and tuple(like.shape) == item.shape:
        region = region_of(like)
        local = torch.empty(region.sizes, dtype=item.dtype, device=like.to_local().device)
        fill(local, region, item.pieces(region), name)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    if isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(value.region.shape, dtype=item.dtype, device="cpu")
    fill(whole, region_of(whole), item.pieces(region_of(whole)), name)
    return whole
