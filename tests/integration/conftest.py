"""A root with its table and any number of mirrors, and a strict server for a test module that names its BUCKET."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.testing import GcsServerProcess
from ckptmirror.testing.fixtures import gcs_server  # noqa: F401 - a fixture
from tests.kit.mirrors import bucket_url, memory_url
from tests.kit.roots import MirroredRoot


@pytest.fixture
def open_root(tmp_path: Path) -> Iterator[Callable[..., MirroredRoot]]:
    """Open a root with these mirrors."""
    opened: list[MirroredRoot] = []

    def open_one(*urls: str, optional: tuple[str, ...] = (), name: str = "root") -> MirroredRoot:
        opened.append(MirroredRoot(tmp_path / name, urls, optional=optional))
        return opened[-1]

    yield open_one
    for place in opened:
        place.close()


@pytest.fixture
def place(open_root: Callable[..., MirroredRoot]) -> MirroredRoot:
    """A root with one mirror in memory."""
    return open_root(memory_url())


@pytest.fixture
def gs(
    server: GcsServerProcess, open_root: Callable[..., MirroredRoot], request: pytest.FixtureRequest
) -> MirroredRoot:
    """A root with one mirror in the module's bucket."""
    return open_root(bucket_url(request.module.BUCKET))


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    """The server of a module, with the bucket that the module names."""
    with GcsServerProcess(tmp_path_factory.mktemp("gcs"), buckets=[request.module.BUCKET]) as server:
        yield server


@pytest.fixture
def server(running: GcsServerProcess, monkeypatch: pytest.MonkeyPatch) -> GcsServerProcess:
    """The server, well and with an empty log; clients of this process find it."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.clear_faults()
    running.clear_log()
    return running
