"""Which damage of a save a load can do without: that of lists of tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.tensor_lists import loadable, lost_lists
from tests.kit.saves import make_save


@pytest.fixture
def meta(tmp_path: Path) -> Meta:
    return make_save(tmp_path, 200, ranks=2)


@pytest.mark.parametrize(
    ("damaged", "kinds", "lists"),
    [
        ((), ("dcp", "model"), 0),
        (("tensors_",), ("dcp", "model"), 2),
        (("tensors_", ".metadata"), ("model",), 2),
        (("optim_",), ("dcp",), 0),
        (("extra_", "tensors_"), (), 2),
    ],
)
def test_lists_cost_no_kind(meta: Meta, damaged: tuple[str, ...], kinds: tuple[Kind, ...], lists: int) -> None:
    found = [one for one in meta.artifacts if any(name in one.path for name in damaged)]
    whole, lost = loadable(meta, found)
    assert (whole, len(lost)) == (kinds, lists)
    left = meta.narrowed(whole, lost)
    assert left.kinds == kinds
    assert left.partial == bool(damaged)
    assert not {one.path for one in left.artifacts} & {one.path for one in found}


def test_the_ranks_that_lost_theirs_are_known_from_what_lies_beside(meta: Meta) -> None:
    assert lost_lists(meta) == ()
    assert lost_lists(meta.narrowed(meta.kinds, [one.path for one in meta.artifacts if "_rank1.json" in one.path])) == (
        1,
    )


def test_a_copy_that_was_staged_without_what_lies_beside_has_lost_none(meta: Meta) -> None:
    assert (
        lost_lists(replace(meta, artifacts=tuple(one for one in meta.artifacts if one.path.startswith("dcp_")))) == ()
    )


def test_of_an_emergency_snapshot_each_file_counts(tmp_path: Path) -> None:
    snapshot = make_save(tmp_path, 200, ("emergency",))
    listed = replace(snapshot.artifacts[0], path="emergency_000200/tensors_rank0.json")
    assert loadable(replace(snapshot, artifacts=(*snapshot.artifacts, listed)), [listed]) == ((), ())
