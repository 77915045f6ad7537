"""Destination: the contents of a directory at one step, and the names under which a save of that step may be staged.

Rules:
* Files that are not ours are never touched. If no valid meta names a file, and its bytes are not those of the save that
  is staged, it stays, and the save uses its other names.
* Files that a crash left between publishing and the meta are recognised by their checksums and kept, not fetched again.
* The files that a meta in the trash names may be deleted ("condemned"), unless a meta outside the trash names them too.
  So the next call finishes an interrupted replacement. A file of another size is not the one it named, and stays.
* In a training root only metas of the staged save itself condemn files: only rotation deletes other saves.
* What another user owns (``own_files``) is not believed, be it a meta, a file or a directory. If it has a name of the
  staged save, it is fetched again and replaced. A start believes everything in its own root.
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
from ckptmirror.flow.places.trash import not_replaced, parsed_in_trash
from ckptmirror.local import directories, files, trash
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import LocalSave, read_inventory
from ckptmirror.local.listing import Listing
from ckptmirror.local.own_files import has_trusted_owner

__all__ = [
    "ByTop",
    "Destination",
    "below_top",
    "by_top",
    "is_training_root",
    "make_control_dir",
    "make_real_dirs",
    "moved",
    "with_tag",
]

ByTop = Mapping[str, Sequence[Artifact]]


def is_training_root(root: Path) -> bool:
    """Whether a trainer saves here."""
    return (root / names.ATTEMPTS_NAME).exists()


def with_tag(name: str, save_id: str, tag: str) -> str:
    """Return the name that an untagged name has in a save with ``tag`` ("" or the digits of its save id)."""
    return names.tagged(name, save_id) if tag else name


def by_top(artifacts: Iterable[Artifact]) -> dict[str, list[Artifact]]:
    """Group artifacts by the name directly below the root: a file, or a directory that is published in one step."""
    grouped: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        grouped.setdefault(artifact.path.partition("/")[0], []).append(artifact)
    return grouped


def below_top(artifacts: Iterable[Artifact]) -> set[str]:
    """Return the artifacts' paths relative to the name directly below the root; "" for that file itself."""
    return {artifact.path.partition("/")[2] for artifact in artifacts}


def make_control_dir(root: Path) -> None:
    """Make ``root`` and its control directory.

    Raises:
        LocalStorageUnwritable: ``root`` is a file, or cannot be written.
        DestinationOccupied: The control directory is a symbolic link.
    """
    directories.make_dirs(root)
    if (root / names.CONTROL_DIR).is_symlink():
        raise DestinationOccupied(
            f"{root / names.CONTROL_DIR} is a symbolic link, and ckptmirror does not write through it."
        )
    directories.make_dirs(root / names.CONTROL_DIR)


