"""The commit on a mirror when several nodes save together: no leader, no collective, the last to arrive commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import ALL_NODES, Meta, new_id
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot
from tests.kit.saves import bytes_of, make_save

NODES = 2


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[MirroredRoot]]:
    """Two nodes, each with a disk and a table of its own, and one mirror."""
    url = memory_url()
    places = [MirroredRoot(tmp_path / f"node-{number}", [url]) for number in range(NODES)]
    yield places
    for place in places:
        place.close()


def save_together(places: list[MirroredRoot], step: int) -> list[Meta]:
    """One save of four ranks, two on each node; ``.metadata`` lies on both."""
    save_id = new_id()
    metas = []
    for number, place in enumerate(places):
        whole = make_save(place.root, step, ("dcp",), number=step, ranks=4, save_id=save_id)
        mine = tuple(a for a in whole.artifacts if a.rank is None or a.rank // 2 == number)
        for artifact in set(whole.artifacts) - set(mine):
            (place.root / artifact.path).unlink()
        meta = replace(whole, nodes=NODES, node=number, artifacts=mine)
        (place.root / names.SaveName(step, meta.tag).meta).write_bytes(meta_to_bytes(meta))
        place.add(meta)
        place.table.release_save(save_id)
        metas.append(meta)
    return metas


def assert_whole(places: list[MirroredRoot], metas: list[Meta], dest: Path) -> None:
    there = mirror_catalog(places[0].mirrors[0]).saves[metas[0].save_id]
    assert there.node == ALL_NODES
    dest.mkdir()
    staged = stage_save(places[0].mirrors[0], there, dest, kinds=("dcp",), full=True)
    wanted = {
        path: data
        for place, meta in zip(places, metas, strict=True)
        for path, data in bytes_of(place.root, meta).items()
    }
    assert bytes_of(dest, staged) == wanted


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_node_to_arrive_commits(nodes: list[MirroredRoot], first: int, tmp_path: Path) -> None:
    metas = save_together(nodes, 100)
    nodes[first].upload(limit=20)
    assert mirror_catalog(nodes[0].mirrors[0]).saves == {}
    assert "meta_000100.json" not in object_names(nodes[0].store)
    (waiting,) = [r for r in nodes[first].records() if r.state is RecordState.PENDING]
    assert "is not on" in str(waiting.last_error)
    nodes[1 - first].upload()
    assert_whole(nodes, metas, tmp_path / "staged")
    nodes[first].upload()
    for place in nodes:
        assert place.states() == {"verified"}


def test_i1_no_node_deletes_before_every_node_has_arrived(nodes: list[MirroredRoot]) -> None:
    metas = save_together(nodes, 100)
    save_together(nodes, 200)
    nodes[0].upload(limit=40)
    assert nodes[0].rotate().deleted == ()
    nodes[1].upload()
    nodes[0].upload()
    for place, meta in zip(nodes, metas, strict=True):
        assert place.rotate().deleted == ((100, meta.save_id),)


def test_two_writers_of_the_merged_meta_write_the_same(nodes: list[MirroredRoot], tmp_path: Path) -> None:
    metas = save_together(nodes, 100)
    nodes[0].upload(limit=20)
    nodes[1].store.script(StoreFault("write", r"^meta_", when="after"))
    nodes[1].upload()
    nodes[0].upload()
    assert [name for name in object_names(nodes[0].store) if name.startswith("meta_")] == ["meta_000100.json"]
    assert_whole(nodes, metas, tmp_path / "staged")


def test_nodes_that_tagged_their_names_differently_commit_one_meta(nodes: list[MirroredRoot], tmp_path: Path) -> None:
    (nodes[1].root / "dcp_000100").mkdir()
    (nodes[1].root / "dcp_000100" / "notes").write_text("a person's")
    metas = save_together(nodes, 100)
    assert [bool(meta.tag) for meta in metas] == [False, True]
    for place in (*nodes, *nodes):
        place.upload(limit=30)
    written = [name for name in object_names(nodes[0].store) if name.startswith("meta_")]
    assert written == ["meta_000100.json"]
    assert meta_from_bytes(nodes[0].store.read(written[0], limit_bytes=1 << 20)[0]).tag == ""
    assert_whole(nodes, metas, tmp_path / "staged")


def test_a_part_that_was_published_before_a_crash_is_found_again(nodes: list[MirroredRoot], tmp_path: Path) -> None:
    metas = save_together(nodes, 100)
    nodes[0].upload(limit=20)
    nodes[0].lose_table()
    nodes[0].add(metas[0])
    nodes[0].table.release_save(metas[0].save_id)
    nodes[1].upload()
    nodes[0].upload()
    assert nodes[0].states() == nodes[1].states() == {"verified"}
    assert_whole(nodes, metas, tmp_path / "staged")
