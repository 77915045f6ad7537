"""Before training starts: how large a save will be, and whether the disk can hold what the retention keeps."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager, Retention, TrainState
from ckptmirror.core.model import Kind
from ckptmirror.flow.start import disk_room
from ckptmirror.formats.save_size import estimated_bytes
from ckptmirror.local.free_space import free_bytes
from tests.kit.roots import whole
from tests.kit.training import running


def state_of(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, *, trained: bool = False, **more: object
) -> TrainState:
    """About 1 MB of parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.BatchNorm1d(500))
    state = TrainState(model=model, optimizer=optimizer(model.parameters(), **more))
    if trained:
        model(torch.rand(4, 500)).sum().backward()
        state.optimizer.step()
    return state


def estimate(state: TrainState, *kinds: Kind) -> int:
    return estimated_bytes(state, kinds, rank=0, world_size=1)


@pytest.mark.parametrize("kinds", [("dcp",), ("model",), ("dcp", "model")])
@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_a_save_is_about_as_large_as_was_estimated_before_the_first_step(
    kinds: tuple[Kind, ...], optimizer: type[torch.optim.Optimizer], more: dict[str, object], tmp_path: Path
) -> None:
    state = state_of(optimizer, trained=True, **more)
    state.ema = torch.optim.swa_utils.AveragedModel(state.model)
    state.extra = {"table": [torch.zeros(100_000)]}
    fresh = state_of(optimizer, **more)
    fresh.ema, fresh.extra = state.ema, state.extra
    with CheckpointManager(tmp_path, kinds=kinds) as manager:
        manager.resume(state_of(optimizer, **more))
        manager.save(1, state).wait()
    size_bytes = whole(tmp_path)[1].size_bytes
    assert estimate(state, *kinds) == pytest.approx(size_bytes, rel=0.05)
    assert estimate(fresh, *kinds) == pytest.approx(size_bytes, rel=0.05)


def without_end() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize("value", [without_end(), torch.nn.LazyLinear(3)], ids=["endless", "lazy"])
def test_what_cannot_be_counted_does_not_stop_a_start(
    value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    state.extra = {"value": value}
    with running(tmp_path) as manager:
        assert manager.resume(state) is None
    assert "the size of a save is not known before the first one" in caplog.text


def test_an_optimizer_of_another_shape_does_not_stop_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of()
    del state.optimizer.param_groups[0]["params"]
    with running(tmp_path) as manager:
        assert manager.resume(state) is None
    assert "the size of a save is not known before the first one: 'params'" in caplog.text


def test_a_disk_that_does_not_answer_then_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks go on to train."""

    def does_not_answer(_root: Path) -> int:
        raise OSError(errno.ESTALE, "the disk does not answer")

    monkeypatch.setattr(disk_room, "free_bytes", does_not_answer)
    with running(tmp_path) as manager:
        assert manager.resume(state_of()) is None
    assert "it is not known whether the disk has room for the next saves: " in caplog.text


def warnings_at_start(
    root: Path, *mirrors: str, keep_last: int | None, trained: bool = True, **more: object
) -> list[str]:
    """Start once, and return what is said of the disk."""
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, heard = logging.getLogger("ckptmirror.resume"), Heard(logging.WARNING)
    log.addHandler(heard)
    try:
        with running(root, *mirrors, kinds=("model",), retention=Retention(keep_last=keep_last, **more)) as manager:  # type: ignore[arg-type]
            manager.resume(state_of(trained=trained))
    finally:
        log.removeHandler(heard)
    return [line for line in said if "the disk of" in line]


@pytest.mark.parametrize("trained", [False, True])
def test_a_start_says_that_the_disk_cannot_hold_keep_last_saves_and_one_more_with_both_numbers(
    trained: bool, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    root, url = mounted("size=20m") / "run", f"file://{tmp_path}/mirror"
    assert warnings_at_start(root, url, keep_last=3, trained=trained) == []
    (line,) = warnings_at_start(root, url, keep_last=6, trained=trained)
    assert f"the disk of {root} cannot hold keep_last + 1 = 7 saves of this state" in line
    found = re.search(r"they need about (\d+) bytes; (\d+) bytes are free, and rotation may free (\d+)", line)
    assert found is not None
    needed, free, freeable = map(int, found.groups())
    assert needed == pytest.approx(7 * estimate(state_of(trained=trained), "model") + 1.2 * 1024 * 1024, rel=0.02)
    assert free == pytest.approx(free_bytes(root), rel=0.05)
    assert freeable == 0
    assert "Lower keep_last" in line


def test_saves_that_rotation_may_delete_count_as_room(mounted: Callable[..., Path], tmp_path: Path) -> None:
    root, url = mounted("size=20m") / "run", f"file://{tmp_path}/mirror"
    with CheckpointManager(root, [url], kinds=("model",)) as manager:
        manager.resume(state_of())
        for step in (1, 2, 3):
            manager.save(step, state_of(trained=True)).wait()
    size_bytes = whole(root)[1].size_bytes
    assert free_bytes(root) < 4 * size_bytes
    assert warnings_at_start(root, url, keep_last=3) == []
    (line,) = warnings_at_start(root, url, keep_last=3, keep_every=1)
    assert "rotation may free 0" in line


@pytest.mark.parametrize(("mirrored", "keep_last"), [(True, None), (False, 5)])
def test_where_nothing_is_ever_deleted_a_start_says_when_there_is_no_room_for_one_save(
    mirrored: bool, keep_last: int | None, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    root = mounted("size=12m") / "run"
    urls = [f"file://{tmp_path}/mirror"] if mirrored else []
    assert warnings_at_start(root, *urls, keep_last=keep_last) == []
    (root.parent / "filler").write_bytes(bytes(free_bytes(root) - 3_000_000))
    (line,) = warnings_at_start(root, *urls, keep_last=keep_last)
    assert "has no room for one more save of this state" in line
