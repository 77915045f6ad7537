"""The content of a root: whole saves, incomplete ones, broken metas, and foreign files, each with the reason.

Rules:
* A save is whole if and only if one valid meta names it and every artifact it names is a regular file of exactly that
  size (I2). Sizes only: loading verifies checksums, and says so when they differ.
* Nothing is unpickled, no link is followed, nothing is written.
* A link or a directory in place of an artifact makes the save incomplete; in place of a meta, a broken meta.
* Two metas of one save, or two saves that claim one path with different bytes, cannot both be right: none is whole.
* An emergency save has one meta per rank. What some ranks left is a part, as one node's of any other save: the other
  ranks' may be on other disks, which shows only when the parts are put together.
* A kind of an incomplete save is whole if all files that a load of it needs are whole. If the meta itself is disputed,
  none is.
* A file that no meta names is not part of a save: extra files in its directory are foreign and do no harm.
* A save that cannot be read now, or not by this version, is marked as unreadable: it may be whole.
* A file that vanishes while it is listed (a rotation is running) counts as never there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import meta_merging, names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import BrokenMeta, CkptMirrorError, NewerFormat, NotSigned
from ckptmirror.core.model import Artifact, Digest, Kind, Meta
from ckptmirror.core.tensor_lists import loadable
from ckptmirror.local.files import read_limited
from ckptmirror.local.listing import Listing, is_not_readable_now

__all__ = ["Inventory", "Item", "LocalSave", "read_inventory"]

_META_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalSave:
    """A save whose meta is valid.

    Attributes:
        meta: For an emergency save, the merged metas of all ranks that left one.
        meta_path: For an emergency save, that of the lowest rank.
        why: Why it is not whole; "" if it is.
        unreadable: Whether the only reason is an I/O error or a permission.
        kinds: The kinds that are whole: all files that a load of them needs are good.
        lost: The paths of the lists of tensors that are not good. No load needs them.
        damaged: The artifacts that are not good; empty if the meta itself is disputed.
    """

    root: Path
    meta: Meta
    meta_path: Path
    why: str = ""
    unreadable: bool = False
    kinds: tuple[Kind, ...] = ()
    lost: tuple[str, ...] = ()
    damaged: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """Another entry of the root, and why it is listed.

    Attributes:
        unreadable: Whether the only reason is an I/O error, a permission or a later format.
        loose: Whether it has the name of an artifact, and is not empty.
        not_signed: Whether the only reason is that it is not believed by the keys of this process.
    """

    path: Path
    why: str
    unreadable: bool = False
    loose: bool = False
    not_signed: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything in a root, each thing once. Saves are sorted by step, then name.

    Attributes:
        saves: Whole saves.
        incomplete: Saves with a valid meta, but a missing or wrong artifact; some of their kinds may be whole.
        broken: Metas that are not valid.
        foreign: Entries that ckptmirror did not write, or that no meta names.
        temporaries: Unfinished files and directories of ours.
        trash: Entries that wait to be deleted.
        legacy: Names of older layouts, which are read but never written.
    """

    root: Path
    saves: tuple[LocalSave, ...] = ()
    incomplete: tuple[LocalSave, ...] = ()
    broken: tuple[Item, ...] = ()
    foreign: tuple[Item, ...] = ()
    temporaries: tuple[Path, ...] = ()
    trash: tuple[Path, ...] = ()
    legacy: tuple[Path, ...] = ()


@dataclass
class _Reading:
    root: Path
    listing: Listing
    found: list[LocalSave] = field(default_factory=list)
    broken: list[Item] = field(default_factory=list)
    foreign: list[Item] = field(default_factory=list)
    temporaries: list[Path] = field(default_factory=list)
    legacy: list[Path] = field(default_factory=list)
    unclaimed: dict[str, names.ParsedName] = field(default_factory=dict)


