"""References to legacy checkpoints, those that were saved before ckptmirror. They are never called whole.

Rules:
* Each one that is resolved is logged as a legacy checkpoint without checksums.
* They are read from a local disk only. They are not part of any lineage: no start continues from one by itself,
  rotation ignores them, and they are not uploaded as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, CheckpointNotFound, KindMismatch, UsageError
from ckptmirror.core.model import Attempt, Kind, Meta
from ckptmirror.flow.places.reference import CheckpointReference, list_hint
from ckptmirror.flow.places.select import READ_ORDER
from ckptmirror.local.legacy_listing import OlderCheckpoint, find_older

__all__ = [
    "ADOPT_HINT",
    "find_older",
    "look_up_older",
    "meta_of_older",
    "named_older",
    "newest_older",
    "not_on_a_mirror",
    "older_on_mirror",
    "older_steps",
]

_log = logging.getLogger("ckptmirror.legacy")
ADOPT_HINT = (
    "Make a save of it: in a new root, manager.resume(state), manager.load(state, reference=<its path>), "
    "manager.save(step, state)."
)


def named_older(root: Path, name: str, kind: Kind | None) -> CheckpointReference | None:
    """Return the legacy checkpoint called ``name``; None if there is none.

    Raises:
        CheckpointNotFound: It has no ``.metadata``, or no ``meta.json`` describes it.
        BrokenMeta: It, or its ``meta.json``, is broken.
        KindMismatch: ``name`` is a ``meta.json`` that describes no checkpoint of ``kind``.
    """
    parsed = names.parse_name(name)
    if parsed is not None and parsed.role == "legacy_meta":
        whole = [one for one in find_older(root) if not one.why]
        told = [one for one in whole if not (one.kind == "dcp" and (one.path / name).is_file())]  # none of its own
        return _newest(root, kind, told or whole)
    found = [one for one in find_older(root) if one.name == name]
    if not found:
        return None
    return _reference(found[0])


def newest_older(root: Path, kind: Kind | None) -> CheckpointReference | None:
    """Return the newest legacy checkpoint in a directory, dcp before model; None if there is none.

    Raises:
        KindMismatch: There is none of ``kind``.
        UsageError: Two directories hold its step.
    """
    found = find_older(root)
    whole = [one for one in found if not one.why]
    if not whole:
        for one in found[:1]:
            raise CheckpointNotFound(f"{root} holds no checkpoint. {one.path} is a legacy checkpoint, but {one.why}.")
        return None
    for one in found:
        if one.why and one.step >= max(other.step for other in whole):
            _log.warning("skipped %s: %s", one.path, one.why)
    return _newest(root, kind, whole)


def _newest(root: Path, kind: Kind | None, whole: list[OlderCheckpoint]) -> CheckpointReference | None:
    wanted = [one for one in whole if kind in (None, one.kind)]
    if not wanted:
        if whole:
            there = ", ".join(sorted({one.kind for one in whole}))
            raise KindMismatch(f"No step of {root} has kind {kind}; there are {there}.", hint=list_hint(root))
        return None
    best = max(wanted, key=lambda one: (one.step, -READ_ORDER.index(one.kind)))
    twins = [one.name for one in wanted if (one.step, one.kind) == (best.step, best.kind)]
    if len(twins) > 1:
        raise UsageError(f"{root} holds step {best.step} twice: {' and '.join(twins)}.", hint="Name one by its path.")
    return _reference(best)


def _reference(one: OlderCheckpoint) -> CheckpointReference:
    if not one.is_loadable:
        error = BrokenMeta if one.is_broken else CheckpointNotFound
        raise error(
            f"{one.path} is a legacy checkpoint, and ckptmirror cannot tell whether it is whole: {one.why}.",
            hint=f'If it is, put a meta.json with {{"step": {one.step}}} '
            + ("into it." if one.kind == "dcp" else "beside it."),
        )
    about = f" ({one.why})" if one.why else ""
    _log.warning("%s is a legacy checkpoint and has no checksums%s: it is read as it is", one.path, about)
    return CheckpointReference(one.root, one.step, one.kind, None, one.path)


def look_up_older(found: CheckpointReference) -> OlderCheckpoint:
    """Return the checkpoint that a reference of :func:`named_older` names, as it is now.

    Raises:
        CheckpointNotFound: It is gone.
    """
    if isinstance(found.dir, Path) and found.path is not None:
        for one in find_older(found.dir):
            if one.name == found.path.name:
                return one
    raise CheckpointNotFound(f"{found.path} is gone.")


def older_steps(root: Path, kinds: Iterable[Kind]) -> set[int]:
    """Return the steps of legacy checkpoints that have the tensors and a ``meta.json`` that describes them."""
    wanted = set(kinds)
    return {one.step for one in find_older(root) if one.kind in wanted and not one.why}


def meta_of_older(one: OlderCheckpoint) -> Meta:
    """Return its facts as a meta without ids and artifacts; ``fields`` is its ``meta.json``."""
    return Meta(
        run_id="",
        attempt=Attempt("", -1, None),
        step=one.step,
        save_id="",
        save_number=0,
        kinds=(one.kind,),
        world_size=0,
        nodes=1,
        node=0,
        artifacts=(),
        training_config=one.meta.training_config,
        metrics=one.meta.metrics,
        fields=one.meta.values,
    )


def older_on_mirror(listed: Iterable[str]) -> list[tuple[int, str]]:
    """Return step and name of each legacy DCP directory among the names on a mirror."""
    tops = {name.partition("/")[0] for name in listed}
    parsed = [(one, top) for top in sorted(tops) if (one := names.parse_name(top)) is not None]
    return [(one.step, top) for one, top in parsed if one.role == "legacy_dcp" and one.step is not None]


def not_on_a_mirror(url: str, name: str) -> CheckpointNotFound:
    """Return the error for a reference to a legacy checkpoint on a mirror."""
    return CheckpointNotFound(
        f"{url}/{name} is a legacy checkpoint and has no checksums: ckptmirror does not fetch it from a mirror.",
        hint="Copy it to a disk with a tool of your own, and give its path there.",
    )
