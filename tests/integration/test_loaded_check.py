"""After a load, memory holds what was saved, or the load is refused: 100 planted faults of each class are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import LoadDiffers
from ckptmirror.flow.fetch.loaded_check import check_loaded
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.formats import load_parts, optimizer_state, restore, shards
from ckptmirror.formats.base import LoadReport
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.live_sums import live_sums
from ckptmirror.ranks import SingleRank
from tests.kit.processes import run_ranks

KINDS = ("dcp", "model")
LOADED = ("model", "optimizer", "ema")
FAULTS = 100


class Net(nn.Module):
    """Tensors of several dtypes; ``one`` and ``two`` can be taken for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(24, 24)
        self.two = nn.Linear(24, 24)
        self.table = nn.Embedding(24, 24, dtype=torch.bfloat16)
        self.register_buffer("counts", torch.randint(1, 1 << 40, (6, 6)))
        self.register_buffer("mask", torch.rand(5, 7) > 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(values)) + self.table(torch.arange(24)).float().sum(0)
        return out


def new_state(seed: int, *, ema: bool = True) -> TrainState:
    torch.manual_seed(seed)
    model = Net()
    return TrainState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        ema=torch.optim.swa_utils.AveragedModel(model) if ema else None,
    )


def step(state: TrainState, times: int = 2) -> None:
    for at in range(times):
        torch.manual_seed(at)
        state.model(torch.rand(4, 24)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.ema is not None:
            state.ema.update_parameters(state.model)


def saved(root: Path) -> None:
    state = new_state(0)
    step(state)
    with CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(2, state).wait()


def live_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """The memory of every tensor of a state that a rank holds, by the name that a save gives it."""
    names = {one.name for one in live_sums(state, LOADED)}
    optimizer = {
        "state": {
            name: state.optimizer.state[parameter]
            for name, parameter in state.model.named_parameters()
            if state.optimizer.state[parameter]
        }
    }
    parts = {"model": state.model.state_dict(), "optimizer": optimizer}
    if state.ema is not None:
        parts["ema"] = state.ema.state_dict()
    found = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in walk_tensors(parts)}
    assert names <= found.keys()
    return {name: found[name].detach() for name in names}


@contextmanager
def kept(*tensors: torch.Tensor) -> Iterator[None]:
    before = [one.clone() for one in tensors]
    yield
    for one, was in zip(tensors, before, strict=True):
        one.copy_(was)


Fault = Callable[[random.Random, dict[str, torch.Tensor]], set[str]]


def chosen(chance: random.Random, tensors: dict[str, torch.Tensor], *parts: str) -> str:
    return chance.choice(sorted(name for name in tensors if not parts or any(part in name for part in parts)))


