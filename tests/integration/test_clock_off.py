"""A clock that is a year off, or is set by a year between two steps: nothing waits for it, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.flow.status import is_mirrored
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import AS_MODULE, clean_environment, run
from tests.kit.roots import assert_sound, content, make_mirrored, make_pending
from tests.kit.servers.certificates import make_certificate

pytestmark = pytest.mark.long

YEAR_LATER, YEAR_EARLIER = "+365d", "-365d"
TRAINER = """
import sys
import torch
from ckptmirror import CheckpointManager, TrainState
root, url = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
with CheckpointManager(root, [url], kinds=("model",)) as manager:
    start = manager.resume(state)
    step = start.step + 1 if start else 1
    manager.save(step, state).wait("mirrored", timeout_s=60)
    print(step)
"""


def at(shift: str, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose clock on the wall is shifted; the boot clock, which no one sets, is not."""
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed")
    return subprocess.run(
        ["faketime", "-f", shift, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean_environment(DONT_FAKE_MONOTONIC="1", **env),
        check=False,
    )


def test_trainers_whose_clocks_are_two_years_apart_continue_one_another(tmp_path: Path) -> None:
    """Nothing is ordered by time: the step, not the date, says which save is the newest."""
    script, url = tmp_path / "train.py", f"file://{tmp_path}/mirror"
    script.write_text(TRAINER)
    for step, shift in enumerate((YEAR_LATER, YEAR_EARLIER), 1):
        ended = at(shift, sys.executable, script, tmp_path / "run", url)
        assert (ended.returncode, ended.stdout) == (0, f"{step}\n"), ended.stderr
    assert run("status", "--root", tmp_path / "run").stdout.startswith("safe")
    listed = run("ls", url).stdout
    assert listed.count("current") == 2
    staged = at(YEAR_LATER, *AS_MODULE, "stage", "--step", "latest", "--mirror", url, "--dest", tmp_path / "eval")
    assert staged.stdout == f"{tmp_path}/eval/model_000002.pt\n", staged.stderr


@pytest.mark.parametrize("shift", [YEAR_LATER, YEAR_EARLIER])
def test_a_claim_of_a_process_that_died_with_its_clock_a_year_off_is_taken_over_at_once(
    shift: str, tmp_path: Path
) -> None:
    """A lease runs on the boot's clock, so no jump of the wall clock makes it last a year."""
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    claim = (
        "import sys\nfrom pathlib import Path\nfrom ckptmirror.local.uploads import UploadsTable\n"
        "table = UploadsTable.open(Path(sys.argv[1]))\n"
        "assert table.claim('a worker', sys.argv[2], lease_s=1.0) is not None\n"
    )
    ended = at(shift, sys.executable, "-c", claim, root / names.TABLE_NAME, f"file://{tmp_path}/mirror")
    assert ended.returncode == 0, ended.stderr
    assert run("drain", "--root", root, "--timeout", "30").returncode == 0
    assert is_mirrored(root, None)
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        assert_sound(table)


@pytest.mark.parametrize("shift", [YEAR_LATER, YEAR_EARLIER])
def test_verbs_with_a_clock_a_year_off_send_stage_and_rotate_as_ever(shift: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    root, _ = make_pending(tmp_path, url, 100, 200, kinds=("model",))
    for verb in (["drain"], ["rotate", "--keep-last", "1"], ["status"], ["timeline"]):
        ended = at(shift, *AS_MODULE, *verb, "--root", root)
        assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in root.glob("meta_*")) == ["meta_000200.json"]
    staged = at(shift, *AS_MODULE, "stage", "--step", "100", "--mirror", url, "--dest", tmp_path / "eval")
    assert staged.returncode == 0, staged.stderr


@pytest.mark.parametrize("shift", [YEAR_LATER, YEAR_EARLIER])
def test_a_certificate_that_a_clock_a_year_off_calls_invalid_is_a_sentence_about_it(shift: str, tmp_path: Path) -> None:
    ask = (
        "from ckptmirror.core.errors import CkptMirrorError\nfrom ckptmirror.stores import open_store\n"
        "try:\n    open_store('gs://test-bucket/run', retry=False).stat('x')\n"
        "except CkptMirrorError as error:\n    print(error.exit_code, error, error.hint)\n"
    )
    certificate = make_certificate(tmp_path / "server.pem")
    with GcsServerProcess(tmp_path / "server", buckets=["test-bucket"], certificate=certificate) as server:
        ended = at(shift, sys.executable, "-c", ask, **server.environment)
    year = (datetime.now(UTC) + timedelta(days=365 if shift == YEAR_LATER else -365)).year
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("5 https://127.0.0.1:"), ended.stdout
    assert "certificate" in ended.stdout
    assert f"This machine's clock says {year}-" in ended.stdout


def test_files_from_the_future_are_staged_and_rotated_by_what_is_in_them(tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    for place in (root, tmp_path / "mirror"):
        for path in place.rglob("*_000100*"):
            os.utime(path, (time.time() + 3e7, time.time() + 3e7))
    staged = run("stage", "--step", "latest", "--mirror", url, "--dest", tmp_path / "eval")
    assert staged.stdout == f"{tmp_path}/eval/model_000200.pt\n", staged.stderr
    assert content(tmp_path / "eval")["model_000200.pt"] == content(root)["model_000200.pt"]
