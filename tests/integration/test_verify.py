"""Verify: what is not what was saved is found, in a root and on a mirror, and mended by the command that it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes, tombstone_to_bytes
from ckptmirror.core.errors import CheckpointNotFound, UsageError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Meta, Tombstone
from ckptmirror.flow.deep_read import FileToRead, ObjectToRead, read_all
from ckptmirror.flow.drain import drain
from ckptmirror.flow.status import table_path
from ckptmirror.flow.verify import Target, Verification, target_of, verify
from ckptmirror.local.lock import RootLock
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import memory, open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.cli_place import AS_MODULE, assert_tells, clean_environment, make_mirrored, make_pending, run
from tests.factory import (
    FIRST_ATTEMPT,
    flip_bit,
    make_attempt,
    make_save,
    of_a_later_version,
    put_attempts,
    put_on_mirror,
)
from tests.integration.test_cli import on_terminal

BUCKET = "verify"
BIG = 2 * MIN_BLOCK_SIZE_BYTES + 5000


def drained(folder: Path, *steps: int, url: str | None = None, **more: Any) -> tuple[Path, str, list[Meta]]:
    """A root whose saves its table knows as verified on a mirror."""
    url = url or f"file://{folder}/mirror"
    root, metas = make_pending(folder, url, *steps, **({"kinds": ("model",)} | more))
    assert drain(root, timeout_s=60.0).is_verified
    return root, url, metas


def states(found: Verification) -> list[tuple[int | None, str, str]]:
    return [(one.verdict.step, one.verdict.standing, one.verdict.state) for one in found.saves]


def mend(found: Verification) -> None:
    """Run every command that the verification named, as a person would."""
    for command in dict.fromkeys(one.mend for one in found.saves if one.mend):
        text = command.replace("ckptmirror ", f"{' '.join(AS_MODULE)} ")
        done = subprocess.run(["bash", "-ec", text], env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def pending(root: Path) -> set[str]:
    with UploadsTable.open(table_path(root), read_only=True) as table:
        return {record.path for record in table.records(state=RecordState.PENDING)}


# -- structure ------------------------------------------------------------------------------------------------


def test_whole_saves_of_a_root_and_of_a_mirror_are_whole(tmp_path: Path) -> None:
    root, url, metas = make_mirrored(tmp_path, 100, 200)
    for place in (str(root), url):
        ended = run("verify", place)
        assert (ended.returncode, ended.stderr) == (0, "2 of 2 saves are whole\n")
        lines = ended.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["100", "200"]
        assert all(line.endswith("  whole") for line in lines)
        assert metas[0].save_id[:8] in lines[0]


@pytest.mark.parametrize("on_mirror", [False, True])
def test_a_missing_file_and_one_of_another_size_are_both_named(tmp_path: Path, on_mirror: bool) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    folder = tmp_path / "mirror" if on_mirror else root
    (folder / "model_000200.pt").unlink()
    (folder / "optim_000200_rank0.pt").write_bytes(b"short")
    found = verify(Target(mirrors=(url,)) if on_mirror else Target(root))
    assert states(found) == [(100, "current", "whole"), (200, "current", "damaged")]
    assert found.outcome == "damaged"
    told = "\n".join(found.saves[1].faults)
    assert "model_000200.pt: is missing" in told
    assert "optim_000200_rank0.pt: has 5 bytes instead of 3000" in told


def test_exit_code_6_says_that_something_current_is_damaged(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    (root / "model_000200.pt").unlink()
    ended = run("verify", root)
    assert_tells(ended, 6, "1 of 2 saves are whole; 1 damaged", stdout=None)
    assert re.search(r"^ +200 .* current .* DAMAGED: model_000200.pt: is missing", ended.stdout, re.MULTILINE)


def test_damage_off_the_lineage_is_told_and_changes_no_exit_code(tmp_path: Path) -> None:
    root, _, metas = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    put_attempts(root, [FIRST_ATTEMPT, make_attempt(1, metas[0])])
    (root / "model_000200.pt").unlink()
    ended = run("verify", root)
    assert ended.returncode == 0
    assert re.search(r" 200 .* superseded .* DAMAGED", ended.stdout)
    assert "off the lineage" in ended.stderr


def test_a_broken_meta_is_damage_of_a_save_that_nobody_can_place(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    (root / "meta_000200.json").write_text("{}")
    found = verify(Target(root))
    assert states(found) == [(100, "current", "whole"), (200, "unknown", "damaged")]
    assert not found.notes  # of a broken meta the files are loose
    assert found.outcome == "damaged"


def test_what_cannot_be_read_now_is_not_called_damaged(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    meta = root / "meta_000100.json"
    meta.write_bytes(of_a_later_version(meta.read_bytes()))
    ended = run("verify", root)
    assert_tells(ended, 5, "0 of 1 saves are whole; 1 could not be read", stdout=None)
    assert "not read:" in ended.stdout


def test_a_broken_snapshot_does_not_fail_a_check_for_ever(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    snapshot = make_save(root, 150, ("emergency",), number=2, ranks=2)
    directory = root / snapshot.artifacts[0].path.partition("/")[0]
    for rank in range(2):
        (directory / names.emergency_meta_name(rank)).write_bytes(meta_to_bytes(snapshot))
    (root / "meta_000150.json").unlink()
    (root / snapshot.artifacts[0].path).unlink()
    assert verify(Target(root)).outcome == "damaged"
    make_save(root, 200, ("model",), number=3)
    assert verify(Target(root)).outcome == "whole"


def test_files_that_no_meta_names_are_a_note(tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    (root / "meta_000200.json").unlink()
    (tmp_path / "mirror" / "meta_000200.json").unlink()
    assert [note for note in verify(Target(root)).notes if "no valid meta names it" in note]
    assert [note for note in verify(Target(mirrors=(url,))).notes if "may be on its way" in note]


def test_a_bucket_that_computes_checksums_is_compared_without_reading_it(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    root, url, _ = drained(tmp_path, 100, url=f"gs://{BUCKET}/crc")
    there = open_store(url)
    info = there.stat("model_000100.pt")
    assert info is not None
    there.write("model_000100.pt", b"x" * info.size_bytes, if_generation=info.generation)
    server.clear_log()
    found = verify(Target(root, (url,)))
    assert [one.verdict.state for one in found.saves] == ["whole", "damaged"]
    assert "has the crc32c" in found.saves[1].faults[0]
    assert not [entry for entry in server.log() if entry["operation"] == "object.media" and "model" in entry["object"]]
    assert found.pending_again == 0  # looking changes nothing
    assert pending(root) == set()
    assert verify(Target(root, (url,)), deep=True).pending_again == 1
    assert drain(root, timeout_s=60.0).is_verified  # under another name: nothing is ever overwritten
    assert verify(Target(root, (url,)), deep=True).outcome == "whole"


# -- every byte -----------------------------------------------------------------------------------------------


def test_deep_finds_one_flipped_bit_that_the_structure_cannot_show(tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",), sizes={"model_000200.pt": BIG})
    flip_bit(root / "model_000200.pt", MIN_BLOCK_SIZE_BYTES + 7)
    flip_bit(tmp_path / "mirror" / "model_000200.pt", -1)
    for target, block in ((Target(root), 1), (Target(mirrors=(url,)), 2)):
        assert verify(target).outcome == "whole"
        told: list[tuple[int, int]] = []
        found = verify(target, deep=True, on_progress=lambda done, total, told=told: told.append((done, total)))
        assert states(found) == [(100, "current", "whole"), (200, "current", "damaged")]
        assert f"model_000200.pt: block {block} (from byte {block * MIN_BLOCK_SIZE_BYTES})" in found.saves[1].faults[0]
        whole, damaged = found.saves
        assert whole.read_bytes == whole.size_bytes
        assert damaged.read_bytes == damaged.size_bytes - BIG
        assert told[-1][0] == told[-1][1] == whole.size_bytes + damaged.size_bytes


def test_every_damaged_block_is_counted_and_other_files_are_read_all_the_same(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",), sizes={"model_000100.pt": BIG})
    for offset in (3, MIN_BLOCK_SIZE_BYTES, BIG - 1):
        flip_bit(root / "model_000100.pt", offset)
    flip_bit(root / "extra_000100_rank0.pt")
    found = verify(Target(root), deep=True).saves[0]
    assert len(found.faults) == 2
    assert any("block 0 (from byte 0) has another crc32c, and 2 more of 3 blocks" in fault for fault in found.faults)
    assert found.read_bytes == meta.size_bytes - BIG - 3000


def test_a_file_that_shrinks_a_link_and_a_directory_in_its_place_are_damage(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",), size_bytes=9000)
    digest = meta.artifacts[0].digest
    (tmp_path / "short").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to(root / meta.artifacts[0].path)
    (tmp_path / "folder").mkdir()
    found = read_all([FileToRead(tmp_path / name, digest) for name in ("short", "link", "folder", "none")])
    assert all(one is not None for one in found)
    assert [(one.state, one.is_gone) for one in found if one is not None] == [("damaged", False)] * 3 + [
        ("damaged", True)
    ]


def test_a_block_that_breaks_on_its_way_is_asked_for_again(server: GcsServerProcess, tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, url=f"gs://{BUCKET}/way")
    server.faults([Fault(operation="object.media", object="model_000100.pt", corrupt_byte_at=10, times=2)])
    assert verify(Target(mirrors=(url,)), deep=True).outcome == "whole"
    server.faults([Fault(operation="object.media", object="model_000100.pt", corrupt_byte_at=10, times=0)])
    assert verify(Target(mirrors=(url,)), deep=True).outcome == "damaged"


def test_a_mirror_that_stops_answering_is_not_damaged(server: GcsServerProcess, tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, 200, url=f"gs://{BUCKET}/silent")
    server.faults([Fault(operation="object.media", object="model_", status=403, times=0)])
    ended = run("verify", url, "--deep", env=server.environment)
    assert_tells(ended, 12, "could not be read", stdout=None)
    assert "it was not read to its end" in ended.stdout


def test_an_object_is_read_at_the_generation_that_was_listed(tmp_path: Path) -> None:
    memory.drop("verify-pinned")
    store = open_store("memory://verify-pinned/run")
    root, _, (meta,) = make_mirrored(tmp_path, 100, kinds=("model",))
    put_on_mirror(store, root, meta)
    artifact = meta.artifacts[0]
    info = store.stat(artifact.path)
    assert info is not None
    store.write(artifact.path, (root / artifact.path).read_bytes(), if_generation=info.generation)
    (found,) = read_all([ObjectToRead(store, artifact.path, info.generation, artifact.digest)])
    assert found is not None
    assert found.is_gone


@pytest.mark.parametrize("tombstone", [False, True])
def test_what_is_deleted_in_order_while_it_is_read_is_no_damage(tmp_path: Path, tombstone: bool) -> None:
    """A rotation takes the meta first. A file that goes while its meta stays is damage."""
    root, _, (meta, _) = make_mirrored(tmp_path, 100, 200, kinds=("model",), sizes={"model_000100.pt": BIG})

    def rotate(_done: int, _total: int) -> None:
        if tombstone:
            (root / "meta_000100.json").unlink(missing_ok=True)
        for artifact in meta.artifacts:
            (root / artifact.path).unlink(missing_ok=True)

    found = verify(Target(root), deep=True, on_progress=rotate)
    gone = [one for one in found.saves if one.verdict.step == 100 and one.verdict.state == "damaged"]
    if tombstone:
        assert found.outcome == "whole"
    else:
        assert "it is gone" in gone[0].faults[0]


def test_a_save_under_a_tombstone_is_not_missed(tmp_path: Path) -> None:
    _, url, (meta, _) = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    stone = Tombstone(meta.save_id, 100, meta.kinds, "by policy", "2026-01-01T00:00:00Z")
    (tmp_path / "mirror" / "meta_000100.json").write_bytes(tombstone_to_bytes(stone))
    assert states(verify(Target(mirrors=(url,)), deep=True)) == [(200, "current", "whole")]


def test_memory_is_bounded_by_the_readers_whatever_there_is_to_read(tmp_path: Path) -> None:
    root, _, (meta,) = make_mirrored(tmp_path, 100, ranks=6, size_bytes=MIN_BLOCK_SIZE_BYTES)
    readers: set[str] = set()
    read_all(
        [FileToRead(root / a.path, a.digest) for a in meta.artifacts],
        on_bytes=lambda _count: readers.add(threading.current_thread().name),
        workers=3,
    )
    assert len(readers) <= 3


# -- what mends it, and what the table is told ----------------------------------------------------------------


def test_what_is_damaged_on_a_mirror_is_pending_again_and_a_drain_mends_it(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200)
    flip_bit(tmp_path / "mirror" / "model_000200.pt")
    assert verify(Target(root, (url,))).pending_again == 0
    assert verify(Target(mirrors=(url,)), deep=True).pending_again == 0
    assert pending(root) == set()
    found = verify(Target(root, (url,)), deep=True)
    assert found.pending_again == 1
    assert pending(root) == {"model_000200.pt", "meta_000200.json"}
    rotated = run("rotate", "--root", root, "--keep-last", "1")
    assert "200" not in rotated.stderr  # it stays, as the newest; and step 100, which is whole there, may go
    mend(found)
    assert verify(Target(root, (url,)), deep=True).outcome == "whole"


def test_rotation_keeps_the_local_copy_of_what_was_found_damaged(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200)
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    verify(Target(root, (url,)), deep=True)
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert ended.returncode == 7
    assert (root / "model_000100.pt").exists()


@pytest.mark.parametrize("whole_save", [False, True])
def test_a_save_that_the_table_calls_committed_and_that_is_not_there_is_missed(
    tmp_path: Path, whole_save: bool
) -> None:
    """What is found on a mirror by itself cannot show what is gone from it."""
    root, url, (_, meta) = drained(tmp_path, 100, 200)
    (tmp_path / "mirror" / "meta_000200.json").unlink()
    for artifact in meta.artifacts if whole_save else ():
        (tmp_path / "mirror" / artifact.path).unlink()
    assert states(verify(Target(mirrors=(url,)))) == [(100, "current", "whole")]
    found = verify(Target(root, (url,)), deep=True)
    assert states(found)[2:] == [(100, "current", "whole"), (200, "current", "damaged")]
    assert found.saves[-1].faults == ("its meta is gone from the mirror",)
    assert found.pending_again == 1
    mend(found)
    assert verify(Target(root, (url,)), deep=True).outcome == "whole"


def test_a_mirror_that_the_table_does_not_know_changes_no_record(tmp_path: Path) -> None:
    root, _, (meta,) = drained(tmp_path, 100)
    other = f"file://{tmp_path}/other"
    store = open_store(other)
    put_attempts(store, [FIRST_ATTEMPT])
    put_on_mirror(store, root, meta)
    flip_bit(tmp_path / "other" / "model_000100.pt")
    found = verify(Target(root, (other,)), deep=True)
    assert found.pending_again == 0
    assert pending(root) == set()
    assert f"{other} is no mirror of {root}: no upload record was changed" in found.notes
    assert found.saves[1].mend == f"ckptmirror push --root {root} --mirror {other} --step 100"
    mend(found)
    assert verify(Target(mirrors=(other,)), deep=True).saves[-1].verdict.state == "whole"


def test_a_mirror_that_is_another_place_by_now_is_not_verified_as_the_one_that_the_table_knows(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100)
    (tmp_path / "mirror").rename(tmp_path / "away")
    make_mirrored(tmp_path / "elsewhere", 100, kinds=("model",))
    (tmp_path / "elsewhere" / "mirror").rename(tmp_path / "mirror")
    assert_tells(run("verify", "--root", root, "--mirror", url, "--deep"), 5, "is it mounted?")
    assert pending(root) == set()


def test_without_a_table_the_mirror_is_verified_and_nobody_is_told(tmp_path: Path) -> None:
    root, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    found = verify(Target(root, (url,)), deep=True)
    assert found.pending_again == 0
    assert any("no pending-uploads table" in note for note in found.notes)
    assert not table_path(root).exists()


def test_an_object_that_was_put_there_anew_and_is_right_is_a_note(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100)
    path = tmp_path / "mirror" / "model_000100.pt"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    found = verify(Target(root, (url,)), deep=True)
    assert (found.outcome, found.pending_again) == ("whole", 0)
    assert any("put there anew since they were verified" in note for note in found.notes)


def test_what_a_worker_mended_meanwhile_is_left_alone(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, sizes={"model_000100.pt": BIG})
    path = tmp_path / "mirror" / "model_000100.pt"
    whole = path.read_bytes()
    flip_bit(path)

    def mended(done: int, total: int) -> None:
        if done == total:
            path.unlink()
            path.write_bytes(whole)

    assert verify(Target(root, (url,)), deep=True, on_progress=mended).pending_again == 0


def test_a_damaged_local_file_comes_back_from_a_mirror_by_the_command_that_is_named(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"))
    flip_bit(root / "model_000100.pt")
    flip_bit(root / "dcp_000200" / "__0_0.distcp")
    found = verify(Target(root), deep=True)
    assert [one.mend.split(" --full")[0] for one in found.saves] == [
        "ckptmirror stage --step 100 --kind model",
        "ckptmirror stage --step 200 --kind dcp",
    ]
    assert f"--mirror {url} --dest {root}" in found.saves[0].mend
    mend(found)
    assert verify(Target(root), deep=True).outcome == "whole"


def test_no_copy_that_was_seen_to_be_damaged_is_named_as_the_good_one(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100)
    flip_bit(root / "model_000100.pt")
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    found = verify(Target(root, (url,)), deep=True)
    assert [one.mend for one in found.saves] == ["", ""]
    ended = run("verify", "--root", root, "--mirror", url, "--deep")
    assert ended.stdout.count("nothing known here mends it") == 2


def test_broken_metas_are_mended_here_and_there(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"))
    (root / "meta_000100.json").write_text("{}")
    (tmp_path / "mirror" / "meta_000200.json").write_text("{}")
    found = verify(Target(root, (url,)), deep=True)
    assert [one.verdict.state for one in found.saves] == ["damaged", "whole", "whole", "damaged"]
    assert found.pending_again == 1
    mend(found)
    after = verify(Target(root, (url,)), deep=True)
    assert after.outcome == "whole"  # the broken one stays there, beside the whole one
    assert [(one.verdict.step, one.verdict.standing) for one in after.saves if one.verdict.state == "damaged"] == [
        (200, "replaced")
    ]


def test_a_staged_copy_is_mended_from_where_it_came(tmp_path: Path) -> None:
    _, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    dest = tmp_path / "eval"
    assert run("stage", "--step", "100", "--mirror", url, "--dest", dest).returncode == 0
    flip_bit(dest / "model_000100.pt")
    found = verify(Target(dest), deep=True)
    assert found.outcome == "damaged"
    mend(found)
    assert verify(Target(dest), deep=True).outcome == "whole"


# -- what is verified -----------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, str]:
    root, url, _ = make_mirrored(tmp_path, 100, 200, 300)
    (root / "latest").symlink_to("dcp_000200")
    return root, url


def test_one_save_is_verified_by_any_of_its_names(three: tuple[Path, str]) -> None:
    root, url = three
    for name in ("meta_000200.json", "model_000200.pt", "dcp_000200", "latest", "optim_000200_rank0.pt"):
        assert states(verify(target_of(str(root / name)))) == [(200, "current", "whole")]
    for name in ("meta_000200.json", "model_000200.pt", "dcp_000200"):
        assert states(verify(target_of(f"{url}/{name}"))) == [(200, "current", "whole")]
    assert target_of(url) == Target(mirrors=(url,))
    assert [one.verdict.step for one in verify(Target(root, (url,)), step=300).saves] == [300, 300]


def test_the_directory_of_a_mirror_is_verified_as_the_mirror_that_it_is(tmp_path: Path) -> None:
    """There an object may have another name than the file that it is a copy of."""
    root, url, _ = drained(tmp_path, 100)
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    mend(verify(Target(root, (url,)), deep=True))
    assert len(list((tmp_path / "mirror").glob("model_000100*.pt"))) == 2
    assert states(verify(target_of(str(tmp_path / "mirror")), deep=True)) == [(100, "current", "whole")]


def test_what_is_not_there_is_an_error_and_never_whole(three: tuple[Path, str], tmp_path: Path) -> None:
    root, url = three
    (tmp_path / "empty").mkdir()
    for target, words in (
        (Target(tmp_path / "empty"), "holds no saves"),
        (Target(tmp_path / "nowhere"), "is not a directory"),
        (Target(root, name="model_000700.pt"), "does not exist"),
        (Target(mirrors=(url,), name="model_000700.pt"), "No whole save"),
    ):
        with pytest.raises(CheckpointNotFound, match=words):
            verify(target)
    for target in (Target(root), Target(mirrors=(url,)), Target(root, (url,))):
        with pytest.raises(CheckpointNotFound, match=r"has no step 250\. The nearest are 100, 200, 300"):
            verify(target, step=250)
    (root / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="is not a checkpoint"):
        target_of(str(root / "notes.txt"))
    (root / "model_000400.pt").write_bytes(b"x")
    with pytest.raises(CheckpointNotFound, match="No valid meta names"):
        verify(target_of(str(root / "model_000400.pt")))


def test_the_environment_stands_in_only_where_nothing_is_given(three: tuple[Path, str], tmp_path: Path) -> None:
    root, url = three
    both = {"CKPTMIRROR_MIRROR": url, "CKPTMIRROR_ROOT": str(root)}
    assert json.loads(run("verify", "--json", env=both).stdout)["saves"][0]["place"] == url
    assert json.loads(run("verify", "--json", env={"CKPTMIRROR_ROOT": str(root)}).stdout)["saves"][0]["place"] == str(
        root
    )
    given = json.loads(run("verify", "--root", root, "--json", env=both).stdout)["saves"]
    assert {save["place"] for save in given} == {str(root)}
    assert_tells(run("verify", root, "--mirror", url), 2, "not both")
    assert_tells(run("verify", tmp_path / "none"), 3, "does not exist")
    assert_tells(run("verify", f"file://{tmp_path}/none"), 10, "does not exist")


def test_a_live_trainer_is_no_obstacle(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100)
    lock = RootLock(root)
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    try:
        assert verify(Target(root, (url,)), deep=True).outcome == "whole"
    finally:
        lock.release()


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",), size_bytes=300_000)
    exit_code, stdout, shown = on_terminal("verify", root, "--deep")
    assert exit_code == 0
    assert stdout.endswith("whole, every byte\n")
    assert "verify" in shown
    assert "1.1 MiB of 1.1 MiB" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_a_mirror_without_any_save_is_not_passed_by_beside_one_that_has_them(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200)
    (tmp_path / "empty").mkdir()
    empty = f"file://{tmp_path}/empty"
    for places in (["--root", root, "--mirror", empty], ["--mirror", url, "--mirror", empty]):
        assert_tells(run("verify", *places, "--deep"), CheckpointNotFound.exit_code, f"{empty} holds no saves")
    assert run("verify", "--root", root, "--mirror", url).returncode == 0
    (root / "meta_000100.json").unlink()
    (root / "model_000100.pt").unlink()
    found = verify(Target(root, (url,)), step=100)  # rotated away here
    assert [one.place for one in found.saves if one.verdict.state == "whole"] == [url]
