"""Verify: checks whether every save of a root or of a mirror has exactly the saved bytes.

Rules:
* The structure comes first: the meta is valid, and every file or object that it names exists, with its size, and with
  its crc32c if the mirror keeps one. ``deep`` also reads every byte (``fetch.blocks``), and then
  whether the pieces of a DCP directory make up its tensors (``contents``). ``tensors`` compares the tensors in the
  files with what memory held as they were saved (``flow.verify.tensors``).
* A check changes and locks nothing, and may run beside a trainer: a save that is deleted on purpose meanwhile is not
  damage.
* There is one exception. With ``deep``, and with the root given beside a mirror that its table knows by identity,
  verified records of damaged objects become pending again (``table_feedback``). So rotation keeps the local copy, and
  the uploader sends it once more. Nothing else in the table changes.
* With the root, its table is read too: if it calls a save committed on a mirror, and the save is not there, that is
  damage.
* A place without any save counts as damaged: its name was mistyped, or its saves were lost.
* A save that some nodes have uploaded and others not is not damage: it is reported apart from the others.
* A broken meta beside a whole save of its step does not mean that anything is missing: it may be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.nearest_steps import nearest_steps
from ckptmirror.core.uncommitted import Uncommitted
from ckptmirror.core.verification import State, Verdict, delete_command, kinds_to_stage, outcome, repair_command, worst
from ckptmirror.flow.fetch.blocks import FileToRead, ObjectToRead, read_all
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.reference import locate, place_of
from ckptmirror.flow.places.resolve import resolve_checkpoint_reference
from ckptmirror.flow.verify.contents import check_contents
from ckptmirror.flow.verify.structure import Subject, look_at_mirror, look_at_root
from ckptmirror.flow.verify.table_feedback import Table
from ckptmirror.flow.verify.tensors import TensorsFound, are_elsewhere, check_tensors, have_no_list
from ckptmirror.local.uploads import SaveRow
from ckptmirror.stores import normalise_url, open_store
from ckptmirror.stores.retrying import OnWait

__all__ = ["Target", "Verification", "VerifiedSave", "target_in", "target_of", "verify"]

_FAULTS_LISTED = 100
_SENT_BY_OTHERS = (
    "what is damaged on the mirror and is not here, another node wrote: `ckptmirror verify --root ROOT --mirror URL "
    "--deep` and then `ckptmirror drain` on that node send it again"
)
_COMPARED_ON_MIRROR = (
    "the tensors of what several nodes wrote are compared on a mirror: `ckptmirror verify URL --tensors`"
)


@dataclass(frozen=True)
class VerifiedSave:
    """The result for one save in one place.

    Attributes:
        place: A directory, or a mirror's URL.
        meta: The meta's path, or its name on the mirror.
        verdict: Step, kinds, standing, and whether it is whole.
        faults: What is wrong, one line each; empty if it is whole. At most 100.
        files: How many files its meta names.
        read_bytes: How many of its bytes were read and compared.
        mend: The command that repairs it; empty if none is known, or nothing needs repair.
        not_signed: Whether all that is wrong is that its meta is not believed by the keys of this process.
        whole_kinds: Its kinds of which no load needs a damaged file.
        tensors: What came of comparing the tensors of each kind with their fingerprints; None if that was not asked.
        part: Which part of the save it is, "node 0's part"; empty if it is all of it.
    """

    place: str
    meta: str
    verdict: Verdict
    save_id: str = ""
    faults: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0
    read_bytes: int = 0
    mend: str = ""
    not_signed: bool = False
    whole_kinds: tuple[Kind, ...] = ()
    tensors: tuple[TensorsFound, ...] | None = None
    part: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        saves: By place, then step.
        notes: Other findings, which are not damage.
        waiting: Saves on a mirror that wait for nodes, each with the mirror's URL.
        pending_again: How many upload records became pending because their verified object is damaged.
    """

    deep: bool
    saves: tuple[VerifiedSave, ...]
    notes: tuple[str, ...] = ()
    pending_again: int = 0
    waiting: tuple[tuple[str, Uncommitted], ...] = ()

    @property
    def outcome(self) -> State:
        """The worst state of the saves that count, over all places."""
        places = dict.fromkeys(save.place for save in self.saves)
        return worst(outcome([save.verdict for save in self.saves if save.place == place]) for place in places)


@dataclass(frozen=True)
class Target:
    """What to verify: a directory, mirrors, or both; all saves there, or the one that a name belongs to."""

    root: Path | None = None
    mirrors: tuple[str, ...] = ()
    name: str = ""


