"""What training depends on, as flat names and values, and how two such records differ.

Rules:
* It shares no code with the saving and loading that it judges.
* Tensors are compared by their bits, so NaN equals the same NaN, and -0.0 differs from 0.0.
* A sharded tensor is recorded as the shard of this rank. What DDP overwrites before its next use is not recorded.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import TrainState

__all__ = ["RETURNED", "Record", "differences", "record_of"]

Record = dict[str, Any]
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), date, time, Enum, PurePath)
RETURNED = "what train_step() returned"
_NAMED = 6  # differences that are listed by name


def record_of(state: TrainState, outcome: object) -> Record:
    """Record ``state``, the random number generators, and what a step returned."""
    parts: dict[str, Any] = {
        "model": {**dict(state.model.named_parameters()), **_buffers(state.model)},
        "random": random.getstate(),
        "numpy.random": np.random.get_state(),
        "torch.random": torch.get_rng_state(),
        RETURNED: outcome,
    }
    if torch.cuda.is_available():
        parts["torch.cuda.random"] = torch.cuda.get_rng_state_all()
    for part in ("optimizer", "scheduler", "scaler", "ema", "dataloader", "extra"):
        value = getattr(state, part)
        if value is not None and (part != "dataloader" or hasattr(value, "state_dict")):
            parts[part] = value
    return {name: value for part, tree in parts.items() for name, value in _leaves(part, tree)}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of this rank, without those that DDP replaces by rank 0's before each forward pass."""
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers and dist.get_rank(model.process_group):
        return {}
    return dict(model.named_buffers())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the leaves of a tree; a leaf is a tensor or something that ``==`` compares."""
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield name, local.detach().cpu().clone()
    elif isinstance(value, np.ndarray):
        yield name, (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}", one)
    elif isinstance(value, list | tuple | deque):
        yield f"len({name})", len(value)
        if all(isinstance(one, int | float) for one in value):
            yield name, repr(value)  # the state of a generator has hundreds of numbers
        else:
            for index, one in enumerate(value):
                yield from _leaves(f"{name}.{index}", one)
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif isinstance(value, _PLAIN):
        yield name, repr(value)
    elif (inner := _state_of(value)) is not None:
        yield from _leaves(name, inner)
    else:
        yield name, (type(value).__qualname__, hashlib.sha256(pickle.dumps(value)).hexdigest())


def _state_of(value: Any) -> Any:
    """Return what an object says of itself; None if it says nothing."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    for name in ("state_dict", "get_state", "getstate"):
        if callable(getattr(value, name, None)):
            return getattr(value, name)()
    return None


def differences(expected: Record, found: Record) -> list[str]:
    """Return a line for each of the first values that differ, and one that counts the rest; [] if all are equal."""
    lines = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found or name not in expected:
            lines.append(f"{name} is {'missing' if name not in found else 'new'}")
        elif (line := _difference(expected[name], found[name])) is not None:
            lines.append(f"{name}{line}")
    more = len(lines) - _NAMED
    return [*lines[:_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _difference(one: Any, other: Any) -> str | None:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None if type(one) is type(other) and one == other else f" is {_short(other)}, not {_short(one)}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f" is {other.dtype} {tuple(other.shape)}, not {one.dtype} {tuple(one.shape)}"
    unequal = _bits(one) != _bits(other)
    if not bool(unequal.any()):
        return None
    most = (one.to(torch.complex128) - other.to(torch.complex128)).abs().max().item()
    return f" differs in {int(unequal.sum())} of {unequal.numel()} bytes, by at most {most:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    return plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def _short(value: Any) -> str:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
