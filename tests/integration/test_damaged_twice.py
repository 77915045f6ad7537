"""Both names of one file are damaged on a mirror: nothing there is replaced, so a person is told what to delete."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ckptmirror.core.lifecycle import RecordState
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import run
from tests.kit.mirrors import memory_url
from tests.kit.roots import MirroredRoot, make_pending
from tests.kit.saves import make_save, put_object

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["model_000100.pt", "meta_000100.json"])
def test_what_is_damaged_under_both_names_is_named_with_the_commands_that_let_it_be_sent_again(
    name: str, tmp_path: Path
) -> None:
    mirror = tmp_path / "the mirror"
    root, (meta,) = make_pending(tmp_path, f"file://{tmp_path}/the%20mirror", 100, kinds=("model",))
    assert run("drain", root).returncode == 0
    stem, _, ending = name.partition(".")
    tagged = f"{stem}-{meta.save_id[:8]}.{ending}"
    for damaged in (name, tagged):
        (mirror / damaged).write_bytes(b"{rotten")
    verified = run("verify", "--root", root, "--mirror", f"file://{tmp_path}/the%20mirror", "--deep")
    assert verified.returncode == 6
    ended = run("drain", root)
    assert ended.returncode == 8
    said = run("status", root).stdout
    for text in (ended.stderr, said):
        assert f"file://{tmp_path}/the%20mirror/{tagged}" in text
        assert f"file://{tmp_path}/the%20mirror/{name}" not in text, (
            "it may be another save's: nothing says that it is ours"
        )
    commands = re.findall(r"`((?:rm|ckptmirror retry) [^`]+)`", ended.stderr)
    assert commands == [f"rm '{mirror}/{tagged}'", f"ckptmirror retry --root {root}"]
    subprocess.run(shlex.split(commands[0]), check=True)
    assert run(*shlex.split(commands[1])[1:]).returncode == 0
    assert run("drain", root).returncode == 0
    assert re.search(
        r"^ +100  model .* current .* *$", run("ls", f"file://{tmp_path}/the%20mirror").stdout, re.MULTILINE
    )
    if name.startswith("meta"):
        return
    staged = run("stage", f"file://{tmp_path}/the%20mirror", "--step", "100", "--dest", tmp_path / "eval")
    assert staged.returncode == 0, staged.stderr
    assert (tmp_path / "eval" / "model_000100.pt").read_bytes() == (root / "model_000100.pt").read_bytes()


def test_a_mirror_that_knows_whose_an_object_is_has_both_named_and_never_another_saves(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url()])
    meta = place.commit(100, sidecars=False)
    tagged = f"model_000100-{meta.save_id[:8]}.pt"
    for name in ("model_000100.pt", tagged):
        put_object(place.store, name, b"rotten", meta)
    place.upload(limit=1)
    (failed,) = place.records(state=RecordState.FAILED)
    for name in ("model_000100.pt", tagged):
        assert f"{place.mirrors[0].url}/{name}" in str(failed.last_error)
    place.close()

    other = make_save(tmp_path / "other", 100, ("model",), number=2, save_id="b" * 32)
    place = MirroredRoot(tmp_path / "second", [memory_url()])
    meta = place.commit(100, sidecars=False)
    for name in ("model_000100.pt", f"model_000100-{meta.save_id[:8]}.pt"):
        put_object(place.store, name, b"another save's", other)
    place.upload(limit=1)
    (failed,) = place.records(state=RecordState.FAILED)
    assert "Delete" not in str(failed.last_error)
    place.close()


def test_a_meta_that_the_bucket_damaged_gets_its_other_name(gcs_server: GcsServerProcess, tmp_path: Path) -> None:
    """Its checksum there does not match its bytes, so that no read of it succeeds."""
    url = f"gs://test-bucket/{tmp_path.name}"
    root, _ = make_pending(tmp_path, url, 100, kinds=("model",))
    gcs_server.faults([Fault("upload.multipart", object=r"meta_000100\.json$", corrupt_byte_at=20, times=1)])
    ended = run("drain", root, env=gcs_server.environment)
    assert ended.returncode == 0, ended.stderr
    listed = run("ls", url, env=gcs_server.environment).stdout
    assert re.search(r"^ +100  model .* current .* *$", listed, re.MULTILINE)
    assert run("verify", "--root", root, "--mirror", url, "--deep", env=gcs_server.environment).returncode == 0
