"""What the ranks have of their own (``TrainState.per_rank``) is saved and restored for each rank, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmirror
from ckptmirror.core.model import Kind
from tests.integration.per_rank_job import (
    everything_that_happens,
    expected,
    mean,
    of_one,
    on_mesh,
    others,
    refusals,
    resumed_with_a_list_damaged,
    sharded,
    sharded_others,
)
from tests.kit.processes import run_ranks
from tests.kit.roots import whole
from tests.kit.training import same


class Job:
    def __init__(self, base: Path, ranks: int, kinds: tuple[Kind, ...]) -> None:
        self.base, self.kinds = base, kinds
        self.ranks: list[dict[str, Any]] = run_ranks(ranks, everything_that_happens, str(base), kinds)
        self.others: list[dict[str, Any]] = run_ranks(5 - ranks, others, str(base), kinds)


JOBS = [
    pytest.param((2, ("dcp",)), marks=pytest.mark.long),
    pytest.param((3, ("model",)), marks=pytest.mark.long),
    (3, ("dcp", "model")),
]


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ranks"), *request.param)


def test_each_rank_gets_back_its_own(job: Job) -> None:
    for found in job.ranks:
        assert found["save"][0] == "saved", found["save"]
        assert same(found["resumed at 2"], found["at 2"])
    first, second, *_ = (found["at 2"] for found in job.ranks)
    assert not torch.equal(first["model"]["experts.0.weight"], second["model"]["experts.0.weight"])
    assert not torch.equal(first["model"]["norm.running_mean"], second["model"]["norm.running_mean"])
    assert not torch.equal(first["ema"]["module.experts.0.weight"], second["ema"]["module.experts.0.weight"])
    assert not torch.equal(first["ema"]["module.norm.running_mean"], second["ema"]["module.norm.running_mean"])
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
        (line,) = [line for line in found["told without"] if line.startswith("ema")]
        assert "the ranks of the save had averages of their own of experts." in line


def test_where_one_name_has_no_function_another_number_of_ranks_is_refused(job: Job) -> None:
    for found in job.others:
        kind, text, hint = found["some without a function"]
        assert kind == "UsageError"
        assert "norm.num_batches_tracked" in text
        assert "experts" not in text
        assert "per_rank={" in hint


@pytest.mark.parametrize(
    ("what", "why"),
    [("fails", "ValueError: nobody knows how"), ("widens", "to the shape")],
)
def test_a_merge_that_fails_on_one_rank_changes_nothing_on_any(job: Job, what: str, why: str) -> None:
    *rest, failed = job.others
    for how in range(2):
        kind, text, hint = failed[what][how]
        assert kind == "UsageError", text
        assert "experts.0." in text
        assert f"of {len(job.ranks)} ranks" in text
        assert why in text
        assert "Correct the function" in hint
        for found in rest:
            kind, text, _ = found[what][how]
            assert kind == "RankFailed", text
            assert f"rank {len(rest)}" in text
            assert why in text
    for found in job.others:
        assert same(found["before"], found["after"])


def test_a_function_of_merge_extra_that_fails_changes_nothing_either(job: Job) -> None:
    *rest, failed = job.others
    assert failed["extra fails"][0] == "UsageError"
    assert "extra.tokens" in failed["extra fails"][1]
    assert all(found["extra fails"][0] == "RankFailed" for found in rest)


@pytest.mark.parametrize("how", ["merged", "resumed"], ids=["a save", "an emergency snapshot"])
def test_functions_merge_what_the_ranks_had_for_another_number_of_ranks(job: Job, how: str) -> None:
    of_ranks = [found["at 2" if how == "merged" else "at 4"] for found in job.ranks]
    for rank, found in enumerate(job.others):
        outcome, got = found[how]
        assert outcome == (("done", "", "") if how == "merged" else (4, "emergency"))
        names = list(got["model"])
        for name, value in got["model"].items():
            values = [one["model"][name] for one in of_ranks]
            assert torch.equal(value, expected(name, values, rank)), name
        for name, value in got["ema"].items():
            values = [one["ema"][name] for one in of_ranks]
            assert torch.equal(value, expected(name.removeprefix("module."), values, rank)), name
        assert not any("ema" in line for line in found["told"])
        params = [name for name in names if not name.startswith("norm.running") and "num_batches" not in name]
        for number, name in enumerate(sorted(params, key=names.index)):
            states = [one["optimizer"]["state"].get(number) for one in of_ranks]
            here = got["optimizer"]["state"].get(number, {})
            for key in ("step", "exp_avg", "exp_avg_sq"):
                values = [of and of[key] for of in states]
                wanted = expected(name, values, rank)
                assert same(here.get(key), wanted), (name, key)


def test_what_was_merged_is_saved_and_restored_for_each_rank(job: Job) -> None:
    for found in job.others:
        assert found["save"][0] == "saved", found["save"]
        assert same(*found["at 5"])


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
    of_ranks = [found["at 1"] for found in results]
    for rank, found in enumerate(run_ranks(5 - ranks, sharded_others, str(tmp_path), kinds)):
        assert found["loaded"][0] == "done", found["loaded"]
        assert found["resumed"] == (2, "emergency")
        for got in (found["at 1"], found["at 2"]):
            for name in ("1.running_mean", "1.num_batches_tracked", "2.weight", "2.bias"):
                choose = mean if name == "2.weight" else of_one
                assert torch.equal(got["model"][name], choose([one["model"][name] for one in of_ranks], rank, 0)), name
            for number, choose in ((4, mean), (5, of_one)):
                moments = [one["optimizer"]["state"][number]["exp_avg"] for one in of_ranks]
                assert torch.equal(got["optimizer"]["state"][number]["exp_avg"], choose(moments, rank, 0))


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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dcp", "emergency"])
@pytest.mark.parametrize(
    ("before", "now"), [("replicas", "shards"), ("shards", "replicas"), ("shards", "shards of replicas")]
)
def test_the_same_ranks_get_back_their_own_and_the_averages_on_another_mesh(
    tmp_path: Path, before: str, now: str, kind: str
) -> None:
    had = run_ranks(2, on_mesh, str(tmp_path), before, kind)
    assert not torch.equal(*(one["1.running_mean"] for one in had))
    found = run_ranks(2, on_mesh, str(tmp_path), now, kind)
    for rank in range(2):
        assert same(found[rank], had[rank]), found[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_list_of_tensors_that_is_damaged_leaves_out_the_proof_and_stops_nobody(tmp_path: Path, rank: int) -> None:
    run_ranks(2, resumed_with_a_list_damaged, str(tmp_path))
    listed = tmp_path / f"tensors_000001_rank{rank}.json"
    data = bytearray(listed.read_bytes())
    data[len(data) // 2] ^= 1
    listed.write_bytes(bytes(data))
    for number, (values, missing) in enumerate(run_ranks(2, resumed_with_a_list_damaged, str(tmp_path))):
        assert values == [1.0 + number, 1.0]
        assert any(f"{listed.name} is not what was saved" in line for line in missing)
