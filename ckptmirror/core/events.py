"""Events: what happened, for listeners such as logging, metrics and the status page.

Rules:
* Events are values, emitted after the fact. No decision depends on a listener.
* A listener's error never reaches the emitter. It is reported once per listener.
* Events come from several threads. Listeners are called in the emitter's thread, in the order of their subscription, so
  they must be quick and may not block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ckptmirror.core.model import Kind

__all__ = [
    "AttemptDecided",
    "AttemptEnded",
    "CommandChanged",
    "CopyBroken",
    "EmergencySaved",
    "Event",
    "EventBus",
    "Fenced",
    "HostCopied",
    "Listener",
    "ListenerFailure",
    "MirrorCommitted",
    "MirrorUnreachable",
    "NotFinite",
    "RecordFailed",
    "RecordVerified",
    "RotationRefused",
    "SaveCommitted",
    "SaveFailed",
    "SaveGone",
    "SaveQuarantined",
    "SaveReleased",
    "SaveRotated",
    "SaveSkipped",
    "StageFailed",
    "StageFinished",
    "StageStarted",
    "StopRequested",
    "StoreCalled",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopied(Event):
    """A rank's state is in host memory, and training continues. ``duration_s`` is how long it was blocked."""

    step: int
    kinds: tuple[Kind, ...]
    rank: int = 0
    duration_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCommitted(Event):
    """A save is whole on local disk."""

    step: int
    kinds: tuple[Kind, ...]
    rank: int = 0
    save_id: str = ""
    size_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite(Event):
    """The model that a save holds has NaN or infinity in it, and the rank's save before had not. ``path`` has names."""

    step: int
    rank: int = 0
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(Event):
    """A save failed. ``reason`` says why, and whether anything of it stays."""

    step: int
    kinds: tuple[Kind, ...]
    rank: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSkipped(Event):
    """The disk has no room for a save: it left nothing behind, and training goes on without it."""

    step: int
    kinds: tuple[Kind, ...]
    rank: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmergencySaved(Event):
    """A rank's emergency snapshot is in a directory: the root, or if its disk is full, the persistent directory."""

    step: int
    rank: int = 0
    save_id: str = ""
    size_bytes: int = 0
    place: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordVerified(Event):
    """A mirror confirmed one file."""

    mirror: str
    step: int
    path: str
    size_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFailed(Event):
    """One file cannot be uploaded until somebody fixes the cause."""

    mirror: str
    step: int
    path: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorCommitted(Event):
    """A save is whole on a mirror."""

    mirror: str
    step: int
    save_id: str = ""
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorUnreachable(Event):
    """A mirror did not answer, or refused for now; the work is retried.

    Attributes:
        refused: Whether it rejected the credentials.
    """

    mirror: str
    reason: str
    step: int | None = None
    path: str = ""
    refused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRotated(Event):
    """A local save was deleted by policy. ``duration_s`` includes asking the mirrors."""

    step: int
    save_id: str = ""
    kinds: tuple[Kind, ...] = ()
    reason: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationRefused(Event):
    """Policy no longer wants a local save, but it may be the only copy: it stays."""

    step: int
    save_id: str = ""
    kinds: tuple[Kind, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveGone(Event):
    """Somebody removed a save from this disk before every required mirror had it, so it can no longer be uploaded."""

    step: int
    save_id: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveQuarantined(Event):
    """A start found that starts failed in a row from a save, up to the start before it. ``reason`` says which."""

    step: int
    save_id: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReleased(Event):
    """A person chose to continue from a save that was quarantined; it never is again."""

    step: int
    save_id: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandChanged(Event):
    """A start's command built other settings than those in the save that it loaded. ``changes`` has them."""

    step: int
    save_id: str = ""
    changes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptDecided(Event):
    """An attempt recorded where it starts from.

    Attributes:
        step: None for a start from scratch.
        place: ``"disk"``, the mirror that the save was brought from, or ``"anywhere"`` if it was put together; empty
            for a start from scratch.
        duration_s: From the beginning of the start to the claim, including all reading and loading.
    """

    attempt: int
    step: int | None = None
    save_id: str = ""
    place: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded(Event):
    """A trainer called close; ``status`` is ``finished``, ``stopped`` or ``incomplete``, as in ``status.json``.

    For the attempt that records a rewind, which trains nothing, it is ``rewound``.
    """

    attempt: int
    status: str
    pending: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced(Event):
    """A newer attempt of the run was found; this one commits nothing more."""

    attempt: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStarted(Event):
    """A step is being brought from a mirror."""

    mirror: str
    step: int
    kinds: tuple[Kind, ...] = ()
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFinished(Event):
    """A step was brought from a mirror and verified."""

    mirror: str
    step: int
    kinds: tuple[Kind, ...] = ()
    size_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailed(Event):
    """A step could not be brought; what has arrived of it stays for the next try."""

    mirror: str
    step: int
    kinds: tuple[Kind, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyBroken(Event):
    """One copy of a save cannot be trusted; ``place`` is a directory or a mirror's URL."""

    step: int
    save_id: str = ""
    place: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested(Event):
    """A signal or a caller asked the run to stop; emitted once the training loop acts on it.

    Attributes:
        deadline_s: Seconds left of the grace period, if there is one.
        age_s: Seconds since the request, if there is a grace period; else 0.
    """

    reason: str
    rank: int = 0
    deadline_s: float | None = None
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCalled(Event):
    """One call to a mirror is over.

    Attributes:
        operation: ``stat``, ``list``, ``read``, ``write``, ``upload``, ``download`` or ``delete``.
        name: The object; of a listing, its prefix.
        error: Class and message of what it raised; "" if it succeeded.
    """

    mirror: str
    operation: str
    name: str = ""
    size_bytes: int = 0
    duration_s: float = 0.0
    error: str = ""


Listener = Callable[[Event], None]


@dataclass(frozen=True)
class ListenerFailure:
    """What a listener did not survive."""

    listener: Listener
    event: Event
    error: Exception


class EventBus:
    """Tells each event to every listener.

    Args:
        on_failure: Called once for each listener that fails, the first time; it may log, for instance.
    """

    def __init__(self, on_failure: Callable[[ListenerFailure], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[tuple[object, Listener], ...] = ()
        self._reported: set[object] = set()
        self._on_failure = on_failure

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; the returned function ends that (and may be called again)."""
        key = object()
        with self._lock:
            self._listeners = (*self._listeners, (key, listener))

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(entry for entry in self._listeners if entry[0] is not key)
                self._reported.discard(key)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell ``event`` to all listeners. Never raises a listener's error."""
        for key, listener in self._listeners:
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - no error of a listener may reach who emits
                self._report(key, ListenerFailure(listener, event, error))

    def _report(self, key: object, failure: ListenerFailure) -> None:
        with self._lock:
            is_first = key not in self._reported
            self._reported.add(key)
        if is_first and self._on_failure is not None:
            with suppress(Exception):  # who reports is a listener too
                self._on_failure(failure)
