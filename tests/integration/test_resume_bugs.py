"""The classic resume bugs, C1 to C18: it ran without an error, and the result was wrong.

Each has a check that holds here, and a planted bug under which the same check fails. C8 to C11 are mistakes in the use
of other frameworks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, Retention, TrainState, load_checkpoint
from ckptmirror.core import retention
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.names import SaveName
from ckptmirror.flow.start import resume
from ckptmirror.formats import capture, dcp_read, load_model, names, optimizer_state, shards, sidecars
from ckptmirror.local import checksummed_writer, crashpoints
from tests.kit.processes import killed_at, run_ranks
from tests.kit.training import Cursor, everything, new_state, running, same, saved_run, train

Check = Callable[[Path], None]
Plant = Callable[[pytest.MonkeyPatch], None]


def continued(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What four steps lead to, and what two, a start of the same command and two more do."""
    straight = new_state()
    train(straight, 4)
    saved_run(tmp_path / "root", (2,))
    state = new_state(7)
    with running(tmp_path / "root") as manager:
        start = manager.resume(state)
        assert start is not None, "nothing was found"
        train(state, 4 - start.step)
    return everything(straight), everything(state)


def equal_in(*parts: str) -> Check:
    """Check that the named parts are what they would have been without the stop."""

    def check(tmp_path: Path) -> None:
        straight, resumed = continued(tmp_path)
        for part in parts or straight:
            assert same(straight[part], resumed[part]), part

    return check


def loads_nothing(part: str) -> Plant:
    """A load that forgets a part of the state."""
    load = sidecars._Loader.part

    def forgets(self: Any, name: str) -> None:
        if part not in (name, "all"):
            load(self, name)

    return lambda patch: patch.setattr(sidecars._Loader, "part", forgets)


# -- C2: written in place, and killed half-way -----------------------------------------------------------------------


def saves_twice(root: Path, in_place: bool) -> None:
    state = new_state()
    with CheckpointManager(root, kinds=("model",)) as manager:
        manager.resume(state)
        for step in (1, 2):
            train(state)
            if step == 2:
                crashpoints.arm("file.fsync:before")
                if in_place:
                    checksummed_writer.tmp_name = _final  # type: ignore[attr-defined]
            manager.save(step, state).wait()


def _final(final: str, _save_id: str) -> str:
    return final


def a_kill_in_a_save_leaves_the_one_before(tmp_path: Path, *, in_place: bool = False) -> None:
    root = tmp_path / "root"
    assert killed_at(None, saves_twice, root, in_place)
    assert [path.name for path in root.glob("*_000002*") if not path.name.endswith(".tmp")] == []
    straight = new_state()
    train(straight)
    state = new_state(7)
    with running(root) as manager:
        start = manager.resume(state)
        assert start is not None
        assert start.step == 1
    assert same(everything(straight), everything(state))


# -- C3, C4, C12: where training continues ---------------------------------------------------------------------------


def the_same_command_continues(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1, 2))
    saved_run(tmp_path / "root", (3,))
    with running(tmp_path / "root") as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3


def a_machine_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    states = saved_run(tmp_path / "root", (1, 2), url)
    shutil.rmtree(tmp_path / "root")
    state = new_state(7)
    with running(tmp_path / "root", url) as manager:
        assert manager.resume(state) is not None
    assert same(everything(state), states[2])


def without_mirrors(patch: pytest.MonkeyPatch) -> None:
    make = CheckpointManager.__init__
    patch.setattr(CheckpointManager, "__init__", lambda self, root, *_mirrors, **more: make(self, root, **more))


def forgets_to_resume(patch: pytest.MonkeyPatch) -> None:
    load = CheckpointManager.resume
    patch.setattr(CheckpointManager, "resume", lambda self, _state: load(self, new_state()) and None)


def step_0_again(patch: pytest.MonkeyPatch) -> None:
    info = resume._info
    patch.setattr(resume, "_info", lambda *given: replace(info(*given), step=0))


# -- C5, C6: sharded -------------------------------------------------------------------------------------------------


def sharded() -> TrainState:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def wholes(state: TrainState) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.model.state_dict().items()
    }


