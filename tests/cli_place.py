"""Runs the real command line in processes of its own, on roots and mirrors that the factory makes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import mirror_specs
from ckptmirror.flow.retention.reconcile import add_missing_records
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import Claim, UploadsTable
from ckptmirror.stores import open_store
from tests.factory import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror

CONSOLE_SCRIPT = Path(sys.executable).with_name("ckptmirror")
AS_MODULE = (sys.executable, "-m", "ckptmirror")
LIMIT_S = 60.0
IMPATIENT = {"CKPTMIRROR_RETRY_S": "0.5"}  # for tests of what is said in the end where nobody answers


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without anything that would point a verb somewhere else."""
    ours = ("CKPTMIRROR_", "STORAGE_", "GOOGLE_", "CLOUDSDK_", "GCE_", "NO_GCE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return kept | {"CKPTMIRROR_RETRY_S": os.environ.get("CKPTMIRROR_RETRY_S", "8")} | more


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end."""
    return subprocess.run(
        [*AS_MODULE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean_environment(**(env or {})),
        cwd=cwd,
        check=False,
        **more,
    )


def start(
    *arguments: str | Path, env: Mapping[str, str] | None = None, python: Sequence[str] = (), **more: Any
) -> subprocess.Popen[str]:
    """Start a verb."""
    command = [sys.executable, *python, "-m", "ckptmirror", *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return subprocess.Popen(command, env=clean_environment(**(env or {})), **options)


def make_mirrored(folder: Path, *steps: int, **more: Any) -> tuple[Path, str, list[Meta]]:
    """A root whose saves are on a ``file://`` mirror, committed; the root, the mirror's URL and the metas."""
    root, url = folder / "root", f"file://{folder}/mirror"
    store = open_store(url)
    metas = [make_save(root, step, number=number, **more) for number, step in enumerate(steps, 1)]
    put_attempts(root, [FIRST_ATTEMPT])
    put_attempts(store, [FIRST_ATTEMPT])
    for meta in metas:
        put_on_mirror(store, root, meta)
    store.close()
    return root, url, metas


def require(root: Path, url: str) -> None:
    """Have the root's table say what a trainer's does: that this mirror is required."""
    table = UploadsTable.open(table_path(root), create=True)
    table.set_mirrors([(url, True)])
    table.close()


def make_pending(folder: Path, url: str, *steps: int, **more: Any) -> tuple[Path, list[Meta]]:
    """A root with saves that its table has pending for a mirror."""
    root = folder / "root"
    metas = [make_save(root, step, number=number, **more) for number, step in enumerate(steps, 1)]
    put_attempts(root, [FIRST_ATTEMPT])
    table = UploadsTable.open(table_path(root), create=True)
    specs = mirror_specs([url])
    table.set_mirrors([(spec.url, spec.required) for spec in specs])
    add_missing_records(table, specs, metas)
    table.close()
    return root, metas


def fail_uploads(root: Path, *paths: str, reason: str = "the bucket said 400") -> int:
    """Have the root's table say that the uploads of these files (of all, if none is named) failed for good."""
    table = UploadsTable.open(table_path(root))
    claims: list[Claim] = []
    for url in [row.url for row in table.mirrors()]:
        while (claim := table.claim("test", url, lease_s=60.0)) is not None:
            claims.append(claim)
    for claim in claims:
        if not paths or claim.record.path in paths:
            table.fail(claim, reason)
        else:
            table.put_back(claim, "left for later", not_before_s=0.0)
    table.close()
    return sum(not paths or claim.record.path in paths for claim in claims)


def assert_tells(ended: subprocess.CompletedProcess[str], exit_code: int, *words: str, stdout: str | None = "") -> None:
    """The verb ended with this code and one sentence and a hint that hold these words; never with a traceback."""
    assert ended.returncode == exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    if stdout is not None:
        assert ended.stdout == stdout
    for word in words:
        assert word in ended.stderr, ended.stderr
    if exit_code not in (0, 2):
        lines = ended.stderr.splitlines()
        at = max(number for number, line in enumerate(lines) if line.startswith("ckptmirror: "))
        assert lines[at + 1].startswith("  "), f"no hint: {ended.stderr}"


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but for what is under ``.ckptmirror``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".ckptmirror" not in path.parts
    }


def assert_explains(error: CkptMirrorError, exit_code: int, *words: str) -> None:
    assert error.exit_code == exit_code
    assert error.hint
    for word in words:
        assert word in str(error)
