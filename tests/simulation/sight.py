"""What really lies on a disk or a mirror, read by the simulation itself: names, metas, bytes against the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, meta_from_bytes
from ckptmirror.core.errors import BrokenMeta, CkptMirrorError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta
from ckptmirror.local.uploads import UploadsTable
from tests.simulation.reference import KnownAttempt, SeenSave, View, is_forward, on_the_way
from tests.simulation.world import Host, MirrorPlace, World

Object = tuple[bytes, int]


@dataclass
class Seen:
    """One place.

    Attributes:
        metas: Saves that are whole by sizes, by save id.
        right: ``(save id, untagged path)`` of every file that a valid meta names and whose bytes are right.
        wrong: Of every file that a valid meta names and whose bytes are wrong or gone.
        partial: Valid metas of which something is missing or has another size.
        torn: Of those the saves of which a kind is whole, in that kind alone, by save id.
        sized: ``(save id, untagged path)`` of every file that a valid meta names and that has its size.
        odd: Names that look like a meta and cannot be read.
    """

    metas: dict[str, Meta] = field(default_factory=dict)
    right: set[tuple[str, str]] = field(default_factory=set)
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    partial: list[Meta] = field(default_factory=list)
    torn: dict[str, Meta] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    sized: set[tuple[str, str]] = field(default_factory=set)
    attempts: AttemptList | None = None
    list_is_broken: bool = False

    @property
    def every(self) -> list[Meta]:
        """Every meta that can be read."""
        return [*self.metas.values(), *self.partial]

    @property
    def readable(self) -> dict[str, Meta]:
        """Every save that is whole in a kind, in the kinds that are."""
        return self.torn | self.metas


def is_meta(name: str) -> bool:
    parsed = names.parse_name(name)
    return parsed is not None and parsed.role == "meta"


def look_at_disk(world: World, root: Path) -> Seen:
    seen = Seen()
    if not root.exists():
        return seen
    for path in sorted(root.iterdir()):
        if not is_meta(path.name):
            continue
        try:
            meta = meta_from_bytes(path.read_bytes())
        except BrokenMeta:
            seen.odd.append(path.name)
            continue
        _weigh(world, seen, meta, {a.path: _read(root / a.path) for a in meta.artifacts})
    list_path = root / names.ATTEMPTS_NAME
    _read_list(seen, list_path.read_bytes() if list_path.exists() else None)
    return seen


def look_at_mirror(world: World, objects: dict[str, Object]) -> Seen:
    seen = Seen()
    for name, (data, _) in objects.items():
        if not is_meta(name):
            continue
        try:
            meta = meta_from_bytes(data)
        except BrokenMeta:
            seen.odd.append(name)
            continue
        found = {a.path: objects[a.object_name][0] if a.object_name in objects else None for a in meta.artifacts}
        _weigh(world, seen, meta, found)
    _read_list(seen, objects[names.WRITER_NAME][0] if names.WRITER_NAME in objects else None)
    return seen


def objects_of(place: MirrorPlace) -> dict[str, Object]:
    return {name: (data, info.generation) for name, (data, info) in place.objects().items()}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_list(seen: Seen, data: bytes | None) -> None:
    if data is None:
        return
    try:
        seen.attempts = attempts_from_bytes(data)
    except BrokenMeta:
        seen.list_is_broken = True


def _weigh(world: World, seen: Seen, meta: Meta, found: dict[str, bytes | None]) -> None:
    truth = world.truth[meta.save_id]
    lacking: set[Kind] = set()
    is_whole = True
    for artifact in meta.artifacts:
        data = found[artifact.path]
        if data is None or len(data) != artifact.digest.size_bytes:
            is_whole = False
            if not artifact.path.startswith("tensors_"):  # no load needs it
                lacking.update(artifact.kinds)
        key = (meta.save_id, names.untagged(artifact.path))
        if data is not None and len(data) == artifact.digest.size_bytes:
            seen.sized.add(key)
        if data is not None and data == truth.bytes_of(artifact.path):
            seen.right.add(key)
        else:
            seen.wrong[key] = artifact.path
    if not is_whole:
        seen.partial.append(meta)
        if kinds := [kind for kind in meta.kinds if kind not in lacking]:
            seen.torn[meta.save_id] = meta.narrowed(kinds)
    elif meta.save_id in seen.metas:
        seen.odd.append(f"two metas of save {meta.save_id[:8]}")
        seen.partial.append(seen.metas.pop(meta.save_id))
        seen.partial.append(meta)
    else:
        seen.metas[meta.save_id] = meta


def known(attempt: Attempt) -> KnownAttempt:
    parent = attempt.parent
    ref = None if parent is None else (parent.attempt, parent.number, parent.step, parent.save_id)
    return KnownAttempt(attempt.id, attempt.number, ref, attempt.by_person, attempt.required, attempt.root)


def decided(attempts: AttemptList | None) -> dict[str, KnownAttempt]:
    return {a.id: known(a) for a in attempts.attempts if a.decided} if attempts is not None else {}


def counting_at(seen: Seen) -> set[str]:
    """What a reader of one place takes to count: what has saved there, and a person's."""
    listed = seen.attempts.attempts if seen.attempts is not None else ()
    return {meta.attempt.id for meta in seen.every} | {attempt.id for attempt in listed if attempt.by_person}


