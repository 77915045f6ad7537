"""A save of two kinds with one damaged file is whole in the kind that does not need it, and is rotated only whole."""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core.errors import CheckpointNotFound, IntegrityError, KindMismatch, RefusedOnlyCopy
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.drain import push
from ckptmirror.flow.fetch.load import load_checkpoint
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.resolve import (
    find_local_checkpoint_steps,
    list_checkpoints,
    resolve_checkpoint_reference,
    resolve_resume_path,
)
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import memory, open_store
from ckptmirror.stores.base import Store
from tests.kit.cli import run
from tests.kit.faults import flip_bit
from tests.kit.mirrors import memory_url
from tests.kit.processes import killed_at
from tests.kit.roots import MirroredRoot, Place, artifact, names_in, require, whole, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror
from tests.kit.training import everything, new_state, running, same, saved_run

OF: dict[Kind, str] = {"dcp": "__0_0.distcp", "model": "model_"}
OTHER: dict[Kind, Kind] = {"dcp": "model", "model": "dcp"}


def truncate(root: Path, meta: Meta, name: str) -> Path:
    path = artifact(root, meta, name)
    path.write_bytes(path.read_bytes()[:10])
    return path


def take_off(store: Store, name: str) -> None:
    info = store.stat(name)
    assert info is not None
    store.delete(name, generation=info.generation)


def remove(place: Place, meta: Meta, name: str) -> None:
    """Take an object off the mirror."""
    (path,) = [a.path for a in meta.artifacts if name in a.path]
    take_off(place.spy, path)  # type: ignore[arg-type]


# -- a start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", ["model", "dcp"])
def test_a_save_with_a_damaged_kind_is_resumed_in_the_other(tmp_path: Path, damaged: Kind) -> None:
    states = saved_run(tmp_path, (1, 2))
    truncate(tmp_path, whole(tmp_path)[2], OF[damaged])
    with running(tmp_path) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind) == (2, OTHER[damaged])
        (line,) = start.passed_over
        assert line.startswith(f"kind {damaged} of step 2")
        assert same(everything(state), states[2])


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [delete, empty, flip_bit])
@pytest.mark.parametrize(
    ("name", "intact"),
    [(".metadata", "model"), ("__0_0.distcp", "model"), ("model_", "dcp"), ("optim_", "dcp")],
)
def test_whichever_file_of_a_kind_is_lost_every_way_to_start_takes_the_other_kind(
    tmp_path: Path, name: str, intact: Kind, damage: Callable[[Path], None]
) -> None:
    states = saved_run(tmp_path, (1, 2))
    meta = whole(tmp_path)[2]
    damage(artifact(tmp_path, meta, name))
    for policy in ("auto", "latest", 2, meta.save_id[:8]):
        with running(tmp_path) as manager:
            state = new_state(seed=5)
            start = manager.resume(state, policy=policy)
        assert start is not None
        assert (start.step, start.kind, start.missing) == (2, intact, ()), policy
        assert "step 2" in " ".join(start.passed_over) or damage is flip_bit, policy
        assert same(everything(state), states[2]), policy


def test_a_save_whose_extra_state_is_damaged_is_whole_in_no_kind(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    truncate(tmp_path, whole(tmp_path)[2], "extra_")
    with running(tmp_path) as manager:
        start = manager.resume(new_state(seed=5))
        assert start is not None
        assert start.step == 1
    assert find_local_checkpoint_steps(tmp_path) == [1]


def test_a_run_that_lost_its_disk_resumes_the_kind_that_its_mirror_holds_whole(tmp_path: Path) -> None:
    memory.drop("whole-kinds")
    url = "memory://whole-kinds/run"
    states = saved_run(tmp_path / "lost", (1, 2), url)
    take_off(open_store(url), "model_000002.pt")
    with running(tmp_path / "new", url) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind, start.place) == (2, "dcp", url)
        assert same(everything(state), states[2])
    (brought,) = (save.meta for save in read_inventory(tmp_path / "new").saves)
    assert brought.kinds == ("dcp",)
    assert brought.partial, "it is not all of the save, and must not be taken for that on another mirror"
    memory.drop("whole-kinds")


