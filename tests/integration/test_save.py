"""Saving, in one process: what is on disk when, what a failure leaves behind, and who hears of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import Retention, TrainState
from ckptmirror.core import events, names
from ckptmirror.core.errors import StepBehind, UsageError
from ckptmirror.flow.places.resolve import find_local_checkpoint_steps
from ckptmirror.flow.save.save import Saver
from ckptmirror.local import crashpoints
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import memory
from tests.kit.processes import killed_at
from tests.kit.roots import artifact, leftovers, whole
from tests.kit.training import everything, new_state, running, same, saved_run, train

MIB = 1024 * 1024
MIRROR = "memory://test-save/run"


@pytest.fixture(autouse=True)
def _fresh_memory() -> Iterator[None]:
    memory.drop("test-save")
    yield
    memory.drop("test-save")


def test_no_tmp_files_after_save(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(10, state).wait()
        assert leftovers(tmp_path) == []
        assert sorted(whole(tmp_path)) == [10]


def test_a_save_returns_before_it_is_committed_and_says_when_it_is(tmp_path: Path) -> None:
    gate = threading.Event()
    with running(tmp_path) as manager:
        manager.events.subscribe(lambda event: isinstance(event, events.SaveCommitted) and gate.set())
        state = new_state()
        manager.resume(state)
        handle = manager.save(1, state)
        assert handle.done("copied")
        assert handle.wait("committed").save_id == whole(tmp_path)[1].save_id
        assert gate.wait(60)


def test_blocking_mode_returns_after_the_commit(tmp_path: Path) -> None:
    with running(tmp_path, mode="blocking") as manager:
        state = new_state()
        manager.resume(state)
        assert manager.save(1, state).done("committed")


def test_snapshot_is_isolated_from_inplace_update_of_the_next_steps(tmp_path: Path) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        before = everything(state)["model"]
        handle = manager.save(1, state)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.fill_(7.0)
        handle.wait()
        saved = torch.load(artifact(tmp_path, whole(tmp_path)[1], "model_"), weights_only=True)
    assert same(dict(before), saved)


def test_i3_a_save_is_committed_only_after_files_records_and_meta_are_durable_in_this_order(tmp_path: Path) -> None:
    with running(tmp_path / "root", f"file://{tmp_path}/mirror", uploads=False) as manager:
        state = new_state()
        manager.resume(state)
        crashpoints.arm()
        try:
            manager.save(1, state).wait()
            passed = crashpoints.passed()
        finally:
            crashpoints.disarm()
    added, released = passed.index("table.add_save:after"), passed.index("table.release_save:before")
    published = [n for n, name in enumerate(passed) if name == "save.publish:before"]
    last_published = max(n for n, name in enumerate(passed) if name == "save.publish:after")
    sealed = [n for n, name in enumerate(passed) if name == "file.fsync:after" and n < added]
    assert len(sealed) >= len(whole(tmp_path / "root")[1].artifacts)
    assert added < min(published)
    meta = passed.index("file.publish:after", last_published)
    assert "dir.fsync:after" in passed[last_published:meta]
    assert "file.fsync:after" in passed[added : min(published)]  # the meta is sealed before anything is published
    assert "dir.fsync:after" in passed[meta:released]
    assert released < passed.index("link.replace:before")


def test_latest_never_names_an_uncommitted_step(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def look() -> None:
        while not stop.is_set():
            try:
                target = os.readlink(tmp_path / "latest")
            except FileNotFoundError:
                continue
            seen.append((target, (tmp_path / f"meta_{target.removeprefix('dcp_')}.json").exists()))

    stop = threading.Event()
    watcher = threading.Thread(target=look)
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        watcher.start()
        try:
            for step in range(1, 6):
                manager.save(step, state).wait()
                assert os.readlink(tmp_path / "latest") == f"dcp_{step:06d}"
        finally:
            stop.set()
            watcher.join()
    assert seen
    assert all(committed for _, committed in seen)


def test_a_thing_in_the_way_of_latest_does_not_make_a_committed_save_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        manager.save(2, state).wait()
    assert sorted(whole(tmp_path)) == [1, 2]
    assert "latest does not name it" in caplog.text


def test_watcher_sees_only_committed(tmp_path: Path) -> None:
    stop = threading.Event()
    broken: list[Any] = []

    def look() -> None:
        while not stop.is_set():
            for step in find_local_checkpoint_steps(tmp_path):
                meta = whole(tmp_path)[step]
                try:
                    for one in meta.artifacts:
                        verify_file(tmp_path / one.path, one.digest)
                except Exception as error:  # noqa: BLE001 - reported by the test
                    broken.append((step, error))

    watcher = threading.Thread(target=look)
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        watcher.start()
        try:
            for step in range(1, 6):
                manager.save(step, state)
            manager.wait("committed")
        finally:
            stop.set()
            watcher.join()
    assert broken == []


def test_same_step_redo(tmp_path: Path) -> None:
    """Saving a step again is another save under another name; the later one is resumed, the earlier one stays."""
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        first = manager.save(5, state).wait().save_id
        train(state)
        second = manager.save(5, state).wait().save_id
        after = everything(state)
    assert first != second
    assert (tmp_path / f"dcp_000005-{second[:8]}" / ".metadata").exists()
    assert (tmp_path / "dcp_000005" / ".metadata").exists()
    with running(tmp_path) as manager:
        state = new_state(seed=9)
        start = manager.resume(state)
        assert start is not None
        assert start.save_id == second
        assert same(everything(state), after)


def test_a_redo_after_a_crash_in_the_first_try_works(tmp_path: Path) -> None:
    assert killed_at("save.publish:before@2", saved_run, tmp_path, (1,))
    states = saved_run(tmp_path, (1,))
    assert sorted(whole(tmp_path)) == [1]
    assert leftovers(tmp_path) == []
    assert states


def test_adding_a_kind_to_a_step_is_another_save_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, kinds=("dcp",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(3, state).wait()
        manager.save(3, state, kinds=("model",)).wait()
    assert "has exactly the same tensors" not in caplog.text
    with running(tmp_path) as manager:
        start = manager.resume(new_state(1))
        assert start is not None
        assert (start.step, start.kind) == (3, "model")


_WARNS = """
import sys, warnings, torch
from ckptmirror import CheckpointManager, TrainState
state = TrainState(torch.nn.Linear(1, 1))
with CheckpointManager(sys.argv[1], kinds=("dcp",)) as manager:
    manager.resume(state)
    for step in (1, 2, 3, 4):
        warnings.warn("the user's")
        manager.save(step, state).wait()
