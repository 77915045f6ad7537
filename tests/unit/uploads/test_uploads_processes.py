"""Several processes use one table at once: every record has one live holder, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from uploads_fakes import GS, artifacts_of

from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import UploadsTable
from tests.kit.roots import assert_sound
from tests.kit.saves import save_id_of

WORKER = """
import json, sys
from pathlib import Path
from ckptmirror.local.uploads import UploadsTable

name, path, mirror = sys.argv[1:]
done = []
with UploadsTable.open(Path(path), busy_timeout_s=30) as table:
    print("ready", flush=True)
    sys.stdin.readline()
    while claim := table.claim(name, mirror, lease_s=600):
        record = claim.record
        table.renew(claim, 600)
        done.append([record.path, claim.token])
        table.verify(claim, object_name=record.object, generation=1,
                     size_bytes=record.size_bytes or 7, crc32c=record.crc32c or 7)
print(json.dumps(done), flush=True)
"""


def start(name: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, name, str(path), GS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_processes_that_claim_at_once_never_share_a_record(tmp_path: Path) -> None:
    path = tmp_path / "uploads.db"
    with UploadsTable.open(path, create=True) as table:
        for step in (1, 2, 3):
            table.add_save(save_id_of(step), step, ("dcp",), artifacts_of(step, 40), [GS])
            table.release_save(save_id_of(step))
    workers = [start(f"worker {number}", path) for number in range(4)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    done: list[str] = []
    for worker in workers:
        out, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        done += [line[0] for line in json.loads(out)]
    with UploadsTable.open(path) as table:
        records = table.records()
        # A worker leaves when nothing can be claimed; another's last artifact may have freed a meta after that.
        metas_left = [r for r in records if r.state is not RecordState.VERIFIED]
        assert all(r.role == "meta" and r.state is RecordState.PENDING for r in metas_left)
        assert sorted(done) == sorted(r.path for r in records if r.state is RecordState.VERIFIED)
        assert len(done) == len(set(done))
        assert all(r.attempts_made == 1 for r in records if r.state is RecordState.VERIFIED)
        assert len(table.history()) == len(records) + 2 * len(done)
        assert_sound(table)


def test_a_process_that_died_with_a_claim_loses_it_when_the_lease_ends(tmp_path: Path) -> None:
    path = tmp_path / "uploads.db"
    with UploadsTable.open(path, create=True) as table:
        table.add_save(save_id_of(1), 1, ("dcp",), artifacts_of(1, 1), [GS])
        table.release_save(save_id_of(1))
        script = (
            "import os, signal, sys\nfrom pathlib import Path\nfrom ckptmirror.local.uploads import UploadsTable\n"
            "UploadsTable.open(Path(sys.argv[1])).claim('dead', sys.argv[2], lease_s=0)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        dead = subprocess.run([sys.executable, "-c", script, str(path), GS], timeout=60, check=False)
        assert dead.returncode == -9
        claim = table.claim("successor", GS, lease_s=60)
        assert claim is not None
        assert claim.record.attempts_made == 2
