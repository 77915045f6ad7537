"""Events as log lines, with step, rank and mirror in the text; the same complaint at most once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckptmirror.core import events

__all__ = ["LogListener"]

_REPEAT_S = 60.0
_log = logging.getLogger("ckptmirror.events")


class LogListener:
    """Logs events: what went well as INFO, what needs a look as WARNING, what cost something as ERROR."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._complained: dict[str, float] = {}

    def __call__(self, event: events.Event) -> None:
        """Log one event."""
        match event:
            case events.HostCopied():
                _log.info(
                    "step %d: copied to host memory in %.3f s (rank %d)", event.step, event.duration_s, event.rank
                )
            case events.SaveCommitted():
                _log.info(
                    "step %d: committed, %d bytes, %.2f s (rank %d)",
                    event.step,
                    event.size_bytes,
                    event.duration_s,
                    event.rank,
                )
            case events.MirrorCommitted():
                _log.info("step %d: complete on %s", event.step, event.mirror)
            case events.SaveRotated():
                _log.info("step %d: deleted locally: %s", event.step, event.reason)
            case events.RotationRefused():
                self._once(f"{event.save_id} {event.reason}", "step %d: kept: %s", event.step, event.reason)
            case events.RecordFailed():
                _log.error("step %d: %s on %s failed: %s", event.step, event.path, event.mirror, event.reason)
            case events.MirrorUnreachable():
                self._once(event.mirror, "%s does not take uploads now, trying on: %s", event.mirror, event.reason)
            case events.EmergencySaved():
                _log.warning("step %d: emergency snapshot of rank %d is on local disk", event.step, event.rank)
            case _:
                _log.debug("%s", event)

    def _once(self, key: str, text: str, *values: object) -> None:
        now = self._clock()
        if now - self._complained.get(key, -_REPEAT_S) >= _REPEAT_S:
            self._complained[key] = now
            _log.warning(text, *values)
