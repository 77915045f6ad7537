"""What the ranks have of their own (``TrainState.per_rank``) is saved and restored for each rank, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmirror
from ckptmirror.core.model import Kind
from tests.integration.per_rank_job import everything_that_happens, others, refusals, sharded
from tests.kit.processes import run_ranks
from tests.kit.roots import whole
from tests.kit.training import same


class Job:
    def __init__(self, base: Path, ranks: int, kinds: tuple[Kind, ...]) -> None:
        self.base, self.kinds = base, kinds
        self.ranks: list[dict[str, Any]] = run_ranks(ranks, everything_that_happens, str(base), kinds)
        self.others: list[dict[str, Any]] = run_ranks(5 - ranks, others, str(base), kinds)


@pytest.fixture(scope="module", params=[(2, ("dcp",)), (3, ("model",)), (3, ("dcp", "model"))], ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ranks"), *request.param)


def test_each_rank_gets_back_its_own(job: Job) -> None:
    for found in job.ranks:
        assert found["save"][0] == "saved", found["save"]
        assert same(found["resumed at 2"], found["at 2"])
    first, second, *_ = (found["at 2"] for found in job.ranks)
    assert not torch.equal(first["model"]["experts.0.weight"], second["model"]["experts.0.weight"])
    assert not torch.equal(first["model"]["norm.running_mean"], second["model"]["norm.running_mean"])
    assert torch.equal(first["model"]["shared.weight"], second["model"]["shared.weight"])
    assert first["optimizer"]["state"].keys() != second["optimizer"]["state"].keys(), "nothing is tested"


def test_the_training_goes_on_as_without_a_stop(job: Job) -> None:
    for found in job.ranks:
        assert same(found["resumed and at 4"], found["at 4"])


def test_the_save_says_what_each_rank_has_of_its_own(job: Job) -> None:
    for found in job.ranks:
        assert same(found["resumed without per_rank"], found["at 2"])


def test_a_load_that_gives_a_rank_the_values_of_rank_0_is_found(job: Job) -> None:
    for found in job.ranks:
        assert found["rank 0's"][0] == "LoadDiffers", found["rank 0's"]
        assert "experts.0.weight (rank 1)" in found["rank 0's"][1]


def test_each_rank_gets_back_its_own_from_an_emergency_snapshot(job: Job) -> None:
    for found in job.ranks:
        assert found["emergency"] == (4, "emergency")
        assert same(found["resumed from the emergency"], found["at 4"])


def test_the_kinds_are_whole_models_of_rank_0(job: Job) -> None:
    root = job.base / "root"
    for kind, path in (("dcp", "dcp_000002"), ("model", "model_000002.pt")):
        if kind in whole(root)[2].kinds:
            loaded = ckptmirror.load_checkpoint(root / path)
            assert same(dict(loaded.model), job.ranks[0]["at 2"]["model"])


def test_another_number_of_ranks_is_refused_before_anything_changes(job: Job) -> None:
    there, here = len(job.ranks), len(job.others)
    for found in job.others:
        for how in ("resume", "load"):
            kind, text, hint = found[how]
            assert kind == "UsageError", found[how]
            assert "experts.*" in text
            assert f"it had {there} ranks" in text
            assert f"{here} ranks cannot" in text
            assert "exclude=" in hint
        assert same(found["before"], found["after"])
        assert found["without"] == 4


@pytest.mark.parametrize(("ranks", "kinds"), [(3, ("dcp",)), (2, ("model",))])
def test_beside_shards_too_each_rank_gets_back_its_own(tmp_path: Path, ranks: int, kinds: tuple[Kind, ...]) -> None:
    results = run_ranks(ranks, sharded, str(tmp_path), kinds)
    for found in results:
        assert found["save"][0] == "saved", found["save"]
        assert found["load"][0] == "done", found["load"]
        assert same(found["loaded at 1"], found["at 1"])
        assert same(found["resumed at 2"], found["at 1"])
    for name in ("1.running_mean", "2.weight"):
        assert not torch.equal(*(found["at 1"]["model"][name] for found in results[:2]))


@pytest.mark.parametrize(("ranks", "kinds"), [(2, ("dcp",)), (3, ("model",))])
def test_what_cannot_be_saved_for_each_rank_is_refused(tmp_path: Path, ranks: int, kinds: tuple[Kind, ...]) -> None:
    for found in run_ranks(ranks, refusals, str(tmp_path), kinds):
        for when in ("typo", "typo at save"):
            assert found[when][0] in ("UsageError", "BackgroundSaveFailed"), found[when]
            assert "'expert.*'" in found[when][1]
            assert "experts.*" in found[when][1]
        kind, text, hint, _ = found["some not declared"]
        assert kind == "RanksDiffer", found["some not declared"]
        assert "model.experts.0.weight" in text
        assert "model.experts.1" not in text
        assert "per_rank=" in hint
        assert "declare different names with per_rank" in found["declared by some"][1]
        kind, text, *_ = found["shared"]
        assert kind == "RanksDiffer"
        assert "shared.weight has different" in text
        assert "DTensor" in found["shards"][1]
