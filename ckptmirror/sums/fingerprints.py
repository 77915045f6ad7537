"""Fingerprints of tensors: two sums of 32 bits that depend on every bit and its place, but not on how a tensor is cut.

Rules:
* A tensor is read as units of 16 bits. Each is multiplied by one odd weight for each dimension, which depends on the
  dimension and on the place along it, and all products are added modulo 2**32. So a piece needs only its own place, the
  sums of the pieces add up to those of the whole, and no single bit can change without changing both sums.
* Units of 32 bits would not do: their top bit adds 2**31 whatever the weight is, so an even number of signs could
  change unseen. Of a unit of 16 bits, each bit meets at least 17 bits of the weight, in each of the two sums.
* Two values of 8 bits along the last dimension share a unit: the weight of the second is that of the first times 256.
  Values of more than 16 bits are rows of units, in a dimension of their own.
* The two sums have different weights, which come from a mixing function (the finaliser of MurmurHash3) and not from a
  generator of random numbers: they are the same everywhere and for ever.
* The weight of a place is that of its row, of 4,096 places, times that of its place in the row. So a tensor that is
  long in one dimension needs few weights, which are kept.
* On the CPU both sums of a block that fits in the cache come from one integer matrix product, in the calling thread;
  several threads sum one tensor each. On other devices they are plain products and sums, and nothing waits for the
  device.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ckptmirror.core.regions import Region
from ckptmirror.core.tensor_proof import Fingerprint
from ckptmirror.local.daemon_pool import run_jobs

__all__ = ["fingerprint", "fingerprint_there", "fingerprints"]

_MASK = 0xFFFFFFFF
_SUMS = 2
_ROW = 4096
_FEW_UNITS, _MANY_UNITS = 64, 8192  # of a row of the matrix product, if the tensor has as many
_FEW_ROWS = 32  # of so few rows, making the weights of long ones would take longer than their sums
_BLOCK_WORDS, _BLOCK_WORDS_ELSEWHERE = 1 << 19, 1 << 23  # less would make threads wait for the interpreter's lock
_KEPT_UNITS = 1 << 16  # the weights of more places are made each time


class _Axis(NamedTuple):
    """A part of a dimension.

    Attributes:
        number: Of the dimension.
        at: The first place.
        size: How many places.
        share: How many of them share a unit.
        of_rows: Whether the places are rows of the dimension (True), those of a row (False), or its own (None).
    """

    number: int
    at: int
    size: int
    share: int = 1
    of_rows: bool | None = None


def fingerprint(values: torch.Tensor, region: Region) -> Fingerprint:
    """Return the fingerprint of a piece of a tensor.

    Args:
        values: The piece, of the region's sizes; a plain tensor with bytes of its own, on any device.
        region: Its place in the tensor.
    """
    first, second = fingerprint_there(values, region).tolist()
    return first & _MASK, second & _MASK


def fingerprints(pieces: Sequence[tuple[torch.Tensor, Region]], *, workers: int = 1) -> list[Fingerprint]:
    """Return the fingerprint of each of many pieces. It waits once for each device, and not for each piece.

    Args:
        pieces: As in :func:`fingerprint`.
        workers: The number of threads for what is in host memory; 1: the caller's.
    """
    sums: dict[int, torch.Tensor] = {}

    def add(index: int) -> None:
        sums[index] = fingerprint_there(*pieces[index])

    in_threads = [index for index, (values, _) in enumerate(pieces) if workers > 1 and _is_host(values.device)]
    for index in sorted(set(range(len(pieces))).difference(in_threads)):
        add(index)
    largest_first = sorted(in_threads, key=lambda index: -pieces[index][0].nbytes)
    run_jobs(largest_first, add, name="ckptmirror-sums", workers=workers)
    of_device: dict[torch.device, list[int]] = {}
    for index, both in sums.items():
        of_device.setdefault(both.device, []).append(index)
    found: list[Fingerprint] = [(0, 0)] * len(pieces)
    for indices in of_device.values():
        for index, (first, second) in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            found[index] = (first & _MASK, second & _MASK)
    return found


def fingerprint_there(values: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the two sums of :func:`fingerprint` as signed numbers, on the tensor's device."""
    if values.numel() == 0:
        return torch.zeros(_SUMS, dtype=torch.int32, device=values.device)
    with torch.no_grad():
        flat, axes = _as_units(values.detach().resolve_conj().resolve_neg().contiguous(), region)
        return _sums(flat, axes)


