"""``gs://bucket/prefix``: a mirror in Google Cloud Storage.

Rules:
* Reads use our own code over http.client: JSON for stat and list, ranges into the caller's buffer for bytes, with the
  generation pinned.
* Changes go through google-cloud-storage (``gs_client``), more bytes than one request has through our own loop
  (``gs_upload``).
* Size and crc32c of every answer are compared here. For a write a difference is a temporary error: its bytes are in
  memory, so they changed on the way. For an upload it is not: its source may be damaged.
* No answer comes from a cache, and nothing is retried here.
* A listing moves on: its names are below the prefix and ascend, and its pages are limited, also those in a row without
  a name.
* A description of an object counts only if each field is what it should be. Links in it are never followed.
* STORAGE_EMULATOR_HOST names another endpoint, which gets no credentials unless the caller passes them or asks for
  them. CKPTMIRROR_GCS_ENDPOINT names another way to the service, which gets them, but not in clear text.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from ckptmirror.core.errors import (
    BucketNotFound,
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload
from ckptmirror.stores.gs_answer import ANSWER_BYTES, PAGE_BYTES, AnswerTooLargeError
from ckptmirror.stores.gs_auth import CREDENTIALS_VARIABLE, GoogleTokens, tokens_for
from ckptmirror.stores.gs_download import download
from ckptmirror.stores.gs_endpoint import EMULATOR_VARIABLE, ENDPOINT_VARIABLE, Endpoint, Limits
from ckptmirror.stores.gs_http import Transport, error_of, read_json
from ckptmirror.stores.locations import BucketLocation, is_object_name, parse_location

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

    from ckptmirror.stores.gs_client import Changes

__all__ = ["SCHEMES", "GsStore", "normalise", "open"]

SCHEMES = ("gs",)
_BUCKET_PATTERN = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_FIELDS = "name,size,generation,crc32c,metadata"
_PAGE_OBJECTS = 1000
_SMALL_PAGE_OBJECTS = 100  # all with the longest names and metadata, they fit in PAGE_BYTES
_PAGES_LIMIT = 100_000
_NAME_LETTERS = 1024
_TOKEN_LETTERS = 8192
_EMPTY_PAGES_LIMIT = 100  # in a row; the service may send some
_ONE_REQUEST_BYTES = 1024 * 1024  # up to this size an upload is one request; a session would add another
_LARGEST_REQUEST_BYTES = 8 * 1024 * 1024  # for more, the client library opens a session by itself
_READ_RACES_LIMIT = 10
_CRC32C_BYTES = 4


def normalise(url: str) -> str:
    """Return the normalised URL."""
    return parse_location(url, _BUCKET_PATTERN).url


def open(url: str) -> GsStore:
    """Open ``gs://bucket`` or ``gs://bucket/prefix`` with the endpoint and credentials of the environment."""
    return GsStore(parse_location(url, _BUCKET_PATTERN))


