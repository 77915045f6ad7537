"""Copies a rank's state into kept host memory: the only part of a save that blocks training.

Rules:
* After ``copy`` returns, nothing that the training does to the source shows in the copy.
* Tensors that share bytes still do; plain containers keep their kind and stay shared where they were; other values are
  copied unless they are immutable.
* What comes back never requires grad and lies on the CPU. A DTensor comes back as a DTensor over host memory, with the
  same mesh, placements and shape; a parameter as a plain tensor.
* A tensor that has no plain bytes (meta, quantised, sparse, freed) is refused, with its path in the state.
* The memory is lent: ``copy`` fails while the lease before is out, so nobody's bytes change under a background save.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, defaultdict
from enum import Enum
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import Any

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.host_arena import PINNED_BLOCK_BYTES, Arena
from ckptmirror.ranks.host_layout import Piece, View, place, plan_pieces
from ckptmirror.ranks.host_transfer import copy_all

__all__ = ["HostCopier", "Lease"]

_IMMUTABLE = (
    type(None), bool, int, float, complex, str, bytes, range, frozenset, Enum,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    type, FunctionType, BuiltinFunctionType,
)  # fmt: skip
_COPIED_AS_THEY_ARE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
)  # copy_ keeps every bit of these; everything else is copied as bytes


class Lease:
    """One copy, in memory that belongs to the copier.

    Attributes:
        tree: The same structure as the source, with host tensors. Not readable after ``release``.
        size_bytes: Bytes of the tensors that were copied.
    """

    def __init__(self, copier: HostCopier, tree: Any, size_bytes: int) -> None:
        self._copier: HostCopier | None = copier
        self._tree = tree
        self.size_bytes = size_bytes

    @property
    def tree(self) -> Any:
        """The copy."""
        if self._copier is None:
            raise UsageError("this host copy was released: its memory may hold the next one")
        return self._tree

    def release(self) -> None:
        """Give the memory back: the next ``copy`` may write it. Any thread may call this, more than once."""
        copier, self._copier, self._tree = self._copier, None, None
        if copier is not None:
            copier._take_back(self)

    def __enter__(self) -> Lease:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()


class HostCopier:
    """Copies states, one at a time, into memory that it keeps."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._copying = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._arena.size_bytes

    def copy(self, tree: Any) -> Lease:
        """Copy ``tree``: nested dicts, lists, tuples and dataclasses of tensors and plain values.

        Returns:
            The lease of the copy; release it when it has been written.

        Raises:
            UsageError: The last lease was not released, or the tree holds something that cannot be copied.
        """
        self._begin()
        lease = None
        try:
            with torch.no_grad():
                walk = _Walk()
                shape = walk.outline(tree, "state")
                size_bytes = self._fill(walk)
                lease = Lease(self, walk.rebuild(shape), size_bytes)
        finally:
            with self._lock:
                self._copying, self._lease = False, lease
        return lease

    def reserve(self, tree: Any, *, more_bytes: int = 0) -> int:
        """Take the memory that ``copy(tree)`` will need, and fault it in, without copying. Returns ``nbytes``.

        Args:
            tree: What will be copied.
            more_bytes: Room for what is not in ``tree`` yet.
        """
        self._begin()
        try:
            with torch.no_grad():
                walk = _Walk()
                walk.outline(tree, "state")
            if self._place(walk, plan_pieces(walk.views), more_bytes):
                self._arena.populate()
        finally:
            with self._lock:
                self._copying = False
        return self.nbytes

    def release(self) -> None:
        """Free the memory.

        Raises:
            UsageError: A lease is out.
        """
        self._begin()
        self._arena.release()
        with self._lock:
            self._copying = False

    def reclaim(self) -> None:
        """Take back what an interrupt kept from the caller of ``copy``. Only where nobody has a lease, nor copies."""
        with self._lock:
            self._copying, self._lease = False, None

    def _begin(self) -> None:
        with self._lock:
            if self._lease is not None or self._copying:
                raise UsageError("the last host copy is still in use; release its lease first")
            self._copying = True

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            if self._lease is lease:
                self._lease = None

    def _place(self, walk: _Walk, pieces: list[Piece], more_bytes: int = 0) -> bool:
        pinned = torch.cuda.is_available() and any(view.tensor.is_cuda for view in walk.views)
        sizes = place(pieces, block_limit_bytes=PINNED_BLOCK_BYTES if pinned else None)
        sizes[-1] += max(min(more_bytes, PINNED_BLOCK_BYTES - sizes[-1]), 0) if pinned else more_bytes
        return self._arena.fit(sizes, pinned=pinned)

    def _fill(self, walk: _Walk) -> int:
        pieces = plan_pieces(walk.views)
        self._place(walk, pieces)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for piece in pieces:
            first = piece.views[0].tensor
            alone = len(piece.views) == 1 and first.dtype in _COPIED_AS_THEY_ARE
            if piece.whole and alone and first.is_contiguous():
                host = walk.hosts[piece.views[0].key] = self._arena.tensor(piece.block, piece.offset, first)
                targets.append(host)
                sources.append(first)
                continue
            storage = self._arena.storage(piece.block, piece.offset, piece.size_bytes)
            for view in piece.views:
                walk.hosts[view.key] = _view_of(storage, piece, view.tensor)
            if piece.whole:
                targets.append(_bytes_of(storage, 0, piece.size_bytes))
                sources.append(_bytes_of(piece.source, piece.begin, piece.size_bytes))
            else:
                targets.append(walk.hosts[piece.views[0].key])
                sources.append(first)
        copy_all(targets, sources)
        return sum(piece.size_bytes for piece in pieces)


