"""How large DCP's ``.metadata`` is for each piece of a tensor, and how long reading it takes: it has one per rank."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptmirror.formats.dcp_metadata import loads_metadata

TENSORS = 1000
"""Of a model of 300 parameters with AdamW, roughly: each, and its two moments."""

_SAMPLE_TENSORS, _SAMPLE_RANKS = 20, 400


@dataclass(frozen=True)
class Pieces:
    """What one piece of a tensor costs."""

    bytes: float
    read_s: float


def measure_pieces() -> Pieces:
    """Make a ``.metadata`` as torch pickles it, and read it as ckptmirror does."""
    entries, storage = {}, {}
    properties = dcp.TensorProperties(torch.float32)
    for number in range(_SAMPLE_TENSORS):
        name = f"optimizer.state.layers.{number}.attention.weight.exp_avg"
        chunks = []
        for rank in range(_SAMPLE_RANKS):
            offsets = torch.Size((rank * 8, 0))
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size((8, 4096))))
            index = dcp.MetadataIndex(name, offsets, rank)
            storage[index] = _StorageInfo(f"__{rank}_0.distcp", number * 131_072, 131_072)
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size((8 * _SAMPLE_RANKS, 4096)), chunks)
    data = pickle.dumps(dcp.Metadata(dict(entries), {}, storage))
    started = time.process_time()
    loads_metadata(data, ".metadata")
    count = _SAMPLE_TENSORS * _SAMPLE_RANKS
    return Pieces(len(data) / count, (time.process_time() - started) / count)
