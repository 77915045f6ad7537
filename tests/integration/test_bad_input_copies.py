"""What lies on a mirror, what was asked for and where it was to go: each wrong one is a sentence, nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import errors, resolve_checkpoint_reference
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.sealed_json import seal
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.faults import flip_bit
from tests.kit.roots import content, make_mirrored, make_pending

pytestmark = pytest.mark.long

# -- what is on a mirror ------------------------------------------------------------------------------------


def hostile(meta: dict[str, Any], path: str) -> bytes:
    meta["artifacts"][0]["path"] = path
    return seal(meta["format"], {key: value for key, value in meta.items() if key not in ("checksum", "format")})


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda data: data[: len(data) // 2], "JSON"),
    "empty": (lambda data: data[:0], ""),
    "not UTF-8": (lambda data: b"\xff\xfe" + data, "UTF-8"),
    "another version": (lambda data: data.replace(b'"version":1', b'"version":99'), "version"),
    "a wrong checksum": (lambda data: data.replace(b'"step":200', b'"step":201'), "checksum"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("place", ["mirror", "root"])
def test_a_meta_that_cannot_be_trusted_is_never_staged_or_loaded_and_the_reason_is_told(
    damage: str, place: str, tmp_path: Path
):
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    path = tmp_path / place / "meta_000200.json"
    change, reason = DAMAGES[damage]
    data = change(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    before = content(tmp_path / place)
    if place == "mirror":
        ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
        assert_tells(ended, 3, "meta_000200.json", reason)
        assert not (tmp_path / "e").exists() or not content(tmp_path / "e")
        listed = run("ls", url).stdout
    else:
        with pytest.raises(errors.BrokenMeta) as caught:
            resolve_checkpoint_reference(root / "model_000200.pt")
        assert_explains(caught.value, 6, "meta_000200.json", reason)
        assert_tells(run("push", "--root", root, "--mirror", f"file://{tmp_path}/second"), 3)
        listed = run("ls", root).stdout
    assert re.search(rf"200 +- .*incomplete .*{reason}", listed)
    assert content(tmp_path / place) == before


@pytest.mark.parametrize(
    "path", ["../../escaped.pt", "/etc/escaped", "a\u0000b", "model_000200.pt/../../x", ".ckptmirror/lock"]
)
def test_a_hostile_path_in_a_meta_leaves_the_destination_alone(path: str, tmp_path: Path):
    root, url, metas = make_mirrored(tmp_path, 200, kinds=("model",), sidecars=False)
    data = hostile(json.loads(meta_to_bytes(metas[0])), path)
    for place in (tmp_path / "mirror", root):
        (place / "meta_000200.json").write_bytes(data)
    before = {name for name in content(tmp_path) if not name.startswith("e/")}
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert ended.returncode in (3, 6)
    assert_tells(ended, ended.returncode)
    assert "incomplete" in run("ls", root).stdout
    assert {name for name in content(tmp_path) if not name.startswith("e/")} == before


def test_a_truncated_artifact_on_a_mirror_is_seen_before_the_download(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    path = tmp_path / "mirror" / "model_000200.pt"
    path.write_bytes(path.read_bytes()[:-1])
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 3, "model_000200.pt has 2999 bytes instead of 3000")


def test_a_bit_flipped_artifact_on_a_mirror_is_never_published_and_a_mended_one_is(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    flip_bit(tmp_path / "mirror" / "model_000200.pt")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 6, "model_000200.pt is damaged: the crc32c of block 0", "3 downloads, same result")
    assert not [name for name in content(tmp_path / "e") if not name.endswith(".tmp")]
    flip_bit(tmp_path / "mirror" / "model_000200.pt")
    assert run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e").returncode == 0


def test_a_bit_flipped_artifact_on_disk_is_never_mirrored_and_is_replaced_by_refresh(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",), sidecars=False)
    flip_bit(root / "model_000200.pt")
    ended = run("drain", "--root", root)
    assert ended.returncode == 8
    assert "Traceback" not in ended.stderr
    assert "model_000200.pt" in ended.stderr
    assert run("status", "--root", root).stdout.startswith("NOT SAFE")
    assert not list((tmp_path / "mirror").glob("meta_*"))

    _, url, _ = make_mirrored(tmp_path / "other", 200, kinds=("model",))
    stage = ["stage", "--step", "200", "--mirror", url, "--dest", str(tmp_path / "e")]
    good = Path(run(*stage).stdout.strip())
    saved = good.read_bytes()
    flip_bit(good)
    assert run(*stage, "--refresh").returncode == 0
    assert good.read_bytes() == saved


# -- what was asked for -------------------------------------------------------------------------------------


def test_a_step_that_is_not_there_lists_the_nearest(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100, 200, 300, kinds=("model",), sidecars=False)
    ended = run("stage", "--step", "250", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 3, "has no step 250. The nearest are 100, 200, 300.", "ckptmirror ls")
    assert_tells(run("push", "--root", tmp_path / "root", "--mirror", url, "--step", "250"), 3, "step 250")


def test_a_kind_that_is_not_there_lists_the_kinds(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    ended = run("stage", "--step", "200", "--kind", "dcp", "--mirror", url, "--dest", tmp_path / "e")
    assert_tells(ended, 4, "Step 200 has no kind dcp", "it has model")


def test_the_url_of_a_save_is_told_from_that_of_its_mirror(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100)
    ended = run("stage", "--step", "latest", "--mirror", f"{url}/dcp_000100", "--dest", tmp_path / "e")
    named = f"ckptmirror stage --mirror {url} --step 100 --dest {tmp_path}/e"
    assert_tells(ended, 3, "holds no checkpoint", f"`{named}`")
    assert run(*named.split()[1:]).returncode == 0


def test_the_latest_of_an_empty_mirror_is_not_found(tmp_path: Path):
    (tmp_path / "mirror").mkdir()
    ended = run("stage", "--step", "latest", "--mirror", f"file://{tmp_path}/mirror", "--dest", tmp_path / "e")
    assert_tells(ended, 3, "holds no checkpoint")


# -- the destination ----------------------------------------------------------------------------------------


def test_someone_elses_files_in_the_destination_stay(tmp_path: Path):
    _, url, metas = make_mirrored(tmp_path, 200, kinds=("model",))
    dest = tmp_path / "e"
    dest.mkdir()
    (dest / "model_000200.pt").write_text("mine")
    (dest / "notes.txt").write_text("mine")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", dest)
    assert (ended.returncode, ended.stdout) == (0, f"{dest}/model_000200-{metas[0].save_id[:8]}.pt\n")
    assert (dest / "model_000200.pt").read_text() == (dest / "notes.txt").read_text() == "mine"
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    for name in ("model_000200.pt", f"model_000200-{metas[0].save_id[:8]}.pt"):
        (occupied / name).write_text("mine")
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", occupied)
    assert_tells(ended, 7, str(occupied), "Choose an empty --dest")
    assert set(content(occupied).values()) == {b"mine"}


def test_a_destination_that_is_a_file_or_below_one_is_refused(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    place = tmp_path / "file"
    place.write_text("mine")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", place), 2, "is a file")
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", place / "sub"), 10, "is a file")
    assert place.read_text() == "mine"
