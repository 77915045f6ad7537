"""Which live memory and which live objects have their values already, so that a load never fills them twice.

Rules:
* A tensor is identified by the bytes that it sees, whatever its name; a container or an object by its identity.
* Everything that has a value is kept alive until the load ends: freed memory could be reused under another name.
* Bytes are compared or copied only if two ranges overlap.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import is_mapping, is_sequence, items_of
from ckptmirror.core.errors import UsageError
from ckptmirror.core.regions import Region
from ckptmirror.formats.buffers import arrays_share, bounds_of
from ckptmirror.formats.shards import Piece, fill, local_of, piece_of

__all__ = ["Span", "Taken", "holds", "overlaps_itself", "same", "share_bytes", "span_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one storage that a plain tensor sees: from ``begin`` up to ``end``, all of them if ``dense``."""

    tensor: torch.Tensor
    storage: tuple[torch.device, int]
    begin: int
    end: int
    dense: bool


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return where a plain tensor lies; None where it has no bytes, or none that it tells."""
    try:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
            return None
        pointer = tensor.untyped_storage().data_ptr()
        begin = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    except (RuntimeError, ValueError):  # made of other tensors, or not made yet
        return None
    if pointer == 0:
        return None
    end = begin + (int(last) + 1) * tensor.element_size()
    dense = tensor.numel() * tensor.element_size() >= end - begin or overlaps_itself(tensor)
    return Span(tensor, (tensor.device, pointer), begin, end, dense)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two values of a tensor may lie at one address, as in an expanded one: it cannot be filled."""
    local = local_of(tensor)
    if local.layout != torch.strided or local.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


class Taken:
    """The memory, the containers and the objects that are spoken for."""

    def __init__(self) -> None:
        self._spans: dict[tuple[torch.device, int], list[tuple[Span, str]]] = defaultdict(list)
        self._buffers: list[tuple[tuple[int, int], Any, str]] = []  # outside torch: addresses, what lies there, whose
        self._saved: dict[int, tuple[Any, Any]] = {}  # by id: the value, and what it was given

    def take(self, value: Any, owner: str) -> None:
        """Note that the tensors and containers of ``value`` have their values: those of ``owner``, for messages."""
        if isinstance(value, torch.Tensor):
            for part in _plain_parts(value):
                if (span := span_of(part)) is not None:
                    self._spans[span.storage].append((span, owner))
        elif isinstance(value, torch.nn.Module):
            self.take([*value.parameters(), *value.buffers()], owner)
        elif isinstance(value, torch.optim.Optimizer):
            self.take([value.param_groups, value.state], owner)
        elif is_mapping(value) or is_sequence(value):
            self.remember(value, value)
            for _, item in items_of(value):
                self.take(item, owner)

    def take_buffer(self, value: Any, owner: str) -> None:
        """Note that a set, an array or a byte array has its values."""
        self.remember(value, value)
        if (bounds := bounds_of(value)) is not None:
            self._buffers.append((bounds, value, owner))

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return the owner of memory that ``tensor`` shares; None if there is none."""
        for part in _plain_parts(tensor):
            span = span_of(part)
            if span is None:
                continue
            for other, owner in self._spans.get(span.storage, ()):
                if share_bytes(span, other):
                    return owner
            for bounds, _, owner in self._buffers:
                if _overlap(bounds, _addresses(span)):
                    return owner
        return None

    def has_buffer(self, value: Any) -> bool:
        """Whether a set, an array or a byte array has its values, or shares memory with something that has."""
        bounds = bounds_of(value)
        if self.knows(value) or bounds is None:
            return self.knows(value)
        if any(_overlap(bounds, other) and arrays_share(value, there) for other, there, _ in self._buffers):
            return True
        return any(_overlap(bounds, _addresses(span)) for spans in self._spans.values() for span, _ in spans)

    def remember(self, value: Any, saved: Any) -> None:
        """Note that a container or an object is given ``saved``."""
        self._saved.setdefault(id(value), (value, saved))

    def knows(self, value: Any) -> bool:
        """Whether a container or an object has been given its values."""
        return id(value) in self._saved

    def was_given(self, value: Any, saved: Any) -> bool:
        """Whether what a known container or object was given is the same as ``saved``."""
        return same(self._saved[id(value)][1], saved)


def holds(now: torch.Tensor, region: Region, pieces: Iterable[Piece], name: str) -> bool:
    """Whether a plain tensor has the very bits that filling it with ``pieces`` would give it."""
    wanted = torch.empty_like(now, memory_format=torch.contiguous_format)
    fill(wanted, region, pieces, name)
    return _same_bits(now, wanted)


def same(first: Any, second: Any, *, shards_alike: bool = False) -> bool:
    """Whether two trees are equal, tensors bit for bit.

    Args:
        first: Live or saved values, pieces of tensors among them.
        second: The same.
        shards_alike: Take two pieces of tensors of one shape as equal: each rank has its own.
    """
    if first is second:
        return True
    if isinstance(first, (torch.Tensor, Piece)) and isinstance(second, (torch.Tensor, Piece)):
        return _same_tensors(first, second, shards_alike=shards_alike)
    if type(first) is not type(second):
        return False
    if not (is_mapping(first) or is_sequence(first)):
        return _same_leaves(first, second)
    if isinstance(first, defaultdict) and first.default_factory is not second.default_factory:
        return False
    if isinstance(first, deque) and first.maxlen != second.maxlen:
        return False
    one, other = dict(items_of(first)), dict(items_of(second))
    return list(one) == list(other) and all(same(one[key], other[key], shards_alike=shards_alike) for key in one)


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that ``tensor`` is made of: itself, if it is plain."""
    local = local_of(tensor)
    names = getattr(local, "__tensor_flatten__", None)
    if names is None or type(local) in (torch.Tensor, torch.nn.Parameter):
        return [local]
    inner = (getattr(local, name) for name in names()[0])
    return [part for item in inner if isinstance(item, torch.Tensor) for part in _plain_parts(item)]


