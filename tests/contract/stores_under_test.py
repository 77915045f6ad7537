"""Every store, bare and decorated, as the contract suite opens it: adding a store is adding one opener.

Rules:
* With ``CKPTMIRROR_CONTRACT_URL`` set, the suite asks the store of that URL and no other; ``{number}`` in it becomes
  another number for each test, so that each has a place of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckptmirror.core.events import EventBus
from ckptmirror.stores import file as file_store
from ckptmirror.stores import (
    fsspec_any,
    gs,
    hang_guarded,
    memory,
    observed,
    open_store,
    retrying,
    same_place,
    throttled,
)
from ckptmirror.stores.base import Store, Upload
from ckptmirror.stores.gs_endpoint import Endpoint, Limits
from ckptmirror.stores.locations import BucketLocation
from ckptmirror.testing import GcsServerProcess
from tests.kit.faulty_store import FaultyStore
from tests.kit.saves import BytesSource, digest_of

BUCKET = "contract"
GIVEN_URL = os.environ.get("CKPTMIRROR_CONTRACT_URL", "")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Opener:
    """How a store is opened, as often as wanted, always on the same objects; and how another process opens it."""

    name: str
    open: Callable[[], Store]
    code: str = ""


def upload_of(name: str, data: bytes, **changes: object) -> Upload:
    return replace(Upload(name, BytesSource(data), digest_of(data)), **changes)  # type: ignore[arg-type]


def pattern_bytes(size_bytes: int) -> bytes:
    """Bytes in which no two places look alike."""
    return np.arange((size_bytes + 3) // 4, dtype=">u4").tobytes()[:size_bytes]


def gs_store(
    server: GcsServerProcess, prefix: str, *, limits: Limits | None = None, credentials: object = None
) -> Store:
    return gs.GsStore(
        BucketLocation("gs", BUCKET, prefix),
        endpoint=Endpoint.parse(server.url),
        limits=limits or Limits(5.0, 20.0),
        credentials=credentials,  # type: ignore[arg-type]
    )


def _memory(_directory: Path, _server: GcsServerProcess) -> Opener:
    name = f"contract-{next(_numbers)}"
    return Opener("memory", lambda: memory.open(f"memory://{name}/run"))


def _file(directory: Path, _server: GcsServerProcess) -> Opener:
    url = f"file://{directory}/mirror"
    (directory / "mirror").mkdir(exist_ok=True)  # as the bucket is there: reading makes nothing
    return Opener(
        "file", lambda: file_store.open(url), f"from ckptmirror.stores import open_store; store = open_store({url!r})"
    )


def _gs(_directory: Path, server: GcsServerProcess) -> Opener:
    prefix = f"run-{next(_numbers)}"
    code = (
        f"import os; os.environ['STORAGE_EMULATOR_HOST'] = {server.url!r}\n"
        f"from ckptmirror.stores import open_store; store = open_store('gs://{BUCKET}/{prefix}')"
    )
    return Opener("gs", lambda: gs_store(server, prefix), code)


def _gcsfs(_directory: Path, server: GcsServerProcess) -> Opener:
    url = f"gcsfs+gs://{BUCKET}/gcsfs-{next(_numbers)}"
    code = (
        f"import os; os.environ['STORAGE_EMULATOR_HOST'] = {server.url!r}\n"
        f"from ckptmirror.stores import open_store; store = open_store({url!r})"
    )
    return Opener("gcsfs", lambda: fsspec_any.open(url, endpoint_url=server.url), code)


def _fsspec_memory(_directory: Path, _server: GcsServerProcess) -> Opener:
    url = f"fsspec+memory://contract-{next(_numbers)}/run"
    return Opener("fsspec+memory", lambda: fsspec_any.open(url))


def _fsspec_local(directory: Path, _server: GcsServerProcess) -> Opener:
    url = f"fsspec+local://{directory}/mirror"
    code = f"from ckptmirror.stores import open_store; store = open_store({url!r})"
    return Opener("fsspec+local", lambda: fsspec_any.open(url), code)


def _given(_directory: Path, _server: GcsServerProcess) -> Opener:
    url = GIVEN_URL.format(number=next(_numbers))
    is_service = url.startswith("gs://")  # which answers 429 to a second change of an object within a second
    code = f"from ckptmirror.stores import open_store; store = open_store({url!r})"
    outlives_process = url.startswith(("gs:", "gcsfs+gs:", "file:"))
    return Opener(GIVEN_URL, lambda: open_store(url, retry=is_service), code if outlives_process else "")


def _decorated(opener: Opener, name: str, decorate: Callable[[Store], Store]) -> Opener:
    return replace(opener, name=f"{name}({opener.name})", open=lambda: decorate(opener.open()))


def _remembering(store: Store) -> Store:
    known: dict[str, str] = {}
    return same_place.SamePlaceStore(store, lambda: known.get("it"), lambda found: known.setdefault("it", found))


Make = Callable[[Path, GcsServerProcess], Opener]
_BARE: dict[str, Make] = {"memory": _memory, "file": _file, "gs": _gs, "gcsfs": _gcsfs, "fsspec+memory": _fsspec_memory}
OPENERS: dict[str, Make] = {
    **_BARE,
    **{
        f"{word}({name})": lambda directory, server, make=make, word=word, decorator=decorator: _decorated(
            make(directory, server), word, decorator
        )
        for word, decorator in (
            ("hang_guarded", lambda store: hang_guarded.HangGuardedStore(store, Path(f"/nowhere-{next(_numbers)}"))),
            ("retrying", retrying.RetryingStore),
            ("faulty", FaultyStore),
            ("same_place", _remembering),
            ("throttled", lambda store: throttled.ThrottledStore(store, bytes_per_s=1e9, requests_per_s=1e6)),
            ("observed", lambda store: observed.ObservedStore(store, EventBus())),
        )
        for name, make in _BARE.items()
    },
}

if GIVEN_URL:
    OPENERS = {GIVEN_URL: _given}


@contextmanager
def server_with_bucket(directory: Path, *options: str) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(directory, buckets=[BUCKET], options=options) as server:
        yield server
