"""Select: the one function with which every reader picks a save in a place, by step and kind.

Rules:
* Only saves that the lineage calls current are chosen. A superseded save, or one of unknown standing, must be asked
  for.
* Without a kind: the newest step, then dcp, then model. A later save of the step in another kind is logged. An explicit
  kind is never replaced by another (I4).
* A broken save is never skipped silently: a newer one is logged, and the one that was asked for is an error. A broken
  meta does not say which save it belonged to: beside a whole save of its step it is logged, and blocks nothing.
* If a place has no list of attempts, one is rebuilt from its metas. A directory filled by ``stage`` has none, and
  somebody asked for everything in it. So there, saves of unknown standing are chosen too, after the rest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import Literal

from ckptmirror.core.errors import (
    CheckpointNotFound,
    IntegrityError,
    KindMismatch,
    LineageError,
    NotAuthorised,
    Temporary,
    UsageError,
)
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta
from ckptmirror.core.nearest_steps import nearest_steps
from ckptmirror.core.problems import Hindrance, skipped_for
from ckptmirror.core.start.evidence import Voice
from ckptmirror.core.start.lineage import Lineage, SaveFacts, lineage, merge_attempts
from ckptmirror.core.start.quarantine import quarantined, why_quarantined
from ckptmirror.flow.places.attempt_lists import diverged_there, health_here
from ckptmirror.flow.places.catalog import Catalog, facts_of
from ckptmirror.flow.places.reference import list_hint
from ckptmirror.local.save_logger import save_logger

__all__ = [
    "MAIN_ROLE",
    "READ_ORDER",
    "attempts_of",
    "choosable",
    "choose",
    "is_left_behind",
    "lineage_of",
    "not_superseded",
    "quarantined_in",
    "warn_of_what_is_broken",
]

MAIN_ROLE: dict[Kind, str] = {"dcp": "dcp", "model": "model", "emergency": "emergency"}
"""The role of the name that holds each kind's own data."""

READ_ORDER: tuple[Kind, ...] = ("dcp", "model")
_log = logging.getLogger("ckptmirror.choose")
_Table = dict[tuple[int, Kind], SaveFacts]


def lineage_of(catalog: Catalog) -> Lineage:
    """Order a place's saves by its own list of attempts, or by one rebuilt from its metas where it has none."""
    if catalog.attempts is not None or not catalog.saves:
        return catalog.lineage()
    return catalog.lineage(AttemptList(next(iter(catalog.saves.values())).run_id, attempts_of(catalog)))


def is_left_behind(save: Meta, here: Catalog, there: Iterable[Catalog] = ()) -> bool:
    """Whether the run went on without a save of a root, by the root's list and by mirrors that were asked.

    An attempt counts if one of these places has a save of it, or if a listed attempt continues from one.
    """
    there = tuple(there)
    places = [one for one in (here, *there) if one.attempts is not None and one.attempts.run_id == save.run_id]
    if not places:
        return False
    with contextlib.suppress(LineageError):
        attempts = merge_attempts(*(one.attempts for one in places if one.attempts is not None)).attempts
        counting = {meta.attempt.id for one in places for meta in one.metas()}
        told = {one.id for place in there if place.attempts is not None for one in place.attempts.attempts}
        counting |= {one.id for one in attempts if one.by_person} - (here.undecided - told)
        counting |= {one.parent.attempt for one in attempts if one.parent is not None}
        saves = {meta.save_id: facts_of(meta) for one in places for meta in one.saves.values()}
        return lineage(attempts, list(saves.values()), counting).standing_by_save().get(save.save_id) == "superseded"
    return False


