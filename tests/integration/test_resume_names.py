"""Resuming with a model whose names are not all those of the save: patterns to leave out, new names, not strict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.name_rules import NameRules, marked
from tests.kit.processes import run_ranks
from tests.kit.training import running, same

KINDS = ("dcp", "model", "emergency")


def state_of(body: str = "body", head: str = "head", width: int = 2, seed: int = 1) -> TrainState:
    torch.manual_seed(seed)
    model = nn.ModuleDict({body: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), head: nn.Linear(2, width)})
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def forward(state: TrainState) -> None:
    body, head = state.model.values()
    head(body(torch.rand(4, 2))).sum().backward()
    state.optimizer.step()


def saved(root: Path, kind: str) -> TrainState:
    state = state_of(seed=0)
    with running(root) as manager:
        manager.resume(state)
        forward(state)
        if kind == "emergency":
            manager.save_emergency_checkpoint(1, state)
        else:
            manager.save(1, state, kinds=(kind,)).wait()
    return state


def of(state: TrainState, name: str) -> Any:
    """The moments of a parameter."""
    return state.optimizer.state.get(dict(state.model.named_parameters())[name], {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_shape_is_left_out_with_its_moments(tmp_path: Path, kind: str) -> None:
    was = saved(tmp_path, kind)
    state = state_of(width=3)
    head = state.model["head"].weight.clone()
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match=r"head.weight has the shape"):
            manager.resume(state)
        start = manager.resume(state, exclude=("model.head.*",))
    assert start is not None
    assert "model: head.weight, head.bias: left out (exclude), as they are" in start.missing
    assert torch.equal(state.model["head"].weight, head)
    assert same(dict(state.model["body"].state_dict()), dict(was.model["body"].state_dict()))
    assert same(of(state, "body.0.weight"), of(was, "body.0.weight"))
    assert not of(state, "head.weight")
    forward(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rename",
    [
        {"body.*": "trunk.*", "head.*": "out.*"},
        lambda name: name.replace("body", "trunk").replace("head", "out"),
    ],
)
def test_new_names_are_those_of_the_model_and_of_its_moments(tmp_path: Path, kind: str, rename: Any) -> None:
    was = saved(tmp_path, kind)
    state = state_of("trunk", "out")
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match="The checkpoint does not match the model"):
            manager.resume(state)
        start = manager.resume(state, rename=rename)
    assert start is not None
    assert start.loaded[:2] == ("model", "optimizer")
    assert same(list(state.model.state_dict().values()), list(was.model.state_dict().values()))
    assert same(of(state, "trunk.0.weight"), of(was, "body.0.weight"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("body", "rename"),
    [
        ("trunk", {"body.*": "trunk.*"}),
        ("somebody", {"body*": "somebody*"}),
        ("bodybody", {"body*": "bodybody*"}),
        ("bodybody", lambda name: name.replace("body", "bodybody")),
    ],
)
def test_a_command_that_renames_what_it_loads_starts_again_from_its_own_save(
    tmp_path: Path, kind: str, body: str, rename: Any
) -> None:
    was = saved(tmp_path, kind)
    for began in (1, 2, 3):
        state = state_of(body)
        with running(tmp_path, kinds=("dcp", "model")) as manager:
            start = manager.resume(state, rename=rename, strict=False)
            assert start is not None
            assert (start.step, start.missing) == (began, ())
            assert same(list(state.model.state_dict().values()), list(was.model.state_dict().values()))
            assert same(of(state, f"{body}.0.weight"), of(was, "body.0.weight"))
            if kind == "emergency":
                manager.save_emergency_checkpoint(began + 1, state)
            else:
                manager.save(began + 1, state, kinds=(kind,)).wait()


def three(seed: int, width: int = 2) -> TrainState:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(width, 2), "c": nn.Linear(2, 2)})
    return TrainState(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("rename", "where"),
    [
        ({"a.*": "b.*", "b.*": "a.*"}, {"a": "b", "b": "a", "c": "c"}),
        ({"a.*": "b.*", "b.*": "gone.*"}, {"b": "a", "c": "c"}),
        ({"a.*": "b.*", "b.*": "c.*", "c.*": "gone.*"}, {"b": "a", "c": "b"}),
    ],
)
def test_names_that_save_and_model_both_have_are_renamed_once(
    rename: dict[str, str], where: dict[str, str], tmp_path: Path
) -> None:
    """The names do not tell whether it was done: the save does."""
    was = three(0)
    with running(tmp_path) as manager:
        manager.resume(was)
        manager.save(1, was).wait()
    for began in (1, 2, 3):
        state = three(began)
        fresh = {name: value.clone() for name, value in state.model.state_dict().items()}
        with running(tmp_path) as manager:
            start = manager.resume(state, rename=rename, strict=False, exclude=("optimizer",))
            assert start is not None
            assert start.step == began
            manager.save(began + 1, state).wait()
        if began == 1:
            for new, old in where.items():
                assert same(state.model[new].state_dict(), was.model[old].state_dict())
            for new in {"a", "b", "c"} - where.keys():
                assert torch.equal(state.model[new].weight, fresh[f"{new}.weight"])
            first = state
        assert same(state.model.state_dict(), first.model.state_dict())
    with running(tmp_path) as manager, pytest.raises(UsageError, match="No tensor of the save is one of the model's"):
        manager.resume(state_of(), strict=False)


def test_another_function_is_another_rename() -> None:
    def by(old: str, new: str) -> NameRules:
        return NameRules(rename=lambda name: name.replace(old, new))

    def replaced(name: str, pairs: dict[str, str]) -> str:
        return next((new for old, new in pairs.items() if name == old), name)

    def partly(pairs: dict[str, str]) -> NameRules:
        return NameRules(rename=functools.partial(replaced, pairs=pairs))

    def nested(name: str) -> str:
        return "".join(letter.upper() for letter in name)

    def other_nested(name: str) -> str:
        return "".join(letter.lower() for letter in name)

    other_nested.__qualname__ = nested.__qualname__
    assert NameRules(rename=nested).mark != NameRules(rename=other_nested).mark
    one, again, other = by("a", "b"), by("a", "b"), by("a", "c")
    assert one.mark == again.mark != other.mark
    assert partly({"a": "b"}).mark == partly({"a": "b"}).mark != partly({"a": "c"}).mark
    architecture = marked("ab", one.mark)
    assert again.for_save(architecture).rename == {}
    assert other.for_save(architecture) is other
    assert one.for_save("ab") is one
    assert NameRules().mark == NameRules(rename={}).mark == ""
    assert NameRules(rename={"a": "b", "c": "d"}).mark != NameRules(rename={"c": "d", "a": "b"}).mark


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_one_side_alone_is_skipped_if_the_load_is_not_strict(tmp_path: Path, kind: str) -> None:
    was = saved(tmp_path, kind)
    state = state_of(head="other")
    before = state.model["other"].weight.clone()
    with running(tmp_path) as manager:
        start = manager.resume(state, strict=False)
    assert start is not None
    assert "model: other.weight, other.bias: not in the save, as they are (strict=False)" in start.missing
    assert "model: head.weight, head.bias: in the save alone, not loaded (strict=False)" in start.missing
    assert torch.equal(state.model["other"].weight, before)
    assert same(of(state, "body.0.weight"), of(was, "body.0.weight"))
    assert not of(state, "other.weight")


def test_a_load_takes_the_same(tmp_path: Path) -> None:
    was = saved(tmp_path, "model")
    state = state_of("trunk")
    head = state.model["head"].weight.clone()
    with running(tmp_path / "other") as manager:
        found = manager.load(state, tmp_path, rename={"body.*": "trunk.*"}, exclude=("model.head.*",))
    assert "optimizer" in found.loaded
    assert same(list(state.model["trunk"].parameters()), list(was.model["body"].parameters()))
    assert torch.equal(state.model["head"].weight, head)


class Turned(nn.Module):
    """A layer that converts what version 1 of it saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *more)


