"""A program that ends without close()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

NEVER_CLOSED = """
import shutil, sys
from ckptmirror import CheckpointManager
from tests.kit.training import new_state
root, mirror, fault = sys.argv[1:]
manager = CheckpointManager(root, mirrors=["file://" + mirror], kinds=("model",))
state = new_state()
manager.resume(state)
if fault:
    shutil.rmtree(mirror)  # what a lost mount looks like
manager.save(1, state).wait("committed" if fault else "mirrored")
"""


@pytest.mark.parametrize(("fault", "level"), [("", "WARNING"), ("unmounted", "ERROR")])
def test_i8_a_run_that_never_closes_its_manager_says_at_its_end_what_is_not_safe(
    tmp_path: Path, fault: str, level: str
) -> None:
    script = 'import logging; logging.basicConfig(format="%(levelname)s %(message)s")' + NEVER_CLOSED
    where = [str(tmp_path / "root"), str(tmp_path / "mirror"), fault]
    ended = subprocess.run([sys.executable, "-c", script, *where], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    said = next(line for line in ended.stderr.splitlines() if "close() was not called" in line)
    assert said.startswith(level)
    assert ("0 files" in said) == (not fault)


TWO_RANKS = """
import os
import ckptmirror.formats.dcp as dcp
from ckptmirror.core.errors import IntegrityError
from ckptmirror.integrations import plain_loop

def refuse(*_):
    raise IntegrityError("planted")

if os.environ["RANK"] == "0":
    dcp.check_entries = refuse
plain_loop.main()
"""


def test_ranks_whose_save_failed_end_with_their_error_and_not_by_an_abort(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO_RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(
        [*launch, "--root", str(tmp_path / "root"), "--steps", "30"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode != 0
    assert "planted" in ended.stderr
    assert "terminate called" not in ended.stderr
    assert "SIGABRT" not in ended.stderr
