"""The random number generators of one rank, as plain values and tensors.

Rules:
* Each rank keeps its own: of the CUDA devices only its current one, so that no context is opened on another.
* NumPy is asked only if the training imported it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError

__all__ = ["capture_rng", "load_rng"]

_WORDS = 624  # of MT19937


def capture_rng() -> dict[str, Any]:
    """Return the state of Python's, NumPy's (if imported) and torch's generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "name": str(name),
            "words": torch.tensor(keys.astype("int64").tolist(), dtype=torch.int64, device="cpu"),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as torch has it
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng(state: Mapping[str, Any]) -> list[str]:
    """Set the generators, after all states were checked; return those of the save that are not here ("cuda").

    Raises:
        IntegrityError: A state has the wrong form.
    """
    try:
        python = _python_state(state["python"])
        numpy_state = _numpy_state(state["numpy"]) if "numpy" in state else None
        random.Random().setstate(python)
        torch.Generator().set_state(state["torch"].cpu())
        has_cuda = "cuda" in state and torch.cuda.is_available()
        if has_cuda:
            torch.cuda.set_rng_state(state["cuda"].cpu())
        random.setstate(python)
        torch.set_rng_state(state["torch"].cpu())
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise IntegrityError(f"The saved state of a random number generator is broken: {error}") from error
    return ["cuda"] if "cuda" in state and not has_cuda else []


def _python_state(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    if type(saved["gauss"]) not in (float, type(None)):
        raise ValueError(f"gauss is a {type(saved['gauss']).__name__}")
    return saved["version"], tuple(saved["words"].tolist()), saved["gauss"]


def _numpy_state(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the state for NumPy, which checks neither position nor gauss and would read outside its words."""
    import numpy

    words, position, has_gauss = saved["words"].tolist(), saved["position"], saved["has_gauss"]
    if type(position) is not int or not 0 <= position <= _WORDS or has_gauss not in (0, 1):
        raise ValueError("NumPy's position is outside its words")
    if len(words) != _WORDS or not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        raise ValueError(f"NumPy's generator has {_WORDS} words of 32 bits")
    if type(saved["gauss"]) is not float:
        raise ValueError(f"NumPy's gauss is a {type(saved['gauss']).__name__}")
    return saved["name"], numpy.array(words, dtype=numpy.uint32), position, has_gauss, saved["gauss"]