def seen_saves(*places: Seen) -> list[SeenSave]:
    kinds: dict[str, set[str]] = {}
    metas: dict[str, Meta] = {}
    for place in places:
        for save_id, meta in place.readable.items():
            metas[save_id] = meta
            kinds.setdefault(save_id, set()).update(meta.kinds)
    return [SeenSave(i, meta.attempt.id, meta.save_number, meta.step, frozenset(kinds[i])) for i, meta in metas.items()]


def attempts_seen(*places: Seen) -> dict[str, KnownAttempt]:
    """Of every list, and of the metas where a place's list is lost."""
    found: dict[str, KnownAttempt] = {}
    for place in places:
        found |= decided(place.attempts)
        if place.attempts is None:
            found |= {m.attempt.id: known(m.attempt) for m in (*place.metas.values(), *place.partial)}
    return found


def view_from(world: World, host: Host) -> View:
    """What a start on this host can see."""
    disk = look_at_disk(world, host.root)
    answering = {place.url: look_at_mirror(world, objects_of(place)) for place in world.mirrors if not place.down}
    places = {"disk": disk, **answering}
    copies: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for place, seen in places.items():
        for save_id, meta in seen.readable.items():
            for kind in meta.kinds:
                paths = _paths(meta, kind)
                if place == "disk" and not _needed(world, answering, meta, kind) <= paths:
                    continue  # somebody staged some files of it here, which is not enough to resume from
                needed = {one for one in paths if not one[1].startswith("tensors_")}  # no load needs it
                copies.setdefault((save_id, kind), []).append((place, needed <= seen.right))
    _add_anywhere(world, host, places, answering, copies)
    attempts = attempts_seen(*places.values())
    attempts |= {m.attempt.id: known(m.attempt) for m in disk.every if m.staged_from is None} | attempts
    told = {m.save_id: m for seen in places.values() for m in seen.every}
    usable = {
        SeenSave(m.save_id, m.attempt.id, m.save_number, m.step, frozenset(k for i, k in copies if i == m.save_id))
        for m in told.values()
    }
    saves = sorted((save for save in usable if save.kinds), key=lambda save: save.save_id)
    whole = {save.save_id for save in saves}
    damaged = {m.save_id: m for seen in places.values() for m in seen.every if m.save_id not in whole}
    lost_here = disk.attempts is None
    completed = set(disk.attempts.completed) if disk.attempts is not None else set()
    continued = {attempts[one].parent[3] for one in completed if one in attempts and attempts[one].parent is not None}  # type: ignore[index]
    ours = {i for i in disk.readable if world.truth[i].made_on == (host.number, host.disks_lost)} | continued
    of_this_disk = continued | _sent(host)
    here = {m.attempt.id for m in disk.every if m.staged_from is None or m.save_id in of_this_disk or lost_here}
    silent_urls = {place.url for place in world.mirrors if place.down and place.required}
    counting = {m.attempt.id for seen in answering.values() for m in seen.every} & attempts.keys()
    counting |= {one for one, a in attempts.items() if a.by_person and _is_taken(a, completed, answering)}
    _count_here(attempts, saves, counting, here, answering)
    unknown_to_us = _remembered(host, places)
    loose = _loose(world, host, places)
    return View(
        attempts=list(attempts.values()),
        counting=counting,
        saves=saves,
        copies=copies,
        silent=any(place.down for place in world.mirrors),
        silent_required=bool(silent_urls),
        ours=ours,
        has_rival=_has_rival(world, host, attempts, counting),
        remnants=bool(loose or any(unknown_to_us) or any(seen.odd for seen in places.values())),
        list_is_unreadable=disk.list_is_broken and all(seen.attempts is None for seen in answering.values()),
        damaged=[
            SeenSave(m.save_id, m.attempt.id, m.save_number, m.step, frozenset(m.kinds)) for m in damaged.values()
        ],
    )


