"""What every kind of save promises to modules that tell the layout of their state by a version."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from ckptmirror.formats.dcp_read import read_full_directory
from ckptmirror.formats.load_model import load_model
from ckptmirror.formats.names import live_values
from ckptmirror.formats.read_full import read_full
from ckptmirror.formats.versions import checked, for_live, from_text, plain_model
from ckptmirror.formats.weights_only_values import decode
from ckptmirror.untrusted.tensor_files import load_bytes
from tests.kit.formats import KINDS, load, same_bits, save


class Turned(nn.Module):
    """Before version 2 it kept its weight transposed; it says so without a copy, as a careless author would."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") is None or local_metadata["version"] < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Strict(nn.Module):
    """It raises, of a kind of its own choice, if it does not know the version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") not in (1, 2):
            raise ValueError(f"no version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def both() -> nn.Module:
    return nn.ModuleDict({"turned": Turned(), "strict": Strict()})


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "compiled inside": lambda module: nn.Sequential(compiled(module)),
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WRAPPERS)
def test_new_weights_are_not_migrated_again(kind: Kind, how: str, tmp_path: Path) -> None:
    state, other = (TrainState(model=WRAPPERS[how](both())) for _ in range(2))
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    same_bits(dict(state.model.state_dict()), dict(other.model.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", ["compiled", "checkpointed"])
def test_versions_find_their_modules_under_other_wrappers(kind: Kind, there: str, tmp_path: Path) -> None:
    state, other = TrainState(model=both()), TrainState(model=WRAPPERS[there](both()))
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    same_bits(dict(live_values(state.model)), dict(live_values(other.model)))


@pytest.mark.parametrize("kind", KINDS)
def test_averages_and_modules_in_extra_have_versions_of_their_own(kind: Kind, tmp_path: Path) -> None:
    def build() -> TrainState:
        extra = {"net": both(), 7: [both(), {"deep": (torch.optim.swa_utils.AveragedModel(both()),)}]}
        return TrainState(model=nn.Linear(2, 2), ema=[both(), {"a": both()}], extra=extra)  # type: ignore[arg-type]

    def modules(state: TrainState) -> list[nn.Module]:
        listed: Any = state.extra
        return [state.ema[0], state.ema[1]["a"], listed["net"], listed[7][0], listed[7][1]["deep"][0]]

    state, other = build(), build()
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    for one, another in zip(modules(state), modules(other), strict=True):
        same_bits(dict(one.state_dict()), dict(another.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_among_the_values_keeps_its_versions(kind: Kind, tmp_path: Path) -> None:
    """Both where it fills one that is here, and where it comes anew."""
    source = both()
    state = TrainState(model=nn.Linear(2, 2), extra={"best": source.state_dict(), "last": source.state_dict()})
    other = TrainState(model=nn.Linear(2, 2), extra={"best": OrderedDict(copy.deepcopy(both().state_dict()))})
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    assert other.extra is not None
    for key in ("best", "last"):
        into = both()
        into.load_state_dict(other.extra[key])
        same_bits(dict(source.state_dict()), dict(into.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_an_older_version_are_migrated_once(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new values do not overwrite the old ones while these are read."""
    monkeypatch.setattr(Turned, "_version", 1)
    state = TrainState(model=both(), ema=[both()], extra={"net": {"deep": both()}})
    meta = save(kind, tmp_path, state)
    monkeypatch.setattr(Turned, "_version", 2)
    other = TrainState(model=both(), ema=[both()], extra={"net": {"deep": both()}})
    load(kind, tmp_path, meta, other)
    for old, new in zip(modules_of(state), modules_of(other), strict=True):
        assert torch.equal(new["turned"].weight, old["turned"].weight.t())
        assert torch.equal(new["strict"].inner.weight, old["strict"].inner.weight)


def modules_of(state: TrainState) -> list[Any]:
    assert state.extra is not None
    return [state.model, state.ema[0], state.extra["net"]["deep"]]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_module_raises_as_it_loads_is_named(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Strict, "_version", 3)
    meta = save(kind, tmp_path, TrainState(model=both()))
    with pytest.raises(UsageError, match=r"strict, a Strict, does not take the checkpoint: ValueError: no version 3"):
        load(kind, tmp_path, meta, TrainState(model=both()))


def test_a_save_without_versions_is_taken_to_be_of_the_modules_as_they_are() -> None:
    state, other = both(), both()
    load_model(other, dict(state.state_dict()))
    same_bits(dict(state.state_dict()), dict(other.state_dict()))


