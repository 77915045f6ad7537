"""Which files of extra state a rank reads: its own, unless what is in it says that others may be needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.names import SaveName
from ckptmirror.formats.artifacts import write_pt
from ckptmirror.formats.base import LoadTarget
from ckptmirror.formats.sidecars import extra_files_read
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.weights_only_values import MARK
from tests.kit.saves import make_save, save_id_of

RANKS = 3
SHARD = {MARK: "shard", "shape": [4], "offsets": [0], "data": torch.ones(2)}
AVERAGE = {"weight": torch.ones(2)}
EVERYONE = {0, 1, 2}


def read_by(rank: int, root: Path, trees: dict[int, Any], *, ema: bool = False, ranks: int = RANKS) -> set[int]:
    """The ranks whose files a rank reads, if these are in the directory."""
    meta = make_save(root / "save", 7, ("dcp",), ranks=RANKS)
    for other, tree in trees.items():
        write_pt({"step": 7, **tree}, root / SaveName(7).extra(other), save_id=save_id_of(1), publish=True)
    model = torch.nn.Linear(2, 1)
    state = TrainState(model=model, ema=torch.nn.Linear(2, 1) if ema else None)
    read = extra_files_read(root, meta, LoadTarget(state, rank, ranks))
    return {one for one in range(RANKS) if SaveName(7).extra(one) in read}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_reads_its_own_file(rank: int, tmp_path: Path) -> None:
    assert read_by(rank, tmp_path, {rank: {"extra": {"a": 1}}}) == {rank}


@pytest.mark.parametrize("own", [{"extra": {"a": SHARD}}, {"aliases": [["extra", "a"]]}])
def test_what_may_be_joined_with_others_is_read_from_all(own: dict[str, Any], tmp_path: Path) -> None:
    assert read_by(1, tmp_path, {1: own}) == EVERYONE


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (1, 4), (3, 4)])
def test_another_number_of_ranks_is_compared_with_all(rank: int, ranks: int, tmp_path: Path) -> None:
    assert read_by(rank, tmp_path, {rank: {}} if rank < RANKS else {}, ranks=ranks) == EVERYONE


def test_an_average_that_all_have_alike_is_read_from_the_first(tmp_path: Path) -> None:
    assert read_by(1, tmp_path, {0: {"ema": AVERAGE}, 1: {}}, ema=True) == {0, 1}


def test_an_average_of_its_own_is_read_from_its_own(tmp_path: Path) -> None:
    assert read_by(1, tmp_path, {1: {"ema": AVERAGE}}, ema=True) == {1}


@pytest.mark.parametrize("first", [{"ema": {"weight": SHARD}}, {"aliases": [["ema"]]}])
def test_an_average_of_the_first_that_may_need_others_is_read_from_all(first: dict[str, Any], tmp_path: Path) -> None:
    assert read_by(1, tmp_path, {0: first, 1: {}}, ema=True) == EVERYONE


def test_an_average_of_the_first_whose_file_is_not_here_is_read_from_all(tmp_path: Path) -> None:
    assert read_by(1, tmp_path, {1: {}}, ema=True) == EVERYONE


def test_a_broken_file_of_its_own_is_an_error(tmp_path: Path) -> None:
    (tmp_path / SaveName(7).extra(1)).write_bytes(b"broken")
    with pytest.raises(IntegrityError):
        read_by(1, tmp_path, {})
