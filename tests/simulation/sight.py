"""What really lies on a disk or a mirror, read by the simulation itself: names, metas, bytes against the truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, meta_from_bytes
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta
from tests.simulation.reference import KnownAttempt, SeenSave, View
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
        odd: Names that look like a meta and cannot be read.
    """

    metas: dict[str, Meta] = field(default_factory=dict)
    right: set[tuple[str, str]] = field(default_factory=set)
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    partial: list[Meta] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    attempts: AttemptList | None = None
    list_is_broken: bool = False


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
    whole = True
    for artifact in meta.artifacts:
        data = found[artifact.path]
        whole = whole and data is not None and len(data) == artifact.digest.size_bytes
        key = (meta.save_id, names.untagged(artifact.path))
        if data is not None and data == truth.bytes_of(artifact.path):
            seen.right.add(key)
        else:
            seen.wrong[key] = artifact.path
    if not whole:
        seen.partial.append(meta)
    elif meta.save_id in seen.metas:
        seen.odd.append(f"two metas of save {meta.save_id[:8]}")
        seen.partial.append(seen.metas.pop(meta.save_id))
        seen.partial.append(meta)
    else:
        seen.metas[meta.save_id] = meta


def known(attempt: Attempt) -> KnownAttempt:
    parent = attempt.parent
    ref = None if parent is None else (parent.attempt, parent.number, parent.step, parent.save_id)
    return KnownAttempt(attempt.id, attempt.number, ref)


def decided(attempts: AttemptList | None) -> dict[str, KnownAttempt]:
    return {a.id: known(a) for a in attempts.attempts if a.decided} if attempts is not None else {}


def seen_saves(*places: Seen) -> list[SeenSave]:
    kinds: dict[str, set[str]] = {}
    metas: dict[str, Meta] = {}
    for place in places:
        for save_id, meta in place.metas.items():
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
        for save_id, meta in seen.metas.items():
            for kind in meta.kinds:
                paths = _paths(meta, kind)
                if place == "disk" and not _needed(world, answering, meta, kind) <= paths:
                    continue  # somebody staged some files of it here, which is not enough to resume from
                copies.setdefault((save_id, kind), []).append((place, paths <= seen.right))
    attempts = attempts_seen(*places.values())
    usable = {
        SeenSave(s.save_id, s.attempt, s.number, s.step, frozenset(k for k in s.kinds if (s.save_id, k) in copies))
        for s in seen_saves(*places.values())
    }
    lists = any(seen.attempts is not None for seen in places.values()) or bool(attempts)
    return View(
        attempts=list(attempts.values()),
        saves=sorted((save for save in usable if save.kinds), key=lambda save: save.save_id),
        copies=copies,
        silent=any(place.down for place in world.mirrors),
        silent_required=any(place.down and place.required for place in world.mirrors),
        odd=any(seen.odd or seen.partial for seen in places.values()),
        lists=lists,
        list_is_unreadable=disk.list_is_broken and all(seen.attempts is None for seen in answering.values()),
    )


def _paths(meta: Meta, kind: Kind) -> set[tuple[str, str]]:
    return {(meta.save_id, names.untagged(artifact.path)) for artifact in meta.artifacts_of(kind)}


def _needed(world: World, mirrors: dict[str, Seen], meta: Meta, kind: Kind) -> set[tuple[str, str]]:
    """The files that a resume from this kind reads."""
    if meta.staged_from is None:
        return set()
    metas = [seen.metas[meta.save_id] for seen in mirrors.values() if meta.save_id in seen.metas]
    return set().union(*(_paths(other, kind) for other in metas or [world.truth[meta.save_id].meta]))
