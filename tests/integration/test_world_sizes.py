"""What 1, 2, 3 or 4 ranks saved, or left as a snapshot, is loaded by 1, 2, 3 or 4 ranks, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import RefusedOnlyCopy
from tests.integration.world_sizes_job import (
    KINDS,
    SIZES,
    Found,
    load_every_save,
    save_every_kind,
    together,
    values_of_a_rank,
)
from tests.kit.formats import same_bits
from tests.kit.processes import run_ranks
from tests.kit.training import running

pytestmark = pytest.mark.long


class Jobs:
    """By number of ranks: what each rank had when they saved, and what each found when they loaded."""

    def __init__(self, base: str) -> None:
        self.had: dict[int, list[Found]] = {size: run_ranks(size, save_every_kind, base) for size in SIZES}
        self.found: dict[int, list[Any]] = {size: run_ranks(size, load_every_save, base) for size in SIZES}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(str(tmp_path_factory.mktemp("sizes")))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("saved", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_loads_what_any_number_saved(jobs: Jobs, kind: str, saved: int, size: int) -> None:
    samples = [had["extra"]["samples"] for had in jobs.had[saved]]
    for rank, loaded in enumerate(jobs.found[size]):
        found = loaded[kind, saved]
        own = rank if rank < saved else 0
        had = dict(jobs.had[saved][0])
        if kind == "emergency" and saved == size:  # each rank gets its own buffers back
            had["model"] = jobs.had[saved][rank]["model"]
        seen = samples[own] if saved == size else together(samples, rank, size)
        had["extra"] = {**jobs.had[saved][own]["extra"], "samples": seen}
        assert found["kind"] == kind
        same_bits(had, found["state"])
        parts = [line.partition(":")[0] for line in found["missing"]]
        assert parts == (["rng"] if rank >= saved else [])


def test_a_snapshot_whose_ranks_held_other_parameters_is_refused_by_another_number(tmp_path: Path) -> None:
    run_ranks(2, values_of_a_rank, str(tmp_path))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[1].bias.clone()
    expected = "each of 2 ranks has values of its own, so only that many can load it; this start has 1"
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match=expected) as refused:
        manager.resume(TrainState(model))
    assert "2 ranks" in refused.value.hint
    assert torch.equal(model[1].bias, before)
