"""A start that has loaded a save, and finds at its claim that the run continues elsewhere now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import Temporary
from ckptmirror.flow.start.bring import Bringer
from tests.kit.cli import run


def built() -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), extra={})


def saved(root: Path, url: str, steps: tuple[int, ...], *, but_first: str = "") -> None:
    """Continue the run and save, each time with other weights; the first save lacks a part of ``extra``."""
    state = built()
    with CheckpointManager(root, [url], kinds=("dcp",)) as manager:
        manager.resume(state)
        for step in steps:
            state.extra = {"step": step}
            if step > 1 or not but_first:
                state.extra["more"] = but_first
            with torch.no_grad():
                state.model.bias.fill_(step)
            manager.save(step, state)
        manager.wait("mirrored", timeout_s=60.0)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Let something happen once, after a start has loaded and before it claims."""

    def happens(what: Callable[[], Any]) -> None:
        claim, left = Bringer.claim, [what]

        def first_this(self: Bringer, *proposal: Any) -> Any:
            while left:
                left.pop()()
            return claim(self, *proposal)

        monkeypatch.setattr(Bringer, "claim", first_this)

    return happens


def test_a_run_that_begins_at_step_0_meanwhile_is_not_begun_with_what_was_loaded(
    tmp_path: Path, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    url = f"file://{tmp_path}/mirror"
    saved(tmp_path / "a", url, (1, 2))
    meanwhile(lambda: run("rewind", "--root", tmp_path / "b", "--mirror", url, "--scratch"))
    with (
        CheckpointManager(tmp_path / "a", [url], kinds=("dcp",)) as manager,
        pytest.raises(Temporary, match=r"Step 2 was loaded; meanwhile .* at step 0"),
    ):
        manager.resume(built())
    fresh = built()
    with CheckpointManager(tmp_path / "a", [url], kinds=("dcp",)) as manager:
        assert manager.resume(fresh) is None
    assert torch.equal(fresh.model.weight, built().model.weight)


def test_an_older_save_does_not_take_the_place_of_a_newer_one_of_which_it_lacks_parts(
    tmp_path: Path, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    url = f"file://{tmp_path}/mirror"
    saved(tmp_path / "a", url, (1, 2), but_first="kept")
    meanwhile(lambda: run("rewind", "--root", tmp_path / "b", "--mirror", url, "--step", "1"))
    with (
        CheckpointManager(tmp_path / "a", [url], kinds=("dcp",)) as manager,
        pytest.raises(Temporary, match=r"Step 2 was loaded; meanwhile .* from step 1, .*: extra\.more"),
    ):
        manager.resume(built())
    fresh = built()
    with CheckpointManager(tmp_path / "a", [url], kinds=("dcp",)) as manager:
        start = manager.resume(fresh)
    assert start is not None
    assert (start.step, fresh.extra) == (1, {"step": 1})


def test_a_save_that_has_all_parts_takes_the_place_of_what_was_loaded(
    tmp_path: Path, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    url = f"file://{tmp_path}/mirror"
    saved(tmp_path / "a", url, (1, 2))
    meanwhile(lambda: saved(tmp_path / "b", url, (3,)))
    state = built()
    with CheckpointManager(tmp_path / "a", [url], kinds=("dcp",)) as manager:
        start = manager.resume(state)
    assert start is not None
    assert (start.step, state.extra["step"], float(state.model.bias[0].detach())) == (3, 3, 3.0)
