"""What must hold on disk and mirror after a kill, at any moment, and what more after the next start has ended.

Rules:
* Everything is judged from the files and the mirror's objects, by this file's own means where it is cheap: sizes and
  crc32c of the bytes that lie there, against what was acknowledged.
* Every function returns sentences that say what is wrong; an empty list means that all is well.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmirror import find_local_checkpoint_steps, resolve_resume_path
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import AttemptList, Meta
from ckptmirror.flow.places.catalog import Catalog, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from tests.kit.roots import assert_sound

__all__ = ["Place", "newest_was_found", "wrong_after_kill", "wrong_after_recovery"]

Facts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Place:
    """Where a story happened."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path / "root"

    @property
    def mirror(self) -> Path:
        return self.path / "mirror"

    def promises(self) -> list[dict[str, Any]]:
        """What was acknowledged, in order."""
        acks = self.path / "acks.jsonl"
        return [json.loads(line) for line in acks.read_text().splitlines()] if acks.exists() else []

    def local(self) -> Catalog:
        return local_catalog(self.root)

    def mirrored(self) -> Catalog | None:
        if not self.mirror.is_dir():
            return None
        store = open_store(f"file://{self.mirror}", retry=False)
        return mirror_catalog(Mirror(store.url, True, store))


def facts_at(directory: Path, meta: Meta, *, objects: bool) -> Facts:
    """Size and crc32c, by path, of what really lies where a meta says."""
    found: Facts = {}
    for artifact in meta.artifacts:
        path = directory / (artifact.object_name if objects else artifact.path)
        if path.is_file():
            digest = digest_file(path)
            found[artifact.path] = (digest.size_bytes, digest.crc32c)
    return found


def untagged(facts: Facts) -> Facts:
    """The same by the paths' plain names: a copy may lie under others."""
    return {names.untagged(path): found for path, found in facts.items()}


def named(meta: Meta) -> Facts:
    """Size and crc32c by path, as the meta says."""
    return {a.path: (a.digest.size_bytes, a.digest.crc32c) for a in meta.artifacts}


def wrong_after_kill(place: Place) -> list[str]:
    """Say what must never be seen, at whatever point a process died."""
    if not place.root.is_dir():
        return [] if not place.promises() else ["the root is gone"]
    wrong = []
    inventory = read_inventory(place.root)
    wrong += [f"a meta without its files: {save.meta_path.name}: {save.why}" for save in inventory.incomplete]
    wrong += [f"a broken meta: {item.path}: {item.why}" for item in inventory.broken]
    local, mirrored = place.local(), place.mirrored()
    problems = mirrored.problems if mirrored else {}
    wrong += [f"the mirror advertises what is not whole: {name}: {why}" for name, why in problems.items()]
    whole: dict[str, list[Facts]] = {}
    persistent = local_catalog(place.path / "persistent")
    for catalog, directory in ((mirrored, place.mirror), (local, place.root), (persistent, place.path / "persistent")):
        for save_id, meta in (catalog.saves if catalog else {}).items():
            facts = facts_at(directory, meta, objects=catalog is mirrored)
            if facts != named(meta):
                wrong.append(f"step {meta.step} is advertised in {directory.name}, but its bytes differ")
            else:
                whole.setdefault(save_id, []).append(untagged(facts))
    steps = {meta.step for meta in local.saves.values() if meta.kinds != ("emergency",)}
    if not set(find_local_checkpoint_steps(place.root)) <= steps:
        wrong.append(f"find_local_checkpoint_steps says {find_local_checkpoint_steps(place.root)}, whole are {steps}")
    wrong += _broken_promises(place, whole, mirrored)
    wrong += _dangling_latest(place, local)
    if mirrored is not None and mirrored.attempts is not None and local.attempts is not None:
        wrong += _decided_elsewhere(local.attempts, mirrored.attempts)
    return wrong


def _decided_elsewhere(here: AttemptList, there: AttemptList) -> list[str]:
    """Where an attempt of this root starts from stands on the disk before it stands on the mirror."""
    known = {attempt.id: attempt for attempt in there.attempts}
    both = [(a, known[a.id]) for a in here.attempts if a.id in known]
    wrong = [f"attempt {a.number} is decided on the mirror alone" for a, b in both if b.decided and not a.decided]
    contradictions = [a for a, b in both if a.decided and b.decided and a.parent != b.parent]
    return wrong + [f"attempt {a.number} has two parents" for a in contradictions]


def _broken_promises(place: Place, whole: dict[str, list[Facts]], mirrored: Catalog | None) -> list[str]:
    wrong = []
    for promise in place.promises():
        expected = untagged({path: (facts[0], facts[1]) for path, facts in promise["files"].items()})
        copies = whole.get(promise["save_id"], [])
        newer_there = mirrored is not None and any(meta.step > promise["step"] for meta in mirrored.saves.values())
        if not copies and newer_there and all(path.startswith("emergency_") for path in promise["files"]):
            continue  # a newer save on the mirror stands in for an emergency snapshot (docs/adr/0003)
        if not copies:
            wrong.append(f"step {promise['step']} was acknowledged ({promise['what']}) and is whole nowhere")
        elif not any(expected.items() <= copy.items() for copy in copies):  # a staged copy may hold one kind only
            wrong.append(f"step {promise['step']} was acknowledged, and no copy has all its bytes")
        if promise["what"] == "mirrored" and (mirrored is None or promise["save_id"] not in mirrored.saves):
            wrong.append(f"step {promise['step']} was acknowledged as mirrored, but the mirror does not have it")
    return wrong