def _addresses(span: Span) -> tuple[int, int] | None:
    device, pointer = span.storage
    return (pointer + span.begin, pointer + span.end) if device.type == "cpu" else None


def _overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is not None and other is not None and max(one[0], other[0]) < min(one[1], other[1])


def share_bytes(one: Span, other: Span) -> bool:
    """Whether two tensors of one storage see a byte in common."""
    if max(one.begin, other.begin) >= min(one.end, other.end):
        return False
    if one.dense and other.dense:
        return True
    first = min(one.begin, other.begin)  # two columns of one matrix, say: only a map of the bytes tells
    seen = torch.zeros(max(one.end, other.end) - first, dtype=torch.bool, device="cpu")
    _bytes_of(one, seen, first).fill_(True)
    return bool(_bytes_of(other, seen, first).any())


def _bytes_of(span: Span, seen: torch.Tensor, first: int) -> torch.Tensor:
    if span.dense:
        return seen[span.begin - first : span.end - first]
    item_bytes = span.tensor.element_size()
    strides = (*(stride * item_bytes for stride in span.tensor.stride()), 1)
    return seen.as_strided((*span.tensor.shape, item_bytes), strides, span.begin - first)


def _same_tensors(first: torch.Tensor | Piece, second: torch.Tensor | Piece, *, shards_alike: bool) -> bool:
    try:
        one = first if isinstance(first, Piece) else piece_of(first)
        other = second if isinstance(second, Piece) else piece_of(second)
    except UsageError:  # in several pieces
        return False
    sharded = all(isinstance(value, (Piece, DTensor)) for value in (first, second))
    if shards_alike and sharded and one.region.shape == other.region.shape:
        return one.data.dtype == other.data.dtype
    return one.region == other.region and _same_bits(one.data, other.data)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape, first.layout) != (second.dtype, second.shape, second.layout):
        return False
    try:
        one, other = (_bytes(tensor) for tensor in (first, second))
        return torch.equal(one, other.to(one.device))
    except RuntimeError:  # a kind of tensor that does not show its bytes
        return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _same_leaves(first: Any, second: Any) -> bool:
    if hasattr(first, "tobytes") and hasattr(first, "dtype"):
        same_form = (first.dtype, first.shape) == (second.dtype, second.shape)
        return same_form and bool(first.tobytes() == second.tobytes())
    if isinstance(first, (float, complex)):
        return repr(first) == repr(second)  # NaN is NaN here, and -0.0 is not 0.0
    if hasattr(first, "__dict__") and not isinstance(first, type):
        return same(vars(first), vars(second))
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001 - a comparison of the user's: what it cannot tell is not the same
        return False
