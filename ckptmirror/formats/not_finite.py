"""Which tensors of a save hold NaN or infinity.

Rules:
* One pass over the memory: a sum is finite only if each value is. One that overflows is told apart by a second pass.
* Saving them is not refused: whoever looks for the cause needs them.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.per_rank import with_own
from ckptmirror.formats.base import Snapshot
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.tensor_bytes import has_plain_bytes

__all__ = ["not_finite"]


def not_finite(snapshot: Snapshot) -> list[str]:
    """Return the names of the model's tensors, as this rank's host copy has them, that hold NaN or infinity.

    Args:
        snapshot: The host copy.
    """
    held = with_own(snapshot.model, None, snapshot.extra)["model"]
    return [name for name, tensor in walk_tensors({"model": held}) if not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_checked = own.is_floating_point() or own.is_complex()
    if not is_checked or own.element_size() < 2 or not has_plain_bytes(own):
        return True  # of one byte: no arithmetic
    own = own.detach()
    return bool(own.sum().isfinite()) or bool(own.isfinite().all())