def quarantined_in(catalog: Catalog, root: Path | None) -> dict[str, str]:
    """Return the saves that are quarantined as far as this place, a root or a mirror, knows, by id, with the reason."""
    if catalog.attempts is None:
        return {}
    voices = {one: [Voice.DIVERGED] for one in diverged_there(catalog.others)} if root is None else {}
    if root is not None:
        signs = health_here(root, catalog.attempts.run_id).signs
        voices = {one: [Voice(sign) for sign in said] for one, said in signs.items()}
    saved = {meta.attempt.id for meta in catalog.metas()}
    found = quarantined(catalog.attempts.attempts, voices, saved)
    return {save_id: why_quarantined(failures) for save_id, failures in found.items()}


def attempts_of(catalog: Catalog) -> tuple[Attempt, ...]:
    """Return the place's own attempts, or those that its metas name, including metas of saves that are not whole."""
    if catalog.attempts is not None:
        return catalog.attempts.attempts
    runs = {meta.run_id for meta in catalog.saves.values()}
    broken = [p.meta for p in catalog.problems.values() if p.meta is not None and p.meta.run_id in runs]
    by_id = {meta.attempt.id: meta.attempt for meta in (*catalog.saves.values(), *broken)}
    return tuple(sorted(by_id.values(), key=lambda attempt: (attempt.number, attempt.id)))


def choosable(catalog: Catalog, *, superseded: bool = False, staged: bool = False) -> Mapping[tuple[int, Kind], Meta]:
    """Return the save to choose for each step and kind.

    Args:
        catalog: The saves of the place.
        superseded: Also take superseded and unknown saves, for a step and kind that has no current one.
        staged: The place is a directory, which may have no list of attempts of its own.
    """
    _check_one_run(catalog)
    order = lineage_of(catalog)
    table: _Table = dict(order.current)
    lenient = staged and catalog.attempts is None
    if lenient:
        _add(table, catalog, order.unknown)
    if superseded or lenient:
        _add(table, catalog, order.superseded)
    if superseded:
        _add(table, catalog, order.unknown)
    chosen = {key: catalog.saves[save.save_id] for key, save in table.items()}
    return {(step, kind): meta for (step, kind), meta in chosen.items() if kind != "dcp" or _has_metadata(meta)}


def _check_one_run(catalog: Catalog) -> None:
    runs = sorted({meta.run_id[:8] for meta in catalog.saves.values()})
    if catalog.attempts is None and len(runs) > 1:
        raise UsageError(
            f"{catalog.place} holds saves of {len(runs)} runs ({', '.join(runs)}), so no save is the newest of all.",
            hint="Name one by its path, or stage each run into a directory of its own.",
        )


def _has_metadata(meta: Meta) -> bool:
    """Whether the save has DCP's ``.metadata``, without which its directory cannot be loaded."""
    return any("dcp" in a.kinds and a.path.rpartition("/")[2] == ".metadata" for a in meta.artifacts)


def _add(table: _Table, catalog: Catalog, saves: Iterable[SaveFacts]) -> None:
    """Add the last of ``saves``, in lineage order, for each step and kind that the table does not have yet."""
    in_order = sorted(saves, key=lambda s: (catalog.saves[s.save_id].attempt.number, s.attempt, s.number))
    last: _Table = {(save.step, kind): save for save in in_order for kind in save.kinds}
    for key, save in last.items():
        table.setdefault(key, save)


