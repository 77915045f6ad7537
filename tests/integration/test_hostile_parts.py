"""Each node of a save publishes its part on the mirror; somebody else may have put another one under its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.catalog import mirror_catalog
from tests.kit.roots import MirroredRoot
from tests.kit.saves import make_save, put_on_mirror


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
