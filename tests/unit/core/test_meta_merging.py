"""Merging: the same bytes whoever merges, and nothing that contradicts itself."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from core_builders import a_meta, digest_of, id_of

from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.meta_merging import is_on_all_nodes, merge_emergency, merge_parts
from ckptmirror.core.model import ALL_NODES, Artifact, Attempt, Meta
from ckptmirror.core.names import SaveName

TAG = id_of("save")[:8]


def part(node: int, tag: str = "", **changes: Any) -> Meta:
    name = SaveName(200, tag)
    artifacts = (
        Artifact(f"{name.dcp_dir}/.metadata", ("dcp",), 0, digest_of(100)),
        Artifact(f"{name.dcp_dir}/__{node}_0.distcp", ("dcp",), node, digest_of(50 + node)),
        Artifact(name.extra(node), ("dcp",), node, digest_of(7)),
    )
    values: dict[str, Any] = {
        "kinds": ("dcp",),
        "world_size": 3,
        "nodes": 3,
        "node": node,
        "tag": tag,
        "artifacts": artifacts,
        "created_at_utc": f"2026-11-21T13:15:0{node}",
        "training_config": {"host": node},
    }
    return a_meta(**(values | changes))


def test_parts_merge_to_the_same_bytes_in_any_order() -> None:
    parts = [part(0), part(1), part(2)]
    merged = {meta_to_bytes(merge_parts(order)) for order in itertools.permutations(parts)}
    assert len(merged) == 1
    meta = meta_from_bytes(merged.pop())
    assert (meta.node, meta.nodes, meta.tag) == (ALL_NODES, 3, "")
    assert meta.is_whole
    assert not parts[0].is_whole
    assert meta.training_config == {"host": 0}
    assert [a.path for a in meta.artifacts].count("dcp_000200/.metadata") == 1
    assert len(meta.artifacts) == 7


def test_nodes_with_different_tags_merge_to_plain_paths_with_the_objects_where_they_lie() -> None:
    merged = merge_parts([part(0), part(1, TAG), part(2)])
    by_path = {artifact.path: artifact for artifact in merged.artifacts}
    assert by_path["dcp_000200/__0_0.distcp"].object is None
    assert by_path["dcp_000200/__1_0.distcp"].object == f"dcp_000200-{TAG}/__1_0.distcp"
    assert by_path["dcp_000200/.metadata"].object is None
    assert meta_from_bytes(meta_to_bytes(merged)) == merged


def test_every_node_has_the_metadata_file_and_nothing_else_of_the_others() -> None:
    for meta in (part(1), merge_parts([part(0), part(1), part(2)])):  # a whole copy may stand in for a part
        assert [one.path for one in meta.artifacts if is_on_all_nodes(meta, one.path)] == ["dcp_000200/.metadata"]
    alone = replace(merge_parts([part(0), part(1), part(2)]), nodes=1, node=0)
    assert not any(is_on_all_nodes(alone, one.path) for one in alone.artifacts)


def test_an_object_that_a_part_names_is_kept() -> None:
    other = part(1)
    moved = replace(other.artifacts[1], object=f"dcp_000200-{TAG}/__1_0.distcp")
    merged = merge_parts([part(0), replace(other, artifacts=(moved,)), part(2)])
    assert moved in merged.artifacts


def test_one_node_needs_no_merging() -> None:
    meta = a_meta()
    assert merge_parts([meta]) is meta
    assert meta.is_whole


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "nothing to merge"),
        ([part(0), part(1)], "the nodes 0, 1; the save has 3"),
        ([part(0), part(1), part(1)], "the nodes 0, 1, 1"),
        ([part(0), part(1), part(2, save_id=id_of("other"))], "save_id differs between the parts of nodes 0 and 2"),
        ([part(0), part(1), part(2, run_id=id_of("other"))], "run_id differs"),
        ([part(0), part(1), part(2, attempt=Attempt(id_of("B"), 1, None))], "attempt differs"),
        ([part(0), part(1), part(2, save_number=2)], "save_number differs"),
        ([part(0), part(1), part(2, world_size=4)], "world_size differs"),
        (
            [part(0), part(1), part(2, artifacts=(Artifact("dcp_000200/.metadata", ("dcp",), 0, digest_of(101)),))],
            "with different bytes",
        ),
    ],
)
def test_parts_that_are_not_of_one_save_are_refused(parts: list[Meta], reason: str) -> None:
    for order in itertools.permutations(parts):
        with pytest.raises(BrokenMeta):
            merge_parts(order)
    with pytest.raises(BrokenMeta, match=reason):
        merge_parts(parts)


def test_parts_of_ten_million_nodes_are_refused_without_counting_them() -> None:
    parts = [part(node, nodes=10**7, world_size=10**7) for node in (0, 1)]
    tracemalloc.start()
    with pytest.raises(BrokenMeta, match="the save has 10000000 nodes"):
        merge_parts(parts)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def emergency(rank: int, **changes: Any) -> Meta:
    path = f"emergency_step_000200_20261121T131500Z/rank{rank}.pt"
    values: dict[str, Any] = {
        "kinds": ("emergency",),
        "world_size": 4,
        "artifacts": (Artifact(path, ("emergency",), rank, digest_of(10 + rank)),),
    }
    return a_meta(**(values | changes))


def test_emergency_metas_merge_in_any_order() -> None:
    merged = merge_emergency([emergency(3), emergency(0), emergency(1)])
    assert merged == merge_emergency([emergency(1), emergency(3), emergency(0)])
    assert [artifact.rank for artifact in merged.artifacts] == [0, 1, 3]
    assert meta_from_bytes(meta_to_bytes(merged)) == merged


def test_emergency_metas_of_another_save_or_kind_are_refused() -> None:
    with pytest.raises(BrokenMeta, match="save_id differs"):
        merge_emergency([emergency(0), emergency(1, save_id=id_of("other"))])
    with pytest.raises(BrokenMeta, match="not emergency"):
        merge_emergency([a_meta()])
    with pytest.raises(BrokenMeta, match="different bytes"):
        merge_emergency(
            [emergency(0), emergency(0, artifacts=(replace(emergency(0).artifacts[0], digest=digest_of(1)),))]
        )


def test_the_meta_of_a_copy_is_no_rank_of_a_snapshot() -> None:
    """It may lack the rank's files; the rank would then load those of another."""
    copy = emergency(1, staged_from="file:///elsewhere", partial=True, artifacts=())
    with pytest.raises(BrokenMeta, match="copy"):
        merge_emergency([emergency(0), copy])


def test_parts_of_which_only_some_were_signed_agree_and_what_was_signed_stands() -> None:
    """Whoever merges gets the same bytes; two that were signed have to have the same hashes."""
    plain, signed = part(0), part(1)
    hashed = replace(signed.artifacts[0].digest, hashes=(b"h" * 32,))
    signed = replace(signed, artifacts=(replace(signed.artifacts[0], digest=hashed), *signed.artifacts[1:]))
    for parts in itertools.permutations((plain, signed, part(2))):
        merged = merge_parts(parts)
        assert next(one for one in merged.artifacts if one.path.endswith(".metadata")).digest == hashed
    other = replace(hashed, hashes=(b"o" * 32,))
    wrong = replace(plain, artifacts=(replace(plain.artifacts[0], digest=other), *plain.artifacts[1:]))
    with pytest.raises(BrokenMeta, match="with different bytes"):
        merge_parts([wrong, signed, part(2)])