def target_in(root: Path | None, mirrors: Iterable[str]) -> Target:
    """Turn a directory and mirrors into a target; the directory of a mirror is that mirror."""
    place = place_of(root.absolute()) if root is not None else None
    return Target(None, (place, *mirrors)) if isinstance(place, str) else Target(place, tuple(mirrors))


def target_of(reference: str) -> Target:
    """Turn what a person typed into a target.

    Raises:
        CheckpointNotFound: It does not exist.
        UsageError: It is neither a place of saves nor a save in one.
    """
    located = locate(reference)
    if not isinstance(located.place, Path):
        return Target(mirrors=(located.place,), name=located.name)
    return Target(root=located.place, name=located.name)


def verify(
    target: Target,
    *,
    step: int | None = None,
    deep: bool = False,
    tensors: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: OnWait | None = None,
) -> Verification:
    """Verify the saves of a root, of mirrors, or of both.

    Args:
        target: What to verify.
        step: Only the saves of this step.
        deep: Read every byte.
        tensors: Compare every tensor with its fingerprint.
        on_progress: Called with the bytes read and all bytes, first before the first byte, by one thread at a time.
        on_wait: Called when a mirror is asked again later, with its URL, the seconds until then, and the error.

    Raises:
        CheckpointNotFound: There is no save, or none of this step or name.
        StoreTemporary: A mirror does not answer.
        NotAuthorised: A mirror does not accept the credentials.
        BrokenMeta: A list of attempts cannot be trusted.
    """
    if target.name:
        parsed = names.parse_name(target.name)
        step = parsed.step if parsed is not None else step
    table = Table(target.root, read_only=not target.mirrors)
    with table, _opened(target, table, on_wait) as mirrors:
        notes: list[str] = []
        found = [look_at_root(target.root, step, notes)] if target.root is not None else []
        waiting: list[tuple[str, Uncommitted]] = []
        found += [look_at_mirror(mirror, step, notes, waiting) for mirror in mirrors]
        everything = [subject for place in found for subject in place]
        for mirror in mirrors:
            everything += table.missed_on(mirror, everything, step)
        subjects = [subject for subject in everything if subject.is_named(target.name)]
        if not subjects:
            raise _nothing_found(target, step, mirrors, waiting)
        with_something = {subject.place for subject in subjects} | {url for url, _ in waiting}
        _check_every_place(target, step, mirrors, with_something)
        if deep:
            _read(subjects, mirrors, on_progress)
            stores = {mirror.url: mirror.store for mirror in mirrors}
            for subject in subjects:
                check_contents(subject, stores.get(subject.place))
        compared: dict[int, tuple[TensorsFound, ...]] = {}
        if tensors:
            by_url = {mirror.url: mirror for mirror in mirrors}
            for subject in subjects:
                if are_elsewhere(subject):
                    notes.append(_COMPARED_ON_MIRROR)
                    continue
                if have_no_list(subject):
                    notes.append(f"{subject.place} has no list of the tensors of step {subject.step} to compare with")
                    continue
                found_here = check_tensors(subject, by_url.get(subject.place))
                subject.wrong_tensors = {one.kind: one.differ for one in found_here if one.differ}
                compared[id(subject)] = found_here
        if deep or tensors:
            subjects = [subject for subject in subjects if not subject.is_gone()]
        for subject in subjects:
            row = table.save_of(subject)
            twins = [one for one in subjects if row and (one.place, one.save_id) == (subject.place, row.save_id)]
            if any(twin.state() == "whole" for twin in twins):
                subject.standing = "replaced"  # by another meta of the same save
        pending_again = 0
        for mirror in mirrors if target.root is not None else ():
            on_it = [subject for subject in subjects if subject.place == mirror.url]
            pending_again += table.doubt(mirror, on_it, notes) if deep else 0
            notes += table.notes_on(mirror, on_it)
        parts = [one.meta for one in everything if not one.is_on_mirror and one.meta is not None]
        if any(_are_of_others(one, part) for one in subjects for part in parts if one.save_id == part.save_id):
            notes.append(_SENT_BY_OTHERS)
        saves = tuple(
            replace(_verified(subject, subjects, table, target.root), tensors=compared.get(id(subject)))
            for subject in subjects
        )
    return Verification(deep, saves, tuple(dict.fromkeys(notes)), pending_again, tuple(waiting))


@contextmanager
def _opened(target: Target, table: Table, on_wait: OnWait | None) -> Iterator[list[Mirror]]:
    mirrors: list[Mirror] = []
    try:
        for url in dict.fromkeys(normalise_url(url) for url in target.mirrors):
            mirrors.append(table.open(url, on_wait) or Mirror(url, False, open_store(url, on_wait=on_wait)))
        yield mirrors
    finally:
        for mirror in mirrors:
            mirror.store.close()


