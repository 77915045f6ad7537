"""A mirror that lost what it was given is found out, and nobody is told that it is safe there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.core.errors import IntegrityError, RefusedOnlyCopy
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.stage import stage_checkpoint_step
from ckptmirror.local.lock import RootLock
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from tests.mirror_place import memory_url
from tests.small_training import new_state, running, saved_run
from tests.stage_place import Place, whole_saves


def emptied(store: Store) -> None:
    """Somebody, or a lifecycle rule, deleted everything below the prefix."""
    for info in list(store.list()):
        store.delete(info.name, generation=info.generation)


def damaged(store: Store, name: str) -> None:
    """One bit of an object flipped."""
    data, info = store.read(name, limit_bytes=1_000_000)
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    store.write(name, bytes(changed), if_generation=info.generation, metadata=info.metadata)


@pytest.mark.parametrize("verb", ["drain", "push", "start"])
def test_i9_what_an_emptied_mirror_lost_is_sent_again_by_whoever_comes_next(tmp_path: Path, verb: str) -> None:
    url = memory_url()
    store = open_store(url)
    saved_run(tmp_path, (1, 2), url)
    before = {info.name for info in store.list()}
    emptied(store)
    if verb == "drain":
        assert drain(tmp_path, timeout_s=30).pending == 0
    elif verb == "push":
        assert push(tmp_path, url, timeout_s=30).pending == 0
    else:
        with running(tmp_path, url) as manager:
            manager.resume(new_state())
            manager.rotate()  # behind what the start asks
            manager.wait("mirrored", timeout_s=30)
    assert {info.name for info in store.list()} >= before


def test_i9_a_drain_beside_a_live_trainer_asks_too(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path, (1,), url)
    emptied(open_store(url))
    lock = RootLock(tmp_path)
    lock.acquire({"pid": 1})
    try:
        assert drain(tmp_path, timeout_s=30).pending == 0
    finally:
        lock.release()
    assert "meta_000001.json" in {info.name for info in open_store(url).list()}


def test_i1_refresh_keeps_a_copy_whose_save_is_broken_on_the_mirror(tmp_path: Path) -> None:
    place = Place(tmp_path)
    good = place.save(200, ("dcp",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", full=True)
    place.save(200, ("model",), 2)
    damaged(place.mirror.store, "meta_000200.json")
    with pytest.raises(RefusedOnlyCopy, match="it stays"):
        stage_checkpoint_step(
            place.mirror, step=200, dest=place.dest, require_kind="model", refresh=True, superseded=True
        )
    assert good.save_id in whole_saves(place.dest)


def test_i4_an_older_save_of_a_step_is_not_staged_for_the_one_that_stands_and_is_broken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    old, new = place.save(200, ("model",), 1), place.save(200, ("model",), 2)
    damaged(place.mirror.store, f"meta_000200-{new.save_id[:8]}.json")
    with pytest.raises(IntegrityError, match="stands on") as refused:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert "--superseded" in refused.value.hint
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, superseded=True)
    assert set(whole_saves(place.dest)) == {old.save_id}


def test_latest_says_what_it_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path)
    place.save(200, ("model",), 1)
    place.save(300, ("model",), 2)
    damaged(place.mirror.store, "meta_000300.json")
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest).step == 200
    assert "passed over" in caplog.text
    assert "meta_000300.json" in caplog.text
