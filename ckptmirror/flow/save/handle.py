"""SaveHandle: lets the caller of ``save`` wait for a save, and raises a failure in the background there.

Rules:
* A save passes ``copied``, ``committed``, ``mirrored`` in that order, or fails. A handle belongs to one save id for
  good.
* Every wait has a limit.
* If the caller did not wait for a save that failed, the next ``save`` raises the error, and so fails on the others.
  Their next one does not raise that once more: ranks whose callers go on after an error would do so in turn, for ever.
* A save that finds the disk full does not stop the training: it is skipped, and the error is raised at the end
  (:func:`raise_skipped`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from ckptmirror.core.errors import BackgroundSaveFailed, CkptMirrorError, LocalStorageFull, UsageError, WaitTimeout
from ckptmirror.core.model import Kind
from ckptmirror.core.setting_checks import checked_seconds

__all__ = ["DEFAULT_WAIT_S", "Phase", "SaveHandle", "TurnLock", "follow", "raise_skipped"]

Phase = Literal["copied", "committed", "mirrored"]
_PHASES: tuple[Phase, ...] = ("copied", "committed", "mirrored")
DEFAULT_WAIT_S = 1800.0
_STEPS_LISTED = 10
_Result = TypeVar("_Result")


class TurnLock:
    """Makes callers of ``save`` take turns: one thread copies while the others wait."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._inside: int | None = None
        self._is_over = False

    def end(self, timeout_s: float) -> None:
        """Wait for the current turn, and refuse all later ones.

        Raises:
            UsageError: This thread has the turn: a signal handler interrupted it.
            WaitTimeout: Another thread kept its turn for more than ``timeout_s`` seconds.
        """
        self._is_over = True
        self._enter("close()", timeout_s)
        self._turn.release()

    def run(self, what: str, body: Callable[[], _Result]) -> _Result:
        """Call ``body`` when no other thread has the turn.

        Ctrl-C may arrive at any call. At worst this thread keeps the turn, and can take it again.

        Raises:
            UsageError: This thread has the turn (a signal handler interrupted it), or the lock has ended.
            WaitTimeout: Another thread kept its turn for more than ``DEFAULT_WAIT_S`` seconds.
        """
        self._enter(what, DEFAULT_WAIT_S)
        try:
            if self._is_over:
                raise UsageError(f"{what} was called after the manager was closed, or had begun another attempt.")
            self._inside = threading.get_ident()
            return body()
        finally:
            self._inside = None
            self._turn.release()

    def _enter(self, what: str, timeout_s: float) -> None:
        if self._inside == threading.get_ident():
            raise UsageError(
                f"{what} was called while this thread is already in save(), perhaps by a signal handler.",
                hint="Let the handler set a flag, as StopRequest does, and call save() in the loop.",
            )
        if not self._turn.acquire(timeout=min(timeout_s, DEFAULT_WAIT_S)):
            raise WaitTimeout(f"{what} waited {timeout_s:g} s for the save() of another thread.")


