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
    """Set the generators; return those of the save that are not here ("cuda").

    Raises:
        IntegrityError: A state has the wrong form.
    """
    absent = []
    try:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            _load_numpy(state["numpy"])
        if "cuda" in state:
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"].cpu())
            else:
                absent.append("cuda")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise IntegrityError(f"The saved state of a random number generator is broken: {error}") from error
    return absent


def _load_numpy(saved: Mapping[str, Any]) -> None:
    import numpy

    words = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
    numpy.random.set_state((saved["name"], words, saved["position"], saved["has_gauss"], saved["gauss"]))
