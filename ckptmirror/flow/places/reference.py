"""Reference: splits what a person types into a place and a name there. No other code does.

Rules:
* Only the text, names and links are read, and no meta. ``resolve`` finds the save behind the name; ``verify`` also
  looks at saves that are not whole.
* The path of a mirror on this machine means its URL: its list, and the names of its objects, are not those of a root.
* ``latest`` must point at one name beside it; otherwise it is refused. Any other link to a checkpoint is followed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound, UsageError
from ckptmirror.core.model import KINDS, Kind
from ckptmirror.local.storage_errors import is_there
from ckptmirror.local.table_place import is_mirror
from ckptmirror.stores import normalise_url

__all__ = ["CheckpointReference", "Located", "list_hint", "locate", "place_of"]

_RESUMABLE: frozenset[names.Role] = frozenset({*KINDS, "legacy_dcp"})
_NOT_A_SAVE: frozenset[names.Role] = frozenset({"tmp", "part", "latest", "writer", "control", "legacy_extra_state"})


@dataclass(frozen=True)
class CheckpointReference:
    """One checkpoint: where, which step, which kind.

    Attributes:
        dir: The directory that holds the save, or a mirror's URL.
        save_id: None for a legacy checkpoint.
        path: On the local disk: the DCP directory, the model file or the emergency directory.
    """

    dir: Path | str
    step: int
    kind: Kind
    save_id: str | None = field(default=None, compare=False)
    path: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Located:
    """A place, and the name in it that was given.

    Attributes:
        place: A directory, or a mirror's URL, also where the path of a mirror was given.
        name: The name of a save, or of a part of one, directly in the place; "" for the place as a whole.
        parsed: The parsed name; None without one.
        link: The path of ``latest``, if that was given; ``name`` is where it points.
    """

    place: Path | str
    name: str = ""
    parsed: names.ParsedName | None = None
    link: Path | None = None


def locate(reference: str | os.PathLike[str]) -> Located:
    """Split a reference into a place and a name.

    Raises:
        CheckpointNotFound: The path does not exist, or ``latest`` does not point at a checkpoint beside it.
        LocalStorageUnwritable: This user may not look there.
        UsageError: It is neither a directory nor the name of a checkpoint, or it is no path at all.
    """
    if not isinstance(reference, str | os.PathLike):
        raise UsageError(
            f"{reference!r} is not a path or a URL.",
            hint="Give the path of a save, or of the directory that holds it; `ckptmirror ls DIR` lists a directory.",
        )
    text = os.fspath(reference)
    if "://" in text:
        base, _, last = text.rstrip("/").rpartition("/")
        parsed = _parse_save(last)
        return Located(base, last, parsed) if parsed is not None else Located(text)
    path = Path(text).absolute()
    if not is_there(path):
        raise _missing(text, path)
    if path.is_symlink() and path.name == names.LATEST_NAME:
        target = os.fspath(path.readlink())
        parsed = names.parse_name(target)
        if parsed is None or parsed.role not in _RESUMABLE:
            raise CheckpointNotFound(
                f"{path} points at {target}, which is not a checkpoint beside it.",
                hint=list_hint(path.parent),
            )
        return Located(path.parent, target, parsed, path)
    parsed = _parse_save(path.name)
    if parsed is not None and parsed.role == "legacy_meta":
        around = _parse_save(path.parent.name)
        if around is not None and around.role in ("legacy_dcp", "dcp"):
            return Located(path.parent.parent, path.parent.name, around)  # it describes its directory
    if parsed is not None:
        return Located(place_of(path.parent), path.name, parsed)
    if path.is_symlink() and _parse_save(path.resolve().name) is not None:
        return locate(path.resolve())
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a checkpoint.", hint="Name a model file, a DCP directory, a meta, or their directory."
        )
    return Located(place_of(path))


def place_of(path: Path) -> Path | str:
    """Return a directory that holds saves; of a mirror, its URL."""
    return normalise_url(str(path)) if is_mirror(path) else path


def list_hint(place: Path | str) -> str:
    """Return the hint that lists a place."""
    return f"List what there is with `ckptmirror ls {quote(str(place))}`."


def _missing(text: str, path: Path) -> CheckpointNotFound:
    """Return the error for a missing path; its hint lists what is beside it, or writes the URL that was meant."""
    hint = "Check the path."
    has_parent = os.path.isdir(path.parent)  # noqa: PTH112 - false for a name that is too long
    if _parse_save(path.name) is not None and has_parent:
        hint = f"List the checkpoints with `ckptmirror ls {quote(str(path.parent))}`."
    elif text == text.lstrip("./~") and not has_parent:
        from ckptmirror.stores.url_mistakes import nearest_urls  # only here: a mistake is rare

        urls = nearest_urls(text)
        hint += f" To read a mirror, write {urls[0]}." if urls else ""
    return CheckpointNotFound(f"{path} does not exist.", hint=hint)


def _parse_save(name: str) -> names.ParsedName | None:
    parsed = names.parse_name(name)
    return parsed if parsed is not None and parsed.role not in _NOT_A_SAVE else None
