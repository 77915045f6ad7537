"""Which metas tell all of a save, wherever they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import ALL_NODES, Artifact, Kind, Meta
from ckptmirror.core.names import SaveName, emergency_dir_name
from ckptmirror.core.start.together import has_all, joined, shares_of, told_by
from tests.unit.core.core_builders import a_meta, digest_of

NAME = SaveName(200)
EMERGENCY = emergency_dir_name(200, "20261121T131500Z")


def part(node: int, **changes: Any) -> Meta:
    files = (Artifact(f"{NAME.dcp_dir}/__{node}_0.distcp", ("dcp",), node, digest_of(50 + node)),)
    return a_meta(**{"kinds": ("dcp",), "world_size": 3, "nodes": 3, "node": node, "artifacts": files} | changes)


def snapshot(*ranks: int) -> Meta:
    files = tuple(Artifact(f"{EMERGENCY}/model_{rank}.pt", ("emergency",), rank, digest_of(9)) for rank in ranks)
    return a_meta(kinds=("emergency",), world_size=2, artifacts=files)


def staged(*kinds: Kind, extras: tuple[int, ...] = (0, 1)) -> Meta:
    """A copy of a whole save of two ranks, which ``stage`` brought."""
    files = [Artifact(NAME.extra(rank), ("model",), rank, digest_of(7)) for rank in extras]
    files += [Artifact(name, ("model",), 0, digest_of(5)) for name in (NAME.model, NAME.optim(0))]
    return a_meta(kinds=kinds, artifacts=tuple(files), partial=True, staged_from="gs://b/run")


PARTS = [part(0), part(1), part(2)]


def test_a_part_is_one_nodes_share_and_of_a_snapshot_the_shares_of_its_ranks() -> None:
    assert shares_of(part(1)) == ((1,), 3)
    assert shares_of(snapshot(1, 0)) == ((0, 1), 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_parts_make_the_save_and_fewer_do_not(order: tuple[int, ...]) -> None:
    whole = joined([PARTS[node] for node in order])
    assert whole is not None
    assert (whole.node, whole.is_whole, len(whole.artifacts)) == (ALL_NODES, True, 3)
    assert joined([PARTS[node] for node in order[:2]]) is None
    assert joined([PARTS[node] for node in (*order[:2], order[0])]) is None


def test_snapshots_are_joined_by_their_ranks() -> None:
    whole = joined([snapshot(1), snapshot(0)])
    assert whole is not None
    assert whole.is_whole
    assert joined([snapshot(1)]) is None


def test_parts_that_contradict_one_another_tell_nothing() -> None:
    parts = [part(0), part(1), part(2, save_number=9)]
    with pytest.raises(BrokenMeta, match="save_number differs"):
        joined(parts)
    assert told_by(parts, None, []) is None


def test_a_meta_of_the_whole_tells_all_beside_parts_and_copies_that_lack_files() -> None:
    whole = joined(PARTS)
    assert whole is not None
    narrowed = whole.narrowed(["dcp"], [whole.artifacts[0].path])
    for metas in itertools.permutations([part(0), narrowed, whole]):
        assert told_by(metas, None, []) == whole
    assert told_by([part(0), part(1), narrowed, part(2)], None, []) == whole
    assert told_by([part(0), part(1)], whole, []) == whole
    assert told_by([part(0), part(1)], None, []) is None


def test_a_copy_staged_for_evaluation_does_not_tell_what_the_save_has() -> None:
    for_evaluation = staged("model", extras=())
    found = told_by([for_evaluation], None, [])
    assert found is not None
    assert found.kinds == ()
    assert told_by([for_evaluation, staged("model")], None, []) == staged("model")


def test_a_staged_copy_is_compared_with_what_a_mirror_has_of_that_kind() -> None:
    whole = replace(staged("model"), partial=False, staged_from=None)
    one_more = replace(whole, artifacts=(*whole.artifacts, Artifact(NAME.optim(1), ("model",), 1, digest_of(5))))
    assert has_all(staged("model"), "model", [])
    assert has_all(staged("model"), "model", [whole])
    assert not has_all(staged("model"), "model", [whole, one_more])
    assert not has_all(staged("model", extras=(0,)), "model", [])
    assert has_all(part(0), "dcp", [whole])
    other_kind = replace(one_more, kinds=("dcp",))
    assert has_all(staged("model"), "model", [other_kind])
