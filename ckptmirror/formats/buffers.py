"""Values outside torch that are filled in place: NumPy arrays, byte arrays and sets.

Rules:
* After a fill, a value holds exactly what was saved; otherwise the fill reports that it was not possible.
* An array keeps its dtype and shape: it is filled only if both match the save and it is writable.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

__all__ = ["arrays_share", "bounds_of", "fill_buffer", "is_array", "is_buffer"]

_WORK = 10_000  # steps of NumPy's search for a common byte; if that is not enough, assume that there is one


def is_array(value: Any) -> bool:
    """Whether ``value`` is a NumPy array, of no other kind."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_buffer(now: Any, saved: Any) -> bool:
    """Whether ``now`` is of the kinds that are filled here, and ``saved`` is of its kind."""
    return type(now) is type(saved) and (is_array(now) or type(now) in (set, bytearray))


def bounds_of(value: Any) -> tuple[int, int] | None:
    """Return the first and last address of an array or a byte array; None if it has no bytes."""
    if type(value) is bytearray and value:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(value))
        return begin, begin + len(value)
    if not is_array(value) or value.size == 0:
        return None
    reaches = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
    begin = int(value.__array_interface__["data"][0])
    low, high = sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0)
    return begin + low, begin + high + value.itemsize


def arrays_share(one: Any, other: Any) -> bool:
    """Whether two arrays, or byte arrays, whose addresses overlap have a byte in common."""
    if not (is_array(one) and is_array(other)):
        return True
    import numpy

    try:
        return bool(numpy.shares_memory(one, other, max_work=_WORK))  # type: ignore[arg-type]  # NumPy takes any number
    except RuntimeError:  # too hard to tell
        return True


def fill_buffer(now: Any, saved: Any) -> bool:
    """Fill ``now`` with ``saved``, which is of its kind; return whether it could be filled."""
    if type(now) is set:
        now.clear()
        now.update(saved)
        return True
    if type(now) is bytearray:
        try:
            now[:] = saved
        except BufferError:  # it has another length, and another object exports its memory
            return False
        return True
    if now.dtype != saved.dtype or now.shape != saved.shape or not now.flags.writeable:
        return False
    now[...] = saved
    return bool(now.tobytes() == saved.tobytes())  # false if several of its values share memory
