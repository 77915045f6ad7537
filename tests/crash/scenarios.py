"""What the processes of a crash campaign do: small, repeatable stories of one run, each in a forked child.

Rules:
* A story gets the place it works in (``<place>/root`` and ``<place>/mirror``) and a function ``arm``: crash points
  before that call are not counted. What it prepares, it prepares before.
* What the code under test acknowledged goes at once to ``<place>/acks.jsonl``, with every file's digest: a line there
  is a promise that must be kept whatever happens next.
* Each step's state follows from the step alone, so that what is loaded can be compared with what was saved.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptmirror import CheckpointManager, Retention, SaveHandle, TrainState, stage_checkpoint_step
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.ranks.stop import StopRequest
from tests.kit.training import without_workers

__all__ = ["STORIES", "make_state", "same_state"]

Arm = Callable[[], None]
LIMIT_S = 60.0


def make_state(step: int) -> TrainState:
    """The state of training at ``step``, the same whenever it is asked for."""
    torch.manual_seed(step)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, extra={"step": step})


def same_state(one: TrainState, other: TrainState) -> bool:
    """Whether both hold the same bits."""
    assert one.extra is not None
    assert other.extra is not None
    return (
        one.extra["step"] == other.extra["step"]
        and _same(one.model.state_dict(), other.model.state_dict())
        and _same(one.optimizer.state_dict(), other.optimizer.state_dict())
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def start(place: Path, *, workers: int = 1, keep_last: int | None = None, mirrored: bool = True) -> CheckpointManager:
    """Make a manager as a trainer would, over the root, the mirror, and the persistent directory if there is one."""
    manager = CheckpointManager(
        place / "root",
        [f"file://{place}/mirror"] if mirrored else [],
        mode="blocking",
        workers_per_mirror=max(workers, 1),
        retention=Retention(keep_last=keep_last),
        timeout_s=LIMIT_S,
        persistent_dir=place / "persistent" if (place / "persistent").is_dir() else None,
    )
    return manager if workers else without_workers(manager)


def resumed(manager: CheckpointManager, policy: str | int = "auto") -> int | None:
    """Resume; check that what was loaded is what was saved; return the step."""
    state = make_state(0)
    info = manager.resume(state, policy)
    if info is None:
        return None
    assert same_state(state, make_state(info.step)), f"step {info.step} came back different"
    return info.step


def acknowledge(place: Path, what: str, metas: Sequence[Meta]) -> None:
    """Note what the caller of ckptmirror has been promised."""
    lines = []
    for meta in metas:
        files = {a.path: [a.digest.size_bytes, a.digest.crc32c] for a in meta.artifacts}
        lines.append(json.dumps({"what": what, "step": meta.step, "save_id": meta.save_id, "files": files}) + "\n")
    descriptor = os.open(place / "acks.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, "".join(lines).encode())
    os.close(descriptor)


def save(place: Path, manager: CheckpointManager, step: int) -> SaveHandle:
    """Save the state of a step, and acknowledge it once the manager has."""
    handle = manager.save(step, make_state(step))
    handle.wait("committed", timeout_s=LIMIT_S)
    acknowledge(place, "committed", [local_catalog(place / "root").saves[str(handle.save_id)]])
    return handle


def note_found(place: Path, manager: CheckpointManager, step: int | None) -> None:
    """Leave a note of what the start resumed from."""
    if manager.ranks.rank == 0:
        (place / "found.json").write_text(json.dumps(step))


def end_stopped(manager: CheckpointManager) -> None:
    """End as after SIGTERM: what is pending stays in the table."""
    stop = StopRequest()
    stop.request("the story ends here")
    manager.close(timeout_s=LIMIT_S, stop=stop)


# -- what a campaign starts from: the first steps of a story, never killed ------------------------------------------


def prepare_nothing(place: Path, arm: Arm) -> None:
    """A run that has not started yet."""


def prepare_one_mirrored(place: Path, arm: Arm) -> None:
    """Step 100, on the mirror."""
    manager = start(place)
    resumed(manager)
    save(place, manager, 100)
    manager.close(timeout_s=LIMIT_S)


def prepare_three_mirrored(place: Path, arm: Arm) -> None:
    """Steps 100, 200, 300, on the mirror and all still on the disk."""
    manager = start(place)
    resumed(manager)
    for step in (100, 200, 300):
        save(place, manager, step)
    manager.close(timeout_s=LIMIT_S)


def prepare_one_pending(place: Path, arm: Arm) -> None:
    """Step 100 on the mirror, step 200 only on the disk."""
    prepare_one_mirrored(place, arm)
    manager = start(place, workers=0)
    resumed(manager)
    save(place, manager, 200)
    end_stopped(manager)


def prepare_one_mirrored_locally(place: Path, arm: Arm) -> None:
    """Step 100, on the disk alone: uploads do not run."""
    manager = start(place, workers=0)
    resumed(manager)
    save(place, manager, 100)
    end_stopped(manager)


def prepare_three_pending(place: Path, arm: Arm) -> None:
    """Steps 100, 200, 300, on the disk alone: uploads do not run."""
    manager = start(place, workers=0)
    resumed(manager)
    for step in (100, 200, 300):
        save(place, manager, step)
    end_stopped(manager)


def prepare_unmirrored(place: Path, arm: Arm) -> None:
    """Step 100, in a run that has no mirror."""
    manager = start(place, mirrored=False)
    resumed(manager)
    save(place, manager, 100)
    manager.close(timeout_s=LIMIT_S)


# -- what is killed -------------------------------------------------------------------------------------------------


def save_one(place: Path, arm: Arm) -> None:
    """Save step 200; uploads do not run."""
    manager = start(place, workers=0)
    resumed(manager)
    arm()
    save(place, manager, 200)
    end_stopped(manager)


def save_same_step(place: Path, arm: Arm) -> None:
    """Save step 100 once more: another save of the step, beside the first."""
    manager = start(place, workers=0)
    resumed(manager)
    arm()
    save(place, manager, 100)
    end_stopped(manager)


def save_unmirrored(place: Path, arm: Arm) -> None:
    """Save step 200 in a run without a mirror."""
    manager = start(place, mirrored=False)
    resumed(manager)
    arm()
    save(place, manager, 200)
    manager.close(timeout_s=LIMIT_S)


def prepare_one_and_a_persistent_directory(place: Path, arm: Arm) -> None:
    """Step 100, on the mirror; emergency snapshots have a second place from then on."""
    prepare_one_mirrored(place, arm)
    (place / "persistent").mkdir()


def prepare_kept_snapshot(place: Path, arm: Arm) -> None:
    """Step 100, on the mirror, and an emergency snapshot of step 200 with a copy in the persistent directory."""
    prepare_one_and_a_persistent_directory(place, arm)
    save_emergency(place, lambda: None)


def save_emergency(place: Path, arm: Arm) -> None:
    """Leave an emergency snapshot of step 200."""
    manager = start(place, workers=0)
    resumed(manager)
    arm()
    manager.save_emergency_checkpoint(200, make_state(200))
    saves = local_catalog(place / "root").saves.values()
    acknowledge(place, "committed", [meta for meta in saves if meta.kinds == ("emergency",)])
    end_stopped(manager)


def upload(place: Path, arm: Arm) -> None:
    """Start again, upload what is pending, and end."""
    arm()
    manager = start(place)
    resumed(manager)
    manager.wait("mirrored", timeout_s=LIMIT_S)
    acknowledge(place, "mirrored", list(local_catalog(place / "root").saves.values()))
    manager.close(timeout_s=LIMIT_S)


def first_start(place: Path, arm: Arm) -> None:
    """The very first start and save of a run."""
    arm()
    manager = start(place)
    resumed(manager)
    save(place, manager, 100)
    manager.close(timeout_s=LIMIT_S)
    acknowledge(place, "mirrored", list(local_catalog(place / "root").saves.values()))


def rotate(place: Path, arm: Arm) -> None:
    """Start again with a retention that keeps one save."""
    arm()
    manager = start(place, keep_last=1)
    resumed(manager)
    report = manager.rotate(timeout_s=LIMIT_S)
    assert report is not None
    manager.close(timeout_s=LIMIT_S)
    assert [meta.step for meta in local_catalog(place / "root").saves.values()] == [300]


def rotate_unmirrored(place: Path, arm: Arm) -> None:
    """Start again with a retention that keeps one save, while uploads do not run."""
    arm()
    manager = start(place, workers=0, keep_last=1)
    resumed(manager)
    manager.rotate(timeout_s=0.0)
    end_stopped(manager)


def upload_or_fail(place: Path, arm: Arm) -> None:
    """Start again and upload what can be uploaded."""
    arm()
    manager = start(place)
    resumed(manager)
    with contextlib.suppress(CkptMirrorError):
        manager.close(timeout_s=LIMIT_S)


def rewind(place: Path, arm: Arm) -> None:
    """Go back to step 100 and save step 150 from there."""
    arm()
    manager = start(place)
    assert resumed(manager, 100) == 100
    save(place, manager, 150)
    manager.close(timeout_s=LIMIT_S)


def resume(place: Path, arm: Arm) -> None:
    """Start again on whatever disk there is."""
    arm()
    manager = start(place)
    resumed(manager)
    manager.close(timeout_s=LIMIT_S)


def resume_unmirrored(place: Path, arm: Arm) -> None:
    """Start again, in a run without a mirror."""
    arm()
    manager = start(place, mirrored=False)
    resumed(manager)
    manager.close(timeout_s=LIMIT_S)


def whole_life(place: Path, arm: Arm) -> None:
    """Everything that changes a disk, once: start, saves, uploads, a rotation, a link, an emergency, a stage."""
    arm()
    manager = start(place, keep_last=1)
    resumed(manager)
    for step in (100, 200):
        save(place, manager, step)
    save(place, manager, 200)
    manager.wait("mirrored", timeout_s=LIMIT_S)
    manager.rotate(timeout_s=LIMIT_S)
    manager.save_emergency_checkpoint(300, make_state(300))
    manager.close(timeout_s=LIMIT_S)
    stage_checkpoint_step(f"file://{place}/mirror", step=100, dest=place / "root2", full=True)


def go_on(place: Path, arm: Arm) -> None:
    """What the next start does after any crash: resume, save, upload, rotate, end. Leaves the step it found."""
    manager = start(place, keep_last=2)
    note_found(place, manager, resumed(manager))
    save(place, manager, 1000)
    manager.wait("mirrored", timeout_s=LIMIT_S)
    manager.rotate(timeout_s=LIMIT_S)
    manager.close(timeout_s=LIMIT_S)


def look_only(place: Path, arm: Arm) -> None:
    """A start that saves nothing: it resumes, finishes the uploads, rotates, and ends."""
    manager = start(place, keep_last=1)
    note_found(place, manager, resumed(manager))
    manager.rotate(timeout_s=LIMIT_S)
    manager.close(timeout_s=LIMIT_S)


def go_on_unmirrored(place: Path, arm: Arm) -> None:
    """The next start of a run without a mirror."""
    manager = start(place, mirrored=False)
    note_found(place, manager, resumed(manager))
    save(place, manager, 1000)
    manager.close(timeout_s=LIMIT_S)


STORIES: dict[str, Callable[[Path, Arm], None]] = {
    story.__name__: story
    for story in (
        prepare_nothing,
        prepare_one_mirrored,
        prepare_three_mirrored,
        prepare_one_pending,
        prepare_one_mirrored_locally,
        prepare_three_pending,
        prepare_unmirrored,
        save_one,
        save_same_step,
        save_unmirrored,
        prepare_one_and_a_persistent_directory,
        prepare_kept_snapshot,
        save_emergency,
        upload,
        first_start,
        rotate,
        rotate_unmirrored,
        upload_or_fail,
        rewind,
        resume,
        resume_unmirrored,
        whole_life,
        go_on,
        look_only,
        go_on_unmirrored,
    )
}
