"""What really lies on disks and mirrors, read by the campaign itself: metas, lists, and bytes against the truth.

Rules:
* Only what reads bytes is shared with the package: names, codec and checksums. What counts as whole is told here.
* No committed file and no object ever changes, so bytes that differ from what was first seen are a finding at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, meta_from_bytes
from ckptmirror.core.model import Artifact, AttemptList, Kind, Meta
from ckptmirror.local.checksums import crc32c
from tests.nodes.campaign.world import Broken, Mixed, Object, World

__all__ = ["Seen", "Share", "anywhere", "look_at_disk", "look_at_mirror", "together"]


_OF_A_RANK = ("extra_", "tensors_", "optim_")


@dataclass(frozen=True)
class Share:
    """A meta, the kinds in which all files that it names are there, and which shares of its save that is.

    Attributes:
        shares: The nodes, or of an emergency snapshot the ranks, whose files it names; of a whole save all.
        of: How many shares the save has.
        files: The save's id and the plain path of each file that is there.
    """

    meta: Meta
    kinds: tuple[Kind, ...]
    shares: frozenset[int]
    of: int
    files: frozenset[tuple[str, str]] = frozenset()


@dataclass
class Seen:
    """One place, or the disks of several nodes as one.

    Attributes:
        parts: What parts on a mirror name.
        loose: Names of what a save consists of, whether or not a meta names it.
    """

    shares: list[Share] = field(default_factory=list)
    parts: list[Share] = field(default_factory=list)
    attempts: AttemptList | None = None
    loose: set[str] = field(default_factory=set)

    @property
    def metas(self) -> list[Meta]:
        return [share.meta for share in self.shares]

    def whole(self) -> dict[str, tuple[Meta, frozenset[Kind]]]:
        """The saves that are whole here in some kind, by id."""
        by_save: dict[str, list[Share]] = {}
        for share in self.shares:
            by_save.setdefault(share.meta.save_id, []).append(share)
        found = {}
        for save_id, shares in by_save.items():
            kinds = frozenset(kind for share in shares for kind in share.kinds if _all_have(shares, kind))
            if kinds:
                found[save_id] = (shares[0].meta, kinds)
        return found


def _all_have(shares: Iterable[Share], kind: Kind) -> bool:
    having = [share for share in shares if kind in share.kinds]
    return bool(having) and len(frozenset[int]().union(*(share.shares for share in having))) == having[0].of


def together(places: Iterable[Seen]) -> Seen:
    """The disks of a job's nodes."""
    seen = Seen()
    for place in places:
        seen.shares += place.shares
        seen.loose |= place.loose
    return seen


def anywhere(places: Sequence[Seen], *, without_ranks: bool) -> Seen:
    """All places as one, in which a file of a save is there if any of them has it.

    ``without_ranks``: files of single ranks need not be there.
    """
    files = set[tuple[str, str]]().union(*(share.files for place in places for share in (*place.shares, *place.parts)))

    def is_there(meta: Meta, kind: Kind) -> bool:
        needed = [names.plain(artifact.path) for artifact in meta.artifacts if kind in artifact.kinds]
        spared = _OF_A_RANK if without_ranks else ()
        return all((meta.save_id, path) in files or path.startswith(spared) for path in needed)

    return Seen(
        [
            replace(share, kinds=tuple(kind for kind in share.meta.kinds if is_there(share.meta, kind)))
            for place in places
            for share in place.shares
        ]
    )


def look_at_disk(world: World, root: Path) -> Seen:
    seen = Seen()
    if not root.exists():
        return seen
    paths = [*sorted(root.glob("meta_*.json")), *sorted(root.glob("emergency_step_*/meta_rank*.json"))]
    for path in paths:
        meta = meta_from_bytes(path.read_bytes())
        found = {artifact: _read(root / artifact.path) for artifact in meta.artifacts}
        seen.shares.append(_share(world, str(root), meta, found))
    listed = root / names.ATTEMPTS_NAME
    seen.attempts = attempts_from_bytes(listed.read_bytes()) if listed.exists() else None
    for path in root.iterdir():
        parsed = names.parse_name(path.name)
        if parsed is not None and parsed.role in ("model", "optim", "extra", "tensors", "dcp", "emergency"):
            seen.loose.add(path.name)
    return seen


def look_at_mirror(world: World, url: str, objects: dict[str, Object]) -> Seen:
    seen = Seen(loose=objects.keys() - {names.WRITER_NAME})
    for name, (_, data) in objects.items():
        parsed = names.parse_name(name)
        if parsed is None or parsed.role not in ("meta", "part"):
            continue
        meta = meta_from_bytes(data)
        if parsed.role == "meta" and not meta.is_whole:
            raise Broken(f"{name} on {url} is the meta of a part")
        found = {one: objects[one.object_name][1] if one.object_name in objects else None for one in meta.artifacts}
        if any(data is None and (url, one.object_name) not in world.lost for one, data in found.items()):
            raise Broken(f"{name} on {url} names files that are not there (I6)")
        share = _share(world, url, meta, found)
        (seen.shares if parsed.role == "meta" else seen.parts).append(share)
    listed = objects.get(names.WRITER_NAME)
    seen.attempts = attempts_from_bytes(listed[1]) if listed is not None else None
    return seen


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _share(world: World, place: str, meta: Meta, found: dict[Artifact, bytes | None]) -> Share:
    world.truth_of(meta)
    lacking: set[Kind] = set()
    for artifact, data in found.items():
        key = (meta.save_id, names.plain(artifact.path))
        if world.content.setdefault(key, artifact.digest.crc32c) != artifact.digest.crc32c:
            raise Mixed(f"two metas of save {meta.save_id[:8]} name other bytes for {key[1]}")
        if data is None:
            lacking.update(artifact.kinds)
        elif (len(data), crc32c(data)) != (artifact.digest.size_bytes, artifact.digest.crc32c):
            raise Mixed(f"{artifact.path} of save {meta.save_id[:8]} in {place} is not what was saved")
    kinds = tuple(kind for kind in meta.kinds if kind not in lacking)
    files = frozenset((meta.save_id, names.plain(one.path)) for one, data in found.items() if data is not None)
    if meta.kinds == ("emergency",):
        ranks = frozenset(artifact.rank for artifact in meta.artifacts if artifact.rank is not None)
        return Share(meta, kinds, ranks, meta.world_size, files)
    return Share(meta, kinds, frozenset(range(meta.nodes) if meta.is_whole else [meta.node]), meta.nodes, files)
