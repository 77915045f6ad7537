"""A meta on a mirror counts only under a name of its own save."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.stores import open_store
from tests.kit.cli import run
from tests.kit.roots import make_mirrored


@pytest.mark.parametrize("name", ["meta_000009.json", "meta_000002-deadbeef.json", "meta_000001-deadbeef.json"])
def test_a_copy_of_a_meta_under_another_name_takes_nothing_from_its_save(name: str, tmp_path: Path) -> None:
    """`verify` called the save damaged; where the other name came first in the listing, it was the save's own."""
    _, url, (first, second) = make_mirrored(tmp_path, 1, 2)
    there = tmp_path / "mirror"
    (there / name).write_bytes((there / "meta_000001.json").read_bytes())
    store = open_store(url)
    catalog = mirror_catalog(Mirror(url, True, store))
    assert catalog.meta_names == {first.save_id: "meta_000001.json", second.save_id: "meta_000002.json"}
    assert catalog.torn == frozenset()
    (problem,) = catalog.problems.values()
    assert "holds the meta of meta_000001.json" in problem.why
    assert problem.meta is None
    store.close()
    ended = run("verify", url)
    assert "holds the meta of meta_000001.json" in ended.stdout
    assert f"DAMAGED: a second meta of save {first.save_id[:8]}" not in ended.stdout


def test_a_meta_hides_no_save_whose_name_it_took(tmp_path: Path) -> None:
    """The step of the name was not found, and that of the meta counted."""
    _, url, (_, second) = make_mirrored(tmp_path, 1, 2)
    (tmp_path / "mirror/meta_000001.json").write_bytes((tmp_path / "mirror/meta_000002.json").read_bytes())
    store = open_store(url)
    catalog = mirror_catalog(Mirror(url, True, store))
    assert catalog.meta_names == {second.save_id: "meta_000002.json"}
    store.close()
