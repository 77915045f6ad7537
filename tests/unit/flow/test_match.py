"""Whether an object of a mirror is what should be there: each difference has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Artifact
from ckptmirror.flow.places.object_match import is_rewritten, why_differs
from ckptmirror.local.uploads import UploadRecord, UploadsTable
from ckptmirror.stores import open_store
from ckptmirror.stores.base import ObjectInfo
from tests.kit.saves import digest_of

DATA = bytes(range(256)) * 100
DIGEST = digest_of(DATA)
ARTIFACT = Artifact(path="model_000200.pt", kinds=("model",), rank=None, digest=DIGEST)
FOUND = ObjectInfo(name=ARTIFACT.path, size_bytes=len(DATA), generation=7, crc32c=DIGEST.crc32c)


@pytest.fixture
def record(tmp_path: object) -> UploadRecord:
    table = UploadsTable.open(f"{tmp_path}/uploads.db", create=True)  # type: ignore[arg-type]
    table.add_save("ab" * 16, 200, ("model",), [ARTIFACT], ["gs://b/run"], meta_path="meta_000200.json")
    (found,) = [one for one in table.records(save_id="ab" * 16) if one.role == "artifact"]
    table.close()
    return replace(found, state=RecordState.VERIFIED, generation=7)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (FOUND, None),
        (None, "is missing"),
        (replace(FOUND, size_bytes=3), f"has 3 bytes instead of {len(DATA)}"),
        (replace(FOUND, crc32c=1), f"has crc32c 00000001 instead of {DIGEST.crc32c:08x}"),
        (replace(FOUND, crc32c=None), None),
        (replace(FOUND, generation=8), None),
    ],
)
def test_an_artifact_is_compared_by_size_and_by_the_crc32c_that_the_mirror_reports(
    found: ObjectInfo | None, why: str | None
) -> None:
    assert why_differs(ARTIFACT, found) == why


def test_sizes_alone_are_compared_where_that_is_asked(record: UploadRecord) -> None:
    for expected in (ARTIFACT, record):
        assert why_differs(expected, replace(FOUND, crc32c=1), by_size=True) is None
        assert why_differs(expected, replace(FOUND, size_bytes=1), by_size=True) is not None


def test_a_record_is_compared_by_generation_too(record: UploadRecord) -> None:
    assert why_differs(record, FOUND) is None
    assert (
        why_differs(record, replace(FOUND, generation=8))
        == "is not the object that was verified: its generation changed"
    )
    assert why_differs(record, replace(FOUND, crc32c=1)) == f"has crc32c 00000001 instead of {DIGEST.crc32c:08x}"


def test_an_object_of_a_mirror_that_reports_no_crc32c_is_read_back() -> None:
    store = open_store("memory://test-match/run")
    store.write(ARTIFACT.path, DATA[:-1] + b"\0", if_generation=0, metadata={})
    info = store.stat(ARTIFACT.path)
    assert info is not None
    silent = replace(info, crc32c=None)
    assert why_differs(ARTIFACT, silent) is None
    assert "has crc32c" in (why_differs(ARTIFACT, silent, store=store) or "")


def test_absence_is_told_before_the_generation_the_generation_before_the_size(record: UploadRecord) -> None:
    other = replace(FOUND, generation=8, size_bytes=3, crc32c=1)
    assert why_differs(record, None) == "is missing"
    assert "generation" in (why_differs(record, other) or "")
    assert why_differs(record, replace(other, generation=7)) == f"has 3 bytes instead of {len(DATA)}"


def test_an_object_that_was_moved_with_its_mirror_is_rewritten_and_one_with_other_bytes_is_lost(
    record: UploadRecord,
) -> None:
    moved = replace(FOUND, generation=8)
    assert is_rewritten(record, moved)
    assert is_rewritten(record, replace(moved, crc32c=None))
    assert not is_rewritten(record, None)
    assert not is_rewritten(record, replace(moved, size_bytes=3))
    assert not is_rewritten(record, replace(moved, crc32c=1))
    assert is_rewritten(replace(record, role="meta"), replace(moved, size_bytes=3))  # another node wrote it