def plant(tensors: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> set[str]:
    """Give a tensor other values; return its name, if they are other ones."""
    was = tensors[name].clone()
    tensors[name].copy_(values)
    return set() if torch.equal(was, tensors[name]) else {name}


def zeros(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    name = chosen(chance, tensors)
    return plant(tensors, name, torch.zeros_like(tensors[name]))


def one_bit(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    name = chosen(chance, {key: one for key, one in tensors.items() if one.dtype != torch.bool})
    row = tensors[name].view(-1).view(torch.uint8)
    row[chance.randrange(len(row))] ^= 1 << chance.randrange(8)
    return {name}


def swapped(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    name = chosen(chance, tensors, "one.")
    other = name.replace("one.", "two.")
    mine = tensors[name].clone()
    return plant(tensors, name, tensors[other]) | plant(tensors, other, mine)


def transposed(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    name = chosen(chance, {key: one for key, one in tensors.items() if one.dim() == 2 and one.shape[0] == one.shape[1]})
    return plant(tensors, name, tensors[name].T.clone())


def shifted(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    """A wrong offset: the rows of another place."""
    name = chosen(chance, {key: one for key, one in tensors.items() if one.dim() and one.shape[0] > 1})
    return plant(tensors, name, tensors[name].roll(chance.randrange(1, tensors[name].shape[0]), 0))


def moments_of_no_step(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    name = chosen(chance, tensors, ".exp_avg")
    return plant(tensors, name, torch.zeros_like(tensors[name]))


def as_initialised(chance: random.Random, tensors: dict[str, torch.Tensor]) -> set[str]:
    """A ``load_state_dict`` that ignored a key."""
    fresh = {**{f"model.{key}": one for key, one in Net().state_dict().items()}}
    name = chosen(chance, {key: one for key, one in tensors.items() if key in fresh})
    return plant(tensors, name, fresh[name])


CLASSES: list[Fault] = [zeros, one_bit, swapped, transposed, shifted, moments_of_no_step, as_initialised]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", CLASSES, ids=lambda one: one.__name__)
def test_each_of_100_faults_of_a_class_is_named(tmp_path: Path, fault: Fault, kind: Any) -> None:
    saved(tmp_path)
    state = new_state(5)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(state)
        assert start is not None
    (meta,) = local_catalog(tmp_path).metas()
    tensors, ranks, report = live_tensors(state), SingleRank(), LoadReport(start.loaded)
    assert set(LOADED) <= set(report.loaded)
    planted = 0
    for seed in range(10 * FAULTS):
        with kept(*tensors.values()):
            if wrong := fault(random.Random(seed), tensors):
                planted += 1
                with pytest.raises(LoadDiffers) as refused:
                    check_loaded(tmp_path, meta, kind, state, ranks, report)
                said = refused.value.message.partition("saved: ")[2].removesuffix(".")
                assert {name.removesuffix(" (rank 0)") for name in said.split(", ")} == wrong
        if planted == FAULTS:
            break
    assert planted == FAULTS
    check_loaded(tmp_path, meta, kind, state, ranks, report)


# -- a load that goes wrong ------------------------------------------------------------------------------------------


class Deaf(nn.Linear):
    """A layer whose ``load_state_dict`` starts the bias anew."""

    def _load_from_state_dict(self, *arguments: Any, **more: Any) -> None:
        super()._load_from_state_dict(*arguments, **more)
        nn.init.zeros_(self.bias)


def deaf_module(_patch: pytest.MonkeyPatch, state: TrainState) -> None:
    state.model.one.__class__ = Deaf


def forgotten_moments(patch: pytest.MonkeyPatch, _state: TrainState) -> None:
    load = optimizer_state.load_optimizer

    def forgets(optimizer: Any, *arguments: Any) -> None:
        load(optimizer, *arguments)
        for of_parameter in optimizer.state.values():
            of_parameter["exp_avg_sq"].zero_()

    patch.setattr(load_parts, "load_optimizer", forgets)


def wrong_offset(patch: pytest.MonkeyPatch, _state: TrainState) -> None:
    fill = shards.fill

    def fills(target: torch.Tensor, *arguments: Any) -> None:
        fill(target, *arguments)
        if target.dim() == 2:
            target.copy_(target.roll(1, 0))

    patch.setattr(shards, "fill", fills)


def average_left_alone(patch: pytest.MonkeyPatch, _state: TrainState) -> None:
    restores = restore.Restorer.restore_objects

    def leaves(self: Any, target: Any, *arguments: Any, **more: Any) -> None:
        if not isinstance(target, torch.optim.swa_utils.AveragedModel):
            restores(self, target, *arguments, **more)

    patch.setattr(restore.Restorer, "restore_objects", leaves)


@pytest.mark.parametrize(
    ("plants", "named"),
    [
        (deaf_module, "model.one.bias (rank 0)"),
        (forgotten_moments, "optimizer.state.one.bias.exp_avg_sq (rank 0)"),
        (wrong_offset, "model.one.weight (rank 0)"),
        (average_left_alone, "ema.module.one.weight (rank 0)"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_load_that_goes_wrong_is_refused_and_leaves_no_trace(tmp_path: Path, plants: Any, named: str) -> None:
    saved(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        state = new_state(5)
        plants(patch, state)
        with CheckpointManager(tmp_path) as manager, pytest.raises(LoadDiffers) as refused:
            manager.resume(state)
        assert named in refused.value.message
        assert "verify_loaded=False" in refused.value.hint
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(new_state(5))
        assert start is not None
        assert start.step == 2


def test_code_that_changes_values_on_purpose_can_say_so(tmp_path: Path) -> None:
    saved(tmp_path)
    state = new_state(5)
    state.model.one.__class__ = Deaf
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(LoadDiffers, match=r"model\.one\.bias"):
            manager.load(state)
        assert manager.load(state, verify_loaded=False).step == 2
        start = manager.resume(state, verify_loaded=False)
        assert start is not None
        assert start.step == 2


def test_a_broken_list_proves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    (listed,) = tmp_path.glob("tensors_*")
    listed.write_bytes(listed.read_bytes().replace(b"float32", b"float64"))
    state = new_state(5)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(state)
        assert start is not None
        found = manager.load(new_state(6))
    for missing in (start.missing, found.missing):
        assert f"tensors: {listed.name} is not what was saved. So what was loaded is not all proved" in missing[0]
    assert start.passed_over == ()


def test_a_device_that_cannot_compute_fingerprints_loses_no_save_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(_pieces: object, **_kw: object) -> object:
        raise NotImplementedError("no such operation here")

    monkeypatch.setattr("ckptmirror.formats.live_sums.fingerprints", cannot)
    saved(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(new_state(5))
        assert start is not None
        assert start.step == 2
    assert "no fingerprints, so a load cannot be proved" in caplog.text


def test_what_a_load_leaves_out_is_not_compared(tmp_path: Path) -> None:
    saved(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(new_state(5), exclude=("optimizer", "ema"))
        assert start is not None


def test_a_model_of_another_dtype_is_not_compared(tmp_path: Path) -> None:
    saved(tmp_path)
    state = new_state(5)
    state.model.double()
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(TrainState(model=state.model), exclude=("optimizer",))
        assert start is not None


# -- shards ----------------------------------------------------------------------------------------------------------


def sharded(seed: int) -> TrainState:
    state = new_state(seed, ema=False)
    for layer in (state.model.one, state.model.two, state.model.table):
        fully_shard(layer)
    fully_shard(state.model)
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.1)
    return state


def save_shards(rank: int, root: Path) -> None:
    state = sharded(0)
    step(state)
    with CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(2, state).wait()


SHARD_FAULTS: list[Fault] = [zeros, one_bit, shifted, moments_of_no_step]


def find_faults(rank: int, root: Path) -> dict[str, int]:
    """Plant each fault on one rank, another each time; count those whose name every rank gets."""
    found = {}
    state = sharded(5)
    with CheckpointManager(root) as manager:
        start = manager.resume(state)
        assert start is not None
        (meta,) = local_catalog(root).metas()
        tensors, report = live_tensors(state), LoadReport(start.loaded)
        for fault in SHARD_FAULTS:
            named = planted = 0
            for seed in range(10 * FAULTS):
                with kept(*tensors.values()):
                    own = fault(random.Random(seed), tensors) if seed % dist.get_world_size() == rank else set()
                    everyones: list[set[str]] = [set()] * dist.get_world_size()
                    dist.all_gather_object(everyones, own)
                    if wrong := set().union(*everyones):
                        planted += 1
                        try:
                            check_loaded(root, meta, "dcp", state, manager.ranks, report)
                        except LoadDiffers as refused:
                            named += all(name in refused.message for name in wrong)
                if planted == FAULTS:
                    break
            found[fault.__name__] = named
        check_loaded(root, meta, "dcp", state, manager.ranks, report)
    return found


@pytest.mark.parametrize(
    ("before", "now"), [pytest.param(*both, marks=pytest.mark.long) for both in [(2, 3), (2, 2), (3, 2), (1, 2)]]
)
def test_each_of_100_faults_in_a_shard_is_named_on_every_rank_on_any_number_of_ranks(
    tmp_path: Path, before: int, now: int
) -> None:
    run_ranks(before, save_shards, tmp_path)
    for found in run_ranks(now, find_faults, tmp_path):
        assert found == dict.fromkeys([fault.__name__ for fault in SHARD_FAULTS], FAULTS)