def gathers(rank: int, root: str, bug: str) -> list[int]:
    """Save a sharded model; return how many whole tensors were alive at once, on this rank, at each gathered tensor."""
    if bug == "all at once":
        kept: list[torch.Tensor] = []
        gather = capture._gathered

        def keeps(name: str, value: DTensor) -> torch.Tensor:
            kept.append(gather(name, value))
            return kept[-1]

        capture._gathered = keeps
    alive, seen = [], []
    copied = DTensor.full_tensor

    def counted(self: DTensor, **more: Any) -> torch.Tensor:
        import weakref

        full = copied(self, **more)
        alive.append(weakref.ref(full))
        seen.append(sum(one() is not None for one in alive))
        return full

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    state = sharded()
    manager = CheckpointManager(root, kinds=("model",), timeout_s=60.0)
    manager.resume(state)
    manager.save(1, state).wait()
    manager.close()
    return seen


def only_rank_0_gathers_and_one_tensor_at_a_time(tmp_path: Path, bug: str = "") -> None:
    first, second = run_ranks(2, gathers, str(tmp_path / "root"), bug)
    assert len(first) == len(second) == 4
    assert max(second) == 1


def saves_sharded(rank: int, root: str) -> dict[str, torch.Tensor]:
    state = sharded()
    manager = CheckpointManager(root, kinds=("dcp",), timeout_s=60.0)
    manager.resume(state)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    manager.save(1, state).wait()
    manager.close()
    return wholes(state)


def loads_sharded(rank: int, root: str, bug: str) -> dict[str, torch.Tensor]:
    if bug:
        shards.region_of = _first_rows  # type: ignore[assignment]
        dcp_read.region_of = _first_rows  # type: ignore[assignment]
        load_model.region_of = _first_rows  # type: ignore[assignment,attr-defined]
    state = sharded()
    manager = CheckpointManager(root, timeout_s=60.0)
    manager.resume(state)
    manager.close()
    return wholes(state)


_region_of = shards.region_of


def _first_rows(tensor: torch.Tensor) -> shards.Region:
    region = _region_of(tensor)
    return replace(region, offsets=(0,) * len(region.offsets))


def shards_are_cut_again_for_another_number_of_ranks(tmp_path: Path, bug: str = "") -> None:
    root = str(tmp_path / "root")
    saved = run_ranks(2, saves_sharded, root)[0]
    for found in run_ranks(3, loads_sharded, root, bug):
        assert same(saved, found)


# -- C7, C18: names --------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()


def moments_find_their_parameters_by_name(tmp_path: Path) -> None:
    model = layers()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    with running(tmp_path / "root") as manager:
        manager.resume(TrainState(model=model, optimizer=adam))
        stepped(model, adam)
        manager.save(1, TrainState(model=model, optimizer=adam)).wait()
    other = layers()
    reordered = torch.optim.AdamW(list(reversed(list(other.parameters()))), lr=0.1)
    with running(tmp_path / "root") as manager:
        manager.resume(TrainState(model=other, optimizer=reordered))
    for one, there in zip(model.parameters(), other.parameters(), strict=True):
        assert same(adam.state[one], reordered.state[there])


def by_position(patch: pytest.MonkeyPatch) -> None:
    apply = optimizer_state._apply

    def shuffled(one: Any, *given: Any, **more: Any) -> None:
        apply(one, *given, **more)
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        states = [one.state[parameter] for parameter in reversed(parameters)]
        one.state.update(zip(parameters, states, strict=True))

    patch.setattr(optimizer_state, "_apply", shuffled)


def prefixes_of_wrappers_are_in_no_name(tmp_path: Path) -> None:
    model = layers()
    with running(tmp_path / "root") as manager:
        manager.resume(TrainState(model=model))
        manager.save(1, TrainState(model=torch.compile(model))).wait()
    assert set(load_checkpoint(tmp_path / "root").model) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def a_load_that_lacks_a_name_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "root") as manager:
        manager.resume(TrainState(model=layers()))
        manager.save(1, TrainState(model=layers())).wait()
    with running(tmp_path / "root") as manager, pytest.raises(CkptMirrorError, match=r"2\.weight"):
        manager.resume(TrainState(model=nn.Sequential(*layers(), nn.Linear(4, 4))))


def lax(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dcp_read, "_read_model", lambda *_given: dict)


def keeps_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "live_values", lambda model: names.LiveValues(model.state_dict()))


# -- C13 to C17 ------------------------------------------------------------------------------------------------------


