"""Each node of a save has its part on its disk and on the mirror; somebody else may have put another in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names, sealed_json
from ckptmirror.core.codec import meta_to_bytes, tombstone_to_bytes
from ckptmirror.core.meta_merging import merge_parts
from ckptmirror.core.model import Meta, Tombstone
from ckptmirror.core.uncommitted import LEFT_OFF_TEXT, is_behind_text
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.uncommitted import uncommitted_on
from ckptmirror.flow.retention.durability import why_not_safe
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.survey import survey
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.local.root_id import RootId
from tests.kit.roots import MirroredRoot
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror


@pytest.fixture
def place(tmp_path: Path) -> Iterator[MirroredRoot]:
    place = MirroredRoot(tmp_path / "root", [f"file://{tmp_path}/mirror"])
    yield place
    place.close()


def parts_of(place: MirroredRoot) -> tuple[Meta, Meta]:
    """Commit the part of node 0 on this disk, and bring what node 1 has to the mirror; return both parts."""
    meta = make_save(place.root, 100, ("model",), ranks=2, write_meta=False)
    mine, theirs = (
        replace(meta, nodes=2, node=node, artifacts=tuple(a for a in meta.artifacts if a.rank == node))
        for node in (0, 1)
    )
    (place.root / names.SaveName(100).meta).write_bytes(meta_to_bytes(mine))
    put_on_mirror(place.store, place.root, theirs, commit=False)
    place.store.write(names.part_name(100, meta.save_id, 2, 2), meta_to_bytes(theirs), if_generation=0)
    place.add(mine)
    place.table.release_save(meta.save_id)
    return mine, theirs


def test_a_save_of_two_nodes_is_committed_with_the_files_of_both(place: MirroredRoot) -> None:
    mine, theirs = parts_of(place)
    place.upload()
    (found,) = mirror_catalog(place.mirrors[0]).saves.values()
    assert {a.path for a in found.artifacts} == {a.path for part in (mine, theirs) for a in part.artifacts}
    assert place.states() == {"verified"}


def test_a_part_that_leaves_out_files_of_its_node_does_not_make_a_save_safe(place: MirroredRoot) -> None:
    """The merged meta named none of them, and this disk's table had the save as committed."""
    mine, _ = parts_of(place)
    few = tuple(a for a in mine.artifacts if not a.path.startswith(("optim", "extra")))
    name = names.part_name(100, mine.save_id, 1, 2)
    place.store.write(name, meta_to_bytes(replace(mine, artifacts=few)), if_generation=0)
    place.upload()
    assert mirror_catalog(place.mirrors[0]).saves == {}
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert meta.state.value == "failed"
    assert name in (meta.reason or "")


def test_a_part_under_the_name_of_the_meta_does_not_make_a_save_safe(place: MirroredRoot) -> None:
    """The part names every file of its node, and no mirror lists it as a save."""
    mine, _ = parts_of(place)
    place.store.write(names.SaveName(100).meta, meta_to_bytes(mine), if_generation=0)
    place.upload()
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert meta.state.value == "failed"
    assert "names this save with other contents" in (meta.reason or "")


def test_a_part_of_another_save_is_not_merged_and_named(place: MirroredRoot) -> None:
    mine, theirs = parts_of(place)
    name = names.part_name(100, mine.save_id, 2, 2)
    other = replace(theirs, save_number=7)
    place.store.write(name, meta_to_bytes(other), if_generation=_generation(place, name))
    place.upload()
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert meta.state.value == "failed"
    assert f"{name} on {place.mirrors[0].url} is not what a node of this job wrote: save_number" in (meta.reason or "")
    assert mirror_catalog(place.mirrors[0]).saves == {}


def test_a_part_that_somebody_deletes_while_nodes_wait_is_published_again(place: MirroredRoot) -> None:
    mine, theirs = parts_of(place)
    own, other = (names.part_name(100, mine.save_id, number, 2) for number in (1, 2))

    place.store.delete(other, generation=_generation(place, other))
    context = place.context()

    def upload() -> None:
        place.clock.pass_s(60)
        while (claim := place.table.claim("worker", context.mirror.url, lease_s=300)) is not None:
            upload_claimed(context, claim)

    upload()
    place.store.delete(own, generation=_generation(place, own))
    place.store.write(other, meta_to_bytes(theirs), if_generation=0)
    for _ in range(3):
        upload()
    assert place.states() == {"verified"}
    assert mirror_catalog(place.mirrors[0]).saves.keys() == {mine.save_id}


def test_parts_that_contradict_one_another_are_a_problem_and_not_a_save(tmp_path: Path) -> None:
    """The shares of two nodes were there, of three as one of them says; the start ended with a KeyError."""
    disks = []
    for node, nodes in ((0, 2), (1, 3)):
        root = tmp_path / f"node{node}"
        meta = make_save(root, 100, ("model",), ranks=3, save_id="ab" * 16, write_meta=False)
        (root / names.SaveName(100).meta).write_bytes(meta_to_bytes(replace(meta, nodes=nodes, node=node)))
        put_attempts(root, [FIRST_ATTEMPT])
        disks.append(look_at_disk(root, None, RootId(f"{node}" * 32, True)))
    seen = survey(disks, [])
    assert seen.evidence.disk.copies == ()
    assert any("nodes differs between the parts" in one.why for one in seen.evidence.disk.problems)


