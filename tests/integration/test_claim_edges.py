"""Claims at the edges: attempts that no list tells of, runs that could not begin, lists that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import (
    IntegrityError,
    LineageError,
    NotAuthorised,
    Temporary,
)
from ckptmirror.core.model import AttemptList, SaveRef, new_id
from ckptmirror.flow.places.attempt_lists import read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.local import files
from ckptmirror.stores import open_store
from ckptmirror.stores.faulty import FaultyStore, StoreFault
from tests.factory import make_attempt
from tests.mirror_place import memory_url


def opened(url: str) -> Mirror:
    return Mirror(url, True, open_store(url, retry=False))


def claim_run(root: Path, *mirrors: Mirror) -> RunClaim:
    files.make_dirs(root / names.CONTROL_DIR)
    return RunClaim.make(root, mirrors)


def test_i11_who_continues_from_an_attempt_that_no_list_tells_of_takes_it_in_and_a_higher_number(
    tmp_path: Path,
) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    claim_run(root, mirror).decide(None, [mirror])
    claim = claim_run(root, mirror)
    branch = [make_attempt(number) for number in range(1, 4)]
    claim.adopt(branch, [mirror])
    assert claim.attempt.number == 4
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert not {attempt.id for attempt in branch} & {attempt.id for attempt in there.attempts}  # not decided yet
    claim.decide(SaveRef(branch[-1].id, 1, 500, new_id()), [mirror])
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert there == read_local_attempts(root)
    assert {attempt.id for attempt in branch} < {attempt.id for attempt in there.attempts}
    claim.confirm(mirror)


@pytest.mark.parametrize("number", [None, 5])
def test_i11_nothing_is_decided_that_the_lineage_could_not_follow(tmp_path: Path, number: int | None) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    claim = claim_run(root, mirror)
    stranger = make_attempt(number or 0)
    if number is not None:
        claim.known = AttemptList(claim.run_id, (stranger,))
    with pytest.raises(LineageError, match="No list tells"):
        claim.decide(SaveRef(stranger.id, 1, 500, new_id()), [mirror])
    there, _ = read_mirror_attempts(mirror)
    assert there is not None
    assert not any(attempt.decided for attempt in there.attempts)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("required", [True, False])
def test_i12_a_run_that_could_not_begin_leaves_no_name_for_itself(
    tmp_path: Path, operation: str, required: bool
) -> None:
    """Another machine may begin it meanwhile: then this root must join that run."""
    mirror, root = opened(memory_url()), tmp_path / "root"
    faulty = FaultyStore(mirror.store, [StoreFault(operation, names.WRITER_NAME, times=0, when="before")])
    with pytest.raises(Temporary):
        claim_run(root, Mirror(mirror.url, required, faulty))
    assert read_local_attempts(root) is None
    elsewhere = claim_run(tmp_path / "elsewhere", mirror)
    elsewhere.decide(None, [mirror])
    assert claim_run(root, mirror).run_id == elsewhere.run_id


def test_an_optional_mirror_that_cannot_be_listed_holds_up_no_start(tmp_path: Path) -> None:
    mirror, other = opened(memory_url()), opened(memory_url())
    fault = StoreFault("list", times=0, when="before", error=lambda: NotAuthorised("403"))
    claim = claim_run(tmp_path / "root", mirror, Mirror(other.url, False, FaultyStore(other.store, [fault])))
    assert set(claim.unclaimed) == {other.url}
    claim.decide(None, [mirror])


def test_a_list_that_the_disk_does_not_give_back_is_taken_from_the_mirrors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, root = opened(memory_url()), tmp_path / "root"
    first = claim_run(root, mirror)
    first.decide(None, [mirror])
    read = files.read_limited

    def fail(path: Path, limit_bytes: int) -> bytes:
        if path == root / names.ATTEMPTS_NAME:
            raise IntegrityError(f"{path} cannot be read: Input/output error.")
        return read(path, limit_bytes)

    monkeypatch.setattr(files, "read_limited", fail)
    assert claim_run(root, mirror).known.attempts == (first.attempt,)
