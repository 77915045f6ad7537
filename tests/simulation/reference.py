"""An independent, tiny reading of LINEAGE.md and of the rules of a start: what a start may come to.

Rules:
* Written from the documents, not from the package: it shares nothing with ``core.start.lineage`` or ``core.start``.
* It is told what can be seen from where the start happens, and names every outcome that is allowed, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KINDS_BEST_FIRST = ("dcp", "model", "emergency")


@dataclass(frozen=True)
class KnownAttempt:
    """``parent``: (attempt, number, step, save id), None from scratch."""

    id: str
    number: int
    parent: tuple[str, int, int, str] | None
    by_person: bool = False
    required: tuple[str, ...] = ()
    root: str = ""


@dataclass(frozen=True)
class SeenSave:
    save_id: str
    attempt: str
    number: int
    step: int
    kinds: frozenset[str]


def on_the_way(
    attempts: Iterable[KnownAttempt], counting: Collection[str]
) -> tuple[dict[str, tuple[str, int, int, str] | None], bool]:
    """Rule 1: the attempts from the newest that counts back, each with where the next left it; whether that is all."""
    by_id = {attempt.id: attempt for attempt in attempts}
    if not by_id.keys() & set(counting):
        return {}, False
    at = max((by_id[one] for one in counting if one in by_id), key=lambda attempt: (attempt.number, attempt.id))
    way: dict[str, tuple[str, int, int, str] | None] = {at.id: None}
    while at.parent is not None:
        if at.parent[0] not in by_id:
            return way, False
        way[at.parent[0]] = at.parent
        at = by_id[at.parent[0]]
    return way, True


def in_order(attempts: Iterable[KnownAttempt], saves: Iterable[SeenSave], counting: Collection[str]) -> list[SeenSave]:
    """Rule 2: the saves of the lineage, oldest first."""
    attempts = list(attempts)
    numbers = {attempt.id: attempt.number for attempt in attempts}
    way, _ = on_the_way(attempts, counting)
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


def current(
    attempts: Iterable[KnownAttempt], saves: Iterable[SeenSave], counting: Collection[str]
) -> dict[tuple[int, str], SeenSave]:
    """Rule 3: the save that stands for each step and kind."""
    return {(save.step, kind): save for save in in_order(attempts, saves, counting) for kind in save.kinds}


def is_forward(attempts: Sequence[KnownAttempt], saves: Sequence[SeenSave], counting: set[str], one: str) -> bool:
    """Whether an attempt may begin to count: nothing committed leaves the lineage, and nothing that left comes back."""
    by_id = {attempt.id: attempt for attempt in attempts}
    others = [by_id[other] for other in counting if other in by_id]
    if not others:
        return True
    newest = max(others, key=lambda attempt: (attempt.number, attempt.id))
    if (newest.number, newest.id) > (by_id[one].number, one):
        return True
    before = {save.save_id for save in in_order(attempts, saves, counting)}
    after = in_order(attempts, saves, counting | {one})
    age = (newest.number, newest.id)
    older = {save.save_id for save in after if (by_id[save.attempt].number, save.attempt) <= age}
    return before == older


def to_try(view: View) -> list[tuple[int, str, SeenSave, bool]]:
    """What a start tries, best first, and whether it stands for its step and kind or was replaced."""
    table = current(view.attempts, view.saves, view.counting)
    found = []
    for age, save in enumerate(reversed(in_order(view.attempts, view.saves, view.counting))):
        for kind in save.kinds:
            replaced = table[(save.step, kind)] != save
            rank = (-save.step, replaced, age, KINDS_BEST_FIRST.index(kind))
            found.append((rank, (save.step, kind, save, replaced)))
    return [one for _, one in sorted(found, key=lambda item: item[0])]


@dataclass
class View:
    """What a start can see.

    Attributes:
        attempts: Of all lists that can be read, and of the metas where a list is lost.
        counting: The ids of those that count.
        saves: Whole by their metas and sizes, all places together.
        copies: For each save and kind, best first: the place, and whether its bytes are right.
        silent: Whether any mirror does not answer.
        silent_required: Whether a required one does not.
        ours: The saves that this root made on this disk, or continued from by a claim that all mirrors took.
        has_rival: Whether another root's attempt is listed, newer than this root's newest that has saved on a mirror.
        remnants: Whether anything is left that may have been a save, and of which no meta tells.
        list_is_unreadable: The local list is broken and no mirror has one.
        damaged: Saves whose meta can be read and that are whole nowhere.
    """

    attempts: list[KnownAttempt]
    counting: set[str]
    saves: list[SeenSave]
    copies: Mapping[tuple[str, str], list[tuple[str, bool]]]
    silent: bool
    silent_required: bool
    ours: Collection[str] = ()
    has_rival: bool = False
    remnants: bool = False
    list_is_unreadable: bool = False
    damaged: Sequence[SeenSave] = ()


@dataclass(frozen=True)
class Allowed:
    """One outcome that the rules allow."""

    does: Literal["resume", "step 0", "wait", "refuse", "missing", "broken"]
    because: str
    save: SeenSave | None = None
    kind: str = ""


def expected_start(view: View, policy: str | int, force: bool) -> list[Allowed]:
    """Every outcome that a start may come to; never none."""
    waits = [Allowed("wait", "a required mirror is silent")] if view.silent_required else []
    if view.list_is_unreadable:
        return [Allowed("broken", "the list of this root cannot be read, and no mirror has one"), *waits]
    if policy == "scratch":
        return waits + _start_over(view, force)
    if policy == "auto":
        return waits + _newest_here(view) if view.silent_required else _continued(view, to_try(view))
    wanted = [one for one in to_try(view) if one[0] == policy]
    if view.silent_required:
        return waits
    if not wanted:
        return [_wait(view) or Allowed("missing", "no save of the lineage has this step")]
    if not any(right for _, kind, save, _ in wanted for _, right in view.copies[(save.save_id, kind)]):
        return [_wait(view) or Allowed("broken", "no copy of the step is right")]
    return _continued(view, wanted)


def _wait(view: View) -> Allowed | None:
    return Allowed("wait", "an optional mirror is silent, and may have it") if view.silent else None


def _newest_here(view: View) -> list[Allowed]:
    """While a required mirror is silent: the newest of the lineage, if this root vouches for it; nothing older."""
    wanted = to_try(view)
    if not wanted or view.has_rival or wanted[0][2].save_id not in view.ours:
        return []
    newest = wanted[0][2]
    for _, kind, save, _ in wanted:
        if save.save_id == newest.save_id and any(right for _, right in view.copies[(save.save_id, kind)]):
            return [Allowed("resume", "it is the newest, and this root made it", save, kind)]
    return []


def _continued(view: View, wanted: list[tuple[int, str, SeenSave, bool]]) -> list[Allowed]:
    """The first save that is right somewhere; past others only if they are broken and nobody else may have them."""
    past: set[str] = set()
    for _, kind, save, _ in wanted:
        if not any(right for _, right in view.copies[(save.save_id, kind)]):
            past.add(save.save_id)
            continue
        found = Allowed("resume", "it is the newest that is right", save, kind)
        if not view.silent:
            return [found]
        if past - {save.save_id}:
            return [Allowed("wait", "the newest is broken, and an optional mirror may have it")]
        return [
            found,
            Allowed("wait", "an optional mirror may have what is damaged, or a newer save"),
        ]
    if view.silent:
        return [Allowed("wait", "step 0 needs the word of every mirror")]
    return _step_0(view, tried=bool(wanted))


def _step_0(view: View, *, tried: bool) -> list[Allowed]:
    way, _ = on_the_way(view.attempts, view.counting)
    newest = next((attempt for attempt in view.attempts if attempt.id == next(iter(way), None)), None)
    over = newest if newest is not None and newest.by_person and newest.parent is None else None
    refused = Allowed("refuse", "something was saved")
    if tried or (_left(view) if over is None else _left_after(view, over)):
        return [refused]
    step_0 = Allowed("step 0", "nothing was ever saved" if over is None else "a person started over")
    return [step_0, Allowed("refuse", "there are remnants of what may have been a save")] if view.remnants else [step_0]


def _left(view: View) -> bool:
    """Whether there is any sure sign that something was saved."""
    whole = {save.save_id for save in view.saves}
    return bool(view.saves or view.damaged) or any(
        a.parent is not None and a.parent[3] not in whole for a in view.attempts
    )


def _left_after(view: View, over: KnownAttempt) -> bool:
    """Whether there is one beside what a start over left behind."""
    known, whole = {attempt.id for attempt in view.attempts}, {save.save_id for save in view.saves}
    later = [attempt for attempt in view.attempts if attempt.number > over.number and attempt.parent is not None]
    mine = {save.attempt for save in view.damaged} & {over.id}
    strange = any(save.attempt not in known for save in (*view.saves, *view.damaged))
    return strange or bool(mine) or any(a.parent is not None and a.parent[3] not in whole for a in later)


def _start_over(view: View, force: bool) -> list[Allowed]:
    refused = Allowed("refuse", "it was not forced, and something was saved")
    if not force and _left(view):
        return [refused]
    begun = Allowed("wait", "a start over needs every mirror") if view.silent else Allowed("step 0", "a person says so")
    return [begun, refused] if view.remnants and not force else [begun]
