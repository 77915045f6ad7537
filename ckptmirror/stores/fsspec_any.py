"""Any fsspec URL (``s3://``, ``az://``, ``sftp://`` …; ``gcsfs+gs://`` for a bucket through gcsfs) as a mirror.

Rules:
* fsspec does not promise, for every file system, a create that never replaces, a replace at a generation, or a
  checksum. So the store declares no capability: such a mirror can only be optional, and every upload is read back.
* A create looks first, and is exclusive if the file system can do that. If not, two processes that create one name at
  once may both succeed. Verification still reads the bytes back, and staging checks them as on every mirror.
* A generation is made from what changes with an object: its generation, its ETag, or else its times.
* No answer comes from a cache. Each thread has its own file system object.
* Each file system finds its own credentials (environment variables, files, fsspec's configuration); they are never in
  the URL. ``fsspec+`` before a scheme means that fsspec should open it.
* Time limits and retries inside a call are those of the file system, and so is how much it receives before it returns,
  whether it follows a redirect and what it decodes. What it returns is believed only if it is what was asked for. A
  request of gcsfs ends after half an hour, unless fsspec's configuration says otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptmirror.core.errors import (
    BucketNotFound,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.reach import access_hint
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload
from ckptmirror.stores.fsspec_find import find
from ckptmirror.stores.locations import BucketLocation, is_object_name, parse_location
from ckptmirror.stores.own_random import draw_apart

__all__ = ["SCHEMES", "FsspecStore", "normalise", "open"]

SCHEMES = ("*",)
_ASKED_FOR = ("fsspec+", "gcsfs+")
_OURS = ("file", "local")
_BUCKET_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}"
_BLOCK_BYTES = 8 * 1024 * 1024
_LARGEST_BYTES = 2**62
_REQUEST_S = 1800.0  # for one request of any length; a block has 8 MiB, of the largest objects 1 GiB
_BLOCKS_LIMIT = 9_000  # S3 takes 10,000 parts
_IDENTIFIES = ("generation", "ETag", "etag", "VersionId", "version_id")
_CHANGES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created", "ino")


def normalise(url: str) -> str:
    """Return the normalised URL.

    Raises:
        ConfigError: fsspec knows no such scheme, or the URL carries what could be a secret.
    """
    return _located(url).url


def open(url: str, **options: Any) -> FsspecStore:
    """Open ``scheme://bucket/prefix`` with the file system that fsspec has for the scheme."""
    return FsspecStore(_located(url), options)


def _located(url: str) -> BucketLocation:
    location = parse_location(url, _BUCKET_PATTERN)
    from fsspec.registry import available_protocols, registry

    protocol = _protocol(location)
    if protocol in _OURS:
        raise ConfigError(f"{url!r} is a directory.", hint="Write file:///directory.")
    if protocol not in available_protocols() and protocol not in registry:
        raise ConfigError(
            f"There is no store for {location.scheme}:// URLs.",
            hint="Use gs:// or file://, or another scheme that fsspec knows: s3://, az://, sftp:// and others.",
        )
    return location


def _lacks_package(protocol: str, error: ImportError) -> ConfigError:
    """Return the error of a scheme whose package cannot be imported."""
    from fsspec.registry import known_implementations

    package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    if package == "fsspec" or find_spec(package) is not None:
        return ConfigError(
            f"{protocol}:// cannot be used: {error}.",
            hint="Install the package that it lacks in the environment that ckptmirror runs in.",
        )
    return ConfigError(
        f"{protocol}:// needs the package {package}.",
        hint=f"Run `pip install {package}` in the environment that ckptmirror runs in.",
    )


def _protocol(location: BucketLocation) -> str:
    return location.scheme.removeprefix(_ASKED_FOR[0]).removeprefix(_ASKED_FOR[1])


class _OfThread(threading.local):
    """A thread's file system object, and the process that opened it."""

    fs: Any = None
    process = 0


