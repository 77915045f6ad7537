"""Legacy checkpoints in a directory: found by name, with the ``meta.json`` that describes each.

A legacy writer left ``dist_ckpt_000200/`` or ``dcp_000200/`` (a DCP directory) or ``model_000200.pt``; ``meta.json``
and ``extra_state.pt`` inside or beside it; ``extra_000200.pt`` beside it, one for all ranks.

Rules:
* Legacy checkpoints are read, never written: names, sizes and ``meta.json`` only. Below the directory no link is
  followed.
* A checkpoint is listed only with DCP's ``.metadata`` (or its model file) and a ``meta.json`` that describes it: one
  inside it; or one beside it that names its step, or names no step if there is only one.
* ``dcp_*`` and ``model_*`` are ckptmirror's names too. A checkpoint that a ckptmirror meta or sidecar names is an
  incomplete ckptmirror save, not a legacy checkpoint. So is one without a ``meta.json`` inside, in a directory that
  ckptmirror saves to.
* Nobody signed them, so in a process that demands signatures none is listed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptmirror.core import names, signing
from ckptmirror.core.errors import BrokenMeta, CkptMirrorError
from ckptmirror.core.legacy_meta import LegacyMeta, legacy_meta_from_bytes
from ckptmirror.core.model import Kind
from ckptmirror.local.files import read_limited
from ckptmirror.local.listing import Listing

__all__ = ["OlderCheckpoint", "find_older"]

_META = names.build_name(names.ParsedName("legacy_meta"))
_EXTRA = names.build_name(names.ParsedName("legacy_extra_state"))
_META_LIMIT_BYTES = 64 * 1024 * 1024
_KIND_OF: dict[names.Role, Kind] = {"legacy_dcp": "dcp", "dcp": "dcp", "model": "model"}
_OF_OURS: frozenset[names.Role] = frozenset({"meta", "optim", "extra", "tensors"})


@dataclass(frozen=True, slots=True)
class OlderCheckpoint:
    """One legacy checkpoint.

    Attributes:
        name: The DCP directory, or the model file, in ``root``.
        meta: The content of the ``meta.json`` that describes it.
        extras: Files of extra state, relative to ``root``; the first is the one to read.
        why: Why it is not listed as one; "" if it is.
        is_broken: Whether the reason is that something contradicts it, rather than that something is missing.
        is_told: Whether there is a ``meta.json`` at all, even if it describes another step.
    """

    root: Path
    step: int
    kind: Kind
    name: str
    meta: LegacyMeta = field(default_factory=LegacyMeta)
    extras: tuple[str, ...] = ()
    size_bytes: int = 0
    why: str = ""
    is_broken: bool = False
    is_told: bool = False

    @property
    def path(self) -> Path:
        """The DCP directory or the model file."""
        return self.root / self.name

    @property
    def extra(self) -> Path | None:
        """The file of extra state to read."""
        return self.root / self.extras[0] if self.extras else None

    @property
    def is_loadable(self) -> bool:
        """Whether it is loaded when a person names it: also if the ``meta.json`` beside it names another step."""
        return not self.why or (self.is_told and not self.is_broken and self.name.startswith("dist_ckpt_"))


@dataclass(frozen=True, slots=True)
class _Beside:
    """The files beside the checkpoints: the content of ``meta.json``, or why it cannot be trusted."""

    meta: LegacyMeta | None
    fault: str
    has_extra: bool
    extras: frozenset[int]
    steps: frozenset[int]

    def speaks_for(self, step: int) -> bool:
        if self.meta is None:
            return False
        return self.meta.step == step if self.meta.step is not None else len(self.steps) == 1


def find_older(root: Path) -> list[OlderCheckpoint]:
    """Return the legacy checkpoints in a directory, by step; also those that cannot be listed, with the reason."""
    try:
        listed = {entry.name: entry for entry in os.scandir(root)}
    except OSError:
        return []  # the caller that lists the saves reports it
    parsed = {name: one for name in listed if (one := names.parse_name(name)) is not None}
    candidates = dict(_candidates(root, listed, parsed))
    if not candidates:
        return []
    meta, fault = _meta_at(root / _META)
    beside = _Beside(
        meta,
        fault,
        _is_file(root / _EXTRA),
        frozenset(one.step for one in parsed.values() if one.role == "legacy_extra" and one.step is not None),
        frozenset(one.step for one in candidates.values() if one.step is not None),
    )
    found = [_judged(root, name, one, beside) for name, one in candidates.items()]
    return sorted(found, key=lambda one: (one.step, one.kind, one.name))


def _candidates(
    root: Path, listed: dict[str, os.DirEntry[str]], parsed: dict[str, names.ParsedName]
) -> Iterator[tuple[str, names.ParsedName]]:
    ours = {one.step for one in parsed.values() if one.role in _OF_OURS and not one.tag}
    in_training = (root / names.ATTEMPTS_NAME).exists()
    for name, one in parsed.items():
        kind = _KIND_OF.get(one.role)
        if kind is None or one.tag:
            continue
        if listed[name].is_dir(follow_symlinks=False) != (kind == "dcp"):
            continue
        inside = kind == "dcp" and _is_file(root / name / _META)
        if one.role != "legacy_dcp" and (one.step in ours or (in_training and not inside)):
            continue
        if one.role == "legacy_dcp" or inside or _is_file(root / _META):
            yield name, one


def _judged(root: Path, name: str, parsed: names.ParsedName, beside: _Beside) -> OlderCheckpoint:
    step, kind = parsed.step or 0, _KIND_OF[parsed.role]
    meta, fault = _meta_at(root / name / _META) if kind == "dcp" else (None, "")
    has_one_inside = meta is not None or bool(fault)
    if not has_one_inside:
        fault = beside.fault
        meta = beside.meta if beside.speaks_for(step) else None
    why, is_broken = _why_not(root, name, kind)
    is_told = not why and (has_one_inside or beside.meta is not None)
    if not why and fault:
        why, is_broken = fault, True
    elif not why and meta is None:
        why = _without_meta(name, beside)
    elif not why and meta is not None and meta.step not in (None, step):
        why, is_broken = f"its meta.json says that its step is {meta.step}", True
    if signing.current().is_signed is not None:
        why, is_broken = "it is not signed, which verify_keys demands", True
    return OlderCheckpoint(
        root=root,
        step=step,
        kind=kind,
        name=name,
        meta=meta or LegacyMeta(),
        extras=tuple(_extras(root, name, step, kind, beside)),
        size_bytes=sum(map(_size_of, _files(root, name))),
        why=why,
        is_broken=is_broken,
        is_told=is_told,
    )


def _without_meta(name: str, beside: _Beside) -> str:
    if beside.meta is None:
        return f"there is no meta.json inside or beside {name}"
    if beside.meta.step is None:
        return "there are several steps, and the meta.json beside them does not say which one it describes"
    return f"the meta.json beside it is of step {beside.meta.step}"


def _why_not(root: Path, name: str, kind: Kind) -> tuple[str, bool]:
    """Return what is wrong with the tensors' files, and whether they are broken rather than missing."""
    main, says = (root / name / ".metadata", ".metadata") if kind == "dcp" else (root / name, name)
    try:
        status = main.lstat()
    except OSError:
        return f"it has no {says}, so it is not a whole DCP checkpoint", False
    if not stat.S_ISREG(status.st_mode):
        return f"{says} is not a regular file", True
    return ("", False) if status.st_size else (f"{says} is empty", True)


def _extras(root: Path, name: str, step: int, kind: Kind, beside: _Beside) -> Iterator[str]:
    if kind == "dcp" and _is_file(root / name / _EXTRA):
        yield f"{name}/{_EXTRA}"
    if step in beside.extras:
        yield names.build_name(names.ParsedName("legacy_extra", step))
    said = beside.meta.step if beside.meta is not None else None
    if beside.has_extra and (beside.speaks_for(step) or (len(beside.steps) == 1 and said in (None, step))):
        yield _EXTRA


def _meta_at(path: Path) -> tuple[LegacyMeta | None, str]:
    """Read a ``meta.json``; None if there is none, and why it cannot be trusted."""
    if not os.path.lexists(path):
        return None, ""
    try:
        return legacy_meta_from_bytes(read_limited(path, _META_LIMIT_BYTES)), ""
    except BrokenMeta as error:
        return None, error.message
    except (CkptMirrorError, OSError) as error:
        return None, f"meta.json cannot be read: {error}"


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _files(root: Path, name: str) -> list[Path]:
    listing = Listing(root)
    found = [root / path for path in (listing.files_below(name) if listing.is_dir(name) else [name])]
    return [path for path in found if _is_file(path)]


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # it was removed meanwhile
        return 0
