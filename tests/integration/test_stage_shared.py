"""Staging into a directory that others may write to: what is said about it, and which files there are believed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from tests.kit.cli import run
from tests.kit.roots import Place, make_mirrored

_OTHER = 65534
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
        f"Close it (`chmod go-w {place.dest}`), or stage into another directory"
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
