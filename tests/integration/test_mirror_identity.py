"""A mirror is the place that it was, and another place than the root: or nothing is sent there, and nothing deleted."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    BrokenTable,
    BucketNotFound,
    ConfigError,
    NotAuthorised,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.mirror_places import UNKNOWN, expected_places
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.places import mirrors as mirrors_module
from ckptmirror.flow.places.catalog import local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import (
    Mirror,
    MirrorSpec,
    check_places,
    expect_places,
    open_mirrors,
    remembered_places,
    seen_places,
)
from ckptmirror.flow.retention.durability import why_not_safe
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import read_status
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import file as file_store
from ckptmirror.stores import open_store, same_place
from ckptmirror.stores.base import Store
from ckptmirror.stores.file_place import LOCK_FILE
from ckptmirror.stores.same_place import identity_now
from tests.kit.claiming import start_node
from tests.kit.faults import flip_bit
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.roots import MirroredRoot, Place, names_in, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, bytes_of, make_attempt, make_save, put_attempts, put_on_mirror

KEEP_ONE = Retention(keep_last=1)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def node_of(root: Path, *urls: str) -> Node:
    return Node(root, [MirrorSpec(url) for url in urls], Retention(), events.EventBus())


def training_root(root: Path, steps: int = 2) -> list[str]:
    """Whole saves at 100, 200, ...; returns their ids."""
    put_attempts(root, [FIRST_ATTEMPT])
    return [make_save(root, 100 * n, ("model",), number=n).save_id for n in range(1, steps + 1)]


def mirrored_root(tmp_path: Path) -> tuple[Path, str]:
    """A root whose two saves are verified on a mirror below what stands for a mount point."""
    (tmp_path / "nfs").mkdir()
    root, url = tmp_path / "root", f"file://{tmp_path}/nfs/run"
    training_root(root)
    with_required_mirror(root, url)
    assert push(root, url, timeout_s=30).pending == 0
    return root, url


def with_required_mirror(root: Path, url: str) -> None:
    """The root's table, as its trainer made it."""
    with UploadsTable.open(root / names.TABLE_NAME, create=True) as table:
        table.set_mirrors([(url, True)])


def unmount(tmp_path: Path) -> None:
    (tmp_path / "nfs").rename(tmp_path / "nfs-unmounted")
    (tmp_path / "nfs").mkdir()


# -- the mirror and the root are two places -------------------------------------------------------------------


@pytest.mark.parametrize("opened", [lambda root, url: node_of(root, url), lambda root, url: push(root, url)])
def test_i1_a_mirror_that_is_the_root_under_another_name_is_refused(
    tmp_path: Path, opened: Callable[[Path, str], object]
) -> None:
    root = tmp_path / "root"
    training_root(root)
    (tmp_path / "alias").symlink_to("root")
    for url in (f"file://{tmp_path}/alias", f"file://{root}"):
        with pytest.raises(ConfigError, match="is the root") as raised:
            opened(root, url)
        assert raised.value.exit_code == 10
    assert len(whole_saves(root)) == 2


@pytest.mark.parametrize("verb", [lambda root: drain(root, timeout_s=1), lambda root: rotate_root(root, KEEP_ONE)])
def test_i1_drain_and_rotate_refuse_the_root_as_its_own_mirror(tmp_path: Path, verb: Callable[[Path], object]) -> None:
    root = tmp_path / "root"
    training_root(root)
    (tmp_path / "alias").symlink_to("root")
    with UploadsTable.open(root / names.TABLE_NAME, create=True) as table:
        table.set_mirrors([(f"file://{tmp_path}/alias", True)])
    with pytest.raises(ConfigError, match="is the root"):
        verb(root)
    assert len(whole_saves(root)) == 2


