"""An independent, tiny reading of LINEAGE.md and of the rules of a start: what resume has to choose.

Rules:
* Written from the documents, not from the package: it shares nothing with ``core.lineage`` or ``core.problems``.
* It is told what can be seen from where the start happens, and says which save, or that nothing may be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KINDS_BEST_FIRST = ("dcp", "model")


@dataclass(frozen=True)
class KnownAttempt:
    """``parent``: (attempt, number, step, save id), None from scratch."""

    id: str
    number: int
    parent: tuple[str, int, int, str] | None


@dataclass(frozen=True)
class SeenSave:
    save_id: str
    attempt: str
    number: int
    step: int
    kinds: frozenset[str]


def on_the_way(attempts: Iterable[KnownAttempt]) -> tuple[dict[str, tuple[str, int, int, str] | None], bool]:
    """Rule 1: the attempts from the newest back, each with where the next left it; whether the way is whole."""
    by_id = {attempt.id: attempt for attempt in attempts}
    if not by_id:
        return {}, False
    at = max(by_id.values(), key=lambda attempt: (attempt.number, attempt.id))
    way: dict[str, tuple[str, int, int, str] | None] = {at.id: None}
    while at.parent is not None:
        if at.parent[0] not in by_id:
            return way, False
        way[at.parent[0]] = at.parent
        at = by_id[at.parent[0]]
    return way, True


def in_order(attempts: Iterable[KnownAttempt], saves: Iterable[SeenSave]) -> list[SeenSave]:
    """Rule 2: the saves of the lineage, oldest first."""
    attempts = list(attempts)
    numbers = {attempt.id: attempt.number for attempt in attempts}
    way, _ = on_the_way(attempts)
    ordered = sorted((s for s in saves if s.attempt in way), key=lambda s: (numbers[s.attempt], s.number))
    ids = {save.save_id for save in ordered}
    had: dict[int, set[str]] = {}
    kept = []
    for save in ordered:
        left = way[save.attempt]
        if left is not None and save.number > left[1]:
            adds = save.step == left[2] and left[3] in ids and not save.kinds & had.get(save.step, set())
            if not adds:
                continue
        had.setdefault(save.step, set()).update(save.kinds)
        kept.append(save)
    return kept


def current(attempts: Iterable[KnownAttempt], saves: Iterable[SeenSave]) -> dict[tuple[int, str], SeenSave]:
    """Rule 3: the save that stands for each step and kind."""
    return {(save.step, kind): save for save in in_order(attempts, saves) for kind in save.kinds}


def to_try(attempts: Iterable[KnownAttempt], saves: Iterable[SeenSave]) -> list[tuple[int, str, SeenSave, bool]]:
    """What a start tries, best first, and whether it stands for its step and kind or was replaced."""
    attempts, saves = list(attempts), list(saves)
    table = current(attempts, saves)
    found = []
    for age, save in enumerate(reversed(in_order(attempts, saves))):
        for kind in save.kinds:
            replaced = table[(save.step, kind)] != save
            rank = (-save.step, replaced, age, KINDS_BEST_FIRST.index(kind))
            found.append((rank, (save.step, kind, save, replaced)))
    return [one for _, one in sorted(found, key=lambda item: item[0])]


@dataclass
class View:
    """What a start can see.

    Attributes:
        attempts: Of all lists that can be read, and of the metas where a list is lost; decided ones.
        saves: Whole by their metas and sizes, all places together.
        copies: For each save and kind, best first: the place, and whether its bytes are right.
        silent_required: Whether a required mirror does not answer.
        odd: Whether anything looks like a save and is none; but for ``damaged``.
        maybe_odd: Whether anything else may pass for that: it depends on what the table remembers.
        damaged: Saves whose meta can be read and that are whole nowhere.
        unreadable_steps: Of metas that are broken.
        lists: Whether any list, or anything that it can be rebuilt from, can be read.
        list_is_unreadable: The local list is broken and no mirror has one.
    """

    attempts: list[KnownAttempt]
    saves: list[SeenSave]
    copies: Mapping[tuple[str, str], list[tuple[str, bool]]]
    silent: bool
    silent_required: bool
    odd: bool
    lists: bool
    list_is_unreadable: bool = False
    maybe_odd: bool = False
    damaged: Sequence[SeenSave] = ()
    unreadable_steps: Sequence[int] = ()


@dataclass(frozen=True)
class Expected:
    """``save`` in ``kind``; or nothing, and then ``scratch`` says whether step 0 is allowed. ``wait``: not now.

    Several of them: each is right, and it depends on what cannot be seen here.
    """

    save: SeenSave | None = None
    kind: str = ""
    scratch: bool = False
    wait: bool = False
    missing: bool = False
    error: bool = False


def expected_start(view: View, policy: str | int, force: bool) -> Expected:
    """What a start must come to."""
    if view.list_is_unreadable:
        return Expected(error=True)
    if not view.lists and view.silent_required:
        return Expected(wait=True)
    table = current(view.attempts, view.saves)
    if policy == "scratch":
        nothing = not (view.saves or view.odd or view.damaged)
        return Expected(scratch=force or nothing, missing=not force and (not nothing or view.maybe_odd))
    wanted = to_try(view.attempts, view.saves)
    if isinstance(policy, int):
        wanted = [one for one in wanted if one[0] == policy]
        if not wanted:
            return Expected(missing=True, wait=view.silent)
    here = {save_id for (save_id, _), places in view.copies.items() if places[0][0] == "disk"}
    if policy == "auto" and view.silent_required and wanted and wanted[0][2].save_id not in here:
        return Expected(wait=True)
    blocked: str | None = None
    tried = False
    unsure = policy == "auto" and view.silent_required  # whether this disk's copy was made here, its own list tells
    for step, kind, save, replaced in wanted:
        if blocked is not None and blocked != save.save_id:
            return Expected(wait=True)
        if view.silent_required:
            if _damaged_before(view, save, replaced, step if isinstance(policy, int) else None):
                return Expected(wait=True)
            unsure = unsure or view.maybe_odd or any(there >= step for there in view.unreadable_steps)
        for _, right in view.copies[(save.save_id, kind)]:
            if right:
                return Expected(save=save, kind=kind, wait=unsure)
            tried = True
            if view.silent_required:
                blocked = save.save_id
    if blocked is not None:
        return Expected(wait=True)
    if isinstance(policy, int):
        return Expected(error=True)
    _, complete = on_the_way(view.attempts)
    decided = bool(view.attempts) and complete
    newest = max(view.attempts, key=lambda attempt: (attempt.number, attempt.id), default=None)
    gone = newest is not None and newest.parent is not None and not table  # it continued from a save, so there was one
    left_behind = [
        save for save in view.damaged if decided and save not in in_order(view.attempts, [*view.saves, save])
    ]
    odd = view.odd or len(left_behind) < len(view.damaged)
    allowed = not gone and not view.silent_required and not odd and not tried and (not view.saves or decided)
    return Expected(scratch=allowed, wait=view.silent_required, error=not allowed or view.maybe_odd)


def _damaged_before(view: View, chosen: SeenSave, replaced: bool, only_step: int | None) -> bool:
    """Whether a save that is whole nowhere would have been tried before this one, if it were whole."""
    for save in view.damaged:
        if only_step not in (None, save.step):
            continue
        order = in_order(view.attempts, [*view.saves, save])
        counted = current(view.attempts, [*view.saves, save])
        if save not in order or chosen not in order:
            continue
        later = replaced or order.index(save) > order.index(chosen)
        for counts in save.kinds:
            if counted.get((save.step, counts)) == save and (
                save.step > chosen.step or (save.step == chosen.step and later)
            ):
                return True
    return False