def a_scaler_keeps_its_scale_and_a_fresh_one_is_reported(tmp_path: Path) -> None:
    state = new_state()
    with running(tmp_path / "root") as manager:
        manager.resume(state)
        state.scaler.scale(torch.ones(()))  # makes the scale
        state.scaler.update(new_scale=32.0)
        manager.save(1, state).wait()
    for scaler in (True, False):
        found = new_state(7)
        with running(tmp_path / "root") as manager:
            start = manager.resume(found)
            assert start is not None
            if scaler:
                assert found.scaler.get_scale() == 32.0
                manager.save(2, replace(found, scaler=None)).wait()
            else:
                assert any(line.startswith("scaler") for line in start.missing)


def the_best_and_the_newest_save_stay(tmp_path: Path) -> None:
    kept = Retention(keep_last=1, keep_best=1, metric="loss")
    with running(tmp_path / "root", f"file://{tmp_path}/mirror", retention=kept) as manager:
        state = new_state()
        manager.resume(state)
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, 0.6)):
            manager.save(step, state, metrics={"loss": loss}).wait()
        manager.wait("mirrored", timeout_s=60.0)
        manager.rotate()
    assert {step: (tmp_path / "root" / SaveName(step, "").meta).exists() for step in (1, 2, 3, 4)} == {
        1: False,
        2: True,
        3: False,
        4: True,
    }


def counts_by_recency_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "_best_steps", lambda _counted, _retention: ([], ()))


def patched(owner: Any, name: str) -> Plant:
    """A ``load_state_dict`` that does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *_given, **_more: None)


BUGS: dict[str, tuple[Check, Check | Plant]] = {
    "c1 only the weights were saved": (equal_in(), loads_nothing("all")),
    "c3 a flag to resume was forgotten": (the_same_command_continues, forgets_to_resume),
    "c4 gone with the machine": (a_machine_that_is_gone_costs_nothing, without_mirrors),
    "c7 state by position": (moments_find_their_parameters_by_name, by_position),
    "c12 the step starts again at 0": (the_same_command_continues, step_0_again),
    "c13 the data repeats": (equal_in("data"), patched(Cursor, "load_state_dict")),
    "c14 the schedule starts again": (equal_in("scheduler", "optimizer"), loads_nothing("scheduler")),
    "c15 the scaler is back at its default": (
        a_scaler_keeps_its_scale_and_a_fresh_one_is_reported,
        loads_nothing("scaler"),
    ),
    "c16 the shadow weights are lost": (equal_in("ema"), loads_nothing("ema")),
    "c17 the best save was deleted": (the_best_and_the_newest_save_stay, counts_by_recency_alone),
    "c18 a prefix in a name": (prefixes_of_wrappers_are_in_no_name, keeps_prefixes),
    "c18 a lax load": (a_load_that_lacks_a_name_is_refused, lax),
}


@pytest.mark.parametrize("bug", BUGS)
def test_it_is_not_so_here(bug: str, tmp_path: Path) -> None:
    BUGS[bug][0](tmp_path)


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_finds_the_bug(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, plant = BUGS[bug]
    plant(monkeypatch)  # type: ignore[arg-type]
    with pytest.raises((AssertionError, CkptMirrorError, pytest.fail.Exception)):
        check(tmp_path)


def test_c2_written_in_place_and_killed_half_way(tmp_path: Path) -> None:
    a_kill_in_a_save_leaves_the_one_before(tmp_path / "here")
    with pytest.raises(AssertionError, match="_000002"):  # a part of it stands there under its name
        a_kill_in_a_save_leaves_the_one_before(tmp_path / "planted", in_place=True)


@pytest.mark.long
def test_c5_the_full_state_on_one_rank_at_once(tmp_path: Path) -> None:
    only_rank_0_gathers_and_one_tensor_at_a_time(tmp_path / "here")
    with pytest.raises(AssertionError):
        only_rank_0_gathers_and_one_tensor_at_a_time(tmp_path / "planted", "all at once")


@pytest.mark.long
def test_c6_full_where_sharded_was_needed(tmp_path: Path) -> None:
    shards_are_cut_again_for_another_number_of_ranks(tmp_path / "here")
    with pytest.raises((AssertionError, CkptMirrorError)):
        shards_are_cut_again_for_another_number_of_ranks(tmp_path / "planted", "first rows")
