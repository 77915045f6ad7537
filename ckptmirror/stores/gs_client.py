"""Changes to a bucket, except the bytes of uploads, through google-cloud-storage.

Rules:
* The library is imported at the first change. Reads (stat, list, download) do not need it: its import alone costs about
  as much CPU as a verb may use before its first request.
* The library never retries (``retry=None``) and never compares checksums (``checksum=None``). A retry would hide a lost
  answer. After a mismatch the library deletes the object without a precondition, and by then it may be another
  writer's. We declare the crc32c up front, so that the service refuses other bytes, and the caller compares it again.
* Every call has a time limit and a generation precondition.
"""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptmirror.core.errors import ObjectNotFound, StoreTemporary
from ckptmirror.stores.gs_auth import Anonymous, GoogleTokens, credentials_for_client, token_errors
from ckptmirror.stores.gs_http import Endpoint, Limits, error_for, retry_after_s
from ckptmirror.stores.gs_proxy import escaped, proxy_setting
from ckptmirror.stores.gs_trust import ca_bundle, hint_for, untrusted

__all__ = ["Changes", "crc32c_text"]

_CONTENT_TYPE = "application/octet-stream"
_SESSION_ID = re.compile(r"(?<=upload_id=)[^&\s'\"]+")  # it gives the right to write, so it stays out of logs


def crc32c_text(crc32c: int) -> str:
    """Return a crc32c as the service writes it: base64 of four bytes, the highest first."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


class Changes:
    """Creates, replaces and deletes objects of one bucket."""

    def __init__(self, bucket: str, endpoint: Endpoint, tokens: Anonymous | GoogleTokens, limits: Limits) -> None:
        self._bucket_name = bucket
        self._endpoint = endpoint
        self._tokens = tokens
        self._timeout = (limits.connect_s, limits.io_s)
        self._lock = threading.Lock()
        self._client: Any = None
        self._process = 0

    def start_session(self, object_name: str, size_bytes: int, crc32c: int, metadata: Mapping[str, str]) -> str:
        """Open a resumable session to create the object, and return its URI."""
        blob = self._blob(object_name, crc32c, metadata)
        with _explained(f"upload of {object_name}"):
            return str(
                blob.create_resumable_upload_session(
                    content_type=_CONTENT_TYPE,
                    size=size_bytes,
                    timeout=self._timeout,
                    checksum=None,
                    if_generation_match=0,
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
                timeout=self._timeout,
                checksum=None,
                retry=None,
            )
            return dict(blob._properties)

    def delete(self, object_name: str, generation: int) -> None:
        """Delete the object at that generation; no error if there is none."""
        bucket = self._bucket()
        try:
            with _explained(f"delete of {object_name}"):
                bucket.delete_blob(object_name, if_generation_match=generation, timeout=self._timeout, retry=None)
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
            if self._client is None or self._process != os.getpid():  # a forked child must not share connections
                self._client, self._process = self._new_client(), os.getpid()
            return self._client.bucket(self._bucket_name)

    def _new_client(self) -> Any:
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")  # read at import
        from google.cloud import storage

        with token_errors():
            client = storage.Client(
                project=None,
                credentials=credentials_for_client(self._tokens),
                client_options={"api_endpoint": self._endpoint.url},
            )
        session = client._http
        session.trust_env = False  # it reads only two of the three certificate variables, and proxies unescaped
        if (bundle := ca_bundle()) is not None:
            session.verify = bundle
        if self._endpoint.proxy() is not None:
            scheme = self._endpoint.scheme
            session.proxies = {scheme: escaped(proxy_setting(f"{scheme.upper()}_PROXY"))}
        return client


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn an exception of the library in the body into the store error that it means."""
    import requests
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    try:
        with token_errors():
            yield
    except GoogleAPICallError as error:
        headers = getattr(error.response, "headers", {})
        raise error_for(
            int(error.code or 500), what, _said(error), retry_after_s(headers.get("Retry-After"))
        ) from error
    except InvalidResponse as error:
        response = error.response
        asked_s = retry_after_s(response.headers.get("Retry-After"))
        raise error_for(response.status_code, what, response.text[:300], asked_s) from error
    except requests.exceptions.SSLError as error:
        why = next((part.verify_message for part in _causes(error) if hasattr(part, "verify_message")), None)
        if why is None:
            raise StoreTemporary(f"{what}: {type(error).__name__}: {_SESSION_ID.sub('…', str(error))}") from error
        raise StoreTemporary(f"{what}: {untrusted(why)}", hint=hint_for(why)) from error
    except (requests.exceptions.RequestException, OSError) as error:
        raise StoreTemporary(f"{what}: {type(error).__name__}: {_SESSION_ID.sub('…', str(error))}") from error
    except (ValueError, KeyError) as error:
        raise StoreTemporary(f"{what}: an answer cannot be read: {error}") from error


def _causes(error: object) -> Iterator[Any]:
    """Yield an error and all that it wraps: requests and urllib3 keep them in ``reason``, ``args`` or the cause."""
    seen: list[object] = [error]
    for one in seen:  # the list grows meanwhile
        yield one
        inner = [getattr(one, "reason", None), getattr(one, "__cause__", None), *getattr(one, "args", ())]
        seen += [found for found in inner if isinstance(found, BaseException) and found not in seen]


def _said(error: Any) -> str:
    """Return the service's message, from its JSON if the library kept it."""
    try:
        return str(error.response.json()["error"]["message"])
    except (AttributeError, ValueError, KeyError, TypeError):
        return str(error.message)[:300]