def _check_every_place(target: Target, step: int | None, mirrors: Sequence[Mirror], found: set[str]) -> None:
    """Check that each mirror holds some of the requested saves. The root may not: a step may have been rotated away.

    Raises:
        CheckpointNotFound: A mirror holds none of them.
    """
    root = [str(target.root)] * (target.root is not None and step is None)
    empty = [place for place in (*root, *(mirror.url for mirror in mirrors)) if place not in found]
    if empty:
        what = f"nothing of step {step}" if step is not None else "no saves"
        raise CheckpointNotFound(
            f"{', '.join(empty)} holds {what}, but another place that you named does.",
            hint="Check the directory or the URL; `ckptmirror drain` uploads what is not there yet.",
        )


def _nothing_found(
    target: Target, step: int | None, mirrors: Sequence[Mirror], waiting: Sequence[tuple[str, Uncommitted]]
) -> CheckpointNotFound:
    if waiting and not target.name:
        url, one = waiting[0]
        return CheckpointNotFound(
            f"{url} holds no whole save{'' if step is None else f' of step {step}'}. Of step {one.parts.step}, "
            f"{one.parts.nodes} nodes have saved a part, and it waits for {one.parts.awaited}.",
            hint="`ckptmirror drain` on that node finishes it; `ckptmirror ls` lists what else there is.",
        )
    places = ", ".join([str(target.root)] * (target.root is not None) + [mirror.url for mirror in mirrors])
    if target.name:
        of = Path(target.root, target.name) if target.root is not None else f"{target.mirrors[0]}/{target.name}"
        resolve_checkpoint_reference(of)  # says what is wrong with it
        return CheckpointNotFound(f"{of} has no meta with checksums, so ckptmirror cannot tell whether it is whole.")
    if step is None:
        return CheckpointNotFound(f"{places} holds no saves.", hint="Check the directory or the URL.")
    found = look_at_root(target.root, None, []) if target.root is not None else []
    found += [subject for mirror in mirrors for subject in look_at_mirror(mirror, None, [], [])]
    steps = {subject.step for subject in found if subject.step is not None}
    return CheckpointNotFound(f"{places} has no step {step}.{nearest_steps(steps, step)}")


