"""One root, one table: where it lies, who says so, and what happens where the root is not mounted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.errors import BrokenTable, ConfigError, ForeignTable, NoTable, Temporary
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import is_mirrored, read_status
from ckptmirror.local.table_place import open_table, table_path
from tests.kit.claiming import start_node
from tests.kit.cli import assert_tells, run
from tests.kit.mirrors import memory_url
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts

Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A trainer's start."""
    nodes: list[Node] = []

    def start_one(*urls: str, root: str = "root", state_dir: Path | None = None) -> Node:
        specs = [MirrorSpec(url) for url in urls]
        nodes.append(Node(tmp_path / root, specs, Retention(), events.EventBus(), state_dir=state_dir))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.close()


@pytest.fixture
def saved(tmp_path: Path, start: Start) -> tuple[Path, Path, str, list[Meta]]:
    """A root with two saves, its table outside of it, and a required mirror that has neither of them."""
    root, state_dir, url = tmp_path / "root", tmp_path / "state", memory_url()
    metas = [make_save(root, step, ("model",), number=step) for step in (100, 200)]
    put_attempts(root, [FIRST_ATTEMPT])
    node = start(url, state_dir=state_dir)
    start_node(node)
    node.close()
    return root, state_dir, url, metas


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def every_verb(root: Path, tmp_path: Path) -> dict[str, Callable[[], object]]:
    """What a person runs who knows of no state_dir."""
    return {
        "status": lambda: read_status(root),
        "is_mirrored": lambda: is_mirrored(root, None),
        "drain": lambda: drain(root, timeout_s=0.1),
        "push": lambda: push(root, f"file://{tmp_path}/pushed", timeout_s=0.1),
        "rotate": lambda: rotate_root(root, Retention(keep_last=1)),
    }


# -- the note ----------------------------------------------------------------------------------------------------


def test_i1_verbs_that_know_of_no_state_dir_use_the_trainers_table(
    saved: tuple[Path, Path, str, list[Meta]], tmp_path: Path
) -> None:
    root, state_dir, url, metas = saved
    (tmp_path / "pushed").mkdir()
    pushed = f"file://{tmp_path}/pushed"
    assert push(root, pushed, timeout_s=60.0).pending == 0
    assert not (root / names.TABLE_NAME).exists()
    assert [url for url, _ in read_status(root).mirrors] == [url, pushed]
    report = rotate_root(root, Retention(keep_last=1))
    assert report.deleted == ()
    assert url in report.refused[metas[0].save_id]
    assert drain(root, only=[pushed], timeout_s=30.0).pending == 0
    assert table_path(root) == state_dir / "uploads.db"
    assert not (root / names.TABLE_NAME).exists()


def test_a_trainer_without_its_state_dir_goes_on_with_the_noted_table(
    saved: tuple[Path, Path, str, list[Meta]], start: Start
) -> None:
    root, state_dir, url, _ = saved
    assert start(url).table.path == state_dir / "uploads.db"
    assert not (root / names.TABLE_NAME).exists()


def test_a_root_with_its_table_inside_needs_no_note(tmp_path: Path, start: Start) -> None:
    assert start(memory_url()).table.path == tmp_path / "root" / names.TABLE_NAME
    assert not (tmp_path / "root" / names.TABLE_NOTE_NAME).exists()


@pytest.mark.parametrize("verb", ["status", "is_mirrored", "drain", "push", "rotate"])
@pytest.mark.parametrize("loss", ["elsewhere", "broken note"])
def test_where_the_table_is_not_on_this_machine_no_other_is_made(
    saved: tuple[Path, Path, str, list[Meta]], tmp_path: Path, verb: str, loss: str
) -> None:
    root, state_dir, _, _ = saved
    (tmp_path / "pushed").mkdir()
    if loss == "elsewhere":
        state_dir.rename(tmp_path / "of another machine")
    else:
        (root / names.TABLE_NOTE_NAME).write_bytes(b'{"path": "uploads.db"}')
    before = listing(tmp_path)
    with pytest.raises(NoTable if loss == "elsewhere" else ConfigError, match=r"table") as caught:
        every_verb(root, tmp_path)[verb]()
    assert "state_dir" in caught.value.hint
    assert listing(tmp_path) == before