def test_a_mirror_that_lacks_one_kind_is_not_one_that_has_the_save(tmp_path: Path) -> None:
    """The other mirror's copy is brought whole, so that what is lacking can be sent again."""
    for bucket in ("whole-kinds-a", "whole-kinds-b"):
        memory.drop(bucket)
    torn, good = "memory://whole-kinds-a/run", "memory://whole-kinds-b/run"
    saved_run(tmp_path / "lost", (1, 2), torn, good)
    take_off(open_store(torn), "model_000002.pt")
    with running(tmp_path / "new", good, torn) as manager:
        start = manager.resume(new_state(seed=5))
        assert start is not None
        assert (start.step, start.kind, start.place) == (2, "dcp", good)
    assert whole(tmp_path / "new")[2].kinds == ("dcp", "model")
    for bucket in ("whole-kinds-a", "whole-kinds-b"):
        memory.drop(bucket)


def torn_both_ways(tmp_path: Path) -> tuple[Path, str, dict[int, Any]]:
    """A run whose disk has a damaged kind dcp, and whose mirror has lost the model file of the same save."""
    memory.drop("whole-kinds")
    root, url = tmp_path / "root", "memory://whole-kinds/run"
    states = saved_run(root, (1, 2), url)
    take_off(open_store(url), "model_000002.pt")
    flip_bit(artifact(root, whole(root)[2], OF["dcp"]))
    return root, url, states


def test_a_start_brings_the_broken_kind_from_a_mirror_that_has_lost_the_other(tmp_path: Path) -> None:
    """The disk's own kind stays, and is sent to the mirror again."""
    root, url, states = torn_both_ways(tmp_path)
    own = whole(root)[2]
    with running(root, url) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind, start.place) == (2, "dcp", url)
        assert same(everything(state), states[2])
        manager.wait("mirrored", timeout_s=30)
    assert whole(root)[2] == own
    assert open_store(url).stat("model_000002.pt") is not None
    memory.drop("whole-kinds")


def test_a_start_brings_the_kind_too_where_nobody_has_the_other(tmp_path: Path) -> None:
    root, url, states = torn_both_ways(tmp_path)
    model = truncate(root, whole(root)[2], "model_")
    with running(root, url) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind, start.place) == (2, "dcp", url)
        assert same(everything(state), states[2])
    assert model.exists(), "a broken file may hold what a person can still use"
    memory.drop("whole-kinds")


# -- readers of a directory -------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two saves in both kinds, the newer with a model file that was cut short."""
    metas = [make_save(tmp_path, step, number=number) for number, step in enumerate((100, 200), 1)]
    put_attempts(tmp_path, [FIRST_ATTEMPT])
    truncate(tmp_path, metas[1], "model_")
    return tmp_path


def test_readers_of_a_directory_take_the_kind_that_is_whole(root: Path) -> None:
    assert find_local_checkpoint_steps(root) == [100, 200]
    assert find_local_checkpoint_steps(root, "model") == [100]
    assert resolve_resume_path(root) == root / "dcp_000200"
    for reference in (root, root / "dcp_000200", root / "meta_000200.json"):
        found = resolve_checkpoint_reference(reference)
        assert (found.step, found.kind) == (200, "dcp"), reference


def test_what_names_the_damaged_kind_is_refused_with_the_reason(root: Path) -> None:
    for name, kind in (("model_000200.pt", None), ("meta_000200.json", "model")):
        with pytest.raises(IntegrityError, match=r"model_000200\.pt has 10 bytes instead of 3000"):
            resolve_checkpoint_reference(root / name, require_kind=kind)  # type: ignore[arg-type]  # a kind's literal


