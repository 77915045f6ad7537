"""``ckptmirror timeline`` on real runs: what happened is in it, from the journal, the table and the metas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ckptmirror import Retention, StopRequest
from ckptmirror.core import names
from ckptmirror.core.errors import DeadlinePassed
from ckptmirror.core.journal import entries_from_lines
from ckptmirror.local.uploads import RootIdentity, UploadsTable
from tests.kit.cli import assert_tells, run
from tests.kit.faults import faulty, refusing
from tests.kit.processes import killed_at, run_ranks
from tests.kit.roots import control, make_mirrored, make_pending, require, whole
from tests.kit.training import new_state, running, saved_run, train

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"
Bars = list[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """A run with a failed upload, two attempts and a rotation, and where it is."""

    root: Path
    url: str
    bars: Bars
    said: dict[str, Any]

    def of(self, kind: str) -> Bars:
        return [bar for bar in self.bars if bar["kind"] == kind]


def timeline_of(root: Path) -> dict[str, Any]:
    ended = run("timeline", "--root", root, "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def steps(bars: Bars) -> list[tuple[int | None, str]]:
    return [(bar["step"], bar["outcome"]) for bar in bars]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Step 1 is refused by the mirror; the next attempt sends it, saves 2 and 3, and rotates 1 away."""
    folder = tmp_path_factory.mktemp("timeline")
    root, url = folder / "root", f"file://{folder}/mirror"
    with running(root, url) as manager:
        faulty(manager, refusing())
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(1, state).wait()
        with pytest.raises(DeadlinePassed):
            manager.wait("mirrored", timeout_s=30)
    saved_run(root, (2, 3), url, retention=Retention(keep_last=2))
    rotated = run("rotate", "--root", root, "--keep-last", "1")
    assert rotated.returncode == 0, rotated.stderr
    said = timeline_of(root)
    return Place(root, url, said["bars"], said)


@pytest.mark.short
def test_every_save_is_copied_written_uploaded_and_committed(place: Place):
    for kind in ("host_copy", "commit"):
        assert steps(place.of(kind)) == [(1, "done"), (2, "done"), (3, "done")]
        assert [bar["rank"] for bar in place.of(kind)] == [0, 0, 0]
    assert {bar["save_id"] for bar in place.of("commit")} == {bar["save_id"] for bar in place.of("host_copy")}
    assert {bar["step"] for bar in place.of("mirror_commit")} == {1, 2, 3}
    assert {bar["mirror"] for bar in place.of("mirror_commit")} == {place.url}
    for bar in place.of("commit") + place.of("upload"):
        assert bar["duration_s"] > 0


def test_the_upload_that_failed_and_its_second_try_are_two_bars(place: Place):
    uploads = [bar for bar in place.of("upload") if bar["step"] == 1]
    assert [bar["outcome"] for bar in uploads] == ["failed", "done"]
    assert "refused (a scripted fault)" in uploads[0]["reason"]
    assert steps(bar for bar in place.of("upload") if bar["step"] != 1) == [(2, "done"), (3, "done")]


def test_the_rotations_say_who_deleted_what_and_why(place: Place):
    deleted = [bar for bar in place.of("rotation") if bar["outcome"] == "done"]
    assert [(bar["step"], bar["by"]) for bar in deleted] == [(1, "trainer"), (2, "rotate")]
    assert all(bar["reason"] and bar["save_id"] for bar in deleted)


def test_both_attempts_are_there_and_say_how_they_ended(place: Place):
    first, second = place.of("attempt")
    assert (first["step"], first["outcome"]) == (None, "failed")
    assert "incomplete" in first["reason"]
    assert (second["step"], second["outcome"]) == (1, "done")
    assert first["end_utc"] <= second["begin_utc"]
    resumes = place.of("resume")
    assert [(bar["step"], bar["reason"]) for bar in resumes] == [
        (None, "from scratch"),
        (1, "continues from step 1 (disk)"),
    ]
    assert [bar["attempt"] for bar in place.of("host_copy")] == [first["attempt"], second["attempt"], second["attempt"]]


def test_nothing_is_lost_unfinished_or_out_of_order(place: Place):
    assert (place.said["lost_lines"], place.said["problems"], place.said["clock_jumps"]) == (0, [], [])
    assert not [bar for bar in place.bars if bar["outcome"] == "unfinished"]
    assert [bar["begin_utc"] for bar in place.bars] == sorted(bar["begin_utc"] for bar in place.bars)


@pytest.mark.parametrize("ending", ["svg", "html", "SVG"])
def test_it_is_drawn_into_one_file_whose_path_is_printed(place: Place, ending: str, tmp_path: Path):
    out = tmp_path / f"run.{ending}"
    out.write_text("an older one")
    ended = run("timeline", "--root", place.root, "--out", out)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{out}\n", "")
    assert list(tmp_path.iterdir()) == [out]
    root = ElementTree.fromstring(out.read_text().removeprefix("<!DOCTYPE html>"))
    groups = [group for group in root.iter(f"{SVG}g") if group.get("data-kind")]
    drawn = {(group.get("data-kind"), group.get("data-step")) for group in groups}
    assert drawn >= {(bar["kind"], str(bar["step"])) for bar in place.of("commit") + place.of("upload")}
    assert [group.get("data-step") for group in groups if group.get("class") == "upload failed"] == ["1"]


