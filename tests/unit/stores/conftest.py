"""The store that several of these tests ask: a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.stores import file as file_store
from ckptmirror.stores.file import FileStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory, not yet made."""
    return tmp_path / "mirror"


@pytest.fixture
def store(root: Path) -> FileStore:
    """The store over it."""
    return file_store.open(f"file://{root}")
