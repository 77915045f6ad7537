"""Problems: things that look like a save but are not whole, and which of them a reader skips for a whole one.

Rules:
* Files that no meta names make one problem for each save that they seem to belong to.
* A problem matters only in the kinds in which its save would be current, if it were whole.
* A save that merely cannot be read now may be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptmirror.core import names
from ckptmirror.core.model import Attempt, Kind, Meta, Tombstone
from ckptmirror.core.start.lineage import SaveFacts, lineage

__all__ = ["PARTS_OF_SAVES", "Explained", "Hindrance", "Problem", "facts_of", "skipped_for", "unexplained"]

PARTS_OF_SAVES: frozenset[names.Role] = frozenset({"model", "optim", "extra", "tensors", "dcp", "part"})
_OF_OLDER_LAYOUTS: frozenset[names.Role] = frozenset(
    {"legacy_dcp", "legacy_extra", "legacy_meta", "legacy_extra_state"}
)

Hindrance = Literal["", "unreadable", "refused"]


@dataclass(frozen=True)
class Problem:
    """Something that looks like a save but is not whole in its place. Its ``str`` says why.

    Attributes:
        step: None if unknown.
        save_id: "" if unknown.
        kinds: The kinds in which it could be resumed from, if it were whole.
        meta: Its meta, if that could be read.
        hindrance: Set if it merely cannot be read now (an I/O error, a permission, a later format; ``refused``: the
            mirror does not accept these credentials for it), so that it may be whole.
        not_signed: Whether all that is wrong is that its meta is not believed by the keys of this process.
    """

    why: str
    step: int | None = None
    save_id: str = ""
    kinds: tuple[Kind, ...] = ("dcp", "model")
    meta: Meta | None = None
    hindrance: Hindrance = ""
    not_signed: bool = False

    def __str__(self) -> str:
        return self.why

    @classmethod
    def of(cls, meta: Meta, why: str, hindrance: Hindrance = "") -> Problem:
        """Return a problem with a save whose meta could be read."""
        return cls(why, meta.step, meta.save_id, meta.kinds, meta, hindrance)


def facts_of(meta: Meta) -> SaveFacts:
    """Return what the lineage needs to know about a save."""
    return SaveFacts(
        save_id=meta.save_id,
        attempt=meta.attempt.id,
        number=meta.save_number,
        step=meta.step,
        kinds=meta.kinds,
    )


def skipped_for(
    meta: Meta, kind: Kind, problems: Mapping[str, Problem], attempts: Iterable[Attempt], saves: Iterable[Meta]
) -> dict[str, Problem]:
    """Return the problems that a reader skips when it takes this save in this kind.

    Each would be chosen in place of the save, if it were whole. Problems that would be superseded, or replaced by a
    whole save, even if they were whole, are left out.

    Args:
        problems: The problems of the place, by name.
        attempts: Its attempts; undecided ones do not count.
        saves: Its whole saves.
    """
    decided = [attempt for attempt in attempts if attempt.decided]
    whole = [facts_of(one) for one in saves]
    found: dict[str, Problem] = {}
    for name, problem in problems.items():
        if kind not in problem.kinds or problem.save_id == meta.save_id:
            continue
        if problem.step is not None and problem.step < meta.step:
            continue
        if problem.meta is not None:
            if problem.step == meta.step and _age(problem.meta) < _age(meta):
                continue
            facts = facts_of(problem.meta)
            others = [save for save in whole if save.save_id != facts.save_id]
            if lineage(decided, [*others, facts]).current.get((facts.step, kind)) != facts:
                continue
        found[name] = problem
    return found


def _age(meta: Meta) -> tuple[int, int]:
    return meta.attempt.number, meta.save_number


@dataclass(frozen=True)
class Explained:
    """The names directly below a root or prefix that metas explain.

    Attributes:
        owners: Eight digits of each save that has a name, by the name without its tag.
        saves: The same of all saves.
    """

    owners: Mapping[str, Collection[str]]
    saves: Collection[str]

    @classmethod
    def by(cls, metas: Iterable[Meta]) -> Explained:
        """Return what these metas explain."""
        owners: dict[str, set[str]] = {}
        for meta in metas:
            for top in {artifact.path.partition("/")[0] for artifact in meta.artifacts}:
                owners.setdefault(names.untagged(top), set()).add(meta.save_id[:8])
        return cls(owners, set().union(*owners.values()))


def unexplained(
    listed: Iterable[str], explained: Explained, tombstones: Iterable[Tombstone] = ()
) -> dict[str, Problem]:
    """Find files of saves that no meta names; return one problem for each save that they seem to belong to.

    The directory of an emergency snapshot without any meta is not a problem: the grace period ended before any rank had
    finished, and that must not keep a job from starting from scratch.

    Args:
        listed: Names in a root or on a mirror.
        explained: By every meta that could be read in any place, of whole saves or not.
        tombstones: Tombstones of removed saves, whose files may still be there.
    """
    removed = {(stone.step, tag) for stone in tombstones for tag in ("", stone.save_id[:8])}
    groups: dict[tuple[int | None, str], list[str]] = {}
    for name in sorted({name if name.startswith("parts/") else name.partition("/")[0] for name in listed}):
        parsed = names.parse_name(name)
        if parsed is None or (parsed.step, parsed.tag) in removed:
            continue
        if parsed.role in _OF_OLDER_LAYOUTS:
            groups[(None, name)] = [name]
        elif parsed.role in PARTS_OF_SAVES:
            owners = explained.saves if parsed.role == "part" else explained.owners.get(names.untagged(name), ())
            if not owners or (parsed.tag and parsed.tag not in owners):
                groups.setdefault((parsed.step, parsed.tag), []).append(name)
    return {found[0]: _loose(step, found) for (step, _), found in groups.items()}


def _loose(step: int | None, found: Sequence[str]) -> Problem:
    if step is None:
        return Problem("of an older layout, which is never resumed from")
    more = f" (nor {len(found) - 1} more of step {step})" if len(found) > 1 else ""
    return Problem(f"no valid meta names it{more}", step)
