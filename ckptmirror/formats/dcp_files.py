"""The file system that torch's DCP writer writes to: its streams are checksummed and made durable.

Rules:
* One writer thread: torch swallows the errors of further ones.
* Every file is written under a temporary name, fsynced, then named; ``.metadata`` is the coordinator's last file.
* A file that nothing was written to is not created.
* What is small and no shard, the first of several ranks writes into a file of its own: all ranks read it, on other
  nodes too, and need no other file of that rank.
* Nothing calls ``os.sync``, which would wait for every disk of the machine.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptmirror.core.errors import CkptMirrorError, NameTaken
from ckptmirror.core.model import Digest
from ckptmirror.formats.artifacts import stream_to
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.local.directories import make_dirs

__all__ = ["SMALL", "ArtifactFileSystem", "DirectoryWriter"]

SMALL = "small"
"""Begins the last part of the name of a file of small items: ``__0_small0.distcp``."""
_TEMPORARY = ".tmp"


class ArtifactFileSystem(FileSystemBase):
    """Creates the files of one DCP directory; ``digests`` has each published file's by name."""

    def __init__(self, save_id: str) -> None:
        self.save_id = save_id
        self.digests: dict[str, Digest] = {}
        self._sealed: dict[str, ArtifactWriter] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a stream to a new file: published at the end, or (under torch's temporary name) when it is renamed."""
        if mode != "wb":
            raise CkptMirrorError(f"A save does not open files with mode {mode!r}.")
        target = Path(path)
        name = target.name.removesuffix(_TEMPORARY)
        with ArtifactWriter(target.with_name(name), self.save_id) as writer:
            with stream_to(writer) as stream:
                yield stream
            if name != target.name:
                writer.seal()
                self._sealed[target.name] = writer
            elif writer.tell() == 0:
                writer.abandon()
            else:
                self.digests[name] = writer.publish()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        """Return the path of ``suffix`` in the directory ``path``."""
        return Path(path) / suffix

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        """Return ``path``."""
        return Path(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Publish a sealed file under its final name; never replaces."""
        self.digests[Path(new_path).name] = self._sealed.pop(Path(path).name).publish()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create the directory; the ranks of a node share it."""
        make_dirs(Path(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether ``checkpoint_id`` is a local path."""
        return "://" not in str(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether ``path`` exists."""
        return os.path.lexists(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Refuse: nothing is ever replaced.

        Raises:
            NameTaken: Always.
        """
        raise NameTaken(f"{path} exists already.")

    def abandon(self) -> None:
        """Remove what was sealed but not published."""
        while self._sealed:
            self._sealed.popitem()[1].abandon()


class DirectoryWriter(FileSystemWriter):
    """torch's writer over an :class:`ArtifactFileSystem`.

    Args:
        path: The temporary directory.
        name: The directory's final name, which ``.metadata`` records in place of a path of this machine.
        small_bytes: Whole values up to this size get a file of their own; None: they do not.
    """

    def __init__(self, path: Path, name: str, save_id: str, *, small_bytes: int | None = None) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.directory = path
        self.files = ArtifactFileSystem(save_id)
        # The attribute is torch's own, but typed as its local file system.
        self.fs = self.files  # type: ignore[assignment]
        self._name = name
        self._save_id = save_id
        self._small_bytes = small_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives to this rank."""
        if self._small_bytes is None:
            return super().write_data(plan, planner)
        small = [item for item in plan.items if _is_small(item, self._small_bytes)]
        rest = [item for item in plan.items if not _is_small(item, self._small_bytes)]
        of_small = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{SMALL}")
        written: list[WriteResult] = []
        for part in (replace(plan, items=rest), replace(plan, items=small, storage_data=of_small)):
            if part.items:
                written += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, and complete what the caller has of it: before PyTorch 2.12, torch completes a copy."""
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        super().finish(metadata, results)

    def storage_meta(self) -> StorageMeta | None:
        """Return what ``.metadata`` says about its origin."""
        return StorageMeta(checkpoint_id=self._name, save_id=self._save_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keep the directory: it belongs to one save."""


def _is_small(item: WriteItem, small_bytes: int) -> bool:
    is_shard = item.tensor_data is not None and item.tensor_data.chunk.sizes != item.tensor_data.size
    return not is_shard and (item.tensor_storage_size() or 0) <= small_bytes
