"""Quarantine: after three starts that failed from one save, the next one goes back to the save before it, once.

The starts are real processes, most of which are killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmirror import CheckpointManager, StopRequest
from ckptmirror.core import names, signing
from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.flow.places.attempt_lists import diverged_there, health_here, read_local_attempts
from ckptmirror.flow.places.resolve import list_checkpoints
from ckptmirror.flow.start.rewind import rewind
from tests.kit.cli import run
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.processes import clean_process
from tests.kit.training import everything, new_state, running, same, saved_run

pytestmark = pytest.mark.long
NAN = float("nan")


def settle() -> None:
    """Let what is written in the background reach the disk."""
    for thread in threading.enumerate():
        if thread.name == "ckptmirror-health":
            thread.join()


def a_start(root: Path, url: str, how: str) -> None:
    """Resume, train a step, and end as said."""
    manager = CheckpointManager(root, [url], kinds=("model",))
    stop = StopRequest().install()
    state = new_state()
    info = manager.resume(state)
    assert info is not None
    if how.endswith("cannot be saved"):
        state.extra = {"fn": len}
        if how.startswith("killed after a step"):
            manager.report(info.step + 1, 0.5)
        with pytest.raises(CkptMirrorError):
            manager.save(info.step + 1, state).wait()
    if how != "killed before a step":
        manager.report(info.step + 1, 0.5)
    if how == "diverged":
        manager.report(info.step + 2, NAN)
    if how.startswith("killed"):
        settle()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
        manager.close(stop=stop)
    elif how == "error":
        with pytest.raises(RuntimeError), manager:
            raise RuntimeError("training went wrong")
    elif how == "finally":
        with pytest.raises(RuntimeError):
            fail_and_close(manager)
    elif how == "interrupted":
        with pytest.raises(KeyboardInterrupt), manager:
            raise KeyboardInterrupt
    elif how == "again":
        manager.resume(new_state())
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        manager.close()


def fail_and_close(manager: CheckpointManager) -> None:
    try:
        raise RuntimeError("training went wrong")
    finally:
        manager.close()


def starts(root: Path, url: str, *hows: str) -> None:
    for how in hows:
        child = clean_process(a_start, root, url, how)
        child.start()
        child.join()
        is_killed = how.startswith("killed") or how == "again"
        assert child.exitcode == (-signal.SIGKILL if is_killed else 0), how


def resumed(root: Path, url: str, **more: object) -> tuple[int, str]:
    """Resume and stop; return the step and what was said."""
    with running(root, url, kinds=("model",)) as manager:
        info = manager.resume(new_state(seed=9), **more)  # type: ignore[arg-type]
        assert info is not None
        return info.step, "\n".join(info.passed_over)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def root(tmp_path: Path, url: str) -> Path:
    saved_run(tmp_path / "root", (3, 6), url, kinds=("model",))
    return tmp_path / "root"


FAILED = [("killed",) * 3, ("diverged",) * 3, ("error", "finally", "killed")]


@pytest.mark.parametrize("hows", [pytest.param(FAILED[0], marks=pytest.mark.short), *FAILED[1:]], ids="-".join)
def test_the_fourth_start_goes_back_one_save(root: Path, url: str, hows: tuple[str, ...]) -> None:
    starts(root, url, *hows)
    step, said = resumed(root, url)
    assert step == 3
    assert "step 6 (save " in said
    assert "is quarantined: 3 starts in a row failed from it before their next save" in said
    assert "training goes back to step 3" in said
    attempts = read_local_attempts(root)
    assert attempts is not None
    assert attempts.attempts[-1].by_person  # every required mirror records it, so all starts after it agree
    assert resumed(root, url)[0] == 3
    shutil.rmtree(root)
    assert resumed(root, url)[0] == 3


def test_two_are_not_enough(root: Path, url: str) -> None:
    starts(root, url, "killed", "killed")
    assert resumed(root, url) == (6, "")


@pytest.mark.parametrize("how", ["stopped", "closed", "interrupted", "again"])
def test_a_start_that_ended_in_order_does_not_count(root: Path, url: str, how: str) -> None:
    starts(root, url, "killed", "killed", how)
    assert resumed(root, url) == (6, "")


@pytest.mark.parametrize("when", ["after a step", "before a step was reported"])
def test_a_start_that_ckptmirror_let_down_ends_the_row(root: Path, url: str, when: str) -> None:
    starts(root, url, "killed", "killed", f"killed {when}: cannot be saved", "killed")
    assert resumed(root, url) == (6, "")


def test_a_program_that_never_reports_records_nothing_also_if_a_save_failed(tmp_path: Path) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        state.extra = {"fn": len}
        with pytest.raises(CkptMirrorError):
            manager.save(1, state).wait()
        state.extra = {}
        manager.save(2, state).wait()
    assert not (tmp_path / names.HEALTH_NAME).exists()


def test_starts_that_never_trained_do_not_count(root: Path, url: str) -> None:
    starts(root, url, "killed", *["killed before a step"] * 4, "killed")
    assert resumed(root, url) == (6, "")


@pytest.mark.parametrize("how", ["policy", "rewind"])
def test_a_person_releases_it(root: Path, url: str, how: str) -> None:
    starts(root, url, *["killed"] * 3)
    save_id = next(line.save_id for line in list_checkpoints(root) if line.step == 6)
    if how == "policy":
        assert resumed(root, url, policy=save_id) == (6, "")
    else:
        assert rewind(root, save_id[:8]).step == 6
    starts(root, url, *["killed"] * 4)
    assert resumed(root, url) == (6, "")


def test_a_person_undoes_it(root: Path, url: str) -> None:
    starts(root, url, *["killed"] * 3)
    save_id = next(line.save_id for line in list_checkpoints(root) if line.step == 6)
    assert resumed(root, url)[0] == 3
    assert rewind(root, save_id[:8]).step == 6
    assert resumed(root, url)[0] == 6


def test_it_goes_back_to_one_save_only_once(root: Path, url: str) -> None:
    starts(root, url, *["diverged"] * 6)
    step, said = resumed(root, url)
    assert (step, "quarantined" in said) == (3, False)
    saved_run(root, (6,), url, kinds=("model",))
    starts(root, url, *["diverged"] * 3)
    step, said = resumed(root, url)
    assert step == 6
    assert "was taken back to step 3 before" in said


def test_what_is_loaded_is_the_earlier_save(tmp_path: Path, url: str) -> None:
    states = saved_run(tmp_path / "root", (3, 6), url, kinds=("model",))
    starts(tmp_path / "root", url, *["killed"] * 3)
    with running(tmp_path / "root", url, kinds=("model",)) as manager:
        state = new_state(seed=9)
        manager.resume(state)
        assert same(everything(state), states[3])


def test_the_earlier_save_comes_from_a_mirror(root: Path, url: str) -> None:
    starts(root, url, *["killed"] * 3)
    for path in root.glob("*000003*"):
        path.unlink()
    assert resumed(root, url)[0] == 3


def test_with_a_damaged_earlier_save_it_goes_on_from_the_quarantined_one(root: Path, url: str, tmp_path: Path) -> None:
    starts(root, url, *["killed"] * 3)
    for path in (root / "model_000003.pt", tmp_path / "mirror" / "model_000003.pt"):
        path.write_bytes(bytes(path.stat().st_size))
    step, said = resumed(root, url)
    assert step == 6
    assert "it all the same: step 3 cannot be loaded" in said


def test_while_a_mirror_is_silent_it_does_not_go_back(root: Path, url: str, tmp_path: Path) -> None:
    starts(root, url, *["killed"] * 3)
    (tmp_path / "mirror").rename(tmp_path / "away")
    step, said = resumed(root, url)
    assert step == 6
    assert "every mirror has to answer" in said
    (tmp_path / "away").rename(tmp_path / "mirror")


def test_starts_of_another_host_in_between_do_not_let_this_one_go_back(root: Path, url: str, tmp_path: Path) -> None:
    other = tmp_path / "other host"
    for _ in range(3):
        starts(root, url, "killed")
        starts(other, url, "killed")
    assert resumed(root, url) == (6, "")
    assert resumed(other, url) == (6, "")
    starts(other, url, "diverged", "diverged")
    assert resumed(root, url) == (6, "")
    starts(other, url, "diverged")
    assert resumed(root, url)[0] == 3  # the mirror tells of those
    assert resumed(other, url)[0] == 3


@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "no fields", "of another run"])
def test_a_health_file_that_cannot_be_trusted_counts_for_nothing(
    root: Path, url: str, tmp_path: Path, content: bytes | None
) -> None:
    starts(root, url, *["killed"] * 3)
    path = root / names.HEALTH_NAME
    if content is None:
        other = tmp_path / "another run"
        saved_run(other, (3, 6), f"file://{tmp_path}/another mirror", kinds=("model",))
        starts(other, f"file://{tmp_path}/another mirror", *["killed"] * 3)
        content = (other / names.HEALTH_NAME).read_bytes()
    path.write_bytes(content)
    assert resumed(root, url) == (6, "")


UNCLOSED = """
import sys
from tests.integration.test_quarantine import *
manager = CheckpointManager(sys.argv[1], [sys.argv[2]], kinds=("model",))
manager.resume(new_state())
manager.report(7, 0.5)
{}
"""


@pytest.mark.parametrize(("end", "signs"), [("", {"reported", "ended"}), ("1 / 0", {"reported"})])
def test_a_program_that_never_closes_its_manager_has_failed_only_if_it_raised(
    root: Path, url: str, end: str, signs: set[str]
) -> None:
    script = UNCLOSED.format(end)
    subprocess.run([sys.executable, "-c", script, str(root), url], capture_output=True, timeout=60, check=False)
    run_id = json.loads((root / names.ATTEMPTS_NAME).read_text())["run_id"]
    assert list(health_here(root, run_id).signs.values()) == [signs]


def test_starts_that_diverged_count_on_a_new_disk_too(url: str, tmp_path: Path) -> None:
    saved_run(tmp_path / "first", (3, 6), url, kinds=("model",))
    for host in range(3):
        starts(tmp_path / f"host {host}", url, "diverged")
    assert [(line.step, line.quarantined) for line in list_checkpoints(url)] == [(3, False), (6, True)]
    step, said = resumed(tmp_path / "last", url)
    assert step == 3
    assert "attempts 1, 2, 3 reported a loss that is not finite" in said
    assert len(list((tmp_path / "mirror" / names.HEALTH_DIR).iterdir())) == 3
    assert resumed(tmp_path / "first", url)[0] == 3


def test_where_signatures_are_demanded_no_mirror_is_believed_about_what_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = [names.diverged_name("a" * 32), "health/other", names.WRITER_NAME]
    assert diverged_there(listed) == {"a" * 32}
    demanding = SimpleNamespace(is_signed=lambda _content, _signature: True)
    monkeypatch.setattr(signing, "current", lambda: demanding)
    assert diverged_there(listed) == frozenset()


def test_neither_report_nor_close_waits_for_a_mirror_that_hangs(root: Path, url: str) -> None:
    answers = threading.Event()
    with running(root, url, kinds=("model",)) as manager:
        manager.resume(new_state())
        node = manager._node
        assert node is not None
        assert node.claim is not None
        attempt = node.claim.attempt.id
        (mirror,) = node.mirrors
        hanging = FaultyStore(mirror.store, [StoreFault("write", hold=answers)])
        node.mirrors = [replace(mirror, store=hanging)]
        manager.report(7, NAN)
    assert hanging.calls == [("write", names.diverged_name(attempt))]
    run_id = json.loads((root / names.ATTEMPTS_NAME).read_text())["run_id"]
    assert health_here(root, run_id).signs == {attempt: {"diverged", "ended"}}
    answers.set()


def test_ls_shows_it_until_a_person_releases_it(root: Path, url: str) -> None:
    starts(root, url, "killed", "diverged")
    assert not any(line.quarantined or line.why for line in list_checkpoints(root))
    starts(root, url, "killed")
    good, bad = list_checkpoints(root)
    assert (good.step, good.standing, good.quarantined, good.why) == (3, "current", False, "")
    assert (bad.step, bad.standing, bad.quarantined) == (6, "current", True)
    shown = run("ls", root).stdout
    assert "quarantined: 3 starts in a row failed from it before their next save" in " ".join(shown.split())
    listed = json.loads(run("ls", root, "--json").stdout)["saves"]
    assert [(save["step"], save["quarantined"]) for save in listed] == [(3, False), (6, True)]
    assert not any(line.quarantined for line in list_checkpoints(url))  # which knows of none that died
    assert resumed(root, url)[0] == 3
    assert [(line.step, line.standing, line.quarantined) for line in list_checkpoints(root)] == [
        (3, "current", False),
        (6, "superseded", True),
    ]
    rewind(root, bad.save_id)
    assert not any(line.quarantined or line.why for line in list_checkpoints(root))


def test_status_shows_it_with_the_command_that_releases_it(root: Path, url: str) -> None:
    assert json.loads(run("status", root, "--json").stdout)["quarantined"] == []
    starts(root, url, *["killed"] * 3)
    (bad,) = (line for line in list_checkpoints(root) if line.step == 6)
    (facts,) = json.loads(run("status", root, "--json").stdout)["quarantined"]
    assert (facts["step"], facts["save_id"]) == (6, bad.save_id)
    assert f"quarantined: {facts['why']}" == bad.why
    shown = run("status", root).stdout
    assert f"quarantined: step 6 (save {bad.save_id[:8]}): 3 starts in a row failed from it" in shown
    assert facts["release"] == f"ckptmirror rewind --save {bad.save_id[:8]} --root {root}"
    assert f"`{facts['release']}`" in shown
    run(*facts["release"].split()[1:])
    assert "quarantined" not in run("status", root).stdout
    assert resumed(root, url) == (6, "")


def test_the_journal_records_once_that_it_was_quarantined_and_that_it_was_released(root: Path, url: str) -> None:
    starts(root, url, *["killed"] * 3)
    assert quarantine_in_timeline(root) == []
    for _ in range(2):
        assert resumed(root, url)[0] == 3
    (bad,) = (line for line in list_checkpoints(root) if line.step == 6)
    told = [(bad.save_id, "failed", "trainer")]
    assert quarantine_in_timeline(root) == told
    for _ in range(2):
        run("rewind", "--save", bad.save_id, "--root", root)
    starts(root, url, *["killed"] * 3)
    assert resumed(root, url) == (6, "")
    assert quarantine_in_timeline(root) == [*told, (bad.save_id, "done", "rewind")]


@pytest.mark.parametrize("how", ["policy", "rewind"])
def test_the_journal_records_who_released_it(root: Path, url: str, how: str) -> None:
    starts(root, url, *["killed"] * 3)
    (bad,) = (line for line in list_checkpoints(root) if line.step == 6)
    if how == "policy":
        assert resumed(root, url, policy=bad.save_id)[0] == 6
    else:
        run("rewind", "--save", bad.save_id, "--root", root)
    by = "trainer" if how == "policy" else "rewind"
    assert quarantine_in_timeline(root) == [(bad.save_id, "failed", by), (bad.save_id, "done", by)]
    assert resumed(root, url) == (6, "")
    assert len(quarantine_in_timeline(root)) == 2


def quarantine_in_timeline(root: Path) -> list[tuple[str, str, str]]:
    bars = json.loads(run("timeline", "--root", root, "--json").stdout)["bars"]
    return [(bar["save_id"], bar["outcome"], bar["by"]) for bar in bars if bar["kind"] == "quarantine"]


# -- what report takes -----------------------------------------------------------------------------------------


@pytest.mark.short
def test_report_refuses_what_is_no_step_or_no_number_and_warns_once_of_nan(
    root: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(root, url, kinds=("model",)) as manager:
        with pytest.raises(UsageError, match=r"resume\(\) was not called"):
            manager.report(1, 0.5)
        state = new_state()
        manager.resume(state)
        for step, loss in [(-1, 0.5), ("7", 0.5), (7, None), (7, "much"), (7, state.model[0].weight.detach())]:
            with pytest.raises(UsageError):
                manager.report(step, loss)
        with caplog.at_level(logging.WARNING, "ckptmirror"):
            for loss in (state.model[0].bias.detach().sum(), NAN, float("inf"), NAN):
                manager.report(7, loss)
        assert [record.getMessage() for record in caplog.records] == [
            "step 7: the reported loss is nan. If 3 starts in a row fail from one save, the next one goes back to the "
            "save before it"
        ]


@pytest.mark.short
def test_an_attempt_that_saved_has_not_failed(root: Path, url: str) -> None:
    for _ in range(4):
        with running(root, url, kinds=("model",)) as manager:
            state = new_state()
            info = manager.resume(state)
            assert info is not None
            manager.report(info.step + 1, NAN)
            manager.save(info.step + 1, state).wait("committed")
    assert resumed(root, url) == (10, "")
