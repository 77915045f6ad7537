"""Which ranks' files of an emergency snapshot a rank reads: its own, and those that may have what it holds now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import Artifact
from ckptmirror.core.names import NO_TIME, emergency_dir_name, emergency_files
from ckptmirror.formats.artifacts import write_pt
from ckptmirror.formats.base import LoadTarget
from ckptmirror.formats.emergency import snapshot_files_read
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.weights_only_values import MARK
from tests.kit.saves import digest_of, make_save, save_id_of

RANKS = 3
EVERYONE = {0, 1, 2}
NAME = emergency_dir_name(7, NO_TIME)
BIAS = torch.zeros(1)


def cut(offsets: tuple[int, int], sizes: tuple[int, int]) -> dict[str, Any]:
    """A piece of the weight, as a rank writes it."""
    return {MARK: "shard", "shape": [1, 4], "offsets": list(offsets), "data": torch.ones(sizes)}


WHOLE, LEFT = cut((0, 0), (1, 4)), cut((0, 0), (1, 2))


def read_by(rank: int, root: Path, own: dict[str, Any], *, ranks: int = RANKS) -> set[int]:
    """The ranks whose files a rank reads, if its own file holds this."""
    (root / NAME).mkdir()
    tree = {"step": 7, "world_size": RANKS, "optimizer": None, "extra": {}, **own}
    write_pt(tree, root / NAME / emergency_files(rank)[0], save_id=save_id_of(1), publish=True)
    parts = tuple(
        Artifact(path=f"{NAME}/{file}", kinds=("emergency",), rank=one, digest=digest_of(b""))
        for one in range(RANKS)
        for file in emergency_files(one)
    )
    meta = replace(make_save(root / "save", 7, ("emergency",), ranks=RANKS), artifacts=parts)
    read = snapshot_files_read(root, meta, LoadTarget(TrainState(model=torch.nn.Linear(4, 1)), rank, ranks))
    return {one for one in range(RANKS) if f"{NAME}/{emergency_files(one)[0]}" in read}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_all_ranks_have_alike_is_in_the_first_file(rank: int, tmp_path: Path) -> None:
    assert read_by(rank, tmp_path, {"sharded": False, "model": {}}) == {0, rank}


def test_a_rank_that_holds_what_it_saved_reads_its_own_file(tmp_path: Path) -> None:
    own = {"sharded": True, "model": {"weight": WHOLE, "bias": BIAS}}
    own["optimizer"] = {"state": {"weight": {"exp_avg": WHOLE, "step": torch.tensor(1.0)}}, "param_groups": []}
    assert read_by(1, tmp_path, own) == {1}


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({"model": {"weight": LEFT, "bias": BIAS}}, id="a piece of the model"),
        pytest.param({"model": {"weight": WHOLE}}, id="not all names of the model"),
        pytest.param({"model": {"weight": WHOLE, "bias": None}}, id="a name without a tensor"),
        pytest.param({"optimizer": {"state": {"weight": {"exp_avg": LEFT}}}}, id="a piece of the optimizer"),
        pytest.param({"optimizer": {"state": {"other": {"exp_avg": WHOLE}}}}, id="the optimizer of another name"),
        pytest.param({"extra": {"extra": LEFT}}, id="a piece of the extra state"),
    ],
)
def test_what_may_be_in_other_files_is_read_from_all(own: dict[str, Any], tmp_path: Path) -> None:
    rest = {"sharded": True, "model": {"weight": WHOLE, "bias": BIAS}}
    assert read_by(1, tmp_path, rest | own) == EVERYONE


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_another_number_of_ranks_reads_all(sharded: bool, ranks: int, tmp_path: Path) -> None:
    own = {"sharded": sharded, "model": {"weight": WHOLE, "bias": BIAS}}
    assert read_by(1, tmp_path, own, ranks=ranks) == EVERYONE


def test_a_file_that_is_no_snapshot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is not an emergency snapshot"):
        read_by(1, tmp_path, {"sharded": True, "model": []})
