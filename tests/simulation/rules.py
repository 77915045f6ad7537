"""What can happen: one function a rule. Each draws its choices from its own number, and does nothing where it cannot.

Rules:
* Only errors that the situation explains are swallowed; every other error is a finding.
* A start is compared with the reference model (letters d and h in the messages).
* What happens while another process waits for a mirror (``world.inside``) keeps off that process's host, except for
  uploads by somebody else: there, locks would make it wait in reality too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from ckptmirror.core import names
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    BrokenTable,
    CheckpointNotFound,
    CkptMirrorError,
    DestinationOccupied,
    IntegrityError,
    KindMismatch,
    NoTable,
    RefusedOnlyCopy,
    RootLocked,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.resume_policy import Policy
from ckptmirror.local import crashpoints
from tests.kit.faulty_store import StoreFault
from tests.simulation.acting import acting, end_trainer, trainers_of
from tests.simulation.misfortunes import (
    damage,
    lose_disk,
    lose_list,
    lose_table,
    mirror_down,
    mirror_loses,
    mirror_up,
    stranger,
    time_passes,
)
from tests.simulation.processes import Drainer, Trainer
from tests.simulation.reference import SeenSave, current, expected_start
from tests.simulation.sight import (
    attempts_seen,
    counting_at,
    look_at_disk,
    look_at_mirror,
    objects_of,
    seen_saves,
    view_from,
)
from tests.simulation.watch import Watch
from tests.simulation.world import KINDS_SAVED, Broken, Dead, Host, MirrorPlace, World, hosts_to_act_on

Rule = Callable[["World", "Watch", random.Random], None]


_ERRORS: dict[str, tuple[type[CkptMirrorError], ...]] = {
    "wait": (Temporary,),
    "refuse": (RefusedOnlyCopy,),
    "missing": (CheckpointNotFound,),
    "broken": (IntegrityError,),
}

# -- attempts -------------------------------------------------------------------------------------------------


def start(world: World, watch: Watch, draw: random.Random) -> None:
    host = draw.choice(hosts_to_act_on(world))
    steps = sorted({truth.meta.step for truth in world.truth.values()}) or [100]
    policy: Policy = draw.choices(["auto", draw.choice(steps), "scratch"], [15, 3, 1])[0]
    force = draw.random() < 0.5
    if host.trainer is not None:
        if draw.random() < 0.1:
            _expect_locked(world, host)
            return
        end_trainer(host)
    view = view_from(world, host)
    expected = expected_start(view, policy, force)
    undisturbed, is_meanwhile = world.interruption is None, world.inside is not None
    answering = [place for place in world.mirrors if not place.down]
    trainer: list[Trainer] = []
    outcome: list[tuple[Meta | None, Kind]] = []
    failure: list[CkptMirrorError] = []

    def act() -> None:
        try:
            trainer.append(Trainer(world, host))
            outcome.append(trainer[0].resume(policy, force))
        except (Temporary, CheckpointNotFound, IntegrityError, RefusedOnlyCopy, DestinationOccupied) as error:
            failure.append(error)
        except AttemptFenced as error:
            if undisturbed:
                raise
            failure.append(error)
        except StorePermanent as error:  # the fault that waited for the process in whose wait this start happens
            if not is_meanwhile:
                raise
            failure.append(error)

    survived = acting(world, host, act)
    if not outcome or not survived:
        if trainer:
            trainer[0].die()
        if failure and undisturbed:
            error = failure[0]
            explained = any(isinstance(error, _ERRORS[one.does]) for one in expected if one.does in _ERRORS)
            explained |= isinstance(error, DestinationOccupied) and bool(world.foreign)
            explained |= isinstance(error, StorePermanent)
            if not explained:
                raise Broken(f"d: start({policy!r}) on host {host.number} failed, expected {expected}: {error!r}")
        return
    host.trainer = trainer[0]
    if not undisturbed:
        return
    meta, kind = outcome[0]
    if meta is None:
        if not any(one.does == "step 0" for one in expected):
            raise Broken(f"h: host {host.number} starts at step 0, expected {expected}")
    elif (meta.save_id, kind) not in [(one.save.save_id, one.kind) for one in expected if one.save is not None]:
        raise Broken(
            f"d: host {host.number} resumes {kind} of step {meta.step} ({meta.save_id[:8]}), expected {expected}"
        )
    if host.trainer.starts_over:
        raise Broken(f"host {host.number} starts over, and nobody disturbed it")
    _check_announced(host, host.trainer, answering)


def _check_announced(host: Host, trainer: Trainer, answering: list[MirrorPlace]) -> None:
    """The parent is written wherever somebody listens, before anything is saved."""
    attempt = trainer.attempt
    for place in answering:
        listed = look_at_mirror(trainer.world, objects_of(place)).attempts
        if listed is None or attempt not in listed.attempts:
            raise Broken(f"attempt {attempt.number} is not claimed on {place.url}")
    listed = look_at_disk(trainer.world, host.root).attempts
    if listed is None or attempt not in listed.attempts:
        raise Broken(f"attempt {attempt.number} is not claimed in its own root")


def _expect_locked(world: World, host: Host) -> None:
    try:
        Trainer(world, host)
    except RootLocked:
        return
    except Dead:
        crashpoints.disarm()
        return
    raise Broken(f"two trainers at host {host.number}")


def stop(world: World, watch: Watch, draw: random.Random) -> None:
    trainers = trainers_of(world)
    if not trainers:
        return
    trainer = draw.choice(trainers)
    if draw.random() < 0.5:
        trainer.node.close()
    end_trainer(trainer.host)


def save(world: World, watch: Watch, draw: random.Random) -> None:
    trainers = trainers_of(world)
    if not trainers:
        return
    trainer = draw.choice(trainers)
    again = trainer.last_step > 0 and draw.random() < 0.3
    step = trainer.last_step if again else (max(trainer.last_step, 0) // 100 + draw.choice([1, 1, 1, 2])) * 100
    kinds = draw.choice(KINDS_SAVED)
    loss = draw.random()
    if not acting(world, trainer.host, lambda: _ignored(trainer.save(step, kinds, loss))):
        end_trainer(trainer.host)


def _ignored(_value: object) -> None:
    """A result that nobody needs."""


# -- mirrors --------------------------------------------------------------------------------------------------


def upload(world: World, watch: Watch, draw: random.Random) -> None:
    """Some records of one process, one of them with a fault."""
    processes: list[Trainer | Drainer] = [
        process for host in world.hosts for process in (host.trainer, host.drainer) if process is not None
    ]
    processes = [process for process in processes if process is not world.acting]
    if not processes:
        return
    process = draw.choice(processes)
    outer, world.acting = world.acting, process
    records = draw.choice([1, 3, 8, 20])
    place = draw.choice(world.mirrors)
    number = world.mirrors.index(place)
    fault = _fault(draw)

    def act() -> None:
        place.suffer(*([fault] if fault is not None else []))
        for _ in range(records):
            try:
                if not process.upload_one(number):
                    world.clock.pass_s(61)
            except BrokenTable:
                if process.host.number not in world.damaged_tables:
                    raise

    survived = acting(world, process.host, act)
    world.acting = outer
    place.suffer()
    if not survived:
        process.die()
        if process is process.host.trainer:
            process.host.trainer = None
        else:
            process.host.drainer = None


def _fault(draw: random.Random) -> StoreFault | None:
    operation = draw.choice(["upload", "upload", "upload", "write", "stat", "read", ""])
    nth = draw.choice([1, 1, 2, 3, 5])

    def permanent() -> CkptMirrorError:
        return StorePermanent("A scripted fault.")

    return draw.choice(
        [
            None,
            None,
            StoreFault(operation, nth=nth, when="before"),
            StoreFault(operation, nth=nth, when="after"),
            StoreFault(operation, nth=nth, times=3, when="after"),
            StoreFault(operation, nth=nth, when="before", error=permanent),
            StoreFault("upload", nth=1, corrupt_byte_at=draw.randrange(40)),
            StoreFault("read", nth=nth, corrupt_byte_at=draw.randrange(40)),
        ]
    )


# -- rotation and drains --------------------------------------------------------------------------------------


def rotate(world: World, watch: Watch, draw: random.Random) -> None:
    hosts = [host for host in hosts_to_act_on(world) if host.is_busy]
    if not hosts:
        return
    host = draw.choice(hosts)
    process = host.trainer if host.drainer is None or (host.trainer and draw.random() < 0.7) else host.drainer
    assert process is not None
    by_metric = {"keep_best": 1, "metric": "loss"} if draw.random() < 0.3 else {}
    retention = Retention(
        keep_last=draw.choice([1, 1, 2, 3]),
        keep_every=draw.choice([None, 300]),
        **by_metric,  # type: ignore[arg-type]
    )
    before = look_at_disk(world, host.root)
    attempts = attempts_seen(before).values() if before.attempts is not None else []
    table = current(attempts, seen_saves(before), counting_at(before))
    newest = max((step for step, _ in table), default=None)
    keep = {save.save_id for (step, _), save in table.items() if step == newest}

    def act() -> None:
        try:
            process.rotate(retention)
        except BrokenMeta:
            if not before.list_is_broken:
                raise

    if not acting(world, host, act):
        process.die()
        if process is host.trainer:
            host.trainer = None
        else:
            host.drainer = None
    gone = keep - look_at_disk(world, host.root).readable.keys()
    if gone:
        raise Broken(f"a: rotation deleted the newest of the lineage on host {host.number}, step {newest}")


def carry_on(world: World, watch: Watch, draw: random.Random) -> None:
    trainers = trainers_of(world)
    if trainers and not acting(world, (trainer := draw.choice(trainers)).host, trainer.carry_on):
        end_trainer(trainer.host)


def drain(world: World, watch: Watch, draw: random.Random) -> None:
    """A drain begins at a host, or ends."""
    host = draw.choice(hosts_to_act_on(world))
    if host.drainer is not None:
        host.drainer.die()
        host.drainer = None
        return

    def act() -> None:
        try:
            host.drainer = Drainer(world, host)
        except (NoTable, BrokenTable):
            return

    if host.root.exists():
        acting(world, host, act)


# -- stage ----------------------------------------------------------------------------------------------------


def stage(world: World, watch: Watch, draw: random.Random) -> None:
    place = draw.choice(world.mirrors)
    host = draw.choice([*hosts_to_act_on(world), None, None])
    dest = world.eval_root if host is None else host.root
    steps = sorted({truth.meta.step for truth in world.truth.values()}) or [100]
    step: int | Literal["latest"] = draw.choice(["latest", draw.choice(steps)])
    kind: Kind | None = draw.choice([None, None, "dcp", "model"])
    seen = look_at_mirror(world, objects_of(place))
    table = current(attempts_seen(seen).values(), seen_saves(seen), counting_at(seen))
    expected = _expected_stage(table, step, kind)
    undisturbed = world.interruption is None and not place.down
    refresh, full, superseded = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.1
    mirror = Mirror(place.url, True, world.mirrors_for(lambda _place, _name: None)[world.mirrors.index(place)].store)

    def act() -> None:
        try:
            staged = stage_checkpoint_step(
                mirror, step=step, dest=dest, require_kind=kind, refresh=refresh, full=full, superseded=superseded
            )
        except (CheckpointNotFound, KindMismatch):
            if undisturbed and expected is not None:
                raise
            return
        except Temporary:
            if undisturbed:
                raise
            return
        except RootLocked:
            if host is None or host.trainer is None:
                raise
            return
        except (RefusedOnlyCopy, DestinationOccupied):
            return
        except BrokenMeta:
            if not look_at_disk(world, dest).list_is_broken:
                raise
            return
        except IntegrityError:
            if expected is not None and _has_anothers_object(world, place, table[expected].save_id):
                return
            if not seen.partial or (undisturbed and expected is not None):
                raise
            return
        if undisturbed and not superseded and (staged.step, staged.kind) != expected:
            raise Broken(f"d: staged {staged.kind} of step {staged.step}, expected {expected}")
        if not staged.path.exists():
            raise Broken(f"c: staged {staged.path}, which is not there")

    acting(world, host or world.hosts[0], act)


def _has_anothers_object(world: World, place: MirrorPlace, save_id: str) -> bool:
    """Whether an object of a save went away and another save took its name since, with the size of the first."""
    mine = {names.untagged(artifact.path) for artifact in world.truth[save_id].meta.artifacts}
    lost = [name for url, name in world.lost_objects if url == place.url and names.untagged(name) in mine]
    there = [info for name in lost if (info := place.behind.stat(name)) is not None]
    return any(info.metadata.get("ckptmirror-save") != save_id for info in there)


def _expected_stage(
    table: dict[tuple[int, str], SeenSave], step: int | str, kind: str | None
) -> tuple[int, str] | None:
    fitting = [(s, k) for s, k in table if (step in ("latest", s)) and kind in (None, k)]
    return max(fitting, key=lambda found: (found[0], found[1] == "dcp"), default=None)


RULES: dict[str, tuple[Rule, int]] = {
    "start": (start, 14),
    "stop": (stop, 4),
    "save": (save, 22),
    "upload": (upload, 26),
    "mirror_down": (mirror_down, 3),
    "mirror_up": (mirror_up, 5),
    "time_passes": (time_passes, 2),
    "rotate": (rotate, 9),
    "carry_on": (carry_on, 4),
    "drain": (drain, 5),
    "stage": (stage, 6),
    "lose_disk": (lose_disk, 2),
    "lose_table": (lose_table, 2),
    "lose_list": (lose_list, 2),
    "damage": (damage, 3),
    "mirror_loses": (mirror_loses, 2),
    "stranger": (stranger, 4),
}
MEANWHILE = ("start", "save", "upload", "mirror_down", "rotate", "lose_disk", "time_passes", "stop")
