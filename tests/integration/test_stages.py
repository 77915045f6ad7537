"""A model in pipeline stages: one manager, one save, resumed by any other split of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, load_checkpoint
from ckptmirror.core.errors import ConfigError
from tests.integration.stages_job import (
    LAYERS,
    WAIT_S,
    Found,
    Job,
    build,
    expected,
    other_splits_of_what_stages_keep,
    train,
    values,
)
from tests.kit.processes import outcome, run_ranks
from tests.kit.training import running

pytestmark = pytest.mark.long

Split = tuple[tuple[int, ...], ...]

TWO = ((0, 1), (2, 3))
UNEVEN = ((0,), (1, 2, 3))
FOUR = ((0,), (1,), (2,), (3,))
SHARDED = ((0, 1), (2, 3), (0, 1), (2, 3))


def same(found: dict[str, Any] | None, whole: dict[str, Any], layers: tuple[int, ...] = LAYERS) -> None:
    """Check that a rank holds its layers of the whole model, and nothing else, bit for bit."""
    mine = {name: value for name, value in whole.items() if int(name.split("layers.")[1].split(".")[0]) in layers}
    assert found is not None
    assert found.keys() == mine.keys()
    for name, value in mine.items():
        equal = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert equal, name


def ended(job: Job) -> None:
    """Run a job that ends in order."""
    assert [found.failed for found in job.run()] == [""] * len(job.held)


def check(job: Job, ranks: list[Found], step: int, kind: str = "dcp") -> None:
    """Check where each rank began, and what it ended with."""
    for held, found in zip(job.held, ranks, strict=True):
        assert found.failed == ""
        assert (found.step, found.kind) == (step, kind)
        same(found.began, expected(step), held)
        same(found.ended, expected(job.steps[-1] if job.steps else step), held)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sum in the order of the ranks' processes, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("held", [UNEVEN, FOUR, SHARDED])
def test_stages_are_resumed_by_any_split(held: Split, tmp_path: Path) -> None:
    ended(Job(tmp_path, held, (1, 2)))
    job = Job(tmp_path, SHARDED if held == UNEVEN else UNEVEN)
    check(job, job.run(), 2)
    state = build(LAYERS)
    with CheckpointManager(tmp_path / "root", kinds=("dcp",)) as manager:  # one process, with the whole model
        start = manager.resume(state)
        assert start is not None
        same(values(state), expected(2))
        train(state, 3)
        manager.save(3, state)
    job = Job(tmp_path, held, (4,))
    check(job, job.run(), 3)


@pytest.mark.short
def test_two_stages_are_resumed_by_other_two(tmp_path: Path) -> None:
    ended(Job(tmp_path, TWO, (1, 2)))
    job = Job(tmp_path, UNEVEN)
    check(job, job.run(), 2)


@pytest.mark.parametrize(("dies", "crash_at"), [(3, "file.fsync:after@2"), (0, "save.publish:before")])
def test_a_rank_that_dies_in_a_save_leaves_every_stage_at_one_step(dies: int, crash_at: str, tmp_path: Path) -> None:
    Job(tmp_path, SHARDED, (1, 2), dies=dies, crash_at=crash_at).run()
    job = Job(tmp_path, SHARDED, (2,))
    check(job, job.run(), 1)
    job = Job(tmp_path, UNEVEN)
    check(job, job.run(), 2)


def test_a_snapshot_of_stages_is_resumed_by_any_split(tmp_path: Path) -> None:
    ended(Job(tmp_path, SHARDED, (1,), snapshot=2))
    for split in (SHARDED, UNEVEN):
        job = Job(tmp_path, split)
        check(job, job.run(), 2, "emergency")
    state = build(LAYERS)
    with CheckpointManager(tmp_path / "root", kinds=("dcp",)) as manager:
        start = manager.resume(state)
    assert start is not None
    assert start.kind == "emergency"
    same(values(state), expected(2))


def test_stages_on_several_nodes_are_resumed_by_any_split(tmp_path: Path) -> None:
    ended(Job(tmp_path, SHARDED, (1, 2), nodes="abab", mirrored=True))
    for split, nodes in ((SHARDED, "abab"), (UNEVEN, "ac")):
        job = Job(tmp_path, split, nodes=nodes, mirrored=True)
        check(job, job.run(), 2)


def test_stages_are_resumed_by_any_split_under_other_names(tmp_path: Path) -> None:
    ended(Job(tmp_path, SHARDED, (1,), snapshot=2, nodes="abab", mirrored=True))
    for split, nodes, kind, step in ((SHARDED, "abab", "emergency", 2), (UNEVEN, "cd", "dcp", 1)):
        job = Job(tmp_path, split, nodes=nodes, mirrored=True, called="blocks")
        check(job, job.run(), step, kind)


def rename_what_is_not_there(rank: int, base: Path) -> list[str]:
    state = build(TWO[rank])
    with CheckpointManager(base / "root", kinds=("dcp",), pp_rank=rank, timeout_s=WAIT_S) as manager:
        manager.resume(state)
        train(state, 1)
        manager.save(1, state).wait()
        return [
            outcome(lambda: manager.resume(state, rename={"layrs.*": "bloks.*"}, strict=strict))[1]  # noqa: B023
            for strict in (True, False)
        ]


def test_a_rename_that_fits_no_stage_is_refused_on_each(tmp_path: Path) -> None:
    for raised in run_ranks(2, rename_what_is_not_there, tmp_path):
        for why in raised:
            assert "rename holds 'layrs.*', and the save has no tensor of that name" in why


def test_one_file_reader_joins_the_stages(tmp_path: Path) -> None:
    ended(Job(tmp_path, TWO, (1, 2)))
    loaded = load_checkpoint(tmp_path / "root" / "dcp_000002")
    whole = expected(2)
    assert {f"model.{name}" for name in loaded.model} == {name for name in whole if name.startswith("model.")}
    assert all(torch.equal(value, whole[f"model.{name}"]) for name, value in loaded.model.items())
    assert loaded.optimizer is not None
    decayed, others = loaded.optimizer["param_groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(list(build(LAYERS).model.parameters()))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_stages_that_nobody_names_are_refused_with_the_argument_that_does(tmp_path: Path) -> None:
    for found in Job(tmp_path, TWO, (1,), names_stages=False).run():
        assert "The ranks hold different models" in found.failed
    assert "pp_rank" in found.hint


def test_one_name_on_two_stages_is_refused_by_name(tmp_path: Path) -> None:
    for found in Job(tmp_path, ((0, 1), (1, 2, 3)), (1,)).run():
        assert "Stages 0 and 1 both have" in found.failed
        assert "layers.1." in found.failed


def test_replicas_of_a_stage_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    ended(Job(tmp_path, SHARDED, (1,), sharded=False))
    for found in Job(tmp_path, SHARDED, (2,), sharded=False, differs=3).run():
        assert "model.layers.2.0.weight has different values on rank 1 and rank 3" in found.failed


def test_a_layer_that_no_stage_has_is_missed_on_every_rank(tmp_path: Path) -> None:
    ended(Job(tmp_path, TWO, (1,)))
    for found in Job(tmp_path, ((0, 1), (3,))).run():
        assert "layers.2." in found.failed


def test_a_layer_that_the_save_has_not_is_missed(tmp_path: Path) -> None:
    ended(Job(tmp_path, ((0, 1), (2,)), (1,)))
    failed = [found.failed for found in Job(tmp_path, TWO).run()]
    assert all("layers.3." in one for one in failed)


def test_an_average_and_rates_of_stages_are_refused_by_another_split(tmp_path: Path) -> None:
    for found in run_ranks(4, other_splits_of_what_stages_keep, str(tmp_path)):
        for what in ("ema", "rates"):
            assert found[f"{what} same"][0] == "value", found
            assert found[f"{what} without"][0] == "value", found
        assert found["ema other"][0] in ("UsageError", "RankFailed"), found
        assert "in 2 saved groups" in found["rates other"][1], found


def test_kind_model_has_no_stages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rank has all of it"):
        CheckpointManager(tmp_path, pp_rank=0)
    with running(tmp_path, kinds=("dcp",), pp_rank=0) as manager:
        state = build(LAYERS)
        manager.resume(state)
        with pytest.raises(ConfigError, match="no rank has all of it"):
            manager.save(1, state, kinds=("model",))