def _dangling_latest(place: Place, local: Catalog) -> list[str]:
    """``latest`` may be behind, but must not name a step that is not whole; a rotation may have taken its target."""
    latest = place.root / names.LATEST_NAME
    if not latest.is_symlink():
        return []
    target = os.readlink(latest)
    tops = {artifact.path.partition("/")[0] for meta in local.saves.values() for artifact in meta.artifacts}
    if target not in tops and os.path.lexists(place.root / target):
        return [f"latest names {target}, which no whole save owns"]
    return []


def wrong_after_recovery(place: Place, *, mirrored: bool = True) -> list[str]:
    """Say what the next start, once it has ended, should have put in order."""
    wrong = wrong_after_kill(place)
    inventory = read_inventory(place.root)
    wrong += [f"a temporary is left: {path}" for path in inventory.temporaries]
    wrong += [f"{path} is left in the trash" for path in inventory.trash]
    # An emergency snapshot that was cut short is never loaded, but stays: a person may still want to look at it.
    wrecks = [item for item in inventory.foreign if item.path.relative_to(place.root).parts[0].startswith("emergency_")]
    wrong += [f"nobody owns {item.path.name}: {item.why}" for item in inventory.foreign if item not in wrecks]
    wrong += [
        f"a temporary is left: {path}" for path in (place.root / names.CONTROL_DIR).iterdir() if path.suffix == ".tmp"
    ]
    latest = place.root / names.LATEST_NAME
    if latest.is_symlink() and not latest.exists():
        wrong.append(f"latest names {os.readlink(latest)}, which is gone")
    local = place.local()
    wrong += _wrong_records(place, local, mirrored)
    wrong += _wrong_attempts(place, local, mirrored)
    resume_path = resolve_resume_path(place.root)
    if resume_path is None or not resume_path.exists():
        wrong.append(f"there is nothing to resume from: {resume_path}")
    return wrong


def newest_was_found(place: Place) -> list[str]:
    """Say whether the next start found less than what had been acknowledged last."""
    found = json.loads((place.path / "found.json").read_text())
    promised = max((promise["step"] for promise in place.promises() if promise["step"] < 1000), default=None)
    if promised is None or (found is not None and found >= promised):
        return []
    return [f"resumed from {found}, but {promised} was acknowledged"]


def _wrong_records(place: Place, local: Catalog, mirrored: bool) -> list[str]:
    wrong = []
    with UploadsTable.open(place.root / names.TABLE_NAME) as table:
        assert_sound(table)
        known = {save.save_id: save for save in table.saves()}
        records = table.records()
    wrong += [f"step {save.step} was never released" for save in known.values() if not save.released]
    wrong += [f"{r.path} is {r.state.value}: {r.reason}" for r in records if r.state is not RecordState.VERIFIED]
    on_disk = {save_id: meta for save_id, meta in local.saves.items() if meta.kinds != ("emergency",)}
    wrong += [f"step {known[i].step} has records, but no files" for i in known.keys() - on_disk.keys()]
    wrong += [f"step {on_disk[i].step} has no records" for i in on_disk.keys() - known.keys()]
    catalog = place.mirrored()
    if mirrored and catalog is not None:
        wrong += [f"step {meta.step} is not on the mirror" for i, meta in on_disk.items() if i not in catalog.saves]
    return wrong


def _wrong_attempts(place: Place, local: Catalog, mirrored: bool) -> list[str]:
    here = attempts_from_bytes((place.root / names.ATTEMPTS_NAME).read_bytes())
    wrong = _inconsistent(here)
    if mirrored:
        there = attempts_from_bytes((place.mirror / names.WRITER_NAME).read_bytes())
        known = {attempt.id: attempt for attempt in here.attempts}  # one that died before its first save is here alone
        wrong += [f"the mirror lists attempt {a.number} otherwise" for a in there.attempts if known.get(a.id) != a]
        newest = max(here.attempts, key=lambda attempt: (attempt.number, attempt.id))
        if newest not in there.attempts:
            wrong.append(f"the mirror does not list attempt {newest.number}, the newest here")
    known = {attempt.id for attempt in here.attempts}
    wrong += [f"step {m.step} is of an unknown attempt" for m in local.saves.values() if m.attempt.id not in known]
    standing = local.lineage().standing_by_save()
    wrong += [f"step {local.saves[i].step} is off every lineage" for i, what in standing.items() if what == "unknown"]
    return wrong


def _inconsistent(attempts: AttemptList) -> list[str]:
    numbers = [attempt.number for attempt in attempts.attempts]
    if len(set(numbers)) != len(numbers):
        return [f"two attempts have one number: {numbers}"]
    newest = max(attempts.attempts, key=lambda attempt: attempt.number)
    return [] if newest.decided else [f"attempt {newest.number} ended undecided"]