class FsspecStore(Store):
    """A mirror in a file system of fsspec.

    Args:
        location: Scheme, bucket (or host) and prefix.
        options: Options of the file system, in addition to those in fsspec's configuration.
    """

    def __init__(self, location: BucketLocation, options: Mapping[str, Any] | None = None) -> None:
        self._location = location
        self._options = dict(options or {})
        self._of_thread = _OfThread()
        self._made: set[str] = set()

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        """None of them."""
        return Capabilities(False, False, False, False, False)

    # -- asking ---------------------------------------------------------------------------------------------

    def stat(self, name: str) -> ObjectInfo | None:
        with self._explained(f"stat of {self.url}/{name}"):
            fs, path = self._fs(), self._path(name)
            fs.invalidate_cache()
            try:
                found = fs.info(path)
            except FileNotFoundError:
                return None
            return self._info(name, found) if found.get("type") != "directory" else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._explained(f"listing of {self.url}/{prefix}"):
            found = self._find(prefix)
        base = self._base() + "/"
        named = {path[len(base) :]: info for path, info in found.items() if path.startswith(base + prefix)}
        return iter([self._info(name, named[name]) for name in sorted(named) if is_object_name(name)])

    def _find(self, prefix: str) -> Mapping[str, Any]:
        fs = self._fs()
        fs.invalidate_cache()
        directory = prefix.rpartition("/")[0]
        found = find(fs, f"{self._base()}/{directory}".rstrip("/"), prefix[len(directory) :].lstrip("/"))
        if not found and fs.async_impl and not fs.exists(self._location.bucket):
            raise BucketNotFound(f"The bucket of {self.url} does not exist.")
        return {path if path.startswith(self._base()) else "/" + path: info for path, info in found.items()}

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self._at(name, generation)
        if info.size_bytes > limit_bytes:
            raise StorePermanent(f"{self.url}/{name} has {info.size_bytes} bytes, more than {limit_bytes}.")
        data = bytearray(info.size_bytes)
        if data:
            self._fill(name, 0, memoryview(data))
        if self.stat(name) != info:
            raise StoreTemporary(f"{self.url}/{name} changed while it was read.")
        return bytes(data), info

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        self._at(name, generation)
        if len(buffer):
            self._fill(name, offset, buffer)

    def _at(self, name: str, generation: int | None) -> ObjectInfo:
        info = self.stat(name)
        if info is None or generation not in (None, info.generation):
            raise ObjectNotFound(f"There is no object {name} on {self.url}" + (" any more." if generation else "."))
        return info

    def _fill(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._explained(f"download of {self.url}/{name}"):
            data = self._fs().cat_file(self._path(name), start=offset, end=offset + len(buffer))
        if len(data) > len(buffer):
            raise StoreTemporary(f"{self.url}/{name}: {len(data)} bytes were answered, {len(buffer)} were asked for.")
        if len(data) < len(buffer):
            raise StoreTemporary(f"{self.url}/{name} ends before byte {offset + len(buffer)}.")
        buffer[:] = data

    # -- changing -------------------------------------------------------------------------------------------

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """Create or replace a small object. A replace only looks at the generation first: it is not atomic."""
        del metadata
        there = self.stat(name)
        if (there.generation if there else 0) != if_generation:
            raise PreconditionFailed(f"{self.url}/{name} is not at generation {if_generation}.")
        with self._explained(f"write of {self.url}/{name}"), self._writing(name, len(data), if_generation == 0) as file:
            file.write(data)
        return self._at(name, None)

    def upload(self, upload: Upload) -> ObjectInfo:
        """Create an object, and read it back."""
        if self.stat(upload.name) is not None:
            raise PreconditionFailed(f"{self.url}/{upload.name} exists.")
        size_bytes = upload.digest.size_bytes
        with (
            self._explained(f"upload of {self.url}/{upload.name}"),
            self._writing(upload.name, size_bytes, create=True) as file,
        ):
            self._send(upload, file)
        info = self._at(upload.name, None)
        if (info.size_bytes, self._crc32c_of(info)) != (size_bytes, upload.digest.crc32c):
            self.delete(upload.name, generation=info.generation)
            raise IntegrityError(f"{self.url}/{upload.name}: the bytes that arrived are not those that were sent.")
        upload.on_progress(size_bytes)
        return info

    def _send(self, upload: Upload, file: Any) -> None:
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(1, upload.digest.size_bytes))))
        sent, crc = 0, 0
        while sent < upload.digest.size_bytes:
            count = upload.source.read_into(sent, buffer[: upload.digest.size_bytes - sent])
            if count == 0:
                break
            crc = crc32c(buffer[:count], crc)
            file.write(bytes(buffer[:count]))
            sent += count
            upload.on_progress(sent)
        if (sent, crc) != (upload.digest.size_bytes, upload.digest.crc32c):
            raise IntegrityError(f"The bytes of {upload.name} are not those that were committed; nothing was stored.")

    @contextmanager
    def _writing(self, name: str, size_bytes: int, create: bool) -> Iterator[Any]:
        """Lend a file that gets its name if the body succeeds, and is discarded otherwise."""
        fs, path = self._fs(), self._path(name)
        parent = path.rpartition("/")[0]
        if not fs.async_impl and parent not in self._made:  # object stores need no directories
            fs.makedirs(parent, exist_ok=True)
            self._made.add(parent)
        block_bytes = max(_BLOCK_BYTES, -(-size_bytes // _BLOCKS_LIMIT))
        file, is_ours = _opened(fs, path, create, block_bytes)
        try:
            yield file
            file.close()
            file.commit()
        except BaseException:
            with contextlib.suppress(Exception):  # a file that cannot be discarded was never published
                file.discard()
                file.closed = True  # or its destructor would send the rest
            if is_ours and fs.exists(path):  # it was visible from its first byte
                fs.rm_file(path)
            raise

    def delete(self, name: str, *, generation: int) -> None:
        there = self.stat(name)
        if there is None:
            return
        if there.generation != generation:
            raise PreconditionFailed(f"{self.url}/{name} is not at generation {generation}.")
        with self._explained(f"delete of {self.url}/{name}"):
            try:
                self._fs().rm_file(self._path(name))
            except FileNotFoundError:
                return

    def close(self) -> None:
        """Nothing to free: fsspec keeps its connections for itself."""

    # -- inside ---------------------------------------------------------------------------------------------

    def _fs(self) -> Any:
        kept = self._of_thread
        if kept.fs is None or kept.process != os.getpid():  # a forked child must not share its parent's connections
            protocol = _protocol(self._location)
            options = dict(self._options)
            if protocol in ("gs", "gcs") and os.environ.get("STORAGE_EMULATOR_HOST"):
                options.setdefault("token", "anon")  # send no credentials to an emulator
            if protocol in ("gs", "gcs") and not _is_configured(protocol, "requests_timeout"):
                options.setdefault("requests_timeout", _REQUEST_S)  # gcsfs itself has no limit
            try:
                kind = _file_system(protocol)
                draw_apart()  # it may ask for credentials at once, and again
                of_url = kind._get_kwargs_from_urls(f"{protocol}://{self._location.bucket}/{self._location.prefix}")
                kept.fs = kind(skip_instance_cache=True, **{**of_url, **options})
            except ImportError as error:
                raise _lacks_package(protocol, error) from error
            draw_apart()
            kept.process = os.getpid()
        return kept.fs

    def _base(self) -> str:
        location = self._location
        url = f"{_protocol(location)}://{location.bucket}/{location.prefix}"
        return str(self._fs()._strip_protocol(url)).rstrip("/")

    def _path(self, name: str) -> str:
        self._location.object_name(name)  # refuses a name that would leave the prefix
        return f"{self._base()}/{name}"

    def _info(self, name: str, found: Mapping[str, Any]) -> ObjectInfo:
        try:
            size_bytes = int(found["size"])
        except (KeyError, TypeError, ValueError, OverflowError):
            size_bytes = -1
        if not 0 <= size_bytes <= _LARGEST_BYTES:
            raise StoreTemporary(f"{self.url}/{name}: its size, {str(found.get('size'))[:40]!a}, is not one.")
        return ObjectInfo(name, size_bytes, _generation(found), None)

    def _crc32c_of(self, info: ObjectInfo) -> int:
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(1, info.size_bytes))))
        crc = 0
        for offset in range(0, info.size_bytes, len(buffer)):
            piece = buffer[: min(len(buffer), info.size_bytes - offset)]
            self._fill(info.name, offset, piece)
            crc = crc32c(piece, crc)
        return crc

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn an exception of the file system in the body into the store error that it means."""
        try:
            yield
        except CkptMirrorError:
            raise
        except Exception as error:  # a file system may raise anything of the libraries below it
            _let_go(error)
            raise _meaning(self.url, what, error) from error


def _meaning(url: str, what: str, error: Exception) -> CkptMirrorError:
    if isinstance(error, FileExistsError):
        return PreconditionFailed(f"{what}: it exists.")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"{what}: it is not there.")
    if isinstance(error, PermissionError):
        return NotAuthorised(f"{what}: {error}", hint=access_hint([url]))
    if isinstance(error, NotImplementedError):
        return StorePermanent(f"{what}: this file system cannot do that.")
    return StoreTemporary(f"{what}: {type(error).__name__}: {error}")


def _let_go(error: BaseException | None) -> None:
    """Free the memory that the frames of an error hold: the bytes that were being sent.

    fsspec catches an error in one thread and raises it in another, in a frame that also refers to it: a cycle. Python
    3.12.0 and 3.12.1 crash if the garbage collector finds the memory of an ``io.BytesIO`` in a cycle (gh-111049).
    """
    met: list[BaseException] = []
    while error is not None and error not in met:
        traceback.clear_frames(error.__traceback__)
        met.append(error)
        error = error.__cause__ or error.__context__


def _is_configured(protocol: str, option: str) -> bool:
    from fsspec.config import conf

    return option in conf.get(protocol, {})


def _file_system(protocol: str) -> Any:
    if protocol in ("gs", "gcs"):  # the class that fsspec would use asks over gRPC for the kind of the bucket
        from gcsfs.core import GCSFileSystem

        with contextlib.suppress(ImportError):
            import_module("google.auth._exponential_backoff")  # imported late, by what asks for credentials
        return GCSFileSystem
    import fsspec

    return fsspec.get_filesystem_class(protocol)


def _opened(fs: Any, path: str, create: bool, block_bytes: int) -> tuple[Any, bool]:
    """Open a file that ``commit`` publishes, exclusively if the file system can do that.

    Returns:
        The file, and whether the object under its name is this file from now on: only then may it be removed.
    """
    options = {"block_size": block_bytes, "autocommit": False}
    if create:
        with contextlib.suppress(NotImplementedError, ValueError):
            file = fs.open(path, "xb", **options)
            return file, not fs.async_impl and fs.exists(path)  # otherwise it is invisible until it is published
    return fs.open(path, "wb", **options), False


def _generation(found: Mapping[str, Any]) -> int:
    """Make a number from what distinguishes two versions of an object; never 0."""
    telling = next((found[key] for key in _IDENTIFIES if found.get(key)), None)
    if telling is None:
        times = (found[key] for key in _CHANGES if found.get(key))
        telling = [found["size"], *(str(at.timestamp() if isinstance(at, datetime) else at) for at in times)]
    return int.from_bytes(hashlib.sha256(repr(telling).encode()).digest()[:7], "big") + 1
