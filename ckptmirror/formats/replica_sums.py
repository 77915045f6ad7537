"""Checksums of the model and optimizer tensors that a rank holds, for ranks to compare (``core.replica_agreement``).

Rules:
* For tensors that this rank saves, the sums computed while writing are used.
* Tensors that rank 0 saves for this rank (its buffers and averages, and all of a replica without kind ``dcp``) are
  summed on their device before the host copy, in one pass, while rank 0 copies as many bytes. Only the sums are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core import per_rank
from ckptmirror.core.model import Kind
from ckptmirror.core.replica_agreement import AVERAGES, BUFFERS, PLAIN, WHOLE, Held, of_stage
from ckptmirror.formats.base import Snapshot
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.tensor_bytes import has_memory, has_plain_bytes
from ckptmirror.sums.digests import sum32_there

__all__ = ["LeftOut", "held_by", "sum_left_out"]

_AVERAGE = "ema"

LeftOut = list[tuple[list[tuple[str, str]], torch.Tensor]]
"""For each device: (name, shape and dtype) of each tensor, and the sums of all of them."""


def sum_left_out(snapshot: Snapshot) -> LeftOut:
    """Sum the tensors that rank 0 saves for this rank; the sums stay on the tensors' devices."""
    found: dict[torch.device, list[tuple[tuple[str, str], torch.Tensor]]] = {}
    for name, tensor in snapshot.left_out.items():
        if has_plain_bytes(tensor) and has_memory(tensor):
            found.setdefault(tensor.device, []).append(((name, _form(tensor)), sum32_there(tensor)))
    return [([what for what, _ in there], torch.stack([total for _, total in there])) for there in found.values()]


def held_by(
    snapshot: Snapshot,
    listed: Sequence[Mapping[str, Any]],
    left_out: LeftOut,
    kinds: Sequence[Kind],
    stage: int | None = None,
) -> list[Held]:
    """Return an entry for every tensor or piece that this rank holds.

    Args:
        snapshot: The host copy.
        listed: The entries of ``tensors_*.json``, with their sums.
        left_out: The sums, in host memory, of tensors that are not in the snapshot.
        kinds: The kinds of the save.
        stage: This rank's stage.
    """
    held = []
    once = not snapshot.sharded and "dcp" not in kinds  # only rank 0 saves it, so the other ranks have only one sum
    tensors = walk_tensors({"model": snapshot.model, "optimizer": snapshot.optimizer})
    if not snapshot.sharded and stage is None and per_rank.KEY not in snapshot.extra:  # else each rank saves its own
        tensors += walk_tensors({_AVERAGE: snapshot.extra.get(_AVERAGE)})
    entries = {entry["name"]: entry for entry in listed if "sum32" in entry}
    for name, tensor in tensors:
        if (entry := entries.get(name)) is None or "per_rank" in entry:
            continue
        if isinstance(tensor, DTensor):
            group = f"{tuple(tensor.device_mesh.shape)} {tensor.placements}"
            piece, sums = f"{entry['offsets']} {entry['sizes']}", f"{entry['sum32']} {entry['crc32c']}"
        else:
            group, piece = _group(name, snapshot), ""
            sums = f"{entry['sum32']}" if once or group != WHOLE else f"{entry['sum32']} {entry['crc32c']}"
        held.append(Held(of_stage(group, stage), name, piece, f"{_form(tensor)} {sums}"))
    held += [Held(of_stage(PLAIN, stage), name, "", digest) for name, digest in snapshot.plain.items()]
    for names, totals in left_out:
        for (name, form), total in zip(names, totals.tolist(), strict=True):
            held.append(Held(of_stage(_group(name, snapshot), stage), name, "", f"{form} {total & 0xFFFFFFFF}"))
    return held


def _group(name: str, snapshot: Snapshot) -> str:
    if name in snapshot.buffers:
        return BUFFERS
    return AVERAGES if name.partition(".")[0] == _AVERAGE else WHOLE


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
