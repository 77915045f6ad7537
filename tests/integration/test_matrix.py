"""What any number of ranks saved, or left as a snapshot, is loaded by any number of ranks, bit for bit.

``make matrix`` runs all of it: kinds, wrappers, 1 to 8 ranks on each side, and kills in the next save. ``make test``
has a slice.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import RefusedOnlyCopy
from tests.integration.matrix_job import (
    COMMITTED,
    FULL,
    KILLS,
    KINDS,
    STEP,
    WAIT_S,
    Found,
    Saved,
    load_all,
    save_all,
    together,
    values_of_a_rank,
)
from tests.kit.formats import same_bits
from tests.kit.processes import run_ranks
from tests.kit.training import running

SIZES = (1, 2, 3, 4, 8) if FULL else (1, 2, 3)
WRAPPED = ("fsdp", "ddp", "compiled") if FULL else ("fsdp", "ddp")
KILLED = KILLS if FULL else ()


def saves(wrapped: str, ranks: int) -> list[Saved]:
    return [Saved(wrapped, kind, ranks) for kind in KINDS]


def killed(wrapped: str, ranks: int) -> list[Saved]:
    return [Saved(wrapped, kind, ranks, point) for kind in KINDS if kind != "emergency" for point in KILLED]


class Jobs:
    """By wrapper and number of ranks: what each rank had when they saved, and what each found when they loaded."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._had: dict[tuple[str, int], list[dict[int, Found]]] = {}
        self._found: dict[tuple[str, int], list[Any]] = {}

    def had(self, wrapped: str, ranks: int) -> list[dict[int, Found]]:
        """What each rank held, by step. The same training is killed in jobs that leave no word."""
        if (wrapped, ranks) not in self._had:
            self._had[wrapped, ranks] = self._run(ranks, save_all, saves(wrapped, ranks))
            for saved in killed(wrapped, ranks):
                self._run(ranks, save_all, [saved], dead=tuple(range(ranks)))
        return self._had[wrapped, ranks]

    def found(self, wrapped: str, ranks: int) -> list[dict[Saved, Found]]:
        """What each of so many ranks found of everything that was saved under this wrapper."""
        if (wrapped, ranks) not in self._found:
            every = [one for size in SIZES for one in (*saves(wrapped, size), *killed(wrapped, size))]
            for size in SIZES:
                self.had(wrapped, size)
            self._found[wrapped, ranks] = self._run(ranks, load_all, every)
        return self._found[wrapped, ranks]

    def _run(self, ranks: int, job: Any, ways: list[Saved], **more: Any) -> list[Any]:
        said = run_ranks(ranks, job, self._base, ways, limit_s=WAIT_S, **more)
        return [pickle.loads(one) for one in said if one is not None]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(str(tmp_path_factory.mktemp("matrix")))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    "wrapped", [pytest.param(one, marks=pytest.mark.long if one == "ddp" else ()) for one in WRAPPED]
)
def test_any_number_of_ranks_loads_what_any_number_saved(jobs: Jobs, wrapped: str, ranks: int, size: int) -> None:
    held, after = jobs.had(wrapped, ranks), jobs.found(wrapped, size)
    for saved in (*saves(wrapped, ranks), *killed(wrapped, ranks)):
        step = STEP + 1 if saved.killed == COMMITTED else STEP
        before = [of_rank[step] for of_rank in held]
        samples = [had["extra"]["samples"] for had in before]
        for rank, loaded in enumerate(after):
            found = loaded[saved]
            own = rank if rank < ranks else 0
            had = dict(before[0])
            if (saved.kind, wrapped) == ("emergency", "fsdp") and ranks == size:  # each rank gets its own buffers back
                had["model"] = before[rank]["model"]
            seen = samples[own] if ranks == size else together(samples, rank, size)
            had["extra"] = {**before[own]["extra"], "samples": seen}
            assert (found["step"], found["kind"]) == (step, saved.kind), saved
            same_bits(had, found["state"], str(saved))
            parts = [line.partition(":")[0] for line in found["missing"]]
            assert parts == (["rng"] if rank >= ranks else []), saved


def test_a_snapshot_whose_ranks_held_other_parameters_is_refused_by_another_number(tmp_path: Path) -> None:
    run_ranks(2, values_of_a_rank, str(tmp_path))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[1].bias.clone()
    expected = "each of 2 ranks has values of its own, so only that many can load it; this start has 1"
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match=expected) as refused:
        manager.resume(TrainState(model))
    assert "2 ranks" in refused.value.hint
    assert torch.equal(model[1].bias, before)