def read_inventory(root: Path) -> Inventory:
    """List a root. A root that does not exist is empty.

    Raises:
        IntegrityError: The root itself cannot be listed (not a directory, an I/O error).
        LocalStorageUnwritable: This user may not list it.
    """
    reading = _Reading(root, Listing(root))
    for name in reading.listing.names():
        _sort_in(reading, name)
    _read_control_dir(reading)
    saves = [_judged(reading, save) for save in reading.found]
    disputes = _contradictions(saves)
    saves = [
        replace(save, why=save.why or why, kinds=() if why else save.kinds, damaged=() if why else save.damaged)
        for save, why in zip(saves, disputes, strict=True)
    ]
    saves = [save for save in saves if not save.why or os.path.lexists(save.meta_path)]
    saves.sort(key=lambda save: (save.meta.step, str(save.meta_path)))
    _find_unclaimed(reading, saves)
    return Inventory(
        root=root,
        saves=tuple(save for save in saves if not save.why),
        incomplete=tuple(save for save in saves if save.why),
        broken=tuple(reading.broken),
        foreign=tuple(sorted(reading.foreign, key=lambda item: str(item.path))),
        temporaries=tuple(reading.temporaries),
        trash=tuple(root / names.TRASH_DIR / name for name in reading.listing.names(names.TRASH_DIR)),
        legacy=tuple(reading.legacy),
    )


def _sort_in(reading: _Reading, name: str) -> None:
    parsed = names.parse_name(name)
    match parsed.role if parsed is not None else None:
        case None:
            reading.foreign.append(Item(reading.root / name, "not a name that ckptmirror uses"))
        case "tmp":
            reading.temporaries.append(reading.root / name)
        case "meta":
            _read_meta(reading, name)
        case "emergency":
            _read_emergency(reading, name)
        case "legacy_dcp" | "legacy_extra" | "legacy_meta" | "legacy_extra_state":
            reading.legacy.append(reading.root / name)
        case "latest" | "control":
            pass
        case "writer" | "part":
            reading.foreign.append(Item(reading.root / name, "belongs on a mirror"))
        case _:
            assert parsed is not None
            reading.unclaimed[name] = parsed


def _read_meta(reading: _Reading, name: str) -> None:
    meta = _meta_or_none(reading, name)
    if meta is None:
        return
    expected = names.SaveName(meta.step, meta.tag).meta
    if expected != name:
        reading.broken.append(Item(reading.root / name, f"holds the meta of {expected}"))
    else:
        reading.found.append(LocalSave(reading.root, meta, reading.root / name))


