"""``manager.load`` on two ranks: sharded states take what one process left; all ranks load the same or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.load_state_job import everything_that_happens, plain, train, whole
from tests.kit.legacy import named, save_dcp, write_meta
from tests.kit.processes import run_ranks
from tests.kit.training import same

pytestmark = pytest.mark.long

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, Any]:
    model, optimizer = plain(0)
    train(model, optimizer)
    save_dcp(place / "old" / "dist_ckpt_000200", named(model, optimizer))
    write_meta(place / "old", step=200)
    train(model, optimizer)
    return whole(model)


@pytest.fixture(scope="module")
def ranks(place: Path, expected: dict[str, Any]) -> Found:
    return run_ranks(2, everything_that_happens, str(place))


def test_sharded_training_goes_on_from_what_one_process_left(ranks: Found, expected: dict[str, Any]) -> None:
    for found in ranks:
        step, loaded, missing = found["older"]
        assert (step, loaded) == (200, ("model", "optimizer"))
        assert [line.partition(":")[0] for line in missing] == ["rng"]
        assert found["older weights"].keys() == expected.keys()
        for name, value in expected.items():
            assert value.allclose(found["older weights"][name], atol=1e-6), name  # sums of shards are rounded otherwise


def test_a_save_of_this_job_is_loaded_on_every_rank(ranks: Found) -> None:
    for found in ranks:
        assert found["own"][0] == 201
        assert {"model", "optimizer", "rng"} <= set(found["own"][1])
        assert same(found["own weights"], found["older weights"])
        assert found["prepared"] == [True, 8]  # two moments of four parameters, sharded


def test_the_leader_says_what_a_reference_means_for_all(ranks: Found) -> None:
    assert [found["leader's word"] for found in ranks] == [200, 200]
    assert [found["missing"][0] for found in ranks] == ["CheckpointNotFound", "RankFailed"]


def test_a_file_that_one_rank_finds_rotten_is_loaded_by_none(ranks: Found) -> None:
    for found in ranks:
        kind, text = found["rotten"]
        assert kind == "IntegrityError"
        assert "cannot be loaded: rank " in text
        assert found["rotten state"] == {}
