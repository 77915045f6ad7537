"""DistributedDataParallel: how its resumed runs take the same steps, bit for bit, on three and more ranks.

DDP sums gradients in buckets. It begins with one layout of buckets and changes to another, by the order in which the
gradients came, after its first backward pass in a process. A sum over three or more ranks depends in its last bits on
where in a bucket a gradient is. So the first step after a resume differs in the last bits from the same step of a run
that was not interrupted, although every loaded value is equal. Two ways out, both for every start of the run:

* :func:`rebuild_buckets`: one backward pass that counts for nothing, before ``manager.resume``.
* ``DistributedDataParallel(model, find_unused_parameters=True)``: DDP then keeps its first layout; each step takes a
  little longer.

On one or two ranks neither is needed: the sum of two numbers has only one order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["rebuild_buckets"]


def rebuild_buckets(model: DistributedDataParallel, loss: Callable[[DistributedDataParallel], Tensor]) -> None:
    """Run one backward pass that counts for nothing, so that DDP has the buckets of every later step from now on.

    Call it on every rank at every start, also the first of the run, after you wrap the model and before
    ``manager.resume(state)``. Parameters, buffers and torch's random number generators keep their values; gradients are
    None afterwards. The hooks of the model run as in any step.

    Args:
        model: The wrapped model.
        loss: Computes a loss from ``model`` for a batch of the right shape, such as zeros. Do not take the batch from
            the data loader: it would be lost. Every parameter that a real step uses must take part.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {one.device.index for one in model.parameters() if one.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        loss(model).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