@dataclasses.dataclass(slots=True)
class _Slot:
    """Stands for a plain tensor in the outline."""

    key: int


@dataclasses.dataclass(slots=True)
class _Wrapped:
    """Stands for a tensor that wraps others (a DTensor)."""

    kind: type
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


class _Walk:
    """One pass over a tree: first everything but the tensors' bytes is copied, then the tensors are put in."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.hosts: dict[int, torch.Tensor] = {}
        self._slots: dict[int, _Slot | _Wrapped] = {}
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # holds what ids were taken of
        self._built: dict[int, Any] = {}
        self._open: set[int] = set()

    def outline(self, value: Any, path: str) -> Any:
        """Return ``value`` copied, with a slot in place of every tensor."""
        if isinstance(value, torch.Tensor):
            return self._outline_tensor(value, path)
        if isinstance(value, _IMMUTABLE):
            return value
        known = id(value)
        if known in self._copies:
            return self._copies[known]
        if known in self._open:
            raise UsageError(f"{path} contains itself")
        self._open.add(known)
        made = self._outline_container(value, path)
        self._open.discard(known)
        self._copies[known] = made
        self._kept.append(value)
        return made

    def _outline_container(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            items = {key: self.outline(item, f"{path}.{key}") for key, item in value.items()}
            if type(value) is OrderedDict:
                return OrderedDict(items)
            return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        if isinstance(value, (list, tuple)):
            entries = [self.outline(item, f"{path}[{index}]") for index, item in enumerate(value)]
            if hasattr(value, "_fields"):
                return type(value)(*entries)
            return tuple(entries) if isinstance(value, tuple) else entries
        if dataclasses.is_dataclass(value):
            made = object.__new__(type(value))
            for field in dataclasses.fields(value):
                item = self.outline(getattr(value, field.name), f"{path}.{field.name}")
                object.__setattr__(made, field.name, item)
            return made
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise UsageError(f"{path}: a {type(value).__name__} cannot be copied: {error}") from error

    def _outline_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        known = self._slots.get(id(tensor))
        if known is None:
            known = self._slots[id(tensor)] = self._slot_of(tensor, path)
            self._kept.append(tensor)
        return known

    def _slot_of(self, tensor: torch.Tensor, path: str) -> _Slot | _Wrapped:
        if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
            return self._plain_slot(tensor, path)
        if type(tensor).__name__ == "AsyncCollectiveTensor":
            pending: Any = tensor  # what a functional collective returns
            tensor = pending.wait()
        if hasattr(tensor, "__tensor_flatten__"):
            plain: Any = tensor.detach()
            names, context = plain.__tensor_flatten__()
            parts = {name: getattr(plain, name) for name in names}
            outlined = {
                name: self._outline_tensor(part, f"{path}.{name}") if isinstance(part, torch.Tensor) else part
                for name, part in parts.items()
            }
            return _Wrapped(type(tensor), outlined, context, tensor.shape, tensor.stride())
        return self._plain_slot(tensor, path)

    def _plain_slot(self, tensor: torch.Tensor, path: str) -> _Slot:
        _refuse_if_no_bytes(tensor, path)
        key = len(self.hosts)
        plain = tensor.detach() if tensor.requires_grad else tensor
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        if plain.numel() == 0:
            self.hosts[key] = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype)
            return _Slot(key)
        view = View(key, plain)
        if view.end > view.storage.nbytes():
            raise UsageError(f"{path} cannot be copied: its storage was freed (a resharded or offloaded parameter?)")
        self.hosts[key] = plain  # until the copy takes its place
        self.views.append(view)
        return _Slot(key)

    def rebuild(self, shape: Any) -> Any:
        """Put the host tensors into an outline. Containers that were shared stay shared."""
        if isinstance(shape, _Slot):
            return self.hosts[shape.key]
        known = id(shape)
        if known in self._built:
            return self._built[known]
        made = shape
        if isinstance(shape, _Wrapped):
            parts = {name: self.rebuild(part) for name, part in shape.parts.items()}
            made = shape.kind.__tensor_unflatten__(parts, shape.context, shape.shape, shape.stride)  # type: ignore[attr-defined]
        elif isinstance(shape, dict):
            for key, item in shape.items():
                shape[key] = self.rebuild(item)
        elif isinstance(shape, list):
            shape[:] = [self.rebuild(item) for item in shape]
        elif isinstance(shape, tuple) and not isinstance(shape, torch.Size):
            items = [self.rebuild(item) for item in shape]
            made = type(shape)(*items) if hasattr(shape, "_fields") else tuple(items)
        elif dataclasses.is_dataclass(shape) and not isinstance(shape, type):
            for field in dataclasses.fields(shape):
                object.__setattr__(shape, field.name, self.rebuild(getattr(shape, field.name)))
        self._built[known] = made
        return made


def _refuse_if_no_bytes(tensor: torch.Tensor, path: str) -> None:
    why = ""
    if tensor.is_meta:
        why = "it is on the meta device"
    elif tensor.is_quantized:
        why = "it is quantised; save its integers and scales instead"
    elif tensor.layout != torch.strided or tensor.is_nested:
        why = f"its layout is {'nested' if tensor.is_nested else tensor.layout}"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        why = f"a {type(tensor).__name__} does not say how it is made of plain tensors"
    if why:
        raise UsageError(f"{path} cannot be copied: {why}")


def _bytes_of(storage: torch.UntypedStorage, begin: int, size_bytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (size_bytes,), (1,))


def _view_of(storage: torch.UntypedStorage, piece: Piece, source: torch.Tensor) -> torch.Tensor:
    host = torch.empty(0, dtype=source.dtype)
    if not piece.whole:
        stride = torch.empty(source.shape, device="meta").stride()
        return host.set_(storage, 0, source.shape, stride)
    offset = (source.storage_offset() * source.element_size() - piece.begin) // source.element_size()
    return host.set_(storage, offset, source.shape, source.stride())
