"""Calls a function before optimizers of this process step, without touching them.

Rules:
* A step that is being compiled, or recorded into a CUDA graph, is left alone: nothing may be read there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["before_steps"]


def before_steps(call: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``call`` with each optimizer that is about to step; return a function that ends this.

    That function must not be called from ``call``: torch is iterating over its hooks then.
    """

    def hook(optimizer: Any, _args: tuple[Any, ...], _named: Mapping[str, Any]) -> None:
        is_recorded = _has_cuda() and torch.cuda.is_current_stream_capturing()
        if not torch.compiler.is_compiling() and not is_recorded:
            call(optimizer)

    return register_optimizer_step_pre_hook(hook).remove


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # as torch has it