def _read(
    subjects: Sequence[Subject],
    mirrors: Sequence[Mirror],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Read the artifacts that passed the structure check, place by place; a file that several saves name, once."""
    stores = {mirror.url: mirror.store for mirror in mirrors}
    wanted: dict[str, dict[FileToRead | ObjectToRead, list[tuple[Subject, Artifact]]]] = {}
    for subject in subjects:
        store = stores.get(subject.place)
        for artifact in subject.readable():
            name = subject.name_of(artifact)
            source: FileToRead | ObjectToRead
            if store is not None:
                source = ObjectToRead(store, name, subject.objects[name].generation, artifact.digest)
            else:
                source = FileToRead(Path(subject.place, name), artifact.digest)
            wanted.setdefault(subject.place, {}).setdefault(source, []).append((subject, artifact))
    total, done = sum(source.digest.size_bytes for of_place in wanted.values() for source in of_place), 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    told(0)
    for of_place in wanted.values():
        for users, fault in zip(of_place.values(), read_all(list(of_place), on_bytes=told), strict=True):
            for subject, artifact in users:
                if fault is None:
                    subject.read_bytes += artifact.digest.size_bytes
                else:
                    subject.faults[artifact.path] = fault


def _verified(subject: Subject, everything: Sequence[Subject], table: Table, root: Path | None) -> VerifiedSave:
    state = subject.state()
    verdict = Verdict(subject.step, subject.kinds, subject.standing, state)
    called = {artifact.path: subject.name_of(artifact) for artifact in subject.artifacts}
    lines = [_line(called.get(path, path), fault.why) for path, fault in subject.faults.items()]
    lines = lines or [subject.why] * bool(subject.why)
    lines += [
        f"{name} in kind {kind} is not what was saved"
        for kind, listed in subject.wrong_tensors.items()
        for name in listed
    ]
    mend = ""
    if state == "damaged" and _is_spare(subject, everything, table):
        mend = delete_command(subject.address)
        lines = [f"{line.rstrip('.')}; a whole save of step {subject.step} is beside it" for line in lines]
    elif state == "damaged" and (subject.faults or not subject.wrong_tensors):  # every copy has the same tensors
        mend = _mend(subject, everything, table, root)
    return VerifiedSave(
        place=subject.place,
        meta=subject.name,
        verdict=verdict,
        save_id=subject.save_id,
        faults=tuple(lines[:_FAULTS_LISTED]),
        files=len(subject.meta.artifacts) if subject.meta is not None else 0,
        size_bytes=subject.meta.size_bytes if subject.meta is not None else 0,
        read_bytes=subject.read_bytes,
        mend=mend,
        not_signed=subject.not_signed,
        whole_kinds=subject.whole_kinds(),
        part=f"node {subject.meta.node}'s part" if subject.meta is not None and are_elsewhere(subject) else "",
    )


def _line(name: str, why: str) -> str:
    return f"{name} {why}" if why.startswith(("is ", "has ")) else f"{name}: {why}"


def _is_spare(subject: Subject, everything: Sequence[Subject], table: Table) -> bool:
    """Whether a broken meta can be deleted: a whole save of its step is there, with the same id if that is known.

    One that is only not signed may be the meta of another whole save: of it, the id must be known.
    """
    beside = [other for other in everything if subject.is_meta_beside(other)]
    row = table.save_of(subject) if beside else None
    return any(other.save_id == row.save_id if row is not None else not subject.not_signed for other in beside)


def _mend(subject: Subject, everything: Sequence[Subject], table: Table, root: Path | None) -> str:
    """Return the command that repairs a damaged copy, if a good one is known.

    What is damaged on a mirror is sent from the root. If that has no good copy, one is staged into it first, in all
    kinds: a copy of one kind alone is never sent. What is only not signed is replaced by a copy that was just seen
    whole: a mirror that the table alone names may have the same unsigned save.
    """
    row = table.save_of(subject)
    known = subject if subject.save_id or row is not None else _same_elsewhere(subject, everything)
    save_id = row.save_id if row is not None else known.save_id
    if subject.step is None or not save_id:
        return ""
    command = partial(repair_command, step=subject.step, standing=known.standing, place=subject.place)
    others = [one for one in everything if one.save_id == save_id and one.place != subject.place]
    if subject.is_on_mirror:
        if root is None or any(one.meta is not None and _are_of_others(subject, one.meta) for one in _on_disk(others)):
            return ""
        command = partial(command, root=str(root), is_known=table.knows(subject.place))
        if any(one.state() == "whole" and one.meta and not one.meta.partial for one in _on_disk(others)):
            return command(kinds=())
    if any(one.step == subject.step and one.standing == "current" and one.save_id != save_id for one in everything):
        return ""  # it would stage that one
    copies = _copies(subject, others, () if subject.not_signed else table.holders(save_id))
    if not copies:
        return ""
    if subject.is_on_mirror:
        return command(kinds=kinds_to_stage(row.kinds if row is not None else known.kinds, ()), mirror=copies[0])
    aside = f"mv {quote(subject.name)} {quote(subject.name)}.broken && " if subject.meta is None else ""
    return aside + command(kinds=_kinds_to_stage(subject, row), mirror=copies[0])


def _same_elsewhere(subject: Subject, everything: Sequence[Subject]) -> Subject:
    """Return the save that a mirror's broken meta was of, if it can be only one: that of its step on other places."""
    here = {one.save_id for one in everything if one.place == subject.place}
    there = {one.save_id: one for one in everything if one.step == subject.step and one.state() == "whole"}
    missing = [one for save_id, one in there.items() if save_id not in here]
    return missing[0] if subject.is_on_mirror and len(missing) == 1 else subject


def _on_disk(subjects: Sequence[Subject]) -> list[Subject]:
    return [one for one in subjects if not one.is_on_mirror]


def _copies(subject: Subject, others: Sequence[Subject], holders: Sequence[str]) -> list[str]:
    """Return the mirrors that have a good copy of a save: as was found now, by the table, and where it came from."""
    bad = {subject.place, *(one.place for one in others if one.state() != "whole")}
    copies = [one.place for one in others if one.is_on_mirror and one.state() == "whole"]
    came_from = subject.meta.staged_from if subject.meta is not None else None
    return copies + [url for url in (*holders, came_from) if url and url not in bad]


def _are_of_others(subject: Subject, part: Meta) -> bool:
    """Whether files of a save that are damaged on a mirror are not in this disk's part of it."""
    here = {names.plain(artifact.path) for artifact in part.artifacts}
    return not part.is_whole and any(names.plain(path) not in here for path in subject.faults)


def _kinds_to_stage(subject: Subject, row: SaveRow | None) -> tuple[Kind, ...]:
    if subject.meta is None:
        return kinds_to_stage(row.kinds if row is not None else (), ())
    damaged = [artifact.kinds for artifact in subject.meta.artifacts if artifact.path in subject.faults]
    return kinds_to_stage(subject.kinds, damaged)
