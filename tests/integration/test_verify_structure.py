"""Verify without `--deep`: what a listing and the mirror's own checksums show of what is not what was saved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.flow.drain import drain
from ckptmirror.flow.verify.verify import Target, verify
from ckptmirror.stores import open_store
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import assert_tells, run
from tests.kit.faults import of_a_later_version
from tests.kit.roots import drained, make_mirrored, pending, states
from tests.kit.saves import FIRST_ATTEMPT, make_attempt, make_save, put_attempts

BUCKET = "verify-structure"


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
    assert "model_000200.pt is missing" in told
    assert "optim_000200_rank0.pt has 5 bytes instead of 3000" in told


def test_exit_code_6_says_that_something_current_is_damaged(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    (root / "model_000200.pt").unlink()
    ended = run("verify", root)
    assert_tells(ended, 6, "1 of 2 saves are whole; 1 damaged", stdout=None)
    assert re.search(r"^ +200 .* current .* DAMAGED: model_000200.pt is missing", ended.stdout, re.MULTILINE)


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
        own = tuple(artifact for artifact in snapshot.artifacts if artifact.rank == rank)
        (directory / names.emergency_meta_name(rank)).write_bytes(meta_to_bytes(replace(snapshot, artifacts=own)))
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
    assert [note for note in verify(Target(mirrors=(url,))).notes if "its upload may not be finished" in note]


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
    assert "has crc32c" in found.saves[1].faults[0]
    assert not [entry for entry in server.log() if entry["operation"] == "object.media" and "model" in entry["object"]]
    assert found.pending_again == 0  # looking changes nothing
    assert pending(root) == set()
    assert verify(Target(root, (url,)), deep=True).pending_again == 1
    assert drain(root, timeout_s=60.0).is_verified  # under another name: nothing is ever overwritten
    assert verify(Target(root, (url,)), deep=True).outcome == "whole"


def test_a_broken_meta_in_a_bucket_beside_a_whole_save_is_named_with_the_command_that_deletes_it(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/spare"
    _, _, (meta,) = drained(tmp_path, 100, url=url)
    store = open_store(url)
    data, info = store.read("meta_000100.json", limit_bytes=1_000_000)
    store.write(f"meta_000100-{meta.save_id[:8]}.json", data, if_generation=0)
    store.write("meta_000100.json", data[:99], if_generation=info.generation)
    (bad,) = [one for one in verify(Target(mirrors=(url,))).saves if one.verdict.state == "damaged"]
    assert bad.mend == f"gcloud storage rm {url}/meta_000100.json"
