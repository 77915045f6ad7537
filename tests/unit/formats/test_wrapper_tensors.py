"""Tensors that keep their values in other tensors, as quantised weights and optimizer states do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import UsageError
from ckptmirror.formats import TrainState
from ckptmirror.sums.digests import byte_view


def two(first: float, second: float) -> Any:
    return TwoTensor(torch.full((4,), first), torch.full((4,), second))


class Compressed(torch.optim.Optimizer):
    """An optimizer whose state is such a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, _closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = two(5.0, 7.0)


class WithWrapped(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("table", value)


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals([TwoTensor]):
        yield


def new(value: float) -> TrainState:
    model = WithWrapped(two(value, 2 * value))
    return TrainState(model=model, optimizer=Compressed(model.parameters()), extra={"own": two(value, 3 * value)})


def parts(tensor: Any) -> tuple[type, list[float], list[float]]:
    return type(tensor), tensor.a.tolist(), tensor.b.tolist()


@pytest.mark.parametrize("is_emergency", [False, True])
def test_they_come_back_with_all_their_parts(tmp_path: Path, is_emergency: bool) -> None:
    state = new(1.0)
    state.optimizer.step()
    with CheckpointManager(tmp_path, kinds=("model",)) as manager:
        manager.resume(state)
        if is_emergency:
            manager.save_emergency_checkpoint(1, state)
        else:
            manager.save(1, state).wait()
    other = new(4.0)
    with CheckpointManager(tmp_path, kinds=("model",)) as manager:
        start = manager.resume(other)
    assert start is not None
    assert start.missing == ()
    (moment,) = (of["moment"] for of in other.optimizer.state.values())
    assert parts(moment) == (TwoTensor, [5.0] * 4, [7.0] * 4)
    assert parts(other.model.table) == (TwoTensor, [1.0] * 4, [2.0] * 4)
    assert parts(other.extra["own"]) == (TwoTensor, [1.0] * 4, [3.0] * 4)


def test_kind_dcp_does_not_keep_their_parts_and_refuses_them_by_name(tmp_path: Path) -> None:
    state = new(1.0)
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        with pytest.raises(UsageError, match=r"model\.table is a tensor of type TwoTensor") as refused:
            manager.save(1, state).wait()
        assert 'kinds=("model",)' in refused.value.hint
        state.model.table = torch.zeros(4)
        state.optimizer.step()
        with pytest.raises(UsageError, match=r"optimizer\.state\.weight\.moment is a tensor of type TwoTensor"):
            manager.save(2, state).wait()


def test_nobody_reads_the_bytes_that_they_do_not_have() -> None:
    with pytest.raises(UsageError, match="no bytes of its own"):
        byte_view(two(1.0, 2.0))
