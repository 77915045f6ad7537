"""Events as log lines: one readable sentence each, with the same facts as fields of the record.

Rules:
* The fields are those of ``core/log_fields.py``, so a formatter or a search need not parse the sentence.
* Success is INFO, a problem that may need attention WARNING, a loss ERROR. Frequent events are DEBUG, and so are events
  that the code that emits them also logs itself, with the same fields.
* The same problem is logged at most once a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote

from ckptmirror.core import events
from ckptmirror.core.log_fields import fields_of
from ckptmirror.core.rate_limit import RateLimit

__all__ = ["LINES", "LogListener", "log_failure"]

_REPEAT_S = 60.0
_log = logging.getLogger("ckptmirror.events")

LINES: Mapping[type[events.Event], tuple[int, str]] = {
    events.HostCopied: (logging.INFO, "step %(step)d: copied to host memory in %(duration_s).3f s (rank %(rank)d)"),
    events.SaveCommitted: (
        logging.INFO,
        "step %(step)d: committed, %(size_bytes)d bytes, %(duration_s).2f s (rank %(rank)d)",
    ),
    events.NotFinite: (
        logging.WARNING,
        "step %(step)d: NaN or infinity in %(path)s (rank %(rank)d): saved as it is, and a start from this save has it "
        "too; `ckptmirror rewind` goes back to an earlier one",
    ),
    events.SaveFailed: (logging.ERROR, "step %(step)d: the save failed: %(reason)s"),
    events.SaveSkipped: (
        logging.ERROR,
        "step %(step)d: SKIPPED, the disk has no room for it, and training continues: %(reason)s; see "
        "`ckptmirror status%(at_root)s`",
    ),
    events.EmergencySaved: (
        logging.WARNING,
        "step %(step)d: emergency snapshot of rank %(rank)d is in %(place)s, and on no mirror",
    ),
    events.RecordVerified: (logging.DEBUG, "step %(step)d: %(path)s verified on %(mirror)s"),
    events.RecordFailed: (
        logging.ERROR,
        "step %(step)d: %(path)s on %(mirror)s failed: %(reason)s; fix the cause, then `ckptmirror retry%(at_root)s`",
    ),
    events.MirrorCommitted: (logging.INFO, "step %(step)d: complete on %(mirror)s"),
    events.MirrorUnreachable: (logging.WARNING, "%(mirror)s cannot be used now, and is tried again: %(reason)s"),
    events.SaveRotated: (logging.INFO, "step %(step)d: deleted locally: %(reason)s"),
    events.RotationRefused: (
        logging.WARNING,
        "step %(step)d: kept: %(reason)s; `ckptmirror status%(at_root)s` lists what is not safe",
    ),
    events.SaveGone: (logging.DEBUG, "step %(step)d: removed before it was mirrored: %(reason)s"),
    events.SaveQuarantined: (logging.DEBUG, "step %(step)d: quarantined: %(reason)s"),
    events.SaveReleased: (logging.INFO, "step %(step)d: no longer quarantined: %(reason)s"),
    events.CommandChanged: (
        logging.WARNING,
        "step %(step)d: the command has changed since this save: %(changes)s. "
        '`resume(state, command_wins=("lr", …))` takes the settings that it names from the command',
    ),
    events.AttemptDecided: (logging.DEBUG, "attempt %(attempt)d starts at step %(step)s from %(place)s"),
    events.AttemptEnded: (logging.INFO, "attempt %(attempt)d ended: %(status)s, %(pending)d files pending"),
    events.Fenced: (logging.DEBUG, "attempt %(attempt)d is fenced: %(reason)s"),
    events.StageStarted: (logging.INFO, "step %(step)d: %(size_bytes)d bytes are being staged from %(mirror)s"),
    events.StageFinished: (logging.INFO, "step %(step)d: staged from %(mirror)s in %(duration_s).2f s, verified"),
    events.StageFailed: (logging.WARNING, "step %(step)d: could not be staged from %(mirror)s: %(reason)s"),
    events.CopyBroken: (logging.DEBUG, "step %(step)d: the copy in %(place)s is broken: %(reason)s"),
    events.StopRequested: (logging.DEBUG, "rank %(rank)d acts on a request to stop: %(reason)s"),
    events.StoreCalled: (logging.DEBUG, "%(mirror)s: %(operation)s %(object)s, %(duration_s).3f s %(error)s"),
}


_SNAPSHOT_REFUSED = "step %(step)d: kept: %(reason)s"  # a snapshot is never uploaded


class LogListener:
    """Logs events.

    Args:
        root: The root of the events; the commands in the lines name it.
        clock: Seconds, monotonic.
    """

    def __init__(self, root: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_root = "" if root is None else f" --root {quote(str(root))}"
        self._rate_limit = RateLimit(clock)

    def __call__(self, event: events.Event) -> None:
        """Log one event."""
        level, sentence = LINES.get(type(event), (logging.DEBUG, "%(event)s"))
        if isinstance(event, events.RotationRefused) and event.kinds == ("emergency",):
            sentence = _SNAPSHOT_REFUSED
        if not _log.isEnabledFor(level) or not self._is_due(event):
            return
        found = fields_of(event)
        said = {**found, "at_root": self._at_root}
        if "%(reason)s;" in sentence:
            said["reason"] = str(found["reason"]).removesuffix(".")
        _log.log(level, sentence, said, extra=found)

    def _is_due(self, event: events.Event) -> bool:
        match event:
            case events.RotationRefused():
                return self._rate_limit.is_due(f"{event.save_id} {event.reason}", _REPEAT_S)
            case events.MirrorUnreachable():
                return self._rate_limit.is_due(event.mirror, _REPEAT_S)
        return True


def log_failure(failure: events.ListenerFailure) -> None:
    """Log that another listener failed."""
    _log.error("a listener failed at %s: %s", type(failure.event).__name__, failure.error)