def test_a_mirror_inside_the_root_or_around_it_is_refused_whether_or_not_it_exists(tmp_path: Path) -> None:
    root = tmp_path / "outer" / "root"
    training_root(root)
    (tmp_path / "alias").symlink_to("outer")
    for inside in (f"{root}/mirror", f"{tmp_path}/alias/root/not/there/yet"):
        with pytest.raises(ConfigError, match="is inside the root"):
            node_of(root, f"file://{inside}")
    for around in (tmp_path / "outer", tmp_path / "alias"):
        with pytest.raises(ConfigError, match="is inside the mirror"):
            node_of(root, f"file://{around}")


@pytest.mark.parametrize("exists", [True, False])
def test_two_mirrors_that_are_one_directory_are_refused(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "nfs").mkdir()
    (tmp_path / "alias").symlink_to("nfs")
    if exists:
        (tmp_path / "nfs" / "run").mkdir()
    with pytest.raises(ConfigError, match="one directory"):
        node_of(tmp_path / "root", f"file://{tmp_path}/nfs/run", f"file://{tmp_path}/alias/run")


def test_the_root_of_a_trainer_is_no_mirror_of_another(tmp_path: Path) -> None:
    """Its rotation would delete there what the other run has on its mirror."""
    training_root(tmp_path / "old")
    with pytest.raises(ConfigError, match="is a directory that a trainer saves to") as refused:
        node_of(tmp_path / "new", f"file://{tmp_path}/old")
    assert f"push --root {tmp_path}/old --mirror OTHER-URL" in refused.value.hint


def test_mirrors_beside_one_another_and_beside_the_root_are_accepted(tmp_path: Path) -> None:
    specs = [MirrorSpec(f"file://{tmp_path}/{name}") for name in ("a", "b", "root2")]
    check_places(tmp_path / "root", open_mirrors([*specs, MirrorSpec("memory://beside")], tmp_path / "root", None))


