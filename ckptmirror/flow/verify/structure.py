"""Structure: lists the saves of a place for a verification, and checks names, metas and listings.

Rules:
* A save whose meta can be read gets its standing, as if it were whole; without a place in the lineage it is
  ``unknown``.
* A mirror is listed after its metas were read: the files that a meta names existed before it, so the listing has them.
* A save that disappears during the check was deleted on purpose, and is not reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.problems import Explained, Hindrance, Problem, facts_of, unexplained
from ckptmirror.core.start.lineage import Standing
from ckptmirror.core.tensor_lists import loadable
from ckptmirror.core.uncommitted import Uncommitted
from ckptmirror.core.verification import State, standing_if_whole, worst
from ckptmirror.flow.fetch.blocks import Finding
from ckptmirror.flow.places.catalog import Catalog, local_catalog, mirror_catalog, objects_of, part_word
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.object_match import why_differs
from ckptmirror.flow.places.resolve import by_run
from ckptmirror.flow.places.select import attempts_of, lineage_of
from ckptmirror.flow.places.uncommitted import uncommitted_saves
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.flow.save.persistent_dir import lost_snapshots
from ckptmirror.local.listing import Listing
from ckptmirror.stores.base import ObjectInfo

__all__ = ["Subject", "look_at_mirror", "look_at_root"]


@dataclass
class Subject:
    """One save in one place, while it is verified.

    Attributes:
        name: The meta's path, or its name on the mirror.
        address: The path or URL of the meta, for other tools.
        meta: None if it cannot be read.
        why: What is wrong with the save as a whole; "" if nothing is.
        hindrance: Why the save cannot be read now, if that is what is wrong.
        not_signed: Whether all that is wrong is that its meta is not believed by the keys of this process.
        is_missed: Whether nothing is there, although the table says that it was.
        faults: What is wrong with single artifacts, by path.
        objects: On a mirror, what the listing says of each object that the meta names.
        wrong_tensors: By kind, the names of tensors in its files that are not what was saved.
        exists: Returns whether the place has a file or object of this name now.
    """

    place: str
    name: str
    step: int | None
    standing: Standing
    exists: Callable[[str], bool]
    meta: Meta | None = None
    address: str = ""
    save_id: str = ""
    why: str = ""
    hindrance: Hindrance = ""
    not_signed: bool = False
    is_missed: bool = False
    faults: dict[str, Finding] = field(default_factory=dict)
    objects: Mapping[str, ObjectInfo] = field(default_factory=dict)
    read_bytes: int = 0
    wrong_tensors: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_on_mirror(self) -> bool:
        """Whether the place is a mirror."""
        return "://" in self.place

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Its kinds; none if the meta cannot be read."""
        return self.meta.kinds if self.meta is not None else ()

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The artifacts that its meta names; none if the meta cannot be read."""
        return self.meta.artifacts if self.meta is not None else ()

    @property
    def _is_broken(self) -> bool:
        """Whether something is wrong with it as a whole."""
        return bool(self.why) and not self.faults

    def name_of(self, artifact: Artifact) -> str:
        """Return the name that an artifact has in the place."""
        return artifact.object_name if self.is_on_mirror else artifact.path

    def state(self) -> State:
        """Return its state, by what is known so far."""
        of_all: list[State] = [self.hindrance or "damaged"] if self._is_broken else []
        of_all += ["damaged"] * bool(self.wrong_tensors)
        return worst([*of_all, *(fault.state for fault in self.faults.values())])

    def whole_kinds(self) -> tuple[Kind, ...]:
        """The kinds of which all is whole that a load needs, by what is known so far."""
        if self.meta is None or self._is_broken:
            return ()
        damaged = [one for one in self.artifacts if one.path in self.faults]
        gone = [one for one in damaged if self.faults[one.path].is_gone]
        lost = loadable(self.meta, gone)[1]
        whole = self.meta.kinds_without(one for one in damaged if one.path not in lost)
        return tuple(kind for kind in whole if kind not in self.wrong_tensors)

    def readable(self) -> list[Artifact]:
        """The artifacts that exist and have no fault so far."""
        return [] if self._is_broken else [a for a in self.artifacts if a.path not in self.faults]

    def is_meta_beside(self, other: Subject) -> bool:
        """Whether it is only a broken meta, and ``other`` a whole save of its step in the same place."""
        parsed = names.parse_name(Path(self.name).name)
        is_meta = self.meta is None and not self.is_missed and parsed is not None and parsed.role == "meta"
        is_beside = other.meta is not None and (other.place, other.step) == (self.place, self.step)
        return is_meta and is_beside and other.kinds != ("emergency",) and other.state() == "whole"

    def is_gone(self) -> bool:
        """Whether the save was deleted, as a whole and meta first, since the check began."""
        missed = {path: fault for path, fault in self.faults.items() if fault.is_gone}
        try:
            return bool(missed) and not self.exists(self.name)
        except CkptMirrorError as error:  # it stopped answering: then it is unknown
            self.faults |= {path: Finding(f"{fault.why}; {error}", "unreadable") for path, fault in missed.items()}
            return False

    def is_named(self, name: str) -> bool:
        """Whether ``name`` is the name of its meta, file or directory, or "", which names everything."""
        if not name or Path(self.name).name == name:
            return True
        if self.meta is None:
            mine, other = names.parse_name(Path(self.name).name), names.parse_name(name)
            return mine is not None and other is not None and (mine.step, mine.tag) == (other.step, other.tag)
        return name in {self.name_of(artifact).partition("/")[0] for artifact in self.artifacts}


def look_at_root(root: Path, step: int | None, notes: MutableSequence[str]) -> list[Subject]:
    """Look at the saves of a directory.

    Raises:
        CheckpointNotFound: It is not a directory.
        BrokenMeta: Its list of attempts cannot be trusted.
    """
    if not root.is_dir():
        raise CheckpointNotFound(f"{root} is not a directory.", hint="Give the directory that the trainer saves to.")
    found = local_catalog(root)
    lost = lost_snapshots(root, found)
    catalog = found.with_parts(besides=lost)
    _note_strays(catalog, step, notes)
    parts = [meta for save_id, meta in found.parts.items() if step in (None, meta.step) and save_id not in lost]
    notes += [f"of the emergency snapshot of step {one.step}, {part_word(one)}" for one in parts if is_emergency(one)]
    steps = ", ".join(str(at) for at in sorted({meta.step for meta in parts if not is_emergency(meta)}))
    if steps:
        notes.append(f"of step {steps}, {root} has only what one of several nodes wrote; the others have the rest")
    subjects = _subjects(catalog, step, lambda name: os.path.lexists(root / name))
    listing = Listing(root)
    for subject in subjects:
        subject.address = str(root / subject.name)
        for artifact in subject.artifacts:
            fault = listing.fault_of(artifact.path, artifact.digest.size_bytes)
            if fault is not None:
                why = fault.why.removeprefix(artifact.path).strip()
                is_gone = not subject.exists(artifact.path)
                subject.faults[artifact.path] = Finding(why, "unreadable" if fault.unreadable else "damaged", is_gone)
    return [subject for subject in subjects if not subject.is_gone()]


def look_at_mirror(
    mirror: Mirror, step: int | None, notes: MutableSequence[str], waiting: MutableSequence[tuple[str, Uncommitted]]
) -> list[Subject]:
    """Look at the saves of a mirror; add to ``waiting`` those that wait for nodes, with the mirror.

    Raises:
        StoreTemporary: It does not answer.
        BrokenMeta: Its list of attempts cannot be trusted.
    """
    catalog = mirror_catalog(mirror, step=step)
    found = uncommitted_saves(mirror, catalog, step=step, with_parts=True)
    waiting += [(mirror.url, one) for one in found if step in (None, one.parts.step)]
    _note_strays(catalog, step, notes, {(one.parts.step, tag) for one in found for tag in ("", one.parts.digits)})
    store, directory = mirror.store, mirror.store.local_directory
    subjects = _subjects(catalog, step, lambda name: store.stat(name) is not None)
    subjects = [subject for subject in subjects if subject.meta is not None or subject.exists(subject.name)]
    listed = {info.name: info for info in store.list()} if step is None and subjects else {}
    for subject in subjects:
        subject.address = f"{mirror.url}/{subject.name}" if directory is None else str(directory / subject.name)
        if subject.meta is not None:
            subject.objects = listed if step is None else objects_of(store, subject.meta)
        for artifact in subject.artifacts:
            fault = _fault_of(artifact, subject.objects.get(artifact.object_name))
            if fault is not None:
                subject.faults[artifact.path] = fault
    return [subject for subject in subjects if not subject.is_gone()]


def _fault_of(artifact: Artifact, info: ObjectInfo | None) -> Finding | None:
    why = why_differs(artifact, info)
    return Finding(why, is_gone=info is None) if why is not None else None


def _subjects(catalog: Catalog, step: int | None, exists: Callable[[str], bool]) -> list[Subject]:
    """Return every save of a place, whole or not, by step, attempt and number."""

    def add(name: str, standing: Standing, meta: Meta | None, problem: Problem) -> None:
        found.append(
            Subject(
                place=catalog.place,
                name=name,
                step=meta.step if meta is not None else _step_of(name, problem),
                standing=standing,
                exists=exists,
                meta=meta,
                save_id=meta.save_id if meta is not None else problem.save_id,
                why=problem.why,
                hindrance=problem.hindrance,
                not_signed=problem.not_signed,
            )
        )

    found: list[Subject] = []
    for one in by_run(catalog):
        standing = lineage_of(one).standing_by_save()
        for meta in one.whole.values():
            add(catalog.address_of(meta), standing[meta.save_id], meta, Problem(why=""))
    saves = [facts_of(meta) for meta in catalog.whole.values()]
    decided = [attempt for attempt in attempts_of(catalog) if attempt.decided]
    for name, problem in catalog.problems.items():
        broken = problem.meta
        placed = standing_if_whole(decided, saves, facts_of(broken)) if broken is not None else "unknown"
        add(name, placed, broken, problem)
    return sorted((subject for subject in found if step is None or subject.step == step), key=_in_order)


def _step_of(name: str, problem: Problem) -> int | None:
    if problem.step is not None:
        return problem.step
    parsed = names.parse_name(Path(name).name)
    return parsed.step if parsed is not None else None


def _in_order(subject: Subject) -> tuple[int, int, int, str]:
    meta = subject.meta
    number = (meta.attempt.number, meta.save_number) if meta is not None else (-1, -1)
    return (-1 if subject.step is None else subject.step, *number, subject.name)


def _note_strays(
    catalog: Catalog,
    step: int | None,
    notes: MutableSequence[str],
    waiting: Collection[tuple[int | None, str]] = (),
) -> None:
    """Note the files that no meta names, but for those of saves that wait for nodes, given by step and tag."""
    metas = [*catalog.saves.values(), *(one.meta for one in catalog.problems.values() if one.meta is not None)]
    loose = unexplained(catalog.others, Explained.by(metas), catalog.tombstones.values())
    told = {problem.step for problem in catalog.problems.values()}  # the files of a broken meta are loose
    for name, problem in loose.items():
        parsed = names.parse_name(name)
        is_awaited = parsed is not None and (parsed.step, parsed.tag) in waiting
        if problem.step not in told and not is_awaited and (step is None or problem.step == step):
            under_way = "; its upload may not be finished" if "://" in catalog.place else ""
            notes.append(f"{catalog.place}/{name}: {problem.why}{under_way}")
