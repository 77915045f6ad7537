"""A save in flight when its program ends is finished and committed, however the program ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptmirror.local import direct_io
from ckptmirror.local.checksums import verify_file
from tests.integration.save_in_flight_job import HEIGHT, WIDTH, new_state
from tests.kit.roots import artifact, leftovers, whole
from tests.kit.training import running

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
JOB = "tests.integration.save_in_flight_job"
PROCESS = [sys.executable, "-m", JOB]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", JOB]


def ended(command: list[str], root: Path, how: str, who_ends: str, threads: str = "threads") -> tuple[int, str]:
    """Run the job to its end; return its exit code and what it said."""
    whole_command = [*command, str(root), how, who_ends, threads]
    run = subprocess.run(whole_command, capture_output=True, text=True, timeout=120, cwd=HOME, check=False)
    return run.returncode, run.stderr


def assert_saved(root: Path, said: str) -> None:
    assert sorted(whole(root)) == [1], said
    assert leftovers(root) == []
    meta = whole(root)[1]
    assert artifact(root, meta, "model_").stat().st_size > 2 * direct_io.BUFFER_SIZE_BYTES
    for one in meta.artifacts:
        verify_file(root / one.path, one.digest)


@pytest.mark.parametrize(
    ("how", "threads", "code"),
    [
        ("end", "threads", 0),
        ("raise", "threads", 1),
        ("raise", "no-threads", 1),
        ("exit", "threads", 3),
        ("with", "threads", 1),
        ("close", "threads", 1),
    ],
)
def test_a_save_in_flight_at_the_end_of_a_program_is_committed(
    tmp_path: Path, how: str, threads: str, code: int
) -> None:
    returned, said = ended(PROCESS, tmp_path / "root", how, "all", threads)
    assert returned == code, said
    assert_saved(tmp_path / "root", said)
    with running(tmp_path / "root") as manager:
        state = new_state(0.0)
        start = manager.resume(state)
        assert start is not None
        assert start.step == 1
        assert torch.equal(state.model.weight, torch.full((HEIGHT, WIDTH), 7.0))


@pytest.mark.parametrize(("how", "who_ends", "code"), [("end", "all", 0), ("raise", "0", 1), ("raise", "1", 1)])
def test_a_save_of_two_ranks_in_flight_is_committed_when_one_or_both_end(
    tmp_path: Path, how: str, who_ends: str, code: int
) -> None:
    returned, said = ended(TWO_RANKS, tmp_path / "root", how, who_ends)
    assert returned == code, said
    assert_saved(tmp_path / "root", said)
    assert {one.rank for one in whole(tmp_path / "root")[1].artifacts} >= {0, 1}
