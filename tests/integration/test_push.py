"""Push and drain tell the truth: what was not sent is not reported as sent, and nothing is allowed to go by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CheckpointNotFound, ConfigError, NoTable, Temporary
from ckptmirror.core.model import Meta
from ckptmirror.core.names import ROTATE_LOCK_NAME
from ckptmirror.core.retention import Retention
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.fetch.stage import stage_checkpoint_step, stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.status import is_mirrored, read_status
from ckptmirror.local.lock import exclusive
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import MirrorRow, UploadsTable
from ckptmirror.stores import open_store
from tests.kit.cli import assert_tells, run
from tests.kit.mirrors import memory_url
from tests.kit.roots import MirroredRoot, content
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror
from tests.kit.training import new_state, running, saved_run

pytestmark = pytest.mark.long

LIMIT_S = 30.0


def mirrored(folder: Path) -> tuple[Mirror, Meta]:
    """A save of two kinds on a mirror."""
    url = memory_url()
    mirror = Mirror(url, True, open_store(url))
    meta = make_save(folder, 200)
    put_attempts(mirror.store, [FIRST_ATTEMPT])
    put_on_mirror(mirror.store, folder, meta)
    return mirror, meta


def test_a_whole_staged_copy_is_pushed_like_the_original(tmp_path: Path) -> None:
    mirror, meta = mirrored(tmp_path / "trained")
    other = memory_url()
    staged = stage_save(mirror, meta, tmp_path / "eval", kinds=meta.kinds, full=True)
    assert not staged.partial
    report = push(tmp_path / "eval", other, timeout_s=LIMIT_S)
    assert (report.pending, report.failed) == (0, ())
    there = mirror_catalog(Mirror(other, True, open_store(other))).saves[meta.save_id]
    assert {a.path: a.digest for a in there.artifacts} == {a.path: a.digest for a in meta.artifacts}
    assert (there.staged_from, there.partial) == (None, False)
    assert read_status(tmp_path / "eval").pushed == {other: 0}


def test_a_part_of_a_save_is_not_pushed_and_that_is_said(tmp_path: Path) -> None:
    mirror, _ = mirrored(tmp_path / "trained")
    stage_checkpoint_step(mirror, step=200, dest=tmp_path / "eval", require_kind="model", full=True)
    with pytest.raises(CheckpointNotFound, match="only a part of a save") as refused:
        push(tmp_path / "eval", memory_url(), timeout_s=LIMIT_S)
    assert "--full" in refused.value.hint
    make_save(tmp_path / "eval", 300, ("model",), number=2)
    report = push(tmp_path / "eval", memory_url(), timeout_s=LIMIT_S)
    assert report.pending == 0
    assert [line for line in report.failed if "step 200" in line and "part of the save" in line]
    assert push(tmp_path / "eval", mirror.url, step=200, timeout_s=LIMIT_S).failed == ()  # where it came from, it is


def test_a_part_of_a_save_that_the_mirror_has_whole_is_no_failure(tmp_path: Path) -> None:
    mirror, _ = mirrored(tmp_path / "trained")
    other = memory_url()
    assert push(tmp_path / "trained", other, timeout_s=LIMIT_S).is_verified
    stage_checkpoint_step(mirror, step=200, dest=tmp_path / "eval", require_kind="model", full=True)
    assert push(tmp_path / "eval", other, timeout_s=LIMIT_S).is_verified


def test_i1_what_was_pushed_somewhere_is_no_reason_to_delete_it(tmp_path: Path) -> None:
    """A root whose trainer keeps its table elsewhere, or lost it: push must not decide what is required."""
    root = tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT])
    metas = [make_save(root, step, ("model",), number=step) for step in (100, 200)]
    assert push(root, memory_url(), timeout_s=LIMIT_S).pending == 0
    report = rotate_root(root, Retention(keep_last=1))
    assert report.deleted == ()
    assert metas[0].save_id in report.refused


def test_a_run_is_not_pushed_to_another_runs_mirror_although_its_list_is_lost(tmp_path: Path) -> None:
    mirror, _ = mirrored(tmp_path / "trained")
    make_save(tmp_path / "other", 100, ("model",), run_id="07" * 16)
    with pytest.raises(ConfigError, match="holds run"):
        push(tmp_path / "other", mirror.url, timeout_s=LIMIT_S)
    info = mirror.store.stat("writer.json")
    assert info is not None
    mirror.store.delete("writer.json", generation=info.generation)  # its metas tell whose it is
    with pytest.raises(ConfigError, match="holds run"):
        push(tmp_path / "other", mirror.url, timeout_s=LIMIT_S)


def test_i12_a_table_that_was_just_made_is_not_taken_for_one_without_mirrors(tmp_path: Path) -> None:
    root = tmp_path / "root"
    put_attempts(root, [FIRST_ATTEMPT])
    meta = make_save(root, 100, ("model",))
    UploadsTable.open(table_path(root), create=True).close()  # the start that made it was killed before it said more
    with pytest.raises(Temporary, match="does not know its mirrors"):
        drain(root, timeout_s=LIMIT_S)
    assert not is_mirrored(root, meta.save_id)
    assert not is_mirrored(root, None)
    with UploadsTable.open(table_path(root)) as table:
        table.set_mirrors([])
    with pytest.raises(ConfigError, match="has no mirror"):
        drain(root, timeout_s=LIMIT_S)


def test_a_drain_says_that_a_save_was_removed_before_it_was_uploaded(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    meta = place.commit(100)
    place.table.close()
    for path in place.root.glob("*_000100*"):
        path.unlink()
    (failed,) = drain(place.root, timeout_s=LIMIT_S).failed
    assert meta.save_id[:8] in failed
    assert "nothing of it is left" in failed


def test_i6_a_meta_is_not_written_over_artifacts_that_went_away_since_they_were_verified(tmp_path: Path) -> None:
    """A bucket may be emptied, or made anew, between the first upload of a save and its last."""
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    meta = place.commit(100)
    place.upload(limit=len(meta.artifacts))
    store = place.store
    for info in list(store.list()):
        store.delete(info.name, generation=info.generation)
    place.upload(limit=1)
    assert [info.name for info in store.list() if info.name.startswith("meta_")] == []
    place.upload()
    assert place.states() == {"verified"}
    assert mirror_catalog(place.mirrors[0]).problems == {}
    assert set(mirror_catalog(place.mirrors[0]).saves) == {meta.save_id}


def test_i6_a_part_of_a_save_never_becomes_the_mirrors_meta(tmp_path: Path) -> None:
    mirror, meta = mirrored(tmp_path / "trained")
    place = MirroredRoot(tmp_path / "root", [mirror.url])
    staged = stage_save(mirror, meta, place.root, kinds=("dcp",), full=True)
    assert staged.partial
    place.add(staged)
    place.table.release_save(meta.save_id)
    info = mirror.store.stat("meta_000200.json")
    assert info is not None
    mirror.store.delete("meta_000200.json", generation=info.generation)
    place.upload()
    assert mirror.store.stat("meta_000200.json") is None
    (record,) = [record for record in place.records() if record.role == "meta"]
    assert record.state.value == "failed"
    assert "a part of the save" in (record.last_error or "")


def test_i8_where_no_mirror_is_required_a_save_without_a_record_is_not_mirrored(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    with running(tmp_path / "root") as manager:
        manager.resume(new_state())
        for step in (1, 2):
            manager.save(step, new_state()).wait()
        assert push(tmp_path / "root", url, step=1, timeout_s=LIMIT_S).is_verified
        report = drain(tmp_path / "root", timeout_s=LIMIT_S)  # the trainer alone gives its saves records
        assert report.pending
        assert not read_status(tmp_path / "root").is_mirrored(None)
        assert not is_mirrored(tmp_path / "root", None)
        manager.wait("mirrored", timeout_s=LIMIT_S)  # of the mirrors that it was given, which are none
        manager.save(3, new_state()).wait()
    assert drain(tmp_path / "root", timeout_s=LIMIT_S).is_verified
    assert is_mirrored(tmp_path / "root", None)
    mirror = Mirror(url, False, open_store(url))
    assert sorted(meta.step for meta in mirror_catalog(mirror).saves.values()) == [1, 2, 3]


def test_a_pushed_mirror_is_still_drained_to_after_the_trainers_next_start_and_counts_for_nothing(
    tmp_path: Path,
) -> None:
    root, url, pushed = tmp_path / "root", f"file://{tmp_path}/mirror", f"file://{tmp_path}/pushed"
    saved_run(root, (1,), url)
    assert push(root, pushed, timeout_s=LIMIT_S).is_verified
    saved_run(root, (2,), url)  # waits for no mirror but its own
    assert rows(root) == [MirrorRow(url, True), MirrorRow(pushed, False, pushed=True)]
    status = read_status(root)
    assert status.is_mirrored(None)
    assert status.pushed == {pushed: 1}
    said = run("status", "--root", root)
    assert said.stdout.startswith("safe: ")
    assert f"pushed: {pushed} lacks 1 of 2 saves; `ckptmirror drain --root {root}` sends them" in said.stdout
    facts = json.loads(run("status", "--root", root, "--json").stdout)
    assert facts["mirrors"] == [
        {"url": url, "required": True, "pushed": False},
        {"url": pushed, "required": False, "pushed": True},
    ]
    assert run("drain", "--root", root).returncode == 0
    assert sorted(meta.step for meta in mirror_catalog(mirror_at(pushed)).saves.values()) == [1, 2]
    assert f"pushed: {pushed} has every save that is here" in run("status", "--root", root).stdout
    assert run("rewind", "--root", root, "--step", "1").returncode == 0
    assert rows(root)[1] == MirrorRow(pushed, False, pushed=True)
    saved_run(root, (3,), url, pushed)  # the trainer's own from now on
    assert rows(root) == [MirrorRow(url, True), MirrorRow(pushed, True)]
    saved_run(root, (4,), url)
    assert rows(root) == [MirrorRow(url, True)]


def test_a_pushed_mirror_does_not_count_beside_an_optional_one_of_the_trainer(tmp_path: Path) -> None:
    root, own, pushed = tmp_path / "root", MirrorSpec(f"file://{tmp_path}/mirror", False), f"file://{tmp_path}/pushed"
    saved_run(root, (1,), own)
    assert push(root, pushed, timeout_s=LIMIT_S).is_verified
    saved_run(root, (2,), own)
    assert is_mirrored(root, None)
    assert read_status(root).is_mirrored(None)
    with running(root, own) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.passed_over == ()


def rows(root: Path) -> list[MirrorRow]:
    with UploadsTable.open(table_path(root), read_only=True) as table:
        return table.mirrors()


def mirror_at(url: str) -> Mirror:
    return Mirror(url, False, open_store(url))


def test_i8_a_start_that_could_not_add_its_records_does_not_call_its_saves_mirrored(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1, 2), MirrorSpec(memory_url(), required=False))
    other = memory_url()
    with running(tmp_path / "root", MirrorSpec(other, required=False)) as manager:
        with exclusive(tmp_path / "root" / ROTATE_LOCK_NAME, timeout_s=LIMIT_S):  # a long rotation
            manager.resume(new_state())
        manager.wait("mirrored", timeout_s=LIMIT_S)
    there = mirror_catalog(Mirror(other, False, open_store(other))).saves.values()
    assert sorted(meta.step for meta in there) == [1, 2]


def test_a_rewind_finds_what_only_a_mirror_has_that_was_pushed_to_and_status_names_that(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/pushed"
    saved_run(root, (1, 2))
    assert run("push", "--root", root, "--mirror", url).returncode == 0
    verdict = run("status", "--root", root).stdout.splitlines()[0]
    assert verdict == (
        f"NOT SAFE: no required mirror is configured; {url}, which was pushed to, has every save that is here"
    )
    for path in root.glob("*000001*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    rewound = run("rewind", "--root", root, "--step", "1")
    assert rewound.returncode == 0, rewound.stderr
    assert json.loads(run("status", "--root", root, "--json").stdout)["mirrors"] == [
        {"url": url, "required": False, "pushed": True}
    ]


def test_a_mirror_is_no_root_even_if_somebody_pushed_from_it_before(tmp_path: Path) -> None:
    """Then a rotation would delete there what the run has nowhere else."""
    mirror, other = tmp_path / "mirror", f"file://{tmp_path}/other"
    saved_run(tmp_path / "root", (1, 2), f"file://{mirror}")
    before = content(mirror)
    (mirror / ".ckptmirror").mkdir()
    UploadsTable.open(table_path(mirror), create=True).close()
    for verb in (
        ["push", "--mirror", other],
        ["rotate", "--keep-last", "1"],
        ["rewind", "--step", "1"],
        ["rewind", "--step", "1", "--mirror", other],
        ["drain"],
    ):
        ended = run(verb[0], "--root", mirror, *verb[1:])
        assert ended.returncode == 10
        assert "is a mirror, not a directory that a trainer saves to" in ended.stderr
    with pytest.raises(NoTable, match="is a mirror"):
        CheckpointManager(mirror, [other])
    shutil.rmtree(mirror / ".ckptmirror")
    assert content(mirror) == before


@pytest.mark.parametrize("below", ["", "copies/of/step_1"])
def test_nothing_is_staged_into_another_mirror(below: str, tmp_path: Path) -> None:
    """It would take the name of the run's own meta there, and lack files."""
    url, other = (f"file://{tmp_path}/{name}" for name in ("mirror", "other"))
    saved_run(tmp_path / "root", (1,), url)
    assert run("push", "--root", tmp_path / "root", "--mirror", other).returncode == 0
    before = content(tmp_path / "other")
    ended = run("stage", url, "--step", "1", "--kind", "dcp", "--dest", tmp_path / "other" / below)
    assert ended.returncode == 10
    assert "is a mirror" in ended.stderr
    assert f"`ckptmirror stage --full --step 1 --mirror {url} --dest COPY`" in ended.stderr
    assert f"`ckptmirror push --root COPY --mirror {tmp_path}/other`" in ended.stderr
    assert content(tmp_path / "other") == before


