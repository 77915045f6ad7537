"""Destination: what lies in a directory at one step, and under which names a save of that step may come in.

Rules:
* Nothing that is not ours is touched: a name that no valid meta explains, and whose bytes are not those of the save
  that comes in, stays where it is, and the other names are used.
* What a crash left between publishing and the meta is recognised by its checksums and taken over, not fetched again.
* A meta in the trash condemns the files that it names, unless a meta that stands names them too: so a replacement that
  was cut short is finished by the next call. A file of another size is not what it named, and stays.
* In a training root only metas of the very save that is staged condemn anything: another save is rotation's to delete.
* All names of one save have the same tag.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import BrokenMeta, DestinationOccupied, IntegrityError
from ckptmirror.core.model import Artifact, Meta, top_names
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.trash import parsed_in_trash
from ckptmirror.local import files
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import LocalSave, read_inventory
from ckptmirror.local.listing import Listing

__all__ = [
    "ByTop",
    "Destination",
    "below_top",
    "by_top",
    "is_training_root",
    "make_control_dir",
    "make_real_dirs",
    "with_tag",
]

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


def below_top(artifacts: Iterable[Artifact]) -> set[str]:
    """Return the artifacts' paths below the name directly below the root; "" for one that is that file itself."""
    return {artifact.path.partition("/")[2] for artifact in artifacts}


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

    Args:
        replaces: The save whose metas in the trash condemn files; None: any save's do.

    Attributes:
        saves: Every save of the step whose meta is valid, whole or not.
        condemned: Names that only metas in the trash name, each with what those name below it.
    """

    def __init__(self, root: Path, step: int, *, replaces: str | None = None) -> None:
        self.root = root
        self.step = step
        self._replaces = replaces
        inventory = read_inventory(root)
        valid = [*inventory.saves, *inventory.incomplete]
        self.saves: list[LocalSave] = [save for save in valid if save.meta.step == step]
        standing = {name for save in valid for name in self.names_of(save)}
        self.condemned = {name: below for name, below in self._named_by_trash() if name not in standing}

    def names_of(self, save: LocalSave) -> list[str]:
        """Return the names directly below the root that a save occupies."""
        return [*top_names(save.meta.artifacts), save.meta_path.relative_to(self.root).parts[0]]

    def find(self, save_id: str) -> LocalSave | None:
        """Return the save with this id: a whole one, or one that was not staged, before others."""
        mine = [save for save in self.saves if save.meta.save_id == save_id]
        mine.sort(key=lambda save: (save.why != "", save.meta.staged_from is not None))
        return mine[0] if mine else None

    def trashed_metas(self) -> Iterator[Meta]:
        """Yield the metas of this step that lie in the trash."""
        trash = self.root / names.TRASH_DIR
        if not trash.is_dir():
            return
        for entry in sorted(trash.iterdir()):
            parsed = parsed_in_trash(entry)
            if parsed is None or parsed.role != "meta":
                continue
            try:
                meta = meta_from_bytes(files.read_limited(entry, META_LIMIT_BYTES))
            except (BrokenMeta, IntegrityError, FileNotFoundError):
                continue
            if meta.step == self.step:
                yield meta

    def interrupted(self, save_id: str) -> Meta | None:
        """Return the meta of this very save that lies in the trash: what it names, the save holds here.

        It was to be written anew under another name when a call was cut short, or a rotation was.
        """
        mine = [meta for meta in self.trashed_metas() if meta.save_id == save_id]
        return max(mine, key=lambda meta: len(meta.artifacts)) if mine else None

    def _named_by_trash(self) -> Iterator[tuple[str, set[str]]]:
        metas = [meta for meta in self.trashed_metas() if self._replaces in (None, meta.save_id)]
        for name, artifacts in by_top(artifact for meta in metas for artifact in meta.artifacts).items():
            below = below_top(artifacts)
            is_file = below == {""}
            if any(self.has_sizes(name, [one]) for one in artifacts) if is_file else (self.root / name).is_dir():
                yield name, below

    # -- names ----------------------------------------------------------------------------------------------

    def choose_tag(self, save_id: str, arriving: ByTop, same: LocalSave | None) -> str:
        """Choose the tag of the save's names: the one it has here, else "" where that is free, else its digits.

        ``arriving`` is what the save will hold, by untagged top name; ``same`` is the save as it stands here, if any.

        Raises:
            DestinationOccupied: All names are taken by what ckptmirror did not put there.
        """
        tags = ["", save_id[:8]]
        here = [same.meta.tag] if same is not None else []
        begun = (tag for tag in tags if self._is_begun(save_id, tag, arriving))  # found by reading: only if need be
        in_the_way: list[str] = []
        for tag in chain(here, begun, tags):
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
        """Whether these artifacts lie under a top name, byte for byte (their own tops do not count)."""
        if not self.has_sizes(name, artifacts):
            return False
        try:
            for artifact in artifacts:
                verify_file(self.root / _moved(artifact, name), artifact.digest)
        except (FileNotFoundError, NotADirectoryError, IntegrityError):
            return False
        return True

    def has_sizes(self, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether each artifact lies under a top name with exactly its size; never through a link."""
        listing = Listing(self.root)
        return not any(listing.fault_of(_moved(a, name), a.digest.size_bytes) for a in artifacts)

    def strangers(self, name: str, below: Collection[str]) -> list[str]:
        """Return what lies in a directory besides ``below``; it was not put there by ckptmirror."""
        listing = Listing(self.root)
        found = listing.files_below(name) if listing.is_dir(name) else []
        return sorted({path.partition("/")[2] for path in found} - set(below))

    # -- the trash ------------------------------------------------------------------------------------------

    def finish_replacing(self) -> None:
        """Move to trash what only metas in the trash name, and delete it. A stranger in a directory stays there."""
        trash = self.root / names.TRASH_DIR
        if not trash.is_dir():
            return
        condemned = Destination(self.root, self.step, replaces=self._replaces).condemned
        for name, below in sorted(condemned.items()):
            paths = sorted(f"{name}/{inner}" for inner in below) if self.strangers(name, below) else [name]
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    files.move_to_trash(self.root, self.root / path)
        if condemned:
            files.fsync_dir(self.root)
        for entry in sorted(trash.iterdir()):
            parsed = parsed_in_trash(entry)
            # The meta of another step may be what another process finishes its replacing by.
            if parsed is None or parsed.role != "meta" or parsed.step == self.step:
                files.remove_tree_in_trash(self.root, entry)


def _moved(artifact: Artifact, name: str) -> str:
    """The artifact's path under another top name."""
    _, slash, below = artifact.path.partition("/")
    return name + slash + below


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
