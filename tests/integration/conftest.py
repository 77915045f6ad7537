"""A root with its table and any number of mirrors, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mirror_place import MirroredRoot, memory_url


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
