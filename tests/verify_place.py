"""A root that is verified: its saves on a mirror, and in its table as verified there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.flow.drain import drain
from ckptmirror.flow.verify.verify import Verification
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import UploadsTable
from tests.cli_place import make_pending


def drained(folder: Path, *steps: int, url: str | None = None, **more: Any) -> tuple[Path, str, list[Meta]]:
    """A root whose saves its table knows as verified on a mirror."""
    url = url or f"file://{folder}/mirror"
    root, metas = make_pending(folder, url, *steps, **({"kinds": ("model",)} | more))
    assert drain(root, timeout_s=60.0).is_verified
    return root, url, metas


def states(found: Verification) -> list[tuple[int | None, str, str]]:
    return [(one.verdict.step, one.verdict.standing, one.verdict.state) for one in found.saves]


def pending(root: Path) -> set[str]:
    with UploadsTable.open(table_path(root), read_only=True) as table:
        return {record.path for record in table.records(state=RecordState.PENDING)}
