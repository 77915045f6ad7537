"""What a rank holds of model and optimizer, for ranks to compare (``core.replicas``).

Rules:
* What a rank saves was summed as it was written: those sums are used.
* What rank 0 saves for it (its buffers, and all of a replica without kind ``dcp``) is summed where it lies, before the
  host copy, in one pass: while rank 0 copies as many bytes, and without a copy of it here. A few bytes are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.model import Kind
from ckptmirror.core.replicas import BUFFERS, WHOLE, Held
from ckptmirror.formats.base import Snapshot
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.tensor_bytes import has_plain_bytes, sum32_there

__all__ = ["LeftOut", "held_by", "sum_left_out"]

LeftOut = list[tuple[list[tuple[str, str]], torch.Tensor]]
"""Of each device: (name, shape and dtype) of each tensor, and their sums."""


def sum_left_out(snapshot: Snapshot) -> LeftOut:
    """Sum what rank 0 saves for this rank; the sums are where the tensors are."""
    found: dict[torch.device, list[tuple[tuple[str, str], torch.Tensor]]] = {}
    for name, tensor in snapshot.left_out.items():
        if has_plain_bytes(tensor) and (tensor.untyped_storage().nbytes() or not tensor.numel()):
            found.setdefault(tensor.device, []).append(((name, _form(tensor)), sum32_there(tensor)))
    return [([what for what, _ in there], torch.stack([total for _, total in there])) for there in found.values()]


def held_by(
    snapshot: Snapshot, listed: Sequence[Mapping[str, Any]], left_out: LeftOut, kinds: Sequence[Kind]
) -> list[Held]:
    """Return what this rank holds.

    Args:
        snapshot: The host copy.
        listed: The entries of ``tensors_*.json``, with their sums.
        left_out: The sums of what is not in the snapshot, in host memory.
        kinds: Of the save.
    """
    held = []
    once = not snapshot.sharded and "dcp" not in kinds  # rank 0 alone saves it, and the others have but one sum
    tensors = walk_tensors({"model": snapshot.model, "optimizer": snapshot.optimizer})
    entries = {entry["name"]: entry for entry in listed if "sum32" in entry}
    for name, tensor in tensors:
        if (entry := entries.get(name)) is None:
            continue
        if isinstance(tensor, DTensor):
            group = f"{tuple(tensor.device_mesh.shape)} {tensor.placements}"
            piece, sums = f"{entry['offsets']} {entry['sizes']}", f"{entry['sum32']} {entry['crc32c']}"
        else:
            group, piece = BUFFERS if name in snapshot.buffers else WHOLE, ""
            sums = f"{entry['sum32']}" if once or group == BUFFERS else f"{entry['sum32']} {entry['crc32c']}"
        held.append(Held(group, name, piece, f"{_form(tensor)} {sums}"))
    for names, totals in left_out:
        for (name, form), total in zip(names, totals.tolist(), strict=True):
            group = BUFFERS if name in snapshot.buffers else WHOLE
            held.append(Held(group, name, "", f"{form} {total & 0xFFFFFFFF}"))
    return held


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