"""


def test_saves_do_not_make_python_show_a_warning_of_the_user_again(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", _WARNS, tmp_path / "root"], capture_output=True, text=True, timeout=120, check=True
    ).stderr
    assert said.count("UserWarning: the user's") == 2  # the first save adds the filter
    assert "torch.distributed is" not in said


def test_identical_consecutive_saves_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        train(state)
        manager.save(2, state).wait()
        assert "has exactly the same tensors" not in caplog.text
        manager.save(3, state).wait()
    assert "step 3 has exactly the same tensors as the previous save" in caplog.text


def test_a_lower_step_is_a_rewind_and_refused_and_the_next_save_works(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(5, state)
        with pytest.raises(StepBehind):
            manager.save(4, state)
        manager.save(6, state).wait()
    assert sorted(whole(tmp_path)) == [5, 6]


def test_a_step_that_no_save_can_have_is_refused_and_the_next_save_works(tmp_path: Path) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        for step in (-1, names.MAX_STEP + 1, True, 1.0):
            with pytest.raises(UsageError, match="not a step"):
                manager.save(step, state)  # type: ignore[arg-type]
        manager.save(5, state).wait()
        manager.save(names.MAX_STEP, state).wait()
    assert sorted(whole(tmp_path)) == [5, names.MAX_STEP]


def test_completion_is_bound_to_save_id(tmp_path: Path) -> None:
    done: list[events.SaveCommitted] = []
    with running(tmp_path) as manager:
        both = threading.Event()

        def note(event: object) -> None:
            if isinstance(event, events.SaveCommitted):
                done.append(event)
                if len(done) == 2:
                    both.set()

        manager.events.subscribe(note)
        state = new_state()
        manager.resume(state)
        first = manager.save(1, state)
        second = manager.save(2, state)
        second.wait()
        assert first.done("committed")
        assert both.wait(60)
    assert [(event.step, event.save_id) for event in done] == [(1, first.save_id), (2, second.save_id)]
    assert {step: meta.save_id for step, meta in whole(tmp_path).items()} == {1: first.save_id, 2: second.save_id}


def test_saving_before_resume_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with running(tmp_path) as manager, pytest.raises(UsageError, match="resume"):
        manager.save(1, new_state())


def test_metrics_that_are_not_finite_do_not_stop_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state, metrics={"loss": float("nan"), "lr": 0.5}, fields={"tracker": "abc"}).wait()
    meta = whole(tmp_path)[1]
    assert (dict(meta.metrics), meta.fields["tracker"]) == ({"lr": 0.5}, "abc")
    assert meta.training_config == {"width": 6}


def test_what_was_said_beside_the_state_is_that_of_the_moment_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background begins only after training went on and changed all of it in place."""
    went_on = threading.Event()
    honest = Saver._agree

    def late(self: Saver, *arguments: Any) -> Any:
        assert went_on.wait(30)
        return honest(self, *arguments)

    monkeypatch.setattr(Saver, "_agree", late)
    loss, fields, config = torch.tensor(1.5), {"seen": [1, {"deep": 2}]}, {"data": {"epoch": 3, "files": ["a"]}}
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        state.training_config = config
        manager.resume(state)
        handle = manager.save(1, state, metrics={"loss": loss}, fields=fields)
        loss.zero_()
        fields["seen"][1]["deep"] = fields["more"] = 99  # type: ignore[index, assignment]
        config["data"]["epoch"], config["data"]["files"][:] = 99, ["b"]  # type: ignore[index]
        went_on.set()
        handle.wait()
    meta = whole(tmp_path)[1]
    assert dict(meta.metrics) == {"loss": 1.5}
    assert meta.fields == {"seen": [1, {"deep": 2}]}
    assert meta.training_config == {"data": {"epoch": 3, "files": ["a"]}}


