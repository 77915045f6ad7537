"""All code that talks between ranks: the channel, the host copy and the request to stop.

Rules:
* :func:`open_ranks` is the only entry point. It never imports torch: if torch is not imported yet, there is one rank.
* ``host_copy`` and ``gloo`` import torch, so the modules that need them import them, not this one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.base import Ranks
from ckptmirror.ranks.nodes import Probe
from ckptmirror.ranks.single import SingleRank
from ckptmirror.ranks.stop import StopRequest

__all__ = ["DEFAULT_TIMEOUT_S", "Ranks", "SingleRank", "StopRequest", "node_key_of", "open_ranks"]

DEFAULT_TIMEOUT_S = 600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_ranks(
    process_group: Any = None,
    *,
    node_key: str = "",
    probe: Probe | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    error: BaseException | None = None,
) -> Ranks:
    """Open the channel between the ranks of the job. All ranks of ``process_group`` call this, in the same order.

    Args:
        process_group: The ranks to talk to; None means all of them. The group itself carries no message.
        node_key: Ranks that pass the same text are one node, so it identifies the root that they write to
            (:func:`node_key_of` for a root on a local disk).
        probe: How to find out whether ranks with different keys share a root after all; None if they do not. All ranks
            give one, or none.
        timeout_s: The limit of every wait on this channel and on those opened from it.
        error: What keeps this rank from opening one: it is raised here, and all other ranks raise that it was.

    Returns:
        A :class:`SingleRank` if torch.distributed is not in use.

    Raises:
        UsageError: This process is not in ``process_group``; or torchrun started it as one of several ranks, and
            torch.distributed is not in use.
        WaitTimeout: Not all ranks called this in time.
        CkptMirrorError: A root cannot be probed.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if error is not None:
            raise error
        _check_alone()
        return SingleRank()
    from ckptmirror.ranks.gloo import GlooRanks

    return GlooRanks.open(process_group, node_key=node_key, probe=probe, timeout_s=timeout_s, error=error)


def _check_alone() -> None:
    """Raise UsageError if torchrun started this process as one of several ranks, which know nothing of one another."""
    size = os.environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in os.environ and size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"torchrun started this process as rank {os.environ.get('RANK', '?')} of {size}, but torch.distributed is "
            "not initialised, so each rank would save as a job of its own.",
            hint="Call torch.distributed.init_process_group before you create the CheckpointManager.",
        )


def node_key_of(root: str | os.PathLike[str]) -> str:
    """Return the node key of a root: this boot of this host, its name, and the directory's own identity.

    Ranks with one key share a root. Ranks on other hosts, or with another mount of the directory, have other keys. The
    boot alone does not tell hosts apart that go on from one image of a machine's memory.
    """
    found = Path(root).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{boot}:{os.uname().nodename}:{found.st_dev}:{found.st_ino}"