def test_the_command_line_says_where_the_table_is(saved: tuple[Path, Path, str, list[Meta]]) -> None:
    root, state_dir, _, _ = saved
    assert "NOT SAFE" in run("status", "--root", root).stdout
    shutil.rmtree(state_dir)
    host = json.loads((root / names.TABLE_NOTE_NAME).read_text())["host"]
    assert_tells(run("status", "--root", root), 10, str(state_dir / "uploads.db"), host)


def test_a_trainer_makes_a_lost_table_anew_at_the_place_that_it_is_told(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    root, state_dir, url, metas = saved
    shutil.rmtree(state_dir)
    with pytest.raises(NoTable):
        start(url)
    node = start(url, state_dir=tmp_path / "new")
    assert {save.save_id for save in node.table.saves()} == {meta.save_id for meta in metas}
    assert table_path(root) == tmp_path / "new" / "uploads.db"


def test_the_old_table_of_a_host_that_leads_again_is_not_believed(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hosts that mount one root each have a table at the same path, and what only the other one knew has changed."""
    root, state_dir, url, metas = saved
    state_dir.rename(tmp_path / "of the first host")
    node = start(url, state_dir=state_dir)
    start_node(node)
    node.close()
    for path in [root / one.path for one in metas[0].artifacts] + [root / "meta_000100.json"]:
        path.unlink()  # as its rotation would
    state_dir.rename(tmp_path / "of the second host")
    (tmp_path / "of the first host").rename(state_dir)
    node = start(url, state_dir=state_dir)
    assert {save.save_id for save in node.table.saves()} == {metas[1].save_id}
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert "uploads.db is out of date" in said[0]
    assert [path.name for path in state_dir.glob("uploads.db*broken*")]
    caplog.clear()
    start_node(node)
    own = node.table.own_id()
    node.close()
    assert start(url, state_dir=state_dir).table.own_id() == own
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_note_that_cannot_be_read_is_written_anew_by_the_trainer(
    saved: tuple[Path, Path, str, list[Meta]], start: Start
) -> None:
    root, state_dir, url, _ = saved
    long = [
        json.dumps({"host": "h", "path": f"/{path}/uploads.db"}).encode() for path in ("x" * 300, "x/" * 3000, "\ud800")
    ]
    for broken in (
        b"",
        b"[]",
        b"{}",
        b'{"host": "h", "path": 3}',
        b"\xff",
        b'{"host": "h", "path": "relative"}',
        *long,
    ):
        (root / names.TABLE_NOTE_NAME).write_bytes(broken)
        with pytest.raises(ConfigError):
            start(url)
        start(url, state_dir=state_dir).close()
        assert table_path(root) == state_dir / "uploads.db"


@pytest.mark.parametrize("name", ["thesis.txt", "uploads.db-wal", "uploads.db"])
def test_a_planted_note_makes_a_start_move_no_file_of_the_users(tmp_path: Path, start: Start, name: str) -> None:
    root, mine = tmp_path / "root", tmp_path / "home" / name
    make_save(root, 100, ("model",), number=100)
    put_attempts(root, [FIRST_ATTEMPT])
    mine.parent.mkdir()
    mine.write_bytes(b"years of work\n" * 1000)
    (root / names.TABLE_NOTE_NAME).parent.mkdir(exist_ok=True)
    (root / names.TABLE_NOTE_NAME).write_text(json.dumps({"host": "here", "path": str(mine)}))
    with pytest.raises(BrokenTable if name == "uploads.db" else ConfigError) as caught:
        start_node(start(memory_url()))
    assert "state_dir" in caught.value.hint
    assert listing(mine.parent) == [name]
    assert mine.read_bytes() == b"years of work\n" * 1000


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_second_state_dir_is_refused_and_both_places_are_named(tmp_path: Path, start: Start, first: str) -> None:
    root, url, other = tmp_path / "root", memory_url(), tmp_path / "other"
    node = start(url, state_dir=tmp_path / "state" if first == "outside" else None)
    start_node(node)
    present = node.table.path
    node.close()
    for attempt in (
        lambda: start(url, state_dir=other),
        lambda: drain(root, state_dir=other),
        lambda: read_status(root, state_dir=other),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert str(present) in str(caught.value)
        assert str(other / "uploads.db") in str(caught.value)
    assert not other.exists()
    other.mkdir()
    for path in present.parent.glob("uploads.db*"):  # as the hint says
        path.rename(other / path.name)
    assert start(url, state_dir=other).table.identity() is not None
    assert table_path(root) == other / "uploads.db"


def test_a_table_that_moves_into_the_root_is_noted_no_more(
    saved: tuple[Path, Path, str, list[Meta]], start: Start
) -> None:
    root, state_dir, url, _ = saved
    for path in state_dir.glob("uploads.db*"):
        path.rename(root / names.CONTROL_DIR / path.name)
    assert start(url, state_dir=root / names.CONTROL_DIR).table.identity() is not None
    assert table_path(root) == root / names.TABLE_NAME


def test_a_copy_of_a_root_does_not_speak_with_the_table_of_the_first(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    root, state_dir, url, _ = saved
    shutil.copytree(root, tmp_path / "copy")
    for verb in ("status", "is_mirrored", "drain", "push", "rotate"):
        (tmp_path / "pushed").mkdir(exist_ok=True)
        with pytest.raises(ForeignTable):
            every_verb(tmp_path / "copy", tmp_path)[verb]()
    assert start(url, root="copy", state_dir=tmp_path / "own").table.path == tmp_path / "own" / "uploads.db"
    assert table_path(root) == state_dir / "uploads.db"


def test_a_state_dir_of_another_root_leaves_no_note(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    _, state_dir, url, _ = saved
    with pytest.raises(ForeignTable):
        start(url, root="other", state_dir=state_dir)
    assert not (tmp_path / "other").exists()


# -- a root that is not mounted ----------------------------------------------------------------------------------


def facts_of(state_dir: Path, root: Path) -> list[object]:
    with open_table(root, state_dir) as table:
        return [table.mirrors(), table.saves(), table.records()]


def test_i12_a_start_on_a_root_that_is_not_mounted_changes_nothing(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    root, state_dir, url, metas = saved
    before, told = listing(root), facts_of(state_dir, root)
    root.rename(tmp_path / "hidden")
    root.mkdir()
    for attempt in (
        lambda: start(memory_url(), state_dir=state_dir),
        lambda: drain(root, state_dir=state_dir, timeout_s=0.1),
        lambda: rotate_root(root, Retention(keep_last=1), state_dir=state_dir),
        lambda: read_status(root, state_dir=state_dir),
    ):
        with pytest.raises(Temporary, match="is it mounted") as caught:
            attempt()
        assert caught.value.exit_code == 5
        assert "uploads.db" in caught.value.hint
    assert listing(root) == []
    root.rmdir()
    with pytest.raises(Temporary):
        start(url, state_dir=state_dir)  # what lies above it is not mounted
    (tmp_path / "hidden").rename(root)
    assert listing(root) == before
    assert facts_of(state_dir, root) == told
    again = start(url, state_dir=state_dir)
    assert again.reconciled.gone == ()
    assert {save.save_id for save in again.table.saves()} == {meta.save_id for meta in metas}


def test_a_root_restored_from_a_copy_keeps_its_table(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    root, state_dir, url, metas = saved
    root.rename(tmp_path / "before")
    shutil.copytree(tmp_path / "before", root)
    again = start(url, state_dir=state_dir)
    start_node(again)
    assert {save.save_id for save in again.table.saves()} == {meta.save_id for meta in metas}


def test_a_root_that_lost_its_control_directory_is_the_same_root(
    saved: tuple[Path, Path, str, list[Meta]], start: Start
) -> None:
    root, state_dir, url, metas = saved
    shutil.rmtree(root / names.CONTROL_DIR)
    assert {save.save_id for save in start(url, state_dir=state_dir).table.saves()} == {meta.save_id for meta in metas}


def test_a_root_that_was_emptied_on_purpose_starts_once_the_table_is_moved_away(
    saved: tuple[Path, Path, str, list[Meta]], start: Start, tmp_path: Path
) -> None:
    root, state_dir, url, _ = saved
    shutil.rmtree(root)
    with pytest.raises(Temporary):
        start(url, state_dir=state_dir)
    state_dir.rename(tmp_path / "away")
    assert start(url, state_dir=state_dir).table.saves() == []


def test_an_empty_table_misses_nothing_in_an_empty_root(tmp_path: Path, start: Start) -> None:
    first = start(memory_url(), state_dir=tmp_path / "state")
    start_node(first)
    first.close()
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").mkdir()
    assert start(memory_url(), state_dir=tmp_path / "state").table.saves() == []