def _meta_or_none(reading: _Reading, path: str) -> Meta | None:
    try:
        return meta_from_bytes(read_limited(reading.root / path, _META_LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except CkptMirrorError as error:
        unreadable = is_not_readable_now(error.__cause__) or isinstance(error, NewerFormat)
        not_signed = isinstance(error, NotSigned)
        reading.broken.append(Item(reading.root / path, str(error), unreadable, not_signed=not_signed))
    except OSError as error:
        unreadable = is_not_readable_now(error)
        reading.broken.append(Item(reading.root / path, f"cannot be read: {error.strerror}", unreadable))
    return None


def _read_emergency(reading: _Reading, directory: str) -> None:
    """Merge the ranks' metas in an emergency directory into one save for each save id."""
    parsed = reading.unclaimed[directory] = names.parse_name(directory) or names.ParsedName("emergency")
    by_save: dict[str, dict[int, Meta]] = {}
    if reading.listing.is_unreadable(directory):
        reading.broken.append(Item(reading.root / directory, "cannot be listed", unreadable=True))
        del reading.unclaimed[directory]
    for name in reading.listing.names(directory):
        path = f"{directory}/{name}"
        rank = _emergency_rank(name)
        if names.is_tmp_name(name):
            reading.temporaries.append(reading.root / path)
        if rank is None or (meta := _meta_or_none(reading, path)) is None:
            continue
        if (meta.step, meta.tag, meta.kinds) != (parsed.step, parsed.tag, ("emergency",)):
            reading.broken.append(Item(reading.root / path, f"holds the meta of another save, at step {meta.step}"))
        elif rank >= meta.world_size:
            reading.broken.append(Item(reading.root / path, f"holds the meta of a save of {meta.world_size} ranks"))
        elif others := {artifact.rank for artifact in meta.artifacts} - {rank}:
            reading.broken.append(Item(reading.root / path, f"holds the meta of rank {others.pop()}"))
        elif not meta.artifacts:
            reading.broken.append(Item(reading.root / path, "names no file"))
        elif elsewhere := {artifact.path.partition("/")[0] for artifact in meta.artifacts} - {directory}:
            reading.broken.append(Item(reading.root / path, f"holds the meta of {elsewhere.pop()}"))
        else:
            by_save.setdefault(meta.save_id, {})[rank] = meta
    for metas in by_save.values():
        _add_emergency(reading, directory, metas)


def _add_emergency(reading: _Reading, directory: str, metas: dict[int, Meta]) -> None:
    paths = {rank: reading.root / directory / names.emergency_meta_name(rank) for rank in metas}
    try:
        merged = meta_merging.merge_emergency(list(metas.values()))
    except BrokenMeta as error:
        reading.broken += [Item(path, str(error)) for path in paths.values()]
        return
    reading.found.append(LocalSave(reading.root, merged, paths[min(metas)]))


def _emergency_rank(name: str) -> int | None:
    digits = name.removeprefix("meta_rank").removesuffix(".json")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        return None
    return int(digits) if names.emergency_meta_name(int(digits)) == name else None


def _judged(reading: _Reading, save: LocalSave) -> LocalSave:
    """Compare a save's artifacts with the files on the disk."""
    found = {
        artifact: fault
        for artifact in save.meta.artifacts
        if (fault := reading.listing.fault_of(artifact.path, artifact.digest.size_bytes))
    }
    whole, lost = loadable(save.meta, found)
    kinds = () if save.why else whole
    faults = list(found.values())
    if not faults:
        return replace(save, kinds=kinds)
    faults.sort(key=lambda fault: fault.unreadable)  # certain faults first
    more = f" (and {len(faults) - 1} more of its files)" if len(faults) > 1 else ""
    return replace(
        save,
        why=save.why or faults[0].why + more,
        unreadable=not save.why and all(fault.unreadable for fault in faults),
        kinds=kinds,
        lost=lost,
        damaged=() if save.why else tuple(found),
    )


def _contradictions(saves: list[LocalSave]) -> list[str]:
    """Return for each save why it contradicts another; "" if it does not."""
    of_id: dict[str, list[LocalSave]] = {}
    of_path: dict[str, set[Digest]] = {}
    for save in saves:
        of_id.setdefault(save.meta.save_id, []).append(save)
        for artifact in save.meta.artifacts:
            of_path.setdefault(artifact.path, set()).add(artifact.digest)
    disputed = {path for path, digests in of_path.items() if len(digests) > 1}

    def why(save: LocalSave) -> str:
        twin = next((other for other in of_id[save.meta.save_id] if other is not save), None)
        if twin is not None:
            return f"{twin.meta_path.name} is another meta of the same save"
        path = next((a.path for a in save.meta.artifacts if a.path in disputed), "")
        return f"another save claims {path} with other bytes" if path else ""

    return [why(save) for save in saves]


def _find_unclaimed(reading: _Reading, saves: list[LocalSave]) -> None:
    """List as foreign every entry that has one of our names, but that no valid meta names."""
    claimed: dict[str, set[str]] = {}
    for save in saves:
        for artifact in save.meta.artifacts:
            claimed.setdefault(artifact.path.partition("/")[0], set()).add(artifact.path)
        if save.meta_path.parent != reading.root:
            claimed.setdefault(save.meta_path.parent.name, set())
    for name, parsed in reading.unclaimed.items():
        if name not in claimed:
            loose = not reading.listing.is_dir(name) or _holds_something(reading, name)
            reading.foreign.append(Item(reading.root / name, "no valid meta names it", loose=loose))
        elif parsed.role in ("dcp", "emergency") and reading.listing.is_dir(name):
            extra = set(reading.listing.files_below(name)) - claimed[name]
            reading.foreign += [
                Item(reading.root / path, "its directory is part of a save, but no meta names it")
                for path in sorted(extra)
                if parsed.role != "emergency" or not _belongs_to_emergency(path)
            ]


def _holds_something(reading: _Reading, directory: str) -> bool:
    found = reading.listing.files_below(directory)
    return reading.listing.is_unreadable(directory) or not all(names.is_tmp_name(path) for path in found)


def _belongs_to_emergency(path: str) -> bool:
    name = path.rpartition("/")[2]
    return names.is_tmp_name(name) or _emergency_rank(name) is not None


def _read_control_dir(reading: _Reading) -> None:
    for name in reading.listing.names(names.CONTROL_DIR):
        if names.is_tmp_name(name):
            reading.temporaries.append(reading.root / names.CONTROL_DIR / name)