def test_out_and_json_together_write_the_one_and_print_the_other(place: Place, tmp_path: Path):
    ended = run("timeline", "--root", place.root, "--out", "a.svg", "--json", cwd=tmp_path)
    assert json.loads(ended.stdout) == place.said
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_without_either_there_is_a_line_for_each_and_a_sum_at_the_end(place: Place):
    ended = run("timeline", "--root", place.root)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert len(lines) == len(place.bars)
    assert any(line.startswith(f"upload, step 1, on {place.url}: failed, ") for line in lines)
    assert "3 saves" in ended.stderr
    assert "2 attempts" in ended.stderr


def test_reading_changes_nothing(place: Place):
    def seen() -> dict[str, tuple[int, int]]:
        files = [path for path in place.root.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = seen()
    timeline_of(place.root)
    assert seen() == before


def _save_once(rank: int, root: str) -> None:
    with running(Path(root)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        manager.close()


def test_each_rank_tells_of_its_own_host_copy_and_all_of_the_same_save(tmp_path: Path):
    root = tmp_path / "root"
    run_ranks(2, _save_once, str(root))
    bars = timeline_of(root)["bars"]
    for kind in ("host_copy", "commit"):
        assert sorted(bar["rank"] for bar in bars if bar["kind"] == kind) == [0, 1]
    assert {bar["save_id"] for bar in bars if bar["kind"] in ("host_copy", "commit")} == {whole(root)[1].save_id}
    assert len([bar for bar in bars if bar["kind"] == "attempt"]) == 1


# -- ends that nobody tells, and other verbs ----------------------------------------------------------------


def test_a_trainer_that_was_killed_while_it_wrote_leaves_a_save_without_an_end(tmp_path: Path):
    root = tmp_path / "root"
    assert killed_at("table.add_save:before", saved_run, root, (1,))
    saved_run(root, (2,))
    said = timeline_of(root)
    commits = [bar for bar in said["bars"] if bar["kind"] == "commit"]
    assert steps(commits) == [(1, "unfinished"), (2, "done")]
    attempts = [bar for bar in said["bars"] if bar["kind"] == "attempt"]
    assert [bar["outcome"] for bar in attempts] == ["unfinished", "done"]
    assert attempts[0]["end_utc"] is None
    assert commits[0]["until_utc"] == attempts[0]["until_utc"] == attempts[1]["begin_utc"]


def test_a_stop_request_and_an_emergency_snapshot_are_in_it(tmp_path: Path):
    root = tmp_path / "root"
    with running(root) as manager:
        state = new_state()
        manager.resume(state)
        stop = StopRequest()
        stop.request("the queue is closing")
        manager.save_emergency_checkpoint(3, state)
        manager.close(stop=stop)
    bars = timeline_of(root)["bars"]
    (stopped,) = [bar for bar in bars if bar["kind"] == "stop"]
    (snapshot,) = [bar for bar in bars if bar["kind"] == "emergency"]
    (attempt,) = [bar for bar in bars if bar["kind"] == "attempt"]
    assert stopped["reason"] == "the queue is closing"
    assert (snapshot["step"], snapshot["outcome"], snapshot["duration_s"] > 0) == (3, "done", True)
    assert attempt["reason"].endswith("; stopped")


def test_a_stage_into_a_training_root_is_in_it_and_one_elsewhere_leaves_no_journal(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    require(root, url)
    for name in ("meta_000100.json", "model_000100.pt"):
        (root / name).unlink()
    for dest in (root, tmp_path / "eval"):
        ended = run("stage", "--step", "100", "--mirror", url, "--dest", dest)
        assert ended.returncode == 0, ended.stderr
    bars = timeline_of(root)["bars"]
    (staged,) = [bar for bar in bars if bar["kind"] == "stage"]
    assert (staged["step"], staged["mirror"], staged["by"], staged["outcome"]) == (100, url, "stage", "done")
    assert not (tmp_path / "eval" / names.EVENTS_NAME).exists()


def test_a_stage_that_fails_says_why(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    require(root, url)
    for name in ("meta_000100.json", "model_000100.pt"):
        (root / name).unlink()
    there = tmp_path / "mirror" / "model_000100.pt"
    there.write_bytes(there.read_bytes()[::-1])
    assert run("stage", "--step", "100", "--mirror", url, "--dest", root).returncode == 6
    (staged,) = [bar for bar in timeline_of(root)["bars"] if bar["kind"] == "stage"]
    assert staged["outcome"] == "failed"
    assert "IntegrityError" in staged["reason"]


def test_a_drain_tells_of_the_commits_that_it_made(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    assert run("drain", "--root", root).returncode == 0
    bars = timeline_of(root)["bars"]
    assert steps(bar for bar in bars if bar["kind"] == "upload") == [(100, "done")]
    assert len([bar for bar in bars if bar["kind"] == "mirror_commit"]) == 1
    found, _ = entries_from_lines(control(root, "events.jsonl").read_bytes().splitlines())
    assert {one.by for one in found} == {"drain"}


def test_an_older_run_without_a_journal_is_drawn_from_table_and_metas(tmp_path: Path, place: Place):
    root = tmp_path / "root"
    shutil.copytree(place.root, root, symlinks=True)
    control(root, "events.jsonl").unlink()
    _make_it_this_roots(root)
    bars = timeline_of(root)["bars"]
    assert steps(bar for bar in bars if bar["kind"] == "commit") == [(3, "done")]
    assert steps(bar for bar in bars if bar["kind"] == "rotation") == [(1, "done"), (2, "done")]
    assert {bar["step"] for bar in bars if bar["kind"] == "mirror_commit"} == {1, 2, 3}


def _make_it_this_roots(root: Path) -> None:
    """Let a copied table say that it is the copy's."""
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        known = table.identity()
        assert known is not None
        table._database.write_fact("identity", asdict(RootIdentity.of(root, known.run_id)))


# -- bad input ----------------------------------------------------------------------------------------------


def test_a_directory_without_a_table_is_refused(tmp_path: Path):
    ended = run("timeline", "--root", tmp_path, "--out", tmp_path / "a.svg")
    assert_tells(ended, 10, "has no pending-uploads table", "Give the directory that the trainer saves to.")
    assert list(tmp_path.iterdir()) == []


def test_a_root_in_which_nothing_has_happened_is_told_so(tmp_path: Path):
    require(_with_control_dir(tmp_path), "file:///nfs/run")
    assert_tells(run("timeline", "--root", tmp_path), 3, "Nothing has happened", "Save a step")


def _with_control_dir(root: Path) -> Path:
    (root / names.CONTROL_DIR).mkdir()
    return root


@pytest.mark.parametrize("name", ["run.png", "run", "run.svg.gz", ".svg"])
def test_another_ending_is_a_usage_error_before_anything_is_read(name: str, tmp_path: Path):
    assert_tells(run("timeline", "--root", tmp_path, "--out", tmp_path / name), 2, ".svg or .html", name)


def test_an_out_that_cannot_be_written_is_a_sentence_and_leaves_nothing(place: Place, tmp_path: Path):
    missing = run("timeline", "--root", place.root, "--out", tmp_path / "no" / "a.svg")
    assert_tells(missing, 10, f"Cannot write {tmp_path}/no/a.svg: {tmp_path}/no does not exist", "Create it, or choose")
    (tmp_path / "file").write_text("mine")
    assert_tells(run("timeline", "--root", place.root, "--out", tmp_path / "file" / "a.svg"), 10, "not a directory")
    (tmp_path / "a.svg").mkdir()
    assert_tells(run("timeline", "--root", place.root, "--out", tmp_path / "a.svg"), 2, "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "file"]


def test_a_full_disk_under_out_is_a_sentence(place: Place, mounted: Callable[..., Path]):
    disk = mounted("size=8k")
    ended = run("timeline", "--root", place.root, "--out", disk / "a.svg")
    assert_tells(ended, 5, "no space is left")
    assert list(disk.iterdir()) == []


def test_a_table_that_broke_leaves_what_the_journal_knows(place: Place, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(place.root, root, symlinks=True)
    for path in root.glob(f"{names.TABLE_NAME}*"):
        path.write_bytes(b"garbage" * 1000)
    ended = run("timeline", "--root", root, "--json")
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert len(said["problems"]) == 1
    assert said["problems"][0] in ended.stderr
    kinds = {bar["kind"] for bar in said["bars"]}
    assert {"commit", "host_copy", "rotation", "mirror_commit", "attempt"} <= kinds
    assert "upload" not in kinds


def test_a_torn_journal_costs_a_bar_and_not_the_rest(place: Place, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(place.root, root, symlinks=True)
    _make_it_this_roots(root)
    journal = control(root, "events.jsonl")
    journal.write_bytes(journal.read_bytes()[:-40])
    said = timeline_of(root)
    assert said["lost_lines"] == 1
    assert len(said["bars"]) == len(place.bars), "the table still knows of the rotation"


def test_no_journal_can_be_written_and_the_training_goes_on(tmp_path: Path):
    root = tmp_path / "root"
    (root / names.CONTROL_DIR).mkdir(parents=True)
    (root / names.EVENTS_NAME).mkdir()
    saved_run(root, (1, 2))
    assert set(whole(root)) == {1, 2}
    said = timeline_of(root)
    assert len(said["problems"]) == 1
    assert steps(bar for bar in said["bars"] if bar["kind"] == "commit") == [(1, "done"), (2, "done")]
