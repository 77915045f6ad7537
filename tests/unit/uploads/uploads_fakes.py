"""Saves to add and claims to take, for the tests of the pending-uploads table."""

from __future__ import annotations

from ckptmirror.core.model import Artifact, Digest
from ckptmirror.local.uploads import Claim, UploadRecord, UploadsTable

GS = "gs://bucket/run"
NFS = "file:///nfs/run"


def artifacts_of(step: int, count: int = 2) -> list[Artifact]:
    return [
        Artifact(
            f"dcp_{step:06d}/__{rank}_0.distcp",
            ("dcp",),
            rank,
            Digest(100 + rank, 7000 + rank, 4 << 20, (7000 + rank,)),
        )
        for rank in range(count)
    ]


def take(table: UploadsTable, mirror: str = GS, worker: str = "worker", lease_s: float = 60) -> Claim:
    claim = table.claim(worker, mirror, lease_s=lease_s)
    assert claim is not None
    return claim


def answer(table: UploadsTable, claim: Claim) -> UploadRecord:
    record = claim.record
    assert record.size_bytes is not None
    assert record.crc32c is not None
    return table.verify(
        claim, object_name=record.object, generation=9, size_bytes=record.size_bytes, crc32c=record.crc32c
    )
