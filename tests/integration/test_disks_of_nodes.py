"""What a start proposes where the disks of several nodes hold a save together: its meta names all that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.start.evidence import DISK
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.survey import Survey, survey
from ckptmirror.local.root_id import RootId
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts

SAVE_ID = "ab" * 16


def seen(metas: Sequence[Meta], base: Path) -> Survey:
    disks = []
    for node, meta in enumerate(metas):
        root = base / f"node{node}"
        make_save(root, 100, ranks=2, save_id=SAVE_ID, write_meta=False)
        (root / names.SaveName(100).meta).write_bytes(meta_to_bytes(meta))
        put_attempts(root, [FIRST_ATTEMPT])
        disks.append(look_at_disk(root, None, RootId(f"{node}" * 32, True)))
    return survey(disks, [])


@pytest.fixture
def meta(tmp_path: Path) -> Meta:
    return make_save(tmp_path / "save", 100, ranks=2, save_id=SAVE_ID)


@pytest.mark.parametrize("kinds", [("dcp", "model"), ("model", "dcp")])
def test_nodes_that_staged_a_kind_each_have_both(kinds: tuple[Kind, Kind], meta: Meta, tmp_path: Path) -> None:
    copies = [replace(meta.narrowed((kind,)), staged_from="file:///there") for kind in kinds]
    found = seen(copies, tmp_path)
    (copy,) = found.evidence.disk.copies
    there = found.metas[(SAVE_ID, DISK)]
    assert copy.save.kinds == there.kinds == ("dcp", "model")
    assert {(one.path, one.kinds) for one in there.artifacts} == {(one.path, one.kinds) for one in meta.artifacts}


def test_a_copy_of_one_kind_on_a_disk_hides_no_part_of_the_nodes(meta: Meta, tmp_path: Path) -> None:
    parts = [replace(meta, nodes=2, node=node) for node in (0, 1)]
    copy = replace(meta.narrowed(("model",)), nodes=2, node=-1, staged_from="file:///there")
    found = seen([*parts, copy], tmp_path)
    (one,) = found.evidence.disk.copies
    assert one.save.kinds == found.metas[(SAVE_ID, DISK)].kinds == ("dcp", "model")
