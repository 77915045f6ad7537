"""Loaders of training data that continue exactly: every sample of an epoch once, on any number of ranks and workers.

Pass one as ``TrainState(dataloader=...)``. ``import ckptmirror`` does not import this package; it imports torch.
"""

from __future__ import annotations

from ckptmirror.data.samples import SampleLoader
from ckptmirror.data.shards import ShardLoader

__all__ = ["SampleLoader", "ShardLoader"]