def _add_anywhere(
    world: World,
    host: Host,
    places: dict[str, Seen],
    answering: dict[str, Seen],
    copies: dict[tuple[str, str], list[tuple[str, bool]]],
) -> None:
    """Add the saves of which each file is in some place, if a meta tells all of it; none there has to name the file."""
    contents = {place.url: {name: data for name, (data, _) in objects_of(place).items()} for place in world.mirrors}
    for meta in {m.save_id: m for seen in places.values() for m in sorted(seen.every, key=_tells_most)}.values():
        sized = set().union(*(seen.sized for seen in places.values()))
        right = set().union(*(seen.right for seen in places.values()))
        for place, seen in places.items():
            if any(one.save_id == meta.save_id for one in seen.every):
                continue
            for artifact in meta.artifacts:
                plain, key = names.untagged(artifact.path), (meta.save_id, names.untagged(artifact.path))
                for name in (plain, names.tagged(plain, meta.save_id)):
                    data = _read(host.root / name) if place == "disk" else contents[place].get(name)
                    if data is not None and len(data) == artifact.digest.size_bytes:
                        sized.add(key)
                        right |= {key} if data == world.truth[meta.save_id].bytes_of(artifact.path) else set()
        for kind in meta.kinds:
            needed = {one for one in _paths(meta, kind) if not one[1].startswith("tensors_")}
            if needed <= sized and _needed(world, answering, meta, kind) <= _paths(meta, kind):
                copies.setdefault((meta.save_id, kind), []).append(("anywhere", needed <= right))


def _tells_most(meta: Meta) -> tuple[bool, int]:
    return not meta.partial, len(meta.artifacts)


def _is_taken(attempt: KnownAttempt, completed: set[str], answering: dict[str, Seen]) -> bool:
    """Whether every mirror that a person's attempt had to claim lists it, as far as they answer."""
    asked = [answering[url] for url in attempt.required if url in answering]
    lists = [seen.attempts for seen in asked if seen.attempts is not None]
    return attempt.id in completed or all(attempt.id in {one.id for one in listed.attempts} for listed in lists)


def _count_here(
    attempts: dict[str, KnownAttempt],
    saves: list[SeenSave],
    counting: set[str],
    here: set[str],
    answering: dict[str, Seen],
) -> None:
    """Add the attempts that have saves on this disk alone, newest first, each while it is a fast-forward."""
    there = {save_id for seen in answering.values() for save_id in seen.readable}
    committed = [save for save in saves if save.save_id in there]
    for one in sorted(here & attempts.keys() - counting, key=lambda one: (attempts[one].number, one), reverse=True):
        if is_forward(list(attempts.values()), committed, counting, one):
            counting.add(one)
            committed += [save for save in saves if save.attempt == one and save not in committed]