def test_nothing_is_staged_from_a_mirror_into_itself(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    store = open_store(url)
    store.identity()
    put_on_mirror(store, tmp_path / "src", make_save(tmp_path / "src", 100, ("model",)))
    (tmp_path / "alias").symlink_to("mirror")
    before = [info.name for info in store.list()]
    for dest in ("mirror", "alias", "mirror/eval"):
        with pytest.raises(ConfigError, match="the mirror"):
            stage_checkpoint_step(url, step=100, dest=tmp_path / dest)
    assert [info.name for info in store.list()] == before
    assert stage_checkpoint_step(url, step=100, dest=tmp_path).path.parent == tmp_path


# -- the mirror is the one that it was ------------------------------------------------------------------------


def test_i1_a_mirror_whose_mount_is_gone_proves_nothing_and_gets_nothing(tmp_path: Path) -> None:
    root, url = mirrored_root(tmp_path)
    unmount(tmp_path)
    report = rotate_root(root, KEEP_ONE)
    assert report.deleted == ()
    assert ["is it mounted?" in reason for reason in report.refused.values()] == [True]
    assert len(whole_saves(root)) == 2
    assert list((tmp_path / "nfs").iterdir()) == []
    with pytest.raises(StoreTemporary):
        push(root, url, timeout_s=1)
    assert list((tmp_path / "nfs").iterdir()) == []


def test_i1_a_start_meets_the_mirror_that_was_used_before_or_none(tmp_path: Path) -> None:
    root, url = mirrored_root(tmp_path)
    unmount(tmp_path)
    node = node_of(root, url)
    try:
        claim = start_node(node)
        assert url in claim.unclaimed
        assert list((tmp_path / "nfs").iterdir()) == []
        (tmp_path / "nfs").rmdir()
        (tmp_path / "nfs-unmounted").rename(tmp_path / "nfs")
        claim.confirm(node.mirrors[0])  # mounted again: it goes on
        assert set(mirror_catalog(node.mirrors[0]).saves) == set(local_catalog(root).saves)
    finally:
        node.close()


@pytest.mark.parametrize("is_met", [True, False])
def test_a_mirror_without_a_parent_directory_is_away_if_it_was_met_before_and_else_a_mistake(
    tmp_path: Path, is_met: bool
) -> None:
    root, url = mirrored_root(tmp_path)
    if is_met:
        (tmp_path / "nfs").rename(tmp_path / "nfs-unmounted")
    else:
        url = f"file://{tmp_path}/mfs/run"
    node = node_of(root, url)
    try:
        if is_met:
            assert url in start_node(node).unclaimed
        else:
            with pytest.raises(BucketNotFound, match=f"there is no {tmp_path}/mfs") as raised:
                start_node(node)
            assert f"mkdir -p {tmp_path}/mfs" in raised.value.hint
    finally:
        node.close()


def test_i1_another_mirror_in_the_place_of_the_first_proves_nothing(tmp_path: Path) -> None:
    root, url = mirrored_root(tmp_path)
    shutil.copytree(tmp_path / "nfs", tmp_path / "nfs-other")
    (tmp_path / "nfs-other" / "run" / ".ckptmirror.lock").unlink()
    file_store.open(f"file://{tmp_path}/nfs-other/run").identity()  # the same objects, and an id of its own
    (tmp_path / "nfs").rename(tmp_path / "nfs-unmounted")
    (tmp_path / "nfs-other").rename(tmp_path / "nfs")
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        mirrors = open_mirrors([MirrorSpec(url)], root, table)
        for save_id in local_catalog(root).saves:
            assert "another mirror" in (why_not_safe(table, mirrors, save_id) or "")


def test_a_verb_that_only_looks_takes_nothing_for_the_mirror_of_a_root_that_remembers_none(tmp_path: Path) -> None:
    """Where it is not mounted yet, a person looks why a start is refused; afterwards the real one must be taken."""
    _, url = mirrored_root(tmp_path)
    (tmp_path / "new" / names.CONTROL_DIR).mkdir(parents=True)
    with UploadsTable.open(tmp_path / "new" / names.TABLE_NAME, create=True) as table:
        (mirror,) = open_mirrors([MirrorSpec(url)], tmp_path / "new", table, is_verb=True)
        unmount(tmp_path)
        (tmp_path / "nfs/run").mkdir()
        assert [[*mirror.store.list()], mirror.store.stat("meta_000001.json")] == [[], None]
        assert list((tmp_path / "nfs/run").iterdir()) == []
        shutil.rmtree(tmp_path / "nfs")
        (tmp_path / "nfs-unmounted").rename(tmp_path / "nfs")
        assert [*mirror.store.list()]
        assert table.mirror_identity(url) is None
        mirror.store.write("note", b"1", if_generation=0)
        assert table.mirror_identity(url) == mirror.store.identity()
        unmount(tmp_path)
        with pytest.raises(StoreTemporary):
            list(mirror.store.list())


def test_the_first_process_to_meet_a_mirror_remembers_it_for_all(tmp_path: Path) -> None:
    (tmp_path / "root" / names.CONTROL_DIR).mkdir(parents=True)
    with UploadsTable.open(tmp_path / "root" / names.TABLE_NAME, create=True) as table:
        assert table.mirror_identity("file:///a") is None
        assert table.remember_mirror_identity("file:///a", "11" * 16) == "11" * 16
        assert table.remember_mirror_identity("file:///a", "22" * 16) == "11" * 16
        assert table.mirror_identity("file:///b") is None
    with UploadsTable.open(tmp_path / "root" / names.TABLE_NAME) as table:
        table.set_mirrors([("file:///b", True)])
        assert table.mirror_identity("file:///a") == "11" * 16


def test_a_mirror_that_nobody_remembers_is_only_the_place_that_another_node_sees(tmp_path: Path) -> None:
    _, url = mirrored_root(tmp_path)
    (tmp_path / "new" / names.CONTROL_DIR).mkdir(parents=True)
    with UploadsTable.open(tmp_path / "new" / names.TABLE_NAME, create=True) as table:
        mirrors = open_mirrors([MirrorSpec(url)], tmp_path / "new", table)
        there = seen_places(mirrors)
        unmount(tmp_path)
        here = seen_places(mirrors)
        assert (here[url], expected_places(here, [here, {}])) == (None, {})
        assert expected_places(there, [here, {}]) == {}
        for own, others in ((here, [there, {url: "1" * 32}]), (there, [{url: "1" * 32}])):
            assert expected_places(own, others) == {url: ("", "another node")}
        expect_places(mirrors, expected_places(here, [here, there]))
        for ask in (lambda: mirrors[0].store.stat("any"), mirrors[0].store.identity):
            with pytest.raises(StoreTemporary, match=r"that node 2 saw under this URL: is it mounted\?"):
                ask()
        assert list((tmp_path / "nfs").iterdir()) == []
        (tmp_path / "nfs/run").mkdir()
        (tmp_path / "nfs/run" / LOCK_FILE).write_text("no id")
        unread = seen_places(mirrors)
        for others in ({url: None}, unread):
            assert expected_places(unread, [others]) == {}  # its first contact says what is wrong
        assert expected_places(unread, [there]) == expected_places(here, [there])
        assert expected_places(here, [here, unread]) == {url: (None, "node 2")}
        assert expected_places(there, [unread]) == {}
        expect_places(mirrors, expected_places(here, [unread]))
        shutil.rmtree(tmp_path / "nfs")
        with pytest.raises(StoreTemporary, match=r"is not a mirror here, and may be one on node 1: is it mounted\?"):
            mirrors[0].store.stat("any")
        expect_places(mirrors, expected_places(here, [there]))
        assert not (tmp_path / "nfs").exists()
        (tmp_path / "nfs-unmounted").rename(tmp_path / "nfs")
        assert mirrors[0].store.identity() == there[url]


def test_a_start_puts_what_a_note_remembers_into_a_table_that_was_rebuilt(tmp_path: Path) -> None:
    root, url = mirrored_root(tmp_path)
    for path in (root / names.CONTROL_DIR).glob("uploads.db*"):
        path.unlink()
    with UploadsTable.open(root / names.TABLE_NAME, create=True) as table:
        mirrors = open_mirrors([MirrorSpec(url)], root, table)
        places = remembered_places(root, table, mirrors)
        assert places == seen_places(mirrors)
        (note,) = (root / names.CONTROL_DIR).glob("mirror-*.json")
        note.write_bytes(note.read_bytes()[:20])
        assert remembered_places(root, table, mirrors) == places
    mirrors[0].store.close()


def test_each_look_asks_again_only_what_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, wrong = (open_store(f"file://{tmp_path}/{name}") for name in ("first", "second", "wrong"))
    asked: list[str] = []

    def look(store: Store) -> str | None:
        asked.append(store.url)
        if store is wrong:
            raise NotAuthorised("no")
        if len(asked) < 5:
            raise StoreTemporary("not yet")
        return None

    monkeypatch.setattr(mirrors_module, "identity_now", look)
    monkeypatch.setattr(mirrors_module, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(mirrors_module, "_MOMENT_S", 0.0)
    mirrors = [Mirror(one.url, one is not second, one) for one in (first, second, wrong)]
    seen = seen_places(mirrors, counting=[first.url, wrong.url], patience_s=60.0)
    assert seen == {first.url: None, second.url: None, wrong.url: UNKNOWN}
    assert asked == [*[first.url, second.url, wrong.url] * 2, first.url, wrong.url]


def test_a_mirror_that_another_node_is_to_make_is_used_once_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "new" / names.CONTROL_DIR).mkdir(parents=True)
    (tmp_path / "nfs").mkdir()
    url = f"file://{tmp_path}/nfs/run"
    with UploadsTable.open(tmp_path / "new" / names.TABLE_NAME, create=True) as table:
        (mirror,) = open_mirrors([MirrorSpec(url)], tmp_path / "new", table)
        expect_places([mirror], {url: (None, "node 0")})
        with pytest.raises(StoreTemporary, match=r"is not a mirror here, and may be one on node 0: is it mounted\?"):
            mirror.store.stat("any")
        assert list((tmp_path / "nfs").iterdir()) == []
        (tmp_path / "nfs/run").mkdir()
        expect_places([mirror], {url: (None, "node 0")}, read=[url])
        assert (mirror.store.stat("any"), table.mirror_identity(url)) == (None, None)
        (tmp_path / "nfs/run" / LOCK_FILE).write_text("no id")
        with pytest.raises(StorePermanent, match="holds no id"):
            mirror.store.identity()
        expect_places([mirror], {url: ("1" * 32, "node 1")})
        with pytest.raises(StoreTemporary, match=r"is it mounted\? It cannot be read: .* holds no id"):
            mirror.store.identity()
        (tmp_path / "nfs/run" / LOCK_FILE).unlink()
        expect_places([mirror], {url: (None, "node 0")})
        made = open_store(url).identity()
        assert mirror.store.stat("any") is None
        assert table.mirror_identity(url) == made


def test_nothing_is_made_where_an_expected_mirror_was_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = mirrored_root(tmp_path)
    (tmp_path / "new" / names.CONTROL_DIR).mkdir(parents=True)

    def look(store: Store) -> str | None:
        try:
            return real(store)
        finally:
            unmount(tmp_path)

    real = identity_now
    monkeypatch.setattr(same_place, "identity_now", look)
    with UploadsTable.open(tmp_path / "new" / names.TABLE_NAME, create=True) as table:
        (mirror,) = open_mirrors([MirrorSpec(url)], tmp_path / "new", table)
        expect_places([mirror], {url: (real(mirror.store), "node 1")})
        with pytest.raises(StoreTemporary, match="is not there"):
            mirror.store.stat("any")
        assert table.mirror_identity(url) is None
    assert list((tmp_path / "nfs").iterdir()) == []


def test_i12_what_is_remembered_of_a_mirror_and_broke_is_not_taken_for_nothing(tmp_path: Path) -> None:
    root, url = mirrored_root(tmp_path)
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        with table._database.change("break a fact") as connection:
            connection.execute("UPDATE facts SET row_crc = row_crc + 1 WHERE name LIKE 'mirror %'")
        (note,) = (root / names.CONTROL_DIR).glob("mirror-*.json")
        note.unlink()  # else that is what is remembered
        with pytest.raises(BrokenTable, match="mirror"):
            table.mirror_identity(url)
        mirrors = open_mirrors([MirrorSpec(url)], root, table)
        assert all(why_not_safe(table, mirrors, save_id) for save_id in local_catalog(root).saves)


@pytest.mark.parametrize("below", ["run", "team/run", ""])
def test_no_mirror_is_begun_below_a_mount_point_that_is_not_mounted(tmp_path: Path, below: str) -> None:
    nfs = tmp_path / "my nfs"
    (nfs / below).parent.mkdir(parents=True, exist_ok=True)
    nfs.mkdir(exist_ok=True)
    fstab = tmp_path / "fstab"
    listed = str(nfs).replace(" ", "\\040")
    fstab.write_text(f"# a comment {tmp_path}\nserver:/export {listed} nfs4 defaults,nofail 0 0\n")
    store = file_store.FileStore(nfs / below, fstab=fstab)
    for ask in (lambda: store.stat("x"), store.identity, lambda: store.write("x", b"1", if_generation=0)):
        with pytest.raises(StoreTemporary, match="is not mounted"):
            ask()
    assert not [path for path in nfs.rglob("*") if path.is_file()]
    fstab.write_text(f"server:/export {tmp_path}/elsewhere nfs4 defaults 0 0\nnone / ext4\nproc /proc proc\n")
    store.write("x", b"1", if_generation=0)


_BOUND_ON_ITSELF = """
import subprocess, sys
from pathlib import Path
from ckptmirror.core.errors import StoreTemporary
from ckptmirror.stores.file import FileStore
nfs, fstab = Path(sys.argv[1]), Path(sys.argv[2])
subprocess.run(["mount", "--bind", str(nfs), str(nfs)], check=True)
try:
    FileStore(nfs, fstab=fstab).write("x", b"1", if_generation=0)
except StoreTemporary as error:
    print(error)
"""


def test_a_service_manager_that_binds_the_path_on_itself_does_not_mount_it(tmp_path: Path) -> None:
    alone = ["unshare", "--mount"]
    try:
        subprocess.run([*alone, "mount", "--bind", str(tmp_path), str(tmp_path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount")
    (tmp_path / "nfs").mkdir()
    (tmp_path / "fstab").write_text(f"server:/export {tmp_path}/nfs nfs defaults,nofail 0 0\n")
    command = [*alone, sys.executable, "-c", _BOUND_ON_ITSELF, str(tmp_path / "nfs"), str(tmp_path / "fstab")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "is not mounted" in done.stdout, done.stderr
    assert list((tmp_path / "nfs").iterdir()) == []


def test_a_mirror_that_was_begun_is_used_whatever_fstab_says_later(tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    file_store.FileStore(tmp_path / "nfs", fstab=fstab).write("x", b"1", if_generation=0)
    fstab.write_text(f"server:/export {tmp_path}/nfs nfs4 defaults 0 0\n")
    assert file_store.FileStore(tmp_path / "nfs", fstab=fstab).read("x", limit_bytes=1)[0] == b"1"


# -- what stage may do where a trainer saves -------------------------------------------------------------------


def test_i1_refresh_in_a_training_root_leaves_another_save_to_rotation(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_save(place.root, 100, ("model",), number=1)
    stale = make_save(place.root, 200, ("model",), number=2)
    rewound = make_attempt(1, first)
    current = make_save(tmp_path / "other", 200, ("model",), rewound, 1)
    for root, meta in ((place.root, first), (place.root, stale), (tmp_path / "other", current)):
        put_on_mirror(place.spy, root, meta)  # type: ignore[arg-type]
    for at in (place.root, place.spy):
        put_attempts(at, [FIRST_ATTEMPT, rewound])  # type: ignore[arg-type]
    before = bytes_of(place.root, stale)
    with caplog.at_level(logging.INFO, "ckptmirror.stage"):
        staged = stage_checkpoint_step(place.mirror, step=200, dest=place.root, refresh=True, full=True)
    assert staged.path.name == f"model_000200-{current.save_id[:8]}.pt"
    assert set(whole_saves(place.root)) == {first.save_id, stale.save_id, current.save_id}
    assert bytes_of(place.root, stale) == before
    assert [record.getMessage() for record in caplog.records] == [
        "meta_000200.json: stale, but a trainer saves here: it stays until rotation may delete it"
    ]


def test_i1_what_a_rotation_began_to_delete_is_not_finished_by_stage(place: Place, tmp_path: Path) -> None:
    half_deleted = make_save(place.root, 200, ("model",), number=1)
    other = make_save(tmp_path / "other", 200, ("model",), number=2)
    put_on_mirror(place.spy, tmp_path / "other", other)  # type: ignore[arg-type]
    put_attempts(place.root, [FIRST_ATTEMPT])
    (place.root / names.TRASH_DIR).mkdir()
    (place.root / "meta_000200.json").rename(place.root / names.TRASH_DIR / "meta_000200.json.0123abcd")
    stage_checkpoint_step(place.mirror, step=200, dest=place.root, full=True)
    assert {path for path in bytes_of(place.root, half_deleted) if not (place.root / path).exists()} == set()
    assert list(whole_saves(place.root)) == [other.save_id]


def test_i1_of_two_metas_of_one_save_in_a_training_root_one_goes_only_when_the_other_was_verified(
    place: Place,
) -> None:
    meta = place.save(200, ("model",))
    put_attempts(place.root, [FIRST_ATTEMPT])
    make_save(place.root, 200, ("model",), save_id=meta.save_id, tag=meta.save_id[:8])
    flip_bit(place.root / "model_000200.pt")
    stage_checkpoint_step(place.mirror, step=200, dest=place.root)
    assert len(list(place.root.glob("meta_*"))) == 2
    stage_checkpoint_step(place.mirror, step=200, dest=place.root, refresh=True)
    assert list(whole_saves(place.root)) == [meta.save_id]
    assert len(list(place.root.glob("meta_*"))) == 1


def test_another_runs_save_is_not_staged_into_a_training_root(place: Place, tmp_path: Path) -> None:
    put_attempts(place.root, [FIRST_ATTEMPT])
    foreign = make_save(tmp_path / "other", 500, ("model",), run_id="ab" * 16)
    store = open_store("memory://another-run")
    put_on_mirror(store, tmp_path / "other", foreign)
    put_attempts(store, [FIRST_ATTEMPT], run_id="ab" * 16)
    with pytest.raises(ConfigError, match="run abababab") as raised:
        stage_checkpoint_step(Mirror(store.url, True, store), step=500, dest=place.root)
    assert "--dest" in raised.value.hint
    assert names_in(place.root) == []
    assert stage_checkpoint_step(Mirror(store.url, True, store), step=500, dest=place.dest).step == 500


# -- one bad object, and a lost list --------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["too large", "refused", "not valid"])
def test_one_meta_that_cannot_be_read_keeps_nobody_from_the_other_steps(tmp_path: Path, damage: str) -> None:
    mirrored = MirroredRoot(tmp_path / "root", [f"memory://{tmp_path.name}"])
    store = mirrored.store
    good = make_save(tmp_path / "src", 100, ("model",))
    put_on_mirror(store, tmp_path / "src", good)
    put_attempts(store, [FIRST_ATTEMPT])
    data = b" " * (65 * 1024 * 1024) if damage == "too large" else b"{}"
    store.write("meta_000300.json", data, if_generation=0)
    if damage == "refused":
        refusal = StoreFault(
            "read", "meta_000300", times=0, when="before", error=lambda: NotAuthorised("not for this object")
        )
        store.script(refusal)
    catalog = mirror_catalog(mirrored.mirrors[0])
    assert list(catalog.saves) == [good.save_id]
    assert list(catalog.problems) == ["meta_000300.json"]
    assert stage_checkpoint_step(mirrored.mirrors[0], step="latest", dest=tmp_path / "eval").step == 100


def test_a_mirror_that_refuses_every_meta_is_not_empty(tmp_path: Path) -> None:
    store = FaultyStore(open_store(f"memory://{tmp_path.name}"))
    put_on_mirror(store, tmp_path / "src", make_save(tmp_path / "src", 100, ("model",)))
    store.script(StoreFault("read", "meta_", times=0, when="before", error=lambda: NotAuthorised("expired")))
    with pytest.raises(NotAuthorised):
        mirror_catalog(Mirror(store.url, True, store))


def test_status_of_a_root_that_lost_its_list_knows_the_order_from_the_metas(tmp_path: Path) -> None:
    root = tmp_path / "root"
    training_root(root)
    with_required_mirror(root, f"memory://{tmp_path.name}")
    push(root, f"memory://{tmp_path.name}", timeout_s=30)
    (root / names.ATTEMPTS_NAME).unlink()
    status = read_status(root)
    assert [line.standing for line in status.saves] == ["current", "current"]
    assert status.newest_safe_step == 200
