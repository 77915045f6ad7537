"""Every kind gives each rank what it needs of all ranks' values, where an object or a function can merge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckptmirror import TrainState
from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import emergency_dir_name
from ckptmirror.data import SampleLoader
from ckptmirror.formats.capture import capture
from ckptmirror.formats.emergency import write_emergency
from ckptmirror.formats.sidecars import write_sidecars
from tests.kit.formats import KINDS, SAVE_ID, STEP, context, load, meta_of, publish, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Counted:
    """Counts for itself what it was told, and shares it out if the number of ranks changes."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.asked: list[tuple[int, int, int]] = []

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def merge_state_dicts(self, states: Sequence[dict[str, int]], rank: int, world_size: int) -> dict[str, int]:
        self.asked.append((len(states), rank, world_size))
        whole = sum(state["count"] for state in states)
        return {"count": whole // world_size + (rank < whole % world_size)}


class Plain:
    """An object with a position and no way to merge it."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def save_ranks(kind: Kind, root: Path, states: list[TrainState]) -> Meta:
    """Save what each rank has, as the ranks of one job do."""
    if kind == "emergency":
        directory = root / emergency_dir_name(STEP, "20261121T131500Z")
        artifacts: list[Artifact] = []
        for rank, state in enumerate(states):
            artifacts += write_emergency(
                state, directory, save_id=SAVE_ID, rank=rank, world_size=len(states), step=STEP
            )
        return meta_of((kind,), artifacts, None, world_size=len(states))
    meta = save(kind, root, states[0])
    artifacts = list(meta.artifacts)
    for rank, state in list(enumerate(states))[1:]:
        snapshot = capture(state, step=STEP, kinds=(kind,), rank=rank, world_size=len(states))
        here = dataclasses.replace(context(root, (kind,)), rank=rank, world_size=len(states))
        written = write_sidecars(snapshot, here)[0]
        publish(root, written)
        artifacts += written
    return dataclasses.replace(meta, artifacts=tuple(artifacts), world_size=len(states))


def build(dataloader: Any = None, **more: Any) -> TrainState:
    torch.manual_seed(0)
    return TrainState(model=nn.Linear(2, 2), dataloader=dataloader, **more)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_object_gets_the_states_of_all_ranks(kind: Kind, world_size: int, tmp_path: Path) -> None:
    """As data loader, in a list of them, and anywhere in extra; also a rank that the save did not have."""
    saved = [build([Counted(3 + r)], extra={"deep": {"meter": Counted(10 * r)}}) for r in range(2)]
    meta = save_ranks(kind, tmp_path, saved)
    counts = []
    for rank in range(world_size):
        state = build([Counted()], extra={"deep": {"meter": Counted()}})
        report = load(kind, tmp_path, meta, state, rank=rank, world_size=world_size)
        meter = state.extra["deep"]["meter"]
        assert state.dataloader[0].asked == meter.asked == [(2, rank, world_size)]
        assert "dataloader" in report.loaded
        assert [line for line in report.missing if not line.startswith("rng")] == []
        counts.append((state.dataloader[0].count, meter.count))
    assert tuple(map(sum, zip(*counts, strict=True))) == (7, 10)


def test_what_is_excluded_is_not_merged(kind: Kind, tmp_path: Path) -> None:
    meta = save_ranks(kind, tmp_path, [build(Counted(3), extra={"meter": Counted(4)}) for _ in range(2)])
    state = build(Counted(), extra={"meter": Counted()})
    load(kind, tmp_path, meta, state, exclude=("dataloader", "extra"))
    assert (state.dataloader.asked, state.extra["meter"].asked) == ([], [])


def test_a_value_of_extra_is_merged_by_its_function_if_the_number_of_ranks_changed(kind: Kind, tmp_path: Path) -> None:
    """Others are taken and reported as before."""

    def total(values: Sequence[int], rank: int, world_size: int) -> int:
        assert (rank, world_size) in ((0, 2), (0, 1), (2, 3))
        return sum(values) if rank == 0 else 0

    def state_of(rank: int) -> TrainState:
        merge = {"tokens": total}
        return build(extra={"tokens": 100 + rank, "lists": [torch.full((2,), float(rank))]}, merge_extra=merge)

    meta = save_ranks(kind, tmp_path, [state_of(0), state_of(1)])
    for rank, world_size, tokens in ((0, 2, 100), (0, 1, 201), (2, 3, 0)):
        state = state_of(7)
        missing = load(kind, tmp_path, meta, state, rank=rank, world_size=world_size).missing
        assert state.extra["tokens"] == tokens
        assert torch.equal(state.extra["lists"][0], torch.zeros(2))
        assert any("different values" in line or "differ from rank 0's" in line for line in missing) is (
            world_size != 2
        )


def test_no_difference_is_reported_between_values_that_are_merged(kind: Kind, tmp_path: Path) -> None:
    def state_of(rank: int) -> TrainState:
        extra = {"tokens": 100 + rank, "meter": [Counted(rank)]}
        return build(extra=extra, merge_extra={"tokens": lambda values, *_: sum(values)})

    meta = save_ranks(kind, tmp_path, [state_of(0), state_of(1)])
    for rank, world_size in ((0, 1), (2, 3)):
        missing = load(kind, tmp_path, meta, state_of(7), rank=rank, world_size=world_size).missing
        assert [line for line in missing if line.startswith("extra")] == []


@pytest.mark.parametrize("part", ["dataloader", "extra"])
def test_an_object_that_cannot_merge_fails_with_its_place_and_before_anything_of_it_is_loaded(
    kind: Kind, part: str, tmp_path: Path
) -> None:
    class Failing(Counted):
        def merge_state_dicts(self, *_: Any) -> Any:
            raise KeyError("missing")

    meta = save_ranks(kind, tmp_path, [build(Counted(3), extra={"a": [1], "meter": Counted(4)}) for _ in range(2)])
    one, other = Counted(), Counted()
    if part == "dataloader":
        one = Failing()
    else:
        other = Failing()
    state = build(one, extra={"a": [], "meter": other})
    with pytest.raises(UsageError, match=f"The {part}.* of 2 ranks cannot be merged: KeyError: 'missing'") as caught:
        load(kind, tmp_path, meta, state)
    assert f'exclude=("{part}",)' in caught.value.hint
    assert state.extra["a"] == []


def test_a_new_rank_reports_each_loader_whose_position_cannot_be_merged(kind: Kind, tmp_path: Path) -> None:
    meta = save_ranks(kind, tmp_path, [build([Plain(3), Counted(4)]) for _ in range(2)])
    state = build([Plain(), Counted()])
    report = load(kind, tmp_path, meta, state, rank=2, world_size=3)
    assert [line for line in report.missing if line.startswith("dataloader")] == [
        "dataloader[0]: position of this rank; it starts where it is"
    ]
    assert [one.count for one in state.dataloader] == [0, 2]
    dropped = load(kind, tmp_path, meta, build([Plain(), Counted()]), world_size=1).missing
    assert any("positions of ranks 1 of the save are dropped" in line for line in dropped)


def test_a_sample_loader_reads_the_rest_of_an_epoch_on_another_number_of_ranks(kind: Kind, tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(48))

    def state_of(rank: int, world_size: int) -> TrainState:
        return build(SampleLoader(data, 4, rank=rank, world_size=world_size))

    saved = [state_of(rank, 2) for rank in range(2)]
    seen: list[int] = []
    for state in saved:
        for _, (batch,) in zip(range(3), state.dataloader, strict=False):
            seen += batch.tolist()
    meta = save_ranks(kind, tmp_path, saved)
    for rank in range(3):
        state = state_of(rank, 3)
        load(kind, tmp_path, meta, state, rank=rank, world_size=3)
        seen += [sample for (batch,) in state.dataloader for sample in batch.tolist()]
    assert sorted(seen) == list(range(48))
