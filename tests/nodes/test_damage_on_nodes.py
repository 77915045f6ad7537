"""Files are damaged in every place of a job: a start goes back only if one of the newest save is whole nowhere."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core import names
from ckptmirror.core.errors import DeadlinePassed, StoreTemporary
from ckptmirror.core.model import Kind
from ckptmirror.flow.start import leader
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.stores.file import FileStore
from tests.kit.cli import run
from tests.kit.faults import flip_bit, of_a_later_version
from tests.kit.training import same
from tests.nodes.jobs import ALONE_S, WAIT_S, Found, Job, built, expect, take_part, train, whole

pytestmark = pytest.mark.long

STEP = 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def is_of_step(name: str) -> bool:
    parsed = names.parse_name(name.partition("/")[0])
    return parsed is not None and parsed.step == STEP


@dataclass
class Places:
    """What disks and mirrors have of a save, file by file."""

    base: Path
    nodes: str
    mirrors: tuple[str, ...]

    def files(self, place: str) -> dict[str, Path]:
        """The files of the save there, by their plain names, and its meta."""
        root = self.base / place
        paths = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        relative = {path.relative_to(root).as_posix(): path for path in paths}
        return {names.untagged(name): path for name, path in relative.items() if is_of_step(name)}

    def damage(self, rng: random.Random, often: float, gone: str) -> set[str]:
        """Damage files at random, or lose a disk; return what is whole nowhere now, without lists of tensors.

        If the metas that are left do not tell all of the save, its meta is among that. The parts of all nodes stay on
        the mirrors, and tell it if one disk has its own meta.
        """
        whole: set[str] = set()
        known: set[str] = set()
        for place in (*self.nodes, *self.mirrors):
            for name, path in sorted(self.files(place).items()):
                known.add(name)
                if place != gone and rng.random() >= often:
                    whole.add(name + (place if place in self.nodes and name.startswith("meta_") else ""))
                else:
                    how: Callable[[Path], object] = rng.choice([flip_bit, Path.unlink, cut])
                    how(path)
        if gone:
            shutil.rmtree(self.base / gone)
        metas = {name for name in known if name.startswith("meta_")}
        of_disks = [f"{name}{node}" in whole for name in metas for node in self.nodes]
        told = metas <= whole or all(of_disks) or (len(self.nodes) > 1 and any(of_disks))
        lost = {name for name in known - whole - metas if not name.startswith("tensors_")}
        return lost if told else lost | metas


@pytest.mark.parametrize("seed", range(8))
def test_a_start_goes_back_only_if_a_file_is_whole_nowhere(seed: int, tmp_path: Path) -> None:
    check_damage(random.Random(seed), tmp_path)


def check_damage(rng: random.Random, base: Path) -> bool:
    """Save twice, damage files of the newer save, and start again; return whether it was lost."""
    nodes = rng.choice(["a", "ab", "ab", "abc"])
    choices: list[tuple[Kind, ...]] = [("dcp",), ("model",), ("dcp", "model")]
    kinds = rng.choice(choices)
    mirrors = rng.choice([("mirror",), ("mirror", "second")])
    also = f"file://{base}/second" if len(mirrors) > 1 else ""
    job = Job(base, nodes, (1, STEP), rng.choice(["fsdp", "ddp"]), kinds=kinds, also=also, shares=rng.random() < 0.5)
    first = job.run()
    gone = rng.choice(["", "", *nodes])
    lost = Places(base, nodes, mirrors).damage(rng, rng.choice([0.1, 0.3, 0.5]), gone)
    again = Job(base, nodes, (), job.wrapped, kinds=kinds, also=also, shares=job.shares).run()
    others = {"dcp": ("model_", "optim_"), "model": ("dcp_",)}  # what a load of a kind does without
    lost_of = {kind: {name for name in lost if not name.startswith(others[kind])} for kind in kinds}
    if not all(lost_of.values()):
        expect(again, STEP, again[0].place, first[0])
    else:
        assert [one.step for one in again] == [1] * len(nodes), (lost, again[0].passed_over, again[0].failed)
    return all(lost_of.values())


@pytest.mark.parametrize(
    ("damage", "on_mirror"),
    [(flip_bit, "meta_000002.json"), (Path.unlink, "meta_000002.json"), (Path.unlink, "extra_000002_rank0.pt")],
)
def test_one_node_puts_a_save_together_and_a_rewind_says_so(
    damage: Callable[[Path], object], on_mirror: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, "a", (1, STEP), kinds=("dcp",))
    first = job.run()
    damage(tmp_path / "a" / "dcp_000002" / ".metadata")
    damage(tmp_path / "mirror" / on_mirror)
    ended = run("rewind", "--root", tmp_path / "a", "--step", STEP)
    assert ended.returncode != 0
    assert re.search(r"puts? it together: start once with manager\.resume\(state, policy=2\)", ended.stderr), (
        ended.stderr
    )
    expect(Job(tmp_path, "a", kinds=("dcp",)).run(), STEP, "anywhere", first[0])


@pytest.mark.parametrize("nodes", ["b", "bc"])
def test_a_copy_that_was_staged_for_evaluation_does_not_tell_what_the_save_has(nodes: str, tmp_path: Path) -> None:
    """It has no random state and no position in the data."""
    job = Job(tmp_path, "a", (1, STEP))
    first = job.run()
    shutil.rmtree(tmp_path / "a")
    assert (
        run("stage", "--mirror", job.url, "--step", STEP, "--kind", "model", "--dest", tmp_path / "b").returncode == 0
    )
    (tmp_path / "mirror" / "meta_000002.json").unlink()
    found = Job(tmp_path, nodes).run(begin)
    assert [(one.step, one.place, one.extra) for one in found] == [(1, job.url, {"seen": (0, 1)})] * len(nodes)
    assert same(found[0].began, first[0].saved[1])


def go_back(rank: int, job: Job) -> Found:
    """A person takes the run back to step 1."""
    return begin(rank, job, 1)


def begin(rank: int, job: Job, policy: str | int = "auto") -> Found:
    """Resume, and end without waiting for anything."""
    state = built(job.wrapped)
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=job.kinds, timeout_s=WAIT_S)
    info = manager.resume(state, policy=policy)
    assert info is not None
    found = Found(info.step, info.place, whole(state), state.extra, "")
    with contextlib.suppress(DeadlinePassed):
        manager.close(timeout_s=0.0)
    return found


@pytest.mark.parametrize("nodes", ["ac", "a", "ca"])
def test_what_a_lost_node_had_sent_is_put_together_with_what_another_has_not_sent_yet(
    nodes: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, "ab", (1, STEP), kinds=("dcp",))
    first = job.run()
    places = Places(tmp_path, "ab", ("mirror",))
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "mirror" / "meta_000002.json").unlink()
    for name in places.files("a").keys() - {"meta_000002.json"}:
        (tmp_path / "mirror" / name).unlink()
    (part,) = (tmp_path / "mirror" / "parts").glob("meta_000002-*.part00001-of-00002.json")
    part.unlink()
    for told in Job(tmp_path, nodes, kinds=("dcp",)).run(close_with_a_slow_link):
        assert "are not verified on their mirrors" in told
    again = Job(tmp_path, nodes, (3,), kinds=("dcp",)).run()
    expect(again, STEP, "anywhere", first[0])
    assert run("drain", "--root", tmp_path / "a").returncode == 0
    listed = run("ls", job.url).stdout
    assert re.search(r"^ +2 +dcp .* current ", listed, re.MULTILINE), listed


def lose_a_node(base: Path) -> Path:
    """The disk of node b is lost, and the mirror loses the meta of step 2; return where it has the part of node b."""
    shutil.rmtree(base / "b")
    (base / "mirror" / "meta_000002.json").unlink()
    (part,) = (base / "mirror" / "parts").glob("meta_000002-*.part00002-of-00002.json")
    return part


def test_a_part_that_cannot_be_read_now_sets_no_job_back(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, STEP), kinds=("dcp",))
    first = job.run()
    lose_a_node(tmp_path)
    for found in replace(job, nodes="ac", steps=()).run(resume_without_parts):
        assert "the link is slow today" in found.failed
    expect(Job(tmp_path, "ac", kinds=("dcp",)).run(), STEP, "anywhere", first[0])


def test_a_part_that_is_damaged_on_the_mirror_is_named_by_the_start_that_goes_back(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, STEP), kinds=("dcp",))
    job.run()
    part = lose_a_node(tmp_path)
    part.write_bytes(part.read_bytes()[:-9])
    for found in replace(job, nodes="ac", steps=()).run():
        assert (found.step, found.failed) == (1, "")
        assert re.search(f"{part.name}.*not JSON", found.passed_over), found.passed_over


def test_a_part_that_a_later_version_wrote_sets_no_job_back(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, STEP), kinds=("dcp",))
    job.run()
    part = lose_a_node(tmp_path)
    part.write_bytes(of_a_later_version(part.read_bytes()))
    for found in replace(job, nodes="ac", steps=()).run():
        assert found.step is None
        assert "this ckptmirror reads version" in found.failed, found.failed
    chosen = replace(job, nodes="ac", steps=()).run(go_back)
    assert [one.step for one in chosen] == [1, 1]
    again = replace(job, nodes="ac", steps=()).run()  # its save is superseded, so it holds nobody back any more
    assert [(one.step, one.failed) for one in again] == [(1, ""), (1, "")]


def resume_without_parts(rank: int, job: Job) -> Found:
    read = FileStore.read

    def slow(store: FileStore, name: str, **given: Any) -> Any:
        if name.startswith("parts/"):
            raise StoreTemporary("the link is slow today")
        return read(store, name, **given)

    FileStore.read = slow  # type: ignore[method-assign]
    return take_part(rank, job)


def test_a_rewind_takes_a_kind_that_is_whole_on_the_disk(tmp_path: Path) -> None:
    """Of the other kind, the disk and the mirror lack a file each."""
    job = Job(tmp_path, "a", (1, STEP, 3))
    job.run()
    (tmp_path / "a" / "dcp_000002" / ".metadata").unlink()
    (tmp_path / "mirror" / "dcp_000002" / "__0_0.distcp").unlink()
    ended = run("rewind", "--root", tmp_path / "a", "--step", STEP)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"continue from step 2 \(\w+, model\): on (.*)", ended.stdout)
    assert found is not None, ended.stdout
    assert found[1].split(", ") == ["disk", job.url]
    assert "put it together" not in ended.stderr


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_what_one_mirror_alone_has_damaged_is_tried_once(nodes: str, tmp_path: Path) -> None:
    job = Job(tmp_path, nodes, (1, STEP), kinds=("dcp",))
    job.run()
    for node in nodes:
        shutil.rmtree(tmp_path / node)
    flip_bit(tmp_path / "mirror" / "dcp_000002" / "__0_0.distcp")
    for one in replace(job, steps=()).run():
        assert (one.step, one.failed) == (1, "")
        assert one.passed_over.count("is damaged") == 1, one.passed_over


@pytest.mark.parametrize("nodes", ["a", "ab"])
@pytest.mark.parametrize("damaged", ["dcp_000002/*.distcp", "meta_000002.json"])
def test_a_save_whose_only_copy_was_damaged_holds_no_job_up_once_a_person_moved_it_away(
    damaged: str, nodes: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes, (1, STEP), mirrored=False, kinds=("dcp",))
    job.run()
    root = tmp_path / nodes[-1]
    flip_bit(next(root.glob(damaged)))
    for found in replace(job, mirrored=True, steps=(STEP, 3)).run(end_at_once):
        assert found.step == 1
        assert "step 2 on " in found.failed or damaged.startswith("meta"), found.failed
    (tmp_path / "elsewhere").mkdir()
    move = f"mv {root}/dcp_000002 {root}/{{meta,extra,tensors}}_000002[._]* {tmp_path}/elsewhere/"
    subprocess.run(["bash", "-c", move], check=True)
    for found in replace(job, mirrored=True, steps=(4,), keep_last=9).run():
        assert (found.step, found.failed) == (3, "")
    for node in nodes:
        assert list((tmp_path / node).glob("meta_000002-*.json")), "step 2 was saved again, and that save stays"
        assert run("status", "--root", tmp_path / node, "--exit-code").returncode == 0
        assert run("drain", "--root", tmp_path / node).returncode == 0
        assert run("rotate", "--root", tmp_path / node, "--keep-last", 1).returncode == 0


def end_at_once(rank: int, job: Job) -> Found:
    """Save, and do not wait longer than a moment for what another node does not send."""
    state = built(job.wrapped)
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=job.kinds, timeout_s=WAIT_S)
    info = manager.resume(state)
    assert info is not None
    found = Found(info.step, info.place, whole(state), state.extra, "; ".join(info.passed_over))
    for step in job.steps:
        train(state, rank, step)
        manager.save(step, state)
    manager.wait("committed", timeout_s=WAIT_S)
    try:
        manager.close(timeout_s=ALONE_S)
    except DeadlinePassed as error:
        found.failed = str(error)
    return found


def test_nodes_whose_roots_have_one_name_take_a_file_from_one_another(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, STEP), mirrored=False, kinds=("dcp",))
    first = job.run()
    flip_bit(tmp_path / "b" / "dcp_000002" / ".metadata")
    expect(replace(job, steps=()).run(resume_under_one_name), STEP, "anywhere", first[0])


def resume_under_one_name(rank: int, job: Job) -> Found:
    def look(*given: Any) -> Any:
        found = look_at_disk(*given)
        return replace(found, catalog=replace(found.catalog, place="/local-ssd/run"))

    leader.look_at_disk = look
    return take_part(rank, job)


def close_with_a_slow_link(rank: int, job: Job) -> str:
    """Start, and end at once, while nothing of the step can be sent; return the error of a node that has something."""
    upload = FileStore.upload

    def slow(store: FileStore, given: Any) -> Any:
        if "000002" in given.name:
            raise StoreTemporary("the link is slow today")
        return upload(store, given)

    FileStore.upload = slow  # type: ignore[method-assign]
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=job.kinds, timeout_s=WAIT_S)
    manager.resume(built(job.wrapped))
    try:
        manager.close(timeout_s=3.0)
    except DeadlinePassed as error:
        return error.message
    return "" if job.nodes[rank] == "a" else "are not verified on their mirrors, but elsewhere"
