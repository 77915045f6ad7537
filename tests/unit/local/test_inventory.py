"""What a root holds is told from names, metas and sizes alone; what is not a whole save is listed with why."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import Artifact, Attempt, Digest, Kind, Meta, new_id
from ckptmirror.flow.places.catalog import part_word
from ckptmirror.local import trash
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.inventory import Inventory, read_inventory
from tests.kit.cost import calls_of, steps_of

RUN = new_id()
ATTEMPT = Attempt(new_id(), 1, None)


def artifact(root: Path, path: str, kind: Kind, content: bytes = b"bytes", rank: int | None = None) -> Artifact:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    return Artifact(path, (kind,), rank, digest_file(root / path))


def save(root: Path, step: int, *, tag: bool = False, number: int = 1) -> Meta:
    """Put a whole save of both kinds into the root."""
    save_id = new_id()
    name = names.SaveName(step, save_id[:8] if tag else "")
    artifacts = [
        artifact(root, f"{name.dcp_dir}/.metadata", "dcp"),
        artifact(root, f"{name.dcp_dir}/pp0/__0_0.distcp", "dcp", rank=0),
        artifact(root, name.model, "model"),
    ]
    meta = Meta(RUN, ATTEMPT, step, save_id, number, ("dcp", "model"), 1, 1, 0, tuple(artifacts), tag=name.tag)
    (root / name.meta).write_bytes(meta_to_bytes(meta))
    return meta


def emergency(root: Path, step: int, ranks: list[int], world_size: int) -> str:
    directory = names.emergency_dir_name(step, "20261121T131500Z")
    save_id = new_id()
    for rank in ranks:
        file = artifact(root, f"{directory}/state_rank{rank}.pt", "emergency", rank=rank)
        meta = Meta(RUN, ATTEMPT, step, save_id, 9, ("emergency",), world_size, 1, 0, (file,))
        (root / directory / names.emergency_meta_name(rank)).write_bytes(meta_to_bytes(meta))
    return directory


def steps(inventory: Inventory) -> list[int]:
    return [found.meta.step for found in inventory.saves]


def whys(items: object) -> dict[str, str]:
    return {str(getattr(item, "path", None) or item.meta_path).rpartition("/")[2]: item.why for item in items}  # type: ignore[attr-defined]


def test_whole_saves_are_listed_by_step_as_integers(tmp_path: Path):
    for number, step in enumerate((1_000_000, 9, 10, 999_999)):
        save(tmp_path, step, number=number + 1)
    found = read_inventory(tmp_path)
    assert steps(found) == [9, 10, 999_999, 1_000_000]
    assert found == Inventory(tmp_path, saves=found.saves)


def test_a_root_that_does_not_exist_is_empty_and_a_file_is_an_error(tmp_path: Path):
    assert read_inventory(tmp_path / "absent") == Inventory(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IntegrityError, match="cannot be listed"):
        read_inventory(tmp_path / "file")


def test_a_root_behind_a_link_is_read(tmp_path: Path):
    (tmp_path / "root").mkdir()
    save(tmp_path / "root", 200)
    (tmp_path / "link").symlink_to("root")
    assert steps(read_inventory(tmp_path / "link")) == [200]


def _shorter(path: Path) -> None:
    os.truncate(path, 3)


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("which", ["model_000200.pt", "dcp_000200/.metadata", "dcp_000200/pp0/__0_0.distcp"])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (os.unlink, "is missing"),
        (_shorter, "has 3 bytes instead of 5"),
        (_longer, "has 6 bytes instead of 5"),
        (_link, "is a symbolic link"),
        (_directory, "is not a regular file"),
        (_pipe, "is not a regular file"),
    ],
)
def test_an_artifact_that_is_not_as_its_meta_says_makes_the_save_incomplete(
    tmp_path: Path, which: str, spoil: Callable[[Path], None], why: str
):
    save(tmp_path, 100)
    save(tmp_path, 200, number=2)
    spoil(tmp_path / which)
    found = read_inventory(tmp_path)
    assert steps(found) == [100]
    assert [f"{which} {why}" in item.why for item in found.incomplete] == [True]


@pytest.mark.parametrize("which", ["dcp_000200", "dcp_000200/pp0"])
def test_a_link_in_place_of_a_directory_makes_the_save_incomplete(tmp_path: Path, which: str):
    save(tmp_path, 200)
    (tmp_path / which).rename(tmp_path / "elsewhere")
    (tmp_path / which).symlink_to(tmp_path / "elsewhere")
    found = read_inventory(tmp_path)
    assert steps(found) == []
    assert "is a symbolic link" in found.incomplete[0].why


def test_a_broken_meta_is_listed_with_why_and_its_files_are_not_a_save(tmp_path: Path):
    save(tmp_path, 200)
    path = tmp_path / "meta_000200.json"
    data = path.read_bytes()
    for content in (b"", data[:-10], data.replace(b'"step":200', b'"step":201'), b"\xff", data[: len(data) // 2]):
        path.write_bytes(content)
        found = read_inventory(tmp_path)
        assert steps(found) == []
        assert found.incomplete == ()
        assert whys(found.broken)["meta_000200.json"]
        assert whys(found.foreign) == {
            "dcp_000200": "no valid meta names it",
            "model_000200.pt": "no valid meta names it",
        }


def test_a_meta_behind_a_link_or_under_another_steps_name_is_broken(tmp_path: Path):
    save(tmp_path, 200)
    save(tmp_path, 300, number=2)
    (tmp_path / "meta_000200.json").rename(tmp_path / "meta_000201.json")
    (tmp_path / "meta_000300.json").rename(tmp_path / "m")
    (tmp_path / "meta_000300.json").symlink_to("m")
    found = read_inventory(tmp_path)
    assert steps(found) == []
    assert whys(found.broken)["meta_000201.json"] == "holds the meta of meta_000200.json"
    assert "symbolic link" in whys(found.broken)["meta_000300.json"]


def test_two_saves_of_one_step_stand_side_by_side(tmp_path: Path):
    first, second = save(tmp_path, 200), save(tmp_path, 200, tag=True, number=2)
    found = read_inventory(tmp_path)
    assert {item.meta.save_id for item in found.saves} == {first.save_id, second.save_id}


def test_two_metas_of_one_save_are_both_refused(tmp_path: Path):
    meta = save(tmp_path, 200)
    twin = replace(meta, step=200, tag=meta.save_id[:8], artifacts=())
    twin = replace(twin, kinds=("model",), artifacts=(artifact(tmp_path, f"model_000200-{twin.tag}.pt", "model"),))
    (tmp_path / f"meta_000200-{twin.tag}.json").write_bytes(meta_to_bytes(twin))
    found = read_inventory(tmp_path)
    assert steps(found) == []
    assert ["another meta of the same save" in item.why for item in found.incomplete] == [True, True]


def test_extra_files_in_a_saves_directory_are_foreign_and_do_no_harm(tmp_path: Path):
    save(tmp_path, 200)
    (tmp_path / "dcp_000200" / "notes.txt").write_bytes(b"x")
    (tmp_path / "dcp_000200" / "pp0" / "more").write_bytes(b"x")
    found = read_inventory(tmp_path)
    assert steps(found) == [200]
    assert [str(item.path.relative_to(tmp_path)) for item in found.foreign] == [
        "dcp_000200/notes.txt",
        "dcp_000200/pp0/more",
    ]


def test_every_other_thing_is_sorted_by_what_it_is(tmp_path: Path):
    (tmp_path / ".ckptmirror" / "trash").mkdir(parents=True)
    (tmp_path / ".ckptmirror" / "trash" / "old").write_bytes(b"")
    (tmp_path / ".ckptmirror" / "status.json.1f0c9a2e.tmp").write_bytes(b"")
    (tmp_path / "latest").symlink_to("dcp_000200")
    for name in ("model_000200.pt.1f0c9a2e.tmp", "dcp_000200.1f0c9a2e.tmp", "notes.tmp", "model_200.pt", "meta.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "dist_ckpt_000100").mkdir()
    found = read_inventory(tmp_path)
    assert sorted(path.name for path in found.temporaries) == [
        "dcp_000200.1f0c9a2e.tmp",
        "model_000200.pt.1f0c9a2e.tmp",
        "status.json.1f0c9a2e.tmp",
    ]
    assert whys(found.foreign) == {
        "notes.tmp": "not a name that ckptmirror uses",
        "model_200.pt": "not a name that ckptmirror uses",
    }
    assert [path.name for path in found.trash] == ["old"]
    assert sorted(path.name for path in found.legacy) == ["dist_ckpt_000100", "meta.json"]


def test_an_emergency_save_is_whole_when_every_rank_left_its_meta(tmp_path: Path):
    directory = emergency(tmp_path, 200, [0, 1, 2], 3)
    found = read_inventory(tmp_path)
    assert steps(found) == [200]
    meta = found.saves[0].meta
    assert meta.kinds == ("emergency",)
    assert [file.path for file in meta.artifacts] == [f"{directory}/state_rank{rank}.pt" for rank in range(3)]
    assert found == Inventory(tmp_path, saves=found.saves)


def test_what_some_ranks_left_of_an_emergency_save_is_a_part_that_says_which(tmp_path: Path):
    directory = emergency(tmp_path, 200, [1], 3)
    (tmp_path / directory / "state_rank0.pt.1f0c9a2e.tmp").write_bytes(b"")
    found = read_inventory(tmp_path)
    assert [(save.meta.step, save.meta.is_whole) for save in found.saves] == [(200, False)]
    assert part_word(found.saves[0].meta) == "2 of 3 ranks left nothing of it here (ranks 0, 2)"
    assert [path.name for path in found.temporaries] == ["state_rank0.pt.1f0c9a2e.tmp"]
    assert found.foreign == ()


def test_an_emergency_save_of_more_ranks_than_anybody_has_costs_no_more_than_its_files(tmp_path: Path):
    """Of 10,000,000 ranks, the list of those without a meta took 360 MiB."""
    emergency(tmp_path, 200, [1], 10_000_000)
    tracemalloc.start()
    try:
        found = read_inventory(tmp_path)
        word = part_word(found.saves[0].meta)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    why = "9999999 of 10000000 ranks left nothing of it here (ranks 0, 2, 3, 4, 5, 6, 7, 8, ...)"
    assert word == why
    assert peak < 8 << 20


def test_a_meta_of_an_emergency_save_counts_only_in_its_own_directory(tmp_path: Path):
    """In another one, it was a second meta of the save, so that neither counted."""
    directory = emergency(tmp_path, 200, [0], 1)
    other = tmp_path / names.emergency_dir_name(200, "20270101T000000Z")
    shutil.copytree(tmp_path / directory, other)
    found = read_inventory(tmp_path)
    assert steps(found) == [200]
    assert [item.path.parent for item in found.broken] == [other]
    assert whys(found.broken) == {"meta_rank0.json": f"holds the meta of {directory}"}


def test_an_emergency_directory_without_metas_is_not_a_save(tmp_path: Path):
    directory = emergency(tmp_path, 200, [0], 1)
    os.unlink(tmp_path / directory / "meta_rank0.json")
    found = read_inventory(tmp_path)
    assert (found.saves, found.incomplete) == ((), ())
    assert whys(found.foreign) == {directory: "no valid meta names it"}


def test_a_hostile_metadata_file_is_not_unpickled(tmp_path: Path):
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    save(tmp_path, 200)
    (tmp_path / "dcp_000200" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    read_inventory(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_what_is_deleted_while_it_is_listed_was_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ckptmirror.local import inventory

    save(tmp_path, 200)
    real = inventory.read_limited

    def read_then_rotate(path: Path, limit_bytes: int) -> bytes:
        data = real(path, limit_bytes)
        for name in ("meta_000200.json", "model_000200.pt", "dcp_000200"):
            trash.move_to_trash(tmp_path, tmp_path / name)
        return data

    monkeypatch.setattr(inventory, "read_limited", read_then_rotate)
    found = read_inventory(tmp_path)
    assert (found.saves, found.incomplete, found.broken) == ((), (), ())


ENTRIES = ["meta_000200.json", "model_000200.pt", "dcp_000200/.metadata", "dcp_000200/pp0/__0_0.distcp"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(gone=st.sets(st.sampled_from(ENTRIES)), cut=st.sets(st.sampled_from(ENTRIES)))
def test_a_save_is_listed_if_and_only_if_all_of_it_is_there(
    tmp_path_factory: pytest.TempPathFactory, gone: set[str], cut: set[str]
):
    root = tmp_path_factory.mktemp("root")
    save(root, 200)
    for path in gone:
        os.unlink(root / path)
    for path in cut - gone:
        os.truncate(root / path, 2)
    assert steps(read_inventory(root)) == ([200] if not gone and not cut else [])


def test_the_work_of_a_listing_grows_with_the_saves_and_not_faster(tmp_path: Path):
    work = []
    for count in (50, 200):
        for number in range(len(read_inventory(tmp_path).saves), count):
            save(tmp_path, number, number=number + 1)
        work.append(calls_of(lambda: read_inventory(tmp_path)))
        assert len(read_inventory(tmp_path).saves) == count
    assert work[1] < 4.5 * work[0]  # were each save compared with each, it would be sixteen times as much


def test_a_path_claimed_with_different_bytes_by_two_saves_is_trusted_for_neither(tmp_path: Path):
    meta = save(tmp_path, 200)
    other_id = new_id()
    other = replace(
        meta,
        save_id=other_id,
        tag=other_id[:8],
        artifacts=tuple(replace(a, digest=Digest(5, 1, a.digest.block_size_bytes, (1,))) for a in meta.artifacts),
    )
    try:
        data = meta_to_bytes(other)
    except IntegrityError:
        return  # the codec refuses a save that names files of another tag: even better
    (tmp_path / f"meta_000200-{other.tag}.json").write_bytes(data)
    assert steps(read_inventory(tmp_path)) == []


def _failing(monkeypatch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """Let the device or a permission keep everybody from ``path``."""
    scandir, open_ = os.scandir, os.open

    def fail(asked: object) -> None:
        if str(asked) == str(path):
            raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "scandir", lambda asked=".": (fail(asked), scandir(asked))[1])
    monkeypatch.setattr(os, "open", lambda asked, *more, **named: (fail(asked), open_(asked, *more, **named))[1])


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("where", ["dcp_000200", "dcp_000200/pp0"])
def test_a_directory_that_cannot_be_listed_now_is_told_apart_from_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str
):
    save(tmp_path, 200)
    _failing(monkeypatch, tmp_path / where, code)
    (found,) = read_inventory(tmp_path).incomplete
    assert found.unreadable
    assert os.strerror(code) in found.why
    (tmp_path / "model_000200.pt").unlink()
    (found,) = read_inventory(tmp_path).incomplete
    assert not found.unreadable, "a file is missing, whatever the rest is"
    assert found.why.startswith("model_000200.pt is missing")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_meta_that_cannot_be_read_now_is_marked_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    save(tmp_path, 200)
    save(tmp_path, 300)
    (tmp_path / "meta_000300.json").write_bytes(b"{}")
    _failing(monkeypatch, tmp_path / "meta_000200.json", code)
    assert [(item.path.name, item.unreadable) for item in read_inventory(tmp_path).broken] == [
        ("meta_000200.json", True),
        ("meta_000300.json", False),
    ]


def test_an_emergency_directory_that_cannot_be_listed_now_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = emergency(tmp_path, 200, [0], 1)
    _failing(monkeypatch, tmp_path / directory, errno.EIO)
    found = read_inventory(tmp_path)
    assert [(item.path.name, item.unreadable) for item in found.broken] == [(directory, True)]
    assert found.foreign == ()


def test_only_what_holds_something_of_a_save_is_loose(tmp_path: Path):
    directory = emergency(tmp_path, 200, [0], 1)
    os.unlink(tmp_path / directory / "meta_rank0.json")
    (tmp_path / "dcp_000300").mkdir()
    (tmp_path / "dcp_000400").mkdir()
    (tmp_path / "dcp_000400" / "__0_0.distcp.1f0c9a2e.tmp").write_bytes(b"x")
    for name in ("model_000500.pt", "notes.txt", "writer.json"):
        (tmp_path / name).write_bytes(b"x")
    save(tmp_path, 600)
    (tmp_path / "dcp_000600" / "notes.txt").write_bytes(b"x")
    found = read_inventory(tmp_path)
    assert [item.path.name for item in found.foreign if item.loose] == [directory, "model_000500.pt"]
    assert len(found.foreign) == 7


def test_the_work_for_many_metas_of_one_save_grows_with_them_and_not_faster(tmp_path: Path):
    def steps(count: int) -> int:
        root = tmp_path / str(count)
        root.mkdir()
        meta = save(root, 0)
        for step in range(1, count):
            name = names.SaveName(step)
            (root / name.meta).write_bytes(meta_to_bytes(replace(meta, step=step, artifacts=())))
        return steps_of(lambda: read_inventory(root))

    assert steps(400) < 2.5 * steps(200)
