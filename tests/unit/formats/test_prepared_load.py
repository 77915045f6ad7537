"""What is prepared for a load while its bytes are verified: memory for what the state does not have yet."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import load_checkpoint
from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import Kind
from ckptmirror.formats import LoadTarget, TrainState, dcp, dcp_read, get_format
from tests.kit.formats import KINDS, everything, make_state, same_bits, save, train
from tests.kit.training import new_state, running, saved_run


def _moments(state: TrainState) -> list[torch.Tensor]:
    return [one for of in state.optimizer.state.values() for one in of.values() if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_over", [True, False], ids=["cut short", "whole"])
def test_a_prepared_load_gives_back_the_same_and_preparing_it_changes_nothing(
    kind: Kind, is_over: bool, tmp_path: Path
) -> None:
    state = make_state()
    train(state, 2)
    meta, fresh = save(kind, tmp_path, state), make_state(seed=1)
    target, before = LoadTarget(fresh, 0, 1), everything(make_state(seed=1))
    prepared = get_format(kind).prepare(tmp_path, meta, target, lambda: is_over)
    same_bits(everything(fresh), before)
    assert not fresh.optimizer.state
    get_format(kind).load(tmp_path, meta, replace(target, prepared=prepared))
    same_bits(fresh.optimizer.state_dict(), state.optimizer.state_dict())
    same_bits(dict(fresh.model.state_dict()), dict(state.model.state_dict()))


def test_the_optimizer_holds_the_very_tensors_that_were_prepared(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    meta, fresh = save("dcp", tmp_path, state), make_state(seed=1)
    target = LoadTarget(fresh, 0, 1)
    entries, reader = get_format("dcp").prepare(tmp_path, meta, target, lambda: False)
    made = {value.data_ptr() for _, value in reader._made.values()}
    get_format("dcp").load(tmp_path, meta, replace(target, prepared=(entries, reader)))
    held = [one for one in _moments(fresh) if one.dim()]
    assert held
    assert {one.data_ptr() for one in held} <= made


def test_what_was_prepared_for_another_parameter_is_not_used(tmp_path: Path) -> None:
    """As when a forward in between has put other parameters into the model."""
    state = make_state()
    train(state, 2)
    meta, other, fresh = save("dcp", tmp_path, state), make_state(seed=1), make_state(seed=2)
    prepared = get_format("dcp").prepare(tmp_path, meta, LoadTarget(other, 0, 1), lambda: False)
    made = [value for _, value in prepared[1]._made.values()]  # their memory is not used again
    get_format("dcp").load(tmp_path, meta, LoadTarget(fresh, 0, 1, prepared=prepared))
    same_bits(fresh.optimizer.state_dict(), state.optimizer.state_dict())
    assert {one.data_ptr() for one in made}.isdisjoint(one.data_ptr() for one in _moments(fresh))


def test_no_memory_is_made_for_what_is_described_in_another_shape(tmp_path: Path) -> None:
    """Nobody has verified the description yet: it may say any size."""
    state = make_state()
    train(state, 2)
    meta = save("dcp", tmp_path, state)
    _, reader = get_format("dcp").prepare(tmp_path, meta, LoadTarget(make_state(), 0, 1), lambda: False)
    of_other_shapes = {key: torch.empty(3, 1, 7) for key in reader._made}
    assert of_other_shapes
    reader._made.clear()
    reader.make(of_other_shapes, lambda: False)
    assert not reader._made


def test_a_load_without_the_optimizer_makes_no_memory_for_it(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    meta = save("dcp", tmp_path, state)
    for target in (
        LoadTarget(make_state(), 0, 1, exclude=frozenset({"optimizer"})),
        LoadTarget(TrainState(model=make_state().model), 0, 1),
    ):
        assert not get_format("dcp").prepare(tmp_path, meta, target, lambda: False)[1]._made


@pytest.mark.parametrize("how", ["resume", "load"])
def test_a_start_and_a_load_take_what_was_prepared(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, (1,), kinds=("dcp",))
    made = _record_what_is_made(monkeypatch)
    with running(tmp_path if how == "resume" else tmp_path / "other") as manager:
        state = new_state(seed=4)
        manager.resume(state)
        if how == "load":
            assert not made
            manager.load(state, tmp_path / "dcp_000001")
    held = {one.data_ptr() for one in _moments(state) if one.dim()}
    assert held
    assert held <= {one.data_ptr() for ref in made if (one := ref()) is not None}


def _record_what_is_made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    made: list[weakref.ref[torch.Tensor]] = []
    make = dcp_read._Reader.make

    def record(self: Any, owners: Any, is_over: Any) -> None:
        make(self, owners, is_over)
        made.extend(weakref.ref(value) for _, value in self._made.values())

    monkeypatch.setattr(dcp_read._Reader, "make", record)
    return made


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_vote_that_fails_leaves_the_optimizer_without_state_and_keeps_no_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, (1,), kinds=("dcp",))
    made = _record_what_is_made(monkeypatch)
    damaged = tmp_path / "dcp_000001" / name
    damaged.write_bytes(damaged.read_bytes()[:-40] + bytes(40))
    with running(tmp_path / "other") as manager:
        state = new_state(seed=4)
        manager.resume(state)
        before = {name: value.clone() for name, value in state.model.state_dict().items()}
        with pytest.raises(IntegrityError, match=rf"rank 0: .*{name}: the crc32c of block 0"):
            manager.load(state, tmp_path / "dcp_000001")
    assert not state.optimizer.state
    same_bits(dict(state.model.state_dict()), before)
    assert bool(made) == (name != ".metadata")
    assert not any(ref() is not None for ref in made)


def test_preparing_that_fails_does_not_fail_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    saved_run(tmp_path, (1,), kinds=("dcp",))
    monkeypatch.setattr(dcp, "prepare_directory", fail)
    with running(tmp_path) as manager:
        state = new_state(seed=4)
        start = manager.resume(state)
    assert start is not None
    assert "optimizer" in start.loaded
    same_bits(dict(state.model.state_dict()), load_checkpoint(tmp_path / "dcp_000001").model)