def _has_rival(world: World, host: Host, attempts: dict[str, KnownAttempt], counting: set[str]) -> bool:
    note = host.root / names.CONTROL_DIR / "root.json"
    try:
        mine = json.loads(note.read_bytes())["id"]
    except FileNotFoundError:
        mine = ""
    saved = {m.attempt.id for place in world.mirrors for m in look_at_mirror(world, objects_of(place)).every}
    way, _ = on_the_way(attempts.values(), counting)
    reached = max((attempts[one].number for one in way if attempts[one].root == mine and one in saved), default=-1)
    return any(one.root not in ("", mine) and one.number > reached for one in attempts.values())


def _sent(host: Host) -> set[str]:
    """The saves of which the host's table says that they are committed on a mirror."""
    try:
        with UploadsTable.open(host.root / names.TABLE_NAME, read_only=True) as table:
            records = table.records(state=RecordState.VERIFIED)
    except CkptMirrorError:
        return set()
    return {record.save_id for record in records if record.role == "meta"}


_CONTENT = frozenset({"model", "optim", "extra", "tensors", "dcp"})


def _loose(world: World, host: Host, places: dict[str, Seen]) -> list[str]:
    """Names of what a save consists of, in places that answer, of which no meta anywhere there tells."""
    metas = [m for seen in places.values() for m in (*seen.metas.values(), *seen.partial)]
    told = {(names.untagged(a.path).partition("/")[0], m.save_id[:8]) for m in metas for a in m.artifacts}
    listed = [name for place in world.mirrors if not place.down for name in objects_of(place)]
    if host.root.exists():
        for path in host.root.iterdir():
            files = [path.name for one in path.rglob("*") if not names.is_tmp_name(one.name)] if path.is_dir() else [""]
            listed += [path.name] * bool(files)
    loose = []
    for name in sorted({name.partition("/")[0] for name in listed}):
        parsed = names.parse_name(name)
        if parsed is not None and parsed.role in _CONTENT:
            owners = {save for top, save in told if top == names.untagged(name)}
            if not owners or (parsed.tag and parsed.tag not in owners):
                loose.append(name)
    return loose


def _remembered(host: Host, places: dict[str, Seen]) -> tuple[bool, bool]:
    """Whether something that a crash cut short may lie here; whether the table knows of saves that nobody has."""
    in_flight = bool(list(host.root.glob("*.tmp")))
    here = {m.save_id for seen in places.values() for m in (*seen.metas.values(), *seen.partial)}
    try:
        with UploadsTable.open(host.root / names.TABLE_NAME, read_only=True) as table:
            saves = table.saves()
            forgotten = any(moved.new is None and "were removed before" in moved.reason for moved in table.history())
    except CkptMirrorError:
        return True, True
    in_flight = in_flight or any(not save.released for save in saves)
    return in_flight, forgotten or any(save.save_id not in here for save in saves)


def _paths(meta: Meta, kind: Kind) -> set[tuple[str, str]]:
    return {(meta.save_id, names.untagged(artifact.path)) for artifact in meta.artifacts_of(kind)}


def _needed(world: World, mirrors: dict[str, Seen], meta: Meta, kind: Kind) -> set[tuple[str, str]]:
    """The files that a resume from this kind reads."""
    if meta.staged_from is None:
        return set()
    copies = [seen.readable[meta.save_id] for seen in mirrors.values() if meta.save_id in seen.readable]
    metas = [copy for copy in copies if kind in copy.kinds]
    return set().union(*(_paths(other, kind) for other in metas or [world.truth[meta.save_id].meta]))
