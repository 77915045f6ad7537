"""Mirrors that keep a start waiting for longer than ranks wait for one another, or do not take what a person says."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, MirrorSpec
from ckptmirror.core import events, names
from ckptmirror.core.errors import DeadlinePassed
from ckptmirror.ranks import meeting
from ckptmirror.testing import Fault, GcsServerProcess
from ckptmirror.testing.fixtures import GCS_BUCKET, gcs_server
from tests.kit.cli import run
from tests.kit.faults import faulty
from tests.kit.faulty_store import StoreFault
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import Job, built, expect

__all__ = ["gcs_server"]

MEETINGS = 3
LIMIT_S = 10.0
SILENT_S = 3 * LIMIT_S


def start_while_silent(rank: int, base: str, watched: str, operation: str, name: str) -> tuple[str, str, int]:
    """Resume while rank 0's mirror holds a call until the ranks have met a few times, and then fails it."""
    meeting._SIGN_OF_LIFE_S = 0.05
    manager = CheckpointManager(Path(base) / "ab"[rank], [f"file://{base}/mirror"], timeout_s=LIMIT_S)
    if rank == 0:
        released = threading.Event()
        faulty(manager, StoreFault(operation, name, when="before", times=0, hold=released, hold_limit_s=SILENT_S))
        exchange = manager.ranks.exchange
        met: list[str] = []

        def counted(value: object, *, what: str, error: BaseException | None = None) -> list[object]:
            met.append(what)
            if met.count(watched) == MEETINGS:
                released.set()
            return exchange(value, what=what, error=error)

        manager.ranks.exchange = counted  # type: ignore[method-assign]
    found = outcome(lambda: manager.resume(built("ddp")))
    manager.close(timeout_s=0.0)
    return found


@pytest.mark.parametrize(
    ("what", "operation", "name"),
    [("look at every place", "", ""), ("claim the run", "write", names.WRITER_NAME)],
)
def test_i7_ranks_meet_while_a_mirror_keeps_a_start_waiting_and_all_name_it(
    tmp_path: Path, what: str, operation: str, name: str
) -> None:
    (tmp_path / "mirror").mkdir()
    found = run_ranks(2, start_while_silent, str(tmp_path), what, operation, name)
    assert [code for _, _, code in found] == [5, 5]
    for _, message, _ in found:
        assert f"file://{tmp_path}/mirror" in message
        assert "did not answer within" not in message


def with_two_mirrors(rank: int, base: str, steps: tuple[int, ...], required: bool) -> int:
    """Resume, save these steps until the first mirror has them, and return the step that it began from."""
    other = MirrorSpec(f"file://{base}/other", required=required)
    manager = CheckpointManager(Path(base) / "ab"[rank], [f"file://{base}/mirror", other], timeout_s=60.0)
    whole = threading.Event()

    def hear(event: events.Event) -> None:
        if isinstance(event, events.MirrorCommitted) and (event.mirror, event.step) == (
            f"file://{base}/mirror",
            steps[-1],
        ):
            whole.set()

    manager.events.subscribe(hear)
    state = built("ddp")
    start = manager.resume(state)
    for step in steps:
        manager.save(step, state).wait("committed", timeout_s=60.0)
    assert whole.wait(60.0)
    with suppress(DeadlinePassed):
        manager.close(timeout_s=0.0)
    return start.step if start is not None else 0


@pytest.mark.long
@pytest.mark.parametrize(("node", "required"), [("a", False), ("a", True), ("b", True)])
def test_a_rewind_on_one_node_is_not_elsewhere_to_its_job_while_a_mirror_is_silent(
    node: str, required: bool, tmp_path: Path
) -> None:
    for name in ("mirror", "other"):
        (tmp_path / name).mkdir()
    assert run_ranks(2, with_two_mirrors, str(tmp_path), (1, 2), required) == [0, 0]
    assert run("drain", tmp_path / "a").returncode == run("drain", tmp_path / "b").returncode == 0
    assert run("rewind", "--root", tmp_path / node, "--step", "1").returncode == 0
    (tmp_path / "other").rename(tmp_path / "away")
    assert run_ranks(2, with_two_mirrors, str(tmp_path), (4,), required) == [1, 1]


@pytest.mark.long
def test_a_rewind_that_no_mirror_took_sets_no_job_back(gcs_server: GcsServerProcess, tmp_path: Path) -> None:
    url = f"gs://{GCS_BUCKET}/rewound"
    first = Job(tmp_path, "ab", (1, 2), bucket=url, kinds=("model",)).run()
    gcs_server.faults([Fault(operation="upload.*", status=403, times=0)])
    assert run("rewind", "--root", tmp_path / "a", "--step", "1").returncode == 12
    gcs_server.clear_faults()
    for node in "ab":
        assert run("forget-mirror", "--root", tmp_path / node, "--url", url).returncode == 0
    expect(Job(tmp_path, "ab", kinds=("model",)).run(), 2, "disk", first[0])
