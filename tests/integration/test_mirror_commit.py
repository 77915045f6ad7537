"""The commit on a mirror when several nodes save together: no leader, no collective, the last to arrive commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import ALL_NODES, Meta, new_id
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention import durability
from ckptmirror.flow.retention.durability import why_not_safe
from ckptmirror.flow.retention.reconcile import add_missing_records
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.local.uploads import UploadRecord
from ckptmirror.stores.base import ObjectInfo, Store
from ckptmirror.stores.decorator import StoreDecorator
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
    """One save with two ranks on each node; ``.metadata`` lies on all."""
    save_id = new_id()
    metas = []
    for number, place in enumerate(places):
        whole = make_save(place.root, step, ("dcp",), number=step, ranks=2 * len(places), save_id=save_id)
        mine = tuple(a for a in whole.artifacts if a.rank is None or a.rank // 2 == number)
        for artifact in set(whole.artifacts) - set(mine):
            (place.root / artifact.path).unlink()
        meta = replace(whole, nodes=len(places), node=number, artifacts=mine)
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


def send_artifacts(place: MirroredRoot) -> None:
    """Send everything but the metas."""
    while any(record.role == "artifact" and record.state is not RecordState.VERIFIED for record in place.records()):
        place.upload(limit=1)


class Requests(StoreDecorator):
    """Counts the requests of one node; a listing counts for each object in it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.made: Counter[str] = Counter()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix):
            self.made["listed"] += 1
            yield info

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        self.made["read of a part" if name.startswith(names.PARTS_DIR) else "read"] += 1
        return self._store.read(name, generation=generation, limit_bytes=limit_bytes)

    def _call(self, operation: str, name: str, run: Callable[[], Any], size_bytes: int = 0) -> Any:  # noqa: ARG002
        self.made[operation] += 1
        return run()


def requests_of_a_commit(place: Path, count: int) -> list[Counter[str]]:
    """The requests that each node makes for the meta of one save, of which the first node looks five times."""
    url = memory_url()
    places = [MirroredRoot(place / f"node-{number}", [url]) for number in range(count)]
    save_together(places, 100)
    counting = []
    for one in places:
        send_artifacts(one)
        counting.append(Requests(one.store))
    contexts = [one.context(Mirror(url, True, spy)) for one, spy in zip(places, counting, strict=True)]
    for number in [*range(count - 1), *[0] * 4, *range(count - 1, -1, -1)]:
        one = places[number]
        one.clock.pass_s(120)
        claim = one.table.claim("worker", url, lease_s=300)
        assert claim is not None
        upload_claimed(contexts[number], claim)
    assert {state for one in places for state in one.states()} == {"verified"}
    for one in places:
        one.close()
    return [spy.made for spy in counting]


def test_what_a_node_asks_for_does_not_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    few, many = (requests_of_a_commit(tmp_path / str(count), count) for count in (3, 12))
    for of_few, of_many in ((few[0], many[0]), (few[1], many[1])):
        assert {one: n for one, n in of_many.items() if one != "listed"} == {
            one: n for one, n in of_few.items() if one != "listed"
        }
        assert of_many["listed"] <= 12  # once, and not at each look
        assert of_many["read of a part"] == 0
    assert few[-1]["read of a part"] == 3
    assert many[-1]["read of a part"] == 12  # the last reads all, and writes the meta
    assert many[0]["write"] == 1
    assert many[-1]["write"] == 2


def test_who_finds_all_parts_while_waiting_lets_the_last_node_write_the_meta_but_not_for_ever(
    nodes: list[MirroredRoot],
) -> None:
    save_together(nodes, 100)
    first, last = nodes
    nodes[1].store.script(StoreFault("write", r"^meta_", when="before", times=0))
    contexts = [place.context() for place in nodes]

    def look(number: int) -> UploadRecord:
        place = nodes[number]
        place.clock.pass_s(120)
        claim = place.table.claim("worker", place.mirrors[0].url, lease_s=300)
        assert claim is not None
        upload_claimed(contexts[number], claim)
        (record,) = [record for record in place.records() if record.role == "meta"]
        return record

    for place in nodes:
        send_artifacts(place)
    assert "is not on" in str(look(0).last_error)
    assert "does not answer" in str(look(1).last_error)  # it published its part, and then
    assert "the node that came last is about to write its meta" in str(look(0).last_error)
    assert look(0).state is RecordState.VERIFIED
    assert first.states() == {"verified"}
    assert look(1).state is RecordState.VERIFIED
    assert last.states() == {"verified"}


def test_what_every_node_has_is_sent_by_the_first_at_once_and_by_the_others_last(nodes: list[MirroredRoot]) -> None:
    metas = save_together(nodes, 100)
    for place, meta in zip(nodes, metas, strict=True):
        place.lose_table()
        add_missing_records(place.table, place.mirrors, [meta])
    orders = [[record.path for record in place.records() if record.role == "artifact"] for place in nodes]
    shared = "dcp_000100/.metadata"
    assert [order.index(shared) for order in orders] == [0, *(len(order) - 1 for order in orders[1:])]


def test_a_rotation_reads_a_large_meta_only_if_it_is_not_the_one_that_was_verified(
    nodes: list[MirroredRoot], monkeypatch: pytest.MonkeyPatch
) -> None:
    (meta, *_) = save_together(nodes, 100)
    for one in nodes * 2:
        one.upload()
    place, spy = nodes[1], Requests(nodes[1].store)
    mirrors = [Mirror(spy.url, True, spy)]
    assert why_not_safe(place.table, mirrors, meta.save_id) is None
    assert spy.made.pop("read") == 1
    monkeypatch.setattr(durability, "_READ_AGAIN_BYTES", 100)
    assert why_not_safe(place.table, mirrors, meta.save_id) is None
    assert spy.made["read"] == 0
    name = names.SaveName(100).meta
    data, info = place.store.read(name, limit_bytes=1 << 20)
    place.store.write(name, data, if_generation=info.generation, metadata=info.metadata)
    assert "generation changed" in str(why_not_safe(place.table, mirrors, meta.save_id))
    assert spy.made["read"] == 1