class GsStore(Store):
    """A mirror in a bucket.

    Args:
        location: Bucket and prefix.
        endpoint: The address of the service; from the environment if None.
        credentials: google.auth credentials; the application default ones if None (for an emulator, none).
        limits: Time limits.
    """

    def __init__(
        self,
        location: BucketLocation,
        *,
        endpoint: Endpoint | None = None,
        credentials: Credentials | None = None,
        limits: Limits | None = None,
    ) -> None:
        is_emulator = endpoint is not None or bool(os.environ.get(EMULATOR_VARIABLE))
        tokens = tokens_for(credentials, is_emulator=is_emulator)
        endpoint = endpoint or Endpoint.from_environment()
        if endpoint.scheme == "http" and isinstance(tokens, GoogleTokens) and not endpoint.is_this_machine:
            raise ConfigError(
                f"{endpoint.url} would get credentials without encryption.",
                hint=f"Use https in {ENDPOINT_VARIABLE}, or {CREDENTIALS_VARIABLE}=anonymous.",
            )
        if endpoint.scheme == "http" and isinstance(tokens, GoogleTokens) and (proxy := endpoint.proxy()) is not None:
            raise ConfigError(
                f"{endpoint.url} would get credentials without encryption, through the proxy {proxy.url}.",
                hint=f"Name {endpoint.host} in NO_PROXY.",
            )
        self._location = location
        self._transport = Transport(endpoint, tokens, limits or Limits())
        self._tokens = tokens
        self._changes_made: Changes | None = None

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        """All of them."""
        return Capabilities(True, True, True, True, True)

    @property
    def _changes(self) -> Changes:
        if self._changes_made is None:
            from ckptmirror.stores.gs_client import Changes

            self._changes_made = Changes(self._location.bucket, self._transport)
        return self._changes_made

    # -- asking ---------------------------------------------------------------------------------------------

    def stat(self, name: str) -> ObjectInfo | None:
        return self._stat(name, None)

    def _stat(self, name: str, generation: int | None) -> ObjectInfo | None:
        query = {"fields": _FIELDS, **({"generation": str(generation)} if generation is not None else {})}
        what = f"stat of {self.url}/{name}"
        try:
            info = self._info(self._get_json(f"{self._object_path(name)}?{urlencode(query)}", what))
        except ObjectNotFound:
            return None
        if info.name != name:
            raise StoreTemporary(f"{what}: another object was described.")
        return info

    def _object_path(self, name: str) -> str:
        return f"{self._bucket_path()}/{quote(self._location.object_name(name), safe='')}"

    def _bucket_path(self) -> str:
        return f"/storage/v1/b/{quote(self._location.bucket, safe='')}/o"

    def _get_json(self, target: str, what: str, limit_bytes: int = ANSWER_BYTES) -> dict[str, Any]:
        with self._transport.get(target) as response:
            if response.status != 200:
                raise error_of(response, what)
            return read_json(response, limit_bytes)

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        try:
            name, metadata = resource["name"], resource.get("metadata") or {}
            checksum = base64.b64decode(resource["crc32c"], validate=True)
            size_bytes, generation = _number(resource["size"]), _number(resource["generation"])
            are_texts = all(isinstance(text, str) for text in (name, *metadata.values()))
            if not are_texts or len(checksum) != _CRC32C_BYTES or generation == 0:
                raise ValueError("a field is not what it should be")
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # binascii.Error is a ValueError
            raise StoreTemporary(f"{self.url}: an object's description cannot be read: {error!r}") from error
        crc32c = int.from_bytes(checksum, "big")
        return ObjectInfo(self._location.relative(name), size_bytes, generation, crc32c, dict(metadata))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the objects, without those whose names cannot be ours, such as the placeholder of a folder."""
        what, under = f"listing of {self.url}/{prefix}", self._location.under(prefix)
        last, empty_pages = "", 0
        for items in self._pages(under, what):
            names = [str(item.get("name")) if isinstance(item, dict) else "" for item in items]
            if not all(name > last and name.startswith(under) and len(name) <= _NAME_LETTERS for name in names):
                raise StoreTemporary(f"{what}: after {last!r} the service returned what does not come after it.")
            last, empty_pages = max(names, default=last), 0 if names else empty_pages + 1
            if empty_pages > _EMPTY_PAGES_LIMIT:
                raise StoreTemporary(f"{what}: more than {_EMPTY_PAGES_LIMIT} pages without an object.")
            for item in items:
                if is_object_name(self._location.relative(str(item["name"]))):
                    yield self._info(item)

    def _pages(self, prefix: str, what: str) -> Iterator[Sequence[Any]]:
        query = {
            "prefix": prefix,
            "maxResults": str(_PAGE_OBJECTS),
            "fields": f"nextPageToken,items({_FIELDS})",
        }
        for _ in range(_PAGES_LIMIT):
            try:
                page = self._get_json(f"{self._bucket_path()}?{urlencode(query)}", what, PAGE_BYTES)
            except ObjectNotFound as error:
                message = f"The bucket of {self.url} does not exist."
                raise BucketNotFound(message) from error
            except StoreTemporary as error:
                if not isinstance(error.__cause__, AnswerTooLargeError) or query["maxResults"] != str(_PAGE_OBJECTS):
                    raise
                query["maxResults"] = str(_SMALL_PAGE_OBJECTS)
                continue
            items, token = page.get("items", []), page.get("nextPageToken", "")
            if not isinstance(items, list) or not isinstance(token, str) or len(token) > _TOKEN_LETTERS:
                raise StoreTemporary(f"{what}: a page cannot be read.")
            yield items
            if not token:
                return
            query["pageToken"] = token
        raise StorePermanent(f"{what}: more than {_PAGES_LIMIT} pages.")

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        from ckptmirror.local.checksums import crc32c

        for _ in range(_READ_RACES_LIMIT):
            info = self._stat(name, generation)
            if info is None:
                raise ObjectNotFound(f"There is no object {name} on {self.url}" + (" any more." if generation else "."))
            if info.size_bytes > limit_bytes:
                raise StorePermanent(f"{self.url}/{name} has {info.size_bytes} bytes, more than {limit_bytes}.")
            data = bytearray(info.size_bytes)
            try:
                self.download(name, generation=info.generation, offset=0, buffer=memoryview(data))
            except ObjectNotFound:
                continue  # replaced since the stat: ask again
            if crc32c(data) == info.crc32c:
                return bytes(data), info
            # One bit flipped in transit is enough: read once more before calling the object broken.
        if generation is None and self._stat(name, None) != info:
            raise StoreTemporary(f"{self.url}/{name} keeps changing.")
        raise IntegrityError(f"{self.url}/{name} is not what its crc32c says.")

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        what = f"download of {self.url}/{name}"
        if len(buffer) == 0:
            if self._stat(name, generation) is None:
                raise ObjectNotFound(f"{what}: it is not there at generation {generation}.")
            return
        query = urlencode({"alt": "media", "generation": str(generation)})
        download(self._transport, f"/download{self._object_path(name)}?{query}", what, offset, buffer)

    # -- changing -------------------------------------------------------------------------------------------

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        from ckptmirror.local.checksums import BlockDigest

        object_name, computed = self._location.object_name(name), BlockDigest()
        computed.update(data)
        upload = Upload(name, _InMemory(data), computed.digest(), metadata or {})
        try:
            return self._create(object_name, upload, if_generation, _LARGEST_REQUEST_BYTES)
        except IntegrityError as error:
            raise StoreTemporary(f"{self.url}/{name}: the bytes or the answer changed on their way: {error}") from error

    def upload(self, upload: Upload) -> ObjectInfo:
        info = self._create(self._location.object_name(upload.name), upload, 0, _ONE_REQUEST_BYTES)
        upload.on_progress(info.size_bytes)
        return info

    def _create(self, object_name: str, upload: Upload, if_generation: int, one_request_bytes: int) -> ObjectInfo:
        from ckptmirror.stores.gs_upload import send

        digest = upload.digest
        if digest.size_bytes <= one_request_bytes and upload.session is None:
            data = bytearray(digest.size_bytes)
            if upload.source.read_into(0, memoryview(data)) < len(data):
                raise IntegrityError(f"The source of {upload.name} is shorter than {len(data)} bytes.")
            resource = self._changes.write(object_name, bytes(data), digest.crc32c, upload.metadata, if_generation)
        else:

            def start() -> str:
                return self._changes.start_session(
                    object_name, digest.size_bytes, digest.crc32c, upload.metadata, if_generation
                )

            resource = send(self._transport, upload, start)
        return self._compared(upload.name, resource, digest.size_bytes, digest.crc32c)

    def _compared(self, name: str, resource: Mapping[str, Any], size_bytes: int, crc32c: int) -> ObjectInfo:
        info = self._info(resource)
        if (info.name, info.size_bytes, info.crc32c) != (name, size_bytes, crc32c):
            raise IntegrityError(f"{self.url}/{name}: the service stored bytes other than those sent.")
        return info

    def delete(self, name: str, *, generation: int) -> None:
        try:
            self._changes.delete(self._location.object_name(name), generation)
        except PreconditionFailed:
            if self.stat(name) is not None:
                raise

    def close(self) -> None:
        self._transport.close()
        if self._changes_made is not None:
            self._changes_made.close()


class _InMemory:
    """Bytes in memory as a source."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


def _number(value: Any) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", str(value), re.ASCII):
        raise ValueError("a number is not what it should be")
    return int(value)
