"""``stage --full`` and ``--refresh`` together: every file of a save, each fetched once, each replaced when stale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores.base import Store
from tests.cli_place import make_mirrored, run
from tests.factory import bytes_of, flip_bit, put_object
from tests.stage_place import Place, names_in, whole_saves


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def fetched(place: Place) -> set[str]:
    """The top names downloaded since this was asked last."""
    found = {name.partition("/")[0] for name, _, _ in place.spy.downloads}
    place.spy.downloads.clear()
    return found


def full(place: Place, kind: str, *, refresh: bool = False) -> None:
    stage_checkpoint_step(
        place.mirror,
        step=200,
        dest=place.dest,
        require_kind=kind,  # type: ignore[arg-type]
        full=True,
        refresh=refresh,
    )


def test_full_after_one_kind_brings_what_is_missing_and_nothing_twice(place: Place) -> None:
    meta = place.save(ranks=2)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert fetched(place) == {"dcp_000200"}
    full(place, "dcp")
    beside = {f"{role}_000200_rank{rank}" for role in ("extra", "tensors") for rank in (0, 1)}
    assert {name.partition(".")[0] for name in fetched(place)} == beside
    assert whole_saves(place.dest)[meta.save_id].partial  # of kind model nothing was asked for
    full(place, "model")
    assert fetched(place) == {"model_000200.pt", "optim_000200_rank0.pt", "optim_000200_rank1.pt"}
    there = whole_saves(place.dest)[meta.save_id]
    assert (there.partial, there.kinds) == (False, meta.kinds)
    assert bytes_of(place.dest, there) == bytes_of(place.root, meta)
    full(place, "dcp")
    assert fetched(place) == set()


def test_a_refresh_with_nothing_stale_fetches_nothing_and_changes_no_file(place: Place) -> None:
    place.save(ranks=2)
    full(place, "model")
    fetched(place)
    before = {path: path.stat().st_ino for path in place.dest.glob("*000200*")}
    full(place, "model", refresh=True)
    assert fetched(place) == set()
    assert {path: path.stat().st_ino for path in place.dest.glob("*000200*")} == before


def test_a_rotten_file_beside_the_kind_that_is_asked_for_is_mended_too(place: Place) -> None:
    meta = place.save(ranks=2)
    full(place, "model")
    flip_bit(place.dest / "optim_000200_rank1.pt")
    fetched(place)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model", refresh=True)
    assert fetched(place) == {"optim_000200_rank1.pt"}
    assert list(whole_saves(place.dest)) == [meta.save_id]
    assert not read_inventory(place.dest).trash


def test_a_refresh_replaces_every_file_of_a_save_that_another_replaced(place: Place) -> None:
    old = place.save(ranks=2)
    full(place, "model")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    new = place.save(number=2, ranks=1)  # lies under names with the digits of its id, there and here
    full(place, "model", refresh=True)
    assert list(whole_saves(place.dest)) == [new.save_id]
    tag = f"-{new.save_id[:8]}"
    beside = [f"{role}_000200{tag}_rank0" for role in ("extra", "optim", "tensors")]
    left = sorted(name.partition(".")[0] for name in names_in(place.dest))
    assert left == sorted([f"meta_000200{tag}", f"model_000200{tag}", *beside])
    assert old.save_id != new.save_id
    assert not read_inventory(place.dest).trash


def test_a_save_that_was_sent_again_under_another_name_there_is_not_stale_here(place: Place) -> None:
    """What was damaged on the mirror is sent again beside it: the same save, the same bytes, another object."""
    meta = place.save(ranks=1)
    full(place, "model")
    name = names.tagged("model_000200.pt", meta.save_id)
    put_object(place.spy, name, (place.root / "model_000200.pt").read_bytes(), meta)  # type: ignore[arg-type]
    there = place.on_mirror(meta)
    moved = [replace(one, object=name) if one.path == "model_000200.pt" else one for one in there.artifacts]
    store = cast(Store, place.spy)
    standing, damaged = store.stat("meta_000200.json"), store.stat("model_000200.pt")
    assert standing is not None
    assert damaged is not None
    data = meta_to_bytes(replace(there, artifacts=tuple(moved)))
    store.write("meta_000200.json", data, if_generation=standing.generation)
    store.delete("model_000200.pt", generation=damaged.generation)
    fetched(place)
    full(place, "model", refresh=True)
    assert fetched(place) == set()
    assert "model_000200.pt" in names_in(place.dest)
    (place.dest / "model_000200.pt").unlink()
    full(place, "model", refresh=True)
    assert fetched(place) == {name}
    assert "model_000200.pt" in names_in(place.dest)


def test_the_verb_takes_both_flags(tmp_path: Path) -> None:
    _, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    command = ["stage", "--step", "100", "--mirror", url, "--dest", tmp_path / "eval", "--full", "--refresh"]
    for _ in range(2):
        assert run(*command).stdout.strip() == str(tmp_path / "eval" / "model_000100.pt")
    flip_bit(tmp_path / "eval" / "optim_000100_rank0.pt")
    assert run(*command).returncode == 0
    whole_saves(tmp_path / "eval")
