"""Which local saves to keep, which to delete, and which to keep although the policy would delete them.

Rules:
* First the policy chooses steps, from the current saves of the lineage alone. It counts steps, not saves: if the DCP
  directory and the model file of a step were saved separately, they stay or go together.
* The newest step of the lineage is always kept, and so are the best steps if a metric is given.
* Superseded and replaced saves do not count and are not wanted. Unknown saves and those in use are never deleted.
* An unwanted save is deleted only if it is verified and committed on every required mirror. Without a required mirror
  nothing is safe. The caller decides the two exceptions (``skipped``, ``abandoned``).
* An emergency snapshot does not count for ``keep_last``: it is kept while it is the newest. It is never mirrored, so it
  may go once a newer save of the lineage, which continues it, is verified and committed on every required mirror
  (docs/adr/0003). A superseded snapshot has no such save.
* Saves are ordered by step along the lineage, never by time.
* While the disk has no room for the next save, saves that the policy keeps go early, the oldest first and no more than
  needed. Only those go that every required mirror has, never the newest, one of the best, or one that is pinned or in
  use. Where the policy keeps every step, none goes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptmirror.core.errors import ConfigError
from ckptmirror.core.model import Kind
from ckptmirror.core.start.lineage import Standing

__all__ = [
    "MirrorSafety",
    "Retention",
    "Room",
    "RotationPlan",
    "SaveStatus",
    "Shortage",
    "next_save_bytes",
    "plan_rotation",
    "shortage",
    "where_it_is",
]

_GROWTH = 20  # a save may be this fraction larger than the one before it
_SMALL_FILES_BYTES = 1024 * 1024  # the meta, the records, and what a file system rounds up


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep locally.

    Attributes:
        keep_last: How many of the newest steps of the lineage to keep; None keeps all.
        keep_every: Also keep steps divisible by this number.
        keep_best: Also keep this many steps with the best ``metric``.
        metric: Name of a user metric.
        mode: Whether the smallest or the greatest value is best.

    Raises:
        ConfigError: The values make no sense together.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count("keep_last", self.keep_last, 1)
        _check_count("keep_every", self.keep_every, 1)
        _check_count("keep_best", self.keep_best, 0, none_allowed=False)
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode is {self.mode!r}, not 'min' or 'max'.")
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError("metric is not the name of a metric.")
        if self.keep_best and self.metric is None:
            raise ConfigError(
                "keep_best needs a metric.", hint="Set metric (--metric NAME) to a name given to save(metrics=...)."
            )
        if self.metric is not None and not self.keep_best:
            raise ConfigError(
                "metric is set, but keep_best is 0, so nothing would be kept by it.", hint="Set keep_best=1."
            )


@dataclass(frozen=True, slots=True)
class MirrorSafety:
    """Whether a save is verified and committed on one mirror.

    Attributes:
        reason: What is not, for people.
        without: Why it counts as verified and committed although the mirror does not have it; "" if it has it.
    """

    mirror_url: str
    required: bool
    verified: bool
    committed: bool
    reason: str = ""
    without: str = ""


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """What the plan needs to know about one local save.

    Attributes:
        standing: Its place in the lineage.
        safety: One entry per configured mirror.
        skipped: Whether policy leaves it out on the mirrors.
        in_use: Whether a process reads it, or a start is about to continue from it.
        pinned: Whether a person pinned it.
        whole: False for an incomplete save, which never counts and is never deleted here.
        size_bytes: What it takes on this disk.
    """

    save_id: str
    step: int
    attempt: str
    number: int
    kinds: tuple[Kind, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    standing: Standing = "current"
    safety: tuple[MirrorSafety, ...] = ()
    skipped: bool = False
    in_use: bool = False
    pinned: bool = False
    whole: bool = True
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """The room on the disk, at one moment.

    Attributes:
        free_bytes: What is free for the next save. What a save in flight has written so far counts as free, since the
            room for that save is all that is needed.
        needed_bytes: What the next save needs (:func:`next_save_bytes`).
    """

    free_bytes: int
    needed_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether the next save may not fit."""
        return self.free_bytes < self.needed_bytes


@dataclass(frozen=True)
class RotationPlan:
    """Every save is in exactly one of ``keep``, ``delete`` and ``refuse``: save id -> reason, oldest step first.

    Attributes:
        early: The saves in ``keep`` that may go while the disk has no room for the next save, oldest step first.
        refuse: Saves that policy does not want, but that are not provably on the mirrors, so they stay.
        successors: For each emergency snapshot in ``delete``, the newer save that must be on the mirrors in place of
            it.
        warnings: What the policy asks for but cannot have (no save has the metric).
    """

    keep: dict[str, str]
    delete: dict[str, str]
    refuse: dict[str, str]
    warnings: tuple[str, ...] = ()
    successors: dict[str, str] = field(default_factory=dict)
    early: tuple[str, ...] = ()

    def next_early(self, room: Room, tried: Collection[str]) -> str | None:
        """Return the save that has to go next to make room; None if there is room, or no other save may go.

        Args:
            room: The room as it is now.
            tried: The saves that were already chosen, whether they could be deleted or not.
        """
        return next((one for one in self.early if one not in tried), None) if room.is_short else None