def test_a_wrapper_keeps_the_version_of_its_own() -> None:
    model = compiled(Turned())
    metadata = for_live(model, live_values(model).metadata, {"": {"version": 7}})
    assert metadata == {"": {"version": 1}, "_orig_mod": {"version": 7}}


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_checkpoint_without_a_model_at_hand_carries_the_versions(kind: Kind, tmp_path: Path) -> None:
    """Also a directory without the files of extra state, as a stage may bring it."""
    state = TrainState(model=compiled(both()))
    meta = save(kind, tmp_path, state)
    for extra in tmp_path.glob("extra_*"):
        extra.unlink()
    into = both()
    into.load_state_dict(read_full(tmp_path, meta, kind)[0])
    same_bits(dict(live_values(state.model)), dict(into.state_dict()))


def test_plain_torch_takes_the_model_file_as_it_is(tmp_path: Path) -> None:
    state = TrainState(model=compiled(both()))
    save("model", tmp_path, state)
    saved = torch.load(tmp_path / "model_000200.pt", weights_only=True)
    assert saved._metadata["turned"] == {"version": 2}
    into = both()
    into.load_state_dict(saved)
    same_bits(dict(live_values(state.model)), dict(into.state_dict()))


class Remembers(nn.Linear):
    """A module with values of its own beside its tensors."""

    def __init__(self, memory: Any = None) -> None:
        super().__init__(2, 2)
        self.memory = memory

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


MEMORY = {
    "order": OrderedDict(a=[OrderedDict(b=1)]),
    "seen": {1, 2},
    "size": torch.Size([3]),
    "pair": (1, OrderedDict()),
    "of a module": nn.Linear(1, 1).state_dict(),
}


def test_plain_torch_gives_a_module_the_extra_state_that_it_had(tmp_path: Path) -> None:
    save("model", tmp_path, TrainState(model=Remembers(MEMORY)))
    into = Remembers()
    into.load_state_dict(torch.load(tmp_path / "model_000200.pt", weights_only=True))
    assert [type(value) for value in into.memory.values()] == [type(value) for value in MEMORY.values()]
    assert type(into.memory["order"]["a"][0]) is OrderedDict
    assert into.memory["of a module"]._metadata == MEMORY["of a module"]._metadata  # type: ignore[attr-defined]
    assert {**into.memory, "of a module": None} == {**MEMORY, "of a module": None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [*MEMORY.values(), {(1, 2)}, frozenset({1}), OrderedDict(x={(1,)})], ids=range(8))
def test_extra_state_comes_back_as_the_same_kind(kind: Kind, value: Any, tmp_path: Path) -> None:
    other = TrainState(model=Remembers())
    load(kind, tmp_path, save(kind, tmp_path, TrainState(model=Remembers(value))), other)
    assert type(other.model.memory) is type(value)
    same_bits(value, other.model.memory)


class Carrier(OrderedDict[str, Any]):
    """No plain dict."""


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    "metadata",
    [[1], {"": 1}, {1: {}}, {"": {"version": torch.ones(1)}}, {"": {"version": [1]}}, {"": {1: 2}}],
    ids=range(6),
)
def test_versions_that_are_no_numbers_nor_text_are_broken(metadata: Any) -> None:
    saved: Any = OrderedDict(weight=torch.ones(1))
    saved._metadata = metadata
    found = load_bytes(_saved(saved), "model.pt")
    with pytest.raises(IntegrityError, match="are not numbers and text"):
        plain_model(found, "model.pt")
    with pytest.raises(IntegrityError, match="are not numbers and text"):
        decode({"extra": [found]})
    with pytest.raises(IntegrityError, match="are not numbers and text"):
        checked(metadata, "model.pt")


def test_a_model_file_that_carries_more_is_broken() -> None:
    saved: Any = OrderedDict(weight=torch.ones(1))
    saved.forward = 3
    with pytest.raises(IntegrityError, match="gives a state to a OrderedDict"):
        load_bytes(_saved(saved), "model.pt")
    with pytest.raises(IntegrityError, match="holds a Carrier"):
        plain_model(Carrier(), "model.pt")


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "[" * 100_000, b"\xff", 3], ids=range(7))
def test_a_broken_text_of_versions_is_an_error(text: Any) -> None:
    with pytest.raises(IntegrityError, match="versions of the modules in save"):
        from_text(text, "save")


def test_the_optimizer_and_the_model_of_a_directory_are_all_that_is_read_from_it(tmp_path: Path) -> None:
    save("dcp", tmp_path, TrainState(model=both()))
    assert read_full_directory(tmp_path / "dcp_000200").keys() == {"model"}
