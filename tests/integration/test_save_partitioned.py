"""Ranks that share one model, each with the optimizer state of its own parameters: saved for each, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import BackgroundSaveFailed
from tests.kit.processes import outcome, run_ranks

pytestmark = pytest.mark.long


def stepped(rank: int, *, own_only: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step, in which a rank kept the momentum of its own parameter only."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if own_only:
        del optimizer.state[list(model.parameters())[rank]]
    return model, optimizer


def save_and_resume(rank: int, root: str, kind: str, in_extra: bool) -> tuple[str, str, int]:
    def job() -> list[int]:
        found = []
        for own_only in (True, False):
            model, optimizer = stepped(rank, own_only=own_only)
            more = {"extra": {"optimizer": optimizer}} if in_extra else {"optimizer": optimizer}
            state = TrainState(model=model, **more)  # type: ignore[arg-type]
            manager = CheckpointManager(root, kinds=(kind,), timeout_s=30.0)  # type: ignore[arg-type]
            try:
                if manager.resume(state) is None:
                    manager.save(1, state).wait()
                found.append(len(optimizer.state))
            finally:
                manager.close()
        return found

    return outcome(job)


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_state_that_one_rank_alone_would_not_save_whole_is_refused_on_all(tmp_path: Path, kind: str) -> None:
    for name, message, code in run_ranks(2, save_and_resume, str(tmp_path), kind, False):
        assert (name, code) == (BackgroundSaveFailed.__name__, BackgroundSaveFailed.exit_code), message
        assert "state for different parameters" in message
    assert not list(tmp_path.glob("meta_*"))


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_in_extra_each_rank_gets_its_own_back(tmp_path: Path, kind: str) -> None:
    for name, found, _ in run_ranks(2, save_and_resume, str(tmp_path), kind, True):
        assert (name, found) == ("value", "[1, 1]"), found
