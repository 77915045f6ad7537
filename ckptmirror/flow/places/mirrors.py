"""A mirror of a run: its URL, whether it is required, and the store behind it.

Rules:
* A required mirror must support compare-and-swap; otherwise two attempts could not see one another.
* Only this file opens the mirrors of a root. It checks that each is still the place that the root's table remembers.
* A mirror is never the root, inside it or around it, and no two mirrors are one directory, whatever the paths
  (``check_places``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.errors import (
    BrokenTable,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    NameTaken,
    StoreHangs,
    StoreTemporary,
)
from ckptmirror.core.events import EventBus
from ckptmirror.core.lifecycle import WAITING
from ckptmirror.core.model import new_id
from ckptmirror.core.rate_limit import RateLimit
from ckptmirror.core.sealed_json import open_sealed, seal
from ckptmirror.core.start.mirror_places import UNKNOWN, Expected
from ckptmirror.local import files
from ckptmirror.local.hang_guard import hang_guard
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.table_place import is_mirror
from ckptmirror.local.uploads import MirrorRow, UploadsTable
from ckptmirror.stores import normalise_url, open_store
from ckptmirror.stores.base import Store
from ckptmirror.stores.decorator import StoreDecorator
from ckptmirror.stores.retrying import OnWait
from ckptmirror.stores.same_place import SamePlaceStore, identity_now

__all__ = [
    "Mirror",
    "MirrorSpec",
    "ask_patiently",
    "check_destination",
    "check_places",
    "close_mirrors",
    "counting",
    "counting_rows",
    "expect_places",
    "known_mirrors",
    "mirror_specs",
    "open_mirrors",
    "opened_mirror",
    "remember_places",
    "remembered_places",
    "seen_places",
    "set_mirrors",
    "stop_retrying",
    "waiting_for_removed",
]

_NOTE_FORMAT = "ckptmirror-mirror"
_NOTE_LIMIT_BYTES = 64 * 1024
_LOG_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0
_MOMENT_S = 10.0
_log = logging.getLogger("ckptmirror")


@dataclass(frozen=True)
class MirrorSpec:
    """A mirror as configured.

    Attributes:
        required: Whether a save must be there before its local copy may go.
        bytes_per_s: The limit for uploads and downloads together, in bytes per second; None: no limit.
        requests_per_s: The limit for calls to the mirror; None: no limit.
    """

    url: str
    required: bool = True
    bytes_per_s: float | None = None
    requests_per_s: float | None = None


@dataclass(frozen=True)
class Mirror:
    """An open mirror."""

    url: str
    required: bool
    store: Store


@contextlib.contextmanager
def opened_mirror(url: str, *, retry: bool = True, on_wait: OnWait | None = None) -> Iterator[Mirror]:
    """Lend a mirror to who reads it without a root, and close it.

    Raises:
        ConfigError: The URL is not understood.
    """
    url = normalise_url(url)
    store = open_store(url, retry=retry, on_wait=on_wait)
    try:
        yield Mirror(url, False, store)
    finally:
        store.close()


def counting(mirrors: Iterable[tuple[str, bool]]) -> list[str]:
    """Return the mirrors that a save must be on to be safe: the required ones, or all if none is required.

    Args:
        mirrors: Pairs of a URL and whether that mirror is required.
    """
    given = list(mirrors)
    return [url for url, required in given if required] or [url for url, _ in given]


def counting_rows(rows: Iterable[MirrorRow]) -> list[str]:
    """Return the mirrors of a table that a save must be on to be safe.

    A mirror that a person pushed to counts only if the table has no others.
    """
    given = list(rows)
    return counting((row.url, row.required) for row in [row for row in given if not row.pushed] or given)


def mirror_specs(mirrors: Iterable[str | MirrorSpec]) -> list[MirrorSpec]:
    """Normalise the mirrors that a user configured.

    Raises:
        ConfigError: A URL is not understood, or one is given twice.
    """
    if isinstance(mirrors, str | MirrorSpec):
        raise ConfigError("mirrors is a list of URLs, not one URL.", hint="Write mirrors=[...].")
    mirrors = list(mirrors) if isinstance(mirrors, Iterable) else [mirrors]
    if wrong := [one for one in mirrors if not isinstance(one, str | MirrorSpec)]:
        raise ConfigError(f"mirrors has {wrong[0]!r}, which is not a URL.", hint='Write mirrors=["gs://bucket/run"].')
    specs: list[MirrorSpec] = []
    for given in mirrors:
        spec = given if isinstance(given, MirrorSpec) else MirrorSpec(given)
        spec = replace(spec, url=normalise_url(spec.url))
        if any(other.url == spec.url for other in specs):
            raise ConfigError(f"The mirror {spec.url} is configured twice.", hint="List each mirror once.")
        specs.append(spec)
    return specs


def open_mirrors(
    specs: Iterable[MirrorSpec],
    root: Path,
    table: UploadsTable | None,
    bus: EventBus | None = None,
    on_wait: OnWait | None = None,
    *,
    is_verb: bool = False,
) -> list[Mirror]:
    """Open the store behind each mirror of a root, in order. No mirror is contacted before its first use.

    Args:
        specs: The mirrors.
        root: The root that they mirror.
        table: The table that remembers the identity of each mirror; None if the root has no table yet.
        bus: Receives an event for every call to a mirror.
        on_wait: Called when a mirror did not answer and is asked again later; None: the wait is logged.
        is_verb: Where the root has saved nothing yet, a call that only reads takes no place for its mirror.

    Raises:
        ConfigError: A required mirror does not support compare-and-swap, or ``check_places`` refuses a mirror.
    """
    mirrors = []
    on_wait = on_wait if on_wait is not None else _log_waits()
    for spec in specs:
        store = open_store(
            spec.url, bytes_per_s=spec.bytes_per_s, requests_per_s=spec.requests_per_s, bus=bus, on_wait=on_wait
        )
        if spec.required and not store.capabilities.compare_and_swap:
            raise ConfigError(
                f"The mirror {spec.url} cannot replace an object at a given generation, so two writers could not see "
                "one another.",
                hint="Make it optional (required=False, or required = false in a file), beside a mirror that can.",
            )
        if table is not None:
            memory = _Memory(root, table, spec.url)
            store = SamePlaceStore(store, memory.recall, memory.remember, by_reading=not is_verb or bool(table.saves()))
        mirrors.append(Mirror(spec.url, spec.required, store))
    check_places(root, mirrors)
    return mirrors


def _log_waits() -> OnWait:
    """Return a callback that logs each wait for a mirror, at most once every 30 s for each mirror."""
    limit = RateLimit(time.monotonic)

    def log_wait(url: str, delay_s: float, error: Exception) -> None:
        if limit.is_due(url, _LOG_EVERY_S):
            save_logger(_log, mirror=url).warning(
                "waiting for %s (retry in %.0f s): %s", url, math.ceil(delay_s), error
            )

    return log_wait


def known_mirrors(table: UploadsTable, specs: Sequence[MirrorSpec]) -> list[MirrorSpec]:
    """Return the configured mirrors that the table knows. A new table takes all of them at once.

    The table's list of mirrors decides what is safe and what rotation may delete. So only a start that succeeds changes
    it.
    """
    known = None
    with contextlib.suppress(BrokenTable):
        known = {row.url for row in table.mirrors()} if table.knows_mirrors() else None
    if known is None:
        set_mirrors(table, specs)
    return [spec for spec in specs if known is None or spec.url in known]


def set_mirrors(table: UploadsTable, specs: Sequence[MirrorSpec]) -> None:
    """Store the list of mirrors in the table, and log the files that wait for a mirror that is no longer in the list.

    A mirror that a person pushed to stays in the list as optional, until a person removes it or a start configures it.
    """
    urls = {spec.url for spec in specs}
    pushed: list[str] = []
    with contextlib.suppress(BrokenTable):
        pushed = [row.url for row in table.mirrors() if row.pushed and row.url not in urls]
    for url, count in waiting_for_removed(table, {*urls, *pushed}).items():
        save_logger(_log, mirror=url).error(
            "%d files wait for %s, which is no longer a mirror: they are not sent until it is configured again",
            count,
            url,
        )
    table.set_mirrors([*((spec.url, spec.required) for spec in specs), *((url, False) for url in pushed)], pushed)


def waiting_for_removed(table: UploadsTable, mirrors: Collection[str]) -> dict[str, int]:
    """Count the files that wait for each mirror that is not among ``mirrors``."""
    waiting = [r.mirror for r in table.records() if r.mirror not in mirrors and r.state in WAITING]
    return {mirror: waiting.count(mirror) for mirror in sorted(set(waiting))}


class _Memory:
    """Remembers the identity of a mirror, in the table and in a note file beside it, since a table may be rebuilt.

    The note wins if the two differ. A broken note is rewritten from the table. If the table does not have the identity
    either, it is unknown, which is not the same as never seen. If both were deleted, they are rewritten from memory.
    """

    def __init__(self, root: Path, table: UploadsTable, url: str) -> None:
        self._table = table
        self._url = url
        self._known: str | None = None
        self._note = root / names.CONTROL_DIR / f"mirror-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"

    def recall(self) -> str | None:
        """Return the remembered identity; None if there is none."""
        try:
            found = self._noted() or self._table.mirror_identity(self._url)
            if found is None and self._known is not None:
                return self.remember(self._known)
            self._known = found
            return found
        except IntegrityError as error:
            kept = self._table.mirror_identity(self._url)
            if kept is None:
                raise StoreTemporary(
                    f"{self._note} is broken, so it is unknown which place {self._url} was: {error}",
                    hint=f"Check that the mirror is mounted, then remove {self._note}.",
                ) from error
            _log.warning("%s is broken and is rewritten from the pending-uploads table: %s", self._note, error)
            files.write_bytes(self._note, self._sealed(kept), save_id=new_id(), replace=True)
            return kept

    def remember(self, identity: str) -> str:
        """Store an identity unless there is one already, and return the stored one."""
        kept = self._table.remember_mirror_identity(self._url, identity)
        with contextlib.suppress(NameTaken):  # the first note wins
            files.write_bytes(self._note, self._sealed(kept), save_id=new_id())
        self._known = self._noted() or kept
        return self._known

    def _sealed(self, identity: str) -> bytes:
        return seal(_NOTE_FORMAT, {"url": self._url, "identity": identity})

    def _noted(self) -> str | None:
        try:
            note = open_sealed(files.read_limited(self._note, _NOTE_LIMIT_BYTES), {_NOTE_FORMAT})
        except FileNotFoundError:
            return None
        return str(note.get("identity"))


def remembered_places(root: Path, table: UploadsTable, mirrors: Iterable[Mirror]) -> dict[str, str]:
    """Return the identity of the place that each mirror is, by URL, as far as the root remembers it.

    A table that was rebuilt takes it from the note.
    """
    found = {}
    for mirror in mirrors:
        with contextlib.suppress(CkptMirrorError):  # what broke there, the first contact says
            if (identity := _Memory(root, table, mirror.url).recall()) is not None:
                found[mirror.url] = identity
                if table.mirror_identity(mirror.url) is None:
                    table.remember_mirror_identity(mirror.url, identity)
    return found


def remember_places(root: Path, table: UploadsTable, places: Mapping[str, str]) -> None:
    """Remember the places that another node of the job remembers: a node without the mount has another directory there.

    Raises:
        ConfigError: The root remembers another place.
    """
    for url, identity in places.items():
        memory, known = _Memory(root, table, url), identity
        with contextlib.suppress(CkptMirrorError):  # what broke there, the first contact says
            known = memory.recall() or memory.remember(identity)
        if known != identity:
            raise ConfigError(
                f"{url} is not the place that another node of this job knows under this URL.",
                hint="Mount it on every node. If you recreated the mirror on purpose, give it a new URL.",
            )


def seen_places(
    mirrors: Sequence[Mirror], *, counting: Collection[str] = (), patience_s: float = 0.0
) -> dict[str, str | None]:
    """Return the identity of the place that each mirror is now, by URL; None if it is none yet. Creates none.

    It is UNKNOWN where it cannot be read: the first contact says what broke there.

    Args:
        mirrors: The mirrors.
        counting: The URLs of those for which this waits as long as it may; for others, and for errors that hardly pass
            by themselves, only a moment.
        patience_s: For how long to look again at what could not be read.
    """
    from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

    seen: dict[str, str | None] = {mirror.url: UNKNOWN for mirror in mirrors}
    log_wait, moment_ends_s = _log_waits(), time.monotonic() + min(patience_s, _MOMENT_S)

    def waits_for_one() -> bool:
        waits = False
        for mirror in (one for one in mirrors if seen[one.url] == UNKNOWN):
            try:
                seen[mirror.url] = identity_now(mirror.store)
            except StoreTemporary as error:
                log_wait(mirror.url, _LOOK_EVERY_S, error)
                waits = waits or mirror.url in counting or time.monotonic() < moment_ends_s
            except CkptMirrorError:
                waits = waits or time.monotonic() < moment_ends_s
        return waits

    looking = Retrying(
        retry=retry_if_result(bool),
        stop=stop_after_delay(patience_s),
        wait=wait_fixed(_LOOK_EVERY_S),
        retry_error_callback=lambda _: True,
    )
    looking(waits_for_one)
    return seen


def expect_places(mirrors: Iterable[Mirror], places: Mapping[str, Expected], read: Collection[str] = ()) -> None:
    """Take no other place than these for a mirror that nobody remembers (``core.start.mirror_places``).

    Args:
        mirrors: The mirrors.
        places: The places.
        read: The URLs of mirrors that may be read meanwhile.
    """
    for mirror in mirrors:
        if isinstance(mirror.store, SamePlaceStore):
            mirror.store.expect(places.get(mirror.url), may_read=mirror.url in read)


def check_places(root: Path, mirrors: Sequence[Mirror]) -> None:
    """Refuse mirrors whose copies would not be second copies.

    A mirror that is the root would take the local files for its copies. A mirror inside the root is lost with the
    root's disk, and rotation may delete its names. A mirror around the root would list the local files as its objects.
    Two mirrors that are one directory would count one copy twice. The root of a trainer is rotated by that one alone.

    Raises:
        ConfigError: Two of these are one directory, or one is inside the other, whatever their paths. Or a trainer
            saves to a mirror.
    """
    chain = _chain(root)
    seen: dict[_Where, str] = {}
    for mirror in mirrors:
        directory = mirror.store.local_directory
        if directory is None:
            continue
        there = _chain_of_mirror(directory)
        if there[0] == chain[0]:
            raise ConfigError(
                f"The mirror {mirror.url} is the root {root} itself, so it would hold no second copy.", hint=_ELSEWHERE
            )
        if chain[0] in there:
            raise ConfigError(f"The mirror {mirror.url} is inside the root {root}.", hint=_ELSEWHERE)
        if there[0] in chain:
            raise ConfigError(f"The root {root} is inside the mirror {mirror.url}.", hint=_ELSEWHERE)
        if there[0] in seen:
            raise ConfigError(
                f"The mirrors {seen[there[0]]} and {mirror.url} are one directory, which would count as two copies.",
                hint="List each directory once.",
            )
        seen[there[0]] = mirror.url
        if _is_of_trainer(directory):
            raise ConfigError(
                f"The mirror {mirror.url} is a directory that a trainer saves to, whose rotation would delete copies.",
                hint=f"{_ELSEWHERE} `ckptmirror push --root {quote(str(directory))} --mirror OTHER-URL` copies there "
                f"what it has. If no trainer saves to it any more, move {directory / names.ATTEMPTS_NAME} away.",
            )


def check_destination(dest: Path, mirror: Mirror) -> None:
    """Refuse to stage into a mirror, this one or another: the staged files would be among its objects.

    Raises:
        ConfigError: ``dest`` is a mirror's directory, or is inside one.
    """
    directory = mirror.store.local_directory
    if directory is not None and _chain_of_mirror(directory)[0] in _chain(dest):
        raise ConfigError(f"{dest} is inside the mirror {mirror.url} itself.", hint="Choose another --dest.")
    real = dest.resolve()
    if (other := next((at for at in (real, *real.parents) if is_mirror(at)), None)) is not None:
        raise ConfigError(
            f"{dest} is inside {other}, which is a mirror.",
            hint="Choose another --dest. What that mirror lacks, `ckptmirror drain` where it was saved sends. "
            f"Or `ckptmirror stage --full --step N --mirror {quote(mirror.url)} --dest COPY` brings a copy, and "
            f"`ckptmirror push --root COPY --mirror {quote(str(other))}` sends that.",
        )


_Where = tuple[int, int, tuple[str, ...]]
_ELSEWHERE = "Give the mirror a directory of its own, on another disk: an NFS path, for example."


def _is_of_trainer(directory: Path) -> bool:
    """Whether a trainer saves to a directory, as far as its file system answers."""
    try:
        return hang_guard(directory).look(lambda: os.path.lexists(directory / names.ATTEMPTS_NAME))
    except StoreHangs:
        return False


def _chain_of_mirror(directory: Path) -> list[_Where]:
    """Do the same for a directory whose file system may hang; if it does, identify it by its path alone."""
    try:
        return hang_guard(directory).look(lambda: _chain(directory))
    except StoreHangs as error:
        _log.warning("%s", error)
        return [(0, 0, path.parts) for path in (directory, *directory.parents)]


def _chain(path: Path) -> list[_Where]:
    """Return device and inode of a path and of each directory above it.

    A path that does not exist yet is identified by the nearest existing directory above it and the names below that.
    """
    path = Path(os.path.realpath(path))
    tail: list[str] = []
    places = []
    for at in (path, *path.parents):
        try:
            found = at.stat()
        except OSError:  # missing, or a mount that does not answer: use the names
            tail.insert(0, at.name)
            continue
        places += [(found.st_dev, found.st_ino, tuple(tail[:count])) for count in range(len(tail), -1, -1)]
        tail = []
    return places


def stop_retrying(mirrors: Sequence[Mirror]) -> None:
    """Let every call that fails from now on fail at once, without retries: the caller wants to end."""
    for mirror in mirrors:
        if isinstance(mirror.store, StoreDecorator):
            mirror.store.stop_retrying()


def ask_patiently(mirrors: Sequence[Mirror]) -> None:
    """Use the full retry time again before calling a mirror silent, even if it was silent before. A start does this."""
    for mirror in mirrors:
        if isinstance(mirror.store, StoreDecorator):
            mirror.store.ask_patiently()


def close_mirrors(mirrors: Sequence[Mirror]) -> None:
    """Close every store."""
    for mirror in mirrors:
        mirror.store.close()
