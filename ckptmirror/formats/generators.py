"""The state of one random number generator, as plain values and tensors: torch's, NumPy's or Python's.

Rules:
* A state is set only into a live generator of the same kind, and only after it was compared with the state that this
  one has: NumPy checks neither positions nor sizes, and would read outside its memory.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError

__all__ = ["is_generator", "kind_of_generator", "set_generator", "state_of_generator"]

_NUMPY_KINDS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "uinteger": 2**32 - 1}  # of what is no part of the random state
_MOST_BITS = 128


def kind_of_generator(value: Any) -> str | None:
    """Return the kind of a generator (``"torch cpu"``, ``"numpy PCG64"``, ``"python"``); None for anything else."""
    if type(value) is torch.Generator:
        return f"torch {value.device.type}"
    if type(value) is random.Random:
        return "python"
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random") and type(value) is numpy.random.Generator:
        name = type(value.bit_generator).__name__
        return f"numpy {name}" if name in _NUMPY_KINDS else None
    return None


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a generator whose state is known here."""
    return kind_of_generator(value) is not None


def state_of_generator(generator: Any) -> dict[str, Any]:
    """Return the state of a generator."""
    if isinstance(generator, torch.Generator):
        return {"state": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    return dict(generator.bit_generator.state)


def set_generator(generator: Any, state: Mapping[str, Any]) -> None:
    """Set a generator to a state of its kind.

    Raises:
        IntegrityError: The state has the wrong form.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state["state"].cpu())
        elif isinstance(generator, random.Random):
            if type(state["gauss"]) not in (float, type(None)):
                raise ValueError(f"gauss is a {type(state['gauss']).__name__}")
            generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
        else:
            _check_like(state, generator.bit_generator.state, "state")
            generator.bit_generator.state = state
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise IntegrityError(f"The saved state of a random number generator is broken: {error}") from error


def _check_like(saved: Any, now: Any, name: str) -> None:
    """Check that a saved state of NumPy's has the form of the live one, and that its positions are inside."""
    if isinstance(now, Mapping):
        if not isinstance(saved, Mapping) or saved.keys() != now.keys():
            raise ValueError(f"{name} has other entries")
        for key, value in now.items():
            _check_like(saved[key], value, str(key))
    elif isinstance(now, str):
        if saved != now:
            raise ValueError(f"{name} is {saved!r}")
    elif hasattr(now, "shape"):
        if type(saved) is not type(now) or (saved.dtype, saved.shape) != (now.dtype, now.shape):
            raise ValueError(f"{name} is not an array of {now.shape} numbers")
    elif type(saved) is not int or not 0 <= saved <= _MOST.get(name, 2**_MOST_BITS - 1):
        raise ValueError(f"{name} is {saved!r}")
