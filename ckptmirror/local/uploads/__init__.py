"""The pending-uploads table: which file of which save is safe on which mirror.

Rules:
* The table is a cache of facts that can be read again from disk and mirror. No record means not durable.
* A record is ``verified`` only after the mirror was asked. A row with a wrong checksum is never used.
* The design, the schema and the state graph are in docs/design/uploads-table.md.
"""

from ckptmirror.local.uploads.lease_clock import BootClock, LeaseClock
from ckptmirror.local.uploads.records import (
    BrokenRow,
    Claim,
    MirrorRow,
    MirrorStanding,
    RootIdentity,
    SaveRow,
    StateCount,
    Transition,
    UploadRecord,
)
from ckptmirror.local.uploads.table import UploadsTable

__all__ = [
    "BootClock",
    "BrokenRow",
    "Claim",
    "LeaseClock",
    "MirrorRow",
    "MirrorStanding",
    "RootIdentity",
    "SaveRow",
    "StateCount",
    "Transition",
    "UploadRecord",
    "UploadsTable",
]
