"""A copy of a signed run is a part of what was signed; files that it leaves out are not read from its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import load_checkpoint, stage_checkpoint_step
from ckptmirror.core import signing
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.formats import get_format
from ckptmirror.formats.base import LoadTarget
from ckptmirror.formats.read_full import read_full
from ckptmirror.local.inventory import read_inventory
from tests.integration.test_signed_runs import as_process, forged, make_key
from tests.kit.training import new_state, saved_run


@pytest.fixture(autouse=True)
def _no_keys_before_or_after() -> Iterator[None]:
    before = signing.set_current(signing.Keys())
    yield
    signing.set_current(before)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "model_"])
def test_a_file_that_the_meta_of_a_copy_leaves_out_is_not_read(file: str, tmp_path: Path) -> None:
    """Such a meta proves itself; what it leaves out was not verified, and a DCP directory names its files itself."""
    keys = make_key(tmp_path / "keys")
    there = tmp_path / "mirror"
    there.mkdir()
    kind: Any = "model" if file == "model_" else "dcp"
    saved_run(tmp_path / "root", (1, 2), there.as_uri(), **keys)
    as_process(verify_keys=keys["verify_keys"])
    dest, other = tmp_path / "dest", tmp_path / "other"
    stage_checkpoint_step(there.as_uri(), step=2, dest=dest, require_kind=kind, full=True)
    stage_checkpoint_step(there.as_uri(), step=1, dest=other, require_kind=kind)
    assert load_checkpoint(dest, "cpu").meta.step == 2

    def change(document: dict[str, Any]) -> None:
        document["partial"] = True
        document["artifacts"] = [one for one in document["artifacts"] if file not in one["path"]]

    forged(dest / "meta_000002.json", change)
    (path,) = (path for path in dest.rglob("*") if path.is_file() and file in path.name)
    (planted,) = (path for path in other.rglob("*") if path.is_file() and file in path.name)
    os.unlink(path)
    path.write_bytes(planted.read_bytes())
    with pytest.raises(CkptMirrorError):
        load_checkpoint(dest)
    (save,) = read_inventory(dest).saves  # what a resume gets, which finds the save by its meta
    state = new_state()
    with pytest.raises(IntegrityError, match="does not name it"):
        get_format(kind).load(dest, save.meta, LoadTarget(state, 0, 1, frozenset()))
    with pytest.raises(IntegrityError, match="does not name it"):
        read_full(dest, save.meta, kind)
