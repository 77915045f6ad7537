"""Gather: where a job has several nodes, each gets the files that its ranks read of one save before they vote on it.

Rules:
* The files lie in a *view*: a temporary directory of the root, in which the save has its plain names. What the node
  saved itself is linked there; the save on its disk is not changed, and is still what the node keeps and sends.
* Only regular files that no link leads to are linked, copied or sent, and ``.metadata`` is compared with its checksum
  before it is read.
* First come the files that every rank reads, its own, and the lists of tensors that prove the load, if they are
  anywhere. Of a DCP directory, ``.metadata`` then tells which others a node's ranks read, and these files whether a
  rank needs the extra state of others.
* What a node lacks comes from a mirror, if one has the save; otherwise from the disks of the nodes that have it. The
  job's leader asks the mirror for the objects of all nodes at once. A snapshot from the persistent directory comes to
  the disks first, each part to one node.
* Where no place has all of a save, a node uses what is whole on its disk; then what is whole on a mirror, one mirror
  after the other; then what is whole on other nodes. A file that is damaged in one place comes from the next.
* A file that is sent goes from node to node, each passing on what it has just received: however many need it, no node
  sends it more than once. A node whose turn comes late waits as long as the files before may take.
* A note names the save, as for a save that is brought: if the start is killed, the next one goes on with the view, and
  else removes it. After the claim it is removed.
* A node that cannot get or send a file still takes part to the end, so that none waits for it. Every file is compared
  with its checksum, block by block, in the vote.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, LocalStorageFull, ObjectNotFound
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.start.decide import Result
from ckptmirror.core.start.sharing import Holding, Transfer
from ckptmirror.core.tensor_lists import is_list, is_proof
from ckptmirror.flow.fetch.blocks import FileToRead, read_all, receive
from ckptmirror.flow.fetch.destination import make_real_dirs
from ckptmirror.flow.fetch.staging import check_space, incoming_of
from ckptmirror.flow.places.catalog import local_catalog, objects_of
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.retention.reconcile import note_brought
from ckptmirror.flow.save.persistent_dir import bring_snapshot
from ckptmirror.local import trash
from ckptmirror.local.checksummed_writer import create_temporary
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.direct_io import open_regular
from ckptmirror.local.listing import Listing, is_not_readable_now
from ckptmirror.local.own_files import make_own_dir
from ckptmirror.local.storage_errors import disk_error, explained
from ckptmirror.ranks.base import Ranks
from ckptmirror.stores.base import ObjectInfo

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadTarget

__all__ = ["Asked", "Gathered", "View", "ask_mirror", "bring_back", "discard_view", "relay", "relay_s"]

_PIECE_BYTES = 4 * 1024 * 1024
_SLOWEST_BYTES_PER_S = 20e6  # from node to node, with the disks at both ends
_SHARD = ".distcp"


@dataclass(frozen=True)
class Gathered:
    """What came of a node's part in gathering a save.

    Attributes:
        result: Why it has not all files; None if it has.
        error: The error that says so; without a result, one that matters only if no node has the file.
        got: The plain paths of the files that came.
    """

    result: Result | None = None
    error: CkptMirrorError | None = None
    got: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Asked:
    """What a mirror answered about the objects of a save, for all nodes.

    Attributes:
        objects: What it has, by name.
        failed: Why it did not answer.
    """

    objects: Mapping[str, ObjectInfo] = field(default_factory=dict)
    failed: Gathered = Gathered()


def ask_mirror(mirror: Mirror, on_mirror: Meta, paths: Collection[str]) -> Asked:
    """Ask a mirror about the objects that nodes will fetch, by their plain paths."""
    wanted = tuple(one for one in on_mirror.artifacts if names.plain(one.path) in paths)
    try:
        return Asked(objects_of(mirror.store, replace(on_mirror, artifacts=wanted)))
    except CkptMirrorError as error:
        return Asked(failed=_gathered(error))


def discard_view(root: Path, meta: Meta) -> None:
    """Remove what a node gathered of a save that cannot be used."""
    with contextlib.suppress(FileNotFoundError):
        trash.move_to_trash(root, _view_of(root, meta))
    empty_trash(root)


def _view_of(root: Path, meta: Meta) -> Path:
    """Return the view's path: that of a temporary of the save, which a reconcile knows by its name."""
    return root / names.CONTROL_DIR / names.tmp_name(names.SaveName(meta.step).dcp_dir, meta.save_id)


