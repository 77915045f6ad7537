"""The host copy in the modes that the training may save in: inference, another default device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptmirror.ranks.gloo import _frames
from ckptmirror.ranks.host_copy import HostCopier


def tree(value: float) -> dict[str, Any]:
    base = torch.full((4, 6), value)
    return {
        "alone": torch.full((3,), value),
        "views": [base[0], base[1:3]],
        "column": torch.full((9, 9), value)[:, 2],
        "empty": torch.empty(0, 3),
        "large": torch.full((70_000,), value),
    }


def found(copier: HostCopier, value: float) -> list[torch.Tensor]:
    with copier.copy(tree(value)) as lease:
        copied = lease.tree
        flat = [copied["alone"], *copied["views"], copied["column"], copied["empty"], copied["large"]]
        assert all(tensor.device.type == "cpu" for tensor in flat)
        return [tensor.clone() for tensor in flat]


@pytest.mark.parametrize("first", [True, False])
def test_memory_taken_in_inference_mode_is_written_outside_of_it_and_the_other_way_round(first: bool) -> None:
    copier = HostCopier()
    for turn, inference in enumerate((first, not first, first)):
        with torch.inference_mode(mode=inference):
            assert all(bool((tensor == turn).all()) for tensor in found(copier, float(turn)))


def test_memory_that_was_reserved_in_inference_mode_is_written_outside_of_it() -> None:
    copier = HostCopier()
    with torch.inference_mode():
        copier.reserve(tree(0.0))
    assert all(bool((tensor == 2).all()) for tensor in found(copier, 2.0))


def test_the_default_device_of_the_training_is_not_that_of_host_memory() -> None:
    copier, source = HostCopier(), tree(3.0)
    with torch.device("meta"):
        lease = copier.copy(source)
        (frame,) = _frames(b"a report")
    assert frame.device.type == "cpu"
    for tensor in (lease.tree["alone"], *lease.tree["views"], lease.tree["column"], lease.tree["empty"]):
        assert tensor.device.type == "cpu"
    assert bool((lease.tree["column"] == 3).all())