@pytest.mark.parametrize("arguments", [{"rename": {"a.*": "b.*"}}, {"exclude": ("model.b.*",), "strict": False}])
def test_modules_keep_their_versions_under_new_names_and_if_they_are_left_out(tmp_path: Path, arguments: Any) -> None:
    state = TrainState(nn.ModuleDict({"a": Turned(), "c": nn.Linear(1, 1)}))
    with running(tmp_path) as manager:
        manager.resume(state)
        manager.save(1, state).wait()
    fresh = TrainState(nn.ModuleDict({"b": Turned(), "c": nn.Linear(1, 1)}))
    expected = state.model["a"].weight if "rename" in arguments else fresh.model["b"].weight
    expected = expected.detach().clone()
    with running(tmp_path) as manager:
        manager.resume(fresh, **arguments)
    assert torch.equal(fresh.model["b"].weight, expected)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"exclude": ("model.haed.*",)}, r"exclude holds 'model.haed.\*', and neither .*closest: .*model.head.bias"),
        ({"rename": {"bodi.*": "trunk.*"}}, r"rename holds 'bodi.\*', and the save has no .*closest: .*body.0"),
        ({"rename": {"*.weight": "weight"}}, "rename makes one name of"),
        ({"rename": lambda _: None}, "rename returned None for"),
        ({"rename": lambda name: name.no_such}, "rename failed for .*AttributeError"),
        ({"rename": "old"}, "rename is 'old'; it must be a dict"),
        ({"rename": {"old": "new.*"}}, "rename holds 'old': 'new.*'"),
        ({"rename": {"body.*": "trunk.*", "head.*": "out.*"}}, "Missing in the checkpoint: head.weight, head.bias"),
        ({"exclude": ("head.*",)}, "exclude holds 'head.*'; it must be a tuple of names"),
    ],
)
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_mistake_is_named_and_nothing_is_loaded(tmp_path: Path, kind: str, arguments: Any, what: str) -> None:
    saved(tmp_path, kind)
    state = state_of("trunk")
    before = state.model["trunk"][0].weight.clone()
    with running(tmp_path) as manager, pytest.raises(UsageError, match=what):
        manager.resume(state, **arguments)
    assert torch.equal(state.model["trunk"][0].weight, before)


def sharded(rank: int, root: str, kind: Any, body: str, arguments: dict[str, Any]) -> tuple[str, Any, Any]:
    from torch.distributed.fsdp import fully_shard

    state = state_of(body, seed=rank)
    for layer in state.model.values():
        fully_shard(layer)
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.1)
    full: Callable[[Any], Any] = lambda value: value.full_tensor().detach()  # noqa: E731
    with running(Path(root), timeout_s=60.0) as manager:
        try:
            start = manager.resume(state, **arguments)
        except CkptMirrorError as error:
            return str(error), None, None
        if start is None:
            forward(state)
            manager.save(1, state, kinds=(kind,)).wait()
        weight = state.model[body][0].weight
        return "loaded", full(weight), full(state.optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_shards_follow_their_new_names(tmp_path: Path, kind: str) -> None:
    first = run_ranks(2, sharded, str(tmp_path), kind, "body", {})
    again = run_ranks(2, sharded, str(tmp_path), kind, "trunk", {"rename": {"body.*": "trunk.*"}})
    assert [text for text, _, _ in again] == ["loaded"] * 2
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before[1], after[1])
        assert torch.equal(before[2], after[2])
