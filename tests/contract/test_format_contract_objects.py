"""What every kind of save promises about the training's own objects in containers: schedulers, loaders, averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import LoadReport, TrainState
from ckptmirror.formats.state_tree import _warn
from tests.kit.formats import KINDS, load, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Cursor:
    """A data loader that knows its position."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream:
    """A data loader that does not."""


def through(kind: Kind, root: Path, part: str, saved: Any, into: Any) -> LoadReport:
    """Save one part of the state and load it into another."""
    meta = save(kind, root, TrainState(model=nn.Linear(2, 2), **{part: saved}))
    return load(kind, root, meta, TrainState(model=nn.Linear(2, 2), **{part: into}))


def test_data_loaders_in_containers_keep_their_positions(kind: Kind, tmp_path: Path) -> None:
    plain = Stream()
    saved = {"train": [Cursor(3), Stream(), (Cursor(4),)], "val": Stream(), "more": {"a": Cursor(5)}}
    into = {"train": [Cursor(), plain, (Cursor(),)], "val": plain, "more": {"a": Cursor()}}
    report = through(kind, tmp_path, "dataloader", saved, into)
    assert "dataloader" in report.loaded
    assert report.missing == ()
    assert (into["train"][0].at, into["train"][2][0].at, into["more"]["a"].at) == (3, 4, 5)
    assert into["val"] is into["train"][1] is plain


def test_a_data_loader_that_is_left_alone_is_named_once(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn.cache_clear()
    report = through(kind, tmp_path, "dataloader", [Cursor(3), Stream()], [Cursor(), Stream()])
    assert (report.missing, caplog.text.count("dataloader: Stream has no state_dict()")) == ((), 1)


def test_positions_that_no_data_loader_takes_are_reported(kind: Kind, tmp_path: Path) -> None:
    report = through(kind, tmp_path, "dataloader", [Cursor(3)], Stream())
    assert "dataloader" not in report.loaded
    assert report.missing == (
        "dataloader: the save has state for it, and your TrainState has nothing that takes it; it was not loaded",
    )


def test_a_data_loader_that_had_no_position_is_reported(kind: Kind, tmp_path: Path) -> None:
    into = [Cursor(), Cursor(9)]
    report = through(kind, tmp_path, "dataloader", [Cursor(3), Stream()], into)
    assert [cursor.at for cursor in into] == [3, 9]
    assert [line.partition(":")[0] for line in report.missing] == ["dataloader[1]"]


@pytest.mark.parametrize("part", ["scheduler", "scaler", "ema", "dataloader"])
def test_objects_that_are_gone_are_reported_and_put_nowhere(kind: Kind, part: str, tmp_path: Path) -> None:
    into: dict[str, Any] = {"a": Cursor(), "new": Cursor(9)}
    report = through(kind, tmp_path, part, {"a": Cursor(1), "gone": Cursor(2)}, into)
    assert {key: cursor.at for key, cursor in into.items()} == {"a": 1, "new": 9}
    assert sorted(line.partition(":")[0] for line in report.missing) == [f"{part}.gone", f"{part}.new"]
    (tmp_path / "next").mkdir()
    save(kind, tmp_path / "next", TrainState(model=nn.Linear(2, 2), **{part: into}))


@pytest.mark.parametrize("into", [[], [Cursor()]])
def test_another_number_of_objects_in_a_list_is_refused(kind: Kind, into: list[Cursor], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the same number of schedulers: 2 and"):
        through(kind, tmp_path, "scheduler", [Cursor(1), Cursor(2)], into)


def test_shadow_models_by_name_keep_their_tensors(kind: Kind, tmp_path: Path) -> None:
    saved, into = {"slow": nn.Linear(2, 2)}, {"slow": nn.Linear(2, 2)}
    kept = into["slow"].weight
    assert through(kind, tmp_path, "ema", saved, into).missing == ()
    assert into["slow"].weight is kept
    assert torch.equal(kept, saved["slow"].weight)