class SaveHandle:
    """One save, as its caller sees it.

    Attributes:
        step: The save's step.
        kinds: The kinds that it writes.
        save_id: Known once the ranks have agreed on it, so at the latest when the save is committed.
        is_followed: Whether a later save, or an emergency snapshot, made up for a skipped one.
        stays: Whether the save failed when this node may have committed it, so that it stays for the next start.
    """

    def __init__(self, step: int, kinds: tuple[Kind, ...]) -> None:
        self.step = step
        self.kinds = kinds
        self.save_id: str | None = None
        self.is_followed = False
        self.stays = False
        self._state = threading.Condition()
        self._reached = -1
        self._error: BaseException | None = None
        self._observed = False
        self._mirrored: Callable[[str, float], bool] | None = None
        self._untaken = threading.Lock()

    def done(self, phase: Phase = "committed") -> bool:
        """Return whether the save reached the phase. It stays False if the save failed before that phase.

        Raises:
            UsageError: There is no such phase.
        """
        _check_phase(phase)
        if phase == "mirrored" and self._reached == _PHASES.index("committed"):
            self._ask_mirrored(0.0)
        return self._reached >= _PHASES.index(phase)

    def wait(self, until: Phase = "committed", timeout_s: float = DEFAULT_WAIT_S) -> SaveHandle:
        """Wait until the save reaches a phase.

        Args:
            until: ``"copied"`` to host memory, ``"committed"`` on local disk, or ``"mirrored"``: verified on every
                required mirror.
            timeout_s: The limit, in seconds.

        Raises:
            UsageError: There is no such phase, or ``timeout_s`` is no number.
            BackgroundSaveFailed: The save failed; the cause is attached.
            WaitTimeout: ``timeout_s`` seconds passed.
            DeadlinePassed: It is not mirrored: an upload failed for good, or the leader of this node has ended.
            AttemptFenced: It is not mirrored, and never will be by this attempt: a newer one has started.
        """
        _check_phase(until)
        timeout_s = checked_seconds(timeout_s)
        deadline = time.monotonic() + timeout_s
        local = min(_PHASES.index(until), _PHASES.index("committed"))
        with self._state:
            reached = self._state.wait_for(lambda: self._reached >= local or self._error is not None, timeout_s)
            if self._error is not None:
                self._observed = True
                raise self._failure() from self._error
        if reached and until == "mirrored":
            reached = self.done("mirrored") or self._ask_mirrored(max(0.0, deadline - time.monotonic()))
        if not reached:
            raise WaitTimeout(
                f"Step {self.step} was not {until} within {timeout_s:g} s.",
                hint="The save and its uploads continue: call wait() again, or see `ckptmirror status`.",
            )
        return self

    def _ask_mirrored(self, timeout_s: float) -> bool:
        if self._mirrored is None or self.save_id is None or not self._mirrored(self.save_id, timeout_s):
            return False
        self.reach("mirrored")
        return True

    def _failure(self) -> BackgroundSaveFailed:
        hint = self._error.hint if isinstance(self._error, CkptMirrorError) else None
        what = "was skipped" if self.skipped else "failed"
        return BackgroundSaveFailed(f"The save of step {self.step} {what}: {self._error}", hint=hint)

    # -- called by the save in the background ---------------------------------------------------------------

    def on_mirrored(self, ask: Callable[[str, float], bool]) -> None:
        """Set the function that waits until a save id is verified on every required mirror, with a limit in seconds."""
        self._mirrored = ask

    def take(self) -> bool:
        """Claim the right to finish this save; only the first caller gets True."""
        return self._untaken.acquire(blocking=False)

    def copied(self) -> None:
        """Note that the host copy is made. Takes no lock: no other code has this handle yet, and Ctrl-C may arrive."""
        self._reached = max(self._reached, _PHASES.index("copied"))

    def reach(self, phase: Phase) -> None:
        """Note that the phase is reached."""
        with self._state:
            self._reached = max(self._reached, _PHASES.index(phase))
            self._state.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note that the save failed."""
        with self._state:
            self._error = error
            self._state.notify_all()

    def observed(self) -> None:
        """Note that the caller learns of the failure in another way."""
        self._observed = True

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped because the disk was full."""
        return isinstance(self._error, LocalStorageFull)

    def why_failed(self, error: BaseException) -> str:
        """Say why the save failed, and what is left of it. The error of a save that was not begun may be of another."""
        why = str(error).removesuffix(".")
        if self.stays:
            return f"{why}; what was committed of it stays, and the next start decides whether it counts"
        return f"it was not begun: {why}" if self.save_id is None else f"{why}; it left nothing behind"

    @property
    def is_over(self) -> bool:
        """Whether the save is committed or failed."""
        return self._error is not None or self._reached >= _PHASES.index("committed")

    def wait_over(self, timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until the save is committed or failed, without raising its error.

        Raises:
            WaitTimeout: It is still in flight.
        """
        with self._state:
            over = self._state.wait_for(lambda: self.is_over, timeout_s)
        if not over:
            raise WaitTimeout(f"The save of step {self.step} is still in flight after {timeout_s:g} s.")

    @property
    def unobserved(self) -> BaseException | None:
        """Return the failure that no caller has seen, if there is one."""
        return None if self._observed else self._error

    @property
    def is_told_elsewhere(self) -> bool:
        """Whether it failed only because another rank's caller was told of an earlier failure."""
        return isinstance(self._error, CkptMirrorError) and self._error.is_seen

    def raise_unobserved(self) -> None:
        """Raise the failure once, if no caller has seen it and the save was not skipped.

        Raises:
            BackgroundSaveFailed: The save failed.
        """
        if self._error is not None and not self._observed and not self.skipped:
            self._observed = True
            raise self._failure() from self._error


def follow(skipped: Iterable[SaveHandle], *, up_to: float = math.inf) -> None:
    """Record that training was saved, or continued, after skipped saves up to a step."""
    for handle in skipped:
        handle.is_followed = handle.is_followed or handle.step <= up_to


def raise_skipped(skipped: list[SaveHandle]) -> None:
    """Raise one error for all skipped saves that no caller has seen yet.

    Raises:
        BackgroundSaveFailed: Names their steps; the cause of the last one is attached.
    """
    unseen = [handle for handle in skipped if handle.unobserved is not None]
    skipped.clear()
    for handle in unseen:
        handle.observed()
    if unseen:
        steps = ", ".join(str(handle.step) for handle in unseen[-_STEPS_LISTED:])
        more = f", and {len(unseen) - _STEPS_LISTED} before them," if len(unseen) > _STEPS_LISTED else ""
        what = f"The saves of steps {steps}{more} were" if len(unseen) > 1 else f"The save of step {steps} was"
        error = unseen[-1]._error
        assert isinstance(error, LocalStorageFull)
        raise BackgroundSaveFailed(f"{what} skipped: {error}", hint=error.hint) from error


def _check_phase(phase: str) -> None:
    if phase not in _PHASES:
        raise UsageError(f"A save is never {phase!r}.", hint=f"Wait for one of {', '.join(map(repr, _PHASES))}.")
