"""Compares a state that an object was given with the state that it returns then, as far as that can be compared.

Rules:
* Compared are numbers, texts, flags and None, also in small arrays, in dicts and sequences of any kind.
* What the object returns besides is its own matter: a newer version may have more to say.
* Other values are not compared, nor is a container with something that is none: nobody knows what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = ["gives_no_state", "not_taken"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SMALL = 4096  # values of an array; fingerprints compare the large ones
_ROUNDING = 1e-6  # where a number became one of an array of 32 bits, or the reverse
_DEPTH = 50


def not_taken(given: Any, returned: Any, at: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each value that differs, with the value given and the one returned.

    Args:
        given: The state that the object was given.
        returned: The state that it returned then.
        at: The place of the object.
        depth: How deep to look.
    """
    if depth == 0:
        return
    if isinstance(given, Mapping) and isinstance(returned, Mapping):
        for key, value in given.items():
            if key in returned:
                yield from not_taken(value, returned[key], f"{at}.{key}", depth - 1)
            elif type(value) in _PLAIN:
                yield f"{at}.{key}", value, "nothing"
    elif _is_sequence(given) and _is_sequence(returned):
        if len(given) != len(returned):
            yield at, f"{len(given)} values", f"{len(returned)} values"
            return
        for index, (one, other) in enumerate(zip(given, returned, strict=True)):
            yield from not_taken(one, other, f"{at}[{index}]", depth - 1)
    else:
        one, other = _as_plain(given), _as_plain(returned)
        if one is not _UNKNOWN and other is not _UNKNOWN and not _equal(one, other, given, returned):
            yield at, one, other


def gives_no_state(where: str, one: object, error: Exception) -> UsageError:
    """Return the error for an object whose ``state_dict()`` failed; ``where`` is its place in the state."""
    return UsageError(
        f"{where} ({type(one).__qualname__}) gives no state: its state_dict() raised {type(error).__name__}: {error}",
        hint="Correct it, or take the object out of the TrainState. A save asks for the state, and so does a load, "
        "before and after it.",
    )


_UNKNOWN = object()


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _as_plain(value: Any) -> Any:
    """Return a plain value, or the plain values of a small array; else :data:`_UNKNOWN`."""
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "tolist") and hasattr(value, "shape") and not hasattr(value, "placements"):
        is_small = math.prod(value.shape) <= _SMALL and not getattr(value, "is_meta", False)
        return value.tolist() if is_small else _UNKNOWN
    return _UNKNOWN


def _equal(one: Any, other: Any, given: Any, returned: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(a, b, given, returned) for a, b in pairs)
    if isinstance(one, float) and isinstance(other, float):
        if type(given) is type(returned) and getattr(given, "dtype", None) == getattr(returned, "dtype", None):
            return one == other or (one != one and other != other)
        return math.isclose(one, other, rel_tol=_ROUNDING) or (one != one and other != other)
    return bool(one == other)