def test_a_node_whose_meta_was_made_that_of_a_copy_publishes_no_part_without_its_files(place: MirroredRoot) -> None:
    """A copy may lack files. As a part it would be signed without them, and so would the merged meta."""
    mine, _ = parts_of(place)
    few = tuple(one for one in mine.artifacts if not one.path.startswith(("optim", "extra")))
    copy = replace(mine, artifacts=few, staged_from=place.mirrors[0].url, partial=True)
    (place.root / names.SaveName(100).meta).write_bytes(meta_to_bytes(copy))
    place.lose_table()
    place.add(copy)
    place.table.release_save(mine.save_id)
    place.upload()
    assert place.store.stat(names.part_name(100, mine.save_id, 1, 2)) is None
    assert mirror_catalog(place.mirrors[0]).saves == {}
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert "names only a part of the files of its node" in (meta.reason or "")


def _generation(place: MirroredRoot, name: str) -> int:
    there = place.store.stat(name)
    assert there is not None
    return there.generation


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_part_that_is_damaged_on_the_mirror_waits_for_its_node_which_says_what_to_delete(
    node: int, place: MirroredRoot, tmp_path: Path
) -> None:
    mine, theirs = parts_of(place)
    name = names.part_name(100, mine.save_id, node + 1, 2)
    whole = meta_to_bytes((mine, theirs)[node])
    if node == 0:
        place.store.write(name, whole, if_generation=0)
    at = tmp_path / "mirror" / name
    at.chmod(0o644)
    at.write_bytes(whole[:100])
    place.upload()
    assert mirror_catalog(place.mirrors[0]).saves == {}
    (meta,) = [record for record in place.records() if record.role == "meta"]
    (waits,) = uncommitted_on(place.mirrors[0].url)
    assert waits.parts.awaited == f"node {node}"
    if node == 0:
        assert meta.state.value == "failed"
        assert f"ckptmirror never replaces an object. Delete it: `rm {at}`" in (meta.reason or "")
    else:
        assert is_behind_text(meta.reason)
        assert "is damaged, and `ckptmirror drain` on that node says what to do" in (meta.reason or "")
    at.unlink()
    if node == 1:  # that node sends it again
        place.store.write(name, whole, if_generation=0)
    else:
        place.table.retry_failed()
    place.clock.pass_s(600)
    place.upload()
    (found,) = mirror_catalog(place.mirrors[0]).saves.values()
    assert found.is_whole


def of_version_99(data: bytes) -> bytes:
    content = {key: value for key, value in json.loads(data).items() if key != "checksum"} | {"version": 99}
    return sealed_json._canonical(content | {"checksum": sealed_json._checksum(content)})


@pytest.mark.parametrize("what", ["a part", "the whole meta"])
def test_what_a_later_version_wrote_is_left_to_that_version(what: str, place: MirroredRoot, tmp_path: Path) -> None:
    """It is not damaged, nobody should delete it, and no second meta of the save is written."""
    mine, theirs = parts_of(place)
    name = names.part_name(100, mine.save_id, 2, 2)
    if what == "a part":
        data = meta_to_bytes(theirs)
    else:
        name, data = names.SaveName(100, mine.save_id[:8]).meta, meta_to_bytes(merge_parts([mine, theirs]))
        place.store.write(name, data, if_generation=0)
    at = tmp_path / "mirror" / name
    at.chmod(0o644)
    at.write_bytes(of_version_99(data))
    place.upload()
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert "was written by a later version of ckptmirror: `ckptmirror drain` of that version" in (meta.reason or "")
    assert mirror_catalog(place.mirrors[0]).saves == {}
    assert len(list((tmp_path / "mirror").glob("meta_*"))) == (what != "a part")


@pytest.mark.parametrize("lost", ["part", pytest.param("file", marks=pytest.mark.long)])
def test_i1_a_part_of_a_save_that_is_left_off_a_mirror_goes_only_while_that_mirror_has_it(
    lost: str, place: MirroredRoot
) -> None:
    """The node that is away needs both to complete the save when it is back, and no record guards the part."""
    mine, _ = parts_of(place)
    other, own = (names.part_name(100, mine.save_id, number, 2) for number in (2, 1))
    place.store.delete(other, generation=_generation(place, other))
    place.upload()
    url = place.mirrors[0].url
    assert place.table.skip(mine.save_id, LEFT_OFF_TEXT, mirror=url) == 1

    def why() -> str | None:
        return why_not_safe(place.table, place.mirrors, mine.save_id, own)

    assert why() is None
    name = own if lost == "part" else next(iter(mine.paths))
    place.store.delete(name, generation=_generation(place, name))
    assert f"{name} is missing" in (why() or "")
    assert "pending" in place.states()
    place.clock.pass_s(60)
    place.upload()
    assert place.store.stat(name) is not None
    assert place.table.skip(mine.save_id, LEFT_OFF_TEXT, mirror=url) == 1
    assert why() is None
    place.store.delete(name, generation=_generation(place, name))
    stone = Tombstone(mine.save_id, mine.step, mine.kinds, "old", "2026-01-01T00:00:00Z")
    place.store.write(names.SaveName(100).meta, tombstone_to_bytes(stone), if_generation=0)
    assert why() is None