def test_rss_flat_over_50_saves(tmp_path: Path) -> None:
    """The memory of the process does not grow with the number of saves."""
    with running(tmp_path, kinds=("model",), mode="blocking", retention=Retention()) as manager:
        state = new_state()
        state.extra["large"] = torch.zeros(MIB)
        manager.resume(state)
        for step in range(1, 11):
            manager.save(step, state)
        before = _rss_bytes()
        for step in range(11, 61):
            manager.save(step, state)
            for path in tmp_path.glob("*.pt"):
                path.unlink()
        grown = _rss_bytes() - before
    assert grown < 12 * MIB  # less than three states; fifty would be 200 MiB


def test_i5_no_save_replaces_a_file_that_somebody_put_there(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        (tmp_path / "model_000007.pt").write_bytes(b"a person's own")
        save_id = manager.save(7, state).wait().save_id
    assert (tmp_path / "model_000007.pt").read_bytes() == b"a person's own"
    assert save_id is not None
    assert whole(tmp_path)[7].tag == save_id[:8]


def test_table_records_exist_for_every_artifact_and_mirror(tmp_path: Path) -> None:
    with running(tmp_path / "r", f"file://{tmp_path}/a", f"file://{tmp_path}/b", uploads=False) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
    table = UploadsTable.open(tmp_path / "r/.ckptmirror/uploads.db", read_only=True)
    recorded = {(record.mirror, record.path) for record in table.records()}
    table.close()
    paths = {one.path for one in whole(tmp_path / "r")[1].artifacts} | {"meta_000001.json"}
    assert recorded == {(f"file://{tmp_path}/{m}", path) for m in ("a", "b") for path in paths}


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _save_where_no_process_may_start(root: Path) -> None:
    def refuse(event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
            raise AssertionError(f"a save called {event}")

    sys.addaudithook(refuse)
    names = [f"{number:04d}_{'a_long_name_' * 10}" for number in range(3000)]
    state = TrainState(torch.nn.ParameterDict({name: torch.zeros(1) for name in names}))
    with running(root) as manager:
        manager.resume(state)
        manager.save(1, state).wait()
        manager.save_emergency_checkpoint(2, state)


def test_a_save_starts_no_process_however_large_its_metadata_is(tmp_path: Path) -> None:
    assert not killed_at(None, _save_where_no_process_may_start, tmp_path)
    assert artifact(tmp_path, whole(tmp_path)[1], ".metadata").stat().st_size > MIB


def test_the_memory_for_the_first_save_is_made_also_where_extra_is_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (0, 1):  # only a start that continues a run makes it
        with running(tmp_path) as manager:
            state = new_state()
            state.extra, state.merge_extra = {"tokens": 7}, {"tokens": lambda values, *_: sum(values)}
            manager.resume(state)
            manager.save(step, state).wait("committed")
    assert [one for one in caplog.messages if "in advance" in one] == []
