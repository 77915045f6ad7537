"""What is left of a save that lost files, and which parts a person has to give up for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core.lost_parts import EXTRA_PARTS, how_to_go_on, parts_lost, without_parts
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.formats.train_state import PARTS
from tests.kit.saves import make_save


@pytest.fixture
def meta(tmp_path: Path) -> Meta:
    return make_save(tmp_path, 200, ("model",), ranks=2)


def named(meta: Meta, *names: str) -> list[Artifact]:
    return [one for one in meta.artifacts if any(name in one.path for name in names)]


def test_each_part_of_a_state_lies_in_one_of_the_files() -> None:
    assert {"model", "optimizer", *EXTRA_PARTS} == set(PARTS)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("optim_000200_rank1",), ("optimizer",)),
        (("extra_000200_rank0", "tensors_"), EXTRA_PARTS),
        (("optim_", "extra_"), ("optimizer", *EXTRA_PARTS)),
        (("model_",), ()),
        (("tensors_",), ()),
    ],
)
def test_the_fewest_parts_are_given_up(meta: Meta, names: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert parts_lost(meta, named(meta, *names)) == parts


def test_of_a_part_that_one_rank_lost_no_file_is_left(meta: Meta) -> None:
    left = without_parts(meta, named(meta, "optim_000200_rank1"), ["optimizer"])
    assert (left.kinds, left.partial) == (("model",), True)
    assert not named(left, "optim_")
    assert len(named(left, "extra_")) == 2


@pytest.mark.parametrize("exclude", [(), ("rng",), EXTRA_PARTS[1:]])
def test_nothing_is_given_up_that_is_not_named_in_full(meta: Meta, exclude: tuple[str, ...]) -> None:
    assert without_parts(meta, named(meta, "extra_"), exclude).kinds == ()


def test_an_emergency_snapshot_and_what_is_not_the_whole_save_have_no_way_on(meta: Meta, tmp_path: Path) -> None:
    snapshot = make_save(tmp_path / "other", 200, ("emergency",))
    assert parts_lost(snapshot, snapshot.artifacts) == ()
    assert without_parts(snapshot, (), PARTS).kinds == ()
    assert how_to_go_on(meta, ("optimizer",)).startswith(f"; resume with policy={meta.save_id[:8]!r}, ")
    assert how_to_go_on(meta, ()) == ""
    assert how_to_go_on(replace(meta, nodes=2), ("optimizer",)) == ""
    assert how_to_go_on(replace(meta, staged_from="gs://there/run"), ("optimizer",)) == ""
