"""Which bytes of a state's storages are copied, and where they go in the host arena.

Rules:
* Bytes that several tensors see (tied weights, views of one storage) are copied once and stay shared.
* A tensor that sees only a small part of the range that it spans (a column of a wide matrix) is copied separately and
  contiguously, so that a tiny view never copies a huge storage. It then no longer shares bytes with other tensors.
* Every piece gets its own storage, so that writing one tensor to a file never writes its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT_BYTES", "Piece", "View", "bytes_of", "place", "plan_pieces", "view_of"]

ALIGNMENT_BYTES = 4096  # of pieces of a page and more, so that files can be written from them by direct I/O
_SMALL_ALIGNMENT_BYTES = 64
_ITEM_ALIGNMENT_BYTES = 16  # the largest item: complex128
_MIN_COVERAGE = 0.5


class View:
    """One tensor to copy.

    Attributes:
        key: The caller's name for it.
        tensor: Plain, strided, detached, not empty.
        storage: Its storage.
        begin: First byte of the storage that it sees.
        end: One past the last byte that it sees.
        seen_bytes: How many different bytes it sees (a dimension with stride 0 repeats the same bytes).
    """

    __slots__ = ("begin", "end", "key", "seen_bytes", "storage", "tensor")

    def __init__(self, key: int, tensor: torch.Tensor) -> None:
        self.key, self.tensor = key, tensor
        self.storage = tensor.untyped_storage()
        item_bytes = tensor.element_size()
        self.begin = int(tensor.storage_offset()) * item_bytes
        if tensor.is_contiguous():
            self.seen_bytes = tensor.numel() * item_bytes
            self.end = self.begin + self.seen_bytes
            return
        last, seen = 0, 1
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (n - 1) * stride
            seen *= n if stride else 1
        self.end = self.begin + (last + 1) * item_bytes
        self.seen_bytes = seen * item_bytes

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for two views of the same elements of one storage."""
        tensor = self.tensor
        return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


@dataclass(slots=True)
class Piece:
    """A range of bytes of the arena.

    Attributes:
        views: The tensors that it holds.
        begin: If ``whole``, its first byte in the source storage.
        size_bytes: Its length.
        whole: Whether it is copied as a range of bytes of the storage; otherwise ``views`` are all one tensor, which is
            copied as a tensor.
        block: Number of its block in the arena; ``offset`` is its position in the block.
    """

    views: list[View]
    begin: int
    size_bytes: int
    whole: bool
    block: int = 0
    offset: int = 0

    @property
    def source(self) -> torch.UntypedStorage:
        """The storage to copy from: the longest, if several begin at one address (they may over NumPy arrays)."""
        if len(self.views) == 1:
            return self.views[0].storage
        return max((view.storage for view in self.views), key=lambda storage: storage.nbytes())


def plan_pieces(views: Iterable[View]) -> list[Piece]:
    """Group ``views`` (none of them empty) into pieces, in a stable order."""
    storages: dict[tuple[torch.device, int], list[View]] = {}
    for view in views:
        storages.setdefault((view.tensor.device, view.storage.data_ptr()), []).append(view)
    pieces: list[Piece] = []
    for group in storages.values():
        if len(group) == 1:  # the usual case: with thousands of small tensors, the work for each one is what costs
            pieces.extend(_pieces_of(group))
            continue
        for cluster in _clusters(group):
            pieces.extend(_pieces_of(cluster))
    return pieces


def _clusters(views: list[View]) -> list[list[View]]:
    """Split the views of one storage into sets whose byte ranges overlap."""
    clusters: list[list[View]] = []
    end = -1
    for view in sorted(views, key=lambda v: (v.begin, v.end)):
        if view.begin < end:
            clusters[-1].append(view)
        else:
            clusters.append([view])
        end = max(end, view.end)
    return clusters


def _pieces_of(cluster: list[View]) -> list[Piece]:
    view = cluster[0]
    if len(cluster) == 1 and view.seen_bytes == view.end - view.begin and not _is_lazy(view.tensor):
        return [Piece(cluster, view.begin, view.seen_bytes, whole=True)]
    forms: dict[tuple[object, ...], list[View]] = {}
    for view in cluster:
        forms.setdefault(view.form, []).append(view)
    begin, end = min(v.begin for v in cluster), max(v.end for v in cluster)
    seen = sum(same[0].seen_bytes for same in forms.values())
    lazy = any(_is_lazy(v.tensor) for v in cluster)
    if seen >= _MIN_COVERAGE * (end - begin) and not lazy:
        if any((v.begin - begin) % v.tensor.element_size() for v in cluster):
            begin -= begin % _ITEM_ALIGNMENT_BYTES  # items of different sizes in one storage
        return [Piece(cluster, begin, end - begin, whole=True)]
    return [
        Piece(same, 0, same[0].tensor.numel() * same[0].tensor.element_size(), whole=False) for same in forms.values()
    ]


def _is_lazy(tensor: torch.Tensor) -> bool:
    # The conjugate and negative bits are not in the bytes: copy_ resolves them.
    return tensor.is_neg() or tensor.is_conj()


def place(pieces: Sequence[Piece], *, block_limit_bytes: int | None) -> list[int]:
    """Assign every piece its place and return the size of each block of the arena.

    Args:
        pieces: Their ``block`` and ``offset`` are set.
        block_limit_bytes: Largest size of a block, unless a single piece is larger. None: one block.
    """
    sizes = [0]
    for piece in pieces:
        unit = ALIGNMENT_BYTES if piece.size_bytes >= ALIGNMENT_BYTES else _SMALL_ALIGNMENT_BYTES
        room = -(-piece.size_bytes // unit) * unit
        if block_limit_bytes is not None and sizes[-1] and sizes[-1] + room > block_limit_bytes:
            sizes.append(0)
        sizes[-1] = -(-sizes[-1] // unit) * unit
        piece.block, piece.offset = len(sizes) - 1, sizes[-1]
        sizes[-1] += room
    return sizes


def bytes_of(storage: torch.UntypedStorage, begin: int, size_bytes: int) -> torch.Tensor:
    """Return a part of ``storage`` as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (size_bytes,), (1,))


def view_of(storage: torch.UntypedStorage, piece: Piece, source: torch.Tensor) -> torch.Tensor:
    """Return the host tensor of ``source``, a view of ``piece``, over the storage that its bytes are copied to."""
    host = torch.empty(0, dtype=source.dtype, device="cpu")
    if not piece.whole:
        stride = torch.empty(source.shape, device="meta").stride()
        return host.set_(storage, 0, source.shape, stride)
    offset = (source.storage_offset() * source.element_size() - piece.begin) // source.element_size()
    return host.set_(storage, offset, source.shape, source.stride())