def _as_units(values: torch.Tensor, region: Region) -> tuple[torch.Tensor, tuple[_Axis, ...]]:
    """Return contiguous values as a row of units, and the dimensions that these have.

    Values of 8 bits stay a row of bytes, unless both of each unit are there.
    """
    offsets, sizes = (region.offsets, region.sizes) if region.sizes else ((0,), (1,))
    axes = [_Axis(number, at, size) for number, (at, size) in enumerate(zip(offsets, sizes, strict=True))]
    flat, size_bytes = values.reshape(-1).view(torch.uint8), values.element_size()
    if flat.storage_offset() % 4:
        flat = flat.clone()
    if size_bytes > 2:
        return flat.view(torch.int16), (*axes, _Axis(len(axes), 0, size_bytes // 2))
    if size_bytes == 2:
        return flat.view(torch.int16), tuple(axes)
    last = axes.pop()
    if last.at % 2 == 0 and last.size % 2 == 0:
        return flat.view(torch.int16), (*axes, _Axis(last.number, last.at // 2, last.size // 2))
    return flat, (*axes, last._replace(share=2))


def _sums(flat: torch.Tensor, axes: tuple[_Axis, ...]) -> torch.Tensor:
    """Return the sums of a row of units that has these dimensions."""
    device = flat.device
    inner = len(axes) - 1  # the first of the dimensions that make a row of the matrix product
    while inner and math.prod(axis.size for axis in axes[inner:]) < _FEW_UNITS:
        inner -= 1
    first, below = axes[inner], axes[inner + 1 :]
    width = math.prod(axis.size for axis in below)
    rows = flat.view(-1, first.size * width)
    row = _ROW * first.share
    is_long = first.of_rows is None and first.size >= 2 * row
    if is_long and first.at % row == first.size % row == 0:
        return _sums(flat, (*axes[:inner], *_in_rows(first), *below))
    if is_long and len(rows) < _FEW_ROWS:
        of_each = torch.stack([_sums_of_long(units, first, below, width) for units in rows])
    elif rows.shape[1] <= 2 * _MANY_UNITS:
        of_each = _row_sums(rows, axes[inner:])
    else:
        of_each = torch.zeros(len(rows), _SUMS, dtype=torch.int32, device=device)
        step = max(2, _MANY_UNITS // width // 2 * 2)
        for begin in range(0, first.size, step):
            part = first._replace(at=first.at + begin, size=min(step, first.size - begin))
            of_each += _row_sums(rows[:, begin * width : (begin + part.size) * width], (part, *below))
    return (of_each * _weights(axes[:inner], device).T).sum(dim=0, dtype=torch.int32)


def _in_rows(axis: _Axis) -> tuple[_Axis, _Axis]:
    """Return a dimension that begins and ends with a row as the two dimensions that its rows make."""
    row = _ROW * axis.share
    rows = _Axis(axis.number, axis.at // row, axis.size // row, of_rows=True)
    return rows, _Axis(axis.number, 0, row, axis.share, of_rows=False)


def _sums_of_long(flat: torch.Tensor, axis: _Axis, below: tuple[_Axis, ...], width: int) -> torch.Tensor:
    """Return the sums of units whose first dimension is long: of what is before, in and after its whole rows."""
    row = _ROW * axis.share
    before = -axis.at % row
    edges = (0, before, before + (axis.size - before) // row * row, axis.size)
    found = torch.zeros(_SUMS, dtype=torch.int32, device=flat.device)
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            part = axis._replace(at=axis.at + begin, size=end - begin)
            found += _sums(flat[begin * width : end * width], (part, *below))
    return found


def _row_sums(rows: torch.Tensor, axes: tuple[_Axis, ...]) -> torch.Tensor:
    """Return the two sums of each row of units.

    Where it can, it takes two units as one word ``low + 2**16 * high``: then ``low * a + high * b`` is
    ``word * a + high * (b - 2**16 * a)``, which needs the high unit alone.
    """
    strides = (rows.shape[1], rows.stride(0), rows.storage_offset())
    is_even = rows.dtype == torch.int16 and not any(units % 2 for units in strides)
    found = torch.empty(len(rows), _SUMS, dtype=torch.int32, device=rows.device)
    if is_even:
        rows = rows.view(torch.int32)
    words = _BLOCK_WORDS if _is_host(rows.device) else _BLOCK_WORDS_ELSEWHERE
    step = max(1, words // rows.shape[1])
    if is_even:
        of_words, of_high = _weights_of_words(axes, rows.device)
    else:
        of_units = _weights(axes, rows.device).T
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        if is_even:
            found[begin : begin + step] = _times(part, of_words)  # first, as it reads memory faster
            found[begin : begin + step] += _times(_high_units(part), of_high)
        else:
            found[begin : begin + step] = _times(_units_apart(part), of_units)
    return found


class _Kept(threading.local):
    """Memory of each thread for the high units of a block: fresh pages would cost more than the sums."""

    def __init__(self) -> None:
        self.words = np.empty(_BLOCK_WORDS, np.uint32)  # a thread that frees a tensor while Python exits aborts it


def _high_units(words: torch.Tensor) -> torch.Tensor:
    if not _is_host(words.device):
        return (words >> 16).bitwise_and_(0xFFFF)
    found = _kept.words[: words.numel()].reshape(words.shape)
    np.right_shift(words.numpy().view(np.uint32), 16, out=found)  # torch would share it with its pool, and wait for it
    return torch.from_numpy(found.view(np.int32))


def _units_apart(units: torch.Tensor) -> torch.Tensor:
    return units.to(torch.int32) & (0xFFFF if units.dtype == torch.int16 else 0xFF)


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _times(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices; the second has a column for each sum, which is a row of its memory."""
    if _is_host(rows.device):
        return torch.mm(rows, weights)
    columns = [(rows * column).sum(dim=1, dtype=torch.int32) for column in weights.unbind(1)]
    return torch.stack(columns, dim=1)  # there is no product of integers on CUDA


def _weights(axes: tuple[_Axis, ...], device: torch.device) -> torch.Tensor:
    """Return the weights of all places along some dimensions, a row for each sum."""
    made = _made_weights if _units(axes) > _KEPT_UNITS else _kept_weights
    return made(axes, device)


def _weights_of_words(axes: tuple[_Axis, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of words, and of their high units; a column for each sum."""
    made = _made_weights_of_words if _units(axes) > _KEPT_UNITS else _kept_weights_of_words
    return made(axes, device)


def _units(axes: tuple[_Axis, ...]) -> int:
    return math.prod(axis.size for axis in axes)


def _made_weights(axes: tuple[_Axis, ...], device: torch.device) -> torch.Tensor:
    if not axes:
        return torch.ones(_SUMS, 1, dtype=torch.int32, device=device)
    return functools.reduce(_each_with_each, [_weights_along(axis, device) for axis in axes])


def _made_weights_of_words(axes: tuple[_Axis, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    of_units = _made_weights(axes, device)
    low, high = of_units[:, 0::2], of_units[:, 1::2]
    return low.contiguous().T, (high - (low << 16)).T


_kept = _Kept()
_kept_weights = functools.lru_cache(maxsize=256)(_made_weights)
_kept_weights_of_words = functools.lru_cache(maxsize=256)(_made_weights_of_words)


def _each_with_each(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.unsqueeze(2) * other.unsqueeze(1)).view(_SUMS, -1)


def _weights_along(axis: _Axis, device: torch.device) -> torch.Tensor:
    if axis.share == 2:
        first = axis.at // 2
        units = axis._replace(at=first, size=(axis.at + axis.size - 1) // 2 - first + 1, share=1)
        of_units = _weights_along(units, device)
        of_bytes = torch.stack((of_units, of_units << 8), dim=2).view(_SUMS, -1)
        return of_bytes[:, axis.at - 2 * first : axis.at - 2 * first + axis.size]
    if axis.of_rows is not None:
        return _mixed(axis.number, 0 if axis.of_rows else 1, axis.at, axis.at + axis.size, device)
    first, last = axis.at // _ROW, (axis.at + axis.size - 1) // _ROW
    found = _each_with_each(_mixed(axis.number, 0, first, last + 1, device), _mixed(axis.number, 1, 0, _ROW, device))
    return found[:, axis.at - first * _ROW : axis.at - first * _ROW + axis.size]


@functools.lru_cache(maxsize=256)
def _mixed(number: int, part: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Return an odd number of 32 bits for each place, a row for each sum."""
    at = torch.arange(begin, end, dtype=torch.int64, device=device)
    seeds = [[(0x9E3779B1 * (1 + 4 * number + 2 * part + which)) & _MASK] for which in range(_SUMS)]
    mixed = _mix(_mix(at & _MASK) ^ torch.tensor(seeds, dtype=torch.int64, device=device) ^ _mix(at >> 32))
    return (mixed | 1).to(torch.int32)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Return words of 32 bits (in 64) mixed as by the finaliser of MurmurHash3 (Austin Appleby)."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _MASK
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _MASK
    return words ^ (words >> 16)
