"""A mirror and a directory that somebody else may write to: each attack ends in a sentence, soon, in little memory."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import errors, list_checkpoints, load_checkpoint, resolve_checkpoint_reference, stage_checkpoint_step
from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.sealed_json import LIMIT_BYTES
from ckptmirror.flow.retention.reconcile import BRINGING_NAME, being_brought
from ckptmirror.flow.save.emergency_files import remove_what_is_stale
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.hostile_files import resealed
from tests.kit.roots import content, make_mirrored, require
from tests.kit.saves import make_save

pytestmark = pytest.mark.long

MEMORY_BYTES = 3 << 29


def limited() -> None:
    """In the child: no more than 1.5 GiB of address space, 20 s of one core."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def run_limited(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a verb that may take so much."""
    ended = run(*arguments, preexec_fn=limited)
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


# -- names in a meta ----------------------------------------------------------------------------------------

Change = Callable[[list[dict[str, Any]]], None]


def second(path: str) -> Change:
    """Have another artifact lie at a path."""
    return lambda artifacts: artifacts.append({**artifacts[0], "path": path})


NAMES: dict[str, tuple[Change, str]] = {
    "duplicate": (lambda artifacts: artifacts.append(artifacts[0]), "appears twice"),
    "5,000 characters": (second("dcp_000200/" + "x" * 5000), "longer than 1024 characters"),
    "300 bytes in one component": (second("dcp_000200/" + "x" * 300), "a component longer than 255 bytes"),
    "NUL": (second("dcp_000200/a\0b"), "cannot be printed"),
    "escape": (second("dcp_000200/\x1b[2J"), "cannot be printed"),
    "line feed": (second("dcp_000200/a\nb"), "cannot be printed"),
    "up and out": (second("dcp_000200/../../x"), "the component '..'"),
    "absolute": (second("/etc/passwd"), "it is absolute"),
    "another step's": (second("model_000100.pt"), "of step 100"),
    "the control directory's": (second(".ckptmirror/attempts.json"), "not the name of an artifact"),
    "a meta's": (second("meta_000200.json"), "not the name of an artifact"),
    "latest": (second("latest"), "not the name of an artifact"),
    "a temporary's": (second("dcp_000200/a.tmp"), "not the name of an artifact"),
    "other case": (second("dcp_000200/.METADATA"), "case and Unicode form do not count"),
    "other Unicode form": (
        lambda artifacts: artifacts.extend(
            {**artifacts[0], "path": f"dcp_000200/{name}"} for name in ("caf\u00e9", "cafe\u0301")
        ),
        "case and Unicode form do not count",
    ),
    "a directory of another": (second("dcp_000200/.metadata/b"), "is a directory of"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_meta_with_such_names_is_one_sentence_and_nothing_comes_of_it(what: str, tmp_path: Path) -> None:
    root, url, (meta,) = make_mirrored(tmp_path, 200, kinds=("dcp",), sidecars=False)
    change, reason = NAMES[what]
    document = json.loads(meta_to_bytes(meta))
    change(document["artifacts"])
    for place in (tmp_path / "mirror", root):
        (place / "meta_000200.json").write_bytes(resealed(document))
    before = content(tmp_path)
    if what in ("duplicate", "5,000 characters", "NUL"):
        ended = run_limited("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
        assert_tells(ended, 3, "meta_000200.json", reason)
    with pytest.raises(errors.CheckpointNotFound) as missing:
        stage_checkpoint_step(url, step=200, dest=tmp_path / "e")
    assert_explains(missing.value, 3, "meta_000200.json", reason)
    assert content(tmp_path) == before
    assert [line.standing for line in list_checkpoints(url)] == ["incomplete"]
    assert [line.standing for line in list_checkpoints(root)] == ["incomplete"]
    with pytest.raises(errors.BrokenMeta) as caught:
        resolve_checkpoint_reference(root / "dcp_000200")
    assert_explains(caught.value, 6, reason)


# -- JSON ---------------------------------------------------------------------------------------------------


def deep(count: int = 100_000) -> bytes:
    """A list in a list in a list, and so on."""
    return b"[" * count + b"]" * count


def sparse(path: Path, size_bytes: int) -> None:
    """A file of zeros that takes no room."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


JSON: dict[str, Callable[[bytes], bytes]] = {
    "nested 100,000 deep": lambda data: data.replace(b'"fields":{}', b'"fields":{"a":' + deep() + b"}"),
    "a number of 1,000,000 digits": lambda data: data.replace(b'"step":200', b'"step":' + b"2" * 1_000_000),
    "NaN": lambda data: data.replace(b'"metrics":{}', b'"metrics":{"loss":NaN}'),
    "infinity": lambda data: data.replace(b'"metrics":{}', b'"metrics":{"loss":1e999}'),
    "a key twice": lambda data: data.replace(b'"step":200', b'"step":200,"step":200'),
    "a size of 2 ** 63": lambda data: data.replace(b'"size_bytes":3000', b'"size_bytes":9223372036854775808'),
    "a size below nothing": lambda data: data.replace(b'"size_bytes":3000', b'"size_bytes":-1'),
    "blocks of nothing": lambda data: data.replace(b'_size_bytes":4194304', b'_size_bytes":0'),
    "blocks of no power of two": lambda data: data.replace(b'_size_bytes":4194304', b'_size_bytes":4194305'),
    "60 MiB of brackets": lambda _: b'{"a":[' + b"[],\n" * (15 << 20) + b"[]]}",
}


def test_json_bombs_on_a_mirror_are_each_a_sentence_and_the_honest_save_is_staged(tmp_path: Path) -> None:
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    honest = (tmp_path / "mirror" / "meta_000200.json").read_bytes()
    for step, change in enumerate(JSON.values(), 300):
        data = change(honest)
        assert data != honest
        (tmp_path / "mirror" / f"meta_000{step}.json").write_bytes(data)
    listed = run_limited("ls", url)
    lines = listed.stdout.splitlines()
    assert len(lines) == 1 + len(JSON), listed.stderr
    assert ["incomplete" in line for line in lines] == [False] + [True] * len(JSON)
    assert all(len(line) < 300 for line in lines)
    ended = run_limited("stage", "--step", "latest", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 0, stdout=f"{tmp_path}/e/model_000200.pt\n")


@pytest.mark.parametrize("what", ["nested 100,000 deep", "60 MiB of brackets"])
def test_a_json_bomb_in_place_of_the_list_of_attempts_ends_in_a_sentence(what: str, tmp_path: Path) -> None:
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    (tmp_path / "mirror" / "writer.json").write_bytes(JSON[what](b'{"fields":{}}'))
    ended = run_limited("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert ended.returncode in (1, 6)
    assert_tells(ended, ended.returncode, "writer.json")
    assert len(ended.stderr) < 2000


@pytest.mark.parametrize("name", ["meta_000200.json", "writer.json"])
def test_a_json_file_of_a_terabyte_is_not_read(name: str, tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    sparse(tmp_path / "mirror" / name, 1 << 40)
    ended = run_limited("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert ended.returncode != 0
    assert_tells(ended, ended.returncode, f"more than {LIMIT_BYTES if name.startswith('meta') else ''}")
    sparse(root / "meta_000200.json", 1 << 40)
    assert "the limit is" in run_limited("ls", root).stdout


# -- what lies in a root besides ----------------------------------------------------------------------------

NOTES = [
    names.STATUS_NAME,
    names.HEALTH_NAME,
    names.LOCK_NAME,
    names.EVENTS_NAME,
    BRINGING_NAME,
    f"{names.CONTROL_DIR}/emergency-00000000.json",
]
SHAPES: dict[str, Callable[[Path], object]] = {
    "nested deep": lambda path: path.write_bytes(deep(2000)),
    "nested deeper": lambda path: path.write_bytes(deep()),
    "a terabyte": lambda path: sparse(path, 1 << 40),
    "a pipe": os.mkfifo,
    "a link out": lambda path: path.symlink_to("/etc/passwd"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "numbers without end": lambda path: path.write_text('{"pid": 1e999, "last_step": NaN, "at_utc": [-Infinity]}'),
    "escapes": lambda path: path.write_text(json.dumps({"status": "\x1b[2J\x9b", "pid": "\x1b]0;x", "at_utc": "\r"})),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_lies_in_the_control_directory_keeps_nobody_from_the_saves(shape: str, tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    require(root, url)
    for note in NOTES:
        (root / note).unlink(missing_ok=True)
        SHAPES[shape](root / note)
    assert being_brought(root) is None
    assert [line.standing for line in list_checkpoints(root)] == ["current"]
    assert run_limited("status", "--root", root).stdout.count(" 200 ") == 1
    assert json.loads(run_limited("status", "--root", root, "--json").stdout)["saves"]
    assert_tells(run_limited("timeline", "--root", root), 0, stdout=None)
    remove_what_is_stale(root)
    SHAPES[shape](root / names.TABLE_NOTE_NAME)
    assert_tells(run_limited("status", "--root", root), 10, "table.json")


@pytest.mark.parametrize("name", ["model_000200.pt", "meta_000200.json"])
@pytest.mark.parametrize("shape", ["a pipe", "a link out", "a link to a device", "a directory", "a socket", "8 TiB"])
def test_what_is_no_file_in_place_of_one_is_neither_opened_nor_waited_for(
    shape: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    root = Path("root")
    make_save(root, 200, kinds=("model",))
    (root / name).unlink()
    listening = socket.socket(socket.AF_UNIX)
    more: dict[str, Callable[[Path], object]] = {
        "a socket": lambda path: listening.bind(str(path)),
        "8 TiB": lambda path: sparse(path, 1 << 43),
    }
    (more | SHAPES)[shape](root / name)
    with listening, pytest.raises(errors.IntegrityError):
        load_checkpoint(root / "model_000200.pt")
    assert [line.standing for line in list_checkpoints(root)] == ["incomplete"]
    if shape == "a pipe":
        assert_tells(run_limited("verify", root), 6, stdout=None)


def test_a_name_that_moves_the_cursor_is_spelled_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_save(root, 200, kinds=("dcp",))
    (root / "dcp_000200" / "\x1b[2J\x1b]0;owned\x07").write_bytes(b"")
    odd = tmp_path / "\x1b[2J"
    for verb in (("verify", root), ("ls", root), ("ls", odd), ("stage", "--step", "1", "--mirror", f"file://{odd}")):
        run_limited(*verb)
    assert "\\x1b[2J" in run_limited("ls", odd).stderr
    assert str(errors.IntegrityError("\x1b[2J\u202e")) == r"\x1b[2J\u202e"


def test_more_than_the_disk_holds_is_refused_before_the_download(tmp_path: Path) -> None:
    _, url, (meta,) = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    document = json.loads(meta_to_bytes(meta))
    document["artifacts"][0] |= {"size_bytes": 1 << 43, "block_size_bytes": 1 << 43}
    (tmp_path / "mirror" / "meta_000200.json").write_bytes(resealed(document))
    sparse(tmp_path / "mirror" / "model_000200.pt", 1 << 43)
    ended = run_limited("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, ended.returncode, "bytes free", f"{1 << 43} more are needed", "choose another --dest")
    assert not content(tmp_path / "e")


def test_a_hard_link_in_place_of_a_temporary_is_not_written_through(tmp_path: Path) -> None:
    _, url, (meta,) = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 3000)
    (tmp_path / "e").mkdir()
    os.link(precious, tmp_path / "e" / names.tmp_name("model_000200.pt", meta.save_id))
    assert run_limited("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e").returncode == 0
    assert precious.read_bytes() == b"x" * 3000
