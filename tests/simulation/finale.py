"""How every history ends: the mirrors answer again, everything is uploaded, and nothing is missing.

Rules:
* Liveness, too: after the last fault, drains bring every whole save of every disk to every mirror, within a bound.
* Then a fresh host chooses what the reference model chooses.
"""

from __future__ import annotations

import random

from ckptmirror.core.errors import BrokenTable
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.local.table_place import open_table
from tests.simulation.processes import Drainer, Uploader
from tests.simulation.reference import in_order, is_forward
from tests.simulation.sight import Seen, attempts_seen, known, look_at_disk, seen_saves
from tests.simulation.watch import Watch
from tests.simulation.world import Broken, Host, World

TURNS_LIMIT = 3000


def put_in_order(world: World, watch: Watch) -> None:
    """End everything, mend everything, finish everything.

    Raises:
        Broken: Something did not come right.
    """
    from tests.simulation.rules import start

    for host in world.hosts:
        for process in (host.trainer, host.drainer):
            if process is not None:
                process.die()
        host.trainer = host.drainer = None
    for place in world.mirrors:
        place.come_back()
    for host in world.hosts:
        if host.root.exists():
            _drain_all(world, host)
            watch.look("drain")
            _check_all_there(world, watch, host)
    fresh = world.hosts[0]
    world.lose_disk(fresh)
    others, world.hosts = world.hosts, [fresh]
    start(world, watch, random.Random("finale auto"))
    world.hosts = others
    watch.look("start")


def _drain_all(world: World, host: Host) -> None:
    root = host.root
    try:
        (root / ".ckptmirror").mkdir(exist_ok=True)
        open_table(root, clock=world.clock).close()  # as the next start would, where it was lost
        host.drainer = Drainer(world, host)
        if not host.drainer.table.mirrors():
            host.drainer.table.set_mirrors([(spec.url, spec.required) for spec in world.specs])
    except BrokenTable as error:
        raise Broken(f"the table of host {host.number} stays broken: {error}") from error
    _until_idle(world, host.drainer.uploader)
    stuck = [
        record
        for state in (RecordState.PENDING, RecordState.UPLOADING)
        for record in host.drainer.table.records(state=state)
    ]
    failed = {(r.save_id, r.mirror) for r in host.drainer.table.records(state=RecordState.FAILED)}
    stuck = [record for record in stuck if (record.save_id, record.mirror) not in failed]
    if stuck:
        raise Broken(f"host {host.number}: {stuck[0].path} stays {stuck[0].state.value}: {stuck[0].last_error}")
    for record in host.drainer.table.records(state=RecordState.FAILED):
        excused = record.save_id in world.partly_staged or look_at_disk(world, root).list_is_broken
        excused = excused or "is superseded" in record.last_error
        if not excused and not (world.damaged or world.foreign or world.foreign_objects):
            raise Broken(f"host {host.number}: {record.path} failed: {record.last_error}")
    for save in host.drainer.table.saves():
        if not (root / save.meta_path).exists() and not world.truth[save.save_id].acknowledged:
            raise Broken(f"host {host.number} has records of step {save.step}, a save that never was")
    host.drainer.die()
    host.drainer = None


def _until_idle(world: World, uploader: Uploader) -> None:
    idle = 0
    for _ in range(TURNS_LIMIT):
        moved = [uploader.upload_one(number) for number in range(len(world.mirrors))]
        if any(moved):
            idle = 0
            continue
        idle += 1
        if idle > 5:
            return
        world.clock.pass_s(400)
    raise Broken("uploads go on for ever")


def _check_all_there(world: World, watch: Watch, host: Host) -> None:
    """Every whole and undamaged save of the disk is on every mirror."""
    seen = look_at_disk(world, host.root)
    if seen.list_is_broken:
        return  # the drain cannot say which attempts there are, and uploads nothing before a start has
    for meta in seen.metas.values():
        if meta.save_id in world.partly_staged or world.lost_objects:
            continue  # a copy of some kinds may have been the first to come to a mirror; what it lacks cannot follow
        if not _may_count(watch, seen, meta):
            continue  # the run went on without it
        for place in world.mirrors:
            if _is_right(meta, seen.right) and not _is_right(meta, watch.mirrored[place.url].right):
                raise Broken(f"step {meta.step} ({meta.save_id[:8]}) of host {host.number} never came to {place.url}")


def _may_count(watch: Watch, disk: Seen, meta: Meta) -> bool:
    """Whether a save is on the lineage of the mirrors, or would be by a fast-forward: those are always finished."""
    mirrors = list(watch.mirrored.values())
    attempts = attempts_seen(*mirrors)
    listed_by_all = all(meta.attempt.id in attempts_seen(seen) for seen in mirrors)
    if meta.attempt.by_person:
        return listed_by_all
    counting = {one.attempt.id for seen in mirrors for one in seen.every} & attempts.keys()
    counting |= {one for one, a in attempts.items() if a.by_person and all(one in attempts_seen(s) for s in mirrors)}
    attempts.setdefault(meta.attempt.id, known(meta.attempt))
    everyone, saves = list(attempts.values()), seen_saves(*mirrors)
    mine = [save for save in seen_saves(disk) if save not in saves]
    counts = counting | {meta.attempt.id}
    on_it = {save.save_id for save in in_order(everyone, [*saves, *mine], counts)}
    return meta.save_id in on_it and is_forward(everyone, saves, counting, meta.attempt.id)


def _is_right(meta: Meta, right: set[tuple[str, str]]) -> bool:
    from ckptmirror.core.names import untagged

    return all((meta.save_id, untagged(artifact.path)) in right for artifact in meta.artifacts)
