"""Ranks that hold other values under one name are refused at save, by name; what ranks may differ in is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptmirror.core.model import Kind
from tests.integration.equal_ranks_job import KINDS, everything_that_happens, save_with_average, snapshot_of_unequal
from tests.kit.processes import run_ranks
from tests.kit.roots import whole
from tests.kit.training import same

Found = list[dict[str, Any]]


class Job:
    def __init__(self, base: Path, ranks: int, kinds: str) -> None:
        self.base, self.kinds = base, KINDS[kinds]
        self.ranks: Found = run_ranks(ranks, everything_that_happens, str(base), kinds)


@pytest.fixture(scope="module", params=[(2, "dcp"), (2, "model"), (3, "both")], ids=lambda p: f"{p[0]} ranks {p[1]}")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ranks"), *request.param)


UNEQUAL = ["expert", "local steps", "moment", "frozen"]


@pytest.mark.parametrize("what", UNEQUAL)
def test_ranks_that_hold_other_values_under_one_name_are_refused_on_every_rank(job: Job, what: str) -> None:
    for found in job.ranks:
        assert found[what][0] == "RanksDiffer", found[what]
        assert found[what][3] == 2
        assert "broadcast" in found[what][2]


@pytest.mark.parametrize("what", UNEQUAL)
def test_a_save_of_unequal_ranks_leaves_nothing_and_the_next_save_works(job: Job, what: str) -> None:
    before = list(range(1, 2 + UNEQUAL.index(what)))
    for found in job.ranks:
        assert found[f"left by {what}"] == (before, [])
        assert found[f"after {what}"][0] == "saved"


def test_the_refusal_names_the_tensors_and_the_ranks(job: Job) -> None:
    last = len(job.ranks) - 1
    for found in job.ranks:
        assert "model.expert.weight" in found["expert"][1]
        assert "model.shared" not in found["expert"][1]
        assert "more" in found["local steps"][1]
        assert "optimizer.state.shared.weight.exp_avg " in found["moment"][1]
        assert "model." not in found["moment"][1]
        assert f" and rank {last}," in found["moment"][1]


def test_an_emergency_snapshot_of_ranks_that_were_refused_keeps_what_each_has(job: Job) -> None:
    for found in job.ranks:
        assert found["before the emergency"][0] == "RanksDiffer"
        assert found["emergency resumed"][0] == (7, "emergency")
        assert same(found["emergency resumed"][1], found["emergency saved"])
    assert not same(job.ranks[0]["emergency saved"], job.ranks[1]["emergency saved"])


def test_data_parallel_replicas_with_running_averages_of_their_own_are_saved(job: Job) -> None:
    for found in job.ranks:
        assert [found[f"replicas {at}"][0] for at in (1, 2, 3)] == ["saved"] * 3
    first, second = (found["replicas"]["norm.running_mean"] for found in job.ranks[:2])
    assert not torch.equal(first, second), "nothing is tested"


def test_every_running_average_that_is_saved_is_rank_0s(job: Job, tmp_path: Path) -> None:
    root = job.base / "replicas"
    meta = whole(root)[3]
    if "dcp" in job.kinds:
        dcp_to_torch_save(root / "dcp_000003", tmp_path / "whole.pt")
        found = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
        assert same(found, job.ranks[0]["replicas"])
    if "model" in job.kinds:
        found = torch.load(root / "model_000003.pt", weights_only=True)
        assert same(dict(found), job.ranks[0]["replicas"])
    assert meta.kinds == job.kinds


@pytest.mark.parametrize(("differ_in", "stage"), [("moments", None), ("names", None), ("names", 0)])
def test_so_does_one_of_ranks_that_were_refused_for_what_they_have_at_all(
    tmp_path: Path, differ_in: str, stage: int | None
) -> None:
    found = run_ranks(2, snapshot_of_unequal, tmp_path, differ_in, stage)
    for kind, before, after in found:
        assert kind == "RanksDiffer"
        assert same(after, before)
    assert not same(found[0][1], found[1][1])


def test_running_averages_that_differ_are_named_once_by_one_rank(job: Job) -> None:
    lines = [line for found in job.ranks for line in found["replicas lines"] if "norm.running_mean" in line]
    assert len(lines) == 1
    assert "norm.running_var" in lines[0]
    assert "rank 0" in lines[0]
    assert "weight" not in lines[0]


def test_averages_of_the_weights_that_differ_are_named_once_by_one_rank(job: Job) -> None:
    lines = [line for found in job.ranks for line in found["replicas lines"] if "ema." in line]
    assert len(lines) == 1
    assert "ema.bias" in lines[0]
    assert "ema.weight" not in lines[0]


def test_an_average_that_only_rank_0_keeps_is_nothing_to_compare(tmp_path: Path) -> None:
    """The others built it on the meta device, to save its memory, and every save was refused."""
    assert run_ranks(2, save_with_average, tmp_path / "root", "of rank 0") == ["saved", "saved"]


@pytest.mark.parametrize("kinds", KINDS.values())
def test_an_average_that_is_one_tensor_is_compared_as_averages_are(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    assert run_ranks(2, save_with_average, tmp_path / "root", "one tensor", kinds) == ["saved", "saved"]


def test_what_get_extra_state_returns_is_named_once_where_it_differs(job: Job) -> None:
    assert [found[f"counters {at}"][0] for found in job.ranks for at in (1, 2, 3)] == ["saved"] * 3 * len(job.ranks)
    assert [found["counters alike"] for found in job.ranks] == [[] for _ in job.ranks]
    (line,) = [line for found in job.ranks for line in found["counters apart"]]
    assert "different values of model._extra_state: this save and later ones keep rank 0's" in line


def test_shards_may_differ_and_what_is_replicated_as_a_dtensor_may_not(job: Job) -> None:
    for found in job.ranks:
        assert found["shards"][0] == "saved", found["shards"]
        assert found["replicated apart"][0] == "RanksDiffer"
        assert "model.norm" in found["replicated apart"][1]
        assert "model.weight" not in found["replicated apart"][1]
        assert found["shards again"][0] == "saved"


def test_equal_ranks_are_saved(job: Job) -> None:
    for found in job.ranks:
        assert found["equal"][0] == "saved"