def choose(
    catalog: Catalog,
    step: int | Literal["latest"],
    kind: Kind | None = None,
    *,
    superseded: bool = False,
    staged: bool = False,
) -> tuple[Meta, Kind]:
    """Pick the save for a step and kind.

    Raises:
        CheckpointNotFound: There is no such step; the message lists the nearest ones.
        KindMismatch: The step is there, but not in this kind; the message lists the kinds that it has.
        IntegrityError: The current save of the requested step is broken.
        Temporary: That save cannot be read now.
        NotAuthorised: That save cannot be read, because the mirror does not accept the credentials.
    """
    table = choosable(catalog, superseded=superseded, staged=staged)
    asked = step
    if step == "latest":
        step = _newest(catalog, table, kind)
    elif not isinstance(step, int):
        raise UsageError(f"{step!r} is neither a step nor 'latest'.")
    there = sorted({k for s, k in table if s == step})
    current = lineage_of(catalog).current
    in_order = sorted(READ_ORDER, key=lambda k: (step, k) not in current)  # saves that are not current come last
    broken: IntegrityError | None = None
    damaged = {problem.save_id for problem in catalog.problems.values() if problem.step == step}
    for wanted in (kind,) if kind is not None else in_order:
        if wanted in there and (broken is None or table[step, wanted].save_id in damaged):
            try:
                if not superseded:
                    _report_what_is_broken(catalog, table[step, wanted], wanted, is_asked_for=asked != "latest")
            except IntegrityError as error:
                broken = broken or error  # the save that is broken in this kind may be whole in the other
                continue
            if kind is None:
                _log_a_broken_kind(catalog, table[step, wanted], wanted)
                _log_a_later_save(table, step, wanted)
            return table[step, wanted], wanted
    if broken is not None:
        raise broken
    if there:
        _refuse_a_broken_kind(catalog, step, kind)
        what = f"kind {kind}" if kind is not None else "kind dcp or model"
        raise KindMismatch(
            f"Step {step} has no {what} in {catalog.place}; it has {', '.join(there)}.", hint=list_hint(catalog.place)
        )
    raise _missing(catalog, step, sorted({s for s, _ in table}))


def _refuse_a_broken_kind(catalog: Catalog, step: int, kind: Kind | None) -> None:
    for name, problem in catalog.problems.items():
        if problem.meta is not None and problem.step == step and kind in problem.kinds:
            if problem.hindrance:
                raise _not_readable(name, problem.why, problem.hindrance)
            raise IntegrityError(
                f"Kind {kind} of step {step} is not whole in {catalog.place} ({name}: {problem.why}).",
                hint="Take it from another mirror, or take a kind that is whole: see `ckptmirror ls`.",
            )


def _log_a_broken_kind(catalog: Catalog, meta: Meta, taken: Kind) -> None:
    for problem in catalog.problems.values():
        if problem.save_id == meta.save_id and READ_ORDER[0] in problem.kinds:
            save_logger(_log, meta).warning("step %d is taken in kind %s: %s", meta.step, taken, problem.why)


def _log_a_later_save(table: Mapping[tuple[int, Kind], Meta], step: int, taken: Kind) -> None:
    mine = table[step, taken]
    for (other_step, kind), meta in table.items():
        later = (meta.attempt.number, meta.save_number) > (mine.attempt.number, mine.save_number)
        if other_step == step and later:
            save_logger(_log, mine).warning(
                "step %d is taken in kind %s from save %s; a later save, %s, has it in kind %s: ask for that kind to "
                "get it",
                step,
                taken,
                mine.save_id[:8],
                meta.save_id[:8],
                kind,
            )


def warn_of_what_is_broken(catalog: Catalog, meta: Meta, kind: Kind) -> None:
    """Log each save that is not whole, and that would otherwise have been chosen before ``meta``."""
    _log_a_broken_kind(catalog, meta, kind)
    _report_what_is_broken(catalog, meta, kind, is_asked_for=False)


def _report_what_is_broken(catalog: Catalog, meta: Meta, kind: Kind, *, is_asked_for: bool) -> None:
    for save in _strangers(catalog):
        if save.step >= meta.step and kind in save.kinds:
            save_logger(_log, save).warning(
                "skipped step %d (save %s) in %s: no list there has its attempt, which continued elsewhere, or "
                "was never recorded; name it by its path if it is right",
                save.step,
                save.save_id[:8],
                catalog.place,
            )
    skipped = skipped_for(meta, kind, catalog.problems, attempts_of(catalog), catalog.saves.values())
    for name, problem in skipped.items():
        where = name if name.startswith(catalog.place) else f"{catalog.place}/{name}"
        if not is_asked_for:  # one broken meta does not block the other steps
            _log.warning("skipped %s: %s", where, problem.why)
        elif problem.step == meta.step and problem.meta is None and not problem.hindrance:
            save_logger(_log, meta).warning(
                "step %d is taken from the whole save %s; beside it %s is broken (%s): `ckptmirror verify %s` names "
                "what to delete",
                meta.step,
                meta.save_id[:8],
                where,
                problem.why,
                quote(catalog.place),
            )
        elif problem.step == meta.step and problem.hindrance:
            raise _not_readable(where, problem.why, problem.hindrance)
        elif problem.step == meta.step:
            raise IntegrityError(
                f"The save of step {meta.step} in {catalog.place} is broken ({where}: {problem.why}).",
                hint="Take it from another mirror, or take an older save of the step with --superseded.",
            )