def test_a_listing_has_a_line_for_the_whole_kind_and_one_for_the_other(root: Path) -> None:
    lines = {line.kinds: line for line in list_checkpoints(root) if line.step == 200}
    assert set(lines) == {("dcp",), ("model",)}
    assert (lines["dcp",].standing, lines["dcp",].current_kinds) == ("current", ("dcp",))
    assert lines["model",].standing == "incomplete"
    assert "model_000200.pt has 10 bytes instead of 3000" in lines["model",].why
    assert lines["model",].save_id == lines["dcp",].save_id
    shown = run("ls", root)
    assert shown.returncode == 0
    (current, broken) = [line for line in shown.stdout.splitlines() if " 200 " in f" {line} "]
    assert "dcp " in current
    assert "model " in broken


def test_status_names_the_whole_kind_and_the_problem(root: Path) -> None:
    require(root, "memory://nowhere/run")
    status = json.loads(run("status", "--root", root, "--json").stdout)
    assert [(line["step"], line["kinds"]) for line in status["saves"]] == [(100, ["dcp", "model"]), (200, ["dcp"])]
    (why,) = status["problems"].values()
    assert "model_000200.pt has 10 bytes instead of 3000; in kind dcp it is whole" in why


def test_verify_tells_of_the_save_once_as_damaged_and_of_the_whole_kind(root: Path) -> None:
    found = run("verify", root, "--json")
    assert found.returncode == 6
    (line,) = [save for save in json.loads(found.stdout)["saves"] if save["step"] == 200]
    assert (line["state"], line["kinds"]) == ("damaged", ["dcp", "model"])
    assert line["faults"] == ["model_000200.pt has 10 bytes instead of 3000"]
    assert line["whole_kinds"] == ["dcp"]
    assert "in kind dcp it is whole" in run("verify", root).stdout


def test_a_save_whose_dcp_kind_is_damaged_is_read_as_a_model_and_that_is_said(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = make_save(root, 300, number=3)
    truncate(root, meta, "__0_0.distcp")
    with caplog.at_level(logging.WARNING, "ckptmirror"):
        found = resolve_checkpoint_reference(root)
    assert (found.step, found.kind) == (300, "model")
    assert "dcp_000300/__0_0.distcp has 10 bytes instead of 3000" in caplog.text


# -- readers of a mirror ----------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_stage_brings_the_kind_that_the_mirror_has_and_says_why_not_the_other(place: Place) -> None:
    meta = place.save()
    remove(place, meta, "model_")
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert staged.path == place.dest / "dcp_000200"
    (held,) = whole_saves(place.dest).values()
    assert (held.save_id, held.kinds, held.partial) == (meta.save_id, ("dcp",), True)
    with pytest.raises(IntegrityError, match=r"model_000200\.pt is missing"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest).kind == "dcp"


def test_beside_an_older_save_of_the_step_the_newer_one_is_staged_in_its_whole_kind(place: Place) -> None:
    older, newer = place.save(number=1), place.save(number=2)
    remove(place, place.on_mirror(newer), "__0_0.distcp")

    def staged(dest: str, **more: Any) -> Meta:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest / dest, **more)
        (held,) = whole_saves(place.dest / dest).values()
        return held

    held = staged("any")
    assert (held.save_id, held.kinds) == (newer.save_id, ("model",))
    with pytest.raises(IntegrityError, match="is broken"):
        staged("dcp", require_kind="dcp")
    assert staged("superseded", require_kind="dcp", superseded=True).save_id == older.save_id


def test_a_kind_that_the_save_never_had_is_still_another_mistake(place: Place) -> None:
    place.save(kinds=("dcp",))
    with pytest.raises(KindMismatch):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")


def test_what_was_staged_before_the_mirror_lost_a_kind_stays_and_is_found_again(place: Place) -> None:
    meta = place.save()
    for kind in ("dcp", "model"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)
    remove(place, meta, "model_")
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert staged.path == place.dest / "dcp_000200"
    assert whole_saves(place.dest)[meta.save_id].kinds == ("dcp", "model")


