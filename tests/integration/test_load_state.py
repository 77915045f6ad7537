"""What ``manager.load`` gives to live objects: saves of any root, and what older writers left."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ckptmirror import LoadedCheckpoint, TrainState, load_checkpoint, resolve_checkpoint_reference
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import CheckpointNotFound, IntegrityError, UnsafePickle, UsageError
from ckptmirror.formats.legacy_optimizers import optimizer_key_counts
from ckptmirror.formats.train_state import PARTS
from ckptmirror.local.inventory import read_inventory
from tests.kit.faults import flip_bit
from tests.kit.legacy import make_training, named, save_dcp, save_legacy, write_meta
from tests.kit.roots import content
from tests.kit.training import everything, new_state, running, same, saved_run


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def live(seed: int = 9, **more: Any) -> TrainState:
    model, optimizer, scheduler = make_training(seed, steps=0)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, **more)


def go_on(model: nn.Module, *optimizers: Any, scheduler: Any = None) -> list[str]:
    losses = []
    for step in range(4):
        loss = model(torch.full((3, 4), 0.3 * (step + 1))).square().mean()
        model.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item().hex())
    return losses


# -- saves of ours ----------------------------------------------------------------------------------------------------


def test_a_file_that_no_rank_verified_for_the_kind_is_not_loaded(tmp_path: Path) -> None:
    """The meta says that the optimizer is of the other kind: its bytes are not looked at, and are not to be used."""
    saved_run(tmp_path, (1,))
    (meta,) = read_inventory(tmp_path).saves
    (optim,) = (artifact for artifact in meta.meta.artifacts if artifact.path.startswith("optim"))
    assert optim.kinds == ("model",)
    artifacts = tuple(replace(one, kinds=("dcp",)) if one is optim else one for one in meta.meta.artifacts)
    meta.meta_path.write_bytes(meta_to_bytes(replace(meta.meta, artifacts=artifacts)))
    with running(tmp_path / "other") as manager:
        state = new_state(seed=4)
        info = manager.load(state, tmp_path / "model_000001.pt")
        assert "optimizer" not in info.loaded
        assert state.optimizer.state_dict()["state"] == {}
    assert load_checkpoint(tmp_path / "model_000001.pt").optimizer is None


@pytest.mark.parametrize("how", ["step", "path", "latest", "reference"])
def test_a_save_of_the_root_is_loaded_and_the_run_stays_where_it_is(how: str, tmp_path: Path) -> None:
    states = saved_run(tmp_path, (1, 2))
    step = 2 if how == "latest" else 1
    reference: Any = {"step": 1, "path": tmp_path / "model_000001.pt", "latest": "latest"}.get(how)
    if how == "reference":
        reference = resolve_checkpoint_reference(tmp_path / "dcp_000001")
    with running(tmp_path) as manager:
        state = new_state(seed=4)
        assert manager.resume(state) is not None
        attempts = (tmp_path / ".ckptmirror" / "attempts.json").read_bytes()
        found = manager.load(state, reference)
        assert (found.step, found.kind) == (step, "model" if how == "path" else "dcp")
        assert {"model", "optimizer", "scheduler", "extra"} <= set(found.loaded)
        assert same(everything(state), states[step])
        assert (tmp_path / ".ckptmirror" / "attempts.json").read_bytes() == attempts
        manager.save(3, state).wait()  # still of the attempt that went on from step 2


def test_reference_root_is_read_only(tmp_path: Path) -> None:
    states = saved_run(tmp_path / "teacher", (5,))
    before = content(tmp_path / "teacher")
    with running(tmp_path / "student") as manager:
        state = new_state(seed=4)
        assert manager.resume(state) is None
        assert manager.load(state, tmp_path / "teacher").step == 5
        assert same(everything(state), states[5])
        manager.save(1, state).wait()
    assert content(tmp_path / "teacher") == before


def test_a_save_that_rotted_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    flip_bit(tmp_path / "dcp_000001" / "__0_0.distcp", 300)
    with running(tmp_path / "other") as manager:
        state = new_state(seed=4)
        manager.resume(state)
        before = copy.deepcopy(everything(state))
        with pytest.raises(IntegrityError):
            manager.load(state, tmp_path / "dcp_000001")
        assert same(everything(state), before)
        with pytest.raises(CheckpointNotFound):
            manager.load(state, 77)
        assert manager.load(state, _on_a_mirror(tmp_path)).loaded


def _on_a_mirror(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/mirror"
    with running(tmp_path / "mirrored", url) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait("mirrored", timeout_s=60)
    return url


def test_keys_that_came_after_a_checkpoint_are_off_and_told_of(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    with running(tmp_path / "new") as manager:
        state = new_state()
        state.training_config = {"width": 6, "gate": True}
        manager.resume(state)
        manager.save(1, state).wait()
    save_legacy(tmp_path / "old", 200)
    off = {"gate": False, "window": 0}
    loaded = load_checkpoint(tmp_path / "new", new_config_keys=off)
    assert loaded.meta.training_config == {"width": 6, "gate": True, "window": 0}
    assert load_checkpoint(tmp_path / "old", new_config_keys=off).meta.training_config == {"width": 6, **off}
    assert any("before there was gate, window: off" in line for line in told.messages)


# -- a start at a reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_start_at_the_path_of_a_save_keeps_the_kind_that_it_names(kind: str, tmp_path: Path) -> None:
    states = saved_run(tmp_path, (1, 2, 3))
    path = tmp_path / ("dcp_000002" if kind == "dcp" else "model_000002.pt")
    with running(tmp_path) as manager:
        state = new_state(seed=4)
        start = manager.resume(state, policy=str(path))
        assert start is not None
        assert (start.step, start.kind) == (2, kind)
        assert same(everything(state), states[2])


def test_a_start_at_the_path_of_anothers_checkpoint_is_refused_with_the_way_out(tmp_path: Path) -> None:
    saved_run(tmp_path / "other", (1,))
    save_legacy(tmp_path / "old", 200)
    for path, why in (
        (tmp_path / "other" / "dcp_000001", "is not in"),
        (tmp_path / "old" / "dist_ckpt_000200", "no lineage"),
    ):
        with running(tmp_path / "root") as manager, pytest.raises(UsageError, match=why) as refused:
            manager.resume(live(), policy=path)
        assert "manager.load" in refused.value.hint


# -- older writers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_training_goes_on_from_an_older_writers_checkpoint_as_it_would_have(
    inside: bool, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    model, optimizer, scheduler = make_training()
    save_legacy(tmp_path / "old", 200, inside=inside)
    expected = go_on(model, optimizer, scheduler=scheduler)
    with running(tmp_path / "new") as manager:
        extra = {"epoch": 0, "added_since": 5}
        state = live(extra=extra)
        assert manager.resume(state) is None
        found = manager.load(state, tmp_path / "old" / "dist_ckpt_000200")
        assert (found.step, found.save_id, found.loaded) == (200, "", ("model", "optimizer", "scheduler", "extra"))
        assert extra == {"epoch": 7, "added_since": 5}  # written back into the dict that was passed
        assert any(line.startswith("rng") for line in found.missing)
        assert any("added_since" in line for line in found.missing)
        manager.save(201, state).wait()  # adopted: from here it is a save like any other
        assert go_on(state.model, state.optimizer, scheduler=state.scheduler) == expected
    assert sum("has no checksums" in line for line in told.messages) == 1


def test_an_older_model_file_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    model, optimizer, _ = make_training(scheduled=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model_000300.pt")
    write_meta(tmp_path, step=300)
    with running(tmp_path / "new") as manager:
        state = live()
        state.scheduler = None
        manager.resume(state)
        assert manager.load(state, tmp_path / "model_000300.pt").loaded == ("model", "optimizer")
        assert go_on(state.model, state.optimizer) == go_on(model, optimizer)


def test_another_architecture_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_legacy(tmp_path / "old", 200)
    with running(tmp_path / "new") as manager:
        state = live()
        state.model[2] = nn.Linear(6, 3)
        state.optimizer = state.scheduler = None
        before = copy.deepcopy(state.model.state_dict())
        manager.resume(state)
        with pytest.raises(UsageError, match="shape"):
            manager.load(state, tmp_path / "old")
        assert same(dict(state.model.state_dict()), dict(before))


def test_parts_that_are_left_out_stay_and_what_nothing_takes_is_told(tmp_path: Path) -> None:
    save_legacy(tmp_path / "old", 200)
    with running(tmp_path / "new") as manager:
        state = live()
        manager.resume(state)
        found = manager.load(state, tmp_path / "old", exclude=("optimizer", "scheduler"))
        assert found.loaded == ("model",)
        assert state.optimizer.state_dict()["state"] == {}
        assert any(line.startswith("epoch") for line in found.missing)


@pytest.mark.parametrize("other", ["SGD", "Adagrad"])
def test_an_optimizer_of_another_class_is_refused_at_the_start_not_in_the_next_step(other: str, tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    state = new_state(7)
    state.optimizer = getattr(torch.optim, other)(state.model.parameters(), lr=0.1)
    state.scheduler = None
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match=f"In the save: optimizer AdamW .* Here: optimizer {other} ") as caught:
            manager.resume(state)
        assert 'exclude=("optimizer",)' in caught.value.hint
        fresh = new_state(7)
        fresh.optimizer = getattr(torch.optim, other)(fresh.model.parameters(), lr=0.1)
        fresh.scheduler = None
        start = manager.resume(fresh, exclude=("optimizer",))
        assert start is not None
        assert start.step == 2
        go_one_step(fresh)


def go_one_step(state: TrainState) -> None:
    state.model(torch.ones(2, state.model[0].in_features)).square().mean().backward()
    state.optimizer.step()


def test_extra_state_that_may_not_be_unpickled_is_refused_with_two_ways_out(tmp_path: Path) -> None:
    save_legacy(tmp_path / "old", 200)
    torch.save({"rng": numpy.random.get_state()}, tmp_path / "old" / "dist_ckpt_000200" / "extra_state.pt")
    with running(tmp_path / "new") as manager:
        state = live()
        manager.resume(state)
        before = copy.deepcopy(state.model.state_dict())
        with pytest.raises(UnsafePickle, match=r"extra_state\.pt") as refused:
            manager.load(state, tmp_path / "old")
        assert "add_safe_globals" in refused.value.hint
        assert same(dict(state.model.state_dict()), dict(before))
        rest = tuple(part for part in PARTS if part not in ("model", "optimizer"))
        assert manager.load(state, tmp_path / "old", exclude=rest).loaded == ("model", "optimizer")
    assert load_checkpoint_without_extra(tmp_path / "old").extra is None


def load_checkpoint_without_extra(old: Path) -> LoadedCheckpoint:
    (old / "dist_ckpt_000200" / "extra_state.pt").rename(old / "aside.pt")
    return load_checkpoint(old)


# -- which optimizer ---------------------------------------------------------------------------------------------------


def two_optimizers(seed: int, steps: int = 3) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    first = torch.optim.AdamW(model[0].parameters(), lr=0.05)
    second = torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.02, momentum=0.9)
    for _ in range(steps):
        go_on_once(model, first, second)
    return model, first, second


def go_on_once(model: nn.Module, *optimizers: Any) -> None:
    model.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    for one in optimizers:
        one.step()


def load_two(tmp_path: Path, tree: dict[str, Any], optimizer: Callable[[nn.Module, Any, Any], Any]) -> tuple[Any, Any]:
    save_dcp(tmp_path / "old" / "dist_ckpt_000100", tree)
    write_meta(tmp_path / "old" / "dist_ckpt_000100", step=100)
    with running(tmp_path / "new") as manager:
        model, first, second = two_optimizers(7, steps=0)
        state = TrainState(model=model, optimizer=optimizer(model, first, second))
        manager.resume(state)
        return state, manager.load(state, tmp_path / "old")


def test_the_first_count_of_optimizer_keys_that_loads_wins(tmp_path: Path) -> None:
    assert optimizer_key_counts == [3, 2, 1, 0]
    model, first, second = two_optimizers(0)
    tree = {**named(model, first, second), "optimizer_2": {"lr_history": [0.1, 0.2]}}
    state, found = load_two(tmp_path / "3", tree, lambda _, one, other: [one, other])
    assert "optimizer" in found.loaded
    assert any("group 3 is not the state of an optimizer" in line for line in found.missing)
    assert go_on(state.model, *state.optimizer) == go_on(model, first, second)

    model, first, second = two_optimizers(0)
    state, found = load_two(tmp_path / "2", named(model, first, second), lambda _, one, other: [one, other])
    assert go_on(state.model, *state.optimizer) == go_on(model, first, second)

    model, first, second = two_optimizers(0)
    state, found = load_two(tmp_path / "1", named(model, first, second), lambda _, one, __: one)
    assert any("the first 1 fit; the rest is left" in line for line in found.missing)
    assert go_on(state.model, state.optimizer) == go_on(model, first)

    state, found = load_two(tmp_path / "0", named(model), lambda _, one, __: one)
    assert found.loaded == ("model",)
    assert any(line.startswith("optimizer: state; it starts without history") for line in found.missing)


def test_several_optimizers_in_a_list_are_as_many_groups(tmp_path: Path) -> None:
    model, first, second = two_optimizers(0)
    both = [get_optimizer_state_dict(model, one) for one in (first, second)]
    tree = {"model": get_model_state_dict(model), "optimizers": both}
    state, _ = load_two(tmp_path, tree, lambda _, one, other: [one, other])
    assert go_on(state.model, *state.optimizer) == go_on(model, first, second)


def cold(state: TrainState, found: Any, told: pytest.LogCaptureFixture) -> None:
    assert found.loaded == ("model",)
    (line,) = [line for line in found.missing if line.startswith("optimizer")]
    assert "it starts without history" in line
    assert any("it starts without history" in message for message in told.messages)
    for one in state.optimizer if isinstance(state.optimizer, list) else [state.optimizer]:
        assert one.state_dict()["state"] == {}


def test_an_ambiguous_optimizer_mapping_is_a_loud_cold_start(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    model, first, second = two_optimizers(0)
    twice = {**named(model, first, first)}  # two groups claim the same parameters
    cold(*load_two(tmp_path / "twice", twice, lambda _, one, __: one), told)
    by_position = {"model": get_model_state_dict(model), "optimizer": first.state_dict()}
    by_position["optimizer_1"] = second.state_dict()
    cold(*load_two(tmp_path / "one of two", by_position, lambda _, one, __: one), told)
    others = named(model, second)  # nobody's here
    cold(*load_two(tmp_path / "others", others, lambda _, one, __: one), told)


@pytest.mark.parametrize("change", ["none", "order", "shape", "groups"])
def test_positions_are_believed_only_where_the_model_has_its_parameters_in_the_saved_order(
    change: str, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    model, _, second = two_optimizers(0)
    tree: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": second.state_dict()}
    if change == "order":
        tree["model"] = dict(reversed(list(tree["model"].items())))

    def build(here: nn.Module, one: Any, other: Any) -> Any:
        parameters = [*here[1].parameters(), *here[2].parameters()]
        if change == "shape":
            parameters = [*here[2].parameters(), *here[1].parameters()]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}] if change == "groups" else parameters
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)

    state, found = load_two(tmp_path, tree, build)
    if change == "none":
        assert go_on(state.model, state.optimizer) == go_on(model, second)
    else:
        cold(state, found, told)


def twins(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return nn.Linear(4, 4), nn.Linear(4, 4)


def test_positions_that_the_save_names_otherwise_are_no_history(tmp_path: Path) -> None:
    """Torch keeps ``param_names`` where an optimizer is made of named parameters: in another order here, no guess."""
    model, here = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))) for _ in range(2))
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())))
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    (tmp_path / "old").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old" / "model_000200.pt")
    write_meta(tmp_path / "old", step=200)
    state = TrainState(model=here, optimizer=torch.optim.AdamW(reversed(list(here.parameters()))))
    state_forward = TrainState(model=here, optimizer=torch.optim.AdamW(here.parameters()))
    with running(tmp_path / "new") as manager:
        manager.resume(state)
        assert "optimizer" in manager.load(state, tmp_path / "old" / "model_000200.pt").loaded
    with running(tmp_path / "newer") as manager:
        manager.resume(state_forward)
        found = manager.load(state_forward, tmp_path / "old" / "model_000200.pt")
    assert "optimizer" not in found.loaded
    assert any("names for the parameters differ" in line for line in found.missing), found.missing


@pytest.mark.parametrize("order", [("q1", "q2"), ("q2", "q1")])
def test_optimizers_that_were_saved_by_name_are_given_back_by_name(order: tuple[str, str], tmp_path: Path) -> None:
    model = nn.ModuleDict(dict(zip(("q1", "q2"), twins(3), strict=True)))
    saved = {name: torch.optim.Adam(model[name].parameters()) for name in ("q1", "q2")}
    sum(part(torch.ones(4)).sum() * (place + 1) for place, part in enumerate(model.values())).backward()
    for one in saved.values():
        one.step()
    (tmp_path / "old").mkdir()
    states = {name: one.state_dict() for name, one in saved.items()}
    torch.save({"model": model.state_dict(), "optimizer": states}, tmp_path / "old" / "model_000200.pt")
    write_meta(tmp_path / "old", step=200)
    assert load_checkpoint(tmp_path / "old" / "model_000200.pt").optimizer is None
    here = nn.ModuleDict(dict(zip(("q1", "q2"), twins(4), strict=True)))
    state = TrainState(model=here, optimizer={name: torch.optim.Adam(here[name].parameters()) for name in order})
    with running(tmp_path / "new") as manager:
        manager.resume(state)
        found = manager.load(state, tmp_path / "old" / "model_000200.pt")
    assert ("optimizer" in found.loaded) == (order == ("q1", "q2"))
