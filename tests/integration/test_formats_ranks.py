"""Two ranks whose states are not alike, or share memory: refused on both, or back exactly as they were."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.formats_ranks_job import KINDS, everything_that_happens
from tests.kit.processes import run_ranks
from tests.kit.training import same

pytestmark = pytest.mark.long

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(2, everything_that_happens, str(tmp_path_factory.mktemp("formats")))


def test_plain_state_of_a_shard_is_refused_by_its_place(ranks: Found) -> None:
    for found in ranks:
        kind, text, _ = found["local refused"]
        assert kind in ("UsageError", "RankFailed")
        assert "optimizer.state.0.weight.local is a plain tensor of 8 values beside a parameter that is sharded" in text


@pytest.mark.parametrize("kind", KINDS)
def test_plain_state_of_a_shard_comes_back_in_extra(ranks: Found, kind: str) -> None:
    """Also what has the shape of the whole parameter stays plain."""
    for found in ranks:
        assert found[f"local missing {kind}"] == ()
        assert same(*found[f"local {kind}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_evaluated_before_the_resume_is_loaded(ranks: Found, kind: str) -> None:
    for found in ranks:
        assert found[f"evaluated missing {kind}"] == ()
        assert same(*found[f"evaluated {kind}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_placeholder_of_sharded_weights_does_not_write_into_them(ranks: Found, kind: str) -> None:
    for found in ranks:
        assert same(*found[f"placeholder {kind}"])
        assert same(*found[f"placeholder best {kind}"])
        assert found[f"placeholder kept {kind}"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_in_extra_too_brings_each_rank_its_own_buffers(ranks: Found, kind: str) -> None:
    for found in ranks:
        assert found[f"buffers missing {kind}"] == ()
        assert same(*found[f"buffers {kind}"])
    first, second = (found[f"buffers {kind}"][0] for found in ranks)
    assert not same(first, second)


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_another_model_on_each_rank_is_refused_on_both(ranks: Found, kind: str) -> None:
    for found in ranks:
        assert found[f"stages {kind}"][0] == "BackgroundSaveFailed"
        assert "The ranks hold different models" in found[f"stages {kind}"][1]


def test_another_model_on_each_rank_is_saved_by_a_manager_for_each(ranks: Found) -> None:
    for found in ranks:
        assert same(*found["own stage"])


def test_empty_state_on_one_rank_is_no_difference(ranks: Found) -> None:
    assert ranks[0]["steps"] == [1.0, 1.0, 0.0, 0.0]
    for found in ranks:
        assert found["looked at"][0] == "value"


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("part", ["model", "ema"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_modules_with_versions_are_not_migrated_again(
    ranks: Found, kind: str, part: str, shard: bool
) -> None:
    for found in ranks:
        assert same(*found[f"versions {part} {kind} {shard}"])


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_differ_are_not_given_to_tied_parameters(ranks: Found, kind: str) -> None:
    for found in ranks:
        assert found[f"tied {kind}"][0] in ("UsageError", "RankFailed")
        assert "0.weight and 1.weight share memory in this model" in found[f"tied {kind}"][1]


@pytest.mark.parametrize("where", ["optimizer", "extra"])
def test_an_optimizer_whose_state_is_spread_over_the_ranks_is_refused_on_all(ranks: Found, where: str) -> None:
    for found in ranks:
        assert found[f"spread {where}"][0] == "UsageError"
        assert "is a ZeroRedundancyOptimizer: its state is spread over the ranks" in found[f"spread {where}"][1]


def test_the_consolidated_state_of_each_rank_comes_back_in_extra(ranks: Found) -> None:
    for found in ranks:
        assert same(*found["spread"])
