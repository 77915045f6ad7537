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
    assert ("Every save is verified on its mirrors" in said) == (not fault)
    assert ("files are not verified" in said) == ("ckptmirror drain" in said) == bool(fault)


FORKED = """
import os, sys, threading
from ckptmirror import CheckpointManager, errors
from ckptmirror.local import crashpoints
from tests.kit.training import new_state
root, mirror, how = sys.argv[1:]
is_written, may_go_on = threading.Event(), threading.Event()

def hold():
    is_written.set()
    may_go_on.wait()

state = new_state()
manager = CheckpointManager(root, mirrors=["file://" + mirror], kinds=("model",))
manager.resume(state)
crashpoints.arm("file.write:before", die=hold)
saving = manager.save(1, state)
is_written.wait()  # a child that waits for this save waits for ever: the thread that writes it is not there
child = os.fork()
if child == 0:
    try:
        manager.save(2, state)
    except errors.UsageError as error:
        print("refused:", error, file=sys.stderr)
    if how == "close":
        manager.close()
    if how == "with":
        with manager:
            sys.exit(0)
    sys.exit(0)
_, status = os.waitpid(child, 0)
may_go_on.set()
saving.wait("mirrored")
manager.close()
print(status)
"""


@pytest.mark.parametrize("how", ["sys.exit", "close", "with"])
def test_a_forked_child_ends_without_a_word_and_without_waiting_for_what_its_parent_does(
    how: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "root"), str(tmp_path / "mirror"), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
    assert "close() was not called" not in ended.stderr
    assert "refused: This manager belongs to process" in ended.stderr


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
