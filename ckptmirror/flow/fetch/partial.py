"""Fetches the bytes of a save on a mirror that are read, into a temporary directory that is then removed.

Rules:
* Of a DCP directory, only the blocks come that hold what is wanted, each once; ``.metadata`` says where that is. The
  files have their full size, and holes in place of the rest. Ranks that load together want their own shards.
* Every block is compared with its checksum as it arrives, so nothing is verified again, and nothing else is read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound, KindMismatch
from ckptmirror.core.model import Artifact, Meta, new_id
from ckptmirror.flow.fetch.blocks import receive
from ckptmirror.flow.fetch.staging import incoming_of, wanted_artifacts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, opened_mirror
from ckptmirror.flow.places.reference import CheckpointReference, list_hint
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.local import trash
from ckptmirror.local.own_files import make_own_dir
from ckptmirror.local.storage_errors import explained

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadTarget

__all__ = ["Fetch", "begin_fetch", "fetched_parts", "is_read", "receive_whole", "shard_ranges"]

_SHARD = ".distcp"


def is_read(artifact: Artifact, exclude: Container[str], *, with_lists: bool = False) -> bool:
    """Whether who loads a save without these parts reads any of a file; ``with_lists``: the lists of tensors too."""
    parsed = names.parse_artifact_path(artifact.path)
    role = parsed.top.role if parsed is not None else ""
    return (role != "tensors" or with_lists) and {"optim": "optimizer"}.get(role, role) not in exclude


@dataclass(frozen=True)
class Fetch:
    """A save on a mirror, on its way into a temporary directory.

    Attributes:
        root: The directory. It has all files that are read, but of the shards of a DCP directory only holes.
        meta: The save.
        read: The save with the files that are read alone.
    """

    root: Path
    meta: Meta
    read: Meta
    mirror: Mirror

    def receive_shards(self, ranges: Mapping[str, Iterable[range]]) -> None:
        """Fetch the blocks of the shards that hold these ranges of bytes, by file name."""
        wanted = [one for one in self.read.artifacts if one.path.endswith(_SHARD) and Path(one.path).name in ranges]
        incoming = [
            replace(one, ranges=tuple(ranges[one.path.name]))
            for one in incoming_of(self.mirror, self.meta, wanted, lambda path: self.root / path)
        ]
        receive(incoming, on_bytes=lambda _received, _kept: None)


def shard_ranges(
    root: Path, read: Meta, exclude: Container[str], target: LoadTarget | None = None
) -> dict[str, list[range]]:
    """Return the ranges of bytes of the shards that are read, by file name; none if the save has no shards.

    Args:
        root: The directory with ``.metadata``.
        read: The save, with the files that are read.
        exclude: "optimizer", if it is not wanted.
        target: What this rank loads into: it reads its own shards. None: everything is read.

    Raises:
        IntegrityError: ``.metadata`` is broken or hostile.
    """
    if not any(one.path.endswith(_SHARD) for one in read.artifacts):
        return {}
    from ckptmirror.formats.dcp_read import ranges_read

    return ranges_read(root / names.SaveName(read.step).dcp_dir, exclude, target)


@contextmanager
def fetched_parts(found: CheckpointReference, exclude: Container[str]) -> Iterator[tuple[Path, Meta, Meta]]:
    """Lend a directory with what is read of a save on a mirror, its meta, and one with these files alone.

    Args:
        found: The save; its ``dir`` is the mirror's URL.
        exclude: "optimizer" and "extra", if they are not wanted.

    Raises:
        Exception: As :func:`begin_fetch`.
    """
    with begin_fetch(found, exclude) as fetch:
        fetch.receive_shards(shard_ranges(fetch.root, fetch.read, exclude))
        yield fetch.root, fetch.meta, fetch.read


@contextmanager
def begin_fetch(
    found: CheckpointReference, exclude: Container[str], *, with_lists: bool = False, below: Path | None = None
) -> Iterator[Fetch]:
    """Lend a directory with what is read of a save on a mirror, without the bytes of its shards.

    Args:
        found: The save; its ``dir`` is the mirror's URL.
        exclude: "optimizer" and "extra", if they are not wanted.
        with_lists: Whether the lists of tensors are.
        below: The root below whose control directory the files come to lie, where all ranks of a node see them, on
            whichever host they are. None: in the system's directory for temporary files (``TMPDIR``).

    Raises:
        CheckpointNotFound: It is gone.
        KindMismatch: Its kind cannot be read by one process.
        IntegrityError: The mirror sends other bytes than were saved.
        StoreTemporary: The mirror does not answer.
    """
    url = str(found.dir)
    if found.kind == "emergency":
        raise KindMismatch("Kind emergency is read by the ranks that wrote it: resume from it.")
    with opened_mirror(url) as mirror:
        meta = mirror_catalog(mirror, step=found.step).saves.get(found.save_id or "")
        if meta is None:
            raise CheckpointNotFound(f"Step {found.step} is no longer whole on {url}.", hint=list_hint(url))
        read = [
            one
            for one in wanted_artifacts(meta, (found.kind,), full=True)
            if is_read(one, exclude, with_lists=with_lists)
        ]
        with _temporary_directory(below) as root:
            receive_whole(mirror, meta, root, [one for one in read if not one.path.endswith(_SHARD)])
            for shard in (one for one in read if one.path.endswith(_SHARD)):
                with explained("write", root / shard.path):
                    (root / shard.path).parent.mkdir(parents=True, exist_ok=True)
                    (root / shard.path).touch()
                    os.truncate(root / shard.path, shard.digest.size_bytes)
            yield Fetch(root, meta, replace(meta, tag="", artifacts=tuple(read)), mirror)


@contextmanager
def _temporary_directory(below: Path | None) -> Iterator[Path]:
    if below is None:
        with explained("make a directory in", Path(tempfile.tempdir or os.environ.get("TMPDIR", "/tmp"))):
            directory = tempfile.TemporaryDirectory(prefix="ckptmirror-")
        with directory as name:
            yield Path(name)
        return
    made = new_id()
    path = below / names.CONTROL_DIR / names.tmp_name(f"load-{made}", made)  # if this is killed, a start removes it
    make_own_dir(path)
    try:
        yield path
    finally:
        trash.move_to_trash(below, path)
        empty_trash(below)


def receive_whole(mirror: Mirror, meta: Meta, root: Path, artifacts: Sequence[Artifact]) -> None:
    """Fetch some files of a save whole, under their names in ``root``."""
    for artifact in artifacts:
        with explained("write", root / artifact.path):
            (root / artifact.path).parent.mkdir(parents=True, exist_ok=True)
    incoming = incoming_of(mirror, meta, artifacts, lambda path: root / path)
    whole = [replace(one, ranges=(range(one.source.digest.size_bytes),)) for one in incoming]
    receive(whole, on_bytes=lambda _received, _kept: None)