def test_a_push_to_the_runs_own_mirror_by_another_path_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (1,), url)
    (tmp_path / "link").symlink_to(tmp_path / "mirror")
    refused = run("push", "--root", root, "--mirror", f"file://{tmp_path}/link")
    assert_tells(refused, 10, "are one directory")
    assert [one for one, _ in read_status(root).mirrors] == [url]
    assert run("drain", "--root", root).returncode == 0


def lost_on_the_second(folder: Path) -> tuple[str, str, str]:
    """A run of two starts on two required mirrors, whose disk is gone, and whose second mirror lost the newest save."""
    urls = f"file://{folder}/first", f"file://{folder}/second"
    saved_run(folder / "root", (1, 2), *urls, kinds=("dcp",))
    saved_run(folder / "root", (3, 4), *urls, kinds=("dcp",))
    shutil.rmtree(folder / "root")
    (lost,) = [meta for meta in mirror_catalog(mirror_at(urls[1])).saves.values() if meta.step == 4]
    for path in (folder / "second").glob("*000004*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return *urls, lost.save_id


@pytest.mark.parametrize("asks_first", [False, True])
def test_what_one_of_two_mirrors_lost_is_staged_from_the_other_and_pushed(asks_first: bool, tmp_path: Path) -> None:
    """The copy knew one mirror at a time, so that each waited for the other."""
    first, second, lost = lost_on_the_second(tmp_path)
    whole = tmp_path / "copy"
    assert run("stage", first, "--step", "4", "--full", "--dest", whole).returncode == 0
    if asks_first:
        assert push(whole, first, timeout_s=LIMIT_S).pending == 0  # it is there already: nothing is committed
    report = push(whole, second, timeout_s=LIMIT_S)
    assert (report.pending, report.failed) == (0, ())
    assert lost in mirror_catalog(mirror_at(second)).saves


def test_a_push_that_waits_for_a_mirror_that_the_copy_does_not_know_says_how_to_make_it_known(tmp_path: Path) -> None:
    first, second, _ = lost_on_the_second(tmp_path)
    third = f"file://{tmp_path}/third"
    shutil.copytree(tmp_path / "first", tmp_path / "third")
    whole = tmp_path / "copy"
    assert run("stage", third, "--step", "4", "--full", "--dest", whole).returncode == 0
    ended = run("push", whole, second, "--timeout", "8")
    assert ended.returncode == 8
    assert f"`ckptmirror push --root {whole} --mirror {first}` makes it known" in ended.stderr
    assert run("push", "--root", whole, "--mirror", first).returncode == 0
    assert run("push", whole, second).returncode == 0
