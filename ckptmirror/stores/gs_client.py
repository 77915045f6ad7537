"""Changes to a bucket, except the bytes of uploads, through google-cloud-storage.

Rules:
* The library is imported at the first change. Reads (stat, list, download) do not need it: its import alone costs about
  as much CPU as a verb may use before its first request.
* The library never retries (``retry=None``) and never compares checksums (``checksum=None``). A retry would hide a lost
  answer. After a mismatch the library deletes the object without a precondition, and by then it may be another
  writer's. We declare the crc32c up front, so that the service refuses other bytes, and the caller compares it again.
* Every call has a generation precondition. Its requests are sent as ours are (``gs_adapter``): within the same limits,
  to the same endpoint, with the same certificates and proxies.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptmirror.core.errors import CkptMirrorError, ObjectNotFound, StoreTemporary
from ckptmirror.stores.gs_auth import credentials_for_client, token_errors
from ckptmirror.stores.gs_http import Transport, error_for, retry_after_s, said
from ckptmirror.stores.own_random import draw_apart

__all__ = ["Changes", "crc32c_text"]

_CONTENT_TYPE = "application/octet-stream"


def crc32c_text(crc32c: int) -> str:
    """Return a crc32c as the service writes it: base64 of four bytes, the highest first."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


class Changes:
    """Creates, replaces and deletes objects of one bucket."""

    def __init__(self, bucket: str, transport: Transport) -> None:
        self._bucket_name = bucket
        self._transport = transport
        self._lock = threading.Lock()
        self._client: Any = None

    def start_session(
        self, object_name: str, size_bytes: int, crc32c: int, metadata: Mapping[str, str], if_generation: int
    ) -> str:
        """Open a resumable session to create the object, and return its URI."""
        blob = self._blob(object_name, crc32c, metadata)
        with _explained(f"upload of {object_name}"):
            return str(
                blob.create_resumable_upload_session(
                    content_type=_CONTENT_TYPE,
                    size=size_bytes,
                    checksum=None,
                    if_generation_match=if_generation,
                    retry=None,
                )
            )

    def write(
        self, object_name: str, data: bytes, crc32c: int, metadata: Mapping[str, str], if_generation: int
    ) -> dict[str, Any]:
        """Create or replace a small object in one request; return the service's description of it."""
        blob = self._blob(object_name, crc32c, metadata)
        with _explained(f"write of {object_name}"):
            blob.upload_from_string(
                data,
                content_type=_CONTENT_TYPE,
                if_generation_match=if_generation,
                checksum=None,
                retry=None,
            )
            return dict(blob._properties)

    def delete(self, object_name: str, generation: int) -> None:
        """Delete the object at that generation; no error if there is none."""
        bucket = self._bucket()
        try:
            with _explained(f"delete of {object_name}"):
                bucket.delete_blob(object_name, if_generation_match=generation, retry=None)
        except ObjectNotFound:
            return

    def close(self) -> None:
        """Close the library's connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _blob(self, object_name: str, crc32c: int, metadata: Mapping[str, str]) -> Any:
        blob = self._bucket().blob(object_name)
        blob.crc32c = crc32c_text(crc32c)
        if metadata:
            blob.metadata = dict(metadata)
        return blob

    def _bucket(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client.bucket(self._bucket_name)

    def _new_client(self) -> Any:
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")  # read at import
        from google.cloud import storage

        from ckptmirror.stores.gs_adapter import send_through

        with token_errors():
            client = storage.Client(
                project=None,
                credentials=credentials_for_client(self._transport.tokens),
                client_options={"api_endpoint": self._transport.endpoint.url},
            )
        send_through(self._transport, client._http)
        draw_apart()
        return client


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn an exception of the library in the body into the store error that it means."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    try:
        with token_errors():
            yield
    except GoogleAPICallError as error:
        raise _error_of(error.response, int(error.code or 500), what) from error
    except InvalidResponse as error:
        raise _error_of(error.response, error.response.status_code, what) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # What the library raises where an answer is not what it expects: an address or a JSON value of another form.
        raise StoreTemporary(f"{what}: an answer cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _error_of(response: Any, status: int, what: str) -> CkptMirrorError:
    text, headers = (response.text, response.headers) if response is not None else ("", {})
    return error_for(status, what, said(text), retry_after_s(headers.get("Retry-After")))