class View:
    """The files of one save that a node's ranks will read, by their plain names.

    Args:
        root: The node's root.
        meta: The whole save, under its plain names.
        kind: The kind that will be loaded.
        ranks: The ranks whose extra state the ranks of this node read.
        lists: The ranks whose lists of tensors they read.
        trusted: Whether the node's own files are taken as they are, for the vote to check. Otherwise they are compared
            with their checksums here, so that only those that are whole are used.
        sends: Whether other nodes may need files from here that no rank of this node reads.
    """

    def __init__(
        self,
        root: Path,
        meta: Meta,
        kind: Kind,
        ranks: Collection[int],
        lists: Collection[int],
        *,
        trusted: bool,
        sends: bool,
    ) -> None:
        self._root = root
        self._meta = meta
        self._trusted = trusted
        self._sends = sends
        self._kind = kind
        self._all = {one.path: one for one in meta.artifacts_of(kind)}
        self._files = {path: one for path, one in self._all.items() if not is_proof(one) or one.rank in lists}
        self._has: set[str] = set()
        self._unreadable: dict[str, str] = {}
        self.path = _view_of(root, meta)
        own = {rank if rank < meta.world_size else 0 for rank in ranks}  # one that the save did not have reads rank 0's
        self.needs: dict[str, Artifact] = {
            path: one
            for path, one in self._files.items()
            if not path.endswith(_SHARD)
            and (one.rank in own or not _is_of_one_rank(path) or (is_list(path) and one.rank in lists))
        }

    def begin(self) -> Holding:
        """Make the view with what this node saved itself, and say what it has and lacks.

        Raises:
            CkptMirrorError: The disk cannot be used.
        """
        note_brought(self._root, self._meta.save_id, beside=True)
        with explained("make", self.path):
            make_own_dir(self.path)
            for path in self._files:
                make_real_dirs(self._root, (self.path / path).parent)
        return self.look()

    def files_read(self, target: LoadTarget) -> frozenset[str] | None:
        """Return the paths of the files that a rank reads; None: all of them, or that cannot be known.

        Left out is what any view of the save needs: which ranks' own files one needs may differ by rank.
        """
        from ckptmirror.formats.dcp_metadata import METADATA_NAME
        from ckptmirror.formats.dcp_read import files_read
        from ckptmirror.formats.emergency import snapshot_files_read
        from ckptmirror.formats.sidecars import extra_files_read

        name = names.SaveName(self._meta.step)
        read = set(self.needs)
        try:
            if self._kind == "dcp":
                metadata = self._files.get(f"{name.dcp_dir}/{METADATA_NAME}")
                if metadata is None:
                    return None
                verify_file(self.path / metadata.path, metadata.digest)
                shards = files_read(self.path / name.dcp_dir, target)
                read |= {f"{name.dcp_dir}/{one}" for one in shards}
            which = snapshot_files_read if self._kind == "emergency" else extra_files_read
            read |= which(self.path, self._meta, target)
        except (IntegrityError, OSError):  # the vote finds what is wrong
            return None
        if len(read) == len(self._files):
            return None
        return frozenset(path for path in read if path not in self.needs or _is_of_one_rank(path))

    def need(self, paths: Collection[str] | None) -> None:
        """Add what a rank of the node reads (None: all) to what the view has to have.

        The order does not depend on what came first: the ranks of a node share the checks of these files by it.
        """
        self.needs = {
            path: one for path, one in self._files.items() if paths is None or path in paths or path in self.needs
        }

    def need_lists(self, ranks: Collection[int]) -> None:
        """Add the lists of tensors of these ranks to what the view has to have."""
        lists = {path: one for path, one in self._all.items() if is_list(path) and one.rank in ranks}
        self._files |= lists
        self.needs |= lists

    def got(self, paths: Iterable[str]) -> None:
        """Note that these files are in the view now."""
        self._has.update(paths)

    def look(self) -> Holding:
        """Link what this node saved itself, and say what it has and lacks.

        Raises:
            CkptMirrorError: The disk cannot be used.
        """
        with explained("link the save in", self.path):
            self._link_own()
        lacks = tuple(path for path in self.needs if path not in self._has)
        return Holding(frozenset(self._has), lacks, dict(self._unreadable))

    def _link_own(self) -> None:
        wanted = self._all if self._trusted or self._sends else self.needs
        listing = Listing(self._root)
        mine: dict[str, FileToRead] = {}
        for path, artifact in self._own().items():
            if path in self._has or path not in wanted or not wanted[path].digest.agrees_with(artifact.digest):
                continue
            fault = listing.fault_of(artifact.path, artifact.digest.size_bytes)
            if fault is None:
                mine[path] = FileToRead(self._root / artifact.path, artifact.digest)
            elif fault.unreadable:
                self._unreadable[path] = f"{self._root / artifact.path}: {fault.why}"
        found = [None] * len(mine) if self._trusted else read_all(list(mine.values()))
        for (path, own), wrong in zip(mine.items(), found, strict=True):
            if wrong is not None:
                if wrong.state == "unreadable":
                    self._unreadable[path] = f"{own.path}: {wrong.why}"
                continue
            try:
                _link(own.path, self.path / path)
                self._has.add(path)
            except FileNotFoundError:
                pass
            except IntegrityError as error:
                if is_not_readable_now(error.__cause__):
                    self._unreadable[path] = error.message

    def _own(self) -> dict[str, Artifact]:
        """Return the files of the save that metas on this disk name, by their plain paths.

        Without such a meta, files of their names and sizes, unless they would be taken as they are.
        """
        catalog = local_catalog(self._root, with_attempts=False)
        metas = catalog.metas_of(self._meta.save_id)
        if not metas and not self._trusted:
            return catalog.files_of(self._meta, ())
        return {names.plain(artifact.path): artifact for meta in metas for artifact in meta.artifacts}

    def with_own_names(self, why: str) -> str:
        """Return what is wrong with a file of the view, by the name that the file has when the view is gone."""
        for path, artifact in self._own().items():
            here, own = self.path / path, self._root / artifact.path
            with contextlib.suppress(OSError):
                if str(here) in why and here.samefile(own):
                    why = why.replace(str(here), str(own))
        return why

    def fetch(self, mirror: Mirror, on_mirror: Meta, paths: Sequence[str], asked: Asked, *, singly: bool) -> Gathered:
        """Fetch these files from a mirror.

        Args:
            mirror: The mirror.
            on_mirror: The save's meta there, which names them.
            paths: The files.
            asked: What it answered about their objects.
            singly: Whether those that are whole are fetched even if others are not.
        """
        by_path = {names.plain(artifact.path): artifact for artifact in on_mirror.artifacts}
        wanted = [replace(by_path[path], path=path, object=by_path[path].object_name) for path in paths]
        fetch = partial(self._fetch, mirror, on_mirror, asked.objects)
        found = fetch([one for one in wanted if not is_proof(one)], singly=singly)
        if not _is_about_files(found):
            return found
        lists = fetch([one for one in wanted if is_proof(one)], singly=True)
        if found.result is None and not _is_about_files(lists):
            found = lists  # else a list that is damaged costs the proof alone
        return replace(found, got=found.got | lists.got)

    def _fetch(
        self,
        mirror: Mirror,
        on_mirror: Meta,
        objects: Mapping[str, ObjectInfo],
        wanted: Sequence[Artifact],
        *,
        singly: bool,
    ) -> Gathered:
        try:
            self._fetch_all(mirror, on_mirror, objects, wanted)
        except CkptMirrorError as error:
            failed = _gathered(error)
        else:
            return Gathered(got=frozenset(one.path for one in wanted))
        if not (singly and len(wanted) > 1 and _is_about_files(failed)):
            return failed
        got: set[str] = set()
        for one in wanted:
            alone = self._fetch(mirror, on_mirror, objects, [one], singly=False)
            got |= alone.got
            if alone.error is not None:
                failed = alone
            if not _is_about_files(alone):
                break
        return replace(failed, got=frozenset(got))

    def _fetch_all(
        self, mirror: Mirror, on_mirror: Meta, objects: Mapping[str, ObjectInfo], wanted: Sequence[Artifact]
    ) -> None:
        for artifact in wanted:
            if not artifact.digest.agrees_with(self._files[artifact.path].digest):
                raise IntegrityError(f"{mirror.url}/{artifact.object_name} is not what the nodes saved.")
        incoming = incoming_of(mirror, on_mirror, wanted, lambda path: self.path / path, objects=objects)
        check_space(self.path, incoming)
        receive(incoming, on_bytes=lambda _received, _kept: None)
        self.got(artifact.path for artifact in wanted)


