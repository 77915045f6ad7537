"""Several processes that stage one step into one place: one download, whatever each asks for, and whoever dies."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.core.model import Meta
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import start
from tests.kit.roots import content, leftovers
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror

pytestmark = pytest.mark.long

URL = "gs://test-bucket/run"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path / "server", buckets=["test-bucket"]) as found:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", found.url)
        yield found


@pytest.fixture
def meta(server: GcsServerProcess, tmp_path: Path) -> Meta:
    """Step 200 in both kinds, on the mirror."""
    store = open_store(URL)
    put_attempts(store, [FIRST_ATTEMPT])
    meta = make_save(tmp_path / "root", 200, ranks=2, size_bytes=1_500_000)
    put_on_mirror(store, tmp_path / "root", meta)
    store.close()
    server.clear_log()
    return meta


def stage(server: GcsServerProcess, dest: Path, *more: str) -> subprocess.Popen[str]:
    return start("stage", "--step", "200", "--mirror", URL, "--dest", dest, *more, env=server.environment)


def downloads(server: GcsServerProcess) -> Counter[str]:
    """How often each artifact was asked for; a meta is read by everybody."""
    return Counter(e["object"] for e in server.log("object.media") if e["object"].endswith((".distcp", ".pt")))


def assert_staged(dest: Path, root: Path, *starts: str) -> None:
    staged, saved = content(dest), content(root)
    files = {name for name in saved if name.startswith(starts)}
    assert files <= staged.keys()
    assert all(staged[name] == saved[name] for name in files)
    assert leftovers(dest) == []
    assert not read_inventory(dest).incomplete


def test_two_processes_that_stage_one_step_into_one_place_download_it_once(
    server: GcsServerProcess, meta: Meta, tmp_path: Path
) -> None:
    server.faults([Fault(operation="object.media", object="__0_0.distcp", stall_s=1.0)])
    ended = [child.communicate(timeout=60) for child in [stage(server, tmp_path / "e") for _ in range(2)]]
    assert [out for out, _ in ended] == [f"{tmp_path}/e/dcp_000200\n"] * 2, ended
    assert set(downloads(server).values()) == {1}
    assert_staged(tmp_path / "e", tmp_path / "root", "dcp_")


def seen(server: GcsServerProcess, *children: subprocess.Popen[str]) -> None:
    """Wait until a request has met the fault."""
    while not any(fault["seen"] for fault in server.faults_seen()):
        assert all(child.poll() is None for child in children)


@pytest.mark.parametrize("is_training_root", [True, False])
def test_a_second_stage_waits_for_the_first_says_for_whom_and_takes_what_it_brought(
    server: GcsServerProcess, meta: Meta, tmp_path: Path, is_training_root: bool
) -> None:
    """In a training root too, whose one lock a stage holds."""
    dest = tmp_path / "other"
    if is_training_root:
        put_attempts(dest, [FIRST_ATTEMPT])
    server.faults([Fault(operation="object.media", object="__1_0.distcp", stall_s=5.0)])
    first = stage(server, dest)
    seen(server, first)
    first.send_signal(signal.SIGSTOP)
    second = stage(server, dest)
    said = second.stderr
    assert said is not None
    line = next(line for line in said if "waits" in line)
    assert str(first.pid) in line
    first.send_signal(signal.SIGCONT)
    ended = [child.communicate(timeout=90) for child in (first, second)]
    assert [out for out, _ in ended] == [f"{dest}/dcp_000200\n"] * 2, ended
    assert set(downloads(server).values()) == {1}
    assert len(read_inventory(dest).saves) == 1
    assert_staged(dest, tmp_path / "root", "dcp_")


def test_two_processes_that_stage_a_kind_each_into_one_place_both_get_theirs(
    server: GcsServerProcess, meta: Meta, tmp_path: Path
) -> None:
    children = [stage(server, tmp_path / "e", "--kind", kind, "--full") for kind in ("dcp", "model")]
    ended = [child.communicate(timeout=60) for child in children]
    assert [out for out, _ in ended] == [f"{tmp_path}/e/dcp_000200\n", f"{tmp_path}/e/model_000200.pt\n"], ended
    assert set(downloads(server).values()) == {1}
    assert_staged(tmp_path / "e", tmp_path / "root", "dcp_", "model_", "optim_", "extra_", "tensors_")
    assert len(read_inventory(tmp_path / "e").saves) == 1


def test_a_process_that_is_killed_in_mid_download_hands_over_to_the_one_that_waits(
    server: GcsServerProcess, meta: Meta, tmp_path: Path
) -> None:
    server.faults([Fault(operation="object.media", object="__1_0.distcp", stall_s=60.0, after_bytes=1_000_000)])
    first = stage(server, tmp_path / "e")
    seen(server, first)
    second = stage(server, tmp_path / "e")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    out, said = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, f"{tmp_path}/e/dcp_000200\n"), said
    assert_staged(tmp_path / "e", tmp_path / "root", "dcp_")