class Destination:
    """One step of one directory; the caller holds the directory's lock for that step.

    Args:
        replaces: The save whose metas in the trash condemn files; None: those of any save do.
        own_root: Whether it is a trainer's root and the caller acts for that trainer.

    Attributes:
        saves: Every save of the step whose meta is valid, whole or not.
        planted: The same, where the meta is another user's.
        condemned: Names that only metas in the trash name, each with the paths that those name below it.
    """

    def __init__(self, root: Path, step: int, *, replaces: str | None = None, own_root: bool = False) -> None:
        self.root = root
        self.step = step
        self._replaces = replaces
        self._own_root = own_root
        self._place = root.stat()
        inventory = read_inventory(root)
        valid = [*inventory.saves, *inventory.incomplete]
        here = [save for save in valid if save.meta.step == step]
        self.planted: list[LocalSave] = [save for save in here if self.other_owner(save.meta_path) is not None]
        self.saves: list[LocalSave] = [save for save in here if save not in self.planted]
        standing = {name for save in valid for name in self.names_of(save)}
        self.condemned = {name: below for name, below in self._named_by_trash() if name not in standing}

    def names_of(self, save: LocalSave) -> list[str]:
        """Return the names directly below the root that a save occupies; of a planted one, those that are not ours."""
        occupied = [*top_names(save.meta.artifacts), save.meta_path.relative_to(self.root).parts[0]]
        if save in self.planted:
            return [name for name in occupied if self.other_owner(self.root / name) is not None]
        return occupied

    def find(self, save_id: str) -> LocalSave | None:
        """Return the save with this id; of several, a whole one first, then one that was not staged."""
        mine = [save for save in self.saves if save.meta.save_id == save_id]
        mine.sort(key=lambda save: (save.why != "", save.meta.staged_from is not None))
        return mine[0] if mine else None

    def other_owner(self, path: Path) -> int | None:
        """Return the id of another user who may change a path, since it or a directory on the way to it is theirs."""
        if self._own_root:
            return None
        for one in (path, *path.parents):
            if one == self.root:
                break
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not has_trusted_owner(facts := one.lstat(), self._place):
                    return facts.st_uid
        return None

    def trashed_metas(self) -> Iterator[Meta]:
        """Yield the metas of this step that are in the trash."""
        trash_dir = self.root / names.TRASH_DIR
        if not trash_dir.is_dir():
            return
        for entry in sorted(trash_dir.iterdir()):
            parsed = parsed_in_trash(entry)
            if parsed is None or parsed.role != "meta" or self.other_owner(entry) is not None:
                continue
            try:
                meta = meta_from_bytes(files.read_limited(entry, META_LIMIT_BYTES))
            except (BrokenMeta, IntegrityError, FileNotFoundError):
                continue
            if meta.step == self.step:
                yield meta

    def interrupted(self, save_id: str) -> Meta | None:
        """Return the meta of this save in the trash; the files that it names are here.

        A stage that was about to rewrite it under another name, or a rotation, was interrupted.
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

    def choose_tag(
        self, save_id: str, arriving: ByTop, same: LocalSave | None, replaced: Sequence[LocalSave] = ()
    ) -> str:
        """Choose the tag of the save's names: the one that it has here, else "" if that is free, else its digits.

        Args:
            save_id: The save's id.
            arriving: The files that the save will have, by untagged top name.
            same: The save as it is here now, if it is.
            replaced: Other saves here whose names it may take.

        Raises:
            DestinationOccupied: Files that ckptmirror did not put there have all the names.
        """
        tags = ["", save_id[:8]]
        here = [same.meta.tag] if same is not None else []
        begun = (tag for tag in tags if self._is_begun(save_id, tag, arriving))  # this reads files: only if necessary
        own = {name for save in (*replaced, *([same] if same is not None else [])) for name in self.names_of(save)}
        in_the_way: list[str] = []
        for tag in chain(here, begun, tags):
            in_the_way = list(self._in_the_way(save_id, tag, arriving, own))
            if not in_the_way:
                return tag
        raise DestinationOccupied(f"{self.root} holds {', '.join(in_the_way[:5])}, which no valid meta explains.")

    def _is_begun(self, save_id: str, tag: str, arriving: ByTop) -> bool:
        """Whether an interrupted call has published part of the save under this tag."""
        return any(self.holds(with_tag(top, save_id, tag), artifacts) for top, artifacts in arriving.items())

    def _in_the_way(self, save_id: str, tag: str, arriving: ByTop, own: Collection[str]) -> Iterator[str]:
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
        """Whether these artifacts are under a top name, byte for byte (their own top names are ignored)."""
        if not self.has_sizes(name, artifacts):
            return False
        try:
            for artifact in artifacts:
                verify_file(self.root / moved(artifact, name), artifact.digest)
        except (FileNotFoundError, NotADirectoryError, IntegrityError):
            return False
        return True

    def has_sizes(self, name: str, artifacts: Sequence[Artifact]) -> bool:
        """Whether each artifact is under a top name with its size; no link counts, and nothing of another user."""
        listing = Listing(self.root)
        return not any(
            listing.fault_of(moved(a, name), a.digest.size_bytes)
            or self.other_owner(self.root / moved(a, name)) is not None
            for a in artifacts
        )

    def strangers(self, name: str, below: Collection[str]) -> list[str]:
        """Return the files in a directory besides ``below``; ckptmirror did not put them there."""
        listing = Listing(self.root)
        found = listing.files_below(name) if listing.is_dir(name) else []
        return sorted({path.partition("/")[2] for path in found} - set(below))

    # -- the trash ------------------------------------------------------------------------------------------

    def finish_replacing(self) -> None:
        """Move files that only metas in the trash name to trash, and delete them. Other programs' files stay."""
        trash_dir = self.root / names.TRASH_DIR
        if not trash_dir.is_dir():
            return
        condemned = Destination(self.root, self.step, replaces=self._replaces, own_root=self._own_root).condemned
        for name, below in sorted(condemned.items()):
            paths = sorted(f"{name}/{inner}" for inner in below) if self.strangers(name, below) else [name]
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    trash.move_to_trash(self.root, self.root / path)
        if condemned:
            directories.fsync_dir(self.root)
        kept = {entry for entry, _, _ in not_replaced(read_inventory(self.root))}
        for entry in sorted({*trash_dir.iterdir()} - kept):
            parsed = parsed_in_trash(entry)
            # Another process may need the meta of another step to finish its own replacement.
            if parsed is None or parsed.role != "meta" or parsed.step == self.step:
                trash.remove_tree_in_trash(self.root, entry)


def moved(artifact: Artifact, name: str) -> str:
    """Return the artifact's path under another top name."""
    _, slash, below = artifact.path.partition("/")
    return name + slash + below


def make_real_dirs(root: Path, directory: Path) -> None:
    """Create ``directory`` below ``root`` from real directories; anything else that has one of its names goes to trash.

    So does a directory that another user planted, who could exchange its files once they are published. Only for
    directories of temporaries, whose names carry a save id.
    """
    path = root
    for part in directory.relative_to(root).parts:
        place, path = path.stat(), path / part
        try:
            facts = path.lstat()
            if not (stat.S_ISDIR(facts.st_mode) and has_trusted_owner(facts, place)):
                trash.move_to_trash(root, path)
        except FileNotFoundError:
            pass
        directories.make_dirs(path)
