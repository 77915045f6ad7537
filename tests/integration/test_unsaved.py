"""What training changes and no state_dict keeps is named at a save, once; what is kept, or did not change, is not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, TrainState
from tests.kit.processes import run_ranks
from tests.kit.training import same


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([float("nan"), 0.0]), persistent=False)
        self.register_buffer("kept", torch.zeros(2))


class Sam(torch.optim.Optimizer):
    """As wrappers are written: it shares the groups of the optimizer that it calls, and not its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.1})
        self.base_optimizer = torch.optim.Adam(self.param_groups)

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step(closure)


class Open(Sam):
    def state_dict(self) -> dict[str, Any]:
        return self.base_optimizer.state_dict()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def save(manager: CheckpointManager, at: int, state: TrainState) -> None:
    manager.save(at, state).wait()


def test_a_non_persistent_buffer_that_changed_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = TrainState(model := Model())
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        save(manager, 1, state)
        model.seen.copy_(model.seen.clone())  # written, with the same values: as DDP does
        model.kept.add_(1)
        save(manager, 2, state)
        assert not [line for line in lines_of(caplog) if "persistent" in line]
        for at in (3, 4):
            model.seen.add_(1)
            save(manager, at, state)
    found = [line for line in lines_of(caplog) if "persistent" in line]
    assert len(found) == 1
    assert "model.seen" in found[0]
    assert "model.kept" not in found[0]


@pytest.mark.parametrize(("kind", "is_named"), [(Sam, True), (Open, False), (torch.optim.Adam, False)])
def test_an_optimizer_whose_state_no_save_keeps_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, is_named: bool
) -> None:
    model = Model()
    optimizer = kind(model.parameters())
    model.layer(torch.ones(2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        state = TrainState(model, optimizer)
        manager.resume(state)
        for at in (1, 2):
            save(manager, at, state)
    found = [line for line in lines_of(caplog) if "base_optimizer" in line]
    assert len(found) == is_named
    assert all("Sam" in line and "Adam" in line for line in found)


def test_the_inner_optimizer_comes_back_if_extra_has_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained() -> TrainState:
        torch.manual_seed(0)
        model = Model()
        optimizer = Sam(model.parameters())
        return TrainState(model, optimizer, extra={"base_optimizer": optimizer.base_optimizer})

    state = trained()
    state.model.layer(torch.ones(2)).sum().backward()
    state.optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        save(manager, 1, state)
    assert not [line for line in lines_of(caplog) if "base_optimizer" in line]
    with CheckpointManager(tmp_path) as manager:
        manager.resume(fresh := trained())
    was, now = (one.optimizer.base_optimizer.state_dict()["state"] for one in (state, fresh))
    assert same(was, now)
    assert was[0]["exp_avg"].abs().sum() > 0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def hooked(rank: int, root: str) -> dict[str, list[str]]:
    """Save replicas with a hook that has a state, and with one that has none."""
    found = {}
    for name in ("power", "half"):
        lines = Lines()
        logging.getLogger("ckptmirror").addHandler(lines)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(2, 2))
        if name == "power":
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(torch.distributed.group.WORLD, default_hooks.fp16_compress_hook)
        state = TrainState(model)
        manager = CheckpointManager(Path(root) / name, timeout_s=60.0)
        manager.resume(state)
        for at in (1, 2):
            save(manager, at, state)
        manager.close()
        logging.getLogger("ckptmirror").removeHandler(lines)
        found[name] = [line for line in lines.lines if "hook" in line]
        torch.distributed.barrier()
    return found


def test_a_communication_hook_with_a_state_is_named_once_by_rank_0(tmp_path: Path) -> None:
    first, second = run_ranks(2, hooked, str(tmp_path))
    assert len(first["power"]) == 1
    assert "powerSGD_hook" in first["power"][0]
    assert not [*first["half"], *second["power"], *second["half"]]