def _strangers(catalog: Catalog) -> list[SaveFacts]:
    """Return the whole saves of attempts that no list names: a list was lost, or an older one was restored."""
    order = lineage_of(catalog)
    listed = {attempt.id for attempt in attempts_of(catalog) if attempt.decided}
    return [save for save in (*order.superseded, *order.unknown) if save.attempt not in listed]


def _not_readable(what: str, why: str, hindrance: Hindrance) -> Temporary | NotAuthorised:
    """Return the error of a reader that was asked for something that cannot be read now and may be whole."""
    kind = NotAuthorised if hindrance == "refused" else Temporary
    return kind(
        f"{what} cannot be read now: {why.removesuffix('.')}. It may be whole.",
        hint="Fix what keeps it from being read, or name another step.",
    )


def not_superseded(catalog: Catalog, *, placed: bool = False) -> Mapping[tuple[int, Kind], Meta]:
    """Return the save for each step and kind of a directory, without superseded saves unless there are no others.

    ``placed`` leaves out saves of unknown standing too, again unless there are no others.
    """
    table = choosable(catalog, staged=True)
    order = lineage_of(catalog)
    aside = {save.save_id for save in (*order.superseded, *(order.unknown if placed else ()))}
    return {key: meta for key, meta in table.items() if meta.save_id not in aside} or table


def _newest(catalog: Catalog, table: Mapping[tuple[int, Kind], Meta], kind: Kind | None) -> int:
    kinds = (kind,) if kind is not None else READ_ORDER
    # Current saves come before the superseded and unknown ones.
    current = {key for key in lineage_of(catalog).current if key[1] in kinds and key in table}
    steps = {step for step, _ in current} or {s for s, k in table if k in kinds}
    if steps:
        return max(steps)
    if table:
        there = sorted({k for _, k in table})
        raise KindMismatch(
            f"No step of {catalog.place} has kind {' or '.join(kinds)}; there are {', '.join(there)}.",
            hint=list_hint(catalog.place),
        )
    raise CheckpointNotFound(
        f"{catalog.place} holds no checkpoint.{_problems_of(catalog)}", hint=list_hint(catalog.place)
    )


def _missing(catalog: Catalog, step: int, steps: list[int]) -> CheckpointNotFound:
    order = lineage_of(catalog)
    aside = [s for s in (*order.superseded, *order.unknown) if s.step == step]
    if aside:
        return CheckpointNotFound(
            f"Step {step} of {catalog.place} is superseded: training continued from an earlier save.",
            hint="Ask for it with `--superseded` (superseded=True), or list what is current with "
            f"`ckptmirror ls {quote(catalog.place)}`.",
        )
    removed = [t for t in catalog.tombstones.values() if t.step == step]
    if removed:
        return CheckpointNotFound(
            f"Step {step} was removed from {catalog.place}: {removed[0].reason}.", hint=list_hint(catalog.place)
        )
    return CheckpointNotFound(
        f"{catalog.place} has no step {step}.{nearest_steps(steps, step)}{_problems_of(catalog)}",
        hint=list_hint(catalog.place),
    )


def _problems_of(catalog: Catalog) -> str:
    listed = [f"{name}: {why}" for name, why in list(catalog.problems.items())[:3]]
    return f" Not whole: {'; '.join(listed)}." if listed else ""
