"""Retry: makes failed uploads pending again, after a person has fixed the cause.

Rules:
* Failed records become pending, and nothing else changes. This verb sends nothing and asks no mirror, so it works
  offline and at once, beside a trainer or without one.
* If there is nothing to retry, that is not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound, ConfigError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.nearest_steps import nearest_steps
from ckptmirror.flow.places.mirrors import mirror_specs
from ckptmirror.local.lock import is_held
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import UploadRecord, UploadsTable

__all__ = ["Retried", "RetriedFile", "retry"]


@dataclass(frozen=True)
class RetriedFile:
    """A file that had failed, and is pending again.

    Attributes:
        reason: Why it had failed.
        is_served: Whether its mirror is still one of the root's; files for other mirrors are not sent.
    """

    mirror: str
    step: int
    path: str
    size_bytes: int
    reason: str
    is_served: bool = True


@dataclass(frozen=True)
class Retried:
    """The files that are pending again.

    Attributes:
        trainer: Whether a trainer runs on the root now; its uploader sends them within seconds.
    """

    files: tuple[RetriedFile, ...]
    trainer: bool


def retry(root: Path, *, mirrors: Sequence[str] = (), step: int | None = None) -> Retried:
    """Make failed uploads of a root pending again.

    Args:
        root: The local root.
        mirrors: Retry only uploads to these mirrors; empty: to all.
        step: Retry only uploads of this step.

    Raises:
        NoTable: ckptmirror has not saved here.
        CheckpointNotFound: The table knows no save of this step.
        ConfigError: The root has no such mirror.
    """
    table = open_known_table(root)
    try:
        configured = {row.url for row in table.mirrors()}
        wanted = [spec.url for spec in mirror_specs(mirrors)]
        _check(root, table, configured, wanted, step)
        files: list[RetriedFile] = []
        for url in wanted or dict.fromkeys(record.mirror for record in table.records(state=RecordState.FAILED)):
            found = [
                RetriedFile(url, r.step, r.path, r.size_bytes or 0, r.reason, url in configured)
                for r in table.records(mirror=url, state=RecordState.FAILED)
                if step in (None, r.step)
            ]
            if found and table.retry_failed(mirror=url, step=step):
                files += found
        return Retried(tuple(files), is_held(root / names.LOCK_NAME))
    finally:
        table.close()


def _check(root: Path, table: UploadsTable, configured: set[str], wanted: Sequence[str], step: int | None) -> None:
    records: list[UploadRecord] = table.records()
    if unknown := set(wanted) - configured - {record.mirror for record in records}:
        known = ", ".join(sorted(configured)) or "none"
        raise ConfigError(f"{', '.join(sorted(unknown))} is not a mirror of {root}.", hint=f"Its mirrors: {known}.")
    steps = {save.step for save in table.saves()}
    if step is not None and step not in steps:
        raise CheckpointNotFound(f"The table of {root} knows no save of step {step}.{nearest_steps(steps, step)}")
