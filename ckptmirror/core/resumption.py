"""Where a start begins: which saves to try, in which order, and whether going back or starting at step 0 is allowed.

Rules:
* The newest save of the lineage first; of one step, DCP before the model file before an emergency snapshot, then the
  saves that those replaced, newest first.
* At an equal save the disk is preferred; then the mirrors in configured order.
* Superseded and unknown saves are never chosen by ``auto``; a person may ask for one by its id.
* What looks like a save that would have been tried first, and is not whole, is never passed by in silence; and not at
  all while it cannot be read, or while a required mirror that may hold it does not answer.
* While a required mirror does not answer, what others hold is only continued from if the disk has it too.
* Starting at 0 needs the answer of every required mirror, and either no committed save anywhere or a recorded decision
  to start from scratch. Anything that looks like a save but is broken forbids it: a person decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptmirror.core import names
from ckptmirror.core.errors import (
    CheckpointNotFound,
    NotAuthorised,
    RefusedOnlyCopy,
    StoreTemporary,
    Temporary,
    UsageError,
)
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Attempt, Kind, Meta, Tombstone

__all__ = [
    "DISK",
    "Candidate",
    "Hindrance",
    "Problem",
    "candidates",
    "check_fresh_start",
    "check_passed_by",
    "check_scratch",
    "facts_of",
    "first_in_line",
    "need_every_mirror",
    "not_readable",
    "passed_by",
    "strangers",
    "unexplained",
]

DISK = "disk"
KIND_ORDER: tuple[Kind, ...] = ("dcp", "model", "emergency")
_PARTS_OF_SAVES: frozenset[names.Role] = frozenset({"model", "optim", "extra", "tensors", "dcp", "part"})
_OF_OLDER_LAYOUTS: frozenset[names.Role] = frozenset(
    {"legacy_dcp", "legacy_extra", "legacy_meta", "legacy_extra_state"}
)

Hindrance = Literal["", "unreadable", "refused"]


@dataclass(frozen=True)
class Candidate:
    """One save in one kind, and the places that hold it whole, best first (``DISK`` or a mirror's URL).

    Attributes:
        replaced_by: The id of the save that stands for its step and kind; "" if that is this one.
        age: Number of its attempt and of the save within it: of two saves of one step, the greater is the newer.
    """

    save: SaveFacts
    kind: Kind
    places: tuple[str, ...]
    replaced_by: str = ""
    age: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Problem:
    """Something that looks like a save, and is not whole in its place. As text: why.

    Attributes:
        step: None where nothing tells it.
        save_id: "" where nothing tells it.
        kinds: In which kinds it might be resumed from, if it were whole.
        meta: If it could be read.
        hindrance: Set if it only cannot be read now (an I/O error, a permission, a later format; ``refused``: the
            mirror does not accept these credentials for it), so that it may be whole.
    """

    why: str
    step: int | None = None
    save_id: str = ""
    kinds: tuple[Kind, ...] = ("dcp", "model")
    meta: Meta | None = None
    hindrance: Hindrance = ""

    def __str__(self) -> str:
        return self.why

    @classmethod
    def of(cls, meta: Meta, why: str, hindrance: Hindrance = "") -> Problem:
        """Return the problem of a save whose meta could be read."""
        return cls(why, meta.step, meta.save_id, meta.kinds, meta, hindrance)


def facts_of(meta: Meta) -> SaveFacts:
    """Return what the lineage needs to know of a save."""
    return SaveFacts(
        save_id=meta.save_id,
        attempt=meta.attempt.id,
        number=meta.save_number,
        step=meta.step,
        kinds=meta.kinds,
    )


def candidates(
    order: Lineage, places: Mapping[tuple[str, Kind], Sequence[str]], reference: str | int | None = None
) -> list[Candidate]:
    """List what to try, best first.

    Args:
        order: The saves of all places together.
        places: For each save id and kind, where it is whole.
        reference: None for ``auto``; a step; ``"latest"``; or a save id (8 digits or more).

    Raises:
        CheckpointNotFound: The reference names nothing that is whole.
        UsageError: The reference is ambiguous.
    """
    if reference is None or reference == "latest":
        wanted = _on_the_lineage(order)
    elif isinstance(reference, int):
        wanted = [one for one in _on_the_lineage(order) if one[1].step == reference]
        if not wanted:
            raise _missing_step(reference, order)
    else:
        wanted = [(kind, save, "") for kind, save in _by_id(reference, order)]
    number = {attempt.id: attempt.number for attempt in order.way}
    return [
        Candidate(save, kind, tuple(where), replaced_by, (number.get(save.attempt, -1), save.number))
        for kind, save, replaced_by in wanted
        if (where := places.get((save.save_id, kind)))
    ]


def _on_the_lineage(order: Lineage) -> list[tuple[Kind, SaveFacts, str]]:
    """Every save of the lineage in each of its kinds, best first, with the id of the one that replaced it."""
    attempts = {attempt.id: attempt.number for attempt in order.way}
    saves = {save.save_id: save for save in (*order.current.values(), *order.replaced)}
    found = []
    for save in saves.values():
        for kind in save.kinds:
            stands = order.current[(save.step, kind)].save_id
            age = (-attempts[save.attempt], -save.number, save.save_id)
            rank = (-save.step, stands != save.save_id, age, KIND_ORDER.index(kind))
            found.append((rank, (kind, save, "" if stands == save.save_id else stands)))
    return [one for _, one in sorted(found, key=lambda item: item[0])]


def need_every_mirror(found: Sequence[Candidate], went_on_from: Collection[str]) -> frozenset[str]:
    """Return the save ids that may be continued from only if every required mirror answers.

    The newest save that others hold need not be the newest there is, and nor need a copy that somebody staged here. If
    this machine went on from there before, a mirror that does not answer is passed by. An emergency snapshot is on no
    mirror anyway.

    Args:
        found: The candidates, best first.
        went_on_from: The saves on this disk that were made here, or that the newest attempt here continued from.
    """
    here = {one.save.save_id for one in found if DISK in one.places and one.save.save_id in went_on_from}
    first = [*found[:1], *[one for one in found if one.kind != "emergency"][:1]]
    return frozenset(one.save.save_id for one in first) - here


# -- what is not whole ---------------------------------------------------------------------------------------


def first_in_line(
    problems: Mapping[str, Problem], attempts: Sequence[Attempt], saves: Collection[SaveFacts]
) -> dict[str, Problem]:
    """Return the problems that could be a save of the lineage, with only the kinds in which they would count.

    Left out is what would be superseded, or replaced by a whole save, even if it were whole.

    Args:
        problems: By name.
        attempts: Those that count.
        saves: The whole saves of all places together.
    """
    kept: dict[str, Problem] = {}
    for name, problem in problems.items():
        kinds = problem.kinds
        if problem.meta is not None:
            facts = facts_of(problem.meta)
            others = [save for save in saves if save.save_id != facts.save_id]
            current = lineage(attempts, [*others, facts]).current
            kinds = tuple(kind for kind in kinds if current.get((facts.step, kind)) == facts)
        if kinds:
            kept[name] = Problem(
                problem.why, problem.step, problem.save_id, kinds, problem.meta, hindrance=problem.hindrance
            )
    return kept


def passed_by(candidate: Candidate | None, problems: Mapping[str, Problem]) -> dict[str, Problem]:
    """Return those of the problems that would have been tried before ``candidate`` (None: step 0), were they whole."""
    if candidate is None:
        return dict(problems)
    return {
        name: problem
        for name, problem in problems.items()
        if problem.step is None
        or problem.step > candidate.save.step
        or (
            problem.step == candidate.save.step
            and (candidate.replaced_by or problem.meta is None or _age_of(problem.meta) >= candidate.age)
        )
    }


def _age_of(meta: Meta) -> tuple[int, int]:
    return meta.attempt.number, meta.save_number


def check_passed_by(passed: Mapping[str, Problem], silent_required: Mapping[str, str]) -> None:
    """Check that going back past these problems cannot lose training.

    Args:
        passed: What :func:`passed_by` returned.
        silent_required: Required mirrors that did not answer, with the reason.

    Raises:
        Temporary: One of them cannot be read now, so it may be whole.
        NotAuthorised: The same, and a mirror does not accept the credentials.
        StoreTemporary: A mirror that does not answer may hold one of them.
    """
    for name, problem in passed.items():
        if problem.hindrance:
            raise not_readable(name, problem.why, problem.hindrance)
    for name, problem in passed.items():
        if silent_required and problem.kinds != ("emergency",):  # those are on no mirror
            silent = "; ".join(f"{url} does not answer ({reason})" for url, reason in silent_required.items())
            raise StoreTemporary(
                f"{name} is not whole ({problem.why}), and may be there: {silent}.",
                hint="Start again when it answers, or name an older save with policy=<step>.",
            )


def not_readable(what: str, why: str, hindrance: Hindrance = "unreadable") -> Temporary | NotAuthorised:
    """Return the error for something that may be whole when it can be read."""
    kind = NotAuthorised if hindrance == "refused" else Temporary
    return kind(
        f"{what} cannot be read now: {why}. It may be whole, and training would be set back from it.",
        hint="Mend what keeps it from being read, or go back on purpose with policy=<step>.",
    )


def strangers(order: Lineage, known: Iterable[Attempt]) -> list[SaveFacts]:
    """Return the whole saves of attempts that no list tells of: a list was lost, or an older one was restored."""
    told = {attempt.id for attempt in known if attempt.decided}
    return [save for save in (*order.superseded, *order.unknown) if save.attempt not in told]


def unexplained(
    listed: Iterable[str], metas: Iterable[Meta], tombstones: Iterable[Tombstone] = ()
) -> dict[str, Problem]:
    """Find the files of saves that no meta tells of, one problem for each save that they seem to be of.

    A directory of an emergency snapshot without any meta is not among them: the end of the grace period cut it short
    before any rank had finished, which must not keep a job from starting over.

    Args:
        listed: Names in a root or on a mirror.
        metas: All that could be read, of whole saves or not, in any place.
        tombstones: What retention removed; its files go later.
    """
    explained: dict[str, set[str]] = {}
    for meta in metas:
        for top in {artifact.path.partition("/")[0] for artifact in meta.artifacts}:
            explained.setdefault(names.untagged(top), set()).add(meta.save_id[:8])
    of_metas = set().union(*explained.values())
    removed = {(stone.step, tag) for stone in tombstones for tag in ("", stone.save_id[:8])}
    groups: dict[tuple[int | None, str], list[str]] = {}
    for name in sorted({name if name.startswith("parts/") else name.partition("/")[0] for name in listed}):
        parsed = names.parse_name(name)
        if parsed is None or (parsed.step, parsed.tag) in removed:
            continue
        if parsed.role in _OF_OLDER_LAYOUTS:
            groups[(None, name)] = [name]
        elif parsed.role in _PARTS_OF_SAVES:
            owners = of_metas if parsed.role == "part" else explained.get(names.untagged(name), set())
            if not owners or (parsed.tag and parsed.tag not in owners):
                groups.setdefault((parsed.step, parsed.tag), []).append(name)
    return {found[0]: _loose(step, found) for (step, _), found in groups.items()}


def _loose(step: int | None, found: Sequence[str]) -> Problem:
    if step is None:
        return Problem("of an older layout, which is never resumed from")
    more = f" (nor {len(found) - 1} more of step {step})" if len(found) > 1 else ""
    return Problem(f"no valid meta names it{more}", step)


# -- what a person asks for ----------------------------------------------------------------------------------


def _by_id(reference: str, order: Lineage) -> list[tuple[Kind, SaveFacts]]:
    if len(reference) < 8 or not all(char in "0123456789abcdef" for char in reference):
        raise UsageError(
            f"{reference!r} is neither a step, nor 'latest', nor at least 8 digits of a save id.",
            hint="List steps and save ids with `ckptmirror ls`.",
        )
    off = (*order.superseded, *order.unknown)
    everything = {save.save_id: save for save in (*order.current.values(), *order.replaced, *off)}
    found = [save for save_id, save in everything.items() if save_id.startswith(reference)]
    if not found:
        raise CheckpointNotFound(f"No save id starts with {reference}.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} save ids start with {reference}.", hint="Give more digits.")
    return [(kind, found[0]) for kind in KIND_ORDER if kind in found[0].kinds]


def _missing_step(step: int, order: Lineage) -> CheckpointNotFound:
    steps = sorted({there for there, _ in order.current})
    nearest = sorted(sorted(steps, key=lambda there: abs(there - step))[:4])
    aside = [save for save in (*order.superseded, *order.unknown) if save.step == step]
    if aside:
        return CheckpointNotFound(
            f"Step {step} is off the lineage: training went on from another save.",
            hint=f"Resume it all the same by its save id: {', '.join(save.save_id[:8] for save in aside)}.",
        )
    there_is = f"The nearest are {', '.join(map(str, nearest))}." if nearest else "There is no save at all."
    return CheckpointNotFound(f"There is no save of step {step}. {there_is}")


# -- step 0 --------------------------------------------------------------------------------------------------


def check_scratch(order: Lineage, problems: Mapping[str, object]) -> None:
    """Check that a start over, which a person asked for without force, leaves no training behind.

    Raises:
        RefusedOnlyCopy: There are saves, or things that look like saves; lists some.
    """
    steps = sorted({step for step, _ in order.current})
    listed = [f"step {step}" for step in steps[-5:]]
    listed += [f"step {save.step} (save {save.save_id[:8]})" for save in (*order.superseded, *order.unknown)][:5]
    listed += [f"{name}: {why}" for name, why in list(problems.items())[:5]]
    if listed:
        raise RefusedOnlyCopy(
            "Starting at step 0 would leave what is saved behind: " + "; ".join(listed),
            hint="Add force=True to do it all the same (nothing is deleted), or resume without policy='scratch'.",
        )


def check_fresh_start(
    order: Lineage,
    *,
    decided_scratch: bool,
    continued_from: int | None,
    silent_required: Collection[str],
    problems: Mapping[str, object],
) -> None:
    """Check that nothing can be resumed because there is nothing, not because it cannot be seen.

    Args:
        order: The saves of all places together; its ``current`` has nothing that could be loaded.
        decided_scratch: The newest decided attempt's way ends at a recorded start from scratch.
        continued_from: The step that the newest decided attempt continued from: then there was a save. None if it
            started from scratch, or if there is no attempt.
        silent_required: Required mirrors that did not answer.
        problems: Everything that looks like a save and cannot be resumed from, with the reason.

    Raises:
        StoreTemporary: A required mirror did not answer.
        RefusedOnlyCopy: There are saves, but none can be resumed; lists them.
    """
    if silent_required:
        raise StoreTemporary(
            f"There is no save on the disk, and {', '.join(silent_required)} does not answer, so it is unknown whether "
            "there are saves there. Starting at step 0 might fork the run.",
            hint="Start again when the mirror answers, or decide with policy='scratch'.",
        )
    if continued_from is not None and not order.current:
        raise RefusedOnlyCopy(
            f"The newest attempt continued from step {continued_from}, but no save of the lineage is there any more.",
            hint="Check the root and the mirror URLs, or decide with policy='scratch', force=True.",
        )
    others = [*order.superseded, *order.replaced, *order.unknown]
    undecided = others if not decided_scratch else list(order.unknown)
    if not problems and not undecided and not order.current:
        return
    listed = [f"{name}: {why}" for name, why in list(problems.items())[:5]]
    listed += [f"step {save.step} (save {save.save_id[:8]})" for save in undecided[:5]]
    raise RefusedOnlyCopy(
        "There are saves, but none of them can be resumed, and step 0 is never a silent fallback: " + "; ".join(listed),
        hint="Mend or name one (policy=<save id>), or decide with policy='scratch', force=True.",
    )
