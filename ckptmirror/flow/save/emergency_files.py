"""The files of an emergency snapshot on the local disk: a directory with a meta for each rank, and a note of its name.

Rules:
* A snapshot is deleted in one step: its directory, with metas and files, is renamed into the trash.
* Only the ranks that write the snapshot need the note. It is deleted with the snapshot, or at a start, when no rank is
  writing.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Meta, new_id, top_names
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.local import directories, files, trash
from ckptmirror.local.listing import Listing
from ckptmirror.local.own_files import make_own_dir

__all__ = [
    "another_snapshot_in",
    "delete_emergency",
    "is_emergency",
    "meta_paths",
    "note_path",
    "read_note",
    "remove_what_is_stale",
    "write_note",
]

_NOTE_LIMIT_BYTES = 4096


def is_emergency(meta: Meta) -> bool:
    """Whether a save is an emergency snapshot."""
    return meta.kinds == ("emergency",)


def meta_paths(meta: Meta) -> list[str]:
    """Return the paths of a local save's metas: one, or for an emergency snapshot one for each rank that is here."""
    if not is_emergency(meta):
        return [names.SaveName(meta.step, meta.tag).meta]
    directories = dict.fromkeys(artifact.path.partition("/")[0] for artifact in meta.artifacts)
    ranks = sorted({artifact.rank for artifact in meta.artifacts if artifact.rank is not None})
    return [f"{name}/{names.emergency_meta_name(rank)}" for name in directories for rank in ranks]


def another_snapshot_in(root: Path, meta: Meta) -> str | None:
    """Name a meta of another snapshot in the directory of this one; None if there is none. A broken one names none."""
    for top in top_names(meta.artifacts):
        for path in sorted((root / top).glob("meta_rank*.json")):
            with contextlib.suppress(CkptMirrorError, OSError):
                other = meta_from_bytes(files.read_limited(path, META_LIMIT_BYTES))
                if other.save_id != meta.save_id:
                    return f"{top}/{path.name} belongs to another snapshot, {other.save_id[:8]}"
    return None


def delete_emergency(root: Path, meta: Meta) -> None:
    """Delete a snapshot that rotation no longer needs, and the note that named it."""
    for name in dict.fromkeys(artifact.path.partition("/")[0] for artifact in meta.artifacts):
        with contextlib.suppress(FileNotFoundError):  # a person deleted it first
            trash.move_to_trash(root, root / name)
    directories.fsync_dir(root)
    with contextlib.suppress(FileNotFoundError):
        trash.move_to_trash(root, note_path(root, meta.save_id))
    empty_trash(root)


def note_path(root: Path, save_id: str) -> Path:
    """Return the path of the note in which the ranks of a snapshot agree on its directory."""
    return root / names.CONTROL_DIR / f"emergency-{save_id[:8]}.json"


@dataclass(frozen=True)
class Note:
    """What the ranks of a snapshot agreed on.

    Attributes:
        directory: The snapshot's name.
        persistent_dir: The directory for its copy, if any.
    """

    directory: str
    persistent_dir: Path | None = None


def write_note(root: Path, save_id: str, directory: str, persistent_dir: Path | None) -> None:
    """Write the note of a snapshot.

    Raises:
        NameTaken: It exists already.
    """
    facts = {"directory": directory} | ({"persistent_dir": str(persistent_dir)} if persistent_dir is not None else {})
    make_own_dir(root / names.CONTROL_DIR)  # somebody may have deleted it
    # A temporary of its own: the final name decides who is first.
    files.write_bytes(note_path(root, save_id), json.dumps(facts).encode(), save_id=new_id())


def read_note(path: Path) -> Note:
    """Read the note of a snapshot.

    Raises:
        FileNotFoundError: There is no such note.
        ValueError: ckptmirror did not write it.
    """
    try:
        note = json.loads(files.read_limited(path, _NOTE_LIMIT_BYTES))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep") from error
    if not isinstance(note, dict) or not isinstance(note.get("directory"), str):
        raise ValueError(f"{path} is not a note of an emergency snapshot")
    persistent = note.get("persistent_dir")
    return Note(note["directory"], Path(persistent) if isinstance(persistent, str) else None)


def remove_what_is_stale(root: Path) -> list[str]:
    """Remove the notes of snapshots that are gone, and the directories in which no rank left anything.

    The caller holds the root lock, so that no rank is writing.
    """
    removed = []
    for name in Listing(root).names():
        parsed = names.parse_name(name)
        if parsed is not None and parsed.role == "emergency":
            with contextlib.suppress(OSError):  # it is not empty
                (root / name).rmdir()
                removed.append(name)
    for path in sorted((root / names.CONTROL_DIR).glob("emergency-*.json")):
        try:
            if os.path.lexists(root / read_note(path).directory):
                continue
        except FileNotFoundError:
            continue
        except (ValueError, CkptMirrorError, OSError):
            pass  # no rank can use this note
        with contextlib.suppress(FileNotFoundError):
            trash.move_to_trash(root, path)
            removed.append(path.name)
    return removed
