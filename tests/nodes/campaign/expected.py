"""Where a start may continue: by the reference of the simulation, which shares nothing with the package.

Rules:
* It is told all that lies on the disks of the job's nodes and on the mirrors, silent ones included: what is there when
  everybody answers is what must be continued from.
* While a mirror is silent a start may always wait. What it continues from must be the newest all the same, but where no
  mirror answers: then it is the newest of its own disks, and a branch may begin (docs/adr/0004).
* A start over by a person that goes on where such a start has saved since is the same command, started again.
* A copy that somebody staged counts on the disks that made the save, while one of them has its own part.
* The persistent directory is one more disk of every job. So is a mirror, for parts of saves of which disks have others.
* Once a mirror lost an object: what no place has whole counts if each file is somewhere. Files of single ranks are for
  as many ranks; another number may do without one that is lost, or go back.
* An emergency snapshot is for any number of ranks: no job of a campaign has ranks whose values differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptmirror.core.model import Attempt, Meta
from tests.nodes.campaign.sight import Seen, anywhere, look_at_disk, look_at_mirror, together
from tests.nodes.campaign.world import World
from tests.simulation.reference import (
    Allowed,
    KnownAttempt,
    SeenSave,
    View,
    expected_start,
    in_order,
    is_forward,
)

__all__ = ["allowed_starts", "apart_on", "on_the_lineage", "view_of"]


def allowed_starts(world: World, nodes: str, policy: str) -> list[Allowed]:
    """Every outcome to which a start on these nodes may come."""
    found = _allowed(world, nodes, policy, without_ranks=False)
    return found + _allowed(world, nodes, policy, without_ranks=True) if world.lost else found


def _allowed(world: World, nodes: str, policy: str, *, without_ranks: bool) -> list[Allowed]:
    view = view_of(world, nodes, mirrors=True, without_ranks=without_ranks)
    found = expected_start(view, policy, policy == "scratch")
    if policy == "scratch" and any(one.by_person and one.parent is None for one in view.attempts):
        # a job that slept since may have saved what it began so: then this is the same command, started again
        found += [one for one in expected_start(view, "auto", force=False) if one.does == "resume"]
    if not world.silent:
        return found
    if policy == "scratch":
        return [Allowed("wait", "a start over needs every mirror")]
    if len(world.silent) == len(world.mirrors):
        alone = view_of(world, nodes, mirrors=False, without_ranks=without_ranks)
        found += expected_start(alone, policy, force=False)
    # a step 0 needs the word of every mirror, and so does everything that a mirror might contradict
    return [Allowed("wait", "a mirror is silent"), *(one for one in found if one.does in ("resume", "refuse"))]


def view_of(world: World, nodes: Iterable[str], *, mirrors: bool, without_ranks: bool = False) -> View:
    """What lies on the disks of these nodes and, if they count, on all mirrors.

    ``without_ranks``: files of single ranks need not be there.
    """
    disks = [look_at_disk(world, path) for path in [*(world.root(node) for node in sorted(set(nodes))), world.kept]]
    there = [look_at_mirror(world, mirror.url, mirror.objects()) for mirror in world.mirrors] if mirrors else []
    disk = together(disks)
    here = {meta.save_id for meta in disk.metas if meta.staged_from is None}
    disk.shares += [share for place in there for share in place.parts if share.meta.save_id in here]
    places = [disk, *there]
    attempts = _attempts([*disks, *there])
    kinds: dict[str, set[str]] = {}
    metas: dict[str, Meta] = {}
    for place in [anywhere(places, without_ranks=without_ranks)] if world.lost else places:
        for save_id, (meta, whole) in place.whole().items():
            metas[save_id] = meta
            kinds.setdefault(save_id, set()).update(whole)
    saves = [
        SeenSave(i, meta.attempt.id, meta.save_number, meta.step, frozenset(kinds[i])) for i, meta in metas.items()
    ]
    counting = {meta.attempt.id for place in there for meta in place.metas} & attempts.keys()
    lists = [{one.id for one in place.attempts.attempts} for place in there if place.attempts is not None]
    counting |= {one for one, a in attempts.items() if a.by_person and all(one in listed for listed in lists)}
    own = {one for one in here if world.truths[one].disks == {node: world.disk[node] for node in nodes}}
    _count_on_disk(attempts, saves, counting, disk, there, own)
    damaged = {meta.save_id: meta for place in places for meta in place.metas if meta.save_id not in metas}
    return View(
        attempts=list(attempts.values()),
        counting=counting,
        saves=saves,
        copies={(save.save_id, kind): [("somewhere", True)] for save in saves for kind in save.kinds},
        silent=False,
        silent_required=False,
        remnants=any(place.loose for place in places) or bool(damaged),
        damaged=[
            SeenSave(m.save_id, m.attempt.id, m.save_number, m.step, frozenset(m.kinds)) for m in damaged.values()
        ],
    )


def on_the_lineage(world: World) -> set[str]:
    """The ids of the saves of the lineage by all mirrors and all disks."""
    view = view_of(world, world.disk, mirrors=True)
    return {save.save_id for save in in_order(view.attempts, view.saves, view.counting)}


def apart_on(world: World, nodes: Iterable[str]) -> set[str]:
    """The saves on these disks that no mirror takes, since their attempts left the lineage before they counted there.

    Each end reports them, until they are gone.
    """
    view = view_of(world, nodes, mirrors=True)
    counting_there = view_of(world, "", mirrors=True).counting
    lineage = {save.save_id for save in in_order(view.attempts, view.saves, view.counting)}
    disks = [look_at_disk(world, world.root(node)) for node in set(nodes)]
    metas = [meta for disk in disks for meta in disk.metas if meta.kinds != ("emergency",) and meta.staged_from is None]
    return {meta.save_id for meta in metas if meta.attempt.id not in counting_there} - lineage


def _known(attempt: Attempt) -> KnownAttempt:
    parent = attempt.parent
    ref = None if parent is None else (parent.attempt, parent.number, parent.step, parent.save_id)
    return KnownAttempt(attempt.id, attempt.number, ref, attempt.by_person, attempt.required, attempt.root)


def _attempts(places: Iterable[Seen]) -> dict[str, KnownAttempt]:
    found: dict[str, KnownAttempt] = {}
    for place in places:
        listed = place.attempts.attempts if place.attempts is not None else [meta.attempt for meta in place.metas]
        for attempt in listed:
            before = found.get(attempt.id)
            if before is None or (attempt.by_person and not before.by_person):
                found[attempt.id] = _known(attempt)
    return found


def _count_on_disk(
    attempts: dict[str, KnownAttempt],
    saves: list[SeenSave],
    counting: set[str],
    disk: Seen,
    there: list[Seen],
    own: set[str],
) -> None:
    """Add the attempts whose saves are on these disks alone, newest first, each while it is a fast-forward.

    ``own`` are the saves that these disks together made: those are theirs also if somebody staged them since.
    """
    mirrored = {save_id for place in there for save_id in place.whole()}
    committed = [save for save in saves if save.save_id in mirrored]
    whole = [meta for meta, _ in disk.whole().values() if meta.staged_from is None or meta.save_id in own]
    here = {meta.attempt.id for meta in whole} & attempts.keys()
    for one in sorted(here - counting, key=lambda one: (attempts[one].number, one), reverse=True):
        if is_forward(list(attempts.values()), committed, counting, one):
            counting.add(one)
            committed += [save for save in saves if save.attempt == one and save not in committed]
