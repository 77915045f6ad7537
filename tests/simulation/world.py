"""The simulated world: hosts with disks, mirrors, a clock that stands still, and what is true of every save.

Rules:
* Everything runs in the test's own thread; what happens while a store is asked is a step that the history names.
* A simulated process dies at a numbered crash point by :class:`Dead`; from there it changes nothing, neither on disk
  nor on a mirror. Requests to a mirror are crash points too.
* What is true (bytes, attempts, foreign files) is noted here by whoever made it; the package is never asked for it.
"""

from __future__ import annotations

import random
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core import names
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.start import patience
from ckptmirror.local import crashpoints
from ckptmirror.stores import memory, open_store
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload
from tests.kit.clock import HandClock
from tests.kit.faulty_store import FaultyStore, StoreFault

if TYPE_CHECKING:
    from tests.simulation.processes import Drainer, Trainer

HOSTS = 3


class Dead(BaseException):
    """A simulated process was killed."""


class Broken(AssertionError):
    """Something that must always hold does not."""


def die() -> None:
    raise Dead


def _at_once(run: Callable[[], Any], _name: str) -> Future[Any]:
    """Ask a mirror in this thread, one after the other: else crash points would be passed in any order."""
    asked: Future[Any] = Future()
    try:
        asked.set_result(run())
    except BaseException as error:  # noqa: BLE001 - a crash too: raised again where somebody asks for the result
        asked.set_exception(error)
    return asked


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Make every id and every delay follow from the seed."""
    ids = random.Random(f"ids {seed}")
    real_hex, real_bits, state = secrets.token_hex, secrets.randbits, random.getstate()
    secrets.token_hex = lambda nbytes=None: ids.randbytes(nbytes or 32).hex()  # type: ignore[assignment]
    secrets.randbits = lambda k: ids.getrandbits(k)  # type: ignore[assignment]
    random.seed(seed)
    real_begin, patience.begin = patience.begin, _at_once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        patience.begin = real_begin  # type: ignore[attr-defined]
        secrets.token_hex, secrets.randbits = real_hex, real_bits
        random.setstate(state)


@dataclass
class Truth:
    """A save as its trainer made it. ``acknowledged``: the commit returned, so it may never be lost."""

    meta: Meta
    content: Mapping[str, bytes]
    acknowledged: bool = False
    made_on: tuple[int, int] = (-1, 0)  # the host, and how many disks it had lost by then

    def bytes_of(self, path: str) -> bytes | None:
        return self.content.get(names.untagged(path))


@dataclass
class Host:
    """A machine with one disk and, at most, one trainer and one drain."""

    number: int
    root: Path
    disks_lost: int = 0
    trainer: Trainer | None = None
    drainer: Drainer | None = None

    @property
    def is_busy(self) -> bool:
        return self.trainer is not None or self.drainer is not None


class MirrorPlace:
    """A mirror, its faults, and a look behind them."""

    def __init__(self, url: str, required: bool) -> None:
        self.spec = MirrorSpec(url, required)
        self.url = url
        self.required = required
        self.behind = open_store(url, retry=False)
        self.faulty = FaultyStore(self.behind)
        self.down = False

    def go_down(self) -> None:
        self.down = True
        self.faulty.go_down()

    def come_back(self) -> None:
        self.down = False
        self.faulty.script()

    def suffer(self, *faults: StoreFault) -> None:
        if not self.down:
            self.faulty.script(*faults)

    def objects(self) -> dict[str, tuple[bytes, ObjectInfo]]:
        return {i.name: (self.behind.read(i.name, limit_bytes=1 << 30)[0], i) for i in self.behind.list()}


class MortalStore:
    """A mirror as one process sees it: it may die before or after each request, and others may act meanwhile."""

    def __init__(self, world: World, store: Store, check_write: Callable[[str], None]) -> None:
        self._world = world
        self._store = store
        self._check_write = check_write

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def local_directory(self) -> Path | None:
        return self._store.local_directory

    def identity(self, expected: str | None = None) -> str | None:
        return self._store.identity(expected)

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @contextmanager
    def _request(self, operation: str) -> Iterator[None]:
        self._world.meanwhile()
        with crashpoints.around(f"mirror.{operation}"):
            yield

    def stat(self, name: str) -> ObjectInfo | None:
        with self._request("stat"):
            return self._store.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._request("list"):
            return iter(list(self._store.list(prefix)))

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        with self._request("read"):
            return self._store.read(name, generation=generation, limit_bytes=limit_bytes)

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        with self._request("write"):
            self._check_write(name)
            return self._store.write(name, data, if_generation=if_generation, metadata=metadata)

    def upload(self, upload: Upload) -> ObjectInfo:
        with self._request("upload"):
            return self._store.upload(upload)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        with self._request("download"):
            self._store.download(name, generation=generation, offset=offset, buffer=buffer)

    def delete(self, name: str, *, generation: int) -> None:
        with self._request("delete"):
            self._store.delete(name, generation=generation)

    def close(self) -> None:
        """The world closes it."""


@dataclass
class World:
    """Everything there is. See the module's rules."""

    directory: Path
    hosts: list[Host]
    mirrors: list[MirrorPlace]
    clock: HandClock = field(default_factory=HandClock)
    truth: dict[str, Truth] = field(default_factory=dict)
    foreign: dict[Path, bytes] = field(default_factory=dict)
    foreign_objects: dict[tuple[str, str], bytes] = field(default_factory=dict)
    lost_objects: set[tuple[str, str]] = field(default_factory=set)
    damaged: set[Path] = field(default_factory=set)
    damaged_tables: set[int] = field(default_factory=set)
    partly_staged: set[str] = field(default_factory=set)
    interruption: Callable[[], None] | None = None
    requests_before_interruption: int = 0
    inside: Host | None = None
    acting: Trainer | Drainer | None = None
    noted: list[str] = field(default_factory=list)
    just_acknowledged: list[tuple[Host, str]] = field(default_factory=list)

    @classmethod
    def make(cls, directory: Path, rng: random.Random) -> World:
        hosts = [Host(n, directory / f"host{n}") for n in range(HOSTS)]
        second = rng.choice([None, True, False])
        wanted = [True] if second is None else [True, second]
        name = f"sim-{directory.name}"
        mirrors = [MirrorPlace(f"memory://{name}-{n}/run", required) for n, required in enumerate(wanted)]
        return cls(directory, hosts, mirrors)

    @property
    def eval_root(self) -> Path:
        return self.directory / "eval"

    @property
    def specs(self) -> list[MirrorSpec]:
        return [place.spec for place in self.mirrors]

    def mirrors_for(self, check_write: Callable[[MirrorPlace, str], None]) -> list[Mirror]:
        """The mirrors as one process opens them."""

        def one(place: MirrorPlace) -> Mirror:
            return Mirror(
                place.url, place.required, MortalStore(self, place.faulty, lambda name: check_write(place, name))
            )

        return [one(place) for place in self.mirrors]

    def meanwhile(self) -> None:
        """Somebody asks a mirror: what the history says happens at this moment, happens."""
        if self.interruption is None or threading.current_thread() is not threading.main_thread():
            return
        self.requests_before_interruption -= 1
        if self.requests_before_interruption > 0:
            return
        act, self.interruption = self.interruption, None
        with crashpoints_suspended():
            act()

    def note(self, save_id: str, meta: Meta, content: Mapping[str, bytes]) -> Truth:
        truth = self.truth[save_id] = Truth(meta, content)
        return truth

    def roots(self) -> list[Path]:
        """Every directory that may hold saves."""
        return [path for path in (*(host.root for host in self.hosts), self.eval_root) if path.exists()]

    def lose_disk(self, host: Host) -> None:
        """Whatever ran there dies; the disk is gone."""
        for process in (host.trainer, host.drainer):
            if process is not None:
                process.die()
        host.trainer = host.drainer = None
        shutil.rmtree(host.root, ignore_errors=True)
        host.disks_lost += 1
        self.foreign = {path: data for path, data in self.foreign.items() if not path.is_relative_to(host.root)}
        self.damaged = {path for path in self.damaged if not path.is_relative_to(host.root)}

    def close(self) -> None:
        for host in self.hosts:
            for process in (host.trainer, host.drainer):
                if process is not None:
                    process.die()
        for place in self.mirrors:
            memory.drop(place.url.removeprefix("memory://").partition("/")[0])


def hosts_to_act_on(world: World) -> list[Host]:
    """All but the one where somebody is in the middle of something."""
    return [host for host in world.hosts if host is not world.inside]


_points_left: list[int] = []


def arm(points: int) -> None:
    """Let the process that acts now die at its ``points``-th crash point (0: never)."""
    _points_left[:] = [points]
    if points:
        crashpoints.arm(str(points), die=die)


@contextmanager
def crashpoints_suspended() -> Iterator[None]:
    """Somebody else acts in the body, and does not die of it."""
    points = _points_left[0] if _points_left else 0
    left = max(1, points - len(crashpoints.passed())) if points else 0
    crashpoints.disarm()
    try:
        yield
    finally:
        arm(left)


KINDS_SAVED: tuple[tuple[Kind, ...], ...] = (("dcp",), ("model",), ("dcp", "model"))
