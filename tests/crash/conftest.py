"""What all crash tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.campaign import StoryServer


@pytest.fixture(scope="session")
def server() -> Iterator[StoryServer]:
    """One process with torch imported, which forks a child per case."""
    server = StoryServer()
    yield server
    server.close()
