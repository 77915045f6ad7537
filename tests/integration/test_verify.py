"""Verify: which saves are looked at, what mends what is damaged, and what the table is told of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ckptmirror.core.errors import CheckpointNotFound, UsageError
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES
from ckptmirror.flow.verify.verify import Target, Verification, target_of, verify
from ckptmirror.local.lock import RootLock
from ckptmirror.local.table_place import table_path
from ckptmirror.stores import open_store
from tests.kit.cli import AS_MODULE, assert_tells, clean_environment, run
from tests.kit.faults import flip_bit
from tests.kit.formats import dcp_contents
from tests.kit.roots import drained, make_mirrored, pending, states
from tests.kit.saves import FIRST_ATTEMPT, put_attempts, put_on_mirror
from tests.kit.terminal import OnTerminal, bare

BIG = 2 * MIN_BLOCK_SIZE_BYTES + 5000


def mend(found: Verification) -> None:
    """Run every command that the verification named, as a person would."""
    for command in dict.fromkeys(one.mend for one in found.saves if one.mend):
        text = command.replace("ckptmirror ", f"{' '.join(AS_MODULE)} ")
        done = subprocess.run(["bash", "-ec", text], env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


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
    assert f"{other} is not a mirror of {root}: no upload record was changed" in found.notes
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
    assert any("rewritten there since they were verified" in note for note in found.notes)


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
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"), contents=dcp_contents("__0_0.distcp"))
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


@pytest.mark.parametrize("name", ["model_000100.pt", pytest.param("meta_000100.json", marks=pytest.mark.long)])
def test_what_is_damaged_on_a_mirror_and_rotated_here_is_staged_from_another_mirror_and_sent_again(
    name: str, tmp_path: Path
) -> None:
    contents = dcp_contents("__0_0.distcp")
    root, url, metas = drained(tmp_path, 100, 200, kinds=("dcp", "model"), contents=contents)
    other = f"file://{tmp_path}/other"
    store = open_store(other)
    put_attempts(store, [FIRST_ATTEMPT])
    for meta in metas:
        put_on_mirror(store, root, meta)
    assert run("rotate", "--root", root, "--keep-last", "1").returncode == 0
    assert not (root / "meta_000100.json").exists()
    flip_bit(tmp_path / "mirror" / name)
    alone = run("verify", "--mirror", url, "--mirror", other, "--deep")
    if not name.startswith("meta"):  # it says whose file it is
        assert_tells(
            alone, 6, f"`ckptmirror verify --root DIR --mirror {url} --mirror {other} --deep` names", stdout=None
        )
        assert f"-> it is whole on {other}" in alone.stdout
        assert "o good copy" not in alone.stdout + alone.stderr
    found = verify(Target(root, (url, other)), deep=True)
    (command,) = (one.mend for one in found.saves if one.verdict.state == "damaged")
    assert command.count(f"--mirror {other} --dest {root}") == 2
    assert command.endswith(f" && ckptmirror drain --root {root}")
    mend(found)
    assert verify(Target(root, (url, other)), deep=True).outcome == "whole"
    assert (root / "meta_000100.json").exists()


def test_no_copy_that_was_seen_to_be_damaged_is_named_as_the_good_one(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100)
    flip_bit(root / "model_000100.pt")
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    found = verify(Target(root, (url,)), deep=True)
    assert [one.mend for one in found.saves] == ["", ""]
    ended = run("verify", "--root", root, "--mirror", url, "--deep")
    assert ended.stdout.count("-> no good copy is known") == 2


def test_broken_metas_are_mended_here_and_there(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"), contents=dcp_contents("__0_0.distcp"))
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
    alone = run("verify", url)  # without the table nobody knows whose it was
    assert_tells(alone, 6, "1 damaged", stdout=None)
    assert f"a whole save of step 200 is beside it -> rm {tmp_path}/mirror/meta_000200.json" in alone.stdout
    mend(after)
    assert verify(Target(mirrors=(url,)), deep=True).outcome == "whole"
    assert run("verify", url).returncode == 0
    assert_tells(run("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "eval"), 0, stdout=None)


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
    with pytest.raises(CheckpointNotFound, match="no meta file names it"):
        verify(target_of(str(root / "model_000400.pt")))


def test_the_settings_stand_in_only_where_nothing_is_given(three: tuple[Path, str], tmp_path: Path) -> None:
    root, url = three
    both = {"CKPTMIRROR_MIRROR": url, "CKPTMIRROR_ROOT": str(root)}
    assert json.loads(run("verify", "--json", env=both).stdout)["saves"][0]["place"] == url
    assert json.loads(run("verify", "--json", env={"CKPTMIRROR_ROOT": str(root)}).stdout)["saves"][0]["place"] == str(
        root
    )
    (tmp_path / "ckptmirror.toml").write_text(f'root = "{root}"\nmirrors = ["{url}"]\n')
    assert json.loads(run("verify", "--json", cwd=tmp_path).stdout)["saves"][0]["place"] == url
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
    with OnTerminal("verify", root, "--deep") as terminal:
        exit_code, stdout, shown = terminal.end()
    assert exit_code == 0
    assert stdout.endswith("whole, every byte\n")
    assert "verify" in shown
    assert "1.1 MiB of 1.1 MiB" in bare(shown)


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