def test_refresh_keeps_a_staged_kind_that_the_mirror_has_lost(place: Place) -> None:
    meta = place.save()
    for kind in ("dcp", "model"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)
    held = whole_saves(place.dest)[meta.save_id]
    remove(place, meta, "model_")
    flip_bit(place.dest / "dcp_000200" / "__0_0.distcp")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=True)
    assert whole_saves(place.dest) == {meta.save_id: held}
    for one in held.artifacts:
        verify_file(place.dest / one.path, one.digest)


def test_a_kind_that_only_the_directory_has_is_not_renamed_away(place: Place) -> None:
    """Another program's file is in the way of the save's names: refused, since the other kind cannot be brought."""
    meta = place.save()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    remove(place, meta, "model_")
    (place.dest / "dcp_000200").mkdir()
    (place.dest / "dcp_000200" / "notes.txt").write_text("a person's")
    before = names_in(place.dest)
    with pytest.raises(RefusedOnlyCopy, match=r"model_000200\.pt"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    assert names_in(place.dest) == before


def test_i1_a_kind_that_only_a_second_meta_of_the_save_names_is_not_deleted(place: Place) -> None:
    """Somebody copied another host's directory in beside it; of the two model files, one is damaged."""
    meta = place.save()
    for kind in ("dcp", "model"):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind)
    make_save(place.dest, 200, ("model",), save_id=meta.save_id, tag=meta.save_id[:8])
    flip_bit(place.dest / f"model_000200-{meta.save_id[:8]}.pt")
    remove(place, meta, "model_")
    before = names_in(place.dest)
    for refresh in (False, True):
        with pytest.raises(RefusedOnlyCopy, match=r"model_000200\.pt of save"):
            stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", refresh=refresh)
        assert names_in(place.dest) == before


def rotate_to_one(root: Path, url: str) -> None:
    MirroredRoot(root, [url]).rotate(keep_last=1)


def test_i1_a_kind_that_only_a_meta_in_the_trash_names_is_not_deleted(tmp_path: Path) -> None:
    """A rotation was killed, the mirror lost the model file since, and another file of that kind is damaged here."""
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    place = MirroredRoot(root, [url])
    put_attempts(place.store, [FIRST_ATTEMPT])
    for step in (100, 200):
        place.commit(step, ("dcp", "model"))
    place.upload()
    place.table.close()
    assert killed_at("trash.rename:after", rotate_to_one, root, url)
    take_off(open_store(url), "model_000100.pt")
    flip_bit(root / "optim_000100_rank0.pt")
    before = names_in(root)
    with pytest.raises(RefusedOnlyCopy, match=r"model_000100\.pt of save"):
        stage_checkpoint_step(url, step=100, dest=root, require_kind="dcp")
    assert names_in(root) == before


def test_what_is_staged_is_found_again_beside_a_file_that_a_person_copied_in(place: Place) -> None:
    meta = place.save()
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    shutil.copy(place.root / "optim_000200_rank0.pt", place.dest)
    remove(place, meta, "model_")
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp") == staged


def test_a_file_of_two_kinds_belongs_to_both_once_the_mirror_has_both_again(place: Place) -> None:
    meta = place.save()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    model = (place.root / "model_000200.pt").read_bytes()
    info = place.spy.stat("model_000200.pt")
    assert info is not None
    remove(place, meta, "model_")
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", full=True)
    place.spy.write("model_000200.pt", model, if_generation=0, metadata=info.metadata)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model", full=True, refresh=True)
    (held,) = whole_saves(place.dest).values()
    assert {a.path: set(a.kinds) for a in held.artifacts} == {a.path: set(a.kinds) for a in meta.artifacts}
    assert not held.partial


def test_a_listing_of_a_mirror_names_the_kind_that_is_not_whole(place: Place) -> None:
    meta = place.save()
    remove(place, meta, "model_")
    lines = {line.kinds: line for line in list_checkpoints(place.url)}
    assert lines["dcp",].standing == "current"
    assert "model_000200.pt is missing" in lines["model",].why


