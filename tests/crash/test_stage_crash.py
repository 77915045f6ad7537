"""SIGKILL at every crash point of a stage: no meta ever names what is not whole, and the next call completes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import crashpoints
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import open_store
from tests.kit.faults import flip_bit
from tests.kit.processes import in_child
from tests.kit.saves import FIRST_ATTEMPT, bytes_of, make_save, put_attempts, put_on_mirror

pytestmark = pytest.mark.long

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
CASES_IN_A_SLICE = 10


@dataclass
class Scene:
    """A mirror, a prepared destination, and the call that is killed."""

    mirror: Mirror
    root: Path
    prepared: Path
    kind: Kind
    refresh: bool
    wanted: Meta
    names_after: list[str]
    rotten: bool = False

    def stage(self, dest: Path) -> None:
        stage_checkpoint_step(
            self.mirror, step=200, dest=dest, require_kind=self.kind, refresh=self.refresh, full=self.kind == "model"
        )


def make_scene(name: str, tmp_path: Path) -> Scene:
    (tmp_path / "nfs").mkdir()
    store = open_store(f"file://{tmp_path}/nfs/run", retry=False)
    put_attempts(store, [FIRST_ATTEMPT])
    mirror = Mirror(store.url, True, store)
    root, prepared = tmp_path / "root", tmp_path / "prepared"
    prepared.mkdir()
    first = make_save(root, 200, ("dcp", "model"), ranks=2, save_id="1f" * 16)
    put_on_mirror(store, root, first)
    if name == "a fresh copy":
        return Scene(mirror, root, prepared, "dcp", False, first, ["dcp_000200", "meta_000200.json"])
    if name == "another kind joins":
        stage_checkpoint_step(mirror, step=200, dest=prepared, require_kind="dcp")
        files = [artifact.path for artifact in first.artifacts if "/" not in artifact.path]
        after = sorted([*files, "dcp_000200", "meta_000200.json"])
        return Scene(mirror, root, prepared, "model", False, first, after)
    if name == "a rotten copy is mended":
        stage_checkpoint_step(mirror, step=200, dest=prepared, require_kind="dcp")
        flip_bit(prepared / "dcp_000200" / "__0_0.distcp")
        return Scene(mirror, root, prepared, "dcp", True, first, ["dcp_000200", "meta_000200.json"], rotten=True)
    assert name == "a stale copy is replaced"
    stage_checkpoint_step(mirror, step=200, dest=prepared, require_kind="dcp")
    second = make_save(root, 200, ("dcp", "model"), number=2, ranks=2, save_id="2e" * 16)
    put_on_mirror(store, root, second)
    tag = "-2e2e2e2e"
    return Scene(mirror, root, prepared, "dcp", True, second, [f"dcp_000200{tag}", f"meta_000200{tag}.json"])


SCENES = ["a fresh copy", "another kind joins", "a rotten copy is mended", "a stale copy is replaced"]


def points_of(scene: Scene, dest: Path, tmp_path: Path) -> list[str]:
    """The crash points that the call passes."""
    report = tmp_path / "points.json"

    def count() -> None:
        crashpoints.arm()
        scene.stage(dest)
        report.write_text(json.dumps(crashpoints.passed()))

    assert in_child(count) == 0
    points: list[str] = json.loads(report.read_text())
    return points


def check_no_meta_lies(scene: Scene, dest: Path) -> None:
    """Whatever stands as a save is whole, byte for byte (but for the rot that was there before)."""
    inventory = read_inventory(dest)
    assert not inventory.broken
    assert scene.rotten or not inventory.incomplete  # while a rotten file makes room, its save is not listed
    for save in inventory.saves:
        if scene.rotten and save.meta == scene_meta(scene.prepared):
            continue
        for artifact in save.meta.artifacts:
            verify_file(dest / artifact.path, artifact.digest)


def scene_meta(root: Path) -> Meta:
    (save,) = read_inventory(root).saves
    return save.meta


def check_done(scene: Scene, dest: Path) -> None:
    assert sorted(path.name for path in dest.iterdir() if path.name != names.CONTROL_DIR) == scene.names_after
    (save,) = read_inventory(dest).saves
    assert save.meta.save_id == scene.wanted.save_id
    original = bytes_of(scene.root, scene.wanted)
    assert all(original[path] == data for path, data in bytes_of(dest, save.meta).items())
    trash = dest / names.TRASH_DIR
    assert not trash.exists() or not list(trash.iterdir())


@pytest.mark.parametrize("name", SCENES)
def test_a_stage_killed_anywhere_never_lies_and_is_completed_by_the_next(name: str, tmp_path: Path) -> None:
    scene = make_scene(name, tmp_path)
    counted = tmp_path / "counted"
    shutil.copytree(scene.prepared, counted)
    points = points_of(scene, counted, tmp_path)
    check_done(scene, counted)
    assert len(points) > 20
    # The end of a stage, from the publishing on, is where the names change: all of it is always tried.
    stride = 1 if FULL else max(1, len(points) // CASES_IN_A_SLICE)
    numbers = sorted({*range(1, len(points) + 1, stride), *range(max(1, len(points) - 25), len(points) + 1)})
    for number in numbers:
        dest = tmp_path / f"dest-{number}"
        shutil.copytree(scene.prepared, dest)

        def die(at: int = number, dest: Path = dest) -> None:
            crashpoints.arm(str(at))
            scene.stage(dest)

        status = in_child(die)
        assert os.WIFSIGNALED(status), f"point {number} ({points[number - 1]}) was not reached"
        assert os.WTERMSIG(status) == signal.SIGKILL
        check_no_meta_lies(scene, dest)
        scene.stage(dest)
        check_done(scene, dest)
        shutil.rmtree(dest)


def test_everything_is_durable_before_the_meta_and_the_meta_before_the_old_files_go(tmp_path: Path) -> None:
    scene = make_scene("a stale copy is replaced", tmp_path)
    points = points_of(scene, scene.prepared, tmp_path)
    publishes = [
        number for number, point in enumerate(points) if point in ("file.publish:before", "dir.publish:before")
    ]
    meta = publishes[-1]
    synced = [number for number, point in enumerate(points) if point == "dir.fsync:after"]
    written = [number for number, point in enumerate(points) if point == "file.fsync:after"]
    assert any(publishes[-2] < number < meta for number in synced)
    assert written[-1] < meta
    assert max(number for number in written if number < publishes[0]) < publishes[0]
    gone = [number for number, point in enumerate(points) if point == "trash.rename:before"]
    assert gone[0] < meta < gone[1]  # the old meta, then the new one, then the old files
    assert any(meta < number < gone[1] for number in synced)
    deleted = [number for number, point in enumerate(points) if point == "trash.unlink:before"]
    assert gone[-1] < deleted[0]
