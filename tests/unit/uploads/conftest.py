"""What the tests of the pending-uploads table share: a clock moved by hand, and saves to add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from uploads_fakes import GS, artifacts_of

from ckptmirror.local.uploads import UploadsTable
from tests.kit.clock import HandClock
from tests.kit.saves import save_id_of


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def table(tmp_path: Path, clock: HandClock) -> Iterator[UploadsTable]:
    with UploadsTable.open(tmp_path / "uploads.db", create=True, clock=clock) as table:
        yield table


@pytest.fixture
def add(table: UploadsTable) -> Callable[..., str]:
    """Add a released save of a step, and return its id."""

    def add_one(step: int, *, mirrors: tuple[str, ...] = (GS,), count: int = 2, released: bool = True) -> str:
        table.add_save(save_id_of(step), step, ("dcp",), artifacts_of(step, count), mirrors)
        if released:
            table.release_save(save_id_of(step))
        return save_id_of(step)

    return add_one


@pytest.fixture
def verify_all(table: UploadsTable) -> Callable[[str], int]:
    """Claim and verify everything that a mirror waits for; return how many records."""

    def run(mirror: str) -> int:
        done = 0
        while claim := table.claim("worker", mirror, lease_s=60):
            record = claim.record
            size_bytes, crc32c = (50, 5) if record.role == "meta" else (record.size_bytes, record.crc32c)
            assert size_bytes is not None
            assert crc32c is not None
            table.verify(claim, object_name=record.object, generation=1, size_bytes=size_bytes, crc32c=crc32c)
            done += 1
        return done

    return run
