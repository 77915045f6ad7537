"""Destination: what lies in a directory at one step, and under which names a save of that step may come in.

Rules:
* Nothing that is not ours is touched: a name that no valid meta explains, and whose bytes are not those of the save
  that comes in, stays where it is, and the other names are used.
* What a crash left between publishing and the meta is recognised by its checksums and taken over, not fetched again.
* A meta in the trash condemns the files that it names, unless a meta that stands names them too: so a replacement that
  was cut short is finished by the next call.
* All names of one save have the same tag.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import BrokenMeta, DestinationOccupied, IntegrityError
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.flow.commit import top_names
from ckptmirror.local import crashpoints, files
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import LocalSave, read_inventory

__all__ = [
    "ByTop",
    "Destination",
    "by_top",
    "in_tree",
    "is_training_root",
    "make_durable",
    "make_real_dirs",
    "with_tag",
]

_META_LIMIT_BYTES = 64 * 1024 * 1024

ByTop = Mapping[str, Sequence[Artifact]]


def is_training_root(root: Path) -> bool:
    """Whether a trainer saves here."""
    return (root / names.ATTEMPTS_NAME).exists()


def with_tag(name: str, save_id: str, tag: str) -> str:
    """Return an untagged name as a save with ``tag`` ("" or the digits of its save id) has it."""
    return names.tagged(name, save_id) if tag else name


def by_top(artifacts: Iterable[Artifact]) -> dict[str, list[Artifact]]:
    """Group artifacts by the name directly below the root: a file, or a directory that is published as one."""
    grouped: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        grouped.setdefault(artifact.path.partition("/")[0], []).append(artifact)
    return grouped


def make_control_dir(root: Path) -> None:
    """Make ``root`` and its control directory.

    Raises:
        LocalStorageUnwritable: ``root`` is a file, or cannot be written.
        DestinationOccupied: A link stands in for the control directory.
    """
    files.make_dirs(root)
    if (root / names.CONTROL_DIR).is_symlink():
        raise DestinationOccupied(f"{root / names.CONTROL_DIR} is a symbolic link, and nothing is written through one.")
    files.make_dirs(root / names.CONTROL_DIR)


class Destination:
    """One step of one directory; the caller holds the directory's lock for that step.

    Attributes:
        saves: Every save of the step whose meta is valid, whole or not.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.root = root
        self.step = step
        inventory = read_inventory(root)
        valid = [*inventory.saves, *inventory.incomplete]
        self.saves: list[LocalSave] = [save for save in valid if save.meta.step == step]
        self.whole = {save.meta.save_id for save in inventory.saves}
        self.condemned = self._named_by_trash() - {name for save in valid for name in self.names_of(save)}

    def names_of(self, save: LocalSave) -> list[str]:
        """Return the names directly below the root that a save occupies."""
        return [*top_names(save.meta.artifacts), save.meta_path.relative_to(self.root).parts[0]]

    def find(self, save_id: str) -> LocalSave | None:
        """Return the save with this id, a whole one first."""
        mine = [save for save in self.saves if save.meta.save_id == save_id]
        mine.sort(key=lambda save: save.why != "")
        return mine[0] if mine else None

    def trashed_metas(self) -> Iterator[Meta]:
        """Yield the metas of this step that lie in the trash."""
        trash = self.root / names.TRASH_DIR
        if not trash.is_dir():
            return
        for entry in sorted(trash.iterdir()):
            parsed = names.parse_name(entry.name.rpartition(".")[0])
            if parsed is None or parsed.role != "meta":
                continue
            try:
                meta = meta_from_bytes(files.read_limited(entry, _META_LIMIT_BYTES))
            except (BrokenMeta, IntegrityError, FileNotFoundError):
                continue
            if meta.step == self.step:
                yield meta

    def _named_by_trash(self) -> set[str]:
        return {name for meta in self.trashed_metas() for name in top_names(meta.artifacts)}

    # -- names ----------------------------------------------------------------------------------------------

    def choose_tag(self, save_id: str, arriving: ByTop, same: LocalSave | None) -> str:
        """Choose the tag of the save's names: the one it has here, else "" where that is free, else its digits.

        ``arriving`` is what the save will hold, by untagged top name; ``same`` is the save as it stands here, if any.

        Raises:
            DestinationOccupied: All names are taken by what ckptmirror did not put there.
        """
        tags = ["", save_id[:8]]
        begun = [tag for tag in tags if self._is_begun(save_id, tag, arriving)]
        candidates = [*([same.meta.tag] if same is not None else []), *begun, *tags]
        in_the_way: list[str] = []
        for tag in dict.fromkeys(candidates):
            in_the_way = list(self._in_the_way(save_id, tag, arriving, same))
            if not in_the_way:
                return tag
        raise DestinationOccupied(f"{self.root} holds {', '.join(in_the_way[:5])}, which no valid meta explains.")

    def _is_begun(self, save_id: str, tag: str, arriving: ByTop) -> bool:
        """Whether a call that was cut short has published some of the save under this tag."""
        return any(self.holds(with_tag(top, save_id, tag), artifacts) for top, artifacts in arriving.items())

    def _in_the_way(self, save_id: str, tag: str, arriving: ByTop, same: LocalSave | None) -> Iterator[str]:
        own = set(self.names_of(same)) if same is not None else set()
        wanted = {with_tag(top, save_id, tag): artifacts for top, artifacts in arriving.items()}
        for entry in sorted(os.scandir(self.root), key=lambda entry: entry.name):
            parsed = names.parse_name(entry.name)
            if parsed is None or parsed.role == "tmp" or parsed.step != self.step or parsed.tag != tag:
                continue
            if entry.name in own or entry.name in self.condemned:
                continue
            if entry.name in wanted and self.holds(entry.name, wanted[entry.name]):
                continue
            yield entry.name

    def holds(self, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether exactly these artifacts lie under a top name, byte for byte (their own tops do not count)."""
        below = {artifact.path.partition("/")[2]: artifact for artifact in artifacts}
        path = self.root / name
        try:
            if "" in below:
                verify_file(path, below[""].digest)
                return True
            if set(in_tree(path)) != set(below):
                return False
            for inner, artifact in below.items():
                verify_file(path / inner, artifact.digest)
        except (FileNotFoundError, NotADirectoryError, IntegrityError):
            return False
        return True

    def has_sizes(self, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether each artifact lies under a top name with exactly its size."""
        for artifact in artifacts:
            inner = artifact.path.partition("/")[2]
            path = self.root / name / inner if inner else self.root / name
            try:
                found = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            if not stat.S_ISREG(found.st_mode) or found.st_size != artifact.digest.size_bytes:
                return False
        return True

    # -- the trash ------------------------------------------------------------------------------------------

    def finish_replacing(self) -> None:
        """Move to trash what the metas in the trash name and no standing meta does; then empty the trash."""
        if not (self.root / names.TRASH_DIR).is_dir():
            return
        condemned = Destination(self.root, self.step).condemned
        for name in sorted(condemned):
            with contextlib.suppress(FileNotFoundError):
                files.move_to_trash(self.root, self.root / name)
        if condemned:
            files.fsync_dir(self.root)
        files.empty_trash(self.root)


def in_tree(directory: Path) -> Iterator[str]:
    """Yield the relative path of everything below a directory that is not itself a real directory.

    Raises:
        NotADirectoryError: ``directory`` is a file or a link.
    """
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise NotADirectoryError(f"{directory} is not a directory.")
    for parent, below, leaves in os.walk(directory):
        inner = Path(parent).relative_to(directory)
        yield from (str(inner / name) for name in leaves)
        yield from (str(inner / name) for name in below if (Path(parent) / name).is_symlink())


def make_durable(path: Path) -> None:
    """Fsync a file or a whole directory that another call, or another program, wrote."""
    if path.is_dir():
        files.fsync_tree(path)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with crashpoints.around("file.fsync"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_real_dirs(root: Path, directory: Path) -> None:
    """Make ``directory``, below ``root``, of real directories: what else lies under one of its names goes to trash.

    Only for directories of temporaries, whose names carry a save id.
    """
    path = root
    for part in directory.relative_to(root).parts:
        path = path / part
        try:
            if not stat.S_ISDIR(path.lstat().st_mode):
                files.move_to_trash(root, path)
        except FileNotFoundError:
            pass
        files.make_dirs(path)
