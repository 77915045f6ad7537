"""A training on a GPU that was killed and resumed equals one that was not, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest

from ckptmirror.testing import assert_exact_resume
from tests.cuda import trainings

BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("way", ["plain", "fused", "scaled", "graphed", "compiled"])
def test_one_process(way: str) -> None:
    assert_exact_resume(partial(trainings.state, way), trainings.step)


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
@pytest.mark.parametrize("way", ["sharded", "offloaded", "replicated"])
def test_one_rank_of_a_group(way: str, kind: str) -> None:
    assert_exact_resume(partial(trainings.state, way), trainings.step, steps=4, kinds=(kind,), backend=BOTH)


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_two_ranks_on_one_gpu(kind: str) -> None:
    """Over gloo: nccl wants a GPU for each rank."""
    make = partial(trainings.state, "replicated")
    assert_exact_resume(make, trainings.step, steps=4, kinds=(kind,), world_size=2, backend="gloo")
