"""Copies a rank's state into kept host memory: the only part of a save that blocks training.

Rules:
* After ``copy`` returns, nothing that the training does to the source shows in the copy.
* Tensors that share bytes still share them. Plain containers, of exactly the types listed here, keep their type and
  stay shared. Every other value is deep-copied unless it is immutable, never rebuilt from a part of it. Tensors that
  such an object exposes are copied like all others.
* Copied tensors never require grad and are on the CPU. A DTensor becomes a DTensor over host memory with the same mesh,
  placements and shape; a parameter becomes a plain tensor.
* A tensor without plain bytes (meta, quantised, sparse, freed) is refused, with its path in the state.
* The memory is lent: ``copy`` fails until the previous lease is released, so no bytes change under a background save.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import Any

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.host_arena import PINNED_BLOCK_BYTES, Arena
from ckptmirror.ranks.host_layout import Piece, View, bytes_of, place, plan_pieces, view_of
from ckptmirror.ranks.host_transfer import copy_all

__all__ = ["HostCopier", "Lease"]

_IMMUTABLE = frozenset((
    type(None), bool, int, float, complex, str, bytes, range,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    FunctionType, BuiltinFunctionType,
))  # fmt: skip
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
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
        """Return the memory, so that the next ``copy`` may write it. Any thread may call this, more than once."""
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
        """Copy ``tree``: nested dicts, lists and tuples of tensors, plain values and objects.

        Returns:
            The lease of the copy; release it once the copy has been written.

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
        """Allocate the memory that ``copy(tree)`` will need, without copying. Returns ``nbytes``.

        Its pages are faulted in by a thread, so that nobody waits for them.

        Args:
            tree: The tree that will be copied.
            more_bytes: Extra room for values that are not in ``tree`` yet.
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
            UsageError: A lease was not released.
        """
        self._begin()
        self._arena.release()
        with self._lock:
            self._copying = False

    def reclaim(self) -> None:
        """Reclaim a lease that Ctrl-C kept from the caller of ``copy``, while no lease is in use and no copy runs."""
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
                walk.hosts[view.key] = view_of(storage, piece, view.tensor)
            if piece.whole:
                targets.append(bytes_of(storage, 0, piece.size_bytes))
                sources.append(bytes_of(piece.source, piece.begin, piece.size_bytes))
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


@dataclasses.dataclass(slots=True)
class _Object:
    """Stands for any other value; ``slots`` for tensors that it holds, by their ids."""

    value: Any
    slots: dict[int, _Slot | _Wrapped]
    path: str


class _Walk:
    """One pass over a tree: first copies everything but the tensors' bytes, then inserts the tensors."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.hosts: dict[int, torch.Tensor] = {}
        self._slots: dict[int, _Slot | _Wrapped] = {}
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # keeps alive every object whose id is in use
        self._built: dict[int, Any] = {}
        self._open: set[int] = set()
        self._memo: dict[int, Any] = {}  # deepcopy's memo for all objects, so that shared parts stay shared

    def outline(self, value: Any, path: str) -> Any:
        """Return ``value`` copied, with a slot in place of every tensor."""
        if isinstance(value, torch.Tensor):
            return self._outline_tensor(value, path)
        if type(value) in _IMMUTABLE or isinstance(value, (type, Enum)):
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
        kind = type(value)
        if kind in _MAPPINGS:
            made: Any = defaultdict(value.default_factory) if kind is defaultdict else kind()
            for key, item in value.items():
                made[key] = self.outline(item, f"{path}.{key}")
            return made
        if kind in _SEQUENCES or _is_namedtuple(value):
            entries = [self.outline(item, f"{path}[{index}]") for index, item in enumerate(value)]
            if kind is deque:
                return deque(entries, value.maxlen)
            return kind(entries) if kind in _SEQUENCES else kind(*entries)
        slots: dict[int, _Slot | _Wrapped] = {}
        for tensor in _tensors_in(value):
            try:
                slots[id(tensor)] = self._outline_tensor(tensor, path)
            except UsageError:
                continue  # without plain bytes: it is copied with the object
        return _Object(value, slots, path)

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
            self.hosts[key] = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="cpu")
            return _Slot(key)
        view = View(key, plain)
        if view.end > view.storage.nbytes():
            raise UsageError(f"{path} cannot be copied: its storage was freed (a resharded or offloaded parameter?)")
        self.hosts[key] = plain  # until the copy replaces it
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
        elif isinstance(shape, _Object):
            made = self._copy_object(shape)
        elif type(shape) in _MAPPINGS:
            for key, item in shape.items():
                shape[key] = self.rebuild(item)
        elif type(shape) in (list, deque):
            for index, item in enumerate(shape):
                shape[index] = self.rebuild(item)
        elif isinstance(shape, tuple) and type(shape) not in _IMMUTABLE:
            items = [self.rebuild(item) for item in shape]
            made = tuple(items) if type(shape) is tuple else type(shape)(*items)
        self._built[known] = made
        return made

    def _copy_object(self, shape: _Object) -> Any:
        self._memo.update((known, self.rebuild(slot)) for known, slot in shape.slots.items())
        try:
            return copy.deepcopy(shape.value, self._memo)
        except Exception as error:
            raise UsageError(f"{shape.path}: a {type(shape.value).__name__} cannot be copied: {error}") from error


def _is_namedtuple(value: Any) -> bool:
    """Whether the class of ``value`` was made by ``namedtuple``, so that it has only its fields."""
    return type(value).__bases__ == (tuple,) and hasattr(value, "_fields") and not hasattr(value, "__dict__")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes and items of ``value``, however deep, where Python code can see them."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if type(item) in _IMMUTABLE or isinstance(item, (type, Enum)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            left += item
        left += getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            names = vars(kind).get("__slots__", ())
            names = (names,) if isinstance(names, str) else names
            left += [getattr(item, name) for name in names if name != "__dict__" and hasattr(item, name)]


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
        raise UsageError(f"{path} cannot be copied: {why}", hint="Save it as a plain dense tensor, or leave it out.")