def next_save_bytes(saves: Iterable[SaveStatus]) -> int:
    """Return how much room the next save needs: what the newest step took, and some more; 0 if there is none yet."""
    regular = [save for save in saves if save.standing == "current" and save.whole and save.kinds != ("emergency",)]
    newest = max((save.step for save in regular), default=None)
    return _with_margin(sum(save.size_bytes for save in regular if save.step == newest))


def _with_margin(size_bytes: int) -> int:
    """Return the room to leave for a save of about this size; 0 for 0."""
    return size_bytes + size_bytes // _GROWTH + _SMALL_FILES_BYTES if size_bytes else 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A disk that is too small for its retention.

    Attributes:
        saves: How many saves the disk has to hold at once: ``keep_last``, and the next one. 1 where nothing is ever
            deleted.
        needed_bytes: What they need.
        free_bytes: What is free.
        freeable_bytes: What saves take that are there and that rotation may delete, now or later.
    """

    saves: int
    needed_bytes: int
    free_bytes: int
    freeable_bytes: int


def shortage(
    saves: Sequence[SaveStatus], retention: Retention, *, has_required: bool, save_bytes: int, free_bytes: int
) -> Shortage | None:
    """Return how the disk falls short of ``keep_last`` saves and one more; None if it has room for them.

    Args:
        saves: Every local save.
        retention: The policy.
        has_required: Whether a mirror is required. Without one nothing is ever deleted.
        save_bytes: What one save of the state takes; 0 if that is unknown.
        free_bytes: What is free on the disk.
    """
    deletes = has_required and retention.keep_last is not None
    kept = (retention.keep_last or 0) if deletes else 0
    counted = [save for save in saves if save.standing == "current" and save.whole]
    lasting = {*_best_steps(counted, retention)[0], *_divided_steps(counted, retention)}
    freeable_bytes = sum(
        save.size_bytes
        for save in saves
        if _why_keep(save, {}) is None and not (save.standing == "current" and save.step in lasting)
    )
    found = Shortage(
        kept + 1, kept * save_bytes + _with_margin(save_bytes), free_bytes, freeable_bytes if deletes else 0
    )
    is_short = save_bytes and found.free_bytes + found.freeable_bytes < found.needed_bytes
    return found if is_short else None


def plan_rotation(
    saves: Sequence[SaveStatus], retention: Retention, *, abandoned: Collection[str] = frozenset()
) -> RotationPlan:
    """Decide whether to keep or delete each local save.

    Args:
        saves: Every local save, each id once; saves that share an id are kept.
        retention: The policy.
        abandoned: Ids of saves that a vote found to be whole nowhere. This lets only superseded saves go, and only if
            a current save here is verified and committed on every required mirror: for an emergency snapshot, which is
            on no mirror itself, one of a higher step.
    """
    counted = [save for save in saves if save.standing == "current" and save.whole]
    held, warnings = _held_steps(counted, retention)
    wanted = _counted_steps(counted, retention) | held
    successor_is_safe = any(_why_unsafe(save) is None for save in counted)
    times = Counter(save.save_id for save in saves)
    in_order = sorted(saves, key=lambda save: (save.step, save.save_id))
    spare = wanted.keys() - held.keys() if retention.keep_last is not None else frozenset()
    early = tuple(save.save_id for save in in_order if times[save.save_id] == 1 and _may_go_early(save, spare))
    plan = RotationPlan({}, {}, {}, warnings, early=early)
    for save in in_order:
        keep = _why_keep(save, wanted) if times[save.save_id] == 1 else "several local saves have this id"
        if keep is not None:
            plan.keep[save.save_id] = keep
            continue
        not_wanted = "policy does not keep it" if save.standing == "current" else f"it is {save.standing}"
        unsafe = _why_unsafe(save)
        if unsafe is None:
            plan.delete[save.save_id] = f"{not_wanted}; {where_it_is(save)}"
        elif not any(safety.required for safety in save.safety):
            plan.refuse[save.save_id] = unsafe
        elif (successor := _successor_of(save, counted, abandoned)) is not None:
            why = "" if save.standing == "current" else "it is abandoned: superseded, whole nowhere, and "
            plan.delete[save.save_id] = f"{why}a newer save, of step {successor.step}, is on every required mirror"
            plan.successors[save.save_id] = successor.save_id
        elif save.kinds == ("emergency",):
            plan.refuse[save.save_id] = _why_snapshot_stays(save, abandoned)
        elif save.skipped and (save.standing == "current" or save.save_id not in abandoned):
            plan.delete[save.save_id] = f"{not_wanted}; it was left out on the mirrors"
        elif save.save_id in abandoned and save.standing == "superseded" and successor_is_safe:
            plan.delete[save.save_id] = (
                "it is abandoned: superseded, whole nowhere, and a newer save is on every mirror"
            )
        else:
            plan.refuse[save.save_id] = unsafe
    return plan


def _may_go_early(save: SaveStatus, spare: Collection[int]) -> bool:
    """Whether a save may go while the disk has no room; ``spare``: the steps that only ``keep_*`` numbers keep."""
    is_spare = save.standing == "current" and save.step in spare
    return is_spare and _why_keep(save, {}) is None and _why_unsafe(save) is None


def _successor_of(save: SaveStatus, counted: Sequence[SaveStatus], abandoned: Collection[str]) -> SaveStatus | None:
    """Return the newest save that lets an emergency snapshot go: a later one, which is on every required mirror.

    It continues the snapshot, or, if that is abandoned, the run without it.
    """
    is_abandoned = save.standing == "superseded" and save.save_id in abandoned
    if save.kinds != ("emergency",) or not (save.standing == "current" or is_abandoned):
        return None
    newer = [other for other in counted if other.step > save.step and "emergency" not in other.kinds]
    safe = [other for other in newer if _why_unsafe(other) is None]
    return max(safe, key=lambda other: (other.step, other.number, other.save_id), default=None)


def _why_snapshot_stays(save: SaveStatus, abandoned: Collection[str]) -> str:
    if save.standing == "current" or save.save_id in abandoned:
        return "it is an emergency snapshot, and no save of a later step is on every required mirror yet"
    return "it is an emergency snapshot, of which there may be no other copy, and training did not continue from it"


def _why_keep(save: SaveStatus, wanted: Mapping[int, str]) -> str | None:
    if not save.whole:
        return "it is incomplete: only a reconcile decides about it"
    if save.in_use:
        return "it is in use"
    if save.pinned:
        return "it is pinned"
    if save.standing == "current":
        return wanted.get(save.step)
    if save.standing in ("replaced", "superseded"):
        return None
    return "its place in the lineage is unknown"


def _why_unsafe(save: SaveStatus) -> str | None:
    """Return why a save may be the only copy; None if every required mirror has it, or need not."""
    required = [safety for safety in save.safety if safety.required]
    if not required:
        return "no required mirror is configured, so this may be the only copy"
    for safety in required:
        if not safety.verified or not safety.committed:
            what = "is not verified" if not safety.verified else "is verified, but its meta is not committed"
            return f"it {what} on {safety.mirror_url}" + (f": {safety.reason}" if safety.reason else "")
    return None


def where_it_is(save: SaveStatus) -> str:
    """Say which required mirrors have a safe save, and why the others need not have it."""
    required = [safety for safety in save.safety if safety.required]
    lacking = [f"{safety.mirror_url} {safety.without}" for safety in required if safety.without]
    if not lacking:
        return "every required mirror has it"
    others = ["every other required mirror has it"] if len(lacking) < len(required) else []
    return "; ".join([*others, *lacking])


def _held_steps(counted: Sequence[SaveStatus], retention: Retention) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return the steps that stay however full the disk is, each with the reason, and warnings."""
    steps = {save.step for save in counted}
    regular = {save.step for save in counted if save.kinds != ("emergency",)}
    held: dict[int, str] = {}
    if steps:
        held[max(steps)] = "it is the newest of the lineage"
    if regular:
        held.setdefault(max(regular), "it is the newest of the lineage that is not an emergency snapshot")
    best, warnings = _best_steps(counted, retention)
    for step in best:
        held.setdefault(step, f"it is among the best {retention.keep_best} by {retention.metric}")
    return held, warnings


