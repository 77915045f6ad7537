"""Staging into a directory that others may write to: what is said about it, and which files there are believed."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import DestinationOccupied
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.local.inventory import read_inventory
from tests.kit.cli import run
from tests.kit.faults import flip_bit
from tests.kit.roots import Place, content, make_mirrored, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts

_OTHER, _THIRD = 65534, 65533
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- what is said --------------------------------------------------------------------------------------------


def _warnings(place: Place, caplog: pytest.LogCaptureFixture, dest: Path) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stage_checkpoint_step(place.mirror, step=200, dest=dest, require_kind="model")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702], ids=lambda mode: f"{mode:o}")
def test_a_destination_that_everyone_may_write_to_is_named_once_with_the_command_that_closes_it(
    place: Place, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    place.save(kinds=("model",))
    place.dest.mkdir()
    place.dest.chmod(mode)
    (said,) = _warnings(place, caplog, place.dest)
    assert said == (
        f"others may change what is staged in {place.dest}, before it is loaded too: "
        f"everyone may write to {place.dest}. "
        f"Close it (`chmod go-w {place.dest}`), or stage into another directory."
    )
    place.dest.chmod(0o755)
    assert _warnings(place, caplog, place.dest) == []


def test_a_directory_above_that_everyone_may_write_to_is_named_unless_it_is_sticky(
    place: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    place.save(kinds=("model",))
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    (said,) = _warnings(place, caplog, above / "a" / "eval")
    assert f"everyone may write to {above}." in said
    above.chmod(0o1777)
    assert _warnings(place, caplog, above / "b" / "eval") == []


def test_a_link_in_a_directory_that_everyone_may_write_to_could_lead_elsewhere(
    place: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    place.save(kinds=("model",))
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    place.dest.mkdir()
    (above / "link").symlink_to(place.dest)
    (said,) = _warnings(place, caplog, above / "link")
    assert f"everyone may write to {above}." in said


@needs_root
def test_a_group_of_others_and_another_owner_are_named_and_a_group_of_one_is_not(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.save(kinds=("model",))
    place.dest.mkdir()
    place.dest.chmod(0o775)
    assert _warnings(place, caplog, place.dest) == []  # the group root of the user root
    os.chown(place.dest, -1, _OTHER)
    (said,) = _warnings(place, caplog, place.dest)
    assert f"group id {_OTHER} may write to {place.dest}." in said
    place.dest.chmod(0o755)
    assert _warnings(place, caplog, place.dest) == []
    os.chown(place.dest, _OTHER, -1)
    (said,) = _warnings(place, caplog, place.dest)
    assert f"user id {_OTHER} may write to {place.dest}. Stage into a directory of your own" in said
    assert "`mkdir -p -m 700 ~/staged`" in said


@pytest.mark.parametrize("as_json", [False, True])
def test_the_verb_says_it_on_stderr_in_one_line_and_its_answer_stays(tmp_path: Path, as_json: bool) -> None:
    _, url, _ = make_mirrored(tmp_path, 200)
    dest = tmp_path / "eval"
    dest.mkdir()
    dest.chmod(0o1777)
    answer = run("stage", url, "--step", "200", "--kind", "model", "--dest", dest, *(["--json"] if as_json else []))
    assert answer.returncode == 0
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"WARNING ckptmirror.stage: others may change what is staged in {dest}")
    path = str(dest / "model_000200.pt")
    found = json.loads(answer.stdout) if as_json else answer.stdout.strip()
    assert found == ({"path": path, "step": 200, "kind": "model"} if as_json else path)
    fresh = run("stage", url, "--step", "200", "--kind", "model", "--dest", tmp_path / "own")
    assert (fresh.returncode, fresh.stderr) == (0, "")


# -- what is believed ----------------------------------------------------------------------------------------


def _give_away(*paths: Path) -> None:
    for path in paths:
        for one in (path, *path.rglob("*")):
            os.chown(one, _OTHER, _OTHER)


def _stage(place: Place, kind: Kind, **more: Any) -> Path:
    return stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind=kind, **more).path


def _assert_ours(place: Place, meta: Meta, kind: Kind) -> None:
    """The one save there is what was saved, and this user's."""
    (there,) = whole_saves(place.dest).values()
    assert (there.save_id, there.kinds) == (meta.save_id, (kind,))
    paths = [place.dest / names.SaveName(200, there.tag).meta]
    for artifact in there.artifacts:
        paths += [place.dest / artifact.path, (place.dest / artifact.path).parent]
    assert {path.stat().st_uid for path in paths} == {os.geteuid()}


def _top(kind: Kind) -> str:
    return {"dcp": "dcp_000200", "model": "model_000200.pt"}[kind]


