"""Checks values of a live model that share memory: whether each of them can get the value saved under its name.

Rules:
* The check uses separate memory, before the model is written. Values that were saved as shared or as equal may share.
* Only values that share bytes are checked; the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.already_filled import Span, same, share_bytes, span_of
from ckptmirror.formats.shards import Stored, fill, fills, local_of, region_of

__all__ = ["refuse_two_values"]

_ALIGNED = 16  # bytes of the largest item


def refuse_two_values(live: Mapping[str, torch.Tensor], saved: Mapping[str, Stored]) -> None:
    """Refuse a model whose tied values were saved with values that differ.

    Args:
        live: The tensors that will be filled, in this order.
        saved: What was saved under each live name.

    Raises:
        UsageError: Names two of them.
    """
    for run in _sharing(live):
        names = [name for name in live if name in run]
        held = [piece for name in names if (piece := saved[name].held) is not None and fills(piece.data)]
        is_one_there = len(held) == len(names) and len({piece.region for piece in held}) == 1
        if is_one_there and _is_one(piece.data for piece in held) and _is_one(span.tensor for span in run.values()):
            continue
        views = _like(run)
        values = {name: torch.empty(views[name].shape, dtype=views[name].dtype, device="cpu") for name in names}
        for name, value in values.items():
            region = region_of(live[name])
            fill(value, region, saved[name].pieces(region), name)
            views[name].copy_(value)
        for index, name in enumerate(names):
            if not same(views[name], values[name]):
                other = next((n for n in names[index + 1 :] if share_bytes(run[name], run[n])), names[0])
                raise UsageError(
                    f"{name} and {other} share memory in this model (they are tied) and were saved with values that "
                    "differ: they cannot be given both.",
                    hint="Build the model as it was saved: with memory of its own for each.",
                )


def _sharing(live: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Span]]:
    """Yield the names whose tensors share bytes, and where these lie, those of one place together."""
    locals_ = {name: local_of(value) for name, value in live.items()}
    spans = [(span, name) for name, local in locals_.items() if not local.is_quantized and (span := span_of(local))]
    runs: list[dict[str, Span]] = []
    storage, end = None, -1
    for span, name in sorted(spans, key=lambda item: (str(item[0].storage), item[0].begin)):
        if span.storage != storage or span.begin >= end:
            runs.append({})
            storage, end = span.storage, -1
        runs[-1][name] = span
        end = max(end, span.end)
    for run in runs:
        shared = {n: one for n, one in run.items() if any(o is not one and share_bytes(one, o) for o in run.values())}
        if shared:
            yield shared


def _is_one(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all show the same memory in the same way."""
    return len({(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors}) == 1


def _like(run: Mapping[str, Span]) -> dict[str, torch.Tensor]:
    """Return tensors in host memory that share their bytes as those of ``run`` do."""
    first = min(span.begin for span in run.values()) // _ALIGNED * _ALIGNED
    size_bytes = max(span.end for span in run.values()) - first
    memory = torch.zeros(-(-size_bytes // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device="cpu")
    views = {}
    for name, span in run.items():
        tensor = span.tensor
        offset = (span.begin - first) // tensor.element_size()
        views[name] = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
    return views