def _is_about_files(found: Gathered) -> bool:
    """Whether nothing but single files hindered a fetch, if anything did."""
    return found.result in (None, Result.BROKEN) or isinstance(found.error, ObjectNotFound)


def _is_of_one_rank(path: str) -> bool:
    """Whether a file holds what one rank had, which few others read: its extra state, or its part of a snapshot."""
    parsed = names.parse_name(path.partition("/")[0])
    return parsed is not None and parsed.role in ("extra", "emergency")


def _link(source: Path, target: Path) -> None:
    """Give a file another name, or copy it where the file system has no links.

    Raises:
        FileNotFoundError: It is gone.
        IntegrityError: It is not a regular file any more, or it cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(target.lstat(), source.lstat()):
            return
        target.unlink()
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        try:
            descriptor = open_regular(source)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise IntegrityError(f"{source} cannot be opened: {error.strerror}.") from error
        with os.fdopen(descriptor, "rb") as read, os.fdopen(create_temporary(target), "wb") as copy:
            shutil.copyfileobj(read, copy)


def bring_back(root: Path, directory: Path, meta: Meta, ranks: Ranks) -> Gathered:
    """Copy this node's share of an emergency snapshot from the persistent directory to its disk.

    All nodes together bring all of it, each the parts of its own ranks. One that is damaged there may be on a disk.
    """
    share = [rank for rank in range(meta.world_size) if rank % ranks.world_size in ranks.node_ranks]
    try:
        why = bring_snapshot(root, directory, meta, share)
    except CkptMirrorError as error:
        return _gathered(error)
    return Gathered(error=IntegrityError(why) if why else None)


def relay_s(plan: Sequence[Transfer], sizes_bytes: Mapping[str, int]) -> float:
    """Return how long a relay may take, in seconds: a node waits for its turn while others send, each as often."""
    return sum(sizes_bytes[transfer.path] for transfer in plan) / _SLOWEST_BYTES_PER_S


def relay(channel: Ranks, view: View, plan: Sequence[Transfer], sizes_bytes: Mapping[str, int]) -> Gathered:
    """Take part in sending files from node to node; the leaders of all nodes call this with the same plan."""
    not_sent: list[CkptMirrorError] = []
    not_written: list[CkptMirrorError] = []
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for transfer in plan:
        path, pieces = view.path / transfer.path, _pieces(buffer, sizes_bytes[transfer.path])
        chain = (transfer.source, *transfer.to)
        if channel.rank not in chain:
            continue
        place = chain.index(channel.rank)
        following = chain[place + 1] if place + 1 < len(chain) else None
        if place == 0:
            not_sent += _send(channel, path, transfer.to[0], pieces)
        else:
            not_written += _receive(channel, path, chain[place - 1], following, pieces)
            view.got([transfer.path])
    if not_sent:
        return _gathered(not_sent[0], of_device=Result.UNREADABLE)
    return _gathered(not_written[0]) if not_written else Gathered()


def _pieces(buffer: memoryview, size_bytes: int) -> Iterator[memoryview]:
    """Yield a part of the buffer for each piece of a file."""
    for start in range(0, size_bytes, len(buffer)):
        yield buffer[: min(len(buffer), size_bytes - start)]


def _send(channel: Ranks, path: Path, to: int, pieces: Iterable[memoryview]) -> list[CkptMirrorError]:
    """Send a file; where it cannot be read, as many other bytes, which its checksum gives away."""
    failures: list[CkptMirrorError] = []
    with contextlib.ExitStack() as opened:
        file: FileIO | None = None
        for piece in pieces:
            try:
                if not failures:
                    file = file or opened.enter_context(FileIO(open_regular(path)))
                    if file.readinto(piece) != len(piece):
                        failures.append(IntegrityError(f"{path} is shorter than it was saved."))
            except CkptMirrorError as error:
                failures.append(error)
            except OSError as error:
                failures.append(IntegrityError(f"{path} cannot be read: {error.strerror}."))
                failures[-1].__cause__ = error
            channel.send(piece, to)
    return failures


def _receive(
    channel: Ranks, path: Path, source: int, following: int | None, pieces: Iterable[memoryview]
) -> list[CkptMirrorError]:
    """Receive a file, and pass it on to the node that follows; where it cannot be written, to the end all the same."""
    failures: list[CkptMirrorError] = []
    with contextlib.ExitStack() as opened:
        try:
            with explained("write", path):
                path.unlink(missing_ok=True)
            descriptor = create_temporary(path)
            opened.callback(os.close, descriptor)
        except CkptMirrorError as error:
            failures.append(error)
        for piece in pieces:
            channel.receive(piece, source)
            if following is not None:
                channel.send(piece, following)
            try:
                written = len(piece) if failures else 0
                while written < len(piece):
                    written += os.write(descriptor, piece[written:])
            except OSError as error:
                failures.append(disk_error(error, "write", path))
                failures[-1].__cause__ = error
    return failures


def _gathered(error: CkptMirrorError, *, of_device: Result = Result.NOT_BROUGHT) -> Gathered:
    """Return what an error means for the copy that was being gathered, or, of this node's disk, for this start."""
    if isinstance(error, LocalStorageFull):
        return Gathered(Result.NO_ROOM, error)
    if isinstance(error, IntegrityError) and is_not_readable_now(error.__cause__):
        return Gathered(of_device, error)
    return Gathered(Result.BROKEN if isinstance(error, IntegrityError) else Result.NOT_BROUGHT, error)
