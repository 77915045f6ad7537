"""Child processes that begin with everything imported and none of it used.

They are forked by a process that does nothing else: torch takes seconds to import, and what it has started (threads,
pools, connections) outlives no fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

__all__ = ["Pipe", "process"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "pytest", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
    "ckptmirror.manager", "ckptmirror.flow.start.leader", "tests.integration.rank_processes", "tests.stage_place",
])  # fmt: skip
Pipe = _CONTEXT.Pipe


def process(work: Callable[..., object], *arguments: Any, **more: Any) -> ForkServerProcess:
    """A process that will do ``work``, a function of a module, in today's environment; it dies with this one."""
    return _CONTEXT.Process(target=_begin, args=(dict(os.environ), work, arguments, more), daemon=True)


def _begin(environment: dict[str, str], work: Callable[..., object], arguments: Any, more: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments, **more)
