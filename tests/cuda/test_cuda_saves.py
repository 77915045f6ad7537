"""Saves and loads of a training on a GPU: which moment they hold, what they take of the device, where they load."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from ckptmirror.core.errors import LoadDiffers
from tests.cuda import trainings
from tests.kit.training import running, same

BEHIND = 200_000_000  # clock ticks: about a tenth of a second
MIB = 1 << 20
LAYER = 1024  # a weight has 4 MiB


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Let this process have so many bytes more of the device."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size_bytes) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def wide(*, stepped: bool = True) -> TrainState:
    """Eight layers and AdamW: 32 MiB of weights, and twice that of moments once it has stepped."""
    model = nn.Sequential(*(nn.Linear(LAYER, LAYER, bias=False) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return TrainState(model=model, optimizer=optimizer)


def fill(state: TrainState, value: float) -> None:
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_a_save_holds_the_moment_of_its_call_while_the_training_goes_on(tmp_path: Path, kind: str) -> None:
    state = wide()
    with CheckpointManager(tmp_path, kinds=("model",) if kind == "emergency" else (kind,)) as manager:
        manager.resume(state)
        torch.cuda._sleep(BEHIND)
        fill(state, 1.0)
        if kind == "emergency":
            manager.save_emergency_checkpoint(1, state)
        else:
            handle = manager.save(1, state)
            fill(state, 2.0)
            handle.wait("committed")
    other = wide()
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(other) is not None
    assert all(bool((one == 1.0).all()) for one in other.model.parameters())


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_save_takes_no_memory_of_the_device(tmp_path: Path, kind: str) -> None:
    state = wide()
    with CheckpointManager(tmp_path, kinds=(kind,)) as manager:
        manager.resume(state)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        manager.save(1, state).wait("committed")
        assert torch.cuda.max_memory_allocated() - before < 32 * MIB
        assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.parametrize("kind", ["dcp", "model"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_load_takes_little_more_of_the_device_than_it_leaves_there(tmp_path: Path, kind: str, stepped: bool) -> None:
    with CheckpointManager(tmp_path, kinds=(kind,)) as manager:
        manager.resume(state := wide())
        manager.save(1, state).wait("committed")
    del state, manager
    gc.collect()
    other = wide(stepped=stepped)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(other) is not None
    found = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    after, peak = ((size_bytes - before) / MIB for size_bytes in found)
    print(f"{before / MIB:.1f} MiB before; in the end {after:.1f} more, at most {peak:.1f} more")
    assert after < 65 * (not stepped) + 1
    assert peak < 65 + 32


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_what_was_saved_on_a_gpu_loads_where_there_is_none_and_back(tmp_path: Path, kind: str) -> None:
    state = trainings.state("plain")
    with CheckpointManager(tmp_path, kinds=("model",) if kind == "emergency" else (kind,)) as manager:
        manager.resume(state)
        for _ in range(2):
            trainings.step(state)
        if kind == "emergency":
            manager.save_emergency_checkpoint(2, state)
        else:
            manager.save(2, state).wait("committed")
    script = tmp_path / "evaluate.py"
    script.write_text(
        f"""
import sys, torch
sys.path.insert(0, {os.getcwd()!r})
assert not torch.cuda.is_available()
from ckptmirror import CheckpointManager, TrainState
from tests.cuda.trainings import Network
model = Network()
model.register_buffer("conjugate", torch.zeros(5, dtype=torch.complex64))
model.register_buffer("negative", torch.zeros(5))
adam = torch.optim.AdamW(model.parameters(), lr=0.01)
with CheckpointManager({str(tmp_path)!r}, kinds=("model",)) as manager:
    start = manager.resume(TrainState(model, adam, extra={{"loss": torch.zeros(()), "rank": 0}}))
    print(start.missing)
    manager.save(3, TrainState(model, adam, extra={{"loss": torch.ones(()), "rank": 0}})).wait("committed")
torch.save(model.state_dict(), {str(tmp_path / "loaded.pt")!r})
"""
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cuda" in done.stdout
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    values = {name: value.resolve_conj().resolve_neg().cpu() for name, value in state.model.state_dict().items()}
    assert same(dict(loaded), values)
    back = trainings.state("plain")
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume(back)
        assert start is not None
        assert start.step == 3
    assert all(one.is_cuda for one in back.model.state_dict().values())
    assert same(back.model.state_dict(), state.model.state_dict())
    assert back.extra["loss"].is_cuda
    assert back.extra["loss"] == 1.0


def test_a_checkpoint_is_loaded_to_the_device_that_is_asked_for(tmp_path: Path) -> None:
    state = wide()
    with CheckpointManager(tmp_path, kinds=("dcp", "model")) as manager:
        manager.resume(state)
        manager.save(1, state).wait("committed")
    for found in [load_checkpoint(path, map_location="cuda") for path in sorted(tmp_path.glob("[dm]*_000001*"))]:
        assert all(one.is_cuda for one in found.model.values())
        assert same(dict(found.model), dict(state.model.state_dict()))


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_device_without_room_is_not_blamed_on_the_save(tmp_path: Path, kind: str) -> None:
    with CheckpointManager(tmp_path, kinds=(kind,)) as manager:
        manager.resume(state := wide())
        manager.save(1, state).wait("committed")
        manager.save(2, state).wait("committed")
    del state
    other = wide(stepped=False)
    with room_for(8 * MIB), running(tmp_path) as manager, pytest.raises(torch.OutOfMemoryError):
        manager.resume(other)
    fresh = wide(stepped=False)
    with running(tmp_path) as manager:
        start = manager.resume(fresh)
        assert start is not None
        assert start.step == 2


def test_a_failed_kernel_costs_the_save_and_not_what_was_saved_before(tmp_path: Path) -> None:
    """After a failed assertion on the device every call raises: the process ends, and the next start continues."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys, torch
sys.path.insert(0, {os.getcwd()!r})
from ckptmirror import CheckpointManager
from tests.cuda import trainings
state = trainings.state("plain")
with CheckpointManager({str(tmp_path / "root")!r}) as manager:
    manager.resume(state)
    trainings.step(state)
    manager.save(1, state).wait("committed")
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]
    manager.save(2, state)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "device-side assert" in done.stderr
    state = trainings.state("plain")
    with CheckpointManager(tmp_path / "root") as manager:
        start = manager.resume(state)
        assert start is not None
        assert start.step == 1


def test_a_change_between_load_and_first_step_is_found_on_the_device(tmp_path: Path) -> None:
    state = trainings.state("fused")
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        trainings.step(state)
        manager.save(1, state).wait("committed")
    other = trainings.state("fused")
    with running(tmp_path) as manager:
        assert manager.resume(other) is not None
        with torch.no_grad():
            other.model.inner.weight[3, 2] += 1.0
        with pytest.raises(LoadDiffers, match=r"inner\.weight"):
            trainings.step(other)
