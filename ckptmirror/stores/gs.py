"""``gs://bucket/prefix``: a mirror in Google Cloud Storage.

Rules:
* Reads use our own code over http.client: JSON for stat and list, ranges into the caller's buffer for bytes, with the
  generation pinned.
* Changes go through google-cloud-storage (``gs_client``), the bytes of uploads through our own loop (``gs_upload``).
* Size and crc32c of every answer are compared here. For a write a difference is a temporary error: its bytes are in
  memory, so they changed on the way. For an upload it is not: its source may be damaged.
* No answer comes from a cache, and nothing is retried here.
* STORAGE_EMULATOR_HOST names another endpoint, which gets no credentials unless the caller passes them or asks for
  them. CKPTMIRROR_GCS_ENDPOINT names another way to the service, which gets them, but not in clear text.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
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
from ckptmirror.stores.gs_auth import CREDENTIALS_VARIABLE, GoogleTokens, tokens_for
from ckptmirror.stores.gs_download import download
from ckptmirror.stores.gs_http import (
    EMULATOR_VARIABLE,
    ENDPOINT_VARIABLE,
    Endpoint,
    Limits,
    Transport,
    error_of,
    read_json,
)
from ckptmirror.stores.locations import BucketLocation, is_object_name, parse_location

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

    from ckptmirror.stores.gs_client import Changes

__all__ = ["SCHEMES", "GsStore", "normalise", "open"]

SCHEMES = ("gs",)
_BUCKET_PATTERN = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_FIELDS = "name,size,generation,crc32c,metadata"
_PAGE_OBJECTS = 1000
_PAGES_LIMIT = 100_000
_ONE_REQUEST_BYTES = 1024 * 1024  # up to this size an upload is one request; a session would add another
_READ_RACES_LIMIT = 10


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

            transport = self._transport
            self._changes_made = Changes(self._location.bucket, transport.endpoint, self._tokens, transport.limits)
        return self._changes_made

    # -- asking ---------------------------------------------------------------------------------------------

    def stat(self, name: str) -> ObjectInfo | None:
        return self._stat(name, None)

    def _stat(self, name: str, generation: int | None) -> ObjectInfo | None:
        query = {"fields": _FIELDS, **({"generation": str(generation)} if generation is not None else {})}
        try:
            resource = self._get_json(f"{self._object_path(name)}?{urlencode(query)}", f"stat of {self.url}/{name}")
        except ObjectNotFound:
            return None
        return self._info(resource)

    def _object_path(self, name: str) -> str:
        return f"{self._bucket_path()}/{quote(self._location.object_name(name), safe='')}"

    def _bucket_path(self) -> str:
        return f"/storage/v1/b/{quote(self._location.bucket, safe='')}/o"

    def _get_json(self, target: str, what: str) -> dict[str, Any]:
        with self._transport.get(target) as response:
            if response.status != 200:
                raise error_of(response, what)
            return read_json(response)

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        try:
            metadata = resource.get("metadata") or {}
            return ObjectInfo(
                name=self._location.relative(str(resource["name"])),
                size_bytes=int(resource["size"]),
                generation=int(resource["generation"]),
                crc32c=int.from_bytes(base64.b64decode(resource["crc32c"], validate=True), "big"),
                metadata={str(key): str(value) for key, value in metadata.items()},
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise StoreTemporary(f"{self.url}: an object's description cannot be read: {error!r}") from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the objects, without those whose names cannot be ours, such as the placeholder of a folder."""
        query = {
            "prefix": self._location.under(prefix),
            "maxResults": str(_PAGE_OBJECTS),
            "fields": f"nextPageToken,items({_FIELDS})",
        }
        what = f"listing of {self.url}/{prefix}"
        for _ in range(_PAGES_LIMIT):
            try:
                page = self._get_json(f"{self._bucket_path()}?{urlencode(query)}", what)
            except ObjectNotFound as error:
                message = f"The bucket of {self.url} does not exist."
                raise BucketNotFound(message) from error
            for item in page.get("items", ()):
                if is_object_name(self._location.relative(str(item.get("name")))):
                    yield self._info(item)
            token = page.get("nextPageToken")
            if not token:
                return
            if token == query.get("pageToken"):
                raise StoreTemporary(f"{what}: the service returned the same page again.")
            query["pageToken"] = str(token)
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
        from ckptmirror.local.checksums import crc32c

        object_name, crc = self._location.object_name(name), crc32c(data)
        try:
            resource = self._changes.write(object_name, bytes(data), crc, metadata or {}, if_generation)
            return self._compared(name, resource, len(data), crc)
        except IntegrityError as error:
            raise StoreTemporary(f"{self.url}/{name}: the bytes or the answer changed on their way: {error}") from error

    def upload(self, upload: Upload) -> ObjectInfo:
        from ckptmirror.stores.gs_upload import send

        object_name, digest = self._location.object_name(upload.name), upload.digest
        if digest.size_bytes <= _ONE_REQUEST_BYTES and upload.session is None:
            data = bytearray(digest.size_bytes)
            if upload.source.read_into(0, memoryview(data)) < len(data):
                raise IntegrityError(f"The source of {upload.name} is shorter than {len(data)} bytes.")
            resource = self._changes.write(object_name, bytes(data), digest.crc32c, upload.metadata, 0)
        else:

            def start() -> str:
                return self._changes.start_session(object_name, digest.size_bytes, digest.crc32c, upload.metadata)

            resource = send(self._transport, upload, start)
        info = self._compared(upload.name, resource, digest.size_bytes, digest.crc32c)
        upload.on_progress(info.size_bytes)
        return info

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
