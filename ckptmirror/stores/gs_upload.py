"""A resumable upload to Cloud Storage over one connection: reads and sends pieces until the service has everything.

https://cloud.google.com/storage/docs/performing-resumable-uploads

Rules:
* For a session of an earlier process, the service is asked first how much it has. Only its answer decides where to
  continue.
* Sending bytes twice is harmless: an object is complete when the service says so, with the committed size and crc32c.
* Of the address that the service gives a session, only path and query are used: the bytes and the token go to our
  endpoint.
* The service may keep less of a part than was sent. The next part is then no larger than what it kept, and less than
  256 KiB is no progress: it may do that a few times, not for ever.
* A lost session is replaced once. If the new one is lost too, the error is temporary and the caller decides.
* Nothing is ever deleted here.
* A part should take a few seconds, so that progress is reported often and little is sent again after an error.
* The memory is two reused buffers, whatever the object's size: one is filled while the other is sent.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ckptmirror.core.errors import IntegrityError, StoreTemporary
from ckptmirror.local.read_ahead import read_ahead
from ckptmirror.stores.base import Upload
from ckptmirror.stores.gs_answer import Answer
from ckptmirror.stores.gs_http import Transport, error_of, read_json

__all__ = ["send"]

_GRANULE_BYTES = 256 * 1024  # every part but the last is a multiple of it
_FIRST_PART_BYTES = 32 * _GRANULE_BYTES
_LARGEST_PART_BYTES = 1024 * _GRANULE_BYTES
_PART_AIM_S = 4.0
_SLICE_BYTES = 1024 * 1024  # each slice has a time limit of its own
_SESSIONS_LIMIT = 2
_IDLE_PARTS_LIMIT = 3  # give up after so many parts in a row without progress
_SESSION_GONE = (404, 410, 499)
_SESSION_TARGET = re.compile(r"(/[!-~]*\?[!-~]*upload_id=[!-~]*)")
_SESSION_LETTERS = 8192


class _SessionGoneError(Exception):
    """The session has expired or was cancelled, or its text is not a session's."""


@dataclass(slots=True)
class _Outcome:
    """The service's answer to a part or a question: the finished object, or how many bytes it has."""

    resource: dict[str, Any] | None
    received_bytes: int = 0


def send(transport: Transport, upload: Upload, start: Callable[[], str]) -> dict[str, Any]:
    """Send the object and return the service's description of it, which the caller compares.

    Args:
        transport: The connections to the service.
        upload: The object.
        start: Opens a session to create the object with the committed crc32c, and returns its URI.

    Raises:
        StoreTemporary: The connection broke, the service was busy, or the session is gone for the second time.
        IntegrityError: The service received bytes other than the committed ones, or the source is short.
        PreconditionFailed: The name exists.
    """
    with transport.connection(fresh=True) as connection:
        session = upload.session
        for _ in range(_SESSIONS_LIMIT):
            is_saved = session is not None
            if session is None:
                session = start()
                upload.on_session(session)
            try:
                return _Sending(transport, connection, upload, session).run(ask_first=is_saved)
            except _SessionGoneError:
                connection.close()
                session = None
    raise StoreTemporary(f"The upload session of {upload.name} is gone for the second time.")


class _Sending:
    """One session on one connection."""

    def __init__(
        self, transport: Transport, connection: http.client.HTTPConnection, upload: Upload, session: str
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._upload = upload
        self._size_bytes = upload.digest.size_bytes
        self._part_bytes = _FIRST_PART_BYTES
        self._target = _target_of(session)

    def run(self, *, ask_first: bool) -> dict[str, Any]:
        """Send until the service has everything."""
        answer = self._ask() if ask_first else _Outcome(None)
        idle_parts = 0
        while answer.resource is None:
            before = answer.received_bytes
            if ask_first or before:
                self._upload.on_progress(before)
            answer = self._part(before) if before < self._size_bytes or not self._size_bytes else self._ask()
            least_bytes = max(1, min(_GRANULE_BYTES, self._size_bytes - before))
            if answer.resource is None and answer.received_bytes < before + least_bytes:
                idle_parts += 1
                if idle_parts >= _IDLE_PARTS_LIMIT:
                    raise StoreTemporary(f"The upload of {self._upload.name} does not get past byte {before}.")
            else:
                idle_parts = 0
        return answer.resource

    def _ask(self) -> _Outcome:
        """Ask how much the service has; this also completes an upload that has every byte."""
        return self._put(f"bytes */{self._size_bytes}", 0, 0)

    def _part(self, offset: int) -> _Outcome:
        if self._size_bytes == 0:
            return self._ask()
        began = time.monotonic()
        length = min(self._part_bytes, self._size_bytes - offset)
        answer = self._put(f"bytes {offset}-{offset + length - 1}/{self._size_bytes}", offset, length)
        kept_bytes = answer.received_bytes - offset
        if answer.resource is None and kept_bytes < length:
            self._part_bytes = max(kept_bytes // _GRANULE_BYTES, 1) * _GRANULE_BYTES
        elif time.monotonic() - began < _PART_AIM_S:
            self._part_bytes = min(self._part_bytes * 2, _LARGEST_PART_BYTES)
        else:
            self._part_bytes = max(self._part_bytes // 2, _GRANULE_BYTES)
        return answer

    def _put(self, content_range: str, offset: int, length: int) -> _Outcome:
        sent = self._transport.tokens.headers()
        response = self._exchange(sent, content_range, offset, length)
        if response.status == 401:
            response.read_whole()
            self._transport.tokens.refresh(sent)
            self._connection.close()
            response = self._exchange(self._transport.tokens.headers(), f"bytes */{self._size_bytes}", 0, 0)
        return self._understood(response)

    def _exchange(self, headers: Mapping[str, str], content_range: str, offset: int, length: int) -> Answer:
        all_headers = {**headers, "Content-Length": str(length), "Content-Range": content_range}
        with closing(self._slices(offset, offset + length)) as body:
            return self._transport.exchange(self._connection, "PUT", self._target, all_headers, body)

    def _slices(self, offset: int, end: int) -> Generator[memoryview]:
        with closing(read_ahead(self._upload.source.read_into, offset, end)) as pieces:
            for piece in pieces:
                for first in range(0, len(piece), _SLICE_BYTES):
                    yield piece[first : first + _SLICE_BYTES]
                    self._upload.on_sent(offset + min(first + _SLICE_BYTES, len(piece)))
                offset += len(piece)
        if offset < end:
            raise IntegrityError(f"The source of {self._upload.name} ends at byte {offset} of {self._size_bytes}.")

    def _understood(self, response: Answer) -> _Outcome:
        if response.status in (200, 201):
            return _Outcome(read_json(response))
        if response.status == 308:
            response.read_whole()
            return _Outcome(None, self._received(response.headers.get("Range")))
        if response.status in _SESSION_GONE:
            raise _SessionGoneError
        raise error_of(response, f"upload of {self._upload.name}")

    def _received(self, header: str | None) -> int:
        if header is None:
            return 0
        found = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,19})", header)
        if found is None or int(found[1]) >= self._size_bytes:
            raise StoreTemporary(f"The service says that it has {header!r:.80} of {self._upload.name}.")
        return int(found[1]) + 1


def _target_of(session: str) -> str:
    """Return path and query of a session's URI."""
    parts = urlsplit(session)
    target = f"{parts.path}?{parts.query}"
    if len(target) > _SESSION_LETTERS or not _SESSION_TARGET.fullmatch(target):
        raise _SessionGoneError  # not a session's URI
    return target