def _counted_steps(counted: Sequence[SaveStatus], retention: Retention) -> dict[int, str]:
    """Return the steps that ``keep_last`` and ``keep_every`` keep, each with the reason."""
    steps = {save.step for save in counted}
    if retention.keep_last is None:
        return dict.fromkeys(steps, "every step is kept")
    regular = sorted({save.step for save in counted if save.kinds != ("emergency",)}, reverse=True)
    kept = dict.fromkeys(regular[: retention.keep_last], f"keep_last={retention.keep_last}")
    return dict.fromkeys(_divided_steps(counted, retention), f"keep_every={retention.keep_every}") | kept


def _divided_steps(counted: Sequence[SaveStatus], retention: Retention) -> set[int]:
    every = retention.keep_every
    return {save.step for save in counted if every is not None and save.step % every == 0}


def _best_steps(counted: Sequence[SaveStatus], retention: Retention) -> tuple[list[int], tuple[str, ...]]:
    """Return the best steps, best first; the newer first if they are equal. A step ranks by the best of its saves."""
    if not retention.keep_best or retention.metric is None:
        return [], ()
    sign = 1 if retention.mode == "min" else -1
    values: dict[int, float] = defaultdict(lambda: math.inf)
    for save in counted:
        value = save.metrics.get(retention.metric)
        if value is not None and math.isfinite(value):
            values[save.step] = min(values[save.step], sign * value)
    if counted and not values:
        return [], (f"No save has the metric {retention.metric!r}, so none is kept as the best.",)
    ranked = sorted(values, key=lambda step: (values[step], -step))
    return ranked[: retention.keep_best], ()


def _check_count(name: str, value: int | None, least: int, *, none_allowed: bool = True) -> None:
    if value is None and none_allowed:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