# -- what treats a save as a whole ------------------------------------------------------------------------------------


def test_rotation_neither_deletes_a_save_with_a_damaged_kind_nor_counts_it_as_one_to_keep(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    older, newer = place.commit(100, ("dcp", "model")), place.commit(200, ("dcp", "model"))
    place.upload()
    truncate(place.root, newer, "model_")
    report = place.rotate(keep_last=1)
    assert report.deleted == ()
    assert place.has(older)
    place.commit(300, ("dcp", "model"))
    place.upload()
    deleted = place.rotate(keep_last=1).deleted
    assert [step for step, _ in deleted] == [100]
    assert newer.save_id in {save.meta.save_id for save in read_inventory(place.root).incomplete}


def test_a_save_with_a_damaged_kind_is_pushed_nowhere(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    meta = make_save(root, 200)
    truncate(root, meta, "model_")
    with pytest.raises(CheckpointNotFound):
        push(root, url, timeout_s=10.0)


def test_a_staged_copy_of_one_kind_is_no_copy_of_the_save(tmp_path: Path) -> None:
    """What a torn mirror gave is known to be a part, also where nothing else of the save is left."""
    store = open_store("memory://whole-kinds-c/run")
    put_attempts(store, [FIRST_ATTEMPT])
    meta = make_save(tmp_path / "root", 200)
    put_on_mirror(store, tmp_path / "root", meta)
    take_off(store, "optim_000200_rank0.pt")
    stage_checkpoint_step(Mirror(store.url, True, store), step=200, dest=tmp_path / "eval", full=True)
    (held,) = whole_saves(tmp_path / "eval").values()
    assert (held.kinds, held.partial) == (("dcp",), True)
    memory.drop("whole-kinds-c")


# -- a save that lost only its list of tensors -------------------------------------------------------------------------


def test_a_save_that_lost_its_list_of_tensors_is_resumed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = saved_run(tmp_path, (1, 2))
    meta = whole(tmp_path)[2]
    artifact(tmp_path, meta, "tensors_").unlink()
    told = "tensors: tensors_000002_rank0.json is lost, so what was loaded is not proved to be what was saved"
    for policy in ("auto", 2, meta.save_id[:8], tmp_path / "model_000002.pt"):
        caplog.clear()
        with running(tmp_path) as manager:
            state = new_state(seed=5)
            start = manager.resume(state, policy=policy, force=True)
        assert start is not None
        assert (start.step, start.place, start.missing, start.passed_over) == (2, "disk", (told,), ()), policy
        assert told in caplog.text
        assert same(everything(state), states[2])
    with running(tmp_path) as manager:
        state = new_state(seed=6)
        manager.resume(state)
        for reference in (2, "latest", tmp_path / "dcp_000002"):
            found = manager.load(new_state(seed=7), reference)
            assert (found.step, found.missing) == (2, (told,)), reference
    assert load_checkpoint(tmp_path).meta.save_id == meta.save_id


def test_a_lost_list_of_tensors_is_damage_to_verify_which_says_that_no_load_needs_it(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    artifact(tmp_path, whole(tmp_path)[2], "tensors_").unlink()
    found = run("verify", tmp_path)
    assert found.returncode == 6
    assert "DAMAGED: tensors_000002_rank0.json is missing; no load needs it" in found.stdout
    (line,) = [one for one in json.loads(run("verify", tmp_path, "--json").stdout)["saves"] if one["step"] == 2]
    assert (line["state"], line["whole_kinds"]) == ("damaged", ["dcp", "model"])
    assert "tensors_000002_rank0.json is missing; no load needs it" in run("ls", tmp_path).stdout
    assert find_local_checkpoint_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("at", ["root", "mirror"])
def test_a_lost_list_of_tensors_is_listed_with_the_kinds_that_it_belongs_to(tmp_path: Path, at: str) -> None:
    saved_run(tmp_path / "root", (1, 2), f"file://{tmp_path}/mirror")
    meta = whole(tmp_path / "root")[2]
    lost = artifact(tmp_path / at, meta, "tensors_")
    size_bytes = lost.stat().st_size
    lost.unlink()
    place = tmp_path / "root" if at == "root" else f"file://{tmp_path}/mirror"
    left, of_list = [line for line in list_checkpoints(place) if line.step == 2]
    assert (left.standing, left.kinds, left.why) == ("current", ("dcp", "model"), "")
    assert (of_list.standing, of_list.kinds, of_list.current_kinds) == ("incomplete", ("dcp", "model"), ())
    assert of_list.size_bytes == size_bytes
    assert left.size_bytes + size_bytes == meta.size_bytes


def test_a_copy_that_has_its_list_of_tensors_comes_before_one_that_lost_it(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path, (1, 2), url)
    meta = whole(tmp_path)[2]
    lost = artifact(tmp_path, meta, "tensors_")
    lost.unlink()
    with running(tmp_path, url) as manager:
        start = manager.resume(new_state(seed=5))
    assert start is not None
    assert (start.step, start.place, start.missing) == (2, url, ())
    assert lost.exists(), "it was brought from the mirror"
    assert whole(tmp_path)[2] == meta


def test_a_save_of_which_every_copy_lost_the_list_is_brought_from_a_mirror_and_again_resumed(tmp_path: Path) -> None:
    url = memory_url()
    states = saved_run(tmp_path / "lost", (1, 2), url)
    take_off(open_store(url), "tensors_000002_rank0.json")
    for place in (url, "disk"):
        with running(tmp_path / "new", url) as manager:
            state = new_state(seed=5)
            start = manager.resume(state)
        assert start is not None
        assert (start.step, start.place, len(start.missing)) == (2, place, 1)
        assert "is not proved" in start.missing[0]
        assert same(everything(state), states[2])


def test_rotation_keeps_a_whole_save_in_place_of_one_that_lost_its_list_of_tensors(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    older, newer = place.commit(100, ("dcp", "model")), place.commit(200, ("dcp", "model"))
    place.upload()
    artifact(place.root, newer, "tensors_").unlink()
    assert place.rotate(keep_last=1).deleted == ()
    assert place.has(older)
    assert newer.save_id in {save.meta.save_id for save in read_inventory(place.root).incomplete}


def test_a_save_that_lost_its_list_of_tensors_is_pushed_nowhere(tmp_path: Path) -> None:
    root = tmp_path / "root"
    artifact(root, make_save(root, 200), "tensors_").unlink()
    with pytest.raises(CheckpointNotFound):
        push(root, f"file://{tmp_path}/mirror", timeout_s=10.0)


# -- a save that lost its optimizer or its extra state ----------------------------------------------------------------

REST = ("scheduler", "scaler", "ema", "dataloader", "extra", "rng")
LOST = [
    (("model",), ("optim_",), ("optimizer",)),
    (("model",), ("extra_",), REST),
    (("dcp",), ("extra_",), REST),
    (("dcp", "model"), ("extra_", "__0_0.distcp"), REST),
    (("model",), ("extra_", "tensors_"), REST),
    (("model",), ("optim_", "extra_"), ("optimizer", *REST)),
]


def arguments_in(text: str) -> dict[str, Any]:
    """The arguments of resume that a sentence names."""
    ((policy, exclude),) = set(re.findall(r"resume with policy=('\w+'), exclude=(\([^)]*\)) continues", text))
    return {"policy": ast.literal_eval(policy), "exclude": ast.literal_eval(exclude)}


@pytest.mark.parametrize(("kinds", "names", "parts"), LOST)
@pytest.mark.parametrize("steps", [(1, 2), (2,)])
def test_what_a_start_says_of_a_save_that_lost_a_part_continues_from_it_without_that_part(
    tmp_path: Path, steps: tuple[int, ...], kinds: tuple[Kind, ...], names: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    states = saved_run(tmp_path, steps, kinds=kinds)
    meta = whole(tmp_path)[2]
    for name in names:
        artifact(tmp_path, meta, name).unlink()
    with running(tmp_path) as manager:
        if len(steps) > 1:
            older = manager.resume(new_state(seed=5))
            assert older is not None
            assert older.step == 1, "nothing is given up unless a person says so"
            told = " ".join(older.passed_over)
        else:
            with pytest.raises(RefusedOnlyCopy) as refused:
                manager.resume(new_state(seed=5), exclude=parts)
            told = f"{refused.value} {refused.value.hint}"
    arguments = arguments_in(told)
    assert arguments == {"policy": meta.save_id[:8], "exclude": parts}
    with running(tmp_path) as manager:
        with pytest.raises(CheckpointNotFound):
            manager.resume(new_state(seed=5), policy=arguments["policy"])
        state = new_state(seed=5)
        before = everything(state)
        start = manager.resume(state, **arguments)
        assert start is not None
        assert (start.step, start.save_id) == (2, meta.save_id)
        after = everything(state)
        assert same(after["model"], states[2]["model"])
        wanted = before if "optimizer" in parts else states[2]
        assert same(after["optimizer"]["state"], wanted["optimizer"]["state"])
        manager.save(3, state).wait()
    with running(tmp_path) as manager:
        on = manager.resume(new_state(seed=6))
    assert on is not None
    assert on.step == 3


@pytest.mark.parametrize(("kinds", "names", "parts"), LOST)
def test_a_load_without_the_part_that_a_save_lost_takes_the_rest_as_its_refusal_says(
    tmp_path: Path, kinds: tuple[Kind, ...], names: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    states = saved_run(tmp_path / "other", (1, 2), kinds=kinds)
    meta = whole(tmp_path / "other")[2]
    for name in names:
        artifact(tmp_path / "other", meta, name).unlink()
    with running(tmp_path / "run") as manager:
        state = new_state(seed=5)
        manager.resume(state)
        path = tmp_path / "other" / "meta_000002.json"
        with pytest.raises(IntegrityError) as refused:
            manager.load(state, path)
        (hint,) = re.findall(r"exclude=(\([^)]*\))", refused.value.hint)
        assert ast.literal_eval(hint) == parts
        found = manager.load(state, path, exclude=parts)
    assert (found.step, found.save_id) == (2, meta.save_id)
    assert same(everything(state)["model"], states[2]["model"])
    if "optimizer" not in parts:
        assert same(everything(state)["optimizer"], states[2]["optimizer"])


def test_a_load_by_step_takes_what_is_left_and_one_of_the_newest_takes_a_whole_save(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2), kinds=("model",))
    artifact(tmp_path, whole(tmp_path)[2], "optim_").unlink()
    with running(tmp_path) as manager:
        state = new_state(seed=5)
        manager.resume(state)
        assert manager.load(state, 2, exclude=("optimizer",)).step == 2
        assert manager.load(state, "latest", exclude=("optimizer",)).step == 1


@pytest.mark.parametrize(("kinds", "names", "parts"), LOST)
def test_a_load_of_the_values_without_the_lost_part_takes_the_rest(
    tmp_path: Path, kinds: tuple[Kind, ...], names: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    states = saved_run(tmp_path, (2,), kinds=kinds)
    meta = whole(tmp_path)[2]
    for name in names:
        artifact(tmp_path, meta, name).unlink()
    with pytest.raises(IntegrityError):
        load_checkpoint(tmp_path / "meta_000002.json")
    loaded = load_checkpoint(tmp_path / "meta_000002.json", exclude={"optimizer", "extra"} & set(parts))
    assert same(loaded.model, dict(states[2]["model"]))
    assert (loaded.optimizer is None) == ("optimizer" in parts)
    assert (loaded.extra is None) == ("extra" in parts)