@needs_root
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("kind", ["dcp", "model"])
@pytest.mark.parametrize("whose", ["meta and files", "files", "one file"])
def test_what_another_user_planted_in_a_shared_destination_is_fetched_again(
    place: Place, kind: Kind, whose: str, refresh: bool
) -> None:
    """Of the right size it was believed, and its owner could change it at any time."""
    meta = place.save()
    top, meta_path = _stage(place, kind), place.dest / "meta_000200.json"
    place.dest.chmod(0o1777)
    one = next(path for path in (top, *sorted(top.rglob("*"))) if path.is_file())
    flip_bit(one)
    _give_away(*{"meta and files": [meta_path, top], "files": [top], "one file": [one]}[whose])
    place.spy.downloads.clear()
    assert _stage(place, kind, refresh=refresh) == place.dest / _top(kind)
    assert place.spy.downloads
    _assert_ours(place, meta, kind)
    assert read_inventory(place.dest).trash == ()
    place.spy.downloads.clear()
    _stage(place, kind)
    assert place.spy.downloads == []


@needs_root
def test_what_the_owner_of_the_destination_put_there_is_believed(place: Place) -> None:
    """Who owns the directory may replace anything in it, at any time."""
    place.save()
    path = _stage(place, "dcp")
    _give_away(place.dest)
    place.spy.downloads.clear()
    assert _stage(place, "dcp") == path
    assert place.spy.downloads == []


@needs_root
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_files_of_this_user_under_a_planted_meta_are_compared_with_their_checksums(place: Place, kind: Kind) -> None:
    """Of another size or not: a file of this user that no meta of this user explains is never moved away."""
    meta = place.save()
    top, meta_path = _stage(place, kind), place.dest / "meta_000200.json"
    _give_away(meta_path)
    place.spy.downloads.clear()
    assert _stage(place, kind) == top
    assert place.spy.downloads == []
    _assert_ours(place, meta, kind)
    one = next(path for path in (top, *sorted(top.rglob("*"))) if path.is_file())
    flip_bit(one)
    thesis = one.read_bytes()
    _give_away(meta_path)
    assert _stage(place, kind) != top
    assert one.read_bytes() == thesis
    _assert_ours(place, meta, kind)


@needs_root
def test_a_planted_meta_adds_no_file_to_a_staged_save(place: Place) -> None:
    """The mirror has the model alone; the planted meta names a DCP directory of the planter's too."""
    meta = place.save(kinds=("model",))
    make_save(place.dest, 200, ("dcp", "model"), save_id=meta.save_id)
    _give_away(*(path for path in place.dest.iterdir()))
    _stage(place, "model")
    _assert_ours(place, meta, "model")


@needs_root
def test_a_planted_meta_in_the_trash_condemns_no_file(place: Place) -> None:
    place.save(kinds=("model",))
    _stage(place, "model")
    other = make_save(place.dest, 200, ("dcp",), number=2)
    trash = place.dest / names.TRASH_DIR
    trash.mkdir()
    listed = place.dest / names.SaveName(200, other.tag).meta
    planted = listed.rename(trash / f"{listed.name}.0123456789abcdef")
    _give_away(planted)
    _stage(place, "model", refresh=True)
    assert all((place.dest / artifact.path).exists() for artifact in other.artifacts)


@needs_root
def test_a_stage_into_a_root_never_takes_another_users_save_from_his_trainer(place: Place) -> None:
    meta = place.save()
    put_attempts(place.root, [FIRST_ATTEMPT])
    _give_away(*place.root.iterdir())
    before = content(place.root)
    with pytest.raises(DestinationOccupied, match=f"belongs to user id {_OTHER}, and a trainer saves there") as told:
        stage_checkpoint_step(place.mirror, step=200, dest=place.root, require_kind="dcp")
    assert "mkdir -p -m 700 ~/staged" in told.value.hint
    assert content(place.root) == before
    assert whole_saves(place.root).keys() == {meta.save_id}


@needs_root
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_what_this_user_may_not_move_is_refused_before_the_download(kind: Kind) -> None:
    """Only their owners rename a file in a sticky directory, or a directory that is closed to others, to the trash."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Place(Path(folder))
        place.save()
        top = _stage(place, kind)
        place.dest.chmod(0o1777 if kind == "model" else 0o777)
        (place.dest / names.CONTROL_DIR).chmod(0o777)
        for lock in (place.dest / names.CONTROL_DIR).iterdir():
            lock.chmod(0o666)
        _give_away(top)
        place.spy.downloads.clear()
        os.seteuid(_THIRD)
        try:
            with pytest.raises(
                DestinationOccupied, match=f"belongs to user id {_OTHER}, who alone may move it"
            ) as told:
                _stage(place, kind)
        finally:
            os.seteuid(0)
        assert "mkdir -p -m 700 ~/staged" in told.value.hint
        assert place.spy.downloads == []
