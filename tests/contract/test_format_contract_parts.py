"""What every kind of save promises about the parts beside the model, and about values that it cannot take."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pytest
import torch
from torch import nn

from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from tests.kit.formats import (
    KINDS,
    Network,
    everything,
    files_below,
    load,
    make_state,
    same_bits,
    save,
    train,
)

pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_extra_state_round_trip(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    nested = {"best": 0.25, "seen": (1, 2, "three"), 7: [None, True]}
    values: dict[str, Any] = {
        "epoch": 3,
        "nested": nested,
        "counter": Counter("abca"),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "queue": deque([1, 2], maxlen=4),
        "set": {1, 2},
        "frozen": frozenset({"x"}),
        "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "number": numpy.float64(1.5),
        "tensor": torch.arange(4),
        "raw": b"\0\xff",
        "complex": 1 + 2j,
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }
    state.extra = copy.deepcopy(values)
    meta = save(kind, tmp_path, state)
    target: dict[str, Any] = {
        "epoch": 0,
        "nested": {"best": 9.0, 8: "of another run"},
        "tensor": torch.zeros(4, dtype=torch.int64),
    }
    kept_dict, kept_tensor = target["nested"], target["tensor"]
    other = make_state(seed=1)
    other.extra = target
    load(kind, tmp_path, meta, other)
    assert target["nested"] is kept_dict
    assert kept_dict == nested
    assert target["tensor"] is kept_tensor
    assert kept_tensor.tolist() == [0, 1, 2, 3]
    numpy.testing.assert_array_equal(target.pop("array"), values.pop("array"))
    assert isinstance(target["number"], float)
    for key, value in values.items():
        if key not in ("tensor", "number"):
            assert type(target[key]) is type(value)
            assert target[key] == value
    assert target["queue"].maxlen == 4


class _Opaque:
    pass


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("extra.opaque", _Opaque()),
        ("extra.id", UUID(int=1)),
        ("extra.nested.deep[1]", {"deep": [0, _Opaque()]}),
        ("extra.function", len),
    ],
)
def test_what_could_not_be_loaded_back_is_refused_while_saving(
    kind: Kind, where: str, value: Any, tmp_path: Path
) -> None:
    state = make_state()
    state.extra = {where.split(".")[1]: value}
    with pytest.raises(UsageError) as caught:
        save(kind, tmp_path, state)
    assert caught.value.message.startswith(where + " ")
    assert files_below(tmp_path) == []


def test_bfloat16_weights_keep_float32_moments(kind: Kind, tmp_path: Path) -> None:
    def build() -> TrainState:
        model = nn.Linear(3, 3).bfloat16()
        return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = build()
    for parameter in state.model.parameters():
        state.optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    meta = save(kind, tmp_path, state)
    other = build()
    load(kind, tmp_path, meta, other)
    same_bits(state.optimizer.state_dict(), other.optimizer.state_dict())


def test_several_optimizers_share_one_save(kind: Kind, tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = Network()
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return TrainState(
            model=model, optimizer=[torch.optim.AdamW(matrices), torch.optim.SGD(vectors, lr=0.1, momentum=0.5)]
        )

    state = build(0)
    state.model(torch.randint(0, 5, (8,))).square().mean().backward()
    for one in state.optimizer:
        one.step()
    meta = save(kind, tmp_path, state)
    other = build(1)
    load(kind, tmp_path, meta, other)
    same_bits([o.state_dict() for o in state.optimizer], [o.state_dict() for o in other.optimizer])


def test_a_frozen_and_an_unused_parameter_have_no_state_and_load(kind: Kind, tmp_path: Path) -> None:
    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
        model["frozen"].requires_grad_(False)
        return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = build(0)
    state.model["used"](torch.randn(3, 2)).sum().backward()
    state.optimizer.step()
    meta = save(kind, tmp_path, state)
    other = build(1)
    load(kind, tmp_path, meta, other)
    same_bits(state.optimizer.state_dict(), other.optimizer.state_dict())


def test_objects_with_state_dict_are_saved_by_it(kind: Kind, tmp_path: Path) -> None:
    class Position:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    state = make_state()
    state.dataloader, state.extra = Position(), {"tracker": Position()}
    state.dataloader.at, state.extra["tracker"].at = 17, 4
    state.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    other.dataloader, other.extra = Position(), {"tracker": Position()}
    other.scaler = torch.amp.GradScaler("cpu")
    load(kind, tmp_path, meta, other)
    assert (other.dataloader.at, other.extra["tracker"].at) == (17, 4)
    assert other.scaler.get_scale() == 512.0


def test_a_rank_that_the_save_did_not_have_keeps_its_generators(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    before = torch.get_rng_state()
    report = load(kind, tmp_path, meta, other, rank=3, world_size=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert [line.partition(":")[0] for line in report.missing] == ["rng"]
    assert {"model", "optimizer", "scheduler", "ema", "extra"} <= set(report.loaded)
    same_bits(everything(state), everything(other))


def test_a_meta_device_model_is_refused_with_what_to_do(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2)))
    with torch.device("meta"):
        other = TrainState(model=nn.Linear(2, 2))
    with pytest.raises(UsageError, match="meta device"):
        load(kind, tmp_path, meta, other)


def test_a_hostile_pickle_in_the_place_of_any_file_runs_nothing(kind: Kind, tmp_path: Path) -> None:
    class Exploit:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "owned"),))

    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    for path in files_below(tmp_path):
        if path.suffix == ".json":
            continue
        whole = path.read_bytes()
        for protocol in (2, 4):
            path.write_bytes(pickle.dumps(Exploit(), protocol=protocol))
            with pytest.raises(CkptMirrorError):
                load(kind, tmp_path, meta, make_state(seed=1))
        archive = io.BytesIO()
        torch.save({"state": Exploit(), "param_groups": []}, archive)
        path.write_bytes(archive.getvalue())
        with pytest.raises(CkptMirrorError):
            load(kind, tmp_path, meta, make_state(seed=1))
        assert not (tmp_path / "owned").exists()
        path.write_bytes(whole)


class Observer(nn.Module):
    """Sizes its buffer and its extra state by the data, as the observers of torch's quantizers do."""

    highest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.empty(0))
        self.history: torch.Tensor | None = None

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.highest, self.history = data.detach().amax(0), data.detach().flatten()
        return data

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.highest.resize_(state_dict[f"{prefix}highest"].shape)
        super()._load_from_state_dict(state_dict, prefix, *more)


def test_what_a_module_sizes_by_its_data_comes_back_into_a_fresh_one(kind: Kind, tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(nn.Linear(3, 4), Observer()) for _ in range(2))
    model(torch.randn(2, 3))
    meta = save(kind, tmp_path, TrainState(model=model))
    load(kind, tmp_path, meta, TrainState(model=fresh))
    assert fresh[1].history is not None
    same_bits(dict(fresh.state_dict()), dict(model.state_dict()))


def test_a_parameter_has_to_fit_whatever_its_module_does(kind: Kind, tmp_path: Path) -> None:
    class Picky(nn.BatchNorm1d):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            super()._load_from_state_dict(*arguments)

    meta = save(kind, tmp_path, TrainState(model=nn.Sequential(nn.Linear(2, 2), Picky(4))))
    fresh = nn.Sequential(nn.Linear(2, 2), Picky(5))
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(UsageError, match="has the shape"):
        load(kind, tmp_path, meta, TrainState(model=fresh))
    same_bits(dict(fresh.state_dict()), before)  # nothing was copied
